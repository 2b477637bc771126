// Combine on the GPU: a consumer warp writes its finished row pieces to the rows' homes.
// Contract: combine.h; plain body: combine_ref.h.
//
// A piece is 16 rows x 64 columns; two neighbouring ones leave together, so that each row goes out
// as 256 bytes in one instruction: whole link packets, and rows of own tokens as whole lines. The
// stores are plain ones (not the copy engine's), so a thread that acquires the warp's arrival may
// release them to other ranks.
#pragma once

#include <cuda_runtime.h>

#include "moxie/core/dtype.h"
#include "moxie/device/stmatrix.cuh"

namespace moxie::combine {

inline constexpr int32_t kPieceRows = 16, kPieceColumns = 64;

// A piece into staging: v[2j + h] holds columns 8j + 2*(lane%4) and +1 of row lane/4 + 8h. The
// 16-byte chunk c of row r lies at chunk c ^ (r % 8).
__device__ __forceinline__ void stage_piece(const uint32_t (&v)[16], bf16* staging /* [16 * 64] */,
                                            uint32_t lane_idx) {
  __syncwarp();  // all have read what was here
  const uint32_t row = lane_idx % 16;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(staging) + row * 128;
#pragma unroll
  for (int32_t j = 0; j < 8; j += 2) {
    const uint32_t chunk = j + lane_idx / 16;
    device::stmatrix_x4(bytes + ((chunk ^ (row % 8)) * 16), v[2 * j], v[2 * j + 1], v[2 * j + 2],
                        v[2 * j + 3]);
  }
}

// Two staged pieces, columns [column, column + 128) of the warp's rows.
__device__ __forceinline__ void push_pair(const bf16* staging /* [2][16 * 64] */,
                                          bf16* const* row_home /* [16] */, int32_t num_rows,
                                          int32_t column, int32_t num_columns, uint32_t lane_idx) {
  __syncwarp();  // the pieces, to all lanes
  const uint32_t piece = lane_idx / 8 % 2, chunk = lane_idx % 8;
  const auto at = static_cast<int32_t>(column + piece * kPieceColumns + chunk * 8);
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(staging) + piece * (kPieceRows * 128);
#pragma unroll 2  // registers: the accumulators and two packed pieces are alive
  for (int32_t i = 0; i < kPieceRows / 2; ++i) {
    const auto row = static_cast<int32_t>(i * 2 + lane_idx / 16);
    if (row >= num_rows || at >= num_columns) continue;
    const uint4 value =
        *reinterpret_cast<const uint4*>(bytes + row * 128 + ((chunk ^ (row % 8)) * 16));
    *reinterpret_cast<uint4*>(row_home[row] + at) = value;
  }
}

}  // namespace moxie::combine
