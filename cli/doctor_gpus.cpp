// The GPU part of `moxie doctor`, in words and as JSON.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "cli/device_tensors.h"
#include "cli/doctor.h"

namespace moxie::cli {
namespace {

constexpr const char* kNoGpuPasses = "`moxie run --backend cuda` and World::cuda are refused";

void add(std::vector<Finding>& findings, std::string what, bool good, std::string found,
         std::string consequence = "") {
  findings.push_back({std::move(what), good, std::move(found), good ? "" : std::move(consequence)});
}

std::string clock_words(const char* label, std::optional<int> now, std::optional<int> max) {
  if (!now || !max) return "";
  return fmt::format(", {} {} of {} MHz", label, *now, *max);
}

std::string gpu_words(const GpuInfo& gpu) {
  std::string text = gpu.name;
  if (gpu.major) text += fmt::format(", compute capability {}.{}", *gpu.major, *gpu.minor);
  if (gpu.memory_bytes)
    text += fmt::format(", {:.0f} GB", static_cast<double>(*gpu.memory_bytes) * 1e-9);
  if (gpu.num_sms) text += fmt::format(", {} SMs", *gpu.num_sms);
  text += clock_words("SM", gpu.sm_clock_mhz, gpu.max_sm_clock_mhz);
  text += clock_words("memory", gpu.memory_clock_mhz, gpu.max_memory_clock_mhz);
  if (gpu.power_limit_w) text += fmt::format(", limit {:.0f} W", *gpu.power_limit_w);
  if (gpu.cooperative_launch) {
    text += *gpu.cooperative_launch ? ", cooperative launch" : ", no cooperative launch";
    text += gpu.fabric_handles.value_or(false) ? ", fabric handles" : ", no fabric handles";
  }
  return text;
}

void add_gpu(std::size_t device, const GpuInfo& gpu, std::vector<Finding>& findings) {
  const bool hopper = gpu.major == 9 && gpu.minor == 0;
  const bool cooperative = gpu.cooperative_launch.value_or(true);
  add(findings, fmt::format("GPU {}", device), hopper && cooperative, gpu_words(gpu),
      hopper ? "no cooperative launch: this GPU runs no pass"
             : "compute capability 9.0 (sm_90a) is needed: this GPU runs no pass");
}

void add_peers(const GpuMachineInfo& machine, std::vector<Finding>& findings) {
  std::vector<std::string> rows, apart;
  for (std::size_t from = 0; from < machine.peer_access.size(); ++from) {
    std::vector<std::string> row;
    for (std::size_t to = 0; to < machine.peer_access.size(); ++to) {
      const bool can = machine.peer_access[from][to];
      row.push_back(from == to ? "-" : can ? "yes" : "no");
      if (!can) apart.push_back(fmt::format("{} to {}", from, to));
    }
    rows.push_back(fmt::format("GPU {}: {}", from, fmt::join(row, " ")));
  }
  if (rows.size() < 2) return;
  add(findings, "peer access", apart.empty(), fmt::format("{}", fmt::join(rows, "; ")),
      fmt::format("no world over GPUs {}", fmt::join(apart, ", ")));
}

// "GPU 0: 18 to switches", "GPU 0: 4 to GPU 1".
void add_nvlinks(const GpuMachineInfo& machine, std::vector<Finding>& findings) {
  if (!machine.nvml || machine.gpus.size() < 2) return;
  std::vector<std::string> rows;
  bool all = true;
  for (std::size_t device = 0; device < machine.gpus.size(); ++device) {
    std::map<std::string, int> counts;
    for (const std::string& to : machine.gpus[device].nvlinks) {
      std::string words = to == "switch" ? "to switches" : "to " + to;
      for (std::size_t other = 0; other < machine.gpus.size(); ++other) {
        if (machine.gpus[other].pci_bus_id == to) words = fmt::format("to GPU {}", other);
      }
      ++counts[words];
    }
    std::vector<std::string> parts;
    for (const auto& [words, count] : counts) parts.push_back(fmt::format("{} {}", count, words));
    all = all && !counts.empty();
    rows.push_back(
        fmt::format("GPU {}: {}", device,
                    parts.empty() ? "no link" : fmt::format("{}", fmt::join(parts, ", "))));
  }
  add(findings, "NVLink", all, fmt::format("{}", fmt::join(rows, "; ")),
      "rows travel over PCIe between GPUs without a link: many times slower");
}

void add_nccl(const NcclInfo& nccl, std::vector<Finding>& findings) {
  const std::string needed = nccl_words(kNeededNccl);
  add(findings, "NCCL", nccl.found && nccl.version >= kNeededNccl,
      !nccl.found ? "libnccl.so.2 is not on the library path"
                  : fmt::format("{}, {} or newer needed", nccl_words(nccl.version), needed),
      fmt::format("no ranks in several processes, which need {} (not built yet in any case); the "
                  "NCCL baseline of `moxie bench layer` uses the one that PyTorch brings",
                  needed));
}

template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

}  // namespace

void add_gpu_findings(const GpuMachineInfo& machine, const NcclInfo& nccl,
                      std::vector<Finding>& findings) {
  add(findings, "CUDA backend", built_with_cuda(),
      built_with_cuda() ? fmt::format("built with CUDA {}: forward and backward",
                                      machine.runtime_cuda.value_or("of unknown version"))
                        : "built without CUDA",
      fmt::format("{} (`make cuda` builds the command with CUDA)", kNoGpuPasses));
  const std::string driver =
      machine.driver_version.empty() ? "" : fmt::format("{}, ", machine.driver_version);
  add(findings, "GPU driver", machine.driver_cuda.has_value(),
      machine.driver_cuda ? fmt::format("{}for CUDA up to {}", driver, *machine.driver_cuda)
                          : "no NVIDIA driver answers",
      kNoGpuPasses);
  add(findings, "NVML", machine.nvml,
      machine.nvml ? "libnvidia-ml.so.1" : "libnvidia-ml.so.1 cannot be used",
      "clocks, power limits and NVLink links are not known");
  const std::string why = machine.runtime_error.empty() ? "" : " (" + machine.runtime_error + ")";
  const bool usable = !machine.gpus.empty() && machine.runtime_error.empty();
  add(findings, "CUDA GPUs", usable,
      machine.gpus.empty() ? "none" + why : std::to_string(machine.gpus.size()) + why,
      fmt::format("{}; the GPU tests are skipped", kNoGpuPasses));
  for (std::size_t device = 0; device < machine.gpus.size(); ++device)
    add_gpu(device, machine.gpus[device], findings);
  add_peers(machine, findings);
  add_nvlinks(machine, findings);
  add_nccl(nccl, findings);
}

Json gpus_json(const GpuMachineInfo& machine, const NcclInfo& nccl) {
  Json gpus = Json::array();
  for (const GpuInfo& gpu : machine.gpus) {
    gpus.push_back({{"name", gpu.name},
                    {"pci_bus_id", gpu.pci_bus_id},
                    {"compute_capability",
                     gpu.major ? Json(fmt::format("{}.{}", *gpu.major, *gpu.minor)) : Json()},
                    {"memory_bytes", or_null(gpu.memory_bytes)},
                    {"sms", or_null(gpu.num_sms)},
                    {"sm_clock_mhz", or_null(gpu.sm_clock_mhz)},
                    {"max_sm_clock_mhz", or_null(gpu.max_sm_clock_mhz)},
                    {"memory_clock_mhz", or_null(gpu.memory_clock_mhz)},
                    {"max_memory_clock_mhz", or_null(gpu.max_memory_clock_mhz)},
                    {"power_limit_w", or_null(gpu.power_limit_w)},
                    {"cooperative_launch", or_null(gpu.cooperative_launch)},
                    {"fabric_handles", or_null(gpu.fabric_handles)},
                    {"nvlinks", gpu.nvlinks}});
  }
  return {
      {"built_with_cuda", built_with_cuda()},
      {"driver_version", machine.driver_version.empty() ? Json() : Json(machine.driver_version)},
      {"driver_cuda", or_null(machine.driver_cuda)},
      {"runtime_cuda", or_null(machine.runtime_cuda)},
      {"nvml", machine.nvml},
      {"gpus", gpus},
      {"peer_access", machine.peer_access.empty() ? Json() : Json(machine.peer_access)},
      {"nccl", nccl.found ? Json(nccl_words(nccl.version)) : Json()},
      {"nccl_needed", nccl_words(kNeededNccl)}};
}

}  // namespace moxie::cli
