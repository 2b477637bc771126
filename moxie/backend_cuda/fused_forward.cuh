// The whole forward pass in one kernel. Its CTAs are divided among the ranks of this GPU; every CTA
// sorts and stages, then its warps take roles and keep them: warp 0 loads, warp 1 tickets and
// flags, warps 2-3 dispatch and merge, two consumer warpgroups multiply. The GEMM loop is
// expert/grouped_gemm_cuda.cuh, unchanged. Protocol: docs/protocol.md. The CPU twin is
// backend_cpu/.
#pragma once

#include "moxie/backend_cuda/forward_roles.cuh"
#include "moxie/backend_cuda/forward_schedule.cuh"

namespace moxie::backend_cuda {

// What the GEMM loop calls its parameters.
template <bool kGeneral>
struct ForwardGemm {
  const expert::GemmOperands (&operands)[kNumProducts];
  ForwardEpilogue<kGeneral> epilogue;
  ForwardReadiness readiness;
  ForwardGather gather;
  const device::WaitLimits& limits;
};

// Registers per thread: 104 let a dispatch lane have 12 loads in flight and a merge lane 8, 200
// hold the accumulators and two deferred pieces without spills.
template <int kClusterSize>
using ForwardConfig = expert::GemmConfig<kClusterSize, 104, 200>;
using ForwardShared = expert::GemmShared<ForwardSchedule>;

template <bool kGeneral, int kNumLocalRanks, int kClusterSize>
__global__ void __launch_bounds__(expert::kNumThreads, 1)
    fused_forward_kernel(const __grid_constant__ ForwardParams<kNumLocalRanks> params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  static_assert(sizeof(ForwardShared) <= 227 * 1024);
  auto& shared = *reinterpret_cast<ForwardShared*>(shared_bytes);
  ForwardState& state = shared.schedule;
  const ForwardCommon& common = params.common;
  const int32_t local_rank = kNumLocalRanks == 1 ? 0 : blockIdx.x / common.ctas_per_rank;
  const ForwardRank& rank = params.ranks[local_rank];
  const schedule::Cta cta{static_cast<int32_t>(blockIdx.x) - local_rank * common.ctas_per_rank,
                          common.ctas_per_rank};
  const auto fill = [&](const ScheduleResult& result) { fill_state(common, rank, state, result); };
  if (!begin_pass<kClusterSize>(common, rank, shared, cta, ForwardTables{common, rank}, fill))
    return;

  const ForwardGemm<kGeneral> gemm{rank.operands,
                                   {common, rank, state},
                                   {common, state},
                                   {common, rank, state},
                                   state.barrier_limits};
  const ForwardPublisher publisher{common, rank, state};
  const DispatchTeam team = dispatch_team(common, cta);
  const bool is_dedicated = team.has(cta) && team.is_dedicated();
  const bool multiplies = !(is_dedicated && stays_with_rows(common));
  if (threadIdx.x < 128) {
    device::setmaxnreg_dec<ForwardConfig<kClusterSize>::kProducerRegisters>();
    const int32_t warp_idx = threadIdx.x / 32;
    if (warp_idx == 0) {
      if (multiplies) expert::load_tiles<kClusterSize>(gemm, shared);
    } else if (warp_idx == 1) {
      if (!multiplies) {
        // no tickets
      } else if (expert::is_first_cta<kClusterSize>()) {
        if (!is_dedicated || wait_dispatched(state))
          post_and_publish<kClusterSize, ForwardSchedule>(publisher, shared);
      } else if constexpr (kClusterSize > 1) {
        publish_only(publisher, shared);
      }
    } else {
      const bool gathers = common.gathers && warp_idx == kFirstDispatchWarp;
      if (team.has_this_warp(cta)) {
        dispatch_rows(common, rank, state, team, rows_slot(shared));
        if (is_dedicated) say_dispatched<kClusterSize>(state);
      } else if ((common.phases & kStagePhase) != 0 && !gathers) {
        stage_tokens(common, rank, state, StageUntil::done);
      }
      if (gathers && multiplies) expert::gather_tiles<kClusterSize>(gemm, shared);
    }
    return_rows(common, rank, state);
  } else {
    device::setmaxnreg_inc<ForwardConfig<kClusterSize>::kConsumerRegisters>();
    work_before_tiles<kClusterSize>(common, rank, state, team, rows_slot(shared));
    if (multiplies) expert::multiply_tiles<kClusterSize>(gemm, shared);
    return_rows(common, rank, state);
  }
  expert::sync_cluster<kClusterSize>();  // nobody leaves while its partner may still write to its
                                         // memory
  close_pass(common, rank, state);
}

}  // namespace moxie::backend_cuda
