// The whole backward pass in one kernel, with the roles of fused_forward.cuh: warp 0 loads, warp 1
// tickets and flags, warps 2-3 pull rows, sum vector gradients and merge, two consumer warpgroups
// multiply. One GEMM loop, expert/grouped_gemm_cuda.cuh, for all six products. Protocol:
// docs/protocol.md. The CPU twin is backend_cpu/.
#pragma once

#include "moxie/backend_cuda/backward_roles.cuh"

namespace moxie::backend_cuda {

// What the GEMM loop calls its parameters.
template <bool kGeneral>
struct BackwardGemm {
  BackwardOperands operands;
  BackwardEpilogue<kGeneral> epilogue;
  BackwardReadiness readiness;
  const device::WaitLimits& limits;
};

// Eight registers more for the multiplying warps than in the forward: what they spill at the end of
// a tile is out of the cache when it is read again, a microsecond each time. Dispatch spills
// instead (decision 010).
template <int kClusterSize>
using BackwardConfig = expert::GemmConfig<kClusterSize, 88, 208>;
using BackwardShared = expert::GemmShared<BackwardSchedule>;

template <bool kGeneral, int kNumLocalRanks, int kClusterSize>
__global__ void __launch_bounds__(expert::kNumThreads, 1)
    fused_backward_kernel(const __grid_constant__ BackwardParams<kNumLocalRanks> params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  static_assert(sizeof(BackwardShared) <= 227 * 1024);
  auto& shared = *reinterpret_cast<BackwardShared*>(shared_bytes);
  BackwardState& state = shared.schedule;
  const BackwardCommon& common = params.common;
  const int32_t local_rank = kNumLocalRanks == 1 ? 0 : blockIdx.x / common.ctas_per_rank;
  const BackwardRank& rank = params.ranks[local_rank];
  const schedule::Cta cta{static_cast<int32_t>(blockIdx.x) - local_rank * common.ctas_per_rank,
                          common.ctas_per_rank};
  const auto fill = [&](const ScheduleResult& result) {
    fill_state<kClusterSize>(common, rank, state, result);
  };
  if (!begin_pass<kClusterSize>(common, rank, shared, cta, BackwardTables{common, rank}, fill))
    return;

  const BackwardGemm<kGeneral> gemm{
      {common, rank}, {common, rank, state}, {common, state}, state.barrier_limits};
  const DispatchTeam team = dispatch_team(common, cta);
  const bool is_dedicated = team.has(cta) && team.is_dedicated();
  const BackwardPublisher publisher{common, rank, state};
  if (threadIdx.x < 128) {
    device::setmaxnreg_dec<BackwardConfig<kClusterSize>::kProducerRegisters>();
    const int32_t warp_idx = threadIdx.x / 32;
    if (warp_idx == 0) {
      expert::load_tiles<kClusterSize>(gemm, shared);
    } else if (warp_idx == 1) {
      if (expert::is_first_cta<kClusterSize>()) {
        if (!is_dedicated || wait_dispatched(state))
          post_and_publish<kClusterSize, BackwardSchedule>(publisher, shared);
      } else if constexpr (kClusterSize > 1) {
        publish_only(publisher, shared);
      }
    } else {
      if (team.has(cta)) {
        dispatch_rows(common, rank, state, team, rows_slot(shared));
        if (is_dedicated) say_dispatched<kClusterSize>(state);
      } else {
        stage_tokens(common, rank, state, StageUntil::done);
      }
      sum_vectors(common, rank, state, state.stream.chunks.num_chunks);
    }
    return_rows(common, rank, state);
  } else {
    device::setmaxnreg_inc<BackwardConfig<kClusterSize>::kConsumerRegisters>();
    work_before_tiles<kClusterSize>(common, rank, state, team, rows_slot(shared));
    expert::multiply_tiles<kClusterSize>(gemm, shared);
    return_rows(common, rank, state);
  }
  expert::sync_cluster<kClusterSize>();  // nobody leaves while its partner may still write to its
                                         // memory
  close_pass(common, rank, state);
}

}  // namespace moxie::backend_cuda
