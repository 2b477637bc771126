// stmatrix: a warp stores four 8x8 matrices of 16-bit elements to shared memory (PTX
// ISA 9.7.14.5.16).
//
// Lane l gives the 16-byte aligned address of row l%8 of matrix l/8. Register i of a lane holds row
// lane/4, columns 2*(lane%4) and +1 of matrix i: the layout in which wgmma leaves its accumulators.
#pragma once

#include <cstdint>

namespace moxie::device {

__device__ __forceinline__ void stmatrix_x4(void* row, uint32_t m0, uint32_t m1, uint32_t m2,
                                            uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(row))),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace moxie::device
