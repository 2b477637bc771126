#include "moxie/planner/knobs.h"

#include <fmt/format.h>

#include <algorithm>

#include "moxie/core/error.h"
#include "moxie/pipeline/layout.h"

namespace moxie::planner {
namespace {

using pipeline::kBlockRows;

struct Values {
  const char* name;
  std::span<const std::int32_t> values;
};

constexpr std::int32_t kTwo[] = {0, 1};
constexpr std::int32_t kOrders[] = {4, 1, 2, 8, -2, -4};  // > 0: slabs; < 0: lag in bands
constexpr std::int32_t kBands[] = {8, 4, 16};
constexpr std::int32_t kMinibatches[] = {1, 2, 4, 16};
constexpr std::int32_t kCommWorkers[] = {0, 4, 8, 16, 32};
constexpr std::int32_t kSaves[] = {1, 0, 2};             // SavePolicy
constexpr std::int32_t kChunks[] = {0, 8, 4, 16, 32};    // 0: whole experts, or by the ring
constexpr std::int32_t kLagChunks[] = {0, 1, 2, 4};      // 0: enough
constexpr std::int32_t kBackwardRings[] = {0, 1, 2, 4};  // default, all, 1 / n of the expected

constexpr std::array<Values, kNumKnobs> kKnobs = {{
    {"mode", kTwo},
    {"order", kOrders},
    {"band_blocks", kBands},
    {"minibatch_blocks", kMinibatches},
    {"dispatch", kTwo},
    {"combine", kTwo},
    {"comm_workers", kCommWorkers},
    {"capacity_rows", kTwo},
    {"x_ring_blocks", kTwo},
    {"hidden_ring_blocks", kTwo},
    {"save", kSaves},
    {"chunk_blocks", kChunks},
    {"lag_chunks", kLagChunks},
    {"backward_ring_blocks", kBackwardRings},
}};

std::int32_t value(const KnobSet& set, Knob k) {
  return kKnobs[static_cast<std::size_t>(k)].values[static_cast<std::size_t>(at(set, k))];
}

}  // namespace

std::int32_t num_values(Knob knob) {
  return static_cast<std::int32_t>(kKnobs[static_cast<std::size_t>(knob)].values.size());
}
const char* name(Knob knob) { return kKnobs[static_cast<std::size_t>(knob)].name; }

std::string value_name(Knob knob, std::int32_t index) {
  const std::int32_t v =
      kKnobs[static_cast<std::size_t>(knob)].values[static_cast<std::size_t>(index)];
  switch (knob) {
    case Knob::mode: return name(static_cast<ExecMode>(v));
    case Knob::order: return fmt::format("{} {}", v > 0 ? "slabs" : "lag", std::abs(v));
    case Knob::dispatch: return name(static_cast<DispatchMode>(v));
    case Knob::combine: return name(static_cast<CombineMode>(v));
    case Knob::save: return name(static_cast<SavePolicy>(v));
    case Knob::comm_workers: return v == 0 ? "spare warps" : std::to_string(v);
    case Knob::capacity: return v == 0 ? "worst case" : "twice the expected";
    case Knob::x_ring:
    case Knob::hidden_ring: return v == 0 ? "all" : "small";
    case Knob::backward_ring:
      return v == 0   ? "as by default"
             : v == 1 ? "all"
                      : fmt::format("1/{} of the expected blocks", v);
    case Knob::lag_chunks: return v == 0 ? "enough" : std::to_string(v);
    case Knob::chunk: return v == 0 ? "whole experts, or by the ring" : std::to_string(v);
    default: return std::to_string(v);
  }
}

bool touches(Knob knob, Direction direction) {
  switch (knob) {
    case Knob::order:
    case Knob::band:
    case Knob::combine:
    case Knob::x_ring:
    case Knob::hidden_ring: return direction == Direction::forward;
    case Knob::chunk:
    case Knob::lag_chunks:
    case Knob::backward_ring: return direction == Direction::backward;
    default: return true;
  }
}

std::optional<Plan> build(const Problem& problem, const KnobSet& knobs, Passes passes,
                          std::int64_t expected_rows, std::int64_t num_sms) {
  Plan p;
  const std::int32_t order = value(knobs, Knob::order);
  p.mode = static_cast<ExecMode>(value(knobs, Knob::mode));
  p.order = order > 0 ? TaskOrder::slabs : TaskOrder::lag;
  p.num_slabs = order > 0 ? order : 1;
  p.lag_bands = order > 0 ? 2 : -order;
  p.band_blocks = value(knobs, Knob::band);
  p.minibatch_blocks = value(knobs, Knob::minibatch);
  p.dispatch = static_cast<DispatchMode>(value(knobs, Knob::dispatch));
  p.combine = static_cast<CombineMode>(value(knobs, Knob::combine));
  p.chunk_blocks = value(knobs, Knob::chunk);
  p.lag_chunks = value(knobs, Knob::lag_chunks);
  p.save = passes == Passes::forward ? SavePolicy::none
                                     : static_cast<SavePolicy>(value(knobs, Knob::save));
  p.comm_workers = value(knobs, Knob::comm_workers);
  const bool split = p.mode == ExecMode::split;
  // Said already by another combination.
  if (passes == Passes::forward && at(knobs, Knob::save) != 0) return {};
  if (split && (order != 4 || p.comm_workers != 0 || p.minibatch_blocks != 1)) return {};
  if (p.comm_workers >= num_sms / 2) return {};
  if (order > pipeline::num_fc2_tiles(problem.hidden)) return {};
  const std::int64_t experts = ceil_div(problem.num_experts, problem.num_ranks);
  const std::int64_t worst = pipeline::worst_case_blocks(problem);
  const std::int64_t twice = ceil_div(2 * expected_rows, kBlockRows) + experts;
  if (value(knobs, Knob::capacity) == 1) {
    if (twice >= worst) return {};
    p.capacity_rows = twice * kBlockRows;
  }
  Plan all = p;
  all.lag_chunks = 0;
  all = pipeline::resolve(problem, all);
  if (p.lag_chunks == all.lag_chunks) return {};
  const std::int64_t routed = all.capacity_rows / kBlockRows,
                     blocks = pipeline::extents(problem, all).blocks;
  const auto ring = [&](Knob knob, std::int64_t least, std::int64_t most, std::int64_t& field) {
    if (value(knobs, knob) == 0) return true;
    field = least;
    return least < most && !split;
  };
  const bool useful =
      ring(Knob::x_ring,
           pipeline::min_x_ring_blocks(p.band_blocks, p.minibatch_blocks) + 4 * p.band_blocks,
           routed, p.x_ring_blocks) &&
      ring(Knob::hidden_ring,
           p.order == TaskOrder::slabs ? routed : (p.lag_bands + 2) * p.band_blocks, routed,
           p.hidden_ring_blocks);
  if (!useful) return {};
  if (const std::int32_t slots = value(knobs, Knob::backward_ring); slots == 1) {
    if (split || all.backward_ring_blocks >= blocks) return {};
    p.backward_ring_blocks = blocks;
  } else if (slots > 1) {
    const std::int64_t expected = ceil_div(expected_rows, kBlockRows) + experts / 2;
    p.backward_ring_blocks =
        max64(expected / slots,
              pipeline::min_backward_ring_blocks(max64(p.chunk_blocks, 1), max64(p.lag_chunks, 1),
                                                 p.minibatch_blocks));
    if (split || p.backward_ring_blocks >= all.backward_ring_blocks) return {};
  }
  p = pipeline::resolve(problem, p);
  try {
    pipeline::check(problem, p);
  } catch (const Error&) {
    return {};
  }
  return p;
}

}  // namespace moxie::planner
