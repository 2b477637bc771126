// What the simulator and the planner cost: time per simulated task against the number of ranks, and
// peak memory. `bench_planner` after `cmake --build --preset cpu --target moxie_bench`.
#include <benchmark/benchmark.h>
#include <sys/resource.h>

#include "moxie/planner/choose.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {
namespace {

void simulate_kimi(benchmark::State& state, bool symmetric) {
  const Problem p = study_problem("kimi-k2.5", state.range(0), 8192);
  const Plan plan = pipeline::resolve(p, {});
  const Machine m = machine(find_device("gb300"));
  const RoutingCounts routing =
      make_routing(p, std::vector<std::int64_t>(static_cast<std::size_t>(p.num_ranks), 8192));
  std::int64_t tasks = 0;
  double ms = 0;
  for (auto _ : state) {
    for (const Direction d : {Direction::forward, Direction::backward}) {
      const SimResult r = simulate(p, plan, routing, m, {.direction = d, .symmetric = symmetric});
      tasks += r.num_tasks;
      ms += r.ms;
    }
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  state.counters["tasks"] = static_cast<double>(tasks) / static_cast<double>(state.iterations());
  state.counters["ns_per_task"] = benchmark::Counter(
      static_cast<double>(tasks) * 1e-9, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["peak_mb"] = static_cast<double>(usage.ru_maxrss) / 1024;
  state.counters["simulated_ms"] = ms / static_cast<double>(state.iterations());
}
BENCHMARK_CAPTURE(simulate_kimi, all_ranks, false)
    ->Arg(8)
    ->Arg(16)
    ->Arg(32)
    ->Arg(64)
    ->Arg(72)
    ->Arg(128)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(simulate_kimi, one_of_equal, true)
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
