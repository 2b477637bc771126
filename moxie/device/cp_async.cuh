// cp.async: 16 bytes per thread from global to shared memory, past L1, without waiting (PTX ISA
// 9.7.9.25.3). A constant offset of the source costs no register. It writes through the generic
// proxy: tensor cores and copies read what it wrote after a proxy fence. When it has arrived an
// mbarrier says: cuda::ptx::cp_async_mbarrier_arrive_noinc.
#pragma once

#include <cstdint>

namespace moxie::device {

// to: shared address, from + kFromOffset: global, both multiples of 16 bytes. The first num_bytes
// (0 .. 16) are read, the others written as zeros.
template <int kFromOffset>
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, uint32_t num_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1 + %3], 16, %2;" ::"r"(to), "l"(from),
               "r"(num_bytes), "n"(kFromOffset)
               : "memory");
}

}  // namespace moxie::device
