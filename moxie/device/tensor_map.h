// Tensor maps (TMA descriptors) of BF16 matrices, encoded on the host.
//
// The driver's encoder is looked up at run time, so nothing links against libcuda. Out-of-range
// parts of a box read as zero and are not written: that is how tails in every dimension are
// handled.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace moxie::device {

// A map in the driver's terms, dimensions from the innermost.
struct TiledTensor {
  CUtensorMapDataType type;
  const void* data;
  uint32_t rank;
  cuuint64_t sizes[5];
  cuuint64_t strides_bytes[4];  // of dimensions 1, 2, ..
  cuuint32_t box[5];
};

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, looked up once.
inline cudaError_t find_encoder(TensorMapEncoder* encoder) {
  static std::atomic<TensorMapEncoder> known = nullptr;
  if ((*encoder = known.load(std::memory_order_relaxed)) != nullptr) return cudaSuccess;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &how);
  if (error != cudaSuccess) return error;
  if (how != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  *encoder = reinterpret_cast<TensorMapEncoder>(found);
  known.store(*encoder, std::memory_order_relaxed);
  return cudaSuccess;
}

// With the 128-byte swizzle. Needs a current context: a thread that has not called the runtime yet
// has none, and gets cudaErrorDeviceUninitialized.
inline cudaError_t encode_tiled(CUtensorMap* map, const TiledTensor& t) {
  TensorMapEncoder encoder = nullptr;
  const cudaError_t error = find_encoder(&encoder);
  if (error != cudaSuccess) return error;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encoder(map, t.type, t.rank, const_cast<void*>(t.data), t.sizes, t.strides_bytes, t.box,
              element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(result);  // the runtime has the driver's codes
}

// A stack of row-major matrices [num_matrices, num_rows, num_columns].
struct Bf16Matrices {
  const void* data;
  int64_t num_columns;  // contiguous; a multiple of 8
  int64_t num_rows;
  int64_t num_matrices;
  int64_t row_stride = 0;  // elements; 0: num_columns
};

// Box of box_rows x 64 columns (128 bytes); rank 3 (column, row, matrix).
inline cudaError_t encode_tensor_map(CUtensorMap* map, const Bf16Matrices& m, uint32_t box_rows) {
  const auto row_bytes =
      static_cast<cuuint64_t>(m.row_stride != 0 ? m.row_stride : m.num_columns) * 2;
  const auto num_rows = static_cast<cuuint64_t>(m.num_rows);
  return encode_tiled(map, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            m.data,
                            3,
                            {static_cast<cuuint64_t>(m.num_columns), num_rows,
                             static_cast<cuuint64_t>(m.num_matrices)},
                            {row_bytes, row_bytes * num_rows},
                            {64, box_rows, 1}});
}

// The same matrices as operands read along their columns (MN-major): box of 64 rows x 128 columns
// that arrives as two chunks of 64 rows x 64 columns; rank 4 (column in chunk, row, chunk, matrix).
// num_columns must be a multiple of 64.
inline cudaError_t encode_column_map(CUtensorMap* map, const Bf16Matrices& m) {
  const auto row_bytes = static_cast<cuuint64_t>(m.num_columns) * 2;
  const auto num_rows = static_cast<cuuint64_t>(m.num_rows);
  return encode_tiled(map, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            m.data,
                            4,
                            {64, num_rows, static_cast<cuuint64_t>(m.num_columns / 64),
                             static_cast<cuuint64_t>(m.num_matrices)},
                            {row_bytes, 128, row_bytes * num_rows},
                            {64, 64, 2, 1}});
}

// The same matrices one chunk of 64 rows x 64 columns at a time; rank 3 (column, row, matrix).
// Chunks below each other are an operand read along its rows, chunks beside each other one read
// along its columns: one map for both.
inline cudaError_t encode_chunk_map(CUtensorMap* map, const Bf16Matrices& m) {
  return encode_tensor_map(map, m, 64);
}

// Two chunks side by side from any range of rows of one matrix, where rows past the range's end
// read as zero whatever lies there: one map for all ranges. Rows count up to kRowBound, the end of
// dimension 1, and two outer dimensions bring the address back: coordinates of row r of [begin,
// begin + count) are {0, kRowBound - count + r, chunk, begin + count, kRowBound}. The last stride
// is -1 row plus 2^35 bytes, and 2^35 * kRowBound = 2^64: addresses wrap round (H200; tests/gpu run
// it).
inline constexpr int32_t kRowBound = 1 << 29;
inline cudaError_t encode_bounded_column_map(CUtensorMap* map, const Bf16Matrices& m) {
  const auto row_bytes = static_cast<cuuint64_t>(m.num_columns) * 2;
  return encode_tiled(map, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            m.data,
                            5,
                            {64, kRowBound, static_cast<cuuint64_t>(m.num_columns / 64),
                             cuuint64_t{1} << 31, cuuint64_t{1} << 31},
                            {row_bytes, 128, row_bytes, (cuuint64_t{1} << 35) - row_bytes},
                            {64, 64, 2, 1, 1}});
}

// FP32 matrix [num_rows, num_columns], num_columns a multiple of 4: box of 16 rows x 32 columns
// (128 bytes); rank 2.
inline cudaError_t encode_float_map(CUtensorMap* map, const float* data, int64_t num_columns,
                                    int64_t num_rows) {
  return encode_tiled(map,
                      {CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                       data,
                       2,
                       {static_cast<cuuint64_t>(num_columns), static_cast<cuuint64_t>(num_rows)},
                       {static_cast<cuuint64_t>(num_columns) * 4},
                       {32, 16}});
}

}  // namespace moxie::device
