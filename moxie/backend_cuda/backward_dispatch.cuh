// Dispatch of the backward: rows of dY, and of x where the context does not keep them, into ring
// slots; and the vector gradients, which the same warps sum (backward_vectors.cuh): a slot may have
// to wait for them. The loop is dispatch_cuda.cuh's, whose steps are overloaded here.
#pragma once

#include "moxie/backend_cuda/backward_vectors.cuh"
#include "moxie/backend_cuda/pass_roles.cuh"

namespace moxie::backend_cuda {

// A warp's rows in slots that nobody held before may be copied from other such slots
// (Pull::pulled). So before the first slot is used again every dispatching warp of the rank must
// have left this round. Nobody waits in it for a slot's rows, so all of them come.
struct FirstRound {
  uint32_t num_warps;  // of the rank that dispatch
  bool left;           // this warp has
};

// What the loop of dispatch/ calls its way.
struct BackwardWay {
  const BackwardCommon& common;
  const BackwardRank& rank;
  BackwardState& state;
  FirstRound& first_round;

  __device__ __forceinline__ const PullBack& pull() const { return state.pull; }
  __device__ __forceinline__ int32_t num_quarters() const { return pull().num_quarters(); }
};

struct BackwardQuarter : dispatch::Quarter {
  const uint4* x_source;  // of row lane, or null
};

__device__ __forceinline__ void look_up(const BackwardWay& way, int32_t quarter,
                                        int32_t num_quarters, int32_t lane_idx,
                                        dispatch::RowsSlot& next) {
  dispatch::look_up(way.pull(), quarter, num_quarters, lane_idx, next);
}

// Where the row's x lies: in the context, or where its dY lies, be that the home rank's heap, the
// caller's tensors or another slot of the ring.
__device__ __forceinline__ const uint4* x_source_of(const BackwardWay& way,
                                                    const BackwardQuarter& q, int32_t lane_idx) {
  const PullBack& p = way.pull();
  const int64_t chunks = p.hidden / 8, routed = p.table->routed_idx(BlockId{q.block});
  if (p.saved_x != nullptr && routed < p.saved_blocks) {
    return reinterpret_cast<const uint4*>(p.saved_x) +
           (routed * pipeline::kBlockRows + q.begin + lane_idx) * chunks;
  }
  if (q.is_remote)
    return q.source + (p.heap->x_in.offset - p.tokens_offset) / int64_t{sizeof(uint4)};
  const auto* ring = reinterpret_cast<const uint4*>(p.x_ring);
  const int64_t in_ring = q.source - ring;
  if (in_ring >= 0 && in_ring < way.common.ring_rows * chunks)
    return reinterpret_cast<const uint4*>(p.x_back) + in_ring;
  return reinterpret_cast<const uint4*>(p.forward_x) +
         (q.source - reinterpret_cast<const uint4*>(p.own_x));
}

__device__ __forceinline__ BackwardQuarter take(const BackwardWay& way,
                                                const dispatch::RowsSlot& slot, int32_t lane_idx) {
  BackwardQuarter q{dispatch::take(way.pull(), slot, lane_idx), nullptr};
  if (way.pull().x_back != nullptr && lane_idx < q.num_rows)
    q.x_source = x_source_of(way, q, lane_idx);
  return q;
}

__device__ __forceinline__ bool wait_staged(const BackwardWay& way, int32_t lane_idx,
                                            const dispatch::MoveLimits& limits) {
  return dispatch::wait_staged(way.pull(), lane_idx, limits);
}

// The whole warp, after its last row of the round; further calls do nothing.
__device__ __forceinline__ void leave_first_round(const BackwardWay& way, int32_t lane_idx) {
  const pipeline::BlockTable& table = way.state.table;
  if (way.first_round.left || table.num_blocks - way.state.ring_blocks <= table.shared_blocks)
    return;
  way.first_round.left = true;
  __syncwarp();  // what the lanes read and wrote, to lane 0
  // To who writes into slots that these rows were copied from.
  if (lane_idx == 0)
    device::add_release_gpu(way.state.counters + way.common.counters.first_round, 1);
}

// The whole warp. Before the chunk that holds the slot can be done, its vector gradients must be:
// whoever waits for them helps.
__device__ __forceinline__ bool wait_for_slot(const BackwardWay& way, const BackwardQuarter& q,
                                              int32_t lane_idx,
                                              const dispatch::MoveLimits& limits) {
  BackwardState& state = way.state;
  const int32_t holder = q.block - state.ring_blocks;
  if (holder < 0) return true;
  bool healthy = true;
  if (dispatch::is_used_slot(way.pull(), q)) {
    leave_first_round(way, lane_idx);
    // Signalled by every dispatching warp of this rank: it copies no more rows out of slots.
    healthy = lane_idx != 0 ||
              device::wait_counter(state.counters + way.common.counters.first_round,
                                   way.first_round.num_warps, limits.counter, limits.what_slot, 0);
  }
  const int64_t chunk = state.stream.chunks.chunk_of(BlockId{holder});
  if (!__all_sync(~0u, healthy) || !sum_vectors(way.common, way.rank, state, chunk + 1))
    return false;
  // Signalled by dX, weight and vector gradients of the chunk that holds the slot.
  healthy = lane_idx != 0 ||
            device::wait_counter(state.counters + way.common.counters.trail_done + chunk,
                                 state.trail_of(chunk), limits.counter, limits.what_slot, chunk);
  return __all_sync(~0u, healthy);
}

// The next quarter waits for nobody: its rows are this rank's own and its slot was never used.
// Complete after the look-up.
__device__ __forceinline__ bool needs_no_wait(const BackwardWay& way,
                                              const dispatch::RowsSlot& slot, int32_t lane_idx) {
  __pipeline_wait_prior(0);
  __syncwarp();  // what the other lanes looked up
  const bool is_remote = lane_idx < slot.num_rows && slot.rank[lane_idx] != way.pull().table->me.v;
  return slot.block < way.state.ring_blocks && __any_sync(~0u, is_remote) == 0;
}

// dY . bd of a quarter's rows, lanes in a fixed order.
__device__ __forceinline__ void multiply_down_bias(const PullBack& p, const BackwardQuarter& q,
                                                   const uint4* rows, int32_t lane_idx) {
  const auto expert = device::warp_last_not_above(
      p.table->expert_block, static_cast<int32_t>(p.table->num_experts), q.block);
  const auto chunks = static_cast<int32_t>(p.hidden / 8);
  const auto* bias = reinterpret_cast<const uint4*>(p.down_bias) + int64_t{expert} * chunks;
  float* out = p.dy_bias + p.table->routed_idx(BlockId{q.block}) * pipeline::kBlockRows + q.begin;
  __syncwarp();  // the rows, to all lanes
#pragma unroll 1
  for (int32_t r = 0; r < q.num_rows; ++r) {
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t c = lane_idx; c < chunks; c += 32) {
      float dy[8] = {}, b[8] = {};
      merge::add_chunk(dy, rows[r * chunks + c]);
      merge::add_chunk(b, __ldg(bias + c));
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(dy[i], b[i], sum);
    }
    for (int32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane_idx == 0) out[r] = sum;
  }
}

__device__ __forceinline__ void copy_rows(const BackwardWay& way, const BackwardQuarter& q,
                                          int32_t lane_idx) {
  const PullBack& p = way.pull();
  const auto num_chunks = static_cast<int32_t>(p.hidden / 8);
  const int64_t first = (way.state.slot_of(q.block) * pipeline::kBlockRows + q.begin) * num_chunks;
  const uint4* source[dispatch::kQuarterRows];
  uint4* to = reinterpret_cast<uint4*>(p.x_ring) + first;
  dispatch::share_sources(q, source);
  dispatch::copy_quarter(source, to, num_chunks, lane_idx);
  if (p.x_back != nullptr) {
    dispatch::Quarter x = q;
    x.source = q.x_source;
    dispatch::share_sources(x, source);
    dispatch::copy_quarter(source, reinterpret_cast<uint4*>(p.x_back) + first, num_chunks,
                           lane_idx);
  }
  if (p.down_bias != nullptr) multiply_down_bias(p, q, to, lane_idx);
}

// Every lane, after every lane's rows: where they can be copied from now, if it is in the first
// round.
__device__ __forceinline__ void note_rows(const BackwardWay& way, const BackwardQuarter& q,
                                          int32_t lane_idx) {
  const PullBack& p = way.pull();
  if (!q.is_remote || p.pulled == nullptr || dispatch::is_used_slot(p, q)) return;
  const int64_t row = way.state.slot_of(q.block) * pipeline::kBlockRows + q.begin + lane_idx;
  cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(p.pulled[q.token])
      .store(uint64_t{p.epoch} << 32 | static_cast<uint32_t>(row), cuda::memory_order_release);
}

__device__ __forceinline__ void count_rows(const BackwardWay& way, const BackwardQuarter& q) {
  dispatch::count_rows(way.pull(), q);
}

// A warp of the team: dispatch, then what is left of the vector gradients.
__device__ __forceinline__ void dispatch_rows(const BackwardCommon& common,
                                              const BackwardRank& rank, BackwardState& state,
                                              const DispatchTeam& team, dispatch::RowsSlot& slot) {
  const int32_t num_warps = team.num_ctas * team.num_warps;
  FirstRound first_round{static_cast<uint32_t>(num_warps), false};
  const BackwardWay way{common, rank, state, first_round};
  dispatch::pull_rows(
      way, slot, state.recorder, team.warp_idx(state.cta), num_warps,
      dispatch::MoveLimits{state.signal_limits, state.counter_limits, code(WaitFor::x_staged),
                           code(WaitFor::x_slot_free)},
      [&] { delay_of(common)(); }, [&] { stage_tokens(common, rank, state, StageUntil::done); });
  leave_first_round(way, threadIdx.x % 32);
}

}  // namespace moxie::backend_cuda
