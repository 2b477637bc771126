// What only the GPU keeps in a rank's workspace, behind the regions of layout.h. Plain functions of
// problem and plan: whoever sizes a GPU asks them without one.
#pragma once
#include <cstdint>
#include <vector>

#include "moxie/pipeline/layout.h"

namespace moxie::pipeline {

// CTAs of a rank that sort its routes; every CTA reads the counts of all: 64 KiB at 256 experts.
inline constexpr std::int32_t kMaxSortCtas = 64;

// What the rank's schedule says to its other CTAs, and after the pass to the host.
struct ScheduleResult {
  std::int32_t num_blocks;
  std::int32_t push_blocks;  // forward: PushTable::num_blocks
  std::int32_t num_chunks;   // backward
  std::uint32_t verdict;     // Verdict
};
struct PassWords {
  std::uint32_t num_counted;  // CTAs whose route counts are written
  std::uint32_t num_placed;   // CTAs whose routes are placed and shared rows weighed
  std::uint32_t bad_route;    // see schedule::RouteSort
};

// A token crosses the link once where the ring keeps the rows of the whole pass. (Its place among
// all ranks' tokens is kept in 32 bits.)
inline bool pulls_once(const Problem& p, const Plan& plan) {
  return plan.dispatch == DispatchMode::pull && p.num_ranks > 1 &&
         p.num_ranks * p.max_tokens <= INT32_MAX &&
         plan.x_ring_blocks >= plan.capacity_rows / kBlockRows;
}
// In the backward, as long as slots are used for the first time.
inline bool backward_pulls_once(const Problem& p) {
  return p.num_ranks > 1 && p.num_ranks * p.max_tokens <= INT32_MAX;
}

// The forward's FC1 fetches each row from where its token lies, instead of from a ring with a copy
// for each expert: where no token has to be pulled twice, nobody keeps the rows, and a row is not
// loaded so often (by every column tile of FC1) that a copy costs less than to fetch it
// (docs/decisions/012-gathered-rows.md). (Places are kept in 31 bits, in 16-byte chunks.)
inline constexpr std::int64_t kMaxGatheredLoads = 16;
inline bool gathers_rows(const Problem& p, const Plan& plan) {
  const std::int64_t rows = max64(p.max_tokens, plan.capacity_rows);
  return num_fc1_tiles(p.intermediate) <= kMaxGatheredLoads &&
         plan.dispatch == DispatchMode::pull && plan.save != SavePolicy::z_and_x &&
         (p.num_ranks == 1 || pulls_once(p, plan)) &&
         rows * p.hidden * size_bytes(p.dtype) / 16 <= INT32_MAX;
}

struct CudaWorkspaceLayout {
  Region sort_counts;          // i32 [kMaxSortCtas, E]
  Region result;               // ScheduleResult
  Region pulled;               // u64 [R, T_max] of dispatch, where a token is pulled once
  Region row_places;           // u64 [routed_blocks * 128] forward, where rows are gathered
  Region words;                // PassWords [2]: two banks, like the counters
  Region step_pair;            // i64 [steps + 1] backward, clusters of two: pairs.h
  Region dy_bias;              // f32 [routed_blocks * 128] backward: dY . bd of each row
  Region partial_tiles;        // WorkspaceLayout::wgrad_partial, as the threads of a tile hold it
  std::int64_t num_bytes = 0;  // of the whole workspace
};
inline CudaWorkspaceLayout cuda_workspace_layout(const Problem& p, const Plan& plan) {
  const WorkspaceLayout common = workspace_layout(p, plan);
  RegionPacker pack;
  pack.rewind(align_up(common.num_bytes, kRegionAlign));
  CudaWorkspaceLayout l;
  l.sort_counts = pack.take(kMaxSortCtas * p.num_experts * 4);
  l.result = pack.take(sizeof(ScheduleResult));
  const bool once = pulls_once(p, plan) || backward_pulls_once(p);
  l.pulled = pack.take(once ? p.num_ranks * p.max_tokens * 8 : 0);
  l.row_places = pack.take(gathers_rows(p, plan) ? plan.capacity_rows * 8 : 0);
  l.words = pack.take(2 * sizeof(PassWords));
  l.step_pair = pack.take((2 * extents(p, plan).chunks + plan.lag_chunks + 2) * 8);
  l.dy_bias = pack.take(p.expert_bias ? plan.capacity_rows * 4 : 0);
  l.partial_tiles = common.wgrad_partial;
  l.num_bytes = pack.end();
  return l;
}

// As buffer_bytes: every buffer of one rank of a layer on GPUs.
std::vector<NamedBytes> cuda_buffer_bytes(const Problem& problem, const Plan& plan);

}  // namespace moxie::pipeline
