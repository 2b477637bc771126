// Plain body of the merge stage; the contract is in merge.h.
#pragma once
#include <algorithm>
#include <cstdint>

#include "moxie/pipeline/tiles.h"

namespace moxie::merge {

template <class T>
void merge_tokens(const std::int32_t* ids,  // [T, K] -1 = no route
                  const T* returns,         // [T * K, H]
                  const T* shared_out,      // [T, H] or null
                  pipeline::Range tokens, pipeline::Range cols, std::int64_t top_k,
                  std::int64_t hidden,
                  T* out) {  // [T, H]
  constexpr std::int64_t kStrip = 256;
  float sum[kStrip];
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    for (std::int64_t c = cols.begin; c < cols.end; c += kStrip) {
      const std::int64_t n = std::min(kStrip, cols.end - c);
      std::fill(sum, sum + n, 0.0f);
      auto add = [&](const T* piece) {
        for (std::int64_t j = 0; j < n; ++j) sum[j] += static_cast<float>(piece[j]);
      };
      for (std::int64_t k = 0; k < top_k; ++k) {
        if (ids[t * top_k + k] >= 0) add(returns + (t * top_k + k) * hidden + c);
      }
      if (shared_out != nullptr) add(shared_out + t * hidden + c);
      T* to = out + t * hidden + c;
      for (std::int64_t j = 0; j < n; ++j) to[j] = T(sum[j]);
    }
  }
}

}  // namespace moxie::merge
