// The loading warp of the GEMM main loop (grouped_gemm_cuda.cuh): keeps the stages full, by tensor
// copies, or where rows of A are gathered (gather_cuda.cuh) beside the gathering warp.
#pragma once

#include <cuda/ptx>

#include <type_traits>

#include "moxie/device/bounded_wait.cuh"
#include "moxie/expert/gather_cuda.cuh"
#include "moxie/expert/grouped_gemm_tickets_cuda.cuh"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::expert {

// One lane. Waits until the stage may be overwritten and tells its barrier how many bytes will
// come. False: gave up.
template <class Shared>
__device__ __forceinline__ bool open_stage(Shared& shared, const RingPosition<kNumStages>& stage,
                                           uint32_t num_bytes, const device::WaitLimits& limits) {
  // Signalled by the consumer warps of every CTA that reads what is written here: all have read the
  // stage's previous contents.
  if (!device::mbarrier_wait(&shared.stage_empty[stage.slot_idx()], stage.parity() ^ 1, limits,
                             {kWaitStageEmpty, stage.slot_idx(), stage.parity() ^ 1})) {
    return false;
  }
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                 &shared.stage_full[stage.slot_idx()], num_bytes);
  return true;
}

// One lane: both halves of B's K block.
template <int kClusterSize>
__device__ __forceinline__ void load_b(const GemmOperands& operands, const Tile& tile, int32_t k,
                                       int32_t column, bf16* b, uint64_t* full) {
  constexpr int kHalf = BLOCK_N / 2 * BLOCK_K;
  if (kClusterSize == 2 && tile.kind == kSharedB) {
    // Each CTA fetches one half and sends it to both CTAs: to the same addresses, counted by the
    // barriers of both.
    const int32_t half = ptx::get_sreg_cluster_ctarank();
    ptx::cp_async_bulk_tensor(
        ptx::space_cluster, ptx::space_global, b + half * kHalf, &operands.b[half],
        {k, column + half * operands.half_offset, tile.expert_idx}, full, uint16_t{3});
  } else {
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, b, &operands.b[0],
                              {k, column, tile.expert_idx}, full);
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, b + kHalf, &operands.b[1],
                              {k, column + operands.half_offset, tile.expert_idx}, full);
  }
}

// One lane: one K block of a tile. False: gave up.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_stage(Shared& shared, const GemmOperands& operands,
                                           const Tile& tile, int32_t k,
                                           const RingPosition<kNumStages>& stage,
                                           const device::WaitLimits& limits) {
  if (!open_stage(shared, stage, kStageBytes, limits)) return false;
  uint64_t* full = &shared.stage_full[stage.slot_idx()];
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared.a[stage.slot_idx()],
                            &operands.a, {k, tile.row_begin, 0}, full);
  load_b<kClusterSize>(operands, tile, k, tile.n_tile * operands.n_step, shared.b[stage.slot_idx()],
                       full);
  return true;
}

// Stages that a tile takes.
template <class Operands>
__device__ __forceinline__ int32_t stages_of(const Operands& operands, const Tile& tile) {
  return k_blocks_of(operands, tile) +
         (Operands::has_epilogue_stages(tile) ? Operands::kNumEpilogueStages : 0);
}

// One lane: all stages of a tile. arrives_for_gather: also in place of the gathering warp, which
// has nothing to do with this tile. False: gave up.
template <int kClusterSize, class Shared, class Operands>
__device__ __forceinline__ bool load_tile(Shared& shared, const Operands& operands,
                                          const Tile& tile, RingPosition<kNumStages>& stage,
                                          const device::WaitLimits& limits,
                                          bool arrives_for_gather = false) {
  bool healthy = true;
  const int32_t num_stages = stages_of(operands, tile);
#pragma unroll 1
  for (int32_t k_block = 0; healthy && k_block < num_stages; ++k_block) {
    healthy = load_stage<kClusterSize>(shared, operands, tile, k_block * BLOCK_K, stage, limits);
    if (arrives_for_gather && healthy)
      ptx::mbarrier_arrive(&shared.stage_full[stage.slot_idx()], uint32_t{kGatherArrivals});
    stage.advance();
  }
  return healthy;
}

// ---- rows of A that are gathered (gather_cuda.cuh) ----

// Parameters may have a policy `gather`: is_on() says whether the launch has a gathering warp,
// gathers(tile), where rows() and first_row(tile) lie, is_past(tile) that no gathered tile comes
// any more.
template <class Params>
concept Gathers = requires(const Params& params) {
  params.gather;
};

// The loading lane to the gathering warp: its next tile. No K blocks: the last word.
template <class Shared>
__device__ __forceinline__ void post_gathered(Shared& shared, uint32_t slot_idx,
                                              const GatheredTile& tile) {
  shared.gathered[slot_idx] = tile;
  ptx::mbarrier_arrive(&shared.gather_posted[slot_idx]);
}

// One lane: B's stages of a tile whose A is gathered. False: gave up.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_gathered_tile(Shared& shared, const GemmOperands& operands,
                                                   const Tile& tile,
                                                   RingPosition<kNumStages>& stage,
                                                   const device::WaitLimits& limits) {
  const int32_t end_k = stages_of(operands, tile) * BLOCK_K, column = tile.n_tile * operands.n_step;
#pragma unroll 1
  for (int32_t k = 0; k < end_k; k += BLOCK_K) {
    // The other arrivals are the gathering warp's.
    if (!open_stage(shared, stage, BLOCK_N * BLOCK_K * sizeof(bf16), limits)) return false;
    load_b<kClusterSize>(operands, tile, k, column, shared.b[stage.slot_idx()],
                         &shared.stage_full[stage.slot_idx()]);
    stage.advance();
  }
  return true;
}

// Warp 0: keeps the stages full, tile by tile.
template <int kClusterSize, class Params, class Shared>
__device__ __forceinline__ void load_tiles(const Params& params, Shared& shared) {
  constexpr bool kTells = !std::remove_cvref_t<decltype(params.epilogue)>::kPublishes;
  const bool is_issuer = threadIdx.x % 32 == 0;
  RingPosition<kNumStages> stage;
  RingPosition<kNumTicketSlots> slot;
  RingPosition<kNumGatherSlots> posted;
  bool told_last = false;
  Tile tile;
  bool healthy = true;
  while (healthy && read_tile<kClusterSize, kTells>(shared, slot, params.limits, tile)) {
    if (is_issuer) {
      arm_ticket_slot<kClusterSize>(shared, slot.slot_idx());
      ptx::mbarrier_arrive(&shared.tile_begun);
      const auto& operands = params.operands[tile.product];
      if constexpr (Gathers<Params>) {
        const bool is_gathered = params.gather.gathers(tile);
        const uint32_t posted_idx = posted.slot_idx();
        if (is_gathered) {
          post_gathered(shared, posted_idx,
                        {tile, slot.count, stage.count, k_blocks_of(operands, tile)});
          posted.advance();
        } else if (!told_last && params.gather.is_past(tile)) {
          post_gathered(shared, posted_idx, {});
          told_last = true;
        }
        healthy = params.readiness.wait(tile, params.limits);
        if (healthy && is_gathered) {
          ptx::mbarrier_arrive(&shared.gather_ready[posted_idx]);  // releases what it acquired, too
          healthy = load_gathered_tile<kClusterSize>(shared, operands, tile, stage, params.limits);
        } else if (healthy) {
          healthy = load_tile<kClusterSize>(shared, operands, tile, stage, params.limits,
                                            params.gather.is_on());
        }
      } else {
        healthy = params.readiness.wait(tile, params.limits) &&
                  load_tile<kClusterSize>(shared, operands, tile, stage, params.limits);
      }
    }
    healthy = __shfl_sync(~0u, healthy, 0);
    slot.advance();
  }
  if constexpr (Gathers<Params>) {
    if (is_issuer && !told_last && params.gather.is_on())
      post_gathered(shared, posted.slot_idx(), {});
  }
}

}  // namespace moxie::expert
