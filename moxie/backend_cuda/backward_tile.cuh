// Tiles of the fused backward: which ticket is which tile, packed into the 16 bytes of
// expert::Tile. The fields mean what they do in the forward, except:
//   expert_idx   low 20 bits: the expert; of a weight gradient the real rows of its chunk (its K).
//                High 12 bits: the chunk
//   row_begin    rows of the pass, 128 per block; of a weight gradient rows of [E * m, n]
//   n_tile       of a weight gradient: column tile, first block << 8, continues << 30, ends << 31
// The host refuses layers that these bits cannot hold. Orders come from pipeline/.
#pragma once

#include "moxie/backend_cuda/backward_state.cuh"
#include "moxie/device/warp_search.cuh"
#include "moxie/expert/grouped_gemm_cuda.cuh"
#include "moxie/pipeline/pairs.h"

namespace moxie::backend_cuda {

using expert::BLOCK_K;
using expert::BLOCK_M;
using expert::BLOCK_N;
using expert::Tile;

inline constexpr int32_t kChunkShift = 20;
inline constexpr int32_t kExpertMask = (1 << kChunkShift) - 1;
inline constexpr uint32_t kContinues = 1u << 30, kEnds = 1u << 31;

// What a tile computes, whoever's expert it is.
__device__ __forceinline__ int32_t kind_of(const Tile& tile) {
  return tile.product % kNumBackwardKinds;
}
__device__ __forceinline__ bool is_shared(const Tile& tile) {
  return tile.product >= kNumBackwardKinds;
}
__device__ __forceinline__ bool is_wgrad(const Tile& tile) { return kind_of(tile) >= kWgradGate; }

__device__ __forceinline__ int32_t chunk_of(const Tile& tile) {
  return static_cast<int32_t>(static_cast<uint32_t>(tile.expert_idx) >> kChunkShift);
}
__device__ __forceinline__ int32_t expert_of(const Tile& tile) {
  return tile.expert_idx & kExpertMask;
}
__device__ __forceinline__ BlockId block_of(const Tile& tile) {
  return BlockId{tile.row_begin / BLOCK_M};
}

// Of weight gradients.
__device__ __forceinline__ int32_t num_k_of(const Tile& tile) {
  return tile.expert_idx & kExpertMask;
}
__device__ __forceinline__ int32_t column_tile_of(const Tile& tile) { return tile.n_tile & 0xFF; }
__device__ __forceinline__ int32_t first_block_of(const Tile& tile) {
  return static_cast<uint32_t>(tile.n_tile) >> 8 & 0x3FFFFF;
}
// The sums of the expert's chunk before are gone on from; this chunk is the expert's last.
__device__ __forceinline__ bool continues(const Tile& tile) {
  return static_cast<uint32_t>(tile.n_tile) & kContinues;
}
__device__ __forceinline__ bool ends(const Tile& tile) {
  return static_cast<uint32_t>(tile.n_tile) & kEnds;
}

struct BackwardSchedule {
  using Shared = BackwardState;

  // Lane r gets the tile of a cluster's CTA r. Warp-collective.
  template <int kClusterSize>
  static __device__ __forceinline__ Tile tile_of_cta(const BackwardState& state, uint32_t unit) {
    if (unit >= state.num_units) return {0, 0, 0, 0, 0, expert::kNoMoreTiles};
    const pipeline::BackwardStream& s = state.stream;
    const int64_t step = device::warp_last_not_above(
        state.step_begin, static_cast<int32_t>(s.num_steps()), static_cast<int64_t>(unit));
    const int64_t i = unit - state.step_begin[step];
    if constexpr (kClusterSize == 1) {
      return tile(state, s.task(step, i));
    } else {
      const pipeline::TicketPair pair = pipeline::BackwardPairs{s, state.step_begin}.pair(step, i);
      const Tile first = tile(state, s.task(step, pair.first));
      Tile second = first;
      second.num_rows = 0;  // without a partner: multiplies and writes nothing
      if (pair.second >= 0) second = tile(state, s.task(step, pair.second));
      Tile own = threadIdx.x % 32 == 1 ? second : first;
      // One product and chunk, so one expert.
      if (first.product == second.product && first.n_tile == second.n_tile)
        own.kind = expert::kSharedB;
      return own;
    }
  }

 private:
  static __device__ __forceinline__ Tile tile(const BackwardState& state,
                                              const pipeline::Task& task) {
    const pipeline::BackwardStream& s = state.stream;
    const auto chunk = static_cast<int32_t>(task.chunk);
    const bool shared = s.shared(chunk);
    const int32_t expert = shared ? 0 : s.chunks.chunk_expert[chunk];
    Tile tile{0, 0, 0, 0, 0, expert::kOwnB};
    tile.product = shared ? kNumBackwardKinds : 0;
    const auto rows_of = [&](BlockId b) {
      return shared ? state.table.rows(b) : state.table.rows(b, LocalExpertId{expert});
    };
    if (task.kind != pipeline::TaskKind::wgrad) {
      tile.row_begin = task.block.v * BLOCK_M;
      tile.n_tile = static_cast<int32_t>(task.tile);
      tile.expert_idx = expert | chunk << kChunkShift;
      tile.num_rows = static_cast<uint16_t>(rows_of(task.block));
      tile.product += task.kind == pipeline::TaskKind::fc1     ? kRemadeZ
                      : task.kind == pipeline::TaskKind::dgrad ? kDgrad
                                                               : kDx;
      return tile;
    }
    const pipeline::WgradTiles& tiles = s.wgrad_of(chunk);
    const pipeline::WgradTile at = tiles.tile(task.tile);
    const pipeline::Range blocks = s.chunks.blocks(chunk);
    const int64_t m = at.matrix == pipeline::WeightMatrix::down ? tiles.hidden : tiles.intermediate;
    // Only the expert's last block is not full.
    const int64_t num_k =
        blocks.size() == 0 ? 0 : (blocks.size() - 1) * BLOCK_M + rows_of(BlockId{blocks.end - 1});
    tile.row_begin = static_cast<int32_t>(expert * m + at.rows.begin);
    tile.n_tile = static_cast<int32_t>(static_cast<uint32_t>(at.cols.begin / BLOCK_N) |
                                       static_cast<uint32_t>(blocks.begin) << 8 |
                                       (s.chunks.first_of_expert(chunk) ? 0 : kContinues) |
                                       (s.chunks.last_of_expert(chunk) ? kEnds : 0));
    tile.expert_idx = static_cast<int32_t>(num_k) | chunk << kChunkShift;
    tile.num_rows = static_cast<uint16_t>(state.skips_empty && num_k == 0 ? 0 : at.rows.size());
    tile.product += kWgradGate + static_cast<int32_t>(at.matrix);
    return tile;
  }
};

}  // namespace moxie::backend_cuda
