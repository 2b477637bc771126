// The fused forward's policies for the expert GEMM loop, before the product: which tile a ticket
// is, when its rows may be loaded. Orders and slots come from pipeline/; the CPU twin is
// roles_compute.h.
#pragma once

#include "moxie/backend_cuda/forward_state.cuh"
#include "moxie/expert/grouped_gemm_cuda.cuh"

namespace moxie::backend_cuda {

using expert::BLOCK_M;
using expert::BLOCK_N;
using expert::Tile;

__device__ __forceinline__ bool is_fc1(const Tile& tile) {
  return tile.product == kFc1 || tile.product == kSharedFc1;
}
__device__ __forceinline__ bool is_shared(const Tile& tile) { return tile.product >= kSharedFc1; }
// Tile::row_begin counts blocks of the pass, not slots of a ring.
__device__ __forceinline__ BlockId block_of(const Tile& tile) {
  return BlockId{tile.row_begin / BLOCK_M};
}

struct ForwardSchedule {
  using Shared = ForwardState;

  // Warp-collective.
  static __device__ __forceinline__ Tile tile(const ForwardState& state, uint32_t ticket) {
    Tile tile{0, 0, 0, 0, 0, expert::kNoMoreTiles};
    if (ticket >= state.num_tickets) return tile;
    const pipeline::Task task = state.stream.task(ticket);
    const bool shared = state.table.is_shared(task.block);
    const bool fc1 = task.kind == pipeline::TaskKind::fc1;
    tile.row_begin = task.block.v * BLOCK_M;
    tile.n_tile = static_cast<int32_t>(task.tile);
    if (!shared) {
      tile.expert_idx = device::warp_last_not_above(
          state.table.expert_block, static_cast<int32_t>(state.table.num_experts), task.block.v);
    }
    tile.num_rows = static_cast<uint16_t>(
        shared ? state.table.rows(task.block)
               : state.table.rows(task.block, LocalExpertId{tile.expert_idx}));
    tile.product = shared ? (fc1 ? kSharedFc1 : kSharedFc2) : (fc1 ? kFc1 : kFc2);
    tile.kind = expert::kOwnB;
    return tile;
  }

  // The tiles of a cluster's CTAs. Warp-collective; lane r gets that of CTA r. A pair takes two
  // tickets in a row of the same product, so that both have as many K blocks; slabs order has each
  // product in one run.
  template <int kClusterSize>
  static __device__ __forceinline__ Tile tile_of_cta(const ForwardState& state, uint32_t unit) {
    if constexpr (kClusterSize == 1) {
      return tile(state, static_cast<uint32_t>(state.first_ticket) + unit);
    } else {
      const pipeline::ForwardStream& s = state.stream;
      const int64_t run_end[kNumProducts] = {s.shared_blocks * s.shared_fc1_tiles,
                                             s.shared_tickets(), s.fc1_end(), s.num_tickets()};
      int64_t begin = state.num_tickets, end = state.num_tickets, run_begin = 0, left = unit;
#pragma unroll
      for (int run = 0; run < kNumProducts; ++run) {
        // A launch takes whole runs.
        const bool here = run_begin >= state.first_ticket && run_end[run] <= state.num_tickets;
        const int64_t num_pairs = here ? (run_end[run] - run_begin + 1) / 2 : 0;
        if (left < num_pairs) {
          begin = run_begin + 2 * left;
          end = run_end[run];
          break;
        }
        left -= num_pairs;
        run_begin = run_end[run];
      }
      const Tile first = tile(state, static_cast<uint32_t>(begin));
      Tile second = first;
      second.num_rows = 0;  // without a partner: multiplies and writes nothing
      if (begin + 1 < end) second = tile(state, static_cast<uint32_t>(begin) + 1);
      Tile own = threadIdx.x % 32 == 1 ? second : first;
      if (first.kind != expert::kNoMoreTiles && first.product == second.product &&
          first.expert_idx == second.expert_idx && first.n_tile == second.n_tile) {
        own.kind = expert::kSharedB;
      }
      return own;
    }
  }
};

// FC1's rows, from where their tokens lie: the caller's x, or where they were pulled to.
struct ForwardGather {
  const ForwardCommon& common;
  const ForwardRank& rank;
  const ForwardState& state;

  __device__ __forceinline__ bool is_on() const { return common.gathers; }
  __device__ __forceinline__ bool gathers(const Tile& tile) const {
    return common.gathers && tile.product == kFc1;
  }
  // Of all products FC1 comes before FC2.
  __device__ __forceinline__ bool is_past(const Tile& tile) const {
    return common.gathers && tile.product == kFc2 && common.plan.order == TaskOrder::slabs;
  }
  __device__ __forceinline__ expert::RowPlaces rows() const {
    static_assert(expert::RowPlaces::kSecond == dispatch::Pull::kInRing);
    return {reinterpret_cast<const uint4*>(rank.x),
            reinterpret_cast<const uint4*>(at<bf16>(rank, common.workspace.x_ring)),
            at<uint64_t>(rank, common.cuda_workspace.row_places),
            static_cast<uint32_t>(state.epoch), static_cast<int32_t>(common.problem.hidden)};
  }
  // Of a tile as its ticket says it, before anything is waited for.
  __device__ __forceinline__ int64_t first_row(const Tile& tile) const {
    return state.table.routed_idx(block_of(tile)) * BLOCK_M;
  }
};

struct ForwardReadiness {
  const ForwardCommon& common;
  ForwardState& state;

  // The loading lane: returns when A may be loaded and the output slot be written; turns the
  // block's rows into the rows of A's ring. False: gave up.
  __device__ __forceinline__ bool wait(Tile& tile, const device::WaitLimits&) const {
    const bool healthy = wait_for_inputs(tile);
    if (state.recorder.on())
      state.ready_ns[state.num_ready++ % expert::kNumTicketSlots] = state.recorder.now();
    return healthy;
  }

 private:
  __device__ __forceinline__ bool wait_for_inputs(Tile& tile) const {
    delay_of(common)();
    const pipeline::BlockTable& table = state.table;
    const BlockId b = block_of(tile);
    const int64_t routed = table.routed_idx(b);
    bool healthy = true;
    if (tile.product == kFc1) {
      healthy = wait_rows(tile, b);
      // Signalled by FC2: all its tiles of the block that holds the hidden slot have read their
      // rows.
      const int64_t holder = b.v - common.plan.hidden_ring_blocks;
      if (healthy && holder >= table.shared_blocks) {
        healthy = wait_count(common.counters.fc2_done + holder, state.stream.fc2_tiles,
                             WaitFor::hidden_free, holder);
      }
      tile.row_begin = static_cast<int32_t>(remainder(routed, common.plan.x_ring_blocks) * BLOCK_M);
    } else if (tile.product == kFc2) {
      // Signalled by FC1: every column tile of the block's hidden rows is written.
      healthy = wait_count(common.counters.fc1_done + b.v, state.stream.fc1_tiles,
                           WaitFor::fc1_done, b.v);
      tile.row_begin =
          static_cast<int32_t>(remainder(routed, common.plan.hidden_ring_blocks) * BLOCK_M);
    } else if (tile.product == kSharedFc2) {
      healthy = wait_count(common.counters.fc1_done + b.v, state.stream.shared_fc1_tiles,
                           WaitFor::fc1_done, b.v);
    }
    // What the waits made visible, to the tensor copies issued next: rows pulled, staged or
    // computed by others.
    ptx::fence_proxy_async();
    return healthy;
  }

  __device__ __forceinline__ bool wait_count(int64_t counter, int64_t wanted, WaitFor what,
                                             int64_t index) const {
    return device::wait_counter(state.counters + counter, static_cast<uint32_t>(wanted),
                                state.counter_limits, code(what), index);
  }
  // Signalled by dispatch: every real row of the block's minibatch lies in its slot.
  __device__ __forceinline__ bool wait_rows(const Tile& tile, BlockId b) const {
    const int64_t size = common.plan.minibatch_blocks,
                  idx = pipeline::minibatch_of(state.table, b, size);
    int64_t first = b.v, rows = tile.num_rows;
    if (size > 1) {
      const pipeline::Minibatch m = pipeline::minibatch(state.table, idx, size);
      first = m.blocks.begin;
      rows = m.rows;
    }
    if (common.plan.dispatch == DispatchMode::push) {
      // Signalled by home ranks, maybe on other GPUs.
      return device::wait_counter_sys(state.counters + common.counters.x_ready + idx,
                                      static_cast<uint32_t>(rows), state.counter_limits,
                                      code(WaitFor::x_ready), first);
    }
    return wait_count(common.counters.x_ready + idx, rows, WaitFor::x_ready, first);
  }
};

}  // namespace moxie::backend_cuda
