// Stand-alone products of the expert stage's backward on the GPU: host interface.
//
// dgrad:  dA' = dY Wd, never stored; with z = [gate, up] and the row's weight w, in its epilogue
//         (dgate, dup) = act'(w dA'),  wA = w A,  parts of rowsum(dA' . A)
// dx:     dX = dgate Wg + dup Wu
// wgrad:  dW[e] = left_e^T right_e over the expert's rows: (dgate, x), (dup, x), (dY, wA)
// Rows are laid out as in grouped_gemm.h; rows past an expert's count are neither used nor written.
// Nothing is transposed in memory. Rounding points are those of expert.h; the CPU twin is
// expert_ref.h.
#pragma once

#include <span>

#include "moxie/core/problem.h"
#include "moxie/expert/grouped_gemm.h"

namespace moxie::expert {

inline constexpr int32_t kDgradTileCols =
    256;  // columns of I that one part of rowsum(dA' . A) sums

struct DgradArguments {
  const bf16* dy = nullptr;           // [rows_capacity, hidden]
  const bf16* down = nullptr;         // [num_experts, hidden, intermediate]
  const bf16* z = nullptr;            // [rows_capacity, 2 * intermediate], gate then up
  const float* row_weight = nullptr;  // [rows_capacity] or null (1)
  bf16* dgate = nullptr;              // [rows_capacity, intermediate]
  bf16* dup = nullptr;                // [rows_capacity, intermediate]
  bf16* wa = nullptr;                 // [rows_capacity, intermediate]
  float* dw_partial = nullptr;        // [rows_capacity, ceil(intermediate / kDgradTileCols)]
  Activation activation;
};

struct DxArguments {
  const bf16* dgate = nullptr;  // [rows_capacity, intermediate]
  const bf16* dup = nullptr;    // [rows_capacity, intermediate]
  const bf16* gate = nullptr;   // [num_experts, intermediate, hidden]
  const bf16* up = nullptr;     // [num_experts, intermediate, hidden]
  bf16* dx = nullptr;           // [rows_capacity, hidden]
};

// d(route weight) of every row: the parts in column order, then dY . bd.
struct RouterGradArguments {
  const float* dw_partial = nullptr;  // as above
  const bf16* dy = nullptr;           // [rows_capacity, hidden]; with down_bias only
  const bf16* down_bias = nullptr;    // [num_experts, hidden] or null
  float* d_weight = nullptr;          // [rows_capacity]
};

enum class WgradOutput { bf16, f32, add_f32 };  // add: experts without rows are left alone
struct WgradArguments {
  const bf16* left = nullptr;   // [rows_capacity, m]
  const bf16* right = nullptr;  // [rows_capacity, n]
  void* out = nullptr;          // [num_experts, m, n]
  WgradOutput output = WgradOutput::bf16;
  int32_t m = 0, n = 0;  // multiples of 64
};

// Gradient of an expert's bias: out[e] (+)= sum over its rows, in row order, of weight * m.
struct BiasGradArguments {
  const bf16* m = nullptr;            // [rows_capacity, columns]: dgate, dup; dY for the down bias
  const float* row_weight = nullptr;  // [rows_capacity] or null (1)
  float* out = nullptr;               // [num_experts, columns]
  int32_t columns = 0;                // even
  bool adds = false;
};

// What all of them share.
struct BackwardRows {
  const int32_t* expert_rows = nullptr;  // [num_experts], on the GPU
  int32_t num_experts = 0;               // 1..1024
  int64_t rows_capacity = 0;             // covers the padded sum
  int32_t hidden = 0, intermediate = 0;  // multiples of 64
};

// Each enqueues one product. Throws Error for arguments it cannot run.
void launch_dgrad(const BackwardRows& rows, const DgradArguments& arguments,
                  const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace,
                  cudaStream_t stream);
void launch_dx(const BackwardRows& rows, const DxArguments& arguments,
               const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace,
               cudaStream_t stream);
// One launch for one to three gradients over the same rows, with the same kind of output.
void launch_wgrads(const BackwardRows& rows, std::span<const WgradArguments> wgrads,
                   const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace,
                   cudaStream_t stream);
void launch_router_grad(const BackwardRows& rows, const RouterGradArguments& arguments,
                        cudaStream_t stream);
void launch_bias_grad(const BackwardRows& rows, const BiasGradArguments& arguments,
                      cudaStream_t stream);

}  // namespace moxie::expert
