// Tiles from the ticket warp of a cluster to every role of its CTAs (grouped_gemm_cuda.cuh).
#pragma once

#include <cuda/ptx>

#include "moxie/device/bounded_wait.cuh"
#include "moxie/device/cluster.cuh"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::expert {

// Lane r of CTA 0's ticket warp writes the tile of CTA r into its slot.
template <int kClusterSize, class Shared>
__device__ __forceinline__ void post_tile(Shared& shared, uint32_t slot_idx, const Tile& tile,
                                          uint32_t cta_rank) {
  if constexpr (kClusterSize == 1) {
    shared.tickets[slot_idx] = tile;
    ptx::mbarrier_arrive(&shared.ticket_full[slot_idx]);  // release: the slot, to this CTA's roles
  } else {
    const int32_t(&words)[4] = reinterpret_cast<const int32_t(&)[4]>(tile);
    Tile* slot = device::mapa_generic(&shared.tickets[slot_idx], cta_rank);
    uint64_t* full = device::mapa_generic(&shared.ticket_full[slot_idx], cta_rank);
    ptx::st_async(reinterpret_cast<int32_t*>(slot), words, full);
  }
}

// Every role of both CTAs reads each slot once. kTells: and says so to the warp that posts, which
// waits for all of them before it writes there again. False: gave up, or no more tiles.
template <int kClusterSize, bool kTells = false, class Shared>
__device__ __forceinline__ bool read_tile(Shared& shared, const RingPosition<kNumTicketSlots>& at,
                                          const device::WaitLimits& limits, Tile& tile) {
  uint64_t* full = &shared.ticket_full[at.slot_idx()];
  const device::WaitTarget target{kWaitTicket, at.slot_idx(), at.parity()};
  // Signalled by CTA 0's ticket warp: by 16 bytes of st.async, or in a CTA of its own by an arrive.
  // Acquire at cluster scope makes the words that another CTA wrote visible here.
  const bool posted = kClusterSize == 1
                          ? device::mbarrier_wait(full, at.parity(), limits, target)
                          : device::mbarrier_wait_cluster(full, at.parity(), limits, target);
  if (!posted) return false;
  tile = shared.tickets[at.slot_idx()];
  __syncwarp();  // all lanes have read the slot: one of them may say so
  if constexpr (kTells) {
    uint64_t* read = &shared.ticket_read[at.slot_idx()];
    if constexpr (kClusterSize == 1) {
      ptx::mbarrier_arrive(read);  // each lane for itself: racecheck cannot follow __syncwarp here
    } else if (threadIdx.x % 32 == 0) {
      device::mbarrier_arrive_cluster(device::mapa(read, 0));
    }
  }
  return tile.kind != kNoMoreTiles;
}

// Arms the slot's barrier for the st.async of its next round. One thread per CTA, when it has read
// the slot: the next write to it is kNumTicketSlots tiles away.
template <int kClusterSize, class Shared>
__device__ __forceinline__ void arm_ticket_slot(Shared& shared, uint32_t slot_idx) {
  if constexpr (kClusterSize > 1) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   &shared.ticket_full[slot_idx], uint32_t{sizeof(Tile)});
  }
}

}  // namespace moxie::expert
