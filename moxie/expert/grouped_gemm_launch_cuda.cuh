// Host side of the grouped GEMM kernel: operand descriptions, grid size, launch. For any policies.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "moxie/core/error.h"
#include "moxie/device/tensor_map.h"
#include "moxie/expert/grouped_gemm.h"
#include "moxie/expert/grouped_gemm_epilogues_cuda.cuh"
#include "moxie/expert/grouped_gemm_kernel_cuda.cuh"
#include "moxie/expert/grouped_gemm_schedule_cuda.cuh"

namespace moxie::expert {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::unavailable, std::string(what) + ": " + cudaGetErrorString(error));
}

// `what` is the product as a sentence names it.
inline void require(bool holds, const char* what, const char* rule, int64_t value) {
  if (!holds)
    throw Error(ErrorCode::invalid_argument,
                std::string(what) + ": " + rule + ", got " + std::to_string(value));
}

// What every launch over rows of experts can do.
inline void check_launch(const char* what, int32_t num_experts, int64_t rows_capacity,
                         const GroupedGemmOptions& options) {
  require(num_experts >= 1 && num_experts <= BandSchedule<1>::kMaxExperts, what,
          "num_experts must be 1..1024", num_experts);
  require(rows_capacity >= 0 && rows_capacity <= int64_t{65535} * BLOCK_M, what,
          "rows_capacity must be 0..65535 * 128", rows_capacity);
  require(options.cluster_size == 1 || options.cluster_size == 2, what,
          "cluster_size must be 1 or 2", options.cluster_size);
  require(options.band_blocks >= 0 && options.band_blocks % 2 == 0, what,
          "band_blocks must be even, or 0", options.band_blocks);
}

inline GemmOperands describe_operands(const GroupedGemmArguments& x) {
  GemmOperands operands{};
  const bool swiglu = x.product == GroupedProduct::swiglu;
  const auto encode = [&](CUtensorMap* map, const bf16* data, int64_t rows, int64_t matrices) {
    check_cuda(device::encode_tensor_map(map, {data, x.k, rows, matrices}, BLOCK_M),
               "tensor map of an operand");
  };
  encode(&operands.a, x.a, x.rows_capacity, 1);
  encode(&operands.b[0], x.b, x.n, x.num_experts);
  encode(&operands.b[1], swiglu ? x.b_up : x.b, x.n, x.num_experts);
  operands.num_k_blocks = std::max((x.k + BLOCK_K - 1) / BLOCK_K, kMinKBlocks);
  operands.n_step = swiglu ? BLOCK_N / 2 : BLOCK_N;
  operands.half_offset = swiglu ? 0 : BLOCK_N / 2;
  return operands;
}

inline GemmOutput describe_output(const GroupedGemmArguments& x) {
  GemmOutput out{};
  check_cuda(device::encode_tensor_map(&out.map, {x.out, x.n, x.rows_capacity, 1}, 16),
             "tensor map of the output");
  out.data = x.out;
  out.num_columns = x.n;
  return out;
}

template <int kClusterSize>
BandSchedule<kClusterSize> describe_schedule(const GroupedGemmArguments& x,
                                             const GroupedGemmOptions& options) {
  const int32_t columns = x.product == GroupedProduct::swiglu ? BLOCK_N / 2 : BLOCK_N;
  const int32_t num_n_tiles = (x.n + columns - 1) / columns;
  // H200: worth up to 2 % (docs/decisions/003-hopper-gemm-loop.md).
  const int32_t best_band = num_n_tiles <= 12 ? 8 : x.k <= 2048 ? 24 : 12;
  return {x.expert_rows, x.num_experts, num_n_tiles,
          options.band_blocks != 0 ? options.band_blocks : best_band};
}

inline device::WaitLimits describe_limits(const GroupedGemmOptions& options,
                                          const GroupedGemmWorkspace& workspace) {
  return {workspace.words() + 2, workspace.device_record(), options.limit_ns, 0, 0,
          workspace.words() + 3};
}

// As many CTAs as are resident at once, less the reserved SMs; whole clusters.
template <class Config, class Schedule, class Readiness, class Epilogue, int kNumProducts,
          class Operands>
void launch_gemm_kernel(
    const GemmParams<Schedule, Readiness, Epilogue, kNumProducts, Operands>& params,
    int32_t reserve_sms, cudaStream_t stream) {
  constexpr int kClusterSize = Config::kClusterSize;
  const auto kernel =
      grouped_gemm_kernel<Config, Schedule, Readiness, Epilogue, kNumProducts, Operands>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kClusterSize, 1, 1};
  cudaLaunchConfig_t config{};
  config.blockDim = kNumThreads;
  config.gridDim = kClusterSize;
  config.dynamicSmemBytes = sizeof(GemmShared<Schedule>);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(config.dynamicSmemBytes)),
             "shared memory of the grouped GEMM");
  int max_clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&max_clusters, kernel, &config),
             "occupancy of the grouped GEMM");
  const int num_clusters = max_clusters - (reserve_sms + kClusterSize - 1) / kClusterSize;
  if (num_clusters < 1) {
    throw Error(ErrorCode::invalid_argument,
                "reserve_sms = " + std::to_string(reserve_sms) + " leaves no SM; at most " +
                    std::to_string((max_clusters - 1) * kClusterSize) + " can be reserved");
  }
  config.gridDim = num_clusters * kClusterSize;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "launch of the grouped GEMM");
}

// The products of one launch, all of whose rows are in place before it.
template <int kClusterSize, class Operands, int kNumProducts, class Schedule, class Epilogue>
void launch_products(const Operands (&operands)[kNumProducts], const Schedule& schedule,
                     const Epilogue& epilogue, const GroupedGemmOptions& options,
                     const GroupedGemmWorkspace& workspace, cudaStream_t stream) {
  GemmParams<Schedule, AlwaysReady, Epilogue, kNumProducts, Operands> params{};
  std::copy_n(operands, kNumProducts, params.operands);
  params.epilogue = epilogue;
  params.schedule = schedule;
  params.tickets = reinterpret_cast<TicketCounter*>(workspace.words());
  params.limits = describe_limits(options, workspace);
  launch_gemm_kernel<GemmConfig<kClusterSize>>(params, options.reserve_sms, stream);
}

}  // namespace moxie::expert
