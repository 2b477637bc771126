// The built configurations of the stand-alone backward products: dgrad (SwiGLU or general), dX,
// wgrad (BF16 or FP32), each for one CTA or a pair.
#include "moxie/expert/backward_gemm_launch_cuda.cuh"

namespace moxie::expert {
namespace {

constexpr const char* kWhat = "backward product";

void check(const BackwardRows& rows, const GroupedGemmOptions& options) {
  check_launch(kWhat, rows.num_experts, rows.rows_capacity, options);
}

void require_width(const char* rule, int64_t value) {
  require(value >= 64 && value % 64 == 0, kWhat, rule, value);
}

void check_widths(const BackwardRows& rows) {
  require_width("hidden must be a positive multiple of 64", rows.hidden);
  require_width("intermediate must be a positive multiple of 64", rows.intermediate);
}

// ---- launches ----

template <class Operands, class Epilogue>
void launch_rows(const BackwardRows& rows, int32_t n, int32_t k, const Operands& product,
                 const Epilogue& epilogue, const GroupedGemmOptions& options,
                 const GroupedGemmWorkspace& workspace, cudaStream_t stream) {
  const Operands operands[1] = {product};
  if (options.cluster_size == 2)
    launch_products<2>(operands, row_schedule<2>(rows, n, k, options), epilogue, options, workspace,
                       stream);
  else
    launch_products<1>(operands, row_schedule<1>(rows, n, k, options), epilogue, options, workspace,
                       stream);
}

template <bool kGeneral>
void launch_dgrad_as(const BackwardRows& rows, const DgradArguments& x,
                     const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace,
                     cudaStream_t stream) {
  launch_rows(rows, rows.intermediate, rows.hidden, describe_dgrad(rows, x),
              describe_dgrad_epilogue<kGeneral>(rows, x), options, workspace, stream);
}

__device__ __forceinline__ int64_t first_row(const BackwardRows& rows, int32_t expert_idx) {
  int64_t row = 0;
  for (int32_t e = 0; e < expert_idx; ++e)
    row += (rows.expert_rows[e] + BLOCK_M - 1) / BLOCK_M * BLOCK_M;
  return row;
}

// One warp per row: lanes take the terms in turns, their sums are added in a fixed order.
__global__ void router_grad_kernel(BackwardRows rows, RouterGradArguments x) {
  const int32_t lane_idx = threadIdx.x % 32, num_warps = blockDim.x / 32;
  const int32_t expert_idx = blockIdx.y, num_tiles = column_tiles(rows.intermediate);
  const int64_t row_begin = first_row(rows, expert_idx);
  for (int32_t i = blockIdx.x * num_warps + threadIdx.x / 32; i < rows.expert_rows[expert_idx];
       i += gridDim.x * num_warps) {
    const int64_t row = row_begin + i;
    float sum = 0.0f;
    for (int32_t t = 0; t < num_tiles; ++t) sum += x.dw_partial[row * num_tiles + t];
    if (x.down_bias != nullptr) {
      const auto* dy = reinterpret_cast<const __nv_bfloat16*>(x.dy) + row * rows.hidden;
      const auto* bias =
          reinterpret_cast<const __nv_bfloat16*>(x.down_bias) + int64_t{expert_idx} * rows.hidden;
      float dot = 0.0f;
      for (int32_t h = lane_idx; h < rows.hidden; h += 32)
        dot = fmaf(__bfloat162float(dy[h]), __bfloat162float(bias[h]), dot);
      for (int32_t step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
      sum += dot;
    }
    if (lane_idx == 0) x.d_weight[row] = sum;
  }
}

// One thread per pair of columns of an expert.
__global__ void bias_grad_kernel(BackwardRows rows, BiasGradArguments x) {
  const int32_t expert_idx = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  const int32_t num_rows = rows.expert_rows[expert_idx];
  if (column >= x.columns || (x.adds && num_rows == 0)) return;
  const int64_t row_begin = first_row(rows, expert_idx);
  float2 sum{0.0f, 0.0f};
#pragma unroll 8
  for (int32_t i = 0; i < num_rows; ++i) {
    const int64_t row = row_begin + i;
    const float weight = x.row_weight != nullptr ? x.row_weight[row] : 1.0f;
    const float2 value = __bfloat1622float2(
        *reinterpret_cast<const __nv_bfloat162*>(x.m + row * x.columns + column));
    sum.x = fmaf(weight, value.x, sum.x);
    sum.y = fmaf(weight, value.y, sum.y);
  }
  float* out = x.out + int64_t{expert_idx} * x.columns + column;
  out[0] = x.adds ? out[0] + sum.x : sum.x;
  out[1] = x.adds ? out[1] + sum.y : sum.y;
}

}  // namespace

void launch_dgrad(const BackwardRows& rows, const DgradArguments& x,
                  const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace,
                  cudaStream_t stream) {
  check(rows, options);
  check_widths(rows);
  if (rows.rows_capacity == 0) return;
  if (x.activation.kind == ActivationKind::swiglu)
    launch_dgrad_as<false>(rows, x, options, workspace, stream);
  else
    launch_dgrad_as<true>(rows, x, options, workspace, stream);
}

void launch_dx(const BackwardRows& rows, const DxArguments& x, const GroupedGemmOptions& options,
               const GroupedGemmWorkspace& workspace, cudaStream_t stream) {
  check(rows, options);
  check_widths(rows);
  if (rows.rows_capacity == 0) return;
  launch_rows(rows, rows.hidden, 2 * rows.intermediate, describe_dx(rows, x),
              StoreEpilogue<>{output_rows(rows, x.dx, rows.hidden)}, options, workspace, stream);
}

void launch_wgrads(const BackwardRows& rows, std::span<const WgradArguments> wgrads,
                   const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace,
                   cudaStream_t stream) {
  check(rows, options);
  const auto num_wgrads = static_cast<int32_t>(wgrads.size());
  require(num_wgrads >= 1 && num_wgrads <= kMaxWgrads, kWhat, "one launch takes 1..3 gradients",
          num_wgrads);
  WgradOperands operands[kMaxWgrads]{};
  for (int32_t i = 0; i < num_wgrads; ++i) {
    const WgradArguments& x = wgrads[i];
    require_width("m must be a positive multiple of 64", x.m);
    require_width("n must be a positive multiple of 64", x.n);
    const int64_t num_rows = int64_t{rows.num_experts} * x.m;
    require(num_rows <= INT32_MAX, kWhat, "num_experts * m must be below 2^31", num_rows);
    require(x.output == wgrads[0].output, kWhat,
            "the gradients of one launch have one kind of output", i);
    operands[i] = describe_wgrad(rows, x);
  }
  const auto run = [&](const auto& epilogue) {
    if (options.cluster_size == 2)
      launch_products<2>(operands, wgrad_schedule<2>(rows, wgrads, options), epilogue, options,
                         workspace, stream);
    else
      launch_products<1>(operands, wgrad_schedule<1>(rows, wgrads, options), epilogue, options,
                         workspace, stream);
  };
  if (wgrads[0].output == WgradOutput::bf16)
    run(describe_wgrad_store(rows, wgrads));
  else
    run(describe_wgrad_float_store(rows, wgrads));
}

void launch_router_grad(const BackwardRows& rows, const RouterGradArguments& x,
                        cudaStream_t stream) {
  check(rows, {});
  check_widths(rows);
  if (rows.rows_capacity == 0) return;
  router_grad_kernel<<<dim3(64, rows.num_experts), 256, 0, stream>>>(rows, x);
  check_cuda(cudaGetLastError(), "launch of the router gradient");
}

void launch_bias_grad(const BackwardRows& rows, const BiasGradArguments& x, cudaStream_t stream) {
  check(rows, {});
  require(x.columns >= 2 && x.columns % 2 == 0, kWhat, "columns must be even and positive",
          x.columns);
  constexpr int32_t kThreads = 64;
  bias_grad_kernel<<<dim3((x.columns / 2 + kThreads - 1) / kThreads, rows.num_experts), kThreads, 0,
                     stream>>>(rows, x);
  check_cuda(cudaGetLastError(), "launch of a bias gradient");
}

}  // namespace moxie::expert
