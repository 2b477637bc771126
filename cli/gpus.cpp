// NVML is opened by name: it is not needed to build or to start this program. Only the few
// functions used here are declared; their forms are those of nvml.h.
#include "cli/gpus.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>

#if MOXIE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace moxie::cli {
namespace {

struct Close {
  void operator()(void* library) const { dlclose(library); }
};
using Library = std::unique_ptr<void, Close>;

std::string cuda_words(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// PCI bus ids come with 4 or 8 digits of domain, in either case: "0000:1b:00.0".
std::string short_bus_id(std::string id) {
  std::transform(id.begin(), id.end(), id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const std::size_t colon = id.find(':');
  return colon != std::string::npos && colon > 4 ? id.substr(colon - 4) : id;
}

class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW)) {
    loaded_ = library_ && call<int()>("nvmlInit_v2") == 0;
  }
  ~Nvml() {
    if (loaded_) call<int()>("nvmlShutdown");
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  bool loaded() const { return loaded_; }

  void describe(GpuMachineInfo& machine) const {
    std::array<char, 96> text{};
    if (ok<int(char*, unsigned)>("nvmlSystemGetDriverVersion", text.data(), 96u))
      machine.driver_version = text.data();
    int version = 0;
    if (ok<int(int*)>("nvmlSystemGetCudaDriverVersion_v2", &version))
      machine.driver_cuda = cuda_words(version);
    unsigned count = 0;
    ok<int(unsigned*)>("nvmlDeviceGetCount_v2", &count);
    for (unsigned i = 0; i < count; ++i) {
      Device device = nullptr;
      if (ok<int(unsigned, Device*)>("nvmlDeviceGetHandleByIndex_v2", i, &device))
        machine.gpus.push_back(describe(device));
    }
  }

 private:
  using Device = void*;
  struct PciInfo {  // nvmlPciInfo_t
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
  };
  struct Memory {  // nvmlMemory_t
    unsigned long long total, free, used;
  };
  static constexpr int kSmClock = 1, kMemoryClock = 2, kSwitch = 2;
  static constexpr unsigned kMaxLinks = 18;

  // The return code of a function; not 0 when the library is too old to have it.
  template <class Function, class... Arguments>
  int call(const char* function_name, Arguments... arguments) const {
    auto* function = reinterpret_cast<Function*>(dlsym(library_.get(), function_name));
    return function == nullptr ? -1 : function(arguments...);
  }
  template <class Function, class... Arguments>
  bool ok(const char* function_name, Arguments... arguments) const {
    return call<Function>(function_name, arguments...) == 0;
  }

  std::optional<int> clock(const char* function_name, Device device, int domain) const {
    unsigned mhz = 0;
    if (!ok<int(Device, int, unsigned*)>(function_name, device, domain, &mhz)) return std::nullopt;
    return static_cast<int>(mhz);
  }

  GpuInfo describe(Device device) const {
    GpuInfo gpu;
    std::array<char, 96> text{};
    if (ok<int(Device, char*, unsigned)>("nvmlDeviceGetName", device, text.data(), 96u))
      gpu.name = text.data();
    PciInfo pci{};
    if (ok<int(Device, PciInfo*)>("nvmlDeviceGetPciInfo_v3", device, &pci))
      gpu.pci_bus_id = short_bus_id(pci.id);
    Memory memory{};
    if (ok<int(Device, Memory*)>("nvmlDeviceGetMemoryInfo", device, &memory))
      gpu.memory_bytes = static_cast<std::int64_t>(memory.total);
    int major = 0, minor = 0;
    if (ok<int(Device, int*, int*)>("nvmlDeviceGetCudaComputeCapability", device, &major, &minor))
      gpu.major = major, gpu.minor = minor;
    gpu.sm_clock_mhz = clock("nvmlDeviceGetClockInfo", device, kSmClock);
    gpu.max_sm_clock_mhz = clock("nvmlDeviceGetMaxClockInfo", device, kSmClock);
    gpu.memory_clock_mhz = clock("nvmlDeviceGetClockInfo", device, kMemoryClock);
    gpu.max_memory_clock_mhz = clock("nvmlDeviceGetMaxClockInfo", device, kMemoryClock);
    unsigned milliwatts = 0;
    if (ok<int(Device, unsigned*)>("nvmlDeviceGetEnforcedPowerLimit", device, &milliwatts))
      gpu.power_limit_w = milliwatts * 1e-3;
    for (unsigned link = 0; link < kMaxLinks; ++link) {
      int active = 0, type = 0;
      if (!ok<int(Device, unsigned, int*)>("nvmlDeviceGetNvLinkState", device, link, &active) ||
          active == 0) {
        continue;
      }
      PciInfo remote{};
      const bool to_switch = ok<int(Device, unsigned, int*)>("nvmlDeviceGetNvLinkRemoteDeviceType",
                                                             device, link, &type) &&
                             type == kSwitch;
      const bool known = ok<int(Device, unsigned, PciInfo*)>("nvmlDeviceGetNvLinkRemotePciInfo_v2",
                                                             device, link, &remote);
      gpu.nvlinks.push_back(to_switch || !known ? "switch" : short_bus_id(remote.id));
    }
    return gpu;
  }

  Library library_;
  bool loaded_ = false;
};

#if MOXIE_HAS_CUDA
// Adds what the runtime knows, in its own order and only the GPUs it may use.
void describe_by_runtime(GpuMachineInfo& machine) {
  int version = 0, count = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) machine.runtime_cuda = cuda_words(version);
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0)
    machine.driver_cuda = cuda_words(version);
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    machine.runtime_error = error == cudaSuccess ? "it lists none" : cudaGetErrorString(error);
    return;
  }
  std::vector<GpuInfo> gpus;
  for (int device = 0; device < count; ++device) {
    char id[32] = {};
    cudaDeviceGetPCIBusId(id, sizeof id, device);
    GpuInfo gpu;
    for (const GpuInfo& known : machine.gpus) {
      if (known.pci_bus_id == short_bus_id(id)) gpu = known;
    }
    gpu.pci_bus_id = short_bus_id(id);
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) {
      gpu.name = properties.name;
      gpu.major = properties.major, gpu.minor = properties.minor;
      gpu.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
      gpu.num_sms = properties.multiProcessorCount;
    }
    int value = 0;
    if (cudaDeviceGetAttribute(&value, cudaDevAttrCooperativeLaunch, device) == cudaSuccess)
      gpu.cooperative_launch = value != 0;
    if (cudaDeviceGetAttribute(&value, cudaDevAttrMemoryPoolSupportedHandleTypes, device) ==
        cudaSuccess) {
      gpu.fabric_handles = (value & cudaMemHandleTypeFabric) != 0;
    }
    gpus.push_back(std::move(gpu));
  }
  machine.gpus = std::move(gpus);
  for (int from = 0; from < count; ++from) {
    std::vector<bool> row;
    for (int to = 0; to < count; ++to) {
      int can = from == to ? 1 : 0;
      if (from != to) cudaDeviceCanAccessPeer(&can, from, to);
      row.push_back(can != 0);
    }
    machine.peer_access.push_back(std::move(row));
  }
}
#endif

}  // namespace

GpuMachineInfo examine_gpus() {
  GpuMachineInfo machine;
  const Nvml nvml;
  machine.nvml = nvml.loaded();
  if (nvml.loaded()) nvml.describe(machine);
#if MOXIE_HAS_CUDA
  describe_by_runtime(machine);
#endif
  return machine;
}

}  // namespace moxie::cli
