// The stand-alone kernel around the GEMM main loop (grouped_gemm_cuda.cuh), and its ticket warp.
// The fused passes have kernels and tickets of their own: backend_cuda/.
#pragma once

#include "moxie/expert/grouped_gemm_cuda.cuh"

namespace moxie::expert {

// Warp 1 of CTA 0: takes tickets for both CTAs and posts their tiles, one tile ahead of the loads,
// so that nobody waits for the counter or for the division of a ticket into a tile. (In the loading
// warp the same work cost 600 to 1600 cycles per tile.)
template <int kClusterSize, class Params, class Shared>
__device__ __forceinline__ void post_tiles(const Params& params, Shared& shared) {
  const int32_t lane_idx = threadIdx.x % 32;
  const auto walk = params.schedule.open(shared.schedule);
  RingPosition<kNumTicketSlots> slot;
  for (;;) {
    uint32_t ticket = 0;
    if (lane_idx == 0) ticket = atomicAdd(&params.tickets->next, 1u);
    const Tile tile = walk.tile(__shfl_sync(~0u, ticket, 0), lane_idx);
    // Signalled by every reader of the slot, in both CTAs: what was posted there before is read.
    if (!device::mbarrier_wait(&shared.ticket_read[slot.slot_idx()], slot.parity() ^ 1,
                               params.limits,
                               {kWaitTicketRead, slot.slot_idx(), slot.parity() ^ 1}))
      return;
    if (lane_idx < kClusterSize) post_tile<kClusterSize>(shared, slot.slot_idx(), tile, lane_idx);
    if (tile.kind == kNoMoreTiles) break;
    // Signalled by this CTA's loading warp: it has begun the tile just posted.
    if (!device::mbarrier_wait(&shared.tile_begun, slot.count & 1, params.limits,
                               {kWaitTileBegun, slot.count, slot.count & 1})) {
      return;
    }
    slot.advance();
  }
  if (lane_idx == 0) {
    // Every cluster adds one after its last ticket; the last one resets both for the next launch,
    // which the end of the kernel orders after this.
    const uint32_t num_clusters = gridDim.x / kClusterSize;
    if (atomicAdd(&params.tickets->num_done, 1u) == num_clusters - 1) {
      params.tickets->next = 0;
      params.tickets->num_done = 0;
    }
  }
}

template <class Config, class Schedule, class Readiness, class Epilogue, int kNumProducts,
          class Operands>
__global__ void __launch_bounds__(kNumThreads, 1) grouped_gemm_kernel(
    const __grid_constant__ GemmParams<Schedule, Readiness, Epilogue, kNumProducts, Operands>
        params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<GemmShared<Schedule>*>(shared_bytes);
  static_assert(sizeof(shared) <= 227 * 1024);

  constexpr int kClusterSize = Config::kClusterSize;
  initialise_barriers<kClusterSize>(shared);
  sync_cluster<kClusterSize>();
  if (threadIdx.x < 128) {
    device::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      load_tiles<kClusterSize>(params, shared);
    } else if (threadIdx.x < 64 && is_first_cta<kClusterSize>()) {
      post_tiles<kClusterSize>(params, shared);
    }
  } else {
    device::setmaxnreg_inc<Config::kConsumerRegisters>();
    multiply_tiles<kClusterSize>(params, shared);
  }
  sync_cluster<kClusterSize>();  // no CTA leaves while its partner may still write to its memory
}

}  // namespace moxie::expert
