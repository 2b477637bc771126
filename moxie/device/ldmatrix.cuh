// ldmatrix: a warp loads four 8x8 matrices of 16-bit elements from shared memory (PTX
// ISA 9.7.14.5.15). Addresses and registers as stmatrix.cuh has them.
#pragma once

#include <cstdint>

namespace moxie::device {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

}  // namespace moxie::device
