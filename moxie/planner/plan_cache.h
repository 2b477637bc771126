// The plan cache: plans that `moxie tune` measured, in one JSON file, by everything their speed
// depends on (docs/planner.md shows the file). A library must not fail because a cache is stale, so
// looking a plan up throws nothing: what cannot be used is ignored, and the answer says why.
// Storing replaces the file in one step (temporary file, then rename); of two programs that store
// at once the later one wins.
#pragma once
#include <optional>
#include <span>
#include <string>

#include "moxie/core/machine.h"
#include "moxie/planner/choose.h"
#include "moxie/planner/plan_json.h"

namespace moxie::planner {

struct PlanKey {
  Problem problem;
  MachineId machine;
  Passes passes = Passes::forward;
};
// The key as it stands in the file: the above, and the version of Moxie.
OrderedJson to_json(const PlanKey& key);

struct CachedPlan {
  std::optional<Plan> plan;  // resolved, legal
  std::string words;         // where it is from; or why there is none
};
// The first key that has a usable entry; without one the words are about the last key.
CachedPlan find_plan(const std::string& file, std::span<const PlanKey> keys);
inline CachedPlan find_plan(const std::string& file, const PlanKey& key) {
  return find_plan(file, std::span(&key, 1));
}

// Throws as store_plan would for a file that is something else: asked before the work.
void check_plan_cache(const std::string& file);
// `measured` is kept beside the plan for people. Throws Error(invalid_plan) for a plan that is not
// legal, Error(unavailable) when the file cannot be written or is something else.
void store_plan(const std::string& file, const PlanKey& key, const Plan& plan,
                const OrderedJson& measured);

}  // namespace moxie::planner
