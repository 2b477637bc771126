#include "moxie/planner/choose.h"

#include <fmt/format.h>

#include <algorithm>

#include "moxie/core/error.h"
#include "moxie/pipeline/cuda_layout.h"
#include "moxie/planner/explain.h"
#include "moxie/planner/search.h"

namespace moxie::planner {

const char* name(Passes passes) {
  return passes == Passes::forward ? "forward" : passes == Passes::backward ? "backward" : "both";
}

double plan_memory_gb(const Problem& p, const Plan& plan, Passes passes) {
  auto bytes = static_cast<double>(pipeline::cuda_buffer_bytes(p, plan).back().num_bytes);
  if (passes == Passes::forward) return bytes * 1e-9;
  for (const NamedGb& kept : context_gb(p, plan)) bytes += kept.gb * 1e9;
  return bytes * 1e-9;
}

namespace {

void judge_request(const PlanRequest& request) {
  const Problem& p = request.problem;
  if (p.max_tokens <= 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("max_tokens is {}, must be at least 1: there is nothing to plan for no "
                            "tokens; nearest legal value 1",
                            p.max_tokens));
  }
  check(p);
  if (p.num_ranks > p.num_experts) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("num_ranks is {}, must be between 1 and {} (num_experts: a rank without "
                    "experts only waits); nearest legal value {}",
                    p.num_ranks, p.num_experts, p.num_experts));
  }
  if (p.top_k > p.num_experts) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("top_k is {}, must be between 1 and {} (num_experts); nearest legal "
                            "value {}",
                            p.top_k, p.num_experts, p.num_experts));
  }
}

std::string differences(const KnobSet& from, const KnobSet& to, Passes passes) {
  std::string text;
  for (std::size_t k = 0; k < kNumKnobs; ++k) {
    const Knob knob = static_cast<Knob>(k);
    if (from[k] == to[k]) continue;
    if (passes == Passes::forward && !touches(knob, Direction::forward)) continue;
    if (passes == Passes::backward && !touches(knob, Direction::backward)) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name(knob), value_name(knob, to[k]));
  }
  return text;
}

// Alternatives that only need more or less memory are all alike: one of them is enough.
bool only_memory(const KnobSet& from, const KnobSet& to) {
  for (std::size_t k = 0; k < kNumKnobs; ++k) {
    const Knob knob = static_cast<Knob>(k);
    const bool memory = knob == Knob::capacity || knob == Knob::x_ring ||
                        knob == Knob::hidden_ring || knob == Knob::backward_ring;
    if (from[k] != to[k] && !memory) return false;
  }
  return true;
}

}  // namespace

PlanChoice choose_plan(const PlanRequest& request, const Machine& machine) {
  judge_request(request);
  PlanChoice choice;
  choice.assumed = machine.assumed;
  Search search(request, machine, choice);
  Rated best = search.best();
  const double fastest_ms = best.plan.total_ms();
  if (const auto plain = search.rate(KnobSet{});
      plain && fastest_ms >= plain->total_ms() * (1 - request.model_error))
    best = {KnobSet{}, *plain};
  const double gain = 1 - fastest_ms / best.plan.total_ms();
  // All ranks at once: for the chosen plan, for the others where it is quick.
  const bool quick = request.all_ranks && request.problem.num_ranks <= 8;
  choice.whole_machine = quick;
  choice.chosen = best.plan;
  search.simulate_whole(choice.chosen, &choice.forward, &choice.backward);
  const auto scaled = [&](RatedPlan& plan) {  // by what the ranks' imbalance costs the chosen plan
    if (best.plan.forward_ms > 0)
      plan.forward_ms *= choice.chosen.forward_ms / best.plan.forward_ms;
    if (best.plan.backward_ms > 0)
      plan.backward_ms *= choice.chosen.backward_ms / best.plan.backward_ms;
  };
  std::vector<KnobEffect> effects;
  for (const KnobSet& knobs : search.neighbours(best.knobs)) {
    const auto rated = search.rate(knobs);
    if (rated)
      effects.push_back({differences(best.knobs, knobs, request.passes),
                         rated->total_ms() / best.plan.total_ms() - 1});
  }
  if (request.for_measuring) {
    KnobSet plain = best.knobs;  // order and the like as they are: not all are legal everywhere
    for (std::size_t k = 0; k < kNumKnobs; ++k)
      if (touches(static_cast<Knob>(k), Direction::backward)) plain[k] = 0;
    for (const KnobSet& knobs : search.neighbours(plain)) search.rate(knobs);
  }
  int num_memory_only = 0;
  for (const Rated& other : search.others(best)) {
    if (choice.alternatives.size() == request.num_alternatives) break;
    RatedPlan plan = other.plan;
    plan.what = differences(best.knobs, other.knobs, request.passes);
    // Plans that differ only in what these passes do not feel are one plan.
    if (plan.what.empty() || std::any_of(choice.alternatives.begin(), choice.alternatives.end(),
                                         [&](const RatedPlan& a) { return a.what == plan.what; }))
      continue;
    const bool memory_only = only_memory(best.knobs, other.knobs);
    if (memory_only && ++num_memory_only > 1 && !request.for_measuring) continue;
    if (quick)
      search.simulate_whole(plan, nullptr, nullptr);
    else
      scaled(plan);
    choice.alternatives.push_back(plan);
  }
  std::stable_sort(
      choice.alternatives.begin(), choice.alternatives.end(),
      [](const RatedPlan& a, const RatedPlan& b) { return a.total_ms() < b.total_ms(); });
  if (const auto plain = search.rate(KnobSet{})) {
    choice.default_plan = *plain;
    scaled(choice.default_plan);
  } else {
    choice.default_plan.plan = pipeline::resolve(request.problem, {});
    choice.default_plan.memory_gb =
        plan_memory_gb(request.problem, choice.default_plan.plan, request.passes);
  }
  choice.default_plan.what = differences(best.knobs, KnobSet{}, request.passes);
  const Problem& p = request.problem;
  choice.forward_bounds = bounds(p, choice.chosen.plan, search.load(), machine, Direction::forward);
  choice.backward_bounds =
      bounds(p, choice.chosen.plan, search.load(), machine, Direction::backward);
  choice.notes = plan_notes(request, machine, choice);
  if (gain >= 0.0005) {
    choice.notes.push_back(
        fmt::format("the default plan is kept: another one is predicted {:.1f} % faster, within "
                    "the model's error of {:.0f} % (`moxie tune` measures)",
                    100 * gain, 100 * request.model_error));
  }
  choice.why = explain(request, choice, effects);
  return choice;
}

}  // namespace moxie::planner
