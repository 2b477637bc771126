// Merge on the GPU: a warp sums the pieces of its tokens. Contract: merge.h; plain body:
// merge_ref.h.
//
// FP32 in slot order, the shared expert last; slots without a route are skipped by a bit mask,
// their memory is never read. Eight slots are loaded before the first is added: the stage is bound
// by memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "moxie/core/dtype.h"
#include "moxie/pipeline/tiles.h"

namespace moxie::merge {

inline constexpr int64_t kMaxSlots = 64;  // bits of the mask
inline constexpr int kSlotsInFlight = 8;

struct Merge {
  const int32_t* ids;      // [T, K] -1 = no route
  const bf16* returns;     // [T * K, H]
  const bf16* shared_out;  // [T, H] or null
  bf16* out;               // [T, H]
  int64_t hidden;
  int32_t top_k;
};

__device__ __forceinline__ void add_chunk(float (&sum)[8], const uint4& chunk) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 round_chunk(const float (&sum)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Bit k: slot k of the token has a route.
__device__ __forceinline__ uint64_t slots_of(const Merge& m, int64_t token, int32_t lane_idx) {
  uint64_t mask = 0;
  for (int32_t base = 0; base < m.top_k; base += 32) {
    const int32_t slot = base + lane_idx;
    mask |= uint64_t{__ballot_sync(~0u, slot < m.top_k && m.ids[token * m.top_k + slot] >= 0)}
            << base;
  }
  return mask;
}

// Columns `cols` (multiples of 8) of `tokens`, by one warp.
__device__ __forceinline__ void merge_tokens(const Merge& m, pipeline::Range tokens,
                                             pipeline::Range cols) {
  const int32_t lane_idx = threadIdx.x % 32;
  const int32_t row_chunks = static_cast<int32_t>(m.hidden / 8),
                end = static_cast<int32_t>(cols.end / 8);
#pragma unroll 1
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const uint64_t mask = slots_of(m, t, lane_idx);
    const uint4* pieces = reinterpret_cast<const uint4*>(m.returns) + t * m.top_k * row_chunks;
#pragma unroll 1
    for (int32_t c = static_cast<int32_t>(cols.begin / 8) + lane_idx; c < end; c += 32) {
      float sum[8] = {};
#pragma unroll 1
      for (int32_t base = 0; base < m.top_k; base += kSlotsInFlight) {
        const uint32_t here = static_cast<uint32_t>(mask >> base);  // bits past top_k are 0
        const int32_t first =
            base * row_chunks + c;  // in chunks of the token: 32 bits hold 64 slots
        uint4 chunk[kSlotsInFlight];
#pragma unroll
        for (int k = 0; k < kSlotsInFlight; ++k) {
          chunk[k] =
              {};  // else a predicated load keeps the old value alive through the loop: spills
          if (here >> k & 1) chunk[k] = __ldcg(pieces + (first + k * row_chunks));
        }
#pragma unroll
        for (int k = 0; k < kSlotsInFlight; ++k) {
          if (here >> k & 1) add_chunk(sum, chunk[k]);
        }
      }
      if (m.shared_out != nullptr) {
        add_chunk(sum, __ldcg(reinterpret_cast<const uint4*>(m.shared_out) + t * row_chunks + c));
      }
      reinterpret_cast<uint4*>(m.out)[t * row_chunks + c] = round_chunk(sum);
    }
  }
}

}  // namespace moxie::merge
