// Stage 3, expert: the FFN of one block of rows, tile by tile.
//
//   FC1 tile  (block, 128 columns of I):  g = x Wg^T + bg, u = x Wu^T + bu;  hidden = w * act(g, u)
//   FC2 tile  (block, 256 columns of H):  y  = hidden Wd^T + w bd                       -> pushed
//   home by combine
// backward:
//   dgrad tile (block, 128 columns of I): dA' = dY Wd;  dweight += rowsum(dA' . A);  dA = w dA';
//                                         (dgate, dup) = act'(dA);  wA = w A
//   dX tile   (block, 256 columns of H):  dgate Wg + dup Wu                              -> pushed
//   home by combine wgrad tile (expert, 128 x 256):       dWg += dgate^T x, dWu += dup^T x, dWd +=
//   dY^T wA, over the expert's rows in order
//
// Rounding (BF16 storage). GEMMs accumulate in FP32. Rounded to storage: hidden, z = [g, u] when
// saved or remade for backward, dgate, dup, wA, the pushed pieces of y and dX, weight gradients
// asked for in BF16. Never rounded: g and u on their way into act, dA', the router-weight gradient,
// bias gradients. The shared expert is an expert whose rows are the local tokens and whose w is 1
// or sigmoid(x . output_gate). Reference bodies: expert_ref.h; activation arithmetic: activation.h.
// On the GPU: grouped_gemm.h and backward_gemm.h, whose dgrad tiles have 256 columns.
#pragma once
#include <cstdint>

#include "moxie/core/problem.h"

namespace moxie::expert {

// FLOPs of `rows` rows through an FFN of inner width `intermediate`; multiply and add count as two.
constexpr std::int64_t forward_flops(std::int64_t rows, std::int64_t hidden,
                                     std::int64_t intermediate) {
  return 6 * rows * hidden * intermediate;
}
constexpr std::int64_t backward_flops(std::int64_t rows, std::int64_t hidden,
                                      std::int64_t intermediate, bool recompute_z) {
  return (recompute_z ? 16 : 12) * rows * hidden * intermediate;
}
// Bytes of weights and rows that a perfect cache would move once, forward.
constexpr std::int64_t forward_bytes(std::int64_t rows, std::int64_t hidden,
                                     std::int64_t intermediate, std::int64_t num_experts,
                                     std::int64_t elem_bytes) {
  return elem_bytes *
         (3 * num_experts * hidden * intermediate + 2 * rows * (hidden + intermediate));
}
// z of one saved row.
constexpr std::int64_t z_bytes(std::int64_t intermediate, std::int64_t elem_bytes) {
  return 2 * intermediate * elem_bytes;
}

}  // namespace moxie::expert
