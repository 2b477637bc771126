// Searching an ascending table with a whole warp: one round of independent loads per 32 entries,
// where a binary search is a chain of dependent ones (300 cycles each from L2).
#pragma once

#include <cstdint>

namespace moxie::device {

// Index of the last entry of begin[0 .. n) that is <= value, as pipeline::last_not_above; begin[0]
// <= value. Warp-collective, the same arguments in all lanes.
template <class Int>
__device__ __forceinline__ int32_t warp_last_not_above(const Int* begin, int32_t n, Int value) {
  int32_t num_not_above = 0;
#pragma unroll 2
  for (int32_t i = threadIdx.x % 32; i < n; i += 32) num_not_above += begin[i] <= value;
  return __reduce_add_sync(~0u, num_not_above) - 1;
}

// The same for long tables: each round narrows the range to a 32nd. Rounds depend on each other.
template <class Int>
__device__ __forceinline__ int32_t warp_last_not_above_long(const Int* begin, int32_t n,
                                                            Int value) {
  int32_t first = 0;
#pragma unroll 1
  while (n > 1) {
    const int32_t step = (n + 31) / 32, mine = static_cast<int32_t>(threadIdx.x % 32) * step;
    const bool not_above = mine < n && begin[first + mine] <= value;
    const int32_t skip = (__popc(__ballot_sync(~0u, not_above)) - 1) * step;
    first += skip;
    n = min(step, n - skip);
  }
  return first;
}

}  // namespace moxie::device
