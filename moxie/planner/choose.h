// The planner: which plan for this layer on this machine, and why. Pure: the same request gives the
// same answer everywhere. Closed-form estimates rank a grid of plans, the simulator judges the best
// of them, and one-knob changes of the winner are tried until none is better.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "moxie/planner/bounds.h"

namespace moxie::planner {

enum class Passes : std::int32_t { forward, backward, both };
const char* name(Passes passes);

// Predictions of Moxie's own rows are off by up to 5.5 % (docs/planner.md): a smaller gain is none.
inline constexpr double kModelError = 0.06;

struct PlanRequest {
  Problem problem;  // max_tokens: tokens of every rank
  Passes passes = Passes::both;
  RoutingSpec routing = {};
  std::int32_t reserve_sms = 0;
  bool all_ranks = true;  // simulate the chosen plan on all ranks; false: on one of equal ranks
  double memory_gb = 0;   // heap, workspace and saved rows of one rank; 0: a quarter of its memory
  std::size_t num_alternatives = 5;
  bool for_measuring = false;  // alternatives: also the default backward's one-knob changes, and
                               // all that differ in capacity or rings only, not one
  double model_error = kModelError;  // what the gain over the default plan must exceed
};

struct RatedPlan {
  Plan plan;                               // resolved, legal
  double forward_ms = 0, backward_ms = 0;  // 0: not asked for
  double memory_gb = 0;
  double total_ms() const { return forward_ms + backward_ms; }
  std::string what;  // alternatives: what differs from the chosen plan
};

struct PlanChoice {
  RatedPlan chosen;
  RatedPlan default_plan;               // times 0 when it does not fit into the memory
  std::vector<RatedPlan> alternatives;  // the nearest in time, best first
  Bounds forward_bounds, backward_bounds;
  SimResult forward, backward;       // of the chosen plan
  std::vector<std::string> assumed;  // what the device record does not say
  std::vector<std::string> notes;    // what a user must know: capacity, domains
  std::string why;                   // one paragraph
  std::int64_t num_estimated = 0, num_simulated = 0;
  bool whole_machine = true;  // times are of all ranks; false: of one of many equal ranks
};

// The plan predicted to be fastest; the default plan where it fits and that gain is within the
// model's error. Throws Error(invalid_argument) for no tokens or more ranks than experts,
// Error(invalid_plan) when no plan fits into the memory.
PlanChoice choose_plan(const PlanRequest& request, const Machine& machine);

// Bytes one rank needs: pipeline's buffers and what a forward keeps for the backward.
double plan_memory_gb(const Problem& problem, const Plan& plan, Passes passes);

}  // namespace moxie::planner
