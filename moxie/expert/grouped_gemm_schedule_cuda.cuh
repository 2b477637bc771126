// Tile order and readiness of the stand-alone grouped GEMM (policies of grouped_gemm_cuda.cuh).
#pragma once

#include <cuda/ptx>

#include "moxie/expert/grouped_gemm_cuda.cuh"

namespace moxie::expert {

// Bands of row blocks; inside a band all column tiles, row blocks fastest, every other band
// backwards. CTAs that run at the same time then share band_blocks blocks of A and a few column
// tiles of B in L2, and a band begins with the column tiles the last one ended with.
template <int kClusterSize>
struct BandSchedule {
  static constexpr int kMaxExperts = 1024;
  struct Shared {
    uint16_t block_begin[kMaxExperts + 1];  // 16 bits: up to 65535 blocks = 8.4 M rows
  };

  const int32_t* expert_rows;  // [E] real rows of each expert
  int32_t num_experts;
  int32_t num_n_tiles;
  int32_t band_blocks;  // a multiple of kClusterSize

  // The ticket warp's view of the order; parameters stay in constant memory, registers are scarce
  // here.
  struct Walk {
    const BandSchedule& schedule;
    const uint16_t* block_begin;

    // Warp-collective: lane r gets the tile of CTA r.
    __device__ __forceinline__ Tile tile(uint32_t ticket, int32_t lane_idx) const {
      const uint32_t num_n_tiles = schedule.num_n_tiles;
      const uint32_t band_units = schedule.band_blocks / kClusterSize;
      const int32_t num_blocks = block_begin[schedule.num_experts];
      const uint32_t num_units = (num_blocks + kClusterSize - 1) / kClusterSize;

      // A last wave that fills at most a third of the clusters is handed out as half tiles of 64
      // rows.
      const uint32_t num_whole = num_units * num_n_tiles;
      const uint32_t num_clusters = gridDim.x / kClusterSize;
      const uint32_t in_last_wave = num_whole % num_clusters;
      const uint32_t num_split = 3 * in_last_wave <= num_clusters ? in_last_wave : 0;
      Tile tile{0, 0, 0, 0, 0, kNoMoreTiles};
      if (ticket >= num_whole + num_split) return tile;
      int32_t half_begin = 0, half_rows = BLOCK_M;
      if (ticket >= num_whole - num_split) {
        const uint32_t in_split = ticket - (num_whole - num_split);
        ticket = num_whole - num_split + in_split / 2;
        half_begin = in_split % 2 * (BLOCK_M / 2);
        half_rows = BLOCK_M / 2;
      }

      const uint32_t units_before = ticket / (band_units * num_n_tiles) * band_units;
      const uint32_t units_here = min(band_units, num_units - units_before);
      const uint32_t in_band = ticket - units_before * num_n_tiles;
      const uint32_t in_order = in_band / units_here;
      const bool is_backward = units_before / band_units % 2 == 1;
      tile.n_tile = is_backward ? num_n_tiles - 1 - in_order : in_order;
      const int32_t unit = units_before + in_band % units_here;

      // An odd last block is paired with itself, the second time without rows.
      const int32_t cta_rank = lane_idx % kClusterSize;
      const int32_t block = min(unit * kClusterSize + cta_rank, num_blocks - 1);
      const bool is_real = block == unit * kClusterSize + cta_rank;
      const int32_t first_expert = expert_of(unit * kClusterSize, lane_idx);
      const int32_t last_expert =
          kClusterSize == 1
              ? first_expert
              : expert_of(min(unit * kClusterSize + kClusterSize - 1, num_blocks - 1), lane_idx);
      tile.expert_idx = cta_rank == 0 ? first_expert : last_expert;
      tile.kind = kClusterSize == 2 && first_expert == last_expert ? kSharedB : kOwnB;
      tile.row_begin = block * BLOCK_M + half_begin;
      const int32_t rows_left = schedule.expert_rows[tile.expert_idx] -
                                (block - block_begin[tile.expert_idx]) * BLOCK_M - half_begin;
      tile.num_rows = is_real ? max(0, min(half_rows, rows_left)) : 0;
      return tile;
    }

    // Warp-collective: the number of experts that end at or before the block is the block's expert.
    __device__ __forceinline__ int32_t expert_of(int32_t block, int32_t lane_idx) const {
      int32_t num_ended = 0;
#pragma unroll 1
      for (int32_t e = lane_idx; e < schedule.num_experts; e += 32)
        num_ended += block_begin[e + 1] <= block;
      return __reduce_add_sync(~0u, num_ended);
    }
  };

  // Warp-collective: counts blocks per expert.
  __device__ __forceinline__ Walk open(Shared& shared) const {
    const int32_t lane_idx = threadIdx.x % 32;
    int32_t num_blocks = 0;
    if (lane_idx == 0) shared.block_begin[0] = 0;
#pragma unroll 1
    for (int32_t base = 0; base < num_experts; base += 32) {
      const int32_t e = base + lane_idx;
      int32_t sum = e < num_experts ? (expert_rows[e] + BLOCK_M - 1) / BLOCK_M : 0;
#pragma unroll
      for (int32_t step = 1; step < 32; step *= 2) {
        const int32_t lower = __shfl_up_sync(~0u, sum, step);
        if (lane_idx >= step) sum += lower;
      }
      if (e < num_experts) shared.block_begin[e + 1] = static_cast<uint16_t>(num_blocks + sum);
      num_blocks += __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();  // block_begin, to all lanes of this warp
    return {*this, shared.block_begin};
  }
};

// All of A is in place before the launch.
struct AlwaysReady {
  __device__ __forceinline__ bool wait(const Tile&, const device::WaitLimits&) const {
    return true;
  }
};

}  // namespace moxie::expert
