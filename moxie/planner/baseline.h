// The layer as people run it without Moxie: an all-to-all, permutations, grouped GEMMs and
// elementwise kernels one after another. A chain of closed forms, step by step, so that its time
// can be held against measured rows and Moxie's against it.
#pragma once
#include <string>
#include <vector>

#include "moxie/planner/simulate.h"

namespace moxie::planner {

struct BaselineStep {
  std::string what;
  double ms = 0;
};
struct Baseline {
  std::vector<BaselineStep> steps;
  double ms() const;
};

// NCCL all-to-all + torch.index + torch._grouped_mm, forward, slowest rank.
//   calibrated: the all-to-all rate, on the kimi-k2.5 row measured on 2 x H200 (18.56 ms)
//   not fitted: passes over memory counted in the script, GEMM 1.10 times Moxie's cycles
//   (docs/decisions/003-hopper-gemm-loop.md), launches
Baseline nccl_torch_forward(const Problem& problem, const RoutingCounts& routing,
                            const Machine& machine);

}  // namespace moxie::planner
