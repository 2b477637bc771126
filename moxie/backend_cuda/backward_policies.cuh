// The fused backward's policies for the expert GEMM loop, before the product: what a stage of a
// tile holds and when it may be loaded. After the product: backward_epilogue.cuh. The CPU twin is
// roles_compute.h.
#pragma once

#include <type_traits>

#include "moxie/backend_cuda/backward_tile.cuh"
#include "moxie/expert/backward_gemm_operands_cuda.cuh"

namespace moxie::backend_cuda {

using expert::Majors;

// The operands of one tile's product, looked up when a stage is loaded.
struct BackwardOperand {
  const BackwardCommon& common;
  const BackwardRank& rank;

  static __device__ __forceinline__ Majors majors_of(const Tile& tile) {
    const int32_t kind = kind_of(tile);
    return kind == kRemadeZ ? Majors::k_k : kind < kWgradGate ? Majors::k_mn : Majors::mn_mn;
  }
  static constexpr int kNumEpilogueStages =
      BLOCK_N / 64;  // of z, 64 columns of gate and of up each
  static __device__ __forceinline__ bool has_epilogue_stages(const Tile& tile) {
    return kind_of(tile) == kDgrad;
  }

  __device__ __forceinline__ int32_t intermediate(const Tile& tile) const {
    return static_cast<int32_t>(is_shared(tile) ? common.problem.shared.intermediate
                                                : common.problem.intermediate);
  }
};

__device__ __forceinline__ int32_t k_blocks_of(const BackwardOperand& operand, const Tile& tile) {
  const auto blocks = [](int32_t k) { return (k + BLOCK_K - 1) / BLOCK_K; };
  const int32_t kind = kind_of(tile);
  const int32_t num = kind >= kWgradGate ? blocks(num_k_of(tile))
                      : kind == kDx      ? 2 * blocks(operand.intermediate(tile))
                                    : blocks(static_cast<int32_t>(operand.common.problem.hidden));
  return max(num, expert::kMinKBlocks);
}

// What the GEMM loop indexes by Tile::product.
struct BackwardOperands {
  const BackwardCommon& common;
  const BackwardRank& rank;
  __device__ __forceinline__ BackwardOperand operator[](int32_t) const { return {common, rank}; }
};

// ---- loading: one lane ----
//
// What a stage holds differs by kind, and working it out anew for each stage costs this lane more
// time than the tensor cores leave it. So each kind has a loop of its own, with everything worked
// out before it.

template <int kRank>
using At = expert::MapCoordinates<kRank>;
using StageRing = expert::RingPosition<expert::kNumStages>;

// Where a stage is written.
struct StagePlace {
  bf16 *a, *b;
  uint64_t* full;
};

template <int kRank>
__device__ __forceinline__ void load_box(const CUtensorMap* map, const At<kRank>& from, bf16* to,
                                         uint64_t* full) {
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, map, from.at, full);
}

// Stages k_begin .. k_end - 1 of num_bytes each: load(k, place) issues the copies of one. False:
// gave up.
template <class Shared, class Load>
__device__ __forceinline__ bool load_stages(Shared& shared, int32_t num_stages, uint32_t num_bytes,
                                            StageRing& stage, const device::WaitLimits& limits,
                                            const Load& load) {
#pragma unroll 1
  for (int32_t k = 0; k < num_stages * BLOCK_K; k += BLOCK_K) {
    if (!expert::open_stage(shared, stage, num_bytes, limits)) return false;
    load(k, StagePlace{shared.a[stage.slot_idx()], shared.b[stage.slot_idx()],
                       &shared.stage_full[stage.slot_idx()]});
    stage.advance();
  }
  return true;
}

// The halves of B that this CTA fetches: both, or of a pair that shares B one for both CTAs.
template <int kClusterSize, class LoadHalf>
__device__ __forceinline__ void load_halves(const Tile& tile, const LoadHalf& load) {
  if (kClusterSize == 2 && tile.kind == expert::kSharedB) {
    load(static_cast<int32_t>(ptx::get_sreg_cluster_ctarank()), std::true_type{});
  } else {
    load(0, std::false_type{});
    load(1, std::false_type{});
  }
}

// To the same place of both CTAs, counted by the barriers of both.
template <int kRank>
__device__ __forceinline__ void load_box(const CUtensorMap* map, const At<kRank>& from, bf16* to,
                                         uint64_t* full, std::true_type) {
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, map, from.at, full,
                            uint16_t{3});
}
template <int kRank>
__device__ __forceinline__ void load_box(const CUtensorMap* map, const At<kRank>& from, bf16* to,
                                         uint64_t* full, std::false_type) {
  load_box(map, from, to, full);
}

inline constexpr int kHalfElements = BLOCK_N / 2 * BLOCK_K, kChunkElements = 64 * BLOCK_K;

// FC1 without its activation: x times gate and up, both along rows.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_z(Shared& shared, const BackwardOperand& op, const Tile& tile,
                                       StageRing& stage, const device::WaitLimits& limits) {
  const BackwardState& state = shared.schedule;
  const bool is_token = is_shared(tile);
  const ExpertMaps& maps = is_token ? op.rank.shared : op.rank.routed;
  const CUtensorMap* x = is_token ? &op.rank.shared_x_rows : &op.rank.dy_rows;
  const int32_t row = is_token ? tile.row_begin
                               : static_cast<int32_t>(op.common.ring_rows) * kXPlane +
                                     state.slot_of(block_of(tile).v) * BLOCK_M;
  const int32_t column = tile.n_tile * (BLOCK_N / 2), expert = expert_of(tile);
  return load_stages(
      shared, k_blocks_of(op, tile), expert::kStageBytes, stage, limits,
      [&](int32_t k, const StagePlace& place) {
        load_box(x, At<3>{{k, row, 0}}, place.a, place.full);
        load_halves<kClusterSize>(tile, [&](int32_t half, auto to_both) {
          const CUtensorMap* map = half == 0 ? &maps.gate : &maps.up;
          bf16* b = place.b + half * kHalfElements;
          load_box(map, At<3>{{k, column, expert}}, b, place.full, to_both);
          load_box(map, At<3>{{k, column + 64, expert}}, b + kChunkElements, place.full, to_both);
        });
      });
}

// dY times down; then z, of which gate and up take the two halves of B's place.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_dgrad(Shared& shared, const BackwardOperand& op,
                                           const Tile& tile, StageRing& stage,
                                           const device::WaitLimits& limits) {
  const BackwardState& state = shared.schedule;
  const bool is_token = is_shared(tile);
  const ExpertMaps& maps = is_token ? op.rank.shared : op.rank.routed;
  const int32_t block = block_of(tile).v, slot_row = state.slot_of(block) * BLOCK_M;
  const CUtensorMap *dy = is_token ? &op.rank.shared_dy_rows : &op.rank.dy_rows,
                    *down = &maps.down_columns;
  const int32_t row = is_token ? tile.row_begin : slot_row, expert = expert_of(tile),
                chunk = tile.n_tile * (BLOCK_N / 64);
  const bool healthy =
      load_stages(shared, k_blocks_of(op, tile), expert::kStageBytes, stage, limits,
                  [&](int32_t k, const StagePlace& place) {
                    load_box(dy, At<3>{{k, row, 0}}, place.a, place.full);
                    load_halves<kClusterSize>(tile, [&](int32_t half, auto to_both) {
                      load_box(down, At<4>{{0, k, chunk + half * 2, expert}},
                               place.b + half * kHalfElements, place.full, to_both);
                    });
                  });
  if (!healthy) return false;

  const bool saved = op.common.saves_z && (is_token || block < state.stream.saved_end);
  const CUtensorMap* z = saved ? &maps.z : &op.rank.grad_rows;
  const auto plane_rows = static_cast<int32_t>(op.common.ring_rows);
  // Saved: [rows, 2 I]; remade: in the planes of dgate and dup.
  const int32_t first_row =
      !saved     ? slot_row + kDgatePlane * plane_rows
      : is_token ? tile.row_begin
                 : tile.row_begin - static_cast<int32_t>(state.shared_blocks) * BLOCK_M;
  const int32_t up_row = saved ? first_row : slot_row + kDupPlane * plane_rows,
                up_column = saved ? op.intermediate(tile) : 0, column = tile.n_tile * BLOCK_N;
  constexpr uint32_t kZBytes = 2 * BLOCK_M * 64 * sizeof(bf16);
  return load_stages(shared, BackwardOperand::kNumEpilogueStages, kZBytes, stage, limits,
                     [&](int32_t k, const StagePlace& place) {
                       load_box(z, At<3>{{column + k, first_row, 0}}, place.b, place.full);
                       load_box(z, At<3>{{up_column + column + k, up_row, 0}},
                                place.b + kHalfElements, place.full);
                     });
}

// dgate times gate, then dup times up.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_dx(Shared& shared, const BackwardOperand& op, const Tile& tile,
                                        StageRing& stage, const device::WaitLimits& limits) {
  const BackwardState& state = shared.schedule;
  const ExpertMaps& maps = is_shared(tile) ? op.rank.shared : op.rank.routed;
  const CUtensorMap *grads = &op.rank.grad_rows, *gate = &maps.gate, *up = &maps.up;
  const int32_t width = op.intermediate(tile), slot_row = state.slot_of(block_of(tile).v) * BLOCK_M,
                past_ring = static_cast<int32_t>(op.common.ring_width),
                up_row = slot_row + kDupPlane * static_cast<int32_t>(op.common.ring_rows);
  const int32_t column = tile.n_tile * BLOCK_N, expert = expert_of(tile);
  return load_stages(
      shared, k_blocks_of(op, tile), expert::kStageBytes, stage, limits,
      [&](int32_t k, const StagePlace& place) {
        const bool is_up = k >= width;
        const int32_t in_part = is_up ? k - width : k;
        // Past both, where a tile has more K blocks than there are columns: out of the ring, zeros.
        load_box(grads,
                 At<3>{{in_part < width ? in_part : past_ring, is_up ? up_row : slot_row, 0}},
                 place.a, place.full);
        const CUtensorMap* map = is_up ? up : gate;
        load_halves<kClusterSize>(tile, [&](int32_t half, auto to_both) {
          const int32_t at = column + half * (BLOCK_N / 2);
          bf16* b = place.b + half * kHalfElements;
          load_box(map, At<3>{{at, in_part, expert}}, b, place.full, to_both);
          load_box(map, At<3>{{at + 64, in_part, expert}}, b + kChunkElements, place.full, to_both);
        });
      });
}

// The rows of a chunk, transposed: dgate or dup with x, dY with w A.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_wgrad(Shared& shared, const BackwardOperand& op,
                                           const Tile& tile, StageRing& stage,
                                           const device::WaitLimits& limits) {
  const BackwardState& state = shared.schedule;
  const bool is_token = is_shared(tile), is_down = kind_of(tile) == kWgradDown;
  const ExpertMaps& maps = is_token ? op.rank.shared : op.rank.routed;
  const auto ring_rows = static_cast<int32_t>(op.common.ring_rows);
  const int32_t num_k = num_k_of(tile), first_block = first_block_of(tile),
                in_ring = state.slot_of(first_block) * BLOCK_M;
  // Where the caller's tensors, or the context's, hold the rows, there is no ring to go round.
  const int32_t in_tensor = first_block * BLOCK_M,
                saved = in_tensor - static_cast<int32_t>(state.shared_blocks) * BLOCK_M;
  const bool dy_in_ring = !is_token, x_in_ring = !is_token && op.common.pulls_x;
  const int32_t dy_begin = dy_in_ring ? in_ring : in_tensor, x_begin = x_in_ring  ? in_ring
                                                                       : is_token ? in_tensor
                                                                                  : saved;
  const int32_t plane = kind_of(tile) == kWgradUp ? kDupPlane : kDgatePlane;
  const CUtensorMap *a_map = is_down ? &maps.dy_columns : &op.rank.grad_columns,
                    *b_map = is_down ? &op.rank.grad_columns : &maps.x_columns;
  const int32_t a_end = num_k + (is_down ? dy_begin : plane * ring_rows + in_ring),
                b_end = num_k + (is_down ? kWaPlane * ring_rows + in_ring : x_begin);
  // A chunk may go round the ring; a K block never does.
  const int32_t k_wrap = ring_rows - in_ring, a_wrap = !is_down || dy_in_ring ? ring_rows : 0,
                b_wrap = is_down || x_in_ring ? ring_rows : 0;
  const int32_t m = is_down ? static_cast<int32_t>(op.common.problem.hidden)
                            : op.intermediate(tile),
                a_chunk = tile.row_begin % m / 64, b_chunk = column_tile_of(tile) * (BLOCK_N / 64);
  return load_stages(
      shared, k_blocks_of(op, tile), expert::kStageBytes, stage, limits,
      [&](int32_t k, const StagePlace& place) {
        const int32_t row = device::kRowBound - num_k + k;
        const bool wraps = k >= k_wrap;
        load_box(a_map, At<5>{{0, row, a_chunk, wraps ? a_end - a_wrap : a_end, device::kRowBound}},
                 place.a, place.full);
        load_halves<kClusterSize>(tile, [&](int32_t half, auto to_both) {
          load_box(b_map,
                   At<5>{{0, row, b_chunk + half * 2, wraps ? b_end - b_wrap : b_end,
                          device::kRowBound}},
                   place.b + half * kHalfElements, place.full, to_both);
        });
      });
}

template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_tile(Shared& shared, const BackwardOperand& op,
                                          const Tile& tile, StageRing& stage,
                                          const device::WaitLimits& limits) {
  switch (kind_of(tile)) {
    case kRemadeZ: return load_z<kClusterSize>(shared, op, tile, stage, limits);
    case kDgrad: return load_dgrad<kClusterSize>(shared, op, tile, stage, limits);
    case kDx: return load_dx<kClusterSize>(shared, op, tile, stage, limits);
    default: return load_wgrad<kClusterSize>(shared, op, tile, stage, limits);
  }
}

// ---- readiness ----

struct BackwardReadiness {
  const BackwardCommon& common;
  BackwardState& state;

  // The loading lane: returns when the tile may be loaded and its results be written. False: gave
  // up.
  __device__ __forceinline__ bool wait(Tile& tile, const device::WaitLimits&) const {
    delay_of(common)();
    const bool healthy = wait_for_inputs(tile);
    if (state.recorder.on())
      state.ready_ns[state.num_ready++ % expert::kNumTicketSlots] = state.recorder.now();
    // What the waits made visible, to the tensor copies issued next: rows pulled, or computed by
    // others.
    ptx::fence_proxy_async();
    return healthy;
  }

 private:
  __device__ __forceinline__ bool wait_for_inputs(const Tile& tile) const {
    const int32_t kind = kind_of(tile);
    if (kind == kRemadeZ || kind == kDgrad) return wait_rows(tile, kind);
    const int32_t chunk = chunk_of(tile);
    // Signalled by dgrad: every column tile of every block of the chunk is written. Seen once, it
    // need not be asked for again, which takes about a microsecond of the loads' lead.
    if (chunk != state.ready_chunk &&
        !wait_count(common.counters.dgrad_done + chunk, state.stream.dgrad_tickets(chunk),
                    WaitFor::fc1_done, chunk))
      return false;
    state.ready_chunk = chunk;
    if (kind == kDx || common.cuda_workspace.partial_tiles.num_bytes == 0) return true;
    const int64_t after = state.stream.chunks.chunk_after[chunk];
    // Signalled by the weight gradients of the chunk that used the partial sums before.
    return after < 0 || wait_count(common.counters.trail_done + after, state.trail_of(after),
                                   WaitFor::wgrad_order, after);
  }

  // Rows of dY and x, and for dgrad z.
  __device__ __forceinline__ bool wait_rows(const Tile& tile, int32_t kind) const {
    const BlockId b = block_of(tile);
    const int64_t holder = b.v - state.ring_blocks;
    if (is_shared(tile)) {
      if (holder >= 0 && !wait_slot(holder)) return false;
    } else {
      const int64_t size = common.plan.minibatch_blocks,
                    idx = pipeline::minibatch_of(state.table, b, size);
      int64_t first = b.v, rows = tile.num_rows;
      if (size > 1) {
        const pipeline::Minibatch m = pipeline::minibatch(state.table, idx, size);
        first = m.blocks.begin;
        rows = m.rows;
      }
      // Signalled by dispatch: every real row of the block's minibatch lies in its slot.
      if (!wait_count(common.counters.x_ready + idx, rows, WaitFor::x_ready, first)) return false;
    }
    const int64_t chunk = chunk_of(tile), z_tiles = state.stream.fc1_tiles_of(chunk);
    if (kind == kRemadeZ || z_tiles == 0 || b.v < state.stream.remade_blocks(chunk).begin)
      return true;
    // Signalled by the tiles that remake the block's z.
    return wait_count(common.counters.fc2_done + b.v, z_tiles, WaitFor::fc1_done, b.v);
  }

  __device__ __forceinline__ bool wait_slot(int64_t holder) const {
    const int64_t chunk = state.stream.chunks.chunk_of(BlockId{static_cast<int32_t>(holder)});
    // Signalled by dX, weight and vector gradients of the chunk that holds the slot.
    return wait_count(common.counters.trail_done + chunk, state.trail_of(chunk),
                      WaitFor::x_slot_free, chunk);
  }
  __device__ __forceinline__ bool wait_count(int64_t counter, int64_t wanted, WaitFor what,
                                             int64_t index) const {
    return device::wait_counter(state.counters + counter, static_cast<uint32_t>(wanted),
                                state.counter_limits, code(what), index);
  }
};

}  // namespace moxie::backend_cuda
