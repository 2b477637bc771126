// Roles of the warps beside the GEMM, as far as they are the backward's own: what the ticket warp
// publishes, and merge. The others: pass_roles.cuh, backward_dispatch.cuh.
#pragma once

#include "moxie/backend_cuda/backward_dispatch.cuh"
#include "moxie/backend_cuda/backward_epilogue.cuh"
#include "moxie/backend_cuda/backward_schedule.cuh"

namespace moxie::backend_cuda {

// What the ticket warp tells others about this CTA's tiles. One lane.
//
// dX tiles complete the one slab of what goes home; telling that takes a fence of system scope that
// lasts as long as the link is behind, so they are counted here and handed over when the CTA has
// its first task behind the last dX tile of the pass, or none: the merge overlaps what is left.
struct BackwardPublisher {
  const BackwardCommon& common;
  const BackwardRank& rank;
  BackwardState& state;
  uint64_t last_end_ns = 0;

  __device__ __forceinline__ void tile_stored(const Tile& tile, uint32_t slot_idx) {
    if (tile.num_rows == 0) return;  // no task: the partner of a last tile, or nothing to add
    if (state.recorder.on()) record(tile, slot_idx);
    delay_of(common)();
    const int32_t kind = kind_of(tile), chunk = chunk_of(tile);
    uint32_t* counters = state.counters;
    if (kind == kRemadeZ) {
      // The tile's columns of gate and up, to dgrad.
      device::add_release_gpu(counters + common.counters.fc2_done + block_of(tile).v, 1);
      return;
    }
    if (kind == kDgrad) {
      // The tile's columns of dgate, dup, w A and row sums, to dX, weight and vector gradients.
      device::add_release_gpu(counters + common.counters.dgrad_done + chunk, 1);
      return;
    }
    if (kind == kDx) {
      if (is_shared(tile))
        device::add_release_gpu(counters + common.counters.shared_done, 1);
      else
        ++state.slab_tiles[0];
    } else if (chunk + state.stream.postponed >= state.stream.chunks.num_chunks) {
      finish();  // these weight gradients come behind the last dX
    }
    // The tile's reads of the slots and its partial sums, to who writes or adds there next.
    if (state.counts_trail)
      device::add_release_gpu(counters + common.counters.trail_done + chunk, 1);
  }

  // No more dX tiles.
  __device__ __forceinline__ void finish() {
    const uint32_t tiles = state.slab_tiles[0];
    if (tiles == 0) return;
    state.slab_tiles[0] = 0;
    count_home(common, rank, state, CombineMode::epilogue, 0, tiles);
  }

 private:
  // The tensor cores' timeline: ForwardPublisher::record.
  __device__ __forceinline__ void record(const Tile& tile, uint32_t slot_idx) {
    const uint64_t ready_ns = state.ready_ns[slot_idx], now = state.recorder.now();
    if (last_end_ns == 0) last_end_ns = min(state.begin_ns, ready_ns);
    const uint64_t begin_ns = max(ready_ns, last_end_ns);
    const int32_t kind = kind_of(tile);
    const bool waits_rows = kind == kRemadeZ || kind == kDgrad;
    const int64_t block = is_wgrad(tile) ? chunk_of(tile) : block_of(tile).v,
                  column = is_wgrad(tile) ? column_tile_of(tile) : tile.n_tile;
    state.recorder.add_wait(waits_rows ? WaitFor::x_ready : WaitFor::fc1_done, last_end_ns,
                            begin_ns, trace::kComputeLane, block);
    const trace::Kind what = kind == kRemadeZ ? trace::Kind::fc1
                             : kind == kDgrad ? trace::Kind::dgrad
                             : kind == kDx    ? trace::Kind::dx
                                              : trace::Kind::wgrad;
    state.recorder.put(what, WaitFor{}, begin_ns, now, trace::kComputeLane, block, column,
                       is_shared(tile));
    last_end_ns = now;
  }
};

// Any warp, when its rows or tiles are out.
__device__ __forceinline__ void return_rows(const BackwardCommon& common, const BackwardRank& rank,
                                            BackwardState& state) {
  const int64_t top_k = common.problem.top_k;
  const int32_t* ids = at<int32_t>(rank, common.workspace.ids);
  const float* pushed = heap_at<float>(common, rank.me, common.heap.d_weights);
  merge_slabs(common, rank, state, common.num_slabs, [&](int64_t, pipeline::Range tokens) {
    for (int64_t i = tokens.begin * top_k + threadIdx.x % 32; i < tokens.end * top_k; i += 32)
      rank.d_route_weights[i] = ids[i] >= 0 ? __ldcg(pushed + i) : 0.0f;
  });
}

}  // namespace moxie::backend_cuda
