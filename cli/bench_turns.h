// Runs that take turns, so that a GPU that warms up treats them all alike.
#pragma once
#include <string>
#include <vector>

#include "cli/bench_report.h"
#include "cli/progress.h"

namespace moxie::cli {

// `scenario.rounds` times, in every mode, each of the runs: into row.samples. The order of the
// turns alternates from round to round, because a GPU's clock depends on what ran before. A run
// that throws Failure (a baseline) is left out from then on, with a line in `notes`.
void measure_in_turns(std::vector<TimedRun>& runs, const Scenario& scenario, BenchRow& row,
                      std::vector<std::string>& notes, Progress& progress);

}  // namespace moxie::cli
