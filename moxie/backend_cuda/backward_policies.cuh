// The fused backward's policies for the expert GEMM loop, before the product: what a stage of a
// tile holds and when it may be loaded. After the product: backward_epilogue.cuh. The CPU twin is
// roles_compute.h.
#pragma once

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

// ---- loading a stage: one lane ----

template <int kRank>
using At = expert::MapCoordinates<kRank>;

// Where a stage is written.
struct StagePlace {
  bf16 *a, *b;
  uint64_t* full;
};

template <int kRank>
__device__ __forceinline__ void load_box(const CUtensorMap& map, const At<kRank>& from, bf16* to,
                                         uint64_t* full) {
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, &map, from.at, full);
}

// A half of B that is two chunks of 64 x 64, each of `step` further on; to both CTAs of a pair.
template <bool kToBoth>
__device__ __forceinline__ void load_chunks(const CUtensorMap& map, At<3> from, At<3> step,
                                            bf16* to, uint64_t* full) {
#pragma unroll
  for (int32_t chunk = 0; chunk < 2; ++chunk) {
    if constexpr (kToBoth) {
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, &map, from.at, full,
                                uint16_t{3});
    } else {
      load_box(map, from, to, full);
    }
    to += 64 * 64;
#pragma unroll
    for (int i = 0; i < 3; ++i) from.at[i] += step.at[i];
  }
}

// B out of gate and up, read either way: from(half) is the first chunk of a half of map(half).
template <int kClusterSize, class Map, class From>
__device__ __forceinline__ void load_chunked_b(const StagePlace& place, const Tile& tile,
                                               const Map& map, const From& from, At<3> step) {
  constexpr int kHalf = BLOCK_N / 2 * BLOCK_K;
  if (kClusterSize == 2 && tile.kind == expert::kSharedB) {
    const int32_t half = ptx::get_sreg_cluster_ctarank();
    load_chunks<true>(map(half), from(half), step, place.b + half * kHalf, place.full);
  } else {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half)
      load_chunks<false>(map(half), from(half), step, place.b + half * kHalf, place.full);
  }
}

// FC1 without its activation: x times gate and up, both along rows.
template <int kClusterSize>
__device__ __forceinline__ void load_z(const BackwardOperand& op, const BackwardState& state,
                                       const Tile& tile, int32_t k, const StagePlace& place) {
  const bool shared = is_shared(tile);
  const ExpertMaps& maps = shared ? op.rank.shared : op.rank.routed;
  const int32_t block = block_of(tile).v;
  const auto x_row = static_cast<int32_t>(
      shared ? block * BLOCK_M : op.common.ring_rows * kXPlane + state.slot_of(block) * BLOCK_M);
  load_box(shared ? op.rank.shared_x_rows : op.rank.dy_rows, At<3>{{k, x_row, 0}}, place.a,
           place.full);
  load_chunked_b<kClusterSize>(
      place, tile, [&](int32_t half) -> const CUtensorMap& { return half ? maps.up : maps.gate; },
      [&](int32_t) {
        return At<3>{{k, tile.n_tile * (BLOCK_N / 2), expert_of(tile)}};
      },
      At<3>{{0, 64, 0}});
}

// dY times down; then z, of which gate and up take the two halves of B's place.
template <int kClusterSize>
__device__ __forceinline__ void load_dgrad(const BackwardOperand& op, const BackwardState& state,
                                           const Tile& tile, int32_t k, const StagePlace& place) {
  const bool shared = is_shared(tile);
  const int32_t block = block_of(tile).v, row = block * BLOCK_M,
                slot_row = state.slot_of(block) * BLOCK_M;
  const ExpertMaps& maps = shared ? op.rank.shared : op.rank.routed;
  const int32_t in_epilogue = k - k_blocks_of(op, tile) * BLOCK_K;
  if (in_epilogue < 0) {
    load_box(shared ? op.rank.shared_dy_rows : op.rank.dy_rows,
             At<3>{{k, shared ? row : slot_row, 0}}, place.a, place.full);
    expert::load_columns_of_b<kClusterSize>(
        place.b, place.full, maps.down_columns, tile, [&](int32_t half) {
          return At<4>{{0, k, tile.n_tile * (BLOCK_N / 64) + half * 2, expert_of(tile)}};
        });
    return;
  }
  constexpr int kHalf = BLOCK_N / 2 * BLOCK_K;
  const int32_t column = tile.n_tile * BLOCK_N + in_epilogue;
  const bool saved = op.common.saves_z && (shared || block < state.stream.saved_end);
  if (saved) {
    const int32_t z_row = shared ? row : row - static_cast<int32_t>(state.shared_blocks) * BLOCK_M;
    load_box(maps.z, At<3>{{column, z_row, 0}}, place.b, place.full);
    load_box(maps.z, At<3>{{column + op.intermediate(tile), z_row, 0}}, place.b + kHalf,
             place.full);
  } else {
    const auto plane_rows = static_cast<int32_t>(op.common.ring_rows);
    load_box(op.rank.grad_rows, At<3>{{column, slot_row + kDgatePlane * plane_rows, 0}}, place.b,
             place.full);
    load_box(op.rank.grad_rows, At<3>{{column, slot_row + kDupPlane * plane_rows, 0}},
             place.b + kHalf, place.full);
  }
}

// dgate times gate, then dup times up.
template <int kClusterSize>
__device__ __forceinline__ void load_dx(const BackwardOperand& op, const BackwardState& state,
                                        const Tile& tile, int32_t k, const StagePlace& place) {
  const ExpertMaps& maps = is_shared(tile) ? op.rank.shared : op.rank.routed;
  const int32_t width = op.intermediate(tile);
  const bool is_up = k >= width;
  if (is_up) k -= width;
  const auto row = static_cast<int32_t>(state.slot_of(block_of(tile).v) * BLOCK_M +
                                        (is_up ? kDupPlane : kDgatePlane) * op.common.ring_rows);
  // Past both, where a tile has more K blocks than there are columns: out of the ring, zeros.
  const auto column = k < width ? k : static_cast<int32_t>(op.common.ring_width);
  load_box(op.rank.grad_rows, At<3>{{column, row, 0}}, place.a, place.full);
  load_chunked_b<kClusterSize>(
      place, tile, [&](int32_t) -> const CUtensorMap& { return is_up ? maps.up : maps.gate; },
      [&](int32_t half) {
        return At<3>{{tile.n_tile * BLOCK_N + half * (BLOCK_N / 2), k, expert_of(tile)}};
      },
      At<3>{{64, 0, 0}});
}

// The rows of a chunk, transposed: dgate or dup with x, dY with w A.
template <int kClusterSize>
__device__ __forceinline__ void load_wgrad(const BackwardOperand& op, const BackwardState& state,
                                           const Tile& tile, int32_t k, const StagePlace& place) {
  const bool shared = is_shared(tile), is_down = kind_of(tile) == kWgradDown;
  const ExpertMaps& maps = shared ? op.rank.shared : op.rank.routed;
  const int32_t num_k = num_k_of(tile), first_block = first_block_of(tile);
  const auto ring_rows = static_cast<int32_t>(op.common.ring_rows);
  // A chunk may go round the ring; a K block never does.
  const int32_t in_ring = state.slot_of(first_block) * BLOCK_M,
                ring_begin = in_ring + k < ring_rows ? in_ring : in_ring - ring_rows;
  const int32_t in_tensor = first_block * BLOCK_M;  // rows of tokens, shared expert
  const int32_t dy_begin = shared ? in_tensor : ring_begin;
  const int32_t x_begin = shared ? in_tensor
                          : op.common.pulls_x
                              ? ring_begin
                              : in_tensor - static_cast<int32_t>(state.shared_blocks) * BLOCK_M;
  const auto rows = [&](int32_t begin, int32_t chunk) {
    return At<5>{{0, device::kRowBound - num_k + k, chunk, begin + num_k, device::kRowBound}};
  };
  const int32_t m =
      is_down ? static_cast<int32_t>(op.common.problem.hidden) : op.intermediate(tile);
  const int32_t a_chunk = tile.row_begin % m / 64;
  if (is_down) {
    load_box(maps.dy_columns, rows(dy_begin, a_chunk), place.a, place.full);
  } else {
    const int32_t plane = kind_of(tile) == kWgradGate ? kDgatePlane : kDupPlane;
    load_box(op.rank.grad_columns, rows(plane * ring_rows + ring_begin, a_chunk), place.a,
             place.full);
  }
  expert::load_columns_of_b<kClusterSize>(
      place.b, place.full, is_down ? op.rank.grad_columns : maps.x_columns, tile,
      [&](int32_t half) {
        return rows(is_down ? kWaPlane * ring_rows + ring_begin : x_begin,
                    column_tile_of(tile) * (BLOCK_N / 64) + half * 2);
      });
}

template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_stage(Shared& shared, const BackwardOperand& op,
                                           const Tile& tile, int32_t k,
                                           const expert::RingPosition<expert::kNumStages>& stage,
                                           const device::WaitLimits& limits) {
  constexpr uint32_t kZBytes = 2 * BLOCK_M * 64 * sizeof(bf16);
  const bool is_z = kind_of(tile) == kDgrad && k >= k_blocks_of(op, tile) * BLOCK_K;
  if (!expert::open_stage(shared, stage, is_z ? kZBytes : expert::kStageBytes, limits))
    return false;
  const BackwardState& state = shared.schedule;
  const StagePlace place{shared.a[stage.slot_idx()], shared.b[stage.slot_idx()],
                         &shared.stage_full[stage.slot_idx()]};
  switch (kind_of(tile)) {
    case kRemadeZ: load_z<kClusterSize>(op, state, tile, k, place); break;
    case kDgrad: load_dgrad<kClusterSize>(op, state, tile, k, place); break;
    case kDx: load_dx<kClusterSize>(op, state, tile, k, place); break;
    default: load_wgrad<kClusterSize>(op, state, tile, k, place); break;
  }
  return true;
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
    // Signalled by dgrad: every column tile of every block of the chunk is written.
    if (!wait_count(common.counters.dgrad_done + chunk, state.stream.dgrad_tickets(chunk),
                    WaitFor::fc1_done, chunk))
      return false;
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
