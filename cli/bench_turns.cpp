#include "cli/bench_turns.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/errors.h"

namespace moxie::cli {

void measure_in_turns(std::vector<TimedRun>& runs, const Scenario& scenario, BenchRow& row,
                      std::vector<std::string>& notes, Progress& progress) {
  for (std::int64_t round = 0; round < scenario.rounds; ++round) {
    for (const BenchMode mode : scenario.modes) {
      std::vector<TimedRun> order = runs;
      if (round % 2 == 1) std::reverse(order.begin(), order.end());
      for (const TimedRun& run : order) {
        progress.show(fmt::format("{}: {} {}", row.shape, name(mode), run.name),
                      static_cast<double>(round) / static_cast<double>(scenario.rounds));
        try {
          row.samples[{run.name, mode}].push_back(run.measure(mode));
        } catch (const Failure& failure) {
          notes.push_back(
              fmt::format("{} was not measured on {}: {}", run.name, row.shape, failure.what()));
          for (const BenchMode any : scenario.modes) row.samples.erase({run.name, any});
          std::erase_if(runs, [&](const TimedRun& other) { return other.name == run.name; });
        }
      }
    }
  }
}

}  // namespace moxie::cli
