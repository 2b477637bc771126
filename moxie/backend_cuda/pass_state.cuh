// What the roles of one CTA share during a pass (in shared memory), and the waits between them.
// What one direction adds: forward_state.cuh, backward_state.cuh.
#pragma once

#include "moxie/backend_cuda/pass_params.h"
#include "moxie/device/signal.cuh"
#include "moxie/device/warp_search.cuh"
#include "moxie/dispatch/dispatch_cuda.cuh"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"
#include "moxie/trace/recorder_cuda.cuh"

namespace moxie::backend_cuda {

namespace ptx = cuda::ptx;

__device__ __forceinline__ constexpr uint32_t code(WaitFor what) {
  return kWaitForBase + static_cast<uint32_t>(what);
}

// Who is furthest from the cause gives up last: the record should name the cause, and a rank that
// waits for its own counters, or a warp for a barrier of its CTA, only follows somebody who waits
// for a peer.
inline constexpr uint64_t kCounterGrace_ns = 250'000'000, kBarrierGrace_ns = 500'000'000;

// A CTA that dispatches with all it has: every warp but the loading and the ticket warp.
inline constexpr int32_t kFirstDispatchWarp = 2, kMaxDispatchWarps = schedule::kSortWarps - 2;

// Copies of own tokens into the heap, for peers: x; backward: dY, and x where it is pulled again.
struct StagedTokens {
  const bf16* from;
  bf16* to;
};

struct PassState {
  bf16* row_home[expert::kNumConsumerWarps][16];  // tiles that go home: where each warp's rows go
  uint64_t
      tile_stored[expert::kNumTicketSlots];  // mbarriers: all warps have stored the slot's tile
  uint64_t partner_read[expert::kNumTicketSlots];  // mbarriers of CTA 0: CTA 1 has read its tile
  uint32_t slab_tiles[pipeline::kMaxSlabs];        // tiles of this CTA not yet handed over
  pipeline::BlockTable table;
  schedule::Cta cta;
  dispatch::RowsSlot rows_slots[4 - kFirstDispatchWarp];  // rows_slot()
  uint64_t dispatched;     // mbarrier: this cluster's dedicated warps have no rows left
  StagedTokens staged[2];  // the first num_staged of them
  int32_t num_staged;      // 0: nothing is copied
  int32_t num_home_tiles;  // column tiles of a row that goes home
  uint32_t* ticket_counter;
  uint32_t shared_blocks;  // 32 bits, for epilogues
  uint64_t epoch, pass_count;
  uint32_t* counters;  // this pass's bank
  PassWords* words;    // likewise
  device::WaitLimits signal_limits, counter_limits, barrier_limits;
  pipeline::Verdict verdict;
  trace::Recorder recorder;
  uint64_t begin_ns;                           // traced: when the CTA had its schedule
  uint64_t ready_ns[expert::kNumTicketSlots];  // traced: since when the slot's tile could be loaded
  uint32_t num_ready;                          // tiles so far
};

template <class T>
__device__ __forceinline__ T* at(const PassRank& rank, const pipeline::Region& region) {
  return reinterpret_cast<T*>(rank.workspace + region.offset);
}
template <class T>
__device__ __forceinline__ T* heap_at(const PassCommon& common, RankId rank,
                                      const pipeline::Region& region) {
  return reinterpret_cast<T*>(common.heaps[rank.v] + region.offset);
}

// Fault injection: a random pause before a step of the protocol.
struct Delay {
  uint64_t seed;  // 0: none
  int32_t max_us;
  __device__ __forceinline__ void operator()() const {
    if (seed == 0) return;
    uint64_t h = (seed ^ clock64() ^ (uint64_t{blockIdx.x} << 40)) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
    if (h % 8 == 0) __nanosleep(static_cast<uint32_t>(h / 8 % (max_us * 1000u + 1)));
  }
};
__device__ __forceinline__ Delay delay_of(const PassCommon& common) {
  return {common.faults.shuffle_seed, common.faults.max_delay_us};
}

// Tells every rank that this one has pushed all its pieces of a column slab. One thread, which has
// acquired the counts of all CTAs that pushed: their stores become visible to whoever acquires the
// word.
__device__ __forceinline__ void announce_slab(const PassCommon& common, RankId me, uint64_t epoch,
                                              int64_t slab) {
  const int64_t num_ranks = common.problem.num_ranks;
#pragma unroll 1
  for (int64_t i = 0; i < num_ranks; ++i) {
    const RankId peer{remainder(me.v + i, num_ranks)};
    device::store_release_sys(heap_at<uint64_t>(common, peer, common.heap.returns_done) +
                                  me.v * pipeline::kMaxSlabs + slab,
                              pipeline::make_signal(epoch));
  }
}

}  // namespace moxie::backend_cuda
