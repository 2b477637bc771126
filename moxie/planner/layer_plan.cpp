// Two sieves, because a model makes dozens of layers and a simulation takes up to 30 ms:
// closed-form estimates of the plans in question, and only where one of them beats the default plan
// by more than the model's error a simulation of both.
#include "moxie/planner/layer_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "moxie/core/error.h"
#include "moxie/planner/knobs.h"
#include "moxie/planner/plan_cache.h"

namespace moxie::planner {
namespace {

// What the planner may decide alone: knobs that need no more memory than the default plan, whose
// capacity is proven. Split mode is left out: it was measured slower where the simulator thinks it
// faster (docs/decisions/005-power-and-the-pass.md).
std::vector<Plan> candidates(const Problem& p, std::int64_t num_sms) {
  std::vector<Plan> plans;
  const Plan plain = pipeline::default_plan(p);
  for (std::int32_t order = 0; order < num_values(Knob::order); ++order) {
    for (std::int32_t dispatch = 0; dispatch < num_values(Knob::dispatch); ++dispatch) {
      for (std::int32_t comm = 0; comm < num_values(Knob::comm_workers); ++comm) {
        KnobSet knobs{};
        at(knobs, Knob::order) = order;
        at(knobs, Knob::dispatch) = dispatch;
        at(knobs, Knob::comm_workers) = comm;
        std::optional<Plan> plan = build(p, knobs, Passes::forward, 0, num_sms);
        if (!plan) continue;
        plan->save = plain.save;  // a layer may be asked for its backward pass
        plan->saved_rows = plain.saved_rows;
        plans.push_back(pipeline::resolve(p, *plan));
      }
    }
  }
  return plans;
}

struct Choice {
  std::optional<Plan> plan;
  std::string words;
};

Choice choose(const Problem& p, const MachineId& id, double model_error) {
  const std::string record = id.backend == "cuda" ? record_of_device(id.device) : "";
  if (record.empty()) return {{}, fmt::format("no device record of {}", id.device)};
  const Machine m = machine(find_device(record));
  if (id.num_sms != m.num_sms())
    return {
        {},
        fmt::format("record {} is of {} SMs, this GPU has {}", record, m.num_sms(), id.num_sms)};
  if (std::any_of(id.ranks_of_devices.begin(), id.ranks_of_devices.end(),
                  [](std::int64_t ranks) { return ranks != 1; }))
    return {{}, "the planner knows one rank per GPU"};
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(p.num_ranks), p.max_tokens);
  const RoutingCounts routing = make_routing(p, tokens, {.skew = Skew::even});
  const RankLoad load = busiest_load(p, routing, m);
  const SimOptions options{.reserve_sms = id.reserve_sms, .symmetric = p.num_ranks > 1};
  const Plan plain = pipeline::resolve(p, pipeline::default_plan(p));
  const double plain_estimate = estimate_ms(p, plain, load, m, options);
  std::vector<std::pair<double, Plan>> promising;
  double best_estimate = plain_estimate;
  for (const Plan& plan : candidates(p, id.num_sms)) {
    const double ms = estimate_ms(p, plan, load, m, options);
    best_estimate = std::min(best_estimate, ms);
    if (ms < plain_estimate * (1 - model_error)) promising.emplace_back(ms, plan);
  }
  const auto percent = [](double better, double than) { return 100 * (1 - better / than); };
  if (promising.empty()) {
    return {{},
            fmt::format("no plan is estimated {:.0f} % faster on {} (the best one {:.1f} %)",
                        100 * model_error, record, percent(best_estimate, plain_estimate))};
  }
  std::stable_sort(promising.begin(), promising.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const Plan& best = promising.front().second;
  const double plain_ms = simulate(p, plain, routing, m, options).ms,
               best_ms = simulate(p, best, routing, m, options).ms;
  if (best_ms >= plain_ms)
    return {{},
            fmt::format("simulated on {}, the plan that the estimates prefer is slower", record)};
  if (best_ms > plain_ms * (1 - model_error)) {
    return {{},
            fmt::format("the best plan is predicted {:.1f} % faster on {}, less than the "
                        "model's error of {:.0f} %",
                        percent(best_ms, plain_ms), record, 100 * model_error)};
  }
  // A layer may be asked for its backward pass, too.
  SimOptions training = options;
  training.direction = Direction::backward;
  const double plain_back_ms = simulate(p, plain, routing, m, training).ms,
               best_back_ms = simulate(p, best, routing, m, training).ms;
  if (best_back_ms > plain_back_ms) {
    return {{},
            fmt::format("the best plan of the forward pass is predicted {:.1f} % slower in the "
                        "backward pass on {}",
                        -percent(best_back_ms, plain_back_ms), record)};
  }
  return {best, fmt::format("planner: {:.3f} ms predicted on {}, {:.1f} % faster than the default "
                            "plan",
                            best_ms, record, percent(best_ms, plain_ms))};
}

}  // namespace

std::string record_of_device(const std::string& device) {
  // "NVIDIA H100 80GB HBM3" but not "NVIDIA H100 PCIe": other clocks and links than the record's.
  constexpr std::array<std::pair<const char*, const char*>, 4> kRecords = {
      {{"H200", "h200"}, {"H100 80GB HBM3", "h100"}, {"GB300", "gb300"}, {"B200", "b200"}}};
  for (const auto& [word, record] : kRecords) {
    const std::size_t at = device.find(word);
    if (at != std::string::npos && (at == 0 || device[at - 1] == ' ') &&
        device.find("NVL") == std::string::npos)
      return record;
  }
  return "";
}

LayerPlan plan_for_layer(const Problem& problem, const MachineId& machine,
                         const std::string& cache_file, double model_error) {
  const std::array<PlanKey, 2> keys = {
      {{problem, machine, Passes::both}, {problem, machine, Passes::forward}}};
  const CachedPlan cached = find_plan(cache_file, keys);
  if (cached.plan) return {*cached.plan, {PlanOrigin::cache, cached.words}};
  Choice choice;
  try {
    choice = choose(problem, machine, model_error);
  } catch (const Error& error) {  // what cannot be planned for can still be run
    choice.words = error.what();
  }
  if (choice.plan) return {*choice.plan, {PlanOrigin::planner, choice.words}};
  return {pipeline::resolve(problem, pipeline::default_plan(problem)),
          {PlanOrigin::standard, fmt::format("default: {}; {}", cached.words, choice.words)}};
}

}  // namespace moxie::planner
