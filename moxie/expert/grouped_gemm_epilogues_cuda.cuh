// Epilogues of the stand-alone grouped GEMM: C as it is, and SwiGLU (policies of
// grouped_gemm_cuda.cuh).
//
// Both turn the FP32 accumulators into BF16 pieces of 64 columns and store a piece per warp through
// 2 KB of shared memory and a tensor copy.
#pragma once

#include <cuda_bf16.h>

#include <cuda/ptx>

#include "moxie/device/stmatrix.cuh"
#include "moxie/device/tanh.cuh"
#include "moxie/expert/grouped_gemm_cuda.cuh"

namespace moxie::expert {

// Where an epilogue writes: C [rows, N] row-major, and its tensor map with a box of 16 rows x 64
// columns.
struct GemmOutput {
  CUtensorMap map;
  bf16* data;           // [rows, num_columns]
  int32_t num_columns;  // a multiple of 8
};

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(pair);
}

// A warp's accumulators of 16 rows x 64 columns, `piece` of four, as store_piece() takes them.
__device__ __forceinline__ void pack_piece(const float (&acc)[128], int32_t piece,
                                           uint32_t (&values)[16]) {
#pragma unroll
  for (int32_t i = 0; i < 16; ++i) {
    values[i] = pack_bf16(acc[piece * 32 + 2 * i], acc[piece * 32 + 2 * i + 1]);
  }
}
// Pieces take turns in the warp's staging.
__device__ __forceinline__ bf16* staging_of(const EpilogueWarp& warp, int32_t piece) {
  return warp.staging + piece % 2 * (16 * 64);
}

// Where a piece is stored: rows `stride` elements apart, of which columns below num_columns are
// written.
struct PieceTarget {
  const CUtensorMap& map;
  bf16* data;
  int64_t stride;
  int32_t num_columns;
};

// Stores 16 rows x 64 columns of one warp: v[2j + h] holds columns 8j + 2*(lane%4) and +1 of row
// lane/4 + 8h. Full pieces leave by tensor copy, pieces with padding rows by predicated 16-byte
// stores.
__device__ __forceinline__ void store_piece(const PieceTarget& out, const uint32_t (&v)[16],
                                            bf16* staging, int32_t row, int32_t num_rows,
                                            int32_t column, int32_t lane_idx) {
  // At most the previous piece's copy is still reading: it has the other buffer.
  if (lane_idx == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
  __syncwarp();
  const int32_t piece_row = lane_idx % 16;
  const int32_t swizzle = piece_row % 8;  // 16-byte chunk c of row r lies at chunk c ^ (r % 8)
  uint8_t* bytes = reinterpret_cast<uint8_t*>(staging);
#pragma unroll
  for (int32_t j = 0; j < 8; j += 2) {
    const int32_t chunk = j + lane_idx / 16;
    device::stmatrix_x4(bytes + piece_row * 128 + ((chunk ^ swizzle) * 16), v[2 * j], v[2 * j + 1],
                        v[2 * j + 2], v[2 * j + 3]);
  }
  if (num_rows >= 16) {
    // This lane's part of the piece, from the generic proxy to the copy engine.
    ptx::fence_proxy_async(ptx::space_shared);
    __syncwarp();
    if (lane_idx == 0 && column < out.num_columns) {
      ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &out.map, {column, row, 0},
                                staging);
    }
  } else {
    __syncwarp();
#pragma unroll 1
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t r = i * 4 + lane_idx / 8, chunk = lane_idx % 8;
      if (r < num_rows && column + chunk * 8 < out.num_columns) {
        const uint4 value =
            *reinterpret_cast<const uint4*>(bytes + r * 128 + ((chunk ^ (r % 8)) * 16));
        *reinterpret_cast<uint4*>(out.data + (row + r) * out.stride + column + chunk * 8) = value;
      }
    }
    __syncwarp();  // all have read the piece before its buffer is written again
  }
  // One group per piece, an empty one too: the wait above counts groups.
  if (lane_idx == 0) ptx::cp_async_bulk_commit_group();
}
__device__ __forceinline__ void store_piece(const GemmOutput& out, const uint32_t (&v)[16],
                                            bf16* staging, int32_t row, int32_t num_rows,
                                            int32_t column, int32_t lane_idx) {
  store_piece(PieceTarget{out.map, out.data, out.num_columns, out.num_columns}, v, staging, row,
              num_rows, column, lane_idx);
}

__device__ __forceinline__ void drain_stores(int32_t lane_idx) {
  // All of this lane's copies have written global memory: visible to later kernels, staging free to
  // go.
  if (lane_idx == 0) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}

// C as it is: four pieces of 64 columns, the last kDeferred of them stored beside the next tile.
// With all four deferred the loop needs 216 registers without spills, with two 200.
template <int kDeferred = 4>
struct StoreEpilogue {
  static constexpr int kNumPieces = 4;
  static constexpr int kNumDeferred = kDeferred;
  static constexpr bool kPublishes = false;
  static constexpr int kLatePublishBlock = 0;
  static constexpr bool kResumes = false;
  GemmOutput out;
  struct Prepared {};

  __device__ __forceinline__ Prepared prepare(const Tile&, const EpilogueWarp&) const { return {}; }

  __device__ __forceinline__ void convert(const float (&acc)[128], Prepared, const Tile& tile,
                                          const EpilogueWarp& warp,
                                          uint32_t (&packed)[kNumDeferred][16]) const {
#pragma unroll
    for (int32_t piece = 0; piece < kNumPieces; ++piece) {
      uint32_t at_once[16];
      constexpr int32_t kNumAtOnce = kNumPieces - kNumDeferred;
      uint32_t(&values)[16] = piece < kNumAtOnce ? at_once : packed[max(0, piece - kNumAtOnce)];
      pack_piece(acc, piece, values);
      if (piece < kNumAtOnce) store_columns(values, piece, tile, warp);
    }
  }

  // Stores what convert() put into packed[deferred].
  __device__ __forceinline__ void store(const uint32_t (&values)[16], int32_t deferred,
                                        const Tile& tile, const EpilogueWarp& warp) const {
    store_columns(values, kNumPieces - kNumDeferred + deferred, tile, warp);
  }

  __device__ __forceinline__ void store_columns(const uint32_t (&values)[16], int32_t piece,
                                                const Tile& tile, const EpilogueWarp& warp) const {
    const int32_t num_rows = tile.num_rows - warp.warp_row;
    if (num_rows <= 0) return;
    store_piece(out, values, staging_of(warp, piece), tile.row_begin + warp.warp_row, num_rows,
                tile.n_tile * BLOCK_N + piece * 64, warp.lane_idx);
  }

  // Nobody waits for single tiles: the end of the kernel tells.
  __device__ __forceinline__ void publish(const Tile&, uint32_t, const EpilogueWarp&) const {}
  __device__ __forceinline__ void drain(const EpilogueWarp& warp) const {
    drain_stores(warp.lane_idx);
  }
};

// Of rows lane/4 and lane/4 + 8 of a warp.
struct RowWeights {
  float weight[2];
};
// 1 where there are none (null), and for padding.
__device__ __forceinline__ RowWeights load_row_weights(const float* row_weight, const Tile& tile,
                                                       const EpilogueWarp& warp) {
  RowWeights weights;
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t row = warp.warp_row + warp.lane_idx / 4 + 8 * h;
    weights.weight[h] =
        row_weight != nullptr && row < tile.num_rows ? row_weight[tile.row_begin + row] : 1.0f;
  }
  return weights;
}

// hidden = silu(gate) * up * row_weight: columns 0-127 of a tile are gate, 128-255 up, so both
// values of an element are in one thread. silu(g) = g/2 + g/2 * tanh(g/2).
struct SwigluEpilogue {
  static constexpr int kNumDeferred = 2;  // both pieces
  static constexpr bool kPublishes = false;
  static constexpr int kLatePublishBlock = 0;
  static constexpr bool kResumes = false;
  GemmOutput out;
  const float* row_weight;  // [rows], or null: 1
  using Prepared = RowWeights;

  // Before the main loop, which hides the latency.
  __device__ __forceinline__ Prepared prepare(const Tile& tile, const EpilogueWarp& warp) const {
    return load_row_weights(row_weight, tile, warp);
  }

  __device__ __forceinline__ void convert(const float (&acc)[128], const Prepared& prepared,
                                          const Tile&, const EpilogueWarp&,
                                          uint32_t (&packed)[kNumDeferred][16]) const {
    const auto hidden = [&](int32_t i) {
      const float half_gate = 0.5f * acc[i];
      const float silu = fmaf(half_gate, device::tanh_approx(half_gate), half_gate);
      return silu * acc[64 + i] * prepared.weight[i / 2 % 2];
    };
#pragma unroll
    for (int32_t i = 0; i < 32; ++i)
      packed[i / 16][i % 16] = pack_bf16(hidden(2 * i), hidden(2 * i + 1));
  }

  __device__ __forceinline__ void store(const uint32_t (&values)[16], int32_t piece,
                                        const Tile& tile, const EpilogueWarp& warp) const {
    const int32_t num_rows = tile.num_rows - warp.warp_row;
    if (num_rows <= 0) return;
    store_piece(out, values, warp.staging + piece * (16 * 64), tile.row_begin + warp.warp_row,
                num_rows, tile.n_tile * (BLOCK_N / 2) + piece * 64, warp.lane_idx);
  }

  __device__ __forceinline__ void publish(const Tile&, uint32_t, const EpilogueWarp&) const {}
  __device__ __forceinline__ void drain(const EpilogueWarp& warp) const {
    drain_stores(warp.lane_idx);
  }
};

}  // namespace moxie::expert
