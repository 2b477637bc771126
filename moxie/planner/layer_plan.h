// The plan of a Layer that was made without one: what `moxie tune` measured, else what the planner
// is sure of, else pipeline::default_plan (docs/decisions/006-the-plan-of-a-layer.md). Takes less
// than a millisecond where nothing is simulated, and never throws for a legal problem.
#pragma once
#include <string>

#include "moxie/core/machine.h"
#include "moxie/pipeline/plan.h"
#include "moxie/planner/choose.h"

namespace moxie::planner {

struct LayerPlan {
  Plan plan;  // resolved, legal
  PlanSource source;
};

// `cache_file` empty: no cache. `model_error`: what a predicted gain must exceed.
LayerPlan plan_for_layer(const Problem& problem, const MachineId& machine,
                         const std::string& cache_file, double model_error = kModelError);

// The shipped device record of a GPU by the name its driver gives it; empty when there is none.
std::string record_of_device(const std::string& device);

}  // namespace moxie::planner
