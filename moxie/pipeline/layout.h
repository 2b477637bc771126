// Layout: the only place with offsets (what only the GPU keeps: cuda_layout.h). The symmetric heap
// (peers read and write it) and the rank-local workspace are each one allocation; a Region is a
// named piece of it. Who writes and reads each region, and why its reuse is safe, is told in
// docs/protocol.md.
#pragma once
#include <cstdint>
#include <vector>

#include "moxie/core/checked.h"
#include "moxie/core/problem.h"
#include "moxie/pipeline/plan.h"
#include "moxie/pipeline/signals.h"
#include "moxie/pipeline/tiles.h"

namespace moxie::pipeline {

inline constexpr std::int64_t kRegionAlign =
    1024;  // a swizzled shared-memory tile's alignment; harmless elsewhere

struct Region {
  std::int64_t offset = 0, num_bytes = 0;
};

// Where a row came from and where its result goes; one per row of every block, written by dispatch.
struct RowOrigin {
  std::int32_t rank = -1;   // home rank
  std::int32_t route = -1;  // token * K + slot there
  float weight = 0;         // route weight
};

class RegionPacker {
 public:
  MOXIE_HD constexpr Region take(std::int64_t num_bytes) {
    const Region region{end_, num_bytes};
    end_ = align_up(end_ + num_bytes, kRegionAlign);
    return region;
  }
  MOXIE_HD constexpr std::int64_t end() const { return end_; }
  MOXIE_HD constexpr void rewind(std::int64_t offset) { end_ = offset; }

 private:
  std::int64_t end_ = 0;
};

// Symmetric heap of one rank. The signal words come first, so that they keep their place when the
// heap grows.
inline constexpr std::int64_t kRefusalBytes = 512;  // of a sentence, its end included
struct HeapLayout {
  Region epoch;         // u64           passes this rank has closed
  Region stopped;       // u64           a peer whose wait expired: (epoch, rank + 1)
  Region inputs_ready;  // u64 [R]       word p: peer p has sorted its routes; payload = Verdict
  Region x_staged;      // u64 [R]       word p: peer p's x_in (and dy_in) can be read
  Region agreement;  // u64 [R]       word p: peer p's Verdict on the pass (only when one is needed)
  Region returns_done;  // u64 [R, kMaxSlabs]  peer p has pushed all rows of a slab
  std::int64_t signals_bytes = 0;
  Region x_in;            // dtype [T_max, H]
  Region dy_in;           // dtype [T_max, H]    backward
  Region routes_sorted;   // i32 [T_max * K]     routes by (expert, token, slot)
  Region weights_sorted;  // f32 [T_max * K]
  Region route_begin;     // i32 [E + 1]
  Region num_tokens;      // i32               of this pass; push dispatch
  Region returns;         // dtype [T_max * K, H]  row pieces pushed home; backward: pieces of dX
  Region d_weights;       // f32 [T_max * K]     backward: router-weight gradients pushed home
  std::int64_t num_bytes = 0;
};

MOXIE_HD constexpr HeapLayout heap_layout(const Problem& p) {
  RegionPacker pack;
  const std::int64_t routes = p.max_tokens * p.top_k, elem = size_bytes(p.dtype);
  HeapLayout l;
  l.epoch = pack.take(8);
  l.stopped = pack.take(8 + kRefusalBytes);
  l.inputs_ready = pack.take(8 * p.num_ranks);
  l.x_staged = pack.take(8 * p.num_ranks);
  l.agreement = pack.take(8 * p.num_ranks);
  l.returns_done = pack.take(8 * p.num_ranks * kMaxSlabs);
  l.signals_bytes = pack.end();
  l.x_in = pack.take(p.max_tokens * p.hidden * elem);
  l.dy_in = pack.take(p.max_tokens * p.hidden * elem);
  l.routes_sorted = pack.take(routes * 4);
  l.weights_sorted = pack.take(routes * 4);
  l.route_begin = pack.take((p.num_experts + 1) * 4);
  l.num_tokens = pack.take(4);
  l.returns = pack.take(routes * p.hidden * elem);
  l.d_weights = pack.take(routes * 4);
  l.num_bytes = pack.end();
  return l;
}

// char [kRefusalBytes]: why this rank refused the pass, where ranks are processes on the CPU.
// Behind `stopped`, and no member: GPUs have no use for it, and take a HeapLayout with every
// launch.
MOXIE_HD constexpr Region refusal_of(const HeapLayout& l) {
  return {l.stopped.offset + 8, kRefusalBytes};
}

// Sizes that follow from (problem, resolved plan); the widest rank's numbers, so that all ranks
// agree.
struct Extents {
  std::int64_t local_experts = 0;      // most experts on a rank
  std::int64_t routed_blocks = 0;      // capacity in blocks
  std::int64_t shared_blocks = 0;      // blocks of local tokens for the shared expert
  std::int64_t blocks = 0;             // both
  std::int64_t chunks = 0;             // most backward chunks
  std::int64_t wide_intermediate = 0;  // max(I, I_s)
  std::int64_t y_counters = 0;         // (slab, routed block), if communication workers combine
};
MOXIE_HD constexpr Extents extents(const Problem& p, const Plan& plan) {
  Extents e;
  e.local_experts = ceil_div(p.num_experts, p.num_ranks);
  e.routed_blocks = plan.capacity_rows / kBlockRows;
  e.shared_blocks = p.shared.intermediate > 0 ? num_blocks(p.max_tokens) : 0;
  e.blocks = e.routed_blocks + e.shared_blocks;
  e.chunks = e.blocks + e.local_experts +
             1;  // an expert without rows has one empty chunk: it writes the zeros
  e.wide_intermediate = max64(p.intermediate, p.shared.intermediate);
  e.y_counters = plan.combine == CombineMode::comm_workers ? plan.num_slabs * e.routed_blocks : 0;
  return e;
}

// Where whole experts are handed to the weight gradients, no sum is ever put aside.
MOXIE_HD constexpr bool experts_can_span_chunks(const Extents& e, const Plan& plan) {
  return plan.chunk_blocks < max64(e.routed_blocks, e.shared_blocks);
}

// Rank-local workspace. Forward and backward never run at once on a rank: their buffers share
// addresses.
struct WorkspaceLayout {
  // tables of one pass (blocks.h)
  Region row_prefix;          // i64 [E_local, R + 1]
  Region source_begin;        // i32 [E_local, R]
  Region expert_block;        // i32 [E_local + 1]
  Region chunk_block;         // i32 [chunks + 1]
  Region chunk_expert;        // i32 [chunks]
  Region chunk_after;         // i32 [chunks]
  Region step_ticket;         // i64 [chunks + lag_chunks + 1]
  Region push_first_row;      // i32 [E]         push dispatch only, as the next three: PushTable
  Region push_expert_block;   // i32 [E + R]
  Region push_shared_blocks;  // i32 [R]
  Region push_unit_begin;     // i32 [routed_blocks * R + 1]
  Region ids;                 // i32 [T_max * K]   expert of each route, -1 = none
  Region origins;             // RowOrigin [routed_blocks * 128]
  Region shared_weight;       // f32 [T_max]       sigmoid output gate, or 1
  // counters, two banks (signals.h)
  Region pass_count;  // u64               passes of this workspace; its parity picks the bank
  Region counters;    // u32 [2, counter_words]
  std::int64_t counter_words = 0;
  std::int64_t tables_bytes =
      0;  // all of the above; never poisoned between passes where a counter is
  // forward
  Region x_ring;         // dtype [x_ring_blocks * 128, H]
  Region hidden_ring;    // dtype [hidden_ring_blocks * 128, I]
  Region shared_hidden;  // dtype [T_max, I_s]
  Region y;              // dtype [routed_blocks * 128, H]  if communication workers combine
  Region shared_out;  // dtype [T_max, H]    forward: the shared expert's output; backward: its dX
  // backward
  Region dy_ring;        // dtype [ring * 128, H]
  Region xb_ring;        // dtype [ring * 128, H]        unless x is saved
  Region dgate_ring;     // dtype [ring * 128, max(I, I_s)]
  Region dup_ring;       // dtype [ring * 128, max(I, I_s)]
  Region wa_ring;        // dtype [ring * 128, max(I, I_s)]   w * A, remade
  Region dw_partial;     // f32 [ring * 128, FC1 tiles]  row sums of dA' . A per column tile
  Region wgrad_partial;  // f32 [wgrad tiles, 128 * 256]  running sums of the one expert that spans
                         // several chunks, where one can; in whole tiles, as the GPU keeps them
  std::int64_t num_bytes = 0;
};

// Counter words of one bank, in this order. A count is complete at the number given.
struct CounterLayout {
  std::int64_t stage_unit, stage_done;  // next unit; T units done
  std::int64_t schedule_ready;          // 1
  std::int64_t ticket, tasks_done, dispatch_unit, merge_unit, merge_done, closed;
  std::int64_t phase;         // split mode: [kMaxPhases] workers that finished a phase
  std::int64_t combine_unit;  // if communication workers combine: next unit
  std::int64_t first_round;   // backward on the GPU: warps without further rows for unused slots
  std::int64_t slab_done;     // [kMaxSlabs] FC2 (backward: dX) tiles of the slab, or combine units
  std::int64_t shared_done;   // shared FC2 (backward: dX) tiles
  std::int64_t x_ready;       // [groups] rows of the minibatch
  std::int64_t fc1_done;      // [blocks] FC1 (backward: dgrad) tiles
  std::int64_t fc2_done;      // [blocks] FC2 tiles; backward on the GPU: FC1 tiles that remake z
  std::int64_t trail_done;    // [chunks] dX and wgrad tiles
  std::int64_t dgrad_done;    // [chunks] dgrad tiles; GPU, where one wait per tile must do
  std::int64_t y_ready;       // [slabs, routed_blocks] FC2 tiles, if communication workers combine
  std::int64_t num_words;
};
inline constexpr std::int64_t kMaxPhases = 8;

MOXIE_HD constexpr CounterLayout counter_layout(const Extents& e) {
  CounterLayout c{};
  std::int64_t n = 0;
  auto take = [&n](std::int64_t words) {
    const std::int64_t at = n;
    n += words;
    return at;
  };
  c.stage_unit = take(1);
  c.stage_done = take(1);
  c.schedule_ready = take(1);
  c.ticket = take(1);
  c.tasks_done = take(1);
  c.dispatch_unit = take(1);
  c.merge_unit = take(1);
  c.merge_done = take(1);
  c.closed = take(1);
  c.phase = take(kMaxPhases);
  c.combine_unit = take(1);
  c.first_round = take(1);
  c.slab_done = take(kMaxSlabs);
  c.shared_done = take(1);
  c.x_ready = take(e.blocks);
  c.fc1_done = take(e.blocks);
  c.fc2_done = take(e.blocks);
  c.trail_done = take(e.chunks);
  c.dgrad_done = take(e.chunks);
  c.y_ready = take(e.y_counters);
  c.num_words = n;
  return c;
}

MOXIE_HD constexpr WorkspaceLayout workspace_layout(const Problem& p, const Plan& plan) {
  const Extents e = extents(p, plan);
  const std::int64_t elem = size_bytes(p.dtype), ring_rows = plan.backward_ring_blocks * kBlockRows;
  RegionPacker pack;
  WorkspaceLayout l;
  l.row_prefix = pack.take(e.local_experts * (p.num_ranks + 1) * 8);
  l.source_begin = pack.take(e.local_experts * p.num_ranks * 4);
  l.expert_block = pack.take((e.local_experts + 1) * 4);
  l.chunk_block = pack.take((e.chunks + 1) * 4);
  l.chunk_expert = pack.take(e.chunks * 4);
  l.chunk_after = pack.take(e.chunks * 4);
  l.step_ticket = pack.take((2 * e.chunks + plan.lag_chunks + 2) * 8);
  if (plan.dispatch == DispatchMode::push) {
    l.push_first_row = pack.take(p.num_experts * 4);
    l.push_expert_block = pack.take((p.num_experts + p.num_ranks) * 4);
    l.push_shared_blocks = pack.take(p.num_ranks * 4);
    l.push_unit_begin = pack.take((e.routed_blocks * p.num_ranks + 1) * 4);
  }
  l.ids = pack.take(p.max_tokens * p.top_k * 4);
  l.origins =
      pack.take(e.routed_blocks * kBlockRows * static_cast<std::int64_t>(sizeof(RowOrigin)));
  l.shared_weight = pack.take(p.shared.intermediate > 0 ? p.max_tokens * 4 : 0);
  l.counter_words = counter_layout(e).num_words;
  l.pass_count = pack.take(8);
  l.counters = pack.take(2 * l.counter_words * 4);
  l.tables_bytes = pack.end();
  l.shared_out = pack.take(p.shared.intermediate > 0 ? p.max_tokens * p.hidden * elem : 0);
  const std::int64_t both = pack.end();
  l.x_ring = pack.take(plan.x_ring_blocks * kBlockRows * p.hidden * elem);
  l.hidden_ring = pack.take(plan.hidden_ring_blocks * kBlockRows * p.intermediate * elem);
  l.shared_hidden =
      pack.take(p.shared.intermediate > 0 ? p.max_tokens * p.shared.intermediate * elem : 0);
  if (plan.combine == CombineMode::comm_workers)
    l.y = pack.take(plan.capacity_rows * p.hidden * elem);
  const std::int64_t forward_end = pack.end();
  pack.rewind(both);
  l.dy_ring = pack.take(ring_rows * p.hidden * elem);
  l.xb_ring = pack.take(plan.save == SavePolicy::z_and_x && plan.saved_rows >= plan.capacity_rows
                            ? 0
                            : ring_rows * p.hidden * elem);
  l.dgate_ring = pack.take(ring_rows * e.wide_intermediate * elem);
  l.dup_ring = pack.take(ring_rows * e.wide_intermediate * elem);
  l.wa_ring = pack.take(ring_rows * e.wide_intermediate * elem);
  l.dw_partial = pack.take(ring_rows * num_fc1_tiles(e.wide_intermediate) * 4);
  const std::int64_t wgrad_tiles = 2 * num_wgrad_tiles(e.wide_intermediate, p.hidden) +
                                   num_wgrad_tiles(p.hidden, e.wide_intermediate);
  l.wgrad_partial = pack.take(
      experts_can_span_chunks(e, plan) ? wgrad_tiles * kWgradTileRows * kWgradTileCols * 4 : 0);
  l.num_bytes = max64(forward_end, pack.end());
  return l;
}

// What a context keeps of one rank, next to i32 ids and f32 weights [T_max * K].
struct ContextBytes {
  std::int64_t routes = 0;    // ids and weights
  std::int64_t z = 0;         // dtype [saved blocks * 128, 2 I]
  std::int64_t x = 0;         // dtype [saved blocks * 128, H]   SavePolicy::z_and_x
  std::int64_t shared_z = 0;  // dtype [T_max, 2 I_s]
  constexpr std::int64_t total() const { return routes + z + x + shared_z; }
};
MOXIE_HD constexpr std::int64_t saved_blocks(const Plan& plan) {
  return plan.save == SavePolicy::none ? 0 : plan.saved_rows / kBlockRows;
}
constexpr ContextBytes context_bytes(const Problem& p, const Plan& plan) {
  const std::int64_t elem = size_bytes(p.dtype), rows = saved_blocks(plan) * kBlockRows;
  ContextBytes c;
  c.routes = p.max_tokens * p.top_k * 8;
  c.z = rows * 2 * p.intermediate * elem;
  if (plan.save == SavePolicy::z_and_x) c.x = rows * p.hidden * elem;
  if (plan.save != SavePolicy::none) c.shared_z = p.max_tokens * 2 * p.shared.intermediate * elem;
  return c;
}

// What a pass writes before it reads it: fault injection fills these with 0xFF. Signals, counters
// and the pass count live on from pass to pass; so does x where the caller wrote it in place.
std::vector<Region> poisoned_heap(const HeapLayout& heap, bool x_in_place);
std::vector<Region> poisoned_workspace(const WorkspaceLayout& workspace);

// Every buffer of one rank with its bytes, heap first, then "total"; the closed form behind
// `Layer::memory()`. On GPUs: cuda_layout.h.
struct NamedBytes {
  const char* name;
  std::int64_t num_bytes;
};
std::vector<NamedBytes> buffer_bytes(const Problem& problem, const Plan& plan);

}  // namespace moxie::pipeline
