// The search of choose_plan: estimates for a grid of plans, simulations for the best of each kind,
// then one-knob changes of the winner. Used by choose.cpp only.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "moxie/core/error.h"
#include "moxie/planner/knobs.h"

namespace moxie::planner {

struct Rated {
  KnobSet knobs{};
  RatedPlan plan;
};

class Search {
 public:
  Search(const PlanRequest& request, const Machine& machine, PlanChoice& choice)
      : request_(request),
        p_(request.problem),
        machine_(machine),
        choice_(choice),
        routing_(make_routing(
            p_, std::vector<std::int64_t>(static_cast<std::size_t>(p_.num_ranks), p_.max_tokens),
            request.routing)),
        load_(busiest_load(p_, routing_, machine)) {
    const bool balanced =
        request.routing.skew == Skew::even || request.routing.skew == Skew::uniform;
    symmetric_ = balanced && p_.num_ranks > 1;
    budget_gb_ = request.memory_gb > 0 ? request.memory_gb : machine[Field::hbm_gb] / 4;
    expected_rows_ = static_cast<std::int64_t>(load_.rows);
  }

  Rated best() {
    std::vector<std::pair<double, KnobSet>> finalists = estimates();
    if (finalists.empty()) {
      throw Error(ErrorCode::invalid_plan,
                  fmt::format("no plan fits into {:.3g} GB per rank; the smallest needs {:.3g} GB "
                              "(memory_gb, the nearest legal value; or fewer tokens)",
                              budget_gb_, smallest_gb_));
    }
    Rated best;
    for (const auto& [estimate, knobs] : finalists) consider(knobs, best);
    // One-knob changes of the best, until none is better.
    for (int round = 0; round < 4; ++round) {
      const KnobSet center = best.knobs;
      for (const KnobSet& knobs : neighbours(center)) consider(knobs, best);
      if (best.knobs == center) break;
    }
    return best;
  }

  // Those that were simulated, one knob away from `center` first in order of time.
  std::vector<Rated> others(const Rated& center) const {
    std::vector<Rated> list;
    for (const auto& [knobs, plan] : rated_) {
      if (plan && knobs != center.knobs && !(plan->plan == center.plan.plan))
        list.push_back({knobs, *plan});
    }
    std::stable_sort(list.begin(), list.end(), [](const Rated& a, const Rated& b) {
      return a.plan.total_ms() < b.plan.total_ms();
    });
    return list;
  }

  // Simulates all ranks, if the request does not say otherwise.
  void simulate_whole(RatedPlan& plan, SimResult* forward, SimResult* backward) {
    if (passes_forward()) {
      SimResult r = run(plan, Direction::forward, !request_.all_ranks && symmetric_);
      plan.forward_ms = r.ms;
      if (forward != nullptr) *forward = std::move(r);
    }
    if (passes_backward()) {
      SimResult r = run(plan, Direction::backward, !request_.all_ranks && symmetric_);
      plan.backward_ms = r.ms;
      if (backward != nullptr) *backward = std::move(r);
    }
  }

  std::optional<RatedPlan> rate(const KnobSet& knobs) {
    const auto known = rated_.find(knobs);
    if (known != rated_.end()) return known->second;
    std::optional<RatedPlan> rated;
    if (const auto built = build(p_, knobs, request_.passes, expected_rows_, machine_.num_sms())) {
      const double gb = plan_memory_gb(p_, *built, request_.passes);
      smallest_gb_ = std::min(smallest_gb_, gb);
      if (gb <= budget_gb_) {
        rated = RatedPlan{*built};
        rated->memory_gb = gb;
        for (const Direction d : {Direction::forward, Direction::backward}) {
          if (!(d == Direction::forward ? passes_forward() : passes_backward())) continue;
          (d == Direction::forward ? rated->forward_ms : rated->backward_ms) =
              time_of(knobs, *rated, d);
        }
      }
    }
    rated_[knobs] = rated;
    return rated;
  }
  const RankLoad& load() const { return load_; }
  std::vector<KnobSet> neighbours(const KnobSet& center) const {
    std::vector<KnobSet> list;
    for (std::size_t k = 0; k < kNumKnobs; ++k) {
      const Knob knob = static_cast<Knob>(k);
      if (!(passes_forward() && touches(knob, Direction::forward)) &&
          !(passes_backward() && touches(knob, Direction::backward)))
        continue;
      for (std::int32_t v = 0; v < num_values(knob); ++v) {
        if (v == center[k]) continue;
        list.push_back(center);
        list.back()[k] = v;
      }
    }
    return list;
  }

 private:
  bool passes_forward() const { return request_.passes != Passes::backward; }
  bool passes_backward() const { return request_.passes != Passes::forward; }
  SimOptions options(Direction d, bool symmetric) const {
    SimOptions o;
    o.direction = d;
    o.reserve_sms = request_.reserve_sms;
    o.symmetric = symmetric;
    return o;
  }
  SimResult run(const RatedPlan& plan, Direction d, bool symmetric) {
    ++choice_.num_simulated;
    return simulate(p_, plan.plan, routing_, machine_, options(d, symmetric));
  }
  // Knobs that a direction does not feel share one simulation.
  double time_of(const KnobSet& knobs, const RatedPlan& plan, Direction d) {
    KnobSet felt = knobs;
    for (std::size_t k = 0; k < kNumKnobs; ++k)
      if (!touches(static_cast<Knob>(k), d)) felt[k] = -1;
    const auto [at, fresh] = times_.try_emplace({felt, d}, 0.0);
    if (fresh) at->second = run(plan, d, symmetric_).ms;
    return at->second;
  }

  // The grid by estimate: the best few, and the best of each kind so that no kind is judged by the
  // estimate alone.
  std::vector<std::pair<double, KnobSet>> estimates() {
    std::vector<std::pair<double, KnobSet>> all;
    KnobSet knobs{};
    enumerate(0, knobs, all);
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::pair<double, KnobSet>> finalists;
    std::map<std::tuple<int, int, int, int, int>, int> kinds;
    for (const auto& candidate : all) {
      const KnobSet& k = candidate.second;
      int& seen = kinds[{planner::at(k, Knob::mode), planner::at(k, Knob::order),
                         planner::at(k, Knob::dispatch), planner::at(k, Knob::combine),
                         planner::at(k, Knob::comm_workers) != 0}];
      if (finalists.size() < 6 || (++seen == 1 && finalists.size() < 24))
        finalists.push_back(candidate);
    }
    return finalists;
  }
  void enumerate(std::size_t k, KnobSet& knobs, std::vector<std::pair<double, KnobSet>>& all) {
    if (k == kNumKnobs) {
      const auto built = build(p_, knobs, request_.passes, expected_rows_, machine_.num_sms());
      if (!built) return;
      ++choice_.num_estimated;
      const double gb = plan_memory_gb(p_, *built, request_.passes);
      smallest_gb_ = std::min(smallest_gb_, gb);
      if (gb > budget_gb_) return;
      double ms = 0;
      for (const Direction d : {Direction::forward, Direction::backward}) {
        if (d == Direction::forward ? passes_forward() : passes_backward())
          ms += estimate_ms(p_, *built, load_, machine_, options(d, false));
      }
      all.emplace_back(ms, knobs);
      return;
    }
    // Knobs whose effect the closed form knows; the others are left to the one-knob changes.
    const Knob knob = static_cast<Knob>(k);
    const bool coarse = knob == Knob::band || knob == Knob::minibatch || knob == Knob::lag_chunks ||
                        (knob == Knob::chunk && !passes_backward());
    for (std::int32_t v = 0; v < (coarse ? 1 : num_values(knob)); ++v) {
      knobs[k] = v;
      enumerate(k + 1, knobs, all);
    }
    knobs[k] = 0;
  }

  // Better by more than the noise of routing, or as good with less memory. A capacity that is not
  // the worst case can be exceeded: it must be worth 1 %.
  void consider(const KnobSet& knobs, Rated& best) {
    const auto rated = rate(knobs);
    if (!rated) return;
    const double now = best.plan.total_ms(), then = rated->total_ms();
    const bool proven = planner::at(knobs, Knob::capacity) == 0,
               best_proven = planner::at(best.knobs, Knob::capacity) == 0;
    bool better = now == 0;
    if (proven == best_proven) {
      better = better || then < now * 0.998 ||
               (then < now * 1.002 && rated->memory_gb < best.plan.memory_gb * 0.95);
    } else {
      better = better || (proven ? then < now * 1.01 : then < now * 0.99);
    }
    if (better) best = {knobs, *rated};
  }

  const PlanRequest& request_;
  const Problem& p_;
  const Machine& machine_;
  PlanChoice& choice_;
  const RoutingCounts routing_;
  const RankLoad load_;
  bool symmetric_ = false;
  double budget_gb_ = 0, smallest_gb_ = 1e300;
  std::int64_t expected_rows_ = 0;
  std::map<KnobSet, std::optional<RatedPlan>> rated_;
  std::map<std::pair<KnobSet, Direction>, double> times_;
};

}  // namespace moxie::planner
