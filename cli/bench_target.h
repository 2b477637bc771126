// One layer with its data on one backend, ready to be timed: what `moxie bench layer` and `moxie
// tune` measure. bench_cpu.cpp and bench_cuda.cpp make them.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_scenario.h"
#include "cli/tensors.h"

namespace moxie::cli {

struct Timing {
  double ms = 0;  // per pass
  std::optional<double> sm_clock_mhz;
};

// How many passes make about `wanted_ms`, at least two.
std::int64_t passes_for(double wanted_ms, double estimate_ms);
inline constexpr double kIdleMs = 120, kWindowMs = 24, kLoadMs = 170;

// Something that runs in turns with others, and is timed.
struct TimedRun {
  std::string name;  // "moxie", "moxie zero_copy", "gemm_only", ...
  std::function<Timing(BenchMode)> measure;
  // Of the rank that needs most, beside the caller's operands and results; backward: with what
  // forward keeps for it.
  std::optional<std::int64_t> memory_bytes = {};
};

// A further layer on a target's data, under another plan. Direction::backward: forward and
// backward, because plans move time from one to the other (what is saved is not made again).
struct PlannedRun {
  TimedRun timed;
  std::function<void()> run_once;  // returns when the results are there
  Plan plan;                       // resolved
};

class BenchTarget {
 public:
  virtual ~BenchTarget() = default;
  // One pass of the variant that is checked; returns when its results are there. Backward: forward
  // and backward.
  virtual void run_once() = 0;
  // The layer itself first ("moxie"), then its variants that this backend has.
  virtual std::vector<TimedRun> timed_runs() = 0;
  // Throws Error for a plan that the backend cannot run. The run must not outlive the target.
  virtual PlannedRun add_plan(const std::string& name, const Plan& plan) = 0;
  // Between the host and where the arrays lie, either way.
  virtual void copy(void* to, const void* from, std::size_t num_bytes) const = 0;
  virtual MachineId machine() const = 0;
  virtual std::optional<std::int64_t> count_launches() = 0;  // kernels per pass and GPU
  virtual Plan plan() const = 0;

  Problem problem;
  std::vector<RankTensors> routes;     // [R] expert_ids and route_weights on the host
  std::vector<ForwardInput> inputs;    // [R] where the layer finds them
  std::vector<ForwardOutput> outputs;  // [R]
  // [R] Direction::backward; else empty
  std::vector<BackwardInput> backward_inputs;
  std::vector<BackwardOutput> backward_outputs;
};

// Heap and workspace of a rank, and what a context keeps of it.
std::int64_t memory_bytes(const Layer& layer, const Context* context = nullptr);

// Of the scenario: backend, GPUs, routing, seed, plan. Throws Failure when the machine or this
// build has no such backend.
std::unique_ptr<BenchTarget> make_target(const Scenario& scenario, const BenchCase& layer);
std::unique_ptr<BenchTarget> make_cpu_target(const Scenario& scenario, const BenchCase& layer);
std::unique_ptr<BenchTarget> make_cuda_target(const Scenario& scenario, const BenchCase& layer);

// The largest relative L2 error of y over sampled tokens of every rank, against FP64 loops on the
// host. Only the experts that these tokens need are brought there. Backward: also of dx, of the
// route weights' gradients of all these tokens together, and of one row (d_down: column) of the
// first and of the last expert's weight gradients.
double max_relative_l2(const BenchTarget& target, std::int64_t tokens_per_rank);
inline constexpr double kMostError = 1e-2;  // BF16 layers are off by 3e-3
inline constexpr std::int64_t kTokensToCheck = 4;

}  // namespace moxie::cli
