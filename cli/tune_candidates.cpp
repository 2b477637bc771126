// The planner's finalists as plans to measure.
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "cli/tune.h"
#include "moxie/core/error.h"
#include "moxie/pipeline/blocks.h"
#include "moxie/planner/choose.h"
#include "moxie/planner/plan_json.h"

namespace moxie::cli {
namespace {

planner::RoutingSpec routing_spec(const Routing& routing, std::uint64_t seed) {
  planner::RoutingSpec spec;
  spec.seed = seed;
  if (routing.kind == RoutingKind::zipf)
    spec = {planner::Skew::zipf, routing.zipf_exponent, 0, seed};
  if (routing.kind == RoutingKind::hot) spec = {planner::Skew::hot, 1, routing.hot_expert, seed};
  return spec;
}

// "num_slabs 1, x_ring_blocks 40": fields that differ from the default plan's.
std::string differences(const Plan& plain, const Plan& plan) {
  std::string text;
  const Json before = planner::to_json(plain), after = planner::to_json(plan);
  for (const auto& [key, value] : after.items()) {
    if (before.at(key) == value) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key,
                        value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

// What of `found` a forward pass feels, on top of `plain`. Empty when that is not legal.
std::optional<Plan> forward_part(const Problem& problem, const Plan& plain, const Plan& found,
                                 BackendKind backend) {
  Plan plan = found;
  plan.capacity_rows = plain.capacity_rows;
  plan.save = plain.save;
  plan.saved_rows = plain.saved_rows;
  plan.chunk_blocks = plain.chunk_blocks;
  plan.lag_chunks = plain.lag_chunks;
  plan.backward_ring_blocks = plain.backward_ring_blocks;
  plan.compute_workers = plain.compute_workers;
  if (backend == BackendKind::cpu) plan.comm_workers = plain.comm_workers;  // threads, not SMs
  // "All" of a smaller capacity is all of this one.
  const std::int64_t all = found.capacity_rows / pipeline::kBlockRows;
  if (plan.x_ring_blocks == all) plan.x_ring_blocks = 0;
  if (plan.hidden_ring_blocks == all) plan.hidden_ring_blocks = 0;
  plan = pipeline::resolve(problem, plan);
  try {
    pipeline::check(problem, plan);
  } catch (const Error&) {
    return {};
  }
  return plan;
}

using Kind = std::tuple<ExecMode, TaskOrder, std::int32_t, DispatchMode, CombineMode, bool>;
Kind kind_of(const Plan& p) {
  return {p.mode,     p.order,   p.order == TaskOrder::slabs ? p.num_slabs : 0,
          p.dispatch, p.combine, p.comm_workers != 0};
}

}  // namespace

std::vector<Candidate> tune_candidates(const BenchCase& layer, const planner::Machine& machine,
                                       const Scenario& scenario, std::size_t most) {
  const Problem& problem = layer.problem;
  const Plan plain = pipeline::resolve(problem, pipeline::default_plan(problem));
  planner::PlanRequest request;
  request.problem = problem;
  request.passes = planner::Passes::forward;
  request.routing = routing_spec(scenario.routing, scenario.seed);
  request.reserve_sms = scenario.cuda.reserve_sms;
  request.all_ranks = false;
  request.num_alternatives = 6 * most;  // many of them are alike in what is kept
  const bool own_record = scenario.backend == BackendKind::cuda;
  const auto predicted = [&](double ms) {
    return own_record && ms > 0 ? std::optional(ms) : std::nullopt;
  };
  std::vector<Candidate> candidates = {{.what = kDefaultRun, .plan = plain}};
  std::optional<planner::PlanChoice> choice;
  try {
    choice = planner::choose_plan(request, machine);
  } catch (const Error&) {  // more ranks than experts, or too large: only the default is left
    return candidates;
  }
  candidates[0].predicted_ms = predicted(choice->default_plan.forward_ms);
  const auto chosen = forward_part(problem, plain, choice->chosen.plan, scenario.backend);
  candidates[0].first_choice = chosen == plain;
  std::vector<planner::RatedPlan> found = {choice->chosen};
  found.insert(found.end(), choice->alternatives.begin(), choice->alternatives.end());
  // The best of each kind first: neighbours of one plan are predicted alike, and err alike.
  std::set<Kind> kinds;
  for (const bool only_new_kinds : {true, false}) {
    for (const planner::RatedPlan& rated : found) {
      if (candidates.size() > most) break;
      const auto plan = forward_part(problem, plain, rated.plan, scenario.backend);
      if (!plan || std::any_of(candidates.begin(), candidates.end(),
                               [&](const Candidate& c) { return c.plan == *plan; }))
        continue;
      if (only_new_kinds && !kinds.insert(kind_of(*plan)).second) continue;
      candidates.push_back(
          {differences(plain, *plan), *plan, predicted(rated.forward_ms), plan == chosen});
    }
  }
  return candidates;
}

}  // namespace moxie::cli
