// The parts of `moxie tune`: which plans are measured, how the measured one is kept, what is said.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_report.h"
#include "moxie/planner/choose.h"

namespace moxie::cli {

struct Candidate {
  std::string what;                    // how it differs from the default plan
  Plan plan;                           // resolved, legal
  std::optional<double> predicted_ms;  // absent where the record is not of this machine
  bool first_choice = false;           // of the planner
};
// What a tuned plan is for. Direction::backward is of layers that train: a pass is a forward that
// saves and the backward.
planner::Passes passes_of(Direction direction);

// The default plan, then the planner's choice, then its next ones: at most `most` besides the
// default plan; a capacity is the proven one. Forward: they differ in what the forward pass feels
// only. Backward: in what the backward feels only; `forward_plan`, tuned before, is the first of
// them and what the others change.
std::vector<Candidate> tune_candidates(const BenchCase& layer, const planner::Machine& machine,
                                       const Scenario& scenario, std::size_t most,
                                       const std::optional<Plan>& forward_plan);

// Quotients of turns of the same round: what warms up or slows down treats both alike.
struct Ratios {
  double median = 1, p10 = 1, p90 = 1;
};
Ratios ratios_of(const std::vector<Timing>& times, const std::vector<Timing>& of_default);

inline constexpr const char* kDefaultRun = "default";
inline constexpr const char* kNoiseRun = "default again";  // the same plan, measured like another

// Faster beyond the noise: in nine of ten rounds (p90 < 1), and by more than the default plan beats
// itself in the best tenth of the rounds (median < p10 of "default again"). In modes after the
// first it must not be slower than the noise allows.
bool clearly_faster(const BenchRow& row, const std::string& run);

struct TuneResult {
  MachineId machine;
  BenchRow row;  // samples by run: kDefaultRun, kNoiseRun, "plan 1", ...
  std::vector<Candidate> candidates;
  std::vector<std::string> runs;     // [candidates] names in row.samples
  std::size_t kept = 0;              // 0: the default plan
  std::optional<Ratios> confirmed;   // of the best one, in further rounds against the default alone
  std::optional<std::size_t> tried;  // which one that was
  std::string stored;                // file; empty: nowhere
  std::vector<std::string> notes;    // plans that were left out, and why
};
std::string tune_table(const TuneResult& result);
Json to_json(const TuneResult& result);
Json measured_json(const TuneResult& result, const Scenario& scenario);  // for the plan cache

}  // namespace moxie::cli
