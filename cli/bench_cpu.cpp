// The CPU twin as a benchmark target: host arrays, host clock. Its figures say whether the
// benchmark works, not how fast a GPU would be.
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "cli/bench_target.h"
#include "cli/inputs.h"

namespace moxie::cli {
namespace {

class CpuTarget final : public BenchTarget {
 public:
  CpuTarget(const Scenario& scenario, const BenchShape& shape)
      : world_(World::cpu({.num_ranks = scenario.num_ranks})),
        layer_(world_, problem_of(scenario, shape), scenario.plan) {
    problem = layer_.problem();
    RunOptions options;
    options.seed = scenario.seed;
    Setup setup;
    setup.problem = problem;
    setup.tokens.assign(static_cast<std::size_t>(problem.num_ranks), shape.tokens_per_rank);
    setup.routing = scenario.routing;
    setup.backward = false;
    Progress progress;
    routes = make_inputs(options, setup, progress).ranks;
    for (std::int64_t rank = 0; rank < problem.num_ranks; ++rank)
      results_.push_back(
          allocate_results(problem, setup.types, rank, shape.tokens_per_rank, false));
    inputs = forward_inputs(routes);
    outputs = forward_outputs(results_);
  }

  void run_once() override { layer_.infer(inputs, outputs); }
  std::vector<TimedRun> timed_runs() override {
    run_once();
    const double estimate_ms = window(3);
    return {{"moxie", [this, estimate_ms](BenchMode mode) {
               std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(kIdleMs));
               window(mode == BenchMode::burst ? 1 : passes_for(kLoadMs, estimate_ms));
               return Timing{window(passes_for(kWindowMs, estimate_ms)), std::nullopt};
             }}};
  }
  void copy_to_host(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
  std::optional<std::int64_t> count_launches() override { return std::nullopt; }
  Plan plan() const override { return layer_.plan(); }

 private:
  double window(std::int64_t num_passes) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < num_passes; ++i) run_once();
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
    return ms.count() / static_cast<double>(num_passes);
  }

  World world_;
  Layer layer_;
  std::vector<RankResults> results_;
};

}  // namespace

std::int64_t passes_for(double wanted_ms, double estimate_ms) {
  return std::max<std::int64_t>(2, std::llround(wanted_ms / std::max(estimate_ms, 1e-6)));
}

std::unique_ptr<BenchTarget> make_cpu_target(const Scenario& scenario, const BenchShape& shape) {
  return std::make_unique<CpuTarget>(scenario, shape);
}

}  // namespace moxie::cli
