// The machine and the sources of a benchmark run, for its result file.
#pragma once
#include <string>
#include <vector>

#include "cli/bench_scenario.h"
#include "cli/json.h"

namespace moxie::cli {

struct BenchMachine {
  Json record;                           // GPU, versions; on the CPU cores and system
  std::vector<std::string> pci_bus_ids;  // of every GPU; empty on the CPU
};
BenchMachine bench_machine(BackendKind backend);

// `git rev-parse HEAD` of the source tree, "-dirty" behind it when files differ; null without git.
Json source_commit();

}  // namespace moxie::cli
