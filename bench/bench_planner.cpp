// What the simulator and the planner cost: CPU time against the number of ranks, per task and unit
// claimed, and as a multiple of n log n from the first number of ranks on; events of the virtual
// clock; peak memory. `bench_planner` after `cmake --build --preset cpu --target moxie_bench`.
#include <benchmark/benchmark.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <vector>

#include "moxie/planner/choose.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {
namespace {

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

struct Series {
  std::vector<Direction> directions;
  bool symmetric = false;
  std::int64_t experts_per_rank = 0;  // 0: the model's 384 over all ranks
};
using Passes = Series (*)();

// Of the fastest iteration: others are the machine's. Growth counts from the fewest claims of the
// series that ran.
void count_growth(benchmark::State& state, Passes series, double seconds, double tasks,
                  double units) {
  struct PerNLogN {
    double tasks = 1e9, claims = 1e9;  // seconds
  };
  static std::map<Passes, std::map<double, PerNLogN>> all_runs;
  std::map<double, PerNLogN>& runs = all_runs[series];
  const double n = tasks + units;
  const auto per = [&](double count) { return seconds / (count * std::log(count)); };
  PerNLogN& best = runs[n];
  best = {std::min(best.tasks, per(tasks)), std::min(best.claims, per(n))};
  const PerNLogN& fewest = runs.begin()->second;
  state.counters["cpu_s"] = seconds;
  state.counters["tasks"] = tasks;
  state.counters["units"] = units;
  state.counters["ns_per_claim"] = 1e9 * seconds / n;
  state.counters["ns_per_task"] = 1e9 * seconds / tasks;
  state.counters["nlogn_claims"] = per(n) / fewest.claims;
  state.counters["nlogn_tasks"] = per(tasks) / fewest.tasks;
}

void simulate_kimi(benchmark::State& state, Passes passes) {
  const Series series = passes();
  Problem p = study_problem("kimi-k2.5", state.range(0), 8192);
  if (series.experts_per_rank > 0) p.num_experts = series.experts_per_rank * p.num_ranks;
  const Plan plan = pipeline::resolve(p, {});
  const Machine m = machine(find_device("gb300"));
  const RoutingCounts routing =
      make_routing(p, std::vector<std::int64_t>(static_cast<std::size_t>(p.num_ranks), 8192));
  double tasks = 0, units = 0, events = 0, ms = 0, best = 1e9;
  for (auto _ : state) {
    const double begin = cpu_seconds();
    tasks = units = events = ms = 0;
    for (const Direction d : series.directions) {
      const SimResult r =
          simulate(p, plan, routing, m, {.direction = d, .symmetric = series.symmetric});
      tasks += static_cast<double>(r.num_tasks);
      units += static_cast<double>(r.num_units);
      events += static_cast<double>(r.num_events);
      ms += r.ms;
    }
    best = std::min(best, cpu_seconds() - begin);
  }
  count_growth(state, passes, best, tasks, units);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  state.counters["events"] = events;
  state.counters["peak_mb"] = static_cast<double>(usage.ru_maxrss) / 1024;
  state.counters["simulated_ms"] = ms;
}
Series all_ranks() { return {{Direction::forward, Direction::backward}}; }
// The same kinds of task in the same proportion, whatever the number of ranks. Of the whole model a
// backward pass has the fewer tiles of weight gradients the fewer experts a rank has.
Series slices() { return {{Direction::forward, Direction::backward}, false, 6}; }
Series forward_slices() { return {{Direction::forward}, false, 6}; }
Series backward_slices() { return {{Direction::backward}, false, 6}; }
Series forward_only() { return {{Direction::forward}}; }
Series backward_only() { return {{Direction::backward}}; }
Series one_of_equal() { return {{Direction::forward, Direction::backward}, true}; }
void growing(benchmark::internal::Benchmark* b) {
  for (const std::int64_t ranks : {8, 16, 32, 64, 72, 128}) b->Arg(ranks);
  b->MinTime(2)->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(simulate_kimi, all_ranks, all_ranks)->Apply(growing);
BENCHMARK_CAPTURE(simulate_kimi, slices, slices)->Apply(growing);
BENCHMARK_CAPTURE(simulate_kimi, forward_slices, forward_slices)->Apply(growing);
BENCHMARK_CAPTURE(simulate_kimi, backward_slices, backward_slices)->Apply(growing);
BENCHMARK_CAPTURE(simulate_kimi, forward, forward_only)->Apply(growing);
BENCHMARK_CAPTURE(simulate_kimi, backward, backward_only)->Apply(growing);
BENCHMARK_CAPTURE(simulate_kimi, one_of_equal, one_of_equal)
    ->Arg(8)
    ->Arg(72)
    ->Arg(384)
    ->Unit(benchmark::kMillisecond);

void racks(benchmark::State& state) {
  const Problem p = study_problem("qwen3.5-397b", 512, state.range(0));
  const Plan plan = pipeline::resolve(p, {});
  const Machine m = machine(find_device("gb300"));
  const RoutingCounts routing = make_routing(p, std::vector<std::int64_t>(512, state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(simulate(p, plan, routing, m).ms);
}
BENCHMARK(racks)->Arg(2048)->Unit(benchmark::kMillisecond);

void choose(benchmark::State& state) {
  PlanRequest request;
  request.problem = study_problem("kimi-k2.5", state.range(0), 8192);
  const Machine m = machine(find_device("gb300"));
  for (auto _ : state) benchmark::DoNotOptimize(choose_plan(request, m).chosen.forward_ms);
}
BENCHMARK(choose)->Arg(2)->Arg(8)->Arg(72)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace moxie::planner

BENCHMARK_MAIN();
