// The CPU twin as a benchmark target: host arrays, host clock. Its figures say whether the
// benchmark works, not how fast a GPU would be.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <list>
#include <optional>
#include <thread>

#include "cli/bench_target.h"
#include "cli/inputs.h"

namespace moxie::cli {
namespace {

class CpuTarget final : public BenchTarget {
 public:
  CpuTarget(const Scenario& scenario, const BenchCase& bench)
      : world_(World::cpu({.num_ranks = bench.problem.num_ranks})),
        layer_(world_, bench.problem, scenario.plan) {
    problem = layer_.problem();
    RunOptions options;
    options.seed = scenario.seed;
    Setup setup;
    setup.problem = problem;
    setup.tokens = bench.tokens;
    setup.routing = scenario.routing;
    setup.types.matrix_grads = problem.dtype;
    setup.backward = scenario.direction == Direction::backward;
    Progress progress;
    routes = make_inputs(options, setup, progress).ranks;
    for (std::int64_t rank = 0; rank < problem.num_ranks; ++rank)
      results_.push_back(allocate_results(problem, setup.types, rank,
                                          bench.tokens[static_cast<std::size_t>(rank)],
                                          setup.backward));
    inputs = forward_inputs(routes);
    outputs = forward_outputs(results_);
    if (!setup.backward) return;
    backward_inputs = cli::backward_inputs(routes);
    backward_outputs = cli::backward_outputs(results_);
    context_ = layer_.make_context();
  }

  void run_once() override { run(layer_, context_ ? &*context_ : nullptr); }
  // Backward: the context is that of run_once().
  std::vector<TimedRun> timed_runs() override {
    TimedRun run = timed("moxie", [this] {
      context_ ? layer_.backward(*context_, backward_inputs, backward_outputs)
               : layer_.infer(inputs, outputs);
    });
    run.memory_bytes = memory_bytes(layer_, context_ ? &*context_ : nullptr);
    return {run};
  }
  PlannedRun add_plan(const std::string& name, const Plan& plan) override {
    auto layer = std::make_shared<Layer>(world_, problem, plan);
    others_.push_back(layer);
    if (context_) contexts_.push_back(layer->make_context());
    Context* context = context_ ? &contexts_.back() : nullptr;
    const auto run_once = [this, layer, context] { run(*layer, context); };
    PlannedRun planned{timed(name, run_once), run_once, layer->plan()};
    planned.timed.memory_bytes = memory_bytes(*layer, context);
    return planned;
  }
  void copy(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
  MachineId machine() const override { return world_.machine(); }
  std::optional<std::int64_t> count_launches() override { return std::nullopt; }
  Plan plan() const override { return layer_.plan(); }

 private:
  void run(Layer& layer, Context* context) {
    if (context == nullptr) return layer.infer(inputs, outputs);
    layer.forward(inputs, outputs, *context);
    layer.backward(*context, backward_inputs, backward_outputs);
  }
  static TimedRun timed(const std::string& name, const std::function<void()>& pass) {
    pass();
    const double estimate_ms = window(pass, 3);
    return {name, [pass, estimate_ms](BenchMode mode) {
              std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(kIdleMs));
              window(pass, mode == BenchMode::burst ? 1 : passes_for(kLoadMs, estimate_ms));
              return Timing{window(pass, passes_for(kWindowMs, estimate_ms)), std::nullopt};
            }};
  }
  static double window(const std::function<void()>& pass, std::int64_t num_passes) {
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < num_passes; ++i) pass();
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
    return ms.count() / static_cast<double>(num_passes);
  }

  World world_;
  Layer layer_;
  std::vector<std::shared_ptr<Layer>> others_;
  std::vector<RankResults> results_;
  std::optional<Context> context_;  // backward
  std::list<Context> contexts_;     // backward: of others_
};

}  // namespace

std::int64_t passes_for(double wanted_ms, double estimate_ms) {
  return std::max<std::int64_t>(2, std::llround(wanted_ms / std::max(estimate_ms, 1e-6)));
}

std::int64_t memory_bytes(const Layer& layer, const Context* context) {
  const std::vector<BufferBytes> buffers = layer.memory();
  const auto total = std::find_if(buffers.begin(), buffers.end(),
                                  [](const BufferBytes& b) { return b.name == "total"; });
  return total->num_bytes +
         (context != nullptr ? context->num_bytes() / layer.problem().num_ranks : 0);
}

std::unique_ptr<BenchTarget> make_cpu_target(const Scenario& scenario, const BenchCase& bench) {
  return std::make_unique<CpuTarget>(scenario, bench);
}

std::unique_ptr<BenchTarget> make_target(const Scenario& scenario, const BenchCase& bench) {
  return scenario.backend == BackendKind::cuda ? make_cuda_target(scenario, bench)
                                               : make_cpu_target(scenario, bench);
}

}  // namespace moxie::cli
