// Expert biases in an epilogue: 256 of them beside the main loop into a warp's staging, then onto
// its accumulators. Nothing else is in staging between two tiles' pieces.
#pragma once

#include <cuda_pipeline.h>

#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::expert {

// Columns 0-127 of the tile from `low`, 128-255 from `high`, each as far as it goes (columns).
__device__ __forceinline__ void prefetch_biases(const bf16* low, const bf16* high, int64_t num_low,
                                                int64_t num_high, const EpilogueWarp& warp) {
  const int32_t column = warp.lane_idx % 16 * 8;
  const bool is_low = warp.lane_idx < 16;
  if (column < (is_low ? num_low : num_high)) {
    __pipeline_memcpy_async(warp.staging + warp.lane_idx * 8, (is_low ? low : high) + column, 16);
  }
  __pipeline_commit();
}

// acc += weight of the row * bias of the column. `weights`: of rows lane/4 and lane/4 + 8.
__device__ __forceinline__ void add_biases(float (&acc)[128], float weight_low, float weight_high,
                                           const EpilogueWarp& warp) {
  __pipeline_wait_prior(0);
  __syncwarp();  // the biases, to all lanes
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(warp.staging) + warp.lane_idx % 4;
#pragma unroll
  for (int32_t j = 0; j < 32; ++j) {
    const uint32_t pair = pairs[j * 4];
    const float bias[2] = {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i)
      acc[4 * j + i] += (i < 2 ? weight_low : weight_high) * bias[i % 2];
  }
  __syncwarp();  // all have read them before staging is used again
}

}  // namespace moxie::expert
