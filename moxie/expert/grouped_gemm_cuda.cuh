// The GEMM main loop of the expert stage on Hopper (sm_90a): grouped BF16 products C = A * B^T.
//
// Rows of A are sorted by expert; each expert starts on a 128-row block of the address space and
// only its real rows are ever written (rows past them may hold anything, NaN too: a row of C
// depends on its own row of A alone). One persistent CTA per SM, 384 threads: warp 0 issues tensor
// copies (grouped_gemm_load_cuda.cuh), warp 1 takes tickets (grouped_gemm_tickets_cuda.cuh), warps
// 2-3 are free, or warp 2 gathers A (gather_cuda.cuh), two warpgroups multiply 64 x 256 each. A
// cluster of two CTAs takes two neighbouring row blocks per ticket and shares B by multicast where
// both belong to one expert. What differs between products comes as policies: Schedule (ticket ->
// tile), Readiness (may A be loaded?), Epilogue (what becomes of the accumulators). Stand-alone:
// grouped_gemm_kernel_cuda.cuh, grouped_gemm_schedule_cuda.cuh, grouped_gemm_epilogues_cuda.cuh.
#pragma once

#include <cuda/ptx>

#include <type_traits>

#include "moxie/device/bounded_wait.cuh"
#include "moxie/device/cluster.cuh"
#include "moxie/device/setmaxnreg.cuh"
#include "moxie/device/wgmma.cuh"
#include "moxie/expert/grouped_gemm_load_cuda.cuh"
#include "moxie/expert/grouped_gemm_tickets_cuda.cuh"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::expert {

using device::Major;

// ---- multiplying warpgroups ----

// Hands a stage back to the producers that write to it: lane r of each warp tells CTA r.
template <int kClusterSize, class Shared>
__device__ __forceinline__ void release_stage(Shared& shared, uint32_t slot_idx, int32_t lane_idx,
                                              uint32_t stage_empty /* [0], of CTA lane_idx */) {
  if (lane_idx >= kClusterSize) return;
  if constexpr (kClusterSize == 1) {
    ptx::mbarrier_arrive(&shared.stage_empty[slot_idx]);
  } else {
    device::mbarrier_arrive_cluster(stage_empty +
                                    slot_idx * static_cast<uint32_t>(sizeof(uint64_t)));
  }
}

// The same for a stage from which lane 0 has stored results by copies: once all but the kPending
// latest groups of them have read it.
template <int kClusterSize, int kPending, class Shared>
__device__ __forceinline__ void release_stored_stage(Shared& shared, uint32_t slot_idx,
                                                     int32_t lane_idx, uint32_t stage_empty) {
  if (lane_idx == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kPending>{});
  __syncwarp();
  release_stage<kClusterSize>(shared, slot_idx, lane_idx, stage_empty);
}

// Has this K block arrived? The same answer for the whole warp. Signalled as below.
template <class Shared>
__device__ __forceinline__ bool stage_is_full(Shared& shared,
                                              const RingPosition<kNumStages>& stage) {
  return __all_sync(
      ~0u, ptx::mbarrier_test_wait_parity(&shared.stage_full[stage.slot_idx()], stage.parity()));
}

// The same within the time that a stage on its way takes: publishing at once may take longer. (Only
// where it does: waiting so before every tile is slower, decision 010.)
template <class Shared>
__device__ __forceinline__ bool stage_comes(Shared& shared, const RingPosition<kNumStages>& stage) {
  constexpr int64_t kPatience_cycles = 6000;
  const int64_t begin = clock64();
  bool is_full = stage_is_full(shared, stage);
  while (!is_full && clock64() - begin < kPatience_cycles) is_full = stage_is_full(shared, stage);
  return __any_sync(~0u, is_full);
}

// Issues the products of one K block: acc (+)= 64 rows of A times B^T.
template <device::Major kMajorA, device::Major kMajorB>
__device__ __forceinline__ void multiply_block(float (&acc)[128], const bf16* a, const bf16* b,
                                               bool is_first) {
  const uint64_t desc_a = device::wgmma_descriptor<kMajorA>(a);
  const uint64_t desc_b = device::wgmma_descriptor<kMajorB>(b);
  device::wgmma_fence();  // earlier reads of acc come before this product's writes
#pragma unroll
  for (int k = 0; k < BLOCK_K / 16; ++k) {
    device::wgmma_m64n256k16_bf16<kMajorA, kMajorB>(
        acc, desc_a + k * device::kDescriptorStep<kMajorA>,
        desc_b + k * device::kDescriptorStep<kMajorB>, is_first && k == 0 ? 0 : 1);
  }
  device::wgmma_commit_group();
}

// Waits for one K block and multiplies this warpgroup's 64 rows of A.
template <Majors kMajors, class Shared>
__device__ __forceinline__ bool multiply_stage(float (&acc)[128], Shared& shared,
                                               const RingPosition<kNumStages>& stage,
                                               int32_t warpgroup_idx, bool is_first,
                                               const device::WaitLimits& limits,
                                               bool is_gathered = false) {
  // Signalled by the byte counts of the stage's copies, and by the gathering warp's lanes: A and B
  // of this K block are in shared memory.
  const bool healthy =
      device::mbarrier_wait(&shared.stage_full[stage.slot_idx()], stage.parity(), limits,
                            {kWaitStageFull, stage.slot_idx(), stage.parity()});
  if (is_gathered) ptx::fence_proxy_async(ptx::space_shared);
  multiply_block<kMajors == Majors::mn_mn ? Major::mn : Major::k,
                 kMajors == Majors::k_k ? Major::k : Major::mn>(
      acc, shared.a[stage.slot_idx()] + warpgroup_idx * (64 * BLOCK_K), shared.b[stage.slot_idx()],
      is_first);
  return healthy;
}

// A warpgroup whose 64 rows are all padding keeps step with the stages and leaves the tensor cores
// to the other one.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool skip_tile(Shared& shared, int32_t num_k_blocks,
                                          RingPosition<kNumStages>& stage, uint32_t stage_empty,
                                          int32_t lane_idx, const device::WaitLimits& limits) {
  bool healthy = true;
#pragma unroll 1
  for (int32_t k_block = 0; k_block < num_k_blocks; ++k_block) {
    healthy &= device::mbarrier_wait(&shared.stage_full[stage.slot_idx()], stage.parity(), limits,
                                     {kWaitStageFull, stage.slot_idx(), stage.parity()});
    release_stage<kClusterSize>(shared, stage.slot_idx(), lane_idx, stage_empty);
    stage.advance();
  }
  return healthy;
}

// Does a tile with these majors have anything to prepare? Code that cannot run is not in its loop.
template <class Epilogue>
constexpr bool prepares(Majors majors) {
  if constexpr (requires { Epilogue::prepares(majors); }) return Epilogue::prepares(majors);
  return true;
}

// Where a tile leaves nothing for store(), says so to the compiler, which otherwise keeps what the
// tile before had left through the whole epilogue, and spills.
template <int kNumDeferred>
__device__ __forceinline__ void defer_nothing(uint32_t (&packed)[kNumDeferred][16]) {
#pragma unroll
  for (int i = 0; i < kNumDeferred * 16; ++i) packed[i / 16][i % 16] = 0;
}

// A consumer warpgroup: 64 rows of every tile. The epilogue is split in two: convert() empties the
// accumulators at once, into packed registers; store() writes one piece of them later, while the
// tensor cores work on the next tile. Only the conversion keeps them waiting. A piece is 16
// registers; the fewer are deferred, the more registers are left for other warps
// (GemmConfig). publish() follows a tile's last piece, once per warp and tile, also where the warp
// had nothing to store; a few K blocks later where it waits for copies that are then on the way
// (publishes_late).
template <int kClusterSize, class Params, class Shared>
__device__ __forceinline__ void multiply_tiles(const Params& params, Shared& shared) {
  const auto& epilogue = params.epilogue;
  using Epilogue = std::remove_cvref_t<decltype(epilogue)>;
  using Operands = std::remove_cvref_t<decltype(params.operands[0])>;
  constexpr bool kHasEpilogueStages = Operands::kNumEpilogueStages > 0;
  constexpr bool kTells = !Epilogue::kPublishes;  // else publish() does, in the end
  constexpr int kNumDeferred = Epilogue::kNumDeferred;
  static_assert(kNumDeferred >= 1 && kNumDeferred <= kMinKBlocks);
  const int32_t lane_idx = threadIdx.x % 32;
  const int32_t consumer_warp_idx = __shfl_sync(~0u, static_cast<int32_t>(threadIdx.x / 32) - 4, 0);
  const int32_t warpgroup_idx = consumer_warp_idx / 4;
  const uint32_t stage_empty =
      kClusterSize == 1 ? 0 : device::mapa(shared.stage_empty, lane_idx % kClusterSize);
  const EpilogueWarp warp{shared.staging[consumer_warp_idx][0], consumer_warp_idx * 16, lane_idx};

  RingPosition<kNumStages> stage;
  RingPosition<kNumTicketSlots> slot;
  uint32_t packed[kNumDeferred][16];
  Tile packed_tile{};  // whose results `packed` holds; without rows: none
  Tile tile;
  bool has_tile = read_tile<kClusterSize, kTells>(shared, slot, params.limits, tile);
  for (;;) {
    // (Compared in units of 64 rows: the product would sit in a register all along.)
    const bool skips = has_tile && (tile.num_rows + 63) / 64 <= warpgroup_idx;
    // Pieces are stored beside products. Where there are none to issue now they leave at once: what
    // this CTA waits for may depend on them.
    const auto has_products = [&] {
      if constexpr (Epilogue::kPublishes) {
        return epilogue.publishes_late(packed_tile) ? stage_comes(shared, stage)
                                                    : stage_is_full(shared, stage);
      }
      return true;
    };
    if (packed_tile.num_rows > 0 && (!has_tile || skips || !has_products())) {
#pragma unroll
      for (int piece = 0; piece < kNumDeferred; ++piece) {
        epilogue.store(packed[piece], piece, packed_tile, warp);
      }
      if (kHasEpilogueStages && Operands::has_epilogue_stages(packed_tile))
        release_stored_stage<kClusterSize, 0>(shared, stage.previous_slot_idx(), lane_idx,
                                              stage_empty);
      epilogue.publish(packed_tile, slot.count - 1, warp);
      packed_tile.num_rows = 0;
    }
    if (!has_tile) break;
    const auto& operands = params.operands[tile.product];
    if (skips) {
      epilogue.publish(tile, slot.count, warp);
      slot.advance();
      has_tile = skip_tile<kClusterSize>(shared, stages_of(operands, tile), stage, stage_empty,
                                         lane_idx, params.limits) &&
                 read_tile<kClusterSize, kTells>(shared, slot, params.limits, tile);
      continue;
    }
    const int32_t num_k_blocks = k_blocks_of(operands, tile);
    bool is_gathered = false;
    if constexpr (Gathers<Params>) is_gathered = params.gather.gathers(tile);
    bool healthy = true, is_fresh = true;
    float acc[128];
    if constexpr (Epilogue::kResumes) {
      if (epilogue.resumes(tile)) {
        // Signalled as in multiply_stage(): what the tile goes on from was ready before its rows.
        healthy = device::mbarrier_wait(&shared.stage_full[stage.slot_idx()], stage.parity(),
                                        params.limits,
                                        {kWaitStageFull, stage.slot_idx(), stage.parity()});
        epilogue.resume(acc, tile, warp);
        is_fresh = false;
      }
    }
    typename Epilogue::Prepared prepared;
    // All of a tile's products in one branch: with a branch per K block, products would be in
    // flight where branches meet, and the compiler adds waits.
    const auto multiply = [&]<Majors kMajors>() __attribute__((always_inline)) {
#pragma unroll
      for (int piece = 0; piece < kNumDeferred;
           ++piece) {  // K blocks beside which a piece is stored
        healthy &= multiply_stage<kMajors>(acc, shared, stage, warpgroup_idx,
                                           is_fresh && piece == 0, params.limits, is_gathered);
        if (kHasEpilogueStages && piece == 0 && packed_tile.num_rows > 0 &&
            Operands::has_epilogue_stages(packed_tile)) {
          release_stored_stage<kClusterSize, 0>(shared, stage.previous_slot_idx(), lane_idx,
                                                stage_empty);
        }
        if (piece > 0) {
          device::wgmma_wait_group<1>();  // the previous K block has been read
          release_stage<kClusterSize>(shared, stage.previous_slot_idx(), lane_idx, stage_empty);
        }
        stage.advance();
        epilogue.store(packed[piece], piece, packed_tile, warp);
      }
      bool publishes_late = false;
      if (packed_tile.num_rows > 0) {
        if constexpr (Epilogue::kPublishes) publishes_late = epilogue.publishes_late(packed_tile);
        if (!publishes_late) epilogue.publish(packed_tile, slot.count - 1, warp);
      }
      // Only now, after a wait for the tile's first K block: what prepare() reads was ready before
      // A.
      if constexpr (prepares<Epilogue>(kMajors))
        prepared = epilogue.prepare(tile, warp);
      else
        prepared = {};
#pragma unroll 1
      for (int32_t k_block = kNumDeferred; k_block < num_k_blocks; ++k_block) {
        healthy &= multiply_stage<kMajors>(acc, shared, stage, warpgroup_idx, false, params.limits,
                                           is_gathered);
        device::wgmma_wait_group<1>();
        release_stage<kClusterSize>(shared, stage.previous_slot_idx(), lane_idx, stage_empty);
        stage.advance();
        if (publishes_late && k_block == Epilogue::kLatePublishBlock) {
          epilogue.publish(packed_tile, slot.count - 1, warp);
          publishes_late = false;
        }
      }
      if (publishes_late) epilogue.publish(packed_tile, slot.count - 1, warp);
      packed_tile = tile;
      if (!healthy) packed_tile.num_rows = 0;  // what was waited for in vain is not stored
      slot.advance();
      has_tile = healthy && read_tile<kClusterSize, kTells>(shared, slot, params.limits, tile);
      device::wgmma_wait_group<0>();
    };
    switch (Operands::majors_of(tile)) {
      case Majors::k_k: multiply.template operator()<Majors::k_k>(); break;
      case Majors::k_mn: multiply.template operator()<Majors::k_mn>(); break;
      case Majors::mn_mn: multiply.template operator()<Majors::mn_mn>(); break;
    }
    release_stage<kClusterSize>(shared, stage.previous_slot_idx(), lane_idx, stage_empty);
    bool converted = false;
    if constexpr (kHasEpilogueStages) {
      if (Operands::has_epilogue_stages(packed_tile)) {
        converted = true;
        // Results overwrite what the epilogue has read in a stage and leave from there. The last
        // stage is handed back beside the next tile's first products. The code is a loop in a loop,
        // short enough for the instruction caches (decision 010): registers have no addresses, so a
        // piece's sums go through shared memory.
        auto sums = epilogue.begin(prepared, packed_tile, warp);
#pragma unroll 1
        for (int32_t piece = 0; piece < Operands::kNumEpilogueStages; ++piece) {
          put_aside<Operands::kNumEpilogueStages>(acc, piece, warp);
          // Signalled by the byte counts of the stage's copies, as a K block is.
          if (!device::mbarrier_wait(&shared.stage_full[stage.slot_idx()], stage.parity(),
                                     params.limits,
                                     {kWaitStageFull, stage.slot_idx(), stage.parity()})) {
            has_tile = false;
            packed_tile.num_rows = 0;
          }
          epilogue.convert_stage(own_sums(warp), prepared, sums, packed_tile, piece, warp,
                                 shared.a[stage.slot_idx()], shared.b[stage.slot_idx()]);
          if (piece > 0) {
            release_stored_stage<kClusterSize, 1>(shared, stage.previous_slot_idx(), lane_idx,
                                                  stage_empty);
          }
          stage.advance();
        }
        epilogue.finish(sums, packed_tile, warp);
        defer_nothing(packed);
      }
    }
    if (!converted) epilogue.convert(acc, prepared, packed_tile, warp, packed);
  }
  epilogue.drain(warp);
}

// ---- beginning and end of a kernel ----

// Arrivals that say that a ticket slot is read: the loading and the consumer warps of each CTA.
template <int kClusterSize>
inline constexpr int kNumTicketReaders = (1 + kNumConsumerWarps) * (kClusterSize == 1 ? 32 : 2);

// gathers: a warp of its own fetches A of some tiles, and arrives at each of their stages.
template <int kClusterSize, class Shared>
__device__ __forceinline__ void initialise_barriers(Shared& shared, bool gathers = false) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kNumStages; ++i) {
      // the producer lane, plus the copies' bytes
      ptx::mbarrier_init(&shared.stage_full[i], 1 + (gathers ? kGatherArrivals : 0));
      ptx::mbarrier_init(&shared.stage_empty[i], kNumConsumerWarps * kClusterSize);
    }
    ptx::mbarrier_init(&shared.tile_begun, 1);
    for (int i = 0; i < kNumGatherSlots; ++i) {
      ptx::mbarrier_init(&shared.gather_posted[i], 1);
      ptx::mbarrier_init(&shared.gather_ready[i], 1);
    }
    for (int i = 0; i < kNumTicketSlots; ++i) {
      ptx::mbarrier_init(&shared.ticket_full[i], 1);
      ptx::mbarrier_init(&shared.ticket_read[i], kNumTicketReaders<kClusterSize>);
      arm_ticket_slot<kClusterSize>(shared, i);
    }
    // The initialised barriers, to the copy engine and to the other CTA's arrives.
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
}

// Every thread of the cluster: nobody goes on, or leaves, before all have come.
template <int kClusterSize>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (kClusterSize == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive(ptx::sem_release);
    ptx::barrier_cluster_wait(ptx::sem_acquire);
  }
}

template <int kClusterSize>
__device__ __forceinline__ bool is_first_cta() {
  return kClusterSize == 1 || ptx::get_sreg_cluster_ctarank() == 0;
}

}  // namespace moxie::expert
