// tanh.approx: one instruction, relative error 2^-11 (PTX ISA 9.7.3.22).
#pragma once

namespace moxie::device {

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace moxie::device
