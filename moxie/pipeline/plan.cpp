// Choosing defaults and judging plans. `check` is the gate: whatever it accepts must run to the end
// on every routing.
#include "moxie/pipeline/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "moxie/core/error.h"
#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/signals.h"
#include "moxie/pipeline/tiles.h"

namespace moxie {

const char* name(TaskOrder order) { return order == TaskOrder::slabs ? "slabs" : "lag"; }
const char* name(ExecMode mode) { return mode == ExecMode::fused ? "fused" : "split"; }
const char* name(SavePolicy save) {
  return save == SavePolicy::none ? "none" : save == SavePolicy::z ? "z" : "z+x";
}
const char* name(DispatchMode dispatch) { return dispatch == DispatchMode::pull ? "pull" : "push"; }
const char* name(CombineMode combine) {
  return combine == CombineMode::epilogue ? "epilogue" : "comm_workers";
}

const char* name(PlanOrigin origin) {
  switch (origin) {
    case PlanOrigin::caller: return "caller";
    case PlanOrigin::cache: return "cache";
    case PlanOrigin::planner: return "planner";
    case PlanOrigin::standard: return "default";
  }
  return "unknown";
}

std::string to_string(const Plan& p) {
  std::string text = fmt::format("{} {}", name(p.mode), name(p.order));
  if (p.order == TaskOrder::lag) text += fmt::format(" lag={}", p.lag_bands);
  if (p.dispatch != DispatchMode::pull) text += fmt::format(" dispatch={}", name(p.dispatch));
  if (p.combine != CombineMode::epilogue) text += fmt::format(" combine={}", name(p.combine));
  return text + fmt::format(
                    " slabs={} band={} minibatch={} capacity={} x_ring={} hidden_ring={} chunk={} "
                    "lag_chunks={} "
                    "backward_ring={} save={} saved_rows={} comm={} compute={}",
                    p.num_slabs, p.band_blocks, p.minibatch_blocks, p.capacity_rows,
                    p.x_ring_blocks, p.hidden_ring_blocks, p.chunk_blocks, p.lag_chunks,
                    p.backward_ring_blocks, name(p.save), p.saved_rows, p.comm_workers,
                    p.compute_workers);
}

namespace pipeline {
namespace {

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_plan, sentence);
}

void check_between(const char* option, std::int64_t value, std::int64_t lo, std::int64_t hi,
                   const std::string& why) {
  if (value >= lo && value <= hi) return;
  fail(fmt::format("plan.{} is {}, must be between {} and {} ({}); nearest legal value {}", option,
                   value, lo, hi, why, std::clamp(value, lo, hi)));
}

std::int64_t all_blocks(const Problem& problem, const Plan& plan) {
  return extents(problem, plan).blocks;
}

}  // namespace

Plan default_plan(const Problem&) { return {}; }

static std::int64_t most_local_experts(const Problem& p) {
  return ceil_div(p.num_experts, p.num_ranks);
}

std::int64_t worst_case_blocks(const Problem& p) {
  const std::int64_t rows = p.num_ranks * p.max_tokens * p.top_k;
  const std::int64_t experts = most_local_experts(p);
  // Full blocks plus one partial block per expert: the sum of ceil(rows_e / 128) is largest when
  // every expert but the fullest holds one row.
  const std::int64_t partial = std::min(experts, rows);
  return partial + (rows - partial) / kBlockRows;
}

static std::int64_t expected_rows_per_expert(const Problem& p) {
  return ceil_div(p.num_ranks * p.max_tokens * p.top_k, p.num_experts);
}
std::int64_t expected_rows(const Problem& p) {
  return expected_rows_per_expert(p) * most_local_experts(p);
}
std::int64_t expected_blocks(const Problem& p) {  // half of an expert's last block is empty
  return ceil_div(expected_rows(p), kBlockRows) + ceil_div(most_local_experts(p), 2);
}

// Blocks of which no memory is saved: less is not worth a wait or a product.
static constexpr std::int64_t kFewSlots = 128;

std::int64_t chosen_saved_rows(const Problem& problem, const Plan& plan) {
  if (plan.save == SavePolicy::none) return 0;
  if (plan.save == SavePolicy::z_and_x) return plan.capacity_rows;
  const std::int64_t blocks = expected_blocks(problem);
  return std::min(
      plan.capacity_rows,
      std::max(kFewSlots, blocks + expected_rows(problem) / kBlockRows / 16) * kBlockRows);
}

// Slots whose rings lie in the bytes of the forward's.
static std::int64_t slots_beside_forward(const Problem& problem, Plan plan) {
  constexpr std::int64_t kManySlots = 1024;
  // What is not legal is judged later.
  plan.capacity_rows =
      std::clamp(plan.capacity_rows, kBlockRows, worst_case_blocks(problem) * kBlockRows);
  const std::int64_t routed = plan.capacity_rows / kBlockRows;
  plan.x_ring_blocks = std::clamp<std::int64_t>(plan.x_ring_blocks, 1, routed);
  plan.hidden_ring_blocks = std::clamp<std::int64_t>(plan.hidden_ring_blocks, 1, routed);
  plan.backward_ring_blocks = 0;
  const WorkspaceLayout forward = workspace_layout(problem, plan);
  plan.backward_ring_blocks = kManySlots;
  const WorkspaceLayout many = workspace_layout(problem, plan);
  const std::int64_t slot = (many.wgrad_partial.offset - many.dy_ring.offset) / kManySlots,
                     bytes = forward.num_bytes - forward.dy_ring.offset -
                             forward.wgrad_partial.num_bytes - kRegionAlign;
  return std::max<std::int64_t>(bytes, 0) / slot;
}

// Of the widest expert where all get about equally many rows. One in two chunks has its sums put
// aside and loaded again: mixtral with chunks of 32 blocks for 32 to 33, 17.2 ms instead of 16.3.
static std::int64_t likely_expert_blocks(const Problem& problem) {
  const std::int64_t rows = expected_rows_per_expert(problem);
  return ceil_div(rows + rows / 8, kBlockRows) + 1;
}

std::int64_t chosen_backward_ring(const Problem& problem, const Plan& plan) {
  const std::int64_t blocks = all_blocks(problem, plan);
  if (plan.mode == ExecMode::split) return blocks;
  const std::int64_t expected =
      expected_blocks(problem) + (blocks - plan.capacity_rows / kBlockRows);
  const std::int64_t legal = min_backward_ring_blocks(std::max(plan.chunk_blocks, 1),
                                                      plan.lag_chunks, plan.minibatch_blocks);
  std::int64_t ring =
      std::max({kFewSlots, legal, expected * 7 / 8, slots_beside_forward(problem, plan)});
  // A few more for chunks that hold whole experts.
  const std::int64_t whole = min_backward_ring_blocks(likely_expert_blocks(problem),
                                                      plan.lag_chunks, plan.minibatch_blocks);
  if (plan.chunk_blocks == 0 && whole <= expected * 5 / 4) ring = std::max(ring, whole);
  return std::min(blocks, ring);
}

// dX of a chunk must come so many tiles after the chunk's first dgrad tile, or it waits for the
// last one: about five waves of an H200. qwen3 with 128 experts per rank, 237 tiles a chunk: lag 1
// took 5.30 ms, 2 4.74, 3 4.65, 4 4.64 (docs/decisions/010-instruction-cache.md). More than
// kMostLagChunks small chunks are not worth their slots.
static constexpr std::int64_t kLagTiles = 640, kMostLagChunks = 4;

// Expects capacity_rows; a chunk or a ring that is not chosen yet is no limit.
static std::int32_t chosen_lag(const Problem& problem, const Plan& plan) {
  std::int64_t blocks = ceil_div(expected_rows_per_expert(problem), kBlockRows);
  if (plan.chunk_blocks > 0) blocks = std::min<std::int64_t>(blocks, plan.chunk_blocks);
  const std::int64_t row_tiles =
      ceil_div(problem.intermediate, kWideDgradTileCols) + num_fc2_tiles(problem.hidden);
  const std::int64_t tiles =
      blocks * row_tiles + 3 * num_wgrad_tiles(problem.intermediate, problem.hidden);
  std::int64_t lag =
      std::min(ceil_div(kLagTiles, std::max<std::int64_t>(tiles, 1)), kMostLagChunks);
  if (plan.backward_ring_blocks > 0) {
    const std::int64_t chunk = std::max(plan.chunk_blocks, 1);
    lag = std::min(lag, (plan.backward_ring_blocks - plan.minibatch_blocks + 1) / chunk - 1);
  }
  return static_cast<std::int32_t>(std::max<std::int64_t>(lag, 1));
}

// Blocks of a chunk where the ring is smaller than the work: half of what the chunks in flight
// could have, or more if that holds the widest expert.
static std::int32_t chosen_chunk(const Problem& problem, const Plan& p) {
  const std::int64_t chunks = std::max<std::int64_t>(std::int64_t{p.lag_chunks} + 1, 1),
                     most = (p.backward_ring_blocks - p.minibatch_blocks + 1) / chunks,
                     share = std::max(p.backward_ring_blocks / (2 * chunks),
                                      likely_expert_blocks(problem));
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(std::min(share, most), 1, kMaxChunkBlocks));
}

Plan resolve(const Problem& problem, const Plan& plan) {
  Plan p = plan;
  if (p.capacity_rows == 0) p.capacity_rows = worst_case_blocks(problem) * kBlockRows;
  if (p.saved_rows < 0 || p.save == SavePolicy::none) p.saved_rows = chosen_saved_rows(problem, p);
  const std::int64_t routed = p.capacity_rows / kBlockRows;
  if (p.x_ring_blocks == 0) p.x_ring_blocks = routed;
  if (p.hidden_ring_blocks == 0) p.hidden_ring_blocks = routed;
  const std::int64_t blocks = all_blocks(problem, p);
  if (p.lag_chunks == 0) p.lag_chunks = chosen_lag(problem, p);
  if (p.backward_ring_blocks == 0) p.backward_ring_blocks = chosen_backward_ring(problem, p);
  if (p.chunk_blocks == 0) {
    p.chunk_blocks = p.backward_ring_blocks >= blocks
                         ? static_cast<std::int32_t>(std::clamp<std::int64_t>(
                               std::max(routed, blocks - routed), 1, kMaxChunkBlocks))
                         : chosen_chunk(problem, p);
  }
  p.num_slabs =
      static_cast<std::int32_t>(std::min<std::int64_t>(p.num_slabs, num_fc2_tiles(problem.hidden)));
  if (p.mode == ExecMode::split) {
    // Stage after stage: FC1 ends before FC2 begins, dgrad before dX.
    p.order = TaskOrder::slabs;
    p.lag_chunks = INT32_MAX;
  }
  // A lag beyond the last chunk means the same as one chunk more than there are.
  p.lag_chunks =
      static_cast<std::int32_t>(std::min<std::int64_t>(p.lag_chunks, extents(problem, p).chunks));
  return p;
}

void check(const Problem& problem, const Plan& p) {
  const std::string any = "a count";
  check_between("num_slabs", p.num_slabs, 1, kMaxSlabs, "one done-flag per slab");
  check_between("band_blocks", p.band_blocks, 1, 1 << 20, any);
  check_between("lag_bands", p.lag_bands, 1, 1 << 20,
                "FC2 of a band needs all its FC1 tiles first");
  check_between("minibatch_blocks", p.minibatch_blocks, 1, 1 << 20, any);
  check_between("chunk_blocks", p.chunk_blocks, 1, kMaxChunkBlocks, any);
  check_between("lag_chunks", p.lag_chunks, 1, INT32_MAX,
                "dX of a chunk needs all its dgrad tiles first");
  check_between("comm_workers", p.comm_workers, 0, 1024, "0: the backend's own choice");
  check_between("compute_workers", p.compute_workers, 1, 1024,
                "tiles must be computed by somebody");

  const std::int64_t worst = worst_case_blocks(problem) * kBlockRows;
  if (p.capacity_rows < kBlockRows || p.capacity_rows % kBlockRows != 0 ||
      p.capacity_rows > worst) {
    fail(
        fmt::format("plan.capacity_rows is {}, must be a multiple of {} from {} to the worst case "
                    "{}; nearest legal value {}",
                    p.capacity_rows, kBlockRows, kBlockRows, worst,
                    std::clamp(align_up(std::max<std::int64_t>(p.capacity_rows, 1), kBlockRows),
                               kBlockRows, worst)));
  }
  check_between("saved_rows", p.saved_rows, 0, p.capacity_rows, "at most the capacity");

  const std::int64_t routed = p.capacity_rows / kBlockRows, blocks = all_blocks(problem, p);
  if (blocks > kMaxPassBlocks) {
    fail(
        fmt::format("plan.capacity_rows {} makes up to {} blocks per pass, must be at most {} (a "
                    "row's place in a pass has 32 bits); nearest legal capacity_rows {}",
                    p.capacity_rows, blocks, kMaxPassBlocks,
                    std::max<std::int64_t>(kMaxPassBlocks - (blocks - routed), 1) * kBlockRows));
  }
  // Tickets are claimed from 32-bit counters. The most numerous stream is the backward one.
  const std::int64_t wide = extents(problem, p).wide_intermediate;
  const std::int64_t tickets =
      blocks * (num_fc1_tiles(wide) + num_fc2_tiles(problem.hidden)) +
      extents(problem, p).chunks * 3 * num_wgrad_tiles(wide, problem.hidden);
  if (tickets > INT32_MAX) {
    fail(
        fmt::format("plan.capacity_rows {} makes up to {} tasks per pass, must be at most {}; "
                    "nearest legal capacity_rows {}",
                    p.capacity_rows, tickets, INT32_MAX,
                    std::max(kBlockRows, routed * INT32_MAX / tickets * kBlockRows)));
  }
  check_between("x_ring_blocks", p.x_ring_blocks,
                std::min(routed, min_x_ring_blocks(p.band_blocks, p.minibatch_blocks)), routed,
                "band_blocks + minibatch_blocks - 1 up to the capacity in blocks, or a wait could "
                "be for a later ticket");
  check_between("hidden_ring_blocks", p.hidden_ring_blocks,
                min_hidden_ring_blocks(p.order, p.band_blocks, p.lag_bands, routed), routed,
                p.order == TaskOrder::slabs
                    ? "slabs order holds the FC1 output of every block; order lag needs fewer"
                    : "(lag_bands + 1) * band_blocks up to the capacity in blocks");
  check_between(
      "backward_ring_blocks", p.backward_ring_blocks,
      std::min(blocks, min_backward_ring_blocks(p.chunk_blocks, p.lag_chunks, p.minibatch_blocks)),
      blocks, "(lag_chunks + 1) * chunk_blocks + minibatch_blocks - 1 up to all blocks");
  if (p.mode == ExecMode::split) {
    check_between("x_ring_blocks", p.x_ring_blocks, routed, routed,
                  "split mode pulls every row before FC1");
    check_between("backward_ring_blocks", p.backward_ring_blocks, blocks, blocks,
                  "split mode pulls every row before dgrad");
  }
}

}  // namespace pipeline
}  // namespace moxie
