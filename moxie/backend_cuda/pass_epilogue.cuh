// What the epilogues of both directions share.
#pragma once

#include "moxie/backend_cuda/pass_state.cuh"
#include "moxie/combine/combine_cuda.cuh"

namespace moxie::backend_cuda {

using expert::EpilogueWarp;

// The same warp, but the compiler cannot tell: what depends on its lane is computed where it is
// needed, not kept in registers through the main loop.
__device__ __forceinline__ EpilogueWarp opaque(EpilogueWarp warp) {
  warp.lane_idx = static_cast<int32_t>(ptx::get_sreg_laneid());
  asm volatile("" : "+r"(warp.lane_idx), "+r"(warp.warp_row));
  // As an address of shared memory: half the registers, and its loads stay shared ones.
  auto staging = static_cast<uint32_t>(__cvta_generic_to_shared(warp.staging));
  asm volatile("" : "+r"(staging));
  warp.staging = static_cast<bf16*>(__cvta_shared_to_generic(staging));
  return warp;
}

// Two staged pieces of a tile to their rows' homes.
__device__ __forceinline__ void push_home(const PassCommon& common, const PassState& state,
                                          int32_t pair, const expert::Tile& tile,
                                          const EpilogueWarp& warp) {
  combine::push_pair(warp.staging, state.row_home[warp.warp_row / 16],
                     tile.num_rows - warp.warp_row, tile.n_tile * expert::BLOCK_N + pair * 128,
                     static_cast<int32_t>(common.problem.hidden), warp.lane_idx);
}

}  // namespace moxie::backend_cuda
