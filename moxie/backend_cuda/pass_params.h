// What the host hands to a fused kernel, forward or backward, all of it by value as kernel
// parameters: a captured graph keeps its own copy, and tensor maps may be read from there. The
// launch covers the ranks of one GPU. What only one direction needs: forward_params.h,
// backward_params.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moxie/device/bounded_wait.cuh"
#include "moxie/moxie.h"
#include "moxie/pipeline/cuda_layout.h"
#include "moxie/pipeline/tasks.h"
#include "moxie/schedule/schedule_cuda.cuh"
#include "moxie/trace/device_trace.h"
#include "moxie/transport/gpu_ranks.h"

namespace moxie::backend_cuda {

using pipeline::PassWords;
using pipeline::ScheduleResult;

inline constexpr int kMaxLocalRanks =
    8;  // of one launch: 4 KB of parameters each, 32 KB are allowed
inline constexpr std::size_t kMaxParamBytes = 32764;
// ExpiredWait::what: a WaitFor from here on, below it a WaitSite of the GEMM loop.
inline constexpr std::uint32_t kWaitForBase = 64;

// Failure of a pass before any row moved; in host memory, written by the rank's first CTA.
struct PassReport {
  std::uint32_t written;           // a pipeline::Verdict, 0 = nothing to report
  std::int64_t bad_route, bad_id;  // invalid_route
  std::int64_t wanted_blocks;      // capacity_exceeded: what this rank would have needed
};

// One rank's part of a launch, whatever the direction.
struct PassRank {
  std::byte* workspace;
  const bf16* x;                   // [T, H]
  const void* expert_ids;          // [T, K]
  const float* route_weights;      // [T, K]
  bf16* merged;                    // [T, H] y; backward: dX
  const bf16* gate_bias;           // [E_local, I] or null, as the next two
  const bf16* up_bias;             // [E_local, I]
  const bf16* down_bias;           // [E_local, H]
  const bf16* shared_output_gate;  // [H] or null
  std::int32_t* keep_ids;          // [T, K] context or null, as the next one
  float* keep_weights;             // [T, K]
  trace::DeviceEvent* events;      // [CTAs, event_capacity] or null: not traced
  std::uint32_t* num_events;       // [CTAs]
  std::uint32_t event_capacity;    // of a CTA
  DType id_dtype;
  std::int64_t num_tokens;
  RankId me;
};

// The same for all ranks of a launch.
struct PassCommon {
  Problem problem;
  Plan plan;
  pipeline::Extents extents;
  pipeline::HeapLayout heap;
  pipeline::WorkspaceLayout workspace;
  pipeline::CounterLayout counters;
  pipeline::CudaWorkspaceLayout cuda_workspace;
  std::byte* heaps[transport::kMaxGpuRanks];
  FaultInjection faults;
  std::int64_t proven_blocks;    // capacity at which no routing can exceed it
  std::int64_t saved_blocks;     // routed blocks whose z (and x) the context keeps
  std::uint32_t* abort_flag;     // [1 + R] one for all ranks of the process, then their claims
  device::ExpiredWait* expired;  // [R] host memory
  PassReport* reports;           // [R] host memory
  std::uint64_t timeout_ns;
  std::int32_t ctas_per_rank;
  std::int32_t num_slabs;  // column slabs of the rows that go home; backward: 1
  std::uint32_t phases;    // of this launch
  // forward: FC1 fetches rows from where their tokens lie (cuda_workspace.row_places), by warp 2
  bool gathers;
  bool pulls_once;     // a token crosses the link once: cuda_workspace.pulled
  bool keep_schedule;  // measuring: nothing is staged, the tables of the pass before hold
};

// What one launch does of a pass: everything, or in split mode one phase after the other.
enum Phase : std::uint32_t {
  kStagePhase = 1,  // stage, sort, agree, schedule
  kDispatchPhase = 2,
  kFc1Phase = 4,  // and the shared expert
  kFc2Phase = 8,  // and combine
  kMergePhase = 16,
  kAllPhases = 31,
  kClosePhase = 32,  // beside others: the pass ends with this launch
};

// One launch from dispatch to FC2, with or without merge: not split mode.
inline constexpr std::uint32_t kOverlapPhases = kDispatchPhase | kFc1Phase | kFc2Phase;

// One built configuration of a kernel.
struct FusedKernel {
  const void* function;
  std::size_t shared_bytes;
};

}  // namespace moxie::backend_cuda
