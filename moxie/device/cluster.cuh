// Instructions on another CTA's shared memory that cuda::ptx lacks (sm_90).
#pragma once

#include <cstdint>

namespace moxie::device {

// mapa: the shared::cluster address, in CTA cta_rank of this cluster, of this CTA's `smem`.
__device__ __forceinline__ uint32_t mapa(const void* smem, uint32_t cta_rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(smem))), "r"(cta_rank));
  return address;
}

// The same as a generic pointer, for the functions of cuda::ptx that take one.
template <class T>
__device__ __forceinline__ T* mapa_generic(T* smem, uint32_t cta_rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(smem), "r"(cta_rank));
  return reinterpret_cast<T*>(address);
}

// mbarrier.arrive on an mbarrier of any CTA of the cluster (an address from mapa), without
// qualifiers. For "this buffer has been read" after wgmma.wait_group, where no written data is
// handed over. With .release.cluster, the form cuda::ptx emits, each arrive becomes a memory
// barrier of the warp: 801 -> 580 TFLOPS in the GEMM loop on H200.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

}  // namespace moxie::device
