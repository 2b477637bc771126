// setmaxnreg: moves registers between the warpgroups of a CTA (PTX ISA 9.7.20.5, sm_90a).
//
// All warps of a warpgroup execute the same instruction once, as first act of their role. It takes
// effect only in a kernel whose register count is capped at entry (__launch_bounds__(threads, 1)).
#pragma once

namespace moxie::device {

// Gives registers back to the CTA's pool: kRegisters per thread remain (24..256, multiple of 8).
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Takes registers from the pool; waits until another warpgroup has given enough back.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moxie::device
