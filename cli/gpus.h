// What the GPUs of this machine are and how they are linked: through NVML, loaded when it is there
// (so that a build without CUDA sees them too), and through the CUDA runtime in builds that have
// it. What nobody could say is absent.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moxie::cli {

struct GpuInfo {
  std::string name, pci_bus_id;
  std::optional<int> major, minor;  // compute capability
  std::optional<std::int64_t> memory_bytes;
  std::optional<int> num_sms;
  std::optional<int> sm_clock_mhz, max_sm_clock_mhz, memory_clock_mhz, max_memory_clock_mhz;
  std::optional<double> power_limit_w;
  std::optional<bool> cooperative_launch;  // needed: all CTAs of a pass wait for each other
  std::optional<bool> fabric_handles;      // memory shared between the nodes of an NVLink domain
  std::vector<std::string> nvlinks;  // what each active link leads to: a PCI bus id, or "switch"
};

struct GpuMachineInfo {
  bool nvml = false;
  std::string driver_version;                            // "580.95", empty: NVML does not say
  std::optional<std::string> driver_cuda, runtime_cuda;  // "13.0"
  std::string runtime_error;                             // why the CUDA runtime sees no GPU
  std::vector<GpuInfo> gpus;                             // in the runtime's order where it has one
  std::vector<std::vector<bool>> peer_access;            // [from][to]; empty without the runtime
};
GpuMachineInfo examine_gpus();

}  // namespace moxie::cli
