// git is asked through a shell: there is no library call that a build without libgit2 could make.
#include "cli/bench_machine.h"

#include <cstdio>
#include <memory>

#include "cli/files.h"
#include "cli/gpus.h"

namespace moxie::cli {
namespace {

// First line of what the command prints.
std::string first_line(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  char line[256] = {};
  if (!pipe || std::fgets(line, sizeof line, pipe.get()) == nullptr) return "";
  std::string text = line;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string in_single_quotes(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

BenchMachine bench_machine(BackendKind backend) {
  if (backend == BackendKind::cpu) return {machine_json(), {}};
  const GpuMachineInfo info = examine_gpus();
  BenchMachine machine;
  for (const GpuInfo& gpu : info.gpus) machine.pci_bus_ids.push_back(gpu.pci_bus_id);
  machine.record = {{"gpu", info.gpus.at(0).name},
                    {"gpus", info.gpus.size()},
                    {"sms", info.gpus[0].num_sms.value_or(0)},
                    {"driver", info.driver_version},
                    {"driver_cuda", info.driver_cuda.value_or("")},
                    {"cuda", info.runtime_cuda.value_or("")}};
  return machine;
}

Json source_commit() {
  const std::filesystem::path root = source_tree();
  if (root.empty()) return nullptr;
  const std::string git = "git -C " + in_single_quotes(root.string()) + " ";
  const std::string commit = first_line(git + "rev-parse HEAD 2>/dev/null");
  if (commit.empty()) return nullptr;
  const bool dirty = !first_line(git + "status --porcelain 2>/dev/null").empty();
  return commit + (dirty ? "-dirty" : "");
}

}  // namespace moxie::cli
