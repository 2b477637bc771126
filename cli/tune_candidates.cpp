// The planner's finalists as plans to measure.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "cli/tune.h"
#include "moxie/core/error.h"
#include "moxie/pipeline/layout.h"
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

std::optional<Plan> if_legal(const Problem& problem, const Plan& plan) {
  const Plan resolved = pipeline::resolve(problem, plan);
  try {
    pipeline::check(problem, resolved);
  } catch (const Error&) {
    return {};
  }
  return resolved;
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
  return if_legal(problem, plan);
}

// What of `found` a backward pass feels, on top of `start`.
std::optional<Plan> backward_part(const Problem& problem, const Plan& start, const Plan& found) {
  Plan plan = start;
  plan.minibatch_blocks = found.minibatch_blocks;
  plan.save = found.save;
  plan.saved_rows = -1;
  plan.lag_chunks = found.lag_chunks;
  plan.chunk_blocks = found.chunk_blocks;
  plan.backward_ring_blocks = found.backward_ring_blocks;
  // "All" of a smaller capacity is all of this one.
  if (found.backward_ring_blocks >= pipeline::extents(problem, found).blocks) {
    plan.backward_ring_blocks = pipeline::extents(problem, start).blocks;
    if (found.chunk_blocks >= found.capacity_rows / pipeline::kBlockRows) plan.chunk_blocks = 0;
  }
  return if_legal(problem, plan);
}

// Plans of a kind are predicted alike, and err alike.
using Kind = std::array<std::int64_t, 6>;
Kind kind_of(Direction direction, const Plan& start, const Plan& p) {
  const auto number = [](auto choice) { return static_cast<std::int64_t>(choice); };
  if (direction == Direction::forward) {
    return {number(p.mode),     number(p.order),   p.order == TaskOrder::slabs ? p.num_slabs : 0,
            number(p.dispatch), number(p.combine), p.comm_workers != 0};
  }
  const bool same_ring = p.backward_ring_blocks == start.backward_ring_blocks;
  return {number(p.save), p.minibatch_blocks != start.minibatch_blocks,
          same_ring && p.chunk_blocks != start.chunk_blocks,  // another ring chooses others
          same_ring && p.lag_chunks != start.lag_chunks,
          p.backward_ring_blocks<start.backward_ring_blocks, p.backward_ring_blocks> start
              .backward_ring_blocks};
}
std::int64_t num_differences(const Kind& a, const Kind& b) {
  std::int64_t differences = 0;
  for (std::size_t i = 0; i < a.size(); ++i) differences += a[i] != b[i] ? 1 : 0;
  return differences;
}

}  // namespace

planner::Passes passes_of(Direction direction) {
  return direction == Direction::forward ? planner::Passes::forward : planner::Passes::both;
}

std::vector<Candidate> tune_candidates(const BenchCase& layer, const planner::Machine& machine,
                                       const Scenario& scenario, std::size_t most,
                                       const std::optional<Plan>& forward_plan) {
  const Problem& problem = layer.problem;
  const bool backward = scenario.direction == Direction::backward;
  const Plan plain = pipeline::resolve(problem, pipeline::default_plan(problem));
  const Plan start = backward ? forward_plan.value_or(plain) : plain;
  planner::PlanRequest request;
  request.problem = problem;
  request.passes = passes_of(scenario.direction);
  request.routing = routing_spec(scenario.routing, scenario.seed);
  request.reserve_sms = scenario.cuda.reserve_sms;
  request.all_ranks = false;
  request.num_alternatives = 1000;  // many of them are alike in what is kept
  request.for_measuring = backward;
  const bool own_record = scenario.backend == BackendKind::cuda;
  const auto predicted = [&](double ms) {
    return own_record && ms > 0 ? std::optional(ms) : std::nullopt;
  };
  const auto part_of = [&](const Plan& found) {
    return backward ? backward_part(problem, start, found)
                    : forward_part(problem, plain, found, scenario.backend);
  };
  std::vector<Candidate> candidates = {{.what = kDefaultRun, .plan = plain}};
  if (start != plain) candidates.push_back({differences(plain, start), start, {}});
  std::optional<planner::PlanChoice> choice;
  try {
    choice = planner::choose_plan(request, machine);
  } catch (const Error&) {  // more ranks than experts, or too large: only the default is left
    return candidates;
  }
  candidates[0].predicted_ms = predicted(choice->default_plan.total_ms());
  const auto chosen = part_of(choice->chosen.plan);
  for (Candidate& c : candidates) c.first_choice = chosen == c.plan;
  std::vector<planner::RatedPlan> found = {choice->chosen};
  found.insert(found.end(), choice->alternatives.begin(), choice->alternatives.end());
  // The best of each kind first; of the backward's, kinds of one change: the planner's order of
  // more is not better than its error.
  std::set<Kind> kinds;
  const Kind of_start = kind_of(scenario.direction, start, start);
  for (const bool only_new_kinds : {true, false}) {
    for (const planner::RatedPlan& rated : found) {
      if (candidates.size() > most) break;
      const auto plan = part_of(rated.plan);
      if (!plan || std::any_of(candidates.begin(), candidates.end(),
                               [&](const Candidate& c) { return c.plan == *plan; }))
        continue;
      const Kind kind = kind_of(scenario.direction, start, *plan);
      const bool chosen_plan = plan == chosen;
      if (only_new_kinds && !chosen_plan && backward && num_differences(kind, of_start) > 1)
        continue;
      if (only_new_kinds && !kinds.insert(kind).second) continue;
      candidates.push_back(
          {differences(plain, *plan), *plan, predicted(rated.total_ms()), chosen_plan});
    }
  }
  return candidates;
}

}  // namespace moxie::cli
