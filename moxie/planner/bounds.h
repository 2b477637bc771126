// Lower bounds and first estimates in closed form: what no plan can beat, and a ranking good enough
// to decide which plans are worth simulating.
#pragma once
#include "moxie/planner/simulate.h"

namespace moxie::planner {

// Rows of the busiest rank, by where they come from.
struct RankLoad {
  double rows = 0, blocks = 0, experts = 0;  // experts with rows
  double own = 0, link = 0, network = 0, shared_rows = 0;
};
RankLoad busiest_load(const Problem& problem, const RoutingCounts& routing, const Machine& machine);

struct Bounds {
  double gemm_ms = 0;       // real FLOPs of the busiest rank at full tensor rate, clock under load
  double memory_ms = 0;     // weights and rows once through memory
  double link_ms = 0;       // bytes of the busiest port, headers and requests included
  double network_ms = 0;    // the same between domains
  double lower_ms() const;  // the largest of them
};
Bounds bounds(const Problem& problem, const Plan& plan, const RankLoad& load,
              const Machine& machine, Direction direction);

// Time of a plan without simulating it. Ranks plans; for times, simulate.
double estimate_ms(const Problem& problem, const Plan& plan, const RankLoad& load,
                   const Machine& machine, const SimOptions& options);

}  // namespace moxie::planner
