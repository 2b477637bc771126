// wgmma, BF16 operands from shared memory, FP32 accumulators in registers (PTX ISA 9.7.15, sm_90a).
//
// One wrapper per instruction; cuda::ptx has none of them. Operands lie in chunks of 128-byte rows
// with the 128-byte swizzle, the layout a tensor copy with CU_TENSOR_MAP_SWIZZLE_128B writes; the
// buffers start on 1024-byte boundaries. K-major (a row of the forward's A or weight): a chunk is
// 64 elements along K, one row per M or N. MN-major (read as its transpose): a chunk is 64 elements
// along M or N, one row per K; chunks of 64 rows of K follow each other. Accumulator layout of d:
// d[4j + 2h + c] is row 16*warp + lane/4 + 8h, column 8j + 2*(lane%4) + c.
#pragma once

#include <cstdint>

namespace moxie::device {

enum class Major { k, mn };

// Matrix descriptor of a SWIZZLE_128B operand: address in bits 0-13 (units of 16 bytes), stride
// offset in bits 32-45: 1024 bytes from one group of 8 rows to the next, swizzle mode 1 in bits
// 62-63. The leading offset, bits 16-29, is unused if K-major; if MN-major it is the distance of
// the chunks, 8192 bytes.
template <Major kMajor = Major::k>
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* smem) {
  constexpr uint64_t kLeading = kMajor == Major::k ? 1 : 8192 >> 4;
  const uint64_t address = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (kLeading << 16) |
         ((address & 0x3FFFF) >> 4);
}

// What to add to a descriptor for the next 16 elements along K: 32 bytes, or 16 rows of 128.
template <Major kMajor>
inline constexpr uint64_t kDescriptorStep = (kMajor == Major::k ? 32 : 16 * 128) >> 4;

// Orders earlier register accesses before the next wgmma of this warpgroup reads or writes them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of this warpgroup's latest groups are in flight. After it returns
// the older groups have read their shared memory and written their registers.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// clang-format off
#define MOXIE_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOXIE_D16(i) MOXIE_D8(i), MOXIE_D8(i + 8)

// wgmma.mma_async m64n256k16: d[0..127] of each thread, d += A*B (scale_d = 0: d = A*B).
template <Major kMajorA = Major::k, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma_m64n256k16_bf16(float* d /* [128] */, uint64_t desc_a,
                                                      uint64_t desc_b, int scale_d) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, %131, %132;\n}\n"
      : MOXIE_D16(0), MOXIE_D16(16), MOXIE_D16(32), MOXIE_D16(48), MOXIE_D16(64), MOXIE_D16(80),
        MOXIE_D16(96), MOXIE_D16(112)
      : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(kMajorA == Major::mn), "n"(kMajorB == Major::mn));
}

#undef MOXIE_D16
#undef MOXIE_D8
// clang-format on

}  // namespace moxie::device
