// What a pass runs on, as far as its speed depends on it: the part of a plan cache's key that is
// not the problem. Every backend describes itself; nobody guesses.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moxie {

struct MachineId {
  std::string backend;                              // "cpu", "cuda"
  std::string device;                               // "NVIDIA H200"; on the CPU its model
  std::int64_t num_sms = 0;                         // of each GPU; on the CPU its cores
  std::vector<std::int64_t> ranks_of_devices = {};  // [1, 1]: two GPUs with one rank each
  std::int32_t reserve_sms = 0, cluster_size = 0;   // CudaOptions
  std::string driver;                               // "13.0"; on the CPU empty
  std::string runtime;                              // "13.0"; on the CPU what multiplies tiles
  friend bool operator==(const MachineId&, const MachineId&) = default;
};

// The model of this machine's CPU, "unknown" where the system does not say.
std::string cpu_model();

}  // namespace moxie
