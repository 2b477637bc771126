// Host side of the backward's products: their policies from plain arguments.
#pragma once

#include <span>

#include "moxie/expert/backward_gemm.h"
#include "moxie/expert/backward_gemm_epilogues_cuda.cuh"
#include "moxie/expert/backward_gemm_schedule_cuda.cuh"
#include "moxie/expert/grouped_gemm_launch_cuda.cuh"

namespace moxie::expert {

constexpr int32_t column_tiles(int32_t columns) { return (columns + BLOCK_N - 1) / BLOCK_N; }

inline CUtensorMap map_of_rows(const BackwardRows& rows, const bf16* data, int64_t columns,
                               int64_t row_stride = 0) {
  CUtensorMap map;
  check_cuda(
      device::encode_tensor_map(&map, {data, columns, rows.rows_capacity, 1, row_stride}, BLOCK_M),
      "tensor map of rows");
  return map;
}

inline CUtensorMap map_of_weights(const BackwardRows& rows, const bf16* data, int64_t k,
                                  int64_t n) {
  CUtensorMap map;
  check_cuda(device::encode_column_map(&map, {data, n, k, rows.num_experts}),
             "tensor map of weights");
  return map;
}

inline GemmOutput output_rows(const BackwardRows& rows, bf16* data, int32_t columns) {
  GroupedGemmArguments x;
  x.out = data;
  x.n = columns;
  x.rows_capacity = rows.rows_capacity;
  return describe_output(x);
}

template <int kParts>
void set_k_blocks(RowOperands<kParts>& operands, int32_t k) {
  operands.part_k_blocks = (k + BLOCK_K - 1) / BLOCK_K;
  operands.num_k_blocks = std::max(kParts * operands.part_k_blocks, kMinKBlocks);
}

template <int kClusterSize>
BandSchedule<kClusterSize> row_schedule(const BackwardRows& rows, int32_t n, int32_t k,
                                        const GroupedGemmOptions& options) {
  GroupedGemmArguments x;
  x.expert_rows = rows.expert_rows;
  x.num_experts = rows.num_experts;
  x.n = n;
  x.k = k;
  return describe_schedule<kClusterSize>(x, options);
}

inline DgradOperands describe_dgrad(const BackwardRows& rows, const DgradArguments& x) {
  const int32_t h = rows.hidden, i = rows.intermediate;
  DgradOperands operands{};
  operands.a[0] = map_of_rows(rows, x.dy, h);
  operands.b[0] = map_of_weights(rows, x.down, h, i);
  operands.gate = map_of_rows(rows, x.z, i, 2 * int64_t{i});
  operands.up = map_of_rows(rows, x.z + i, i, 2 * int64_t{i});
  set_k_blocks(operands, h);
  return operands;
}

template <bool kGeneral>
DgradEpilogue<kGeneral> describe_dgrad_epilogue(const BackwardRows& rows, const DgradArguments& x) {
  const int32_t i = rows.intermediate;
  return {output_rows(rows, x.dgate, i),
          output_rows(rows, x.dup, i),
          output_rows(rows, x.wa, i),
          x.row_weight,
          x.dw_partial,
          column_tiles(i),
          x.activation};
}

inline RowOperands<2> describe_dx(const BackwardRows& rows, const DxArguments& x) {
  const int32_t h = rows.hidden, i = rows.intermediate;
  RowOperands<2> operands{};
  operands.a[0] = map_of_rows(rows, x.dgate, i);
  operands.a[1] = map_of_rows(rows, x.dup, i);
  operands.b[0] = map_of_weights(rows, x.gate, i, h);
  operands.b[1] = map_of_weights(rows, x.up, i, h);
  set_k_blocks(operands, i);
  return operands;
}

inline WgradOperands describe_wgrad(const BackwardRows& rows, const WgradArguments& x) {
  WgradOperands operands{};
  operands.m = x.m;
  const auto encode = [&](CUtensorMap* map, const bf16* data, int64_t columns) {
    // Without rows nothing is read, but a map needs an address.
    const void* address = rows.rows_capacity > 0 ? data : x.out;
    check_cuda(device::encode_bounded_column_map(map, {address, columns, rows.rows_capacity, 1}),
               "tensor map of bounded rows");
  };
  encode(&operands.a, x.left, x.m);
  encode(&operands.b, x.right, x.n);
  return operands;
}

inline WgradStore describe_wgrad_store(const BackwardRows& rows,
                                       std::span<const WgradArguments> wgrads) {
  WgradStore epilogue{};
  for (size_t i = 0; i < wgrads.size(); ++i) {
    GroupedGemmArguments out;
    out.out = static_cast<bf16*>(wgrads[i].out);
    out.n = wgrads[i].n;
    out.rows_capacity = int64_t{rows.num_experts} * wgrads[i].m;
    epilogue.out[i] = describe_output(out);
  }
  return epilogue;
}

inline WgradFloatStore describe_wgrad_float_store(const BackwardRows& rows,
                                                  std::span<const WgradArguments> wgrads) {
  WgradFloatStore epilogue{};
  for (size_t i = 0; i < wgrads.size(); ++i) {
    const WgradArguments& x = wgrads[i];
    check_cuda(device::encode_float_map(&epilogue.out[i], static_cast<const float*>(x.out), x.n,
                                        int64_t{rows.num_experts} * x.m),
               "tensor map of FP32 gradients");
    epilogue.num_columns[i] = x.n;
  }
  epilogue.adds = wgrads[0].output == WgradOutput::add_f32;
  return epilogue;
}

template <int kClusterSize>
WgradSchedule<kClusterSize> wgrad_schedule(const BackwardRows& rows,
                                           std::span<const WgradArguments> wgrads,
                                           const GroupedGemmOptions& options) {
  WgradSchedule<kClusterSize> schedule{};
  schedule.expert_rows = rows.expert_rows;
  schedule.num_experts = rows.num_experts;
  schedule.num_wgrads = static_cast<int32_t>(wgrads.size());
  for (size_t i = 0; i < wgrads.size(); ++i) {
    const WgradArguments& x = wgrads[i];
    // What runs at once should slide along the longer side of the gradient: 16 row tiles x 8 column
    // tiles are about one wave, and square. H200: up to 2.5 % (docs/decisions/007).
    const int32_t best_band = x.m > 16 * BLOCK_M && column_tiles(x.n) <= 12 ? 4 : 16;
    schedule.wgrads[i] = {x.m, column_tiles(x.n),
                          options.band_blocks != 0 ? options.band_blocks : best_band};
  }
  schedule.skips_empty = wgrads[0].output == WgradOutput::add_f32;
  return schedule;
}

}  // namespace moxie::expert
