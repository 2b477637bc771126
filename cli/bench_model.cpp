#include "cli/bench_model.h"

#include <algorithm>

#include "moxie/planner/layer_plan.h"
#include "moxie/planner/routing.h"
#include "moxie/planner/simulate.h"

namespace moxie::cli {
namespace {

// [R] expert ids of each rank, -1 where a route leads nowhere.
std::vector<std::vector<std::int32_t>> ids_of(const BenchTarget& target) {
  std::vector<std::vector<std::int32_t>> ids;
  for (const RankTensors& rank : target.routes) {
    std::vector<std::int32_t>& own = ids.emplace_back();
    for (std::int64_t i = 0; i < rank.expert_ids.shape.num_elements(); ++i)
      own.push_back(static_cast<std::int32_t>(value_at(rank.expert_ids, i)));
  }
  return ids;
}

}  // namespace

bool has_links(const BenchTarget& target) {
  const MachineId id = target.machine();
  return id.backend == "cuda" && std::all_of(id.ranks_of_devices.begin(), id.ranks_of_devices.end(),
                                             [](std::int64_t ranks) { return ranks == 1; });
}

std::map<BenchMode, double> predicted_ms(const BenchTarget& target, const Scenario& scenario) {
  const std::string record = planner::record_of_device(target.machine().device);
  if (record.empty() || !has_links(target)) return {};
  std::vector<std::int64_t> tokens;
  for (const RankTensors& rank : target.routes) tokens.push_back(rank.x.shape.dim[0]);
  const planner::RoutingCounts routing =
      planner::count_routes(target.problem, tokens, ids_of(target));
  const planner::SimOptions options{.direction = scenario.direction == Direction::forward
                                                     ? planner::Direction::forward
                                                     : planner::Direction::backward,
                                    .reserve_sms = scenario.cuda.reserve_sms};
  std::map<BenchMode, double> ms;
  for (const BenchMode mode : scenario.modes) {
    const planner::Load load =
        mode == BenchMode::burst ? planner::Load::burst : planner::Load::sustained;
    ms[mode] = planner::simulate(target.problem, target.plan(), routing,
                                 planner::machine(planner::find_device(record), load), options)
                   .ms;
  }
  return ms;
}

LinkBytes link_bytes(const BenchTarget& target, const Scenario& scenario) {
  const Problem& p = target.problem;
  const auto R = static_cast<std::size_t>(p.num_ranks), K = static_cast<std::size_t>(p.top_k);
  const std::int64_t row = p.hidden * size_bytes(p.dtype);
  const bool two_rows =
      scenario.direction == Direction::backward && target.plan().save != SavePolicy::z_and_x;
  std::vector<std::int64_t> in(R), out(R);
  const std::vector<std::vector<std::int32_t>> ids = ids_of(target);
  for (std::size_t from = 0; from < R; ++from) {
    for (std::size_t token = 0; token < ids[from].size(); token += K) {
      std::vector<bool> reached(R);
      for (std::size_t k = 0; k < K; ++k) {
        const std::int32_t expert = ids[from][token + k];
        if (expert < 0) continue;
        const auto to =
            static_cast<std::size_t>(expert_home(p.num_experts, p.num_ranks, ExpertId{expert}).v);
        if (to == from) continue;
        const std::int64_t there = reached[to] ? 0 : two_rows ? 2 * row : row;
        reached[to] = true;
        out[from] += there;
        in[to] += there;
        out[to] += row;
        in[from] += row;
      }
    }
  }
  return {*std::max_element(in.begin(), in.end()), *std::max_element(out.begin(), out.end())};
}

}  // namespace moxie::cli
