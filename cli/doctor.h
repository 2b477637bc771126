// What `moxie doctor` finds: one line each, and what is disabled by what is missing.
#pragma once
#include <string>
#include <vector>

#include "cli/gpus.h"
#include "cli/json.h"

namespace moxie::cli {

struct Finding {
  std::string what;
  bool good;
  std::string found;
  std::string consequence;  // of what is missing; empty when nothing is
};

// Driver, runtime, NVML, each GPU, peer access, NVLink, NCCL.
void add_gpu_findings(const GpuMachineInfo& machine, const NcclInfo& nccl,
                      std::vector<Finding>& findings);
Json gpus_json(const GpuMachineInfo& machine, const NcclInfo& nccl);

}  // namespace moxie::cli
