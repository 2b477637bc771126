// Stage 5, merge: the pieces of a token become its output.
//
//   returns [T, K, H] (own heap), shared_out [T, H]  ->  y [T, H]     (backward: dX the same way;
//   dweights are copied out)
//
// The sum runs in FP32 in slot order, the shared expert last, so the result never depends on who
// arrived first. Slots without a route are skipped by a predicate, never multiplied by zero: their
// memory may hold NaN. Weights were already applied before FC2. A token without routes and without
// shared expert is exactly 0. Reference body: merge_ref.h.
#pragma once
#include <cstdint>

#include "moxie/core/problem.h"

namespace moxie::merge {

struct Cost {
  std::int64_t flops = 0, local_bytes = 0, link_bytes = 0;
};
constexpr Cost cost(const Problem& p, std::int64_t num_tokens) {
  const std::int64_t pieces = p.top_k + (p.shared.intermediate > 0 ? 1 : 0);
  return {num_tokens * pieces * p.hidden,
          num_tokens * (pieces + 1) * p.hidden * size_bytes(p.dtype), 0};
}

}  // namespace moxie::merge
