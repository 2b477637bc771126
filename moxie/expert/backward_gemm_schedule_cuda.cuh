// Tile order of the stand-alone weight gradients (a policy of grouped_gemm_cuda.cuh). dgrad and dX
// take BandSchedule: their tiles are those of the forward.
#pragma once

#include "moxie/expert/backward_gemm_operands_cuda.cuh"
#include "moxie/expert/grouped_gemm_schedule_cuda.cuh"

namespace moxie::expert {

// Gradients of one launch: those of gate, up and down.
inline constexpr int kMaxWgrads = 3;

// Expert by expert, gradient by gradient; inside, bands of row tiles, column tiles outer, so that
// the CTAs that run at once need about as many columns of the left matrix as of the right. A pair
// of CTAs takes two row tiles of one column tile and shares B; the tiles of an odd last row pair up
// along the row.
template <int kClusterSize>
struct WgradSchedule {
  using Shared = typename BandSchedule<1>::Shared;

  // One expert's gradient [m, n] in tiles.
  struct Tiling {
    int32_t m;
    int32_t num_n_tiles;
    int32_t band_tiles;  // row tiles per band, a multiple of kClusterSize

    __device__ __forceinline__ uint32_t row_units() const {
      return (m + BLOCK_M - 1) / BLOCK_M / kClusterSize;
    }
    __device__ __forceinline__ uint32_t num_units() const {
      const uint32_t num_m_tiles = (m + BLOCK_M - 1) / BLOCK_M;
      return row_units() * num_n_tiles +
             (num_m_tiles % kClusterSize != 0 ? (num_n_tiles + 1) / 2 : 0);
    }
  };

  const int32_t* expert_rows;  // [E]
  int32_t num_experts;
  Tiling wgrads[kMaxWgrads];
  int32_t num_wgrads;
  bool skips_empty;  // nothing is written for experts without rows

  struct Walk {
    const WgradSchedule& schedule;
    const uint16_t* block_begin;

    // Lane r gets the tile of CTA r.
    __device__ __forceinline__ Tile tile(uint32_t ticket, int32_t lane_idx) const {
      uint32_t per_expert = 0;
      for (int32_t i = 0; i < schedule.num_wgrads; ++i)
        per_expert += schedule.wgrads[i].num_units();

      // A last wave that fills at most half of the clusters is handed out as half tiles of 64 rows.
      const uint32_t num_whole = per_expert * schedule.num_experts;
      const uint32_t num_clusters = gridDim.x / kClusterSize;
      const uint32_t in_last_wave = num_whole % num_clusters;
      const uint32_t num_split = 2 * in_last_wave <= num_clusters ? in_last_wave : 0;
      if (ticket >= num_whole + num_split) return {0, 0, 0, 0, 0, kNoMoreTiles};
      int32_t half_begin = 0, half_rows = BLOCK_M;
      if (ticket >= num_whole - num_split) {
        const uint32_t in_split = ticket - (num_whole - num_split);
        ticket = num_whole - num_split + in_split / 2;
        half_begin = in_split % 2 * (BLOCK_M / 2);
        half_rows = BLOCK_M / 2;
      }
      const int32_t expert_idx = ticket / per_expert;
      uint32_t unit = ticket - expert_idx * per_expert;
      int32_t product = 0;
      while (unit >= schedule.wgrads[product].num_units())
        unit -= schedule.wgrads[product++].num_units();
      const Tiling& tiling = schedule.wgrads[product];
      const uint32_t num_n_tiles = tiling.num_n_tiles, row_units = tiling.row_units();
      const int32_t cta_rank = lane_idx % kClusterSize;

      int32_t m_tile, n_tile;
      const bool is_pair = unit < row_units * num_n_tiles;
      if (is_pair) {
        const uint32_t band_units = tiling.band_tiles / kClusterSize;
        const uint32_t units_before = unit / (band_units * num_n_tiles) * band_units;
        const uint32_t in_band = unit - units_before * num_n_tiles;
        const uint32_t units_here = min(band_units, row_units - units_before);
        m_tile = (units_before + in_band % units_here) * kClusterSize + cta_rank;
        n_tile = in_band / units_here;
      } else {
        m_tile = row_units * kClusterSize;
        n_tile = (unit - row_units * num_n_tiles) * 2 + cta_rank;
      }
      // An odd last tile is paired with itself, the second time without rows.
      const bool is_real = n_tile < static_cast<int32_t>(num_n_tiles);
      const int32_t num_k = schedule.expert_rows[expert_idx];
      const int32_t row_begin = m_tile * BLOCK_M + half_begin;
      Tile tile = wgrad_tile(expert_idx * tiling.m + row_begin,
                             min(n_tile, static_cast<int32_t>(num_n_tiles) - 1),
                             block_begin[expert_idx], num_k);
      if (is_real && !(schedule.skips_empty && num_k == 0))
        tile.num_rows = static_cast<uint16_t>(max(0, min(half_rows, tiling.m - row_begin)));
      tile.product = static_cast<uint8_t>(product);
      tile.kind = kClusterSize == 2 && is_pair ? kSharedB : kOwnB;
      return tile;
    }
  };

  // Warp-collective.
  __device__ __forceinline__ Walk open(Shared& shared) const {
    return {*this, BandSchedule<1>{expert_rows, num_experts, 1, 1}.open(shared).block_begin};
  }
};

}  // namespace moxie::expert
