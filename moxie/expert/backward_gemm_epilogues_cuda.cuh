// Epilogues of the backward's products (policies of grouped_gemm_cuda.cuh): SwiGLU backward, and
// weight gradients. dX and BF16 weight gradients are stored as the forward stores C.
#pragma once

#include "moxie/core/problem.h"
#include "moxie/device/ldmatrix.cuh"
#include "moxie/expert/backward_gemm_schedule_cuda.cuh"
#include "moxie/expert/grouped_gemm_epilogues_cuda.cuh"

namespace moxie::expert {

// ---- dgrad ----

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// SwiGLU's backward on what a warp holds: dA' in its accumulators, gate and up in a stage.
// kGeneral: the clamped activations too.
template <bool kGeneral>
struct ActivationBackward {
  struct Sums {
    float of_row[2];  // this thread's part of rowsum(dA' . A)
  };

  // 64 columns of a tile, 16 rows: dgate, dup and wA take the places of gate, up and A. This lane's
  // part is then visible to copies that store them, and to those that load the stage's next
  // contents.
  static __device__ __forceinline__ void convert_piece(const Activation& activation,
                                                       const float4* own /* own_sums() */,
                                                       const float (&weights)[2], Sums& sums,
                                                       uint8_t* gate_piece, uint8_t* up_piece,
                                                       uint8_t* wa_piece, int32_t lane_idx) {
    const int32_t piece_row = lane_idx % 16;
#pragma unroll 1  // short: unrolled, it takes longer to be fetched than to run
    for (int32_t j = 0; j < 8; j += 2) {
      // 16-byte chunk c of row r lies at chunk c ^ (r % 8)
      const int32_t at = piece_row * 128 + (((j + lane_idx / 16) ^ (piece_row % 8)) * 16);
      const float4 left = own[j * 32], right = own[(j + 1) * 32];
      const float da[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
      uint32_t gate[4], up[4], out_a[4];
      device::ldmatrix_x4(gate, gate_piece + at);
      device::ldmatrix_x4(up, up_piece + at);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {  // columns 8 (j + i / 2) .., rows h = i % 2
        const float weight = weights[i % 2];
        float& sum = sums.of_row[i % 2];
        const Grads low =
            element(activation, da[2 * i], low_bf16(gate[i]), low_bf16(up[i]), weight, sum);
        const Grads high =
            element(activation, da[2 * i + 1], high_bf16(gate[i]), high_bf16(up[i]), weight, sum);
        gate[i] = pack_bf16(low.gate, high.gate);
        up[i] = pack_bf16(low.up, high.up);
        out_a[i] = pack_bf16(low.wa, high.wa);
      }
      device::stmatrix_x4(gate_piece + at, gate[0], gate[1], gate[2], gate[3]);
      device::stmatrix_x4(up_piece + at, up[0], up[1], up[2], up[3]);
      device::stmatrix_x4(wa_piece + at, out_a[0], out_a[1], out_a[2], out_a[3]);
    }
    ptx::fence_proxy_async(ptx::space_shared);
    __syncwarp();
  }

  // The row's sum over the tile's columns, in the first of its four lanes: over a thread's columns
  // in order, then over the lanes in a fixed order.
  static __device__ __forceinline__ float row_sum(const Sums& sums, int32_t h) {
    float sum = sums.of_row[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }

 private:
  struct Grads {
    float gate, up, wa;
  };

  // The twin of expert::activate_grad. A NaN fails the comparisons and stays a NaN.
  static __device__ __forceinline__ Grads element(const Activation& activation, float da,
                                                  float gate, float up, float weight, float& sum) {
    float alpha = 1.0f;
    bool gate_pass = true, up_pass = true;
    if constexpr (kGeneral) {
      if (activation.kind != ActivationKind::swiglu) {
        const float limit = activation.limit;
        gate_pass = !(gate > limit);
        up_pass = !(up > limit || up < -limit);
        gate = gate_pass ? gate : limit;
        up = up > limit ? limit : up < -limit ? -limit : up;
      }
      if (activation.kind == ActivationKind::gpt_oss) {
        alpha = activation.alpha;
        up += 1.0f;
      }
    }
    // sigmoid(x) = 1/2 + 1/2 tanh(x / 2); 1 - sigmoid(x) likewise
    const float half_tanh = 0.5f * device::tanh_approx(0.5f * alpha * gate);
    const float s = 0.5f + half_tanh, glu = gate * s;
    const float value = glu * up, weighted = weight * da;
    sum = fmaf(da, value, sum);
    const float d_gate = fmaf(alpha * glu, 0.5f - half_tanh, s) * up;
    return {gate_pass ? weighted * d_gate : 0.0f, up_pass ? weighted * glu : 0.0f, weight * value};
  }
};

// 16 rows of 64 columns in a stage, and where they go: `map` at `row`, whose element (row, column)
// is `data`.
struct StagePiece {
  const CUtensorMap& map;
  int32_t row;
  bf16* data;
  const uint8_t* piece;
};
// Stores them: by tensor copies where all rows are real, else row by row, `stride` elements apart.
template <int kNum>
__device__ __forceinline__ void store_from_stage(const StagePiece (&pieces)[kNum], int32_t column,
                                                 int64_t stride, int32_t num_rows,
                                                 int32_t lane_idx) {
  if (num_rows >= 16) {
    if (lane_idx != 0) return;
#pragma unroll
    for (const StagePiece& p : pieces) {
      ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &p.map, {column, p.row, 0},
                                p.piece);
    }
    return;
  }
#pragma unroll
  for (const StagePiece& p : pieces) {
#pragma unroll 1
    for (int32_t r = lane_idx / 8; r < num_rows; r += 4) {
      const int32_t chunk = lane_idx % 8;
      *reinterpret_cast<uint4*>(p.data + r * stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(p.piece + r * 128 + ((chunk ^ (r % 8)) * 16));
    }
  }
}

// From dA' in the accumulators and gate and up in a stage: dgate, dup and wA, which take the places
// of gate, up and A in that stage and leave from there. A warp reads, overwrites and stores its own
// 16 rows.
template <bool kGeneral>
struct DgradEpilogue {
  static constexpr int kNumDeferred = 1;  // the loop's least; nothing is deferred
  static constexpr bool kPublishes = false;
  static constexpr int kLatePublishBlock = 0;
  static constexpr bool kResumes = false;
  GemmOutput dgate, dup, wa;
  const float* row_weight;  // [rows], or null: 1
  float* dw_partial;        // [rows, num_n_tiles]
  int32_t num_n_tiles;
  Activation activation;  // kGeneral only

  using Prepared = RowWeights;
  using Backward = ActivationBackward<kGeneral>;
  using Sums = typename Backward::Sums;

  // Before the main loop, which hides the latency.
  __device__ __forceinline__ Prepared prepare(const Tile& tile, const EpilogueWarp& warp) const {
    return load_row_weights(row_weight, tile, warp);
  }

  __device__ __forceinline__ Sums begin(const Prepared&, const Tile&, const EpilogueWarp&) const {
    return {{0.0f, 0.0f}};
  }

  // Columns 64 * piece .. + 63 of the tile.
  __device__ __forceinline__ void convert_stage(const float4* own, const Prepared& prepared,
                                                Sums& sums, const Tile& tile, int32_t piece,
                                                const EpilogueWarp& warp, bf16* stage_a,
                                                bf16* stage_b) const {
    const int32_t num_rows = tile.num_rows - warp.warp_row,
                  column = tile.n_tile * BLOCK_N + piece * 64;
    if (num_rows > 0) {
      uint8_t* gate_piece = reinterpret_cast<uint8_t*>(stage_b + warp.warp_row * 64);
      uint8_t* up_piece = gate_piece + BLOCK_M * 128;
      uint8_t* wa_piece = reinterpret_cast<uint8_t*>(stage_a + warp.warp_row * 64);
      Backward::convert_piece(activation, own, prepared.weight, sums, gate_piece, up_piece,
                              wa_piece, warp.lane_idx);
      if (column < dgate.num_columns) {
        const int32_t row = tile.row_begin + warp.warp_row;
        const int64_t at = int64_t{row} * dgate.num_columns + column;
        const StagePiece pieces[3] = {{dgate.map, row, dgate.data + at, gate_piece},
                                      {dup.map, row, dup.data + at, up_piece},
                                      {wa.map, row, wa.data + at, wa_piece}};
        store_from_stage(pieces, column, dgate.num_columns, num_rows, warp.lane_idx);
      }
    }
    // One group per stage: its release waits for it.
    if (warp.lane_idx == 0) ptx::cp_async_bulk_commit_group();
  }

  __device__ __forceinline__ void finish(const Sums& sums, const Tile& tile,
                                         const EpilogueWarp& warp) const {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float sum = Backward::row_sum(sums, h);
      const int32_t row = warp.warp_row + warp.lane_idx / 4 + 8 * h;
      if (warp.lane_idx % 4 == 0 && row < tile.num_rows)
        dw_partial[int64_t{tile.row_begin + row} * num_n_tiles + tile.n_tile] = sum;
    }
  }

  // Of tiles without epilogue stages: there are none.
  __device__ __forceinline__ void convert(const float (&)[128], const Prepared&, const Tile&,
                                          const EpilogueWarp&,
                                          uint32_t (&)[kNumDeferred][16]) const {}
  __device__ __forceinline__ void store(const uint32_t (&)[16], int32_t, const Tile&,
                                        const EpilogueWarp&) const {}
  __device__ __forceinline__ void publish(const Tile&, uint32_t, const EpilogueWarp&) const {}
  __device__ __forceinline__ void drain(const EpilogueWarp& warp) const {
    drain_stores(warp.lane_idx);
  }
};

// ---- wgrad ----

// BF16: as the forward's C, in rows of [E * m, n]; all four pieces deferred.
struct WgradStore {
  static constexpr int kNumDeferred = 4;
  static constexpr bool kPublishes = false;
  static constexpr int kLatePublishBlock = 0;
  static constexpr bool kResumes = false;
  GemmOutput out[kMaxWgrads];
  struct Prepared {};

  __device__ __forceinline__ Prepared prepare(const Tile&, const EpilogueWarp&) const { return {}; }

  __device__ __forceinline__ void convert(const float (&acc)[128], Prepared, const Tile&,
                                          const EpilogueWarp&,
                                          uint32_t (&packed)[kNumDeferred][16]) const {
#pragma unroll
    for (int32_t i = 0; i < 64; ++i) packed[i / 16][i % 16] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
  }

  __device__ __forceinline__ void store(const uint32_t (&values)[16], int32_t piece,
                                        const Tile& tile, const EpilogueWarp& warp) const {
    const int32_t num_rows = tile.num_rows - warp.warp_row;
    if (num_rows <= 0) return;
    store_piece(out[tile.product], values, staging_of(warp, piece), tile.row_begin + warp.warp_row,
                num_rows, n_tile_of_wgrad(tile) * BLOCK_N + piece * 64, warp.lane_idx);
  }

  __device__ __forceinline__ void publish(const Tile&, uint32_t, const EpilogueWarp&) const {}
  __device__ __forceinline__ void drain(const EpilogueWarp& warp) const {
    drain_stores(warp.lane_idx);
  }
};

// All of a warp's sums, 16 rows x 256 columns, written to or added to an FP32 matrix (box of 16
// rows x 32 columns) through the warp's staging.
__device__ __forceinline__ void store_float_rows(const float (&acc)[128], const CUtensorMap& map,
                                                 int32_t row_begin, int32_t first_column,
                                                 int32_t num_columns, bool adds,
                                                 const EpilogueWarp& warp) {
  const int32_t row = warp.lane_idx / 4;
#pragma unroll
  for (int32_t piece = 0; piece < 8; ++piece) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(warp.staging + piece % 2 * (16 * 64));
    // At most the previous piece's copy is still reading: it has the other buffer.
    if (warp.lane_idx == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
    __syncwarp();
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t chunk = 2 * j + warp.lane_idx % 4 / 2;  // swizzled as in store_piece
        const float* pair = acc + piece * 16 + 4 * j + 2 * h;
        *reinterpret_cast<float2*>(bytes + (row + 8 * h) * 128 + ((chunk ^ row) * 16) +
                                   warp.lane_idx % 2 * 8) = make_float2(pair[0], pair[1]);
      }
    }
    ptx::fence_proxy_async(ptx::space_shared);  // this lane's part, to the copy engine
    __syncwarp();
    const int32_t column = first_column + piece * 32;
    if (warp.lane_idx == 0) {
      if (column < num_columns) {
        const int32_t at[2] = {column, row_begin};
        if (adds) {
          ptx::cp_reduce_async_bulk_tensor(ptx::space_global, ptx::space_shared, ptx::op_add, &map,
                                           at, bytes);
        } else {
          ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map, at, bytes);
        }
      }
      ptx::cp_async_bulk_commit_group();
    }
  }
}

// FP32, written or added, by copies of 16 rows x 32 columns per warp. Nothing can be deferred: the
// sums fill all registers. An element of C has one tile, so there is one addition per launch.
struct WgradFloatStore {
  static constexpr int kNumDeferred = 1;
  static constexpr bool kPublishes = false;
  static constexpr int kLatePublishBlock = 0;
  static constexpr bool kResumes = false;
  CUtensorMap out[kMaxWgrads];      // [E * m, n], box 16 x 32
  int32_t num_columns[kMaxWgrads];  // n
  bool adds;
  struct Prepared {};

  __device__ __forceinline__ Prepared prepare(const Tile&, const EpilogueWarp&) const { return {}; }

  __device__ __forceinline__ void convert(const float (&acc)[128], Prepared, const Tile& tile,
                                          const EpilogueWarp& warp,
                                          uint32_t (&)[kNumDeferred][16]) const {
    if (tile.num_rows <= warp.warp_row) return;  // m is a multiple of 64: all 16 rows, or none
    store_float_rows(acc, out[tile.product], tile.row_begin + warp.warp_row,
                     n_tile_of_wgrad(tile) * BLOCK_N, num_columns[tile.product], adds, warp);
  }

  __device__ __forceinline__ void store(const uint32_t (&)[16], int32_t, const Tile&,
                                        const EpilogueWarp&) const {}
  __device__ __forceinline__ void publish(const Tile&, uint32_t, const EpilogueWarp&) const {}
  __device__ __forceinline__ void drain(const EpilogueWarp& warp) const {
    drain_stores(warp.lane_idx);
  }
};

}  // namespace moxie::expert
