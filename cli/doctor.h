// What `moxie doctor` finds: one line each, and what is disabled by what is missing.
#pragma once
#include <string>
#include <vector>

#include "cli/gpus.h"
#include "cli/json.h"
#include "moxie/transport/nccl_library.h"

namespace moxie::cli {

struct Finding {
  std::string what;
  bool good;
  std::string found;
  std::string consequence;  // of what is missing; empty when nothing is
};

// Driver, runtime, NVML, each GPU, peer access, NVLink, NCCL.
void add_gpu_findings(const GpuMachineInfo& machine, const transport::NcclReport& nccl,
                      std::vector<Finding>& findings);
// Measures a device record on GPU 0 (and its link to GPU 1) into `file`; the exit code. Throws
// Failure where there is no GPU or no CUDA.
int record_device(const std::string& file);
Json gpus_json(const GpuMachineInfo& machine, const transport::NcclReport& nccl);

}  // namespace moxie::cli
