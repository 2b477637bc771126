// Roles of the warps beside the GEMM, as far as they are the forward's own: what the ticket warp
// publishes, dispatch, combine by communication warps. The others: pass_roles.cuh. The twins are
// roles_comm.h and the combine half of roles_compute.h.
#pragma once

#include "moxie/backend_cuda/forward_epilogue.cuh"
#include "moxie/backend_cuda/forward_schedule.cuh"
#include "moxie/backend_cuda/pass_roles.cuh"
#include "moxie/combine/carry_cuda.cuh"

namespace moxie::backend_cuda {

// Counts FC2 tiles of (slab, block), where communication warps carry them home.
__device__ __forceinline__ uint32_t* y_ready(const ForwardCommon& common, const ForwardState& state,
                                             int64_t slab, BlockId b) {
  return state.counters + common.counters.y_ready + slab * common.extents.routed_blocks +
         state.table.routed_idx(b);
}

// What the ticket warp tells others about this CTA's tiles. One lane.
//
// FC1 tiles are counted at once: FC2 waits for them. FC2 tiles only complete slabs, and telling
// that takes a fence of system scope that lasts as long as the link is behind (stores to other GPUs
// must have arrived), so they are counted here and handed over when the CTA goes on to the next
// slab.
struct ForwardPublisher {
  const ForwardCommon& common;
  const ForwardRank& rank;
  ForwardState& state;
  int32_t slab = 0;  // slabs order: which one is being counted
  uint64_t last_end_ns = 0;

  __device__ __forceinline__ void tile_stored(const Tile& tile, uint32_t slot_idx) {
    if (tile.num_rows == 0) return;  // no task: the partner of a last tile
    if (state.recorder.on()) record(tile, slot_idx);
    delay_of(common)();
    const BlockId b = block_of(tile);
    if (is_fc1(tile)) {
      // The tile's hidden rows (tensor copies of eight lanes, all complete), to FC2. Its reads of
      // the x slot, to whoever writes there next: a peer, if the plan pushes and the slot is needed
      // again.
      uint32_t* done = state.counters + common.counters.fc1_done + b.v;
      if (common.plan.dispatch == DispatchMode::push &&
          common.plan.x_ring_blocks < state.stream.routed_blocks)
        device::add_release_sys(done, 1);
      else
        device::add_release_gpu(done, 1);
    } else if (tile.product == kSharedFc2) {
      device::add_release_gpu(state.counters + common.counters.shared_done, 1);
    } else {
      const auto now = static_cast<int32_t>(
          pipeline::slab_of_tile(tile.n_tile, state.stream.num_slabs, state.stream.fc2_tiles));
      if (common.plan.combine == CombineMode::comm_workers) {
        // The tile's rows of y (tensor copies of eight lanes, all complete), to who carries them.
        device::add_release_gpu(y_ready(common, state, now, b), 1);
      } else {
        if (common.plan.order == TaskOrder::slabs && now != slab) hand_over(slab);
        slab = now;
        ++state.slab_tiles[now];
      }
      if (common.plan.hidden_ring_blocks < state.stream.routed_blocks) {
        // The tile's reads of the hidden slot, to FC1 tiles that will write there.
        device::add_release_gpu(state.counters + common.counters.fc2_done + b.v, 1);
      }
    }
  }

  // No more tiles.
  __device__ __forceinline__ void finish() {
    for (int32_t s = 0; s < state.stream.num_slabs; ++s) hand_over(s);
  }

 private:
  // The tensor cores' timeline. A tile begins when its first K block can be loaded and the one
  // before it is stored (a part of that happens beside this tile's first products).
  __device__ __forceinline__ void record(const Tile& tile, uint32_t slot_idx) {
    const uint64_t ready_ns = state.ready_ns[slot_idx], now = state.recorder.now();
    if (last_end_ns == 0) last_end_ns = min(state.begin_ns, ready_ns);
    const uint64_t begin_ns = max(ready_ns, last_end_ns);
    const BlockId b = block_of(tile);
    state.recorder.add_wait(is_fc1(tile) ? WaitFor::x_ready : WaitFor::fc1_done, last_end_ns,
                            begin_ns, trace::kComputeLane, b.v);
    state.recorder.put(is_fc1(tile) ? trace::Kind::fc1 : trace::Kind::fc2, WaitFor{}, begin_ns, now,
                       trace::kComputeLane, b.v, tile.n_tile, is_shared(tile));
    last_end_ns = now;
  }

  __device__ __forceinline__ void hand_over(int32_t s) {
    const uint32_t tiles = state.slab_tiles[s];
    if (tiles == 0) return;
    state.slab_tiles[s] = 0;
    count_home(common, rank, state, common.plan.combine, s, tiles);
  }
};

// A dedicated CTA also combines, and never multiplies.
__device__ __forceinline__ bool stays_with_rows(const ForwardCommon& common) {
  return common.plan.combine == CombineMode::comm_workers && overlaps(common);
}

// Who combines, if communication warps do: who dispatches. In split mode the spare warps, beside
// FC2.
__device__ __forceinline__ DispatchTeam combine_team(const ForwardCommon& common,
                                                     schedule::Cta cta) {
  if (common.plan.combine != CombineMode::comm_workers || (common.phases & kFc2Phase) == 0)
    return {cta.count, 0, 0};
  if (overlaps(common)) return dispatch_team(common, cta);
  return {0, cta.count, 2};
}

// A warp of the team. The rows of the first blocks come before what is left of staging, which no
// row of this rank waits for.
__device__ __forceinline__ void dispatch_rows(const ForwardCommon& common, const ForwardRank& rank,
                                              ForwardState& state, const DispatchTeam& team,
                                              dispatch::RowsSlot& slot) {
  const auto delay = [&] { delay_of(common)(); };
  const auto limits = [&](WaitFor what_slot) {
    return dispatch::MoveLimits{state.signal_limits, state.counter_limits, code(WaitFor::x_staged),
                                code(what_slot)};
  };
  const int32_t first = team.warp_idx(state.cta), num_warps = team.num_ctas * team.num_warps;
  if (common.plan.dispatch == DispatchMode::push) {
    dispatch::push_rows(state.push, slot, state.recorder, first, num_warps,
                        limits(WaitFor::peer_slot_free), delay);
  } else {
    dispatch::pull_rows(state.pull, slot, state.recorder, first, num_warps,
                        limits(WaitFor::x_slot_free), delay,
                        [&] { stage_tokens(common, rank, state, StageUntil::done); });
  }
}

// A warp of the combining team: carries every W-th unit of a slab home (W warps of the rank), as
// FC2 stores them. False: gave up.
__device__ __forceinline__ bool carry_slab(const ForwardCommon& common, const ForwardRank& rank,
                                           ForwardState& state, int32_t slab) {
  const pipeline::BlockTable& table = state.table;
  const pipeline::Range tiles =
      pipeline::slab_tiles(slab, state.stream.num_slabs, state.stream.fc2_tiles);
  const pipeline::Range cols{tiles.begin * pipeline::kFc2TileCols,
                             min(tiles.end * pipeline::kFc2TileCols, common.problem.hidden)};
  const combine::Carry c{common.heaps, common.heap.returns.offset,
                         at<pipeline::RowOrigin>(rank, common.workspace.origins),
                         at<bf16>(rank, common.workspace.y), common.problem.hidden};
  const int32_t lane_idx = threadIdx.x % 32;
  const DispatchTeam team = combine_team(common, state.cta);
  const auto num_units = static_cast<int32_t>(pipeline::num_dispatch_units(table)),
             num_warps = team.num_ctas * team.num_warps;
  uint32_t carried = 0;
#pragma unroll 1
  for (int32_t unit = team.warp_idx(state.cta); unit < num_units; unit += num_warps, ++carried) {
    const BlockId b = pipeline::dispatch_block(table, unit);
    const LocalExpertId expert{device::warp_last_not_above(
        table.expert_block, static_cast<int32_t>(table.num_experts), b.v)};
    const pipeline::Range rows = pipeline::dispatch_unit(table, unit, table.rows(b, expert)).rows;
    if (rows.size() == 0) continue;
    const uint64_t begin_ns = state.recorder.now();
    // Signalled by FC2: all tiles of the slab's columns of this block are stored.
    const bool healthy =
        lane_idx != 0 ||
        device::wait_counter(y_ready(common, state, slab, b), static_cast<uint32_t>(tiles.size()),
                             state.counter_limits, code(WaitFor::y_ready), b.v);
    if (!__all_sync(~0u, healthy)) return false;
    __syncwarp();  // what lane 0 acquired, to all
    delay_of(common)();
    combine::carry_rows(c, table.routed_idx(b) * pipeline::kBlockRows + rows.begin,
                        static_cast<int32_t>(rows.size()), cols);
    if (lane_idx == 0 && is_drawn_comm_warp())
      state.recorder.add(trace::Kind::combine, begin_ns, static_cast<int32_t>(threadIdx.x / 32),
                         b.v, slab);
  }
  __syncwarp();  // all lanes' stores, to lane 0
  if (lane_idx == 0 && carried > 0)
    count_home(common, rank, state, common.plan.combine, slab, carried);
  return true;
}

// Any warp, when its rows or tiles are out. A slab is carried home before the one before it is
// merged: the merge waits for peers, and they may wait for what this rank carries.
__device__ __forceinline__ void return_rows(const ForwardCommon& common, const ForwardRank& rank,
                                            ForwardState& state) {
  const DispatchTeam team = combine_team(common, state.cta);
  const bool carries = team.has_this_warp(state.cta);
#pragma unroll 1
  for (int32_t slab = carries ? 0 : common.plan.num_slabs; slab <= common.plan.num_slabs; ++slab) {
    if (slab < common.plan.num_slabs && !carry_slab(common, rank, state, slab)) return;
    merge_slabs(common, rank, state, slab, [](int64_t, pipeline::Range) {});
  }
}

}  // namespace moxie::backend_cuda
