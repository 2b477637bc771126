// The planner's search space: every tunable choice as an index into its few sensible values, and
// the Plan that a set of indices stands for.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "moxie/pipeline/plan.h"
#include "moxie/planner/choose.h"

namespace moxie::planner {

enum class Knob : std::int32_t {
  mode,          // fused, split
  order,         // slabs 1, 2, 4, 8; lag 2, 4
  band,          // blocks
  minibatch,     // blocks
  dispatch,      // pull, push
  combine,       // epilogue, communication workers
  comm_workers,  // CTAs that only communicate; 0: spare warps
  capacity,      // worst case, twice the expected rows; saved rows are those of the default plan
  x_ring,        // all, a few bands
  hidden_ring,   // all, as few as the order allows and a band more
  save,          // z, nothing, z and x
  chunk,         // whole experts or by the ring, blocks
  lag_chunks,
  backward_ring,  // the default plan's, all, half and a quarter of the expected blocks
};
inline constexpr std::size_t kNumKnobs = 14;

using KnobSet = std::array<std::int32_t, kNumKnobs>;  // value indices
inline std::int32_t& at(KnobSet& set, Knob k) { return set[static_cast<std::size_t>(k)]; }
inline std::int32_t at(const KnobSet& set, Knob k) { return set[static_cast<std::size_t>(k)]; }

std::int32_t num_values(Knob knob);
const char* name(Knob knob);
std::string value_name(Knob knob, std::int32_t value);
// Which passes a knob can change the time of.
bool touches(Knob knob, Direction direction);

// Empty when the combination is not legal (pipeline::check) or says the same as another one.
// `expected_rows`: of the busiest rank, what capacity and backward ring are sized by.
std::optional<Plan> build(const Problem& problem, const KnobSet& knobs, Passes passes,
                          std::int64_t expected_rows, std::int64_t num_sms);

}  // namespace moxie::planner
