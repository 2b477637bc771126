// Combine by communication workers on the GPU: a warp carries rows that FC2 has stored to their
// homes. Contract: combine.h; plain body: push_stored in combine_ref.h.
#pragma once

#include <cuda_runtime.h>

#include "moxie/core/dtype.h"
#include "moxie/pipeline/layout.h"

namespace moxie::combine {

inline constexpr int kRowsTogether = 4, kRowChunks = 2;  // loads in flight per lane: 8

struct Carry {
  std::byte* const* heaps;             // [R]
  int64_t returns_offset;              // [T * K, H] in every heap
  const pipeline::RowOrigin* origins;  // [routed_blocks * 128]
  const bf16* y;                       // [routed_blocks * 128, H]
  int64_t hidden;
};

// Columns `cols` of rows [first, first + num_rows), at most 16 of them, by one warp. y was written
// by tensor copies and made visible before the count that this warp has acquired.
__device__ __forceinline__ void carry_rows(const Carry& c, int64_t first, int32_t num_rows,
                                           pipeline::Range cols) {
  const int32_t lane_idx = threadIdx.x % 32, row_chunks = static_cast<int32_t>(c.hidden / 8),
                end = static_cast<int32_t>(cols.end / 8);
  uint4* own_home = nullptr;  // of row lane
  if (lane_idx < num_rows) {
    const int32_t rank = __ldcg(&c.origins[first + lane_idx].rank),
                  route = __ldcg(&c.origins[first + lane_idx].route);
    own_home =
        reinterpret_cast<uint4*>(c.heaps[rank] + c.returns_offset) + int64_t{route} * row_chunks;
  }
#pragma unroll 1
  for (int32_t base = 0; base < num_rows; base += kRowsTogether) {
    const uint4* from = reinterpret_cast<const uint4*>(c.y) + (first + base) * row_chunks;
    uint4* home[kRowsTogether];
#pragma unroll
    for (int r = 0; r < kRowsTogether; ++r) {
      home[r] = reinterpret_cast<uint4*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(own_home), base + r));
    }
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(cols.begin / 8) + lane_idx; i < end;
         i += 32 * kRowChunks) {
      uint4 chunk[kRowsTogether][kRowChunks];
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
#pragma unroll
        for (int k = 0; k < kRowChunks; ++k) {
          chunk[r][k] = {};  // else a predicated load keeps the old value alive: spills
          if (home[r] != nullptr && i + k * 32 < end)
            chunk[r][k] = __ldcg(from + r * row_chunks + i + k * 32);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
#pragma unroll
        for (int k = 0; k < kRowChunks; ++k) {
          if (home[r] != nullptr && i + k * 32 < end) home[r][i + k * 32] = chunk[r][k];
        }
      }
    }
  }
}

}  // namespace moxie::combine
