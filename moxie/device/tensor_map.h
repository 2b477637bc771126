// Tensor maps (TMA descriptors) of BF16 matrices, encoded on the host.
//
// The driver's encoder is looked up at run time, so nothing links against libcuda. Out-of-range
// parts of a box read as zero and are not written: that is how tails in every dimension are
// handled.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace moxie::device {

// A stack of row-major matrices [num_matrices, num_rows, num_columns]; row_stride in elements.
struct Bf16Matrices {
  const void* data;
  int64_t num_columns;  // contiguous; a multiple of 8
  int64_t num_rows;
  int64_t num_matrices;
};

// Box of box_rows x 64 columns (128 bytes) with the 128-byte swizzle; rank 3 (column, row, matrix).
inline cudaError_t encode_tensor_map(CUtensorMap* map, const Bf16Matrices& m, uint32_t box_rows) {
  void* encoder = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encoder,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(m.num_columns) * 2;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(m.num_columns),
                               static_cast<cuuint64_t>(m.num_rows),
                               static_cast<cuuint64_t>(m.num_matrices)};
  const cuuint64_t strides_bytes[2] = {row_bytes, row_bytes * static_cast<cuuint64_t>(m.num_rows)};
  const cuuint32_t box[3] = {64, box_rows, 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encoder)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(m.data), sizes, strides_bytes,
      box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace moxie::device
