// The CUDA backend as a benchmark target: random weights and tokens made on the GPUs, events around
// a window of passes on the stream of rank 0's GPU, which all others are joined to.
#include <chrono>
#include <cmath>
#include <list>
#include <optional>
#include <set>
#include <thread>

#include "cli/bench_target.h"
#include "cli/device_tensors.h"
#include "cli/errors.h"
#if MOXIE_HAS_CUDA
#include "bench/layer_gpu.h"
#endif

namespace moxie::cli {

#if MOXIE_HAS_CUDA
namespace {

constexpr double kTimeoutSeconds = 10;  // a pass takes milliseconds

class CudaTarget final : public BenchTarget {
 public:
  CudaTarget(const Scenario& scenario, const BenchCase& bench)
      : devices_(rank_devices(scenario.cuda, bench.problem.num_ranks)),
        world_(World::cuda({.num_ranks = bench.problem.num_ranks, .timeout_s = kTimeoutSeconds},
                           scenario.cuda)),
        layer_(world_, bench.problem, scenario.plan),
        timer_(devices_[0]) {
    problem = layer_.problem();
    world_.set_stream(timer_.stream());
    make_routes_on_host(scenario, bench.tokens);
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) make_rank(rank, scenario.seed);
    if (scenario.direction == Direction::forward) {
      make_zero_copy_inputs();
      return;
    }
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) make_gradients(rank, scenario.seed);
    context_ = layer_.make_context();
  }
  ~CudaTarget() override {
    try {
      world_.synchronize();
    } catch (const Error&) {  // was thrown by the pass already
    }
    world_.set_stream(nullptr);
  }

  void run_once() override {
    enqueue(layer_, context_ ? &*context_ : nullptr);
    world_.synchronize();
  }

  std::vector<TimedRun> timed_runs() override {
    return context_ ? backward_runs() : forward_runs();
  }
  PlannedRun add_plan(const std::string& name, const Plan& plan) override {
    auto layer = std::make_shared<Layer>(world_, problem, plan);
    others_.push_back(layer);
    if (context_) contexts_.push_back(layer->make_context());
    Context* context = context_ ? &contexts_.back() : nullptr;
    PlannedRun planned{timed(name, [this, layer, context] { enqueue(*layer, context); }, {}),
                       [this, layer, context] {
                         enqueue(*layer, context);
                         world_.synchronize();
                       },
                       layer->plan()};
    planned.timed.memory_bytes = memory_bytes(*layer, context);
    return planned;
  }

  void copy(void* to, const void* from, std::size_t num_bytes) const override {
    bench::copy(to, from, num_bytes);
  }

  std::optional<std::int64_t> count_launches() override {
    const auto num_gpus =
        static_cast<std::int64_t>(std::set<int>(devices_.begin(), devices_.end()).size());
    const auto count = timer_.count_kernels(
        context_ ? backward_of(layer_, *context_, backward_outputs) : forward_of(layer_, inputs));
    return count ? std::optional(*count / num_gpus) : std::nullopt;
  }
  Plan plan() const override { return layer_.plan(); }
  MachineId machine() const override { return world_.machine(); }

 private:
  std::vector<TimedRun> forward_runs() {
    std::vector<TimedRun> runs;
    runs.push_back(timed("moxie", forward_of(layer_, inputs), {}));
    runs.back().memory_bytes = memory_bytes(layer_);
    runs.push_back(timed("moxie zero_copy", forward_of(layer_, zero_copy_), {}));
    // Neither staged nor sorted nor agreed on: what that costs is the difference to zero_copy.
    runs.push_back(
        timed("moxie kept_schedule", forward_of(layer_, zero_copy_), {.keep_schedule = true}));
    // One rank: the expert FFN with its gather and scatter, beside the products alone.
    if (problem.num_ranks == 1)
      runs.push_back(
          timed("moxie without_merge", forward_of(layer_, inputs), {.skip_merge = true}));
    return runs;
  }

  // Backward alone, from the context of one forward pass: gradients in BF16, added into FP32, and
  // what it costs to keep less or more.
  std::vector<TimedRun> backward_runs() {
    std::vector<TimedRun> runs;
    layer_.forward(inputs, outputs, *context_);
    runs.push_back(timed("moxie", backward_of(layer_, *context_, backward_outputs), {}));
    runs.back().memory_bytes = memory_bytes(layer_, &*context_);
    runs.push_back(timed("moxie main_grad", backward_of(layer_, *context_, main_grads_), {}));
    runs.back().memory_bytes = runs.front().memory_bytes;
    for (const auto& [name, save] : {std::pair{"moxie save_none", SavePolicy::none},
                                     {"moxie save_z", SavePolicy::z},
                                     {"moxie save_z_and_x", SavePolicy::z_and_x}}) {
      if (save != layer_.plan().save) runs.push_back(saving(name, save));
    }
    return runs;
  }
  TimedRun saving(const std::string& name, SavePolicy save) {
    Plan plan = layer_.plan();
    plan.save = save;
    plan.saved_rows = -1;
    try {
      auto layer = std::make_shared<Layer>(world_, problem, plan);
      others_.push_back(layer);
      contexts_.push_back(layer->make_context());
      Context& context = contexts_.back();
      layer->forward(inputs, outputs, context);
      TimedRun run = timed(name, backward_of(*layer, context, backward_outputs), {});
      run.memory_bytes = memory_bytes(*layer, &context);
      return run;
    } catch (const Error& error) {  // mostly no memory for it: a note, not the end
      if (error.code() != ErrorCode::unavailable) throw;
      return {name, [why = std::string(error.what())](BenchMode) -> Timing { throw Failure(why); }};
    }
  }

  // What is checked, and what `moxie tune` times.
  void enqueue(Layer& layer, Context* context) {
    if (context == nullptr) return layer.infer(inputs, outputs);
    layer.forward(inputs, outputs, *context);
    layer.backward(*context, backward_inputs, backward_outputs);
  }
  std::function<void()> forward_of(Layer& layer, const std::vector<ForwardInput>& from) {
    return [this, &layer, &from] { layer.infer(from, outputs); };
  }
  std::function<void()> backward_of(Layer& layer, const Context& context,
                                    const std::vector<BackwardOutput>& to) {
    return [this, &layer, &context, &to] { layer.backward(context, backward_inputs, to); };
  }

  void make_routes_on_host(const Scenario& scenario, const std::vector<std::int64_t>& tokens) {
    const RunTypes types{.ids = DType::i64};
    for (std::int64_t rank = 0; rank < problem.num_ranks; ++rank) {
      const std::int64_t num_tokens = tokens[static_cast<std::size_t>(rank)];
      RankTensors tensors;
      tensors.x.shape = {num_tokens, problem.hidden};  // of its values the routing asks nothing
      for (const auto& [name, member] : {InputName{"expert_ids", &RankTensors::expert_ids},
                                         InputName{"route_weights", &RankTensors::route_weights}}) {
        const TensorSpec spec = tensor_spec(problem, types, rank, num_tokens, name);
        tensors.*member = HostTensor(spec.dtype, spec.shape);
      }
      routes.push_back(std::move(tensors));
    }
    make_routes(problem, scenario.routing, RouterKind::softmax, scenario.seed, routes);
  }

  // Weights of every part the problem has; rows of matrices have length about one.
  void make_rank(std::size_t rank, std::uint64_t seed) {
    const std::int64_t T = routes[rank].x.shape.dim[0];
    std::uint64_t stream = (seed * 64 + rank) * 16;
    const auto part = [&](const char* name) -> ConstTensorView {
      const TensorSpec spec = tensor_spec(problem, {}, static_cast<std::int64_t>(rank), T, name);
      ++stream;
      if (spec.shape.rank == 0) return {};
      const auto length = static_cast<double>(spec.shape.dim[spec.shape.rank - 1]);
      return random(spec.shape, rank, 1 / std::sqrt(length), stream);
    };
    ForwardInput in;
    in.x = random({T, problem.hidden}, rank, 1, stream);
    Weights& w = in.weights;
    w.gate = part("gate"), w.up = part("up"), w.down = part("down");
    w.gate_bias = part("gate_bias"), w.up_bias = part("up_bias"), w.down_bias = part("down_bias");
    w.shared_gate = part("shared_gate"), w.shared_up = part("shared_up");
    w.shared_down = part("shared_down"), w.shared_output_gate = part("shared_output_gate");
    in.expert_ids = upload(routes[rank].expert_ids, rank);
    in.route_weights = upload(routes[rank].route_weights, rank);
    inputs.push_back(in);
    outputs.push_back(
        {random({T, problem.hidden}, rank, 1, stream + 1)});  // anything but the result
  }

  // dY, and where the gradients go: BF16 matrices, and FP32 ones that hold something already.
  void make_gradients(std::size_t rank, std::uint64_t seed) {
    const ForwardInput& in = inputs[rank];
    const std::int64_t T = in.x.shape.dim[0];
    const std::uint64_t stream = (seed * 64 + rank) * 16 + 15;
    backward_inputs.push_back({in.x, random({T, problem.hidden}, rank, 1, stream), in.weights});
    BackwardOutput out;
    out.dx = allocate(DType::bf16, in.x.shape, rank);
    out.d_route_weights = allocate(DType::f32, in.route_weights.shape, rank);
    for (const DType matrices : {DType::bf16, DType::f32}) {
      const auto part = [&](const char* name) -> TensorView {
        const TensorSpec spec = tensor_spec(problem, {.matrix_grads = matrices},
                                            static_cast<std::int64_t>(rank), T, name);
        if (spec.shape.rank == 0) return {};
        const TensorView view = allocate(spec.dtype, spec.shape, rank);
        // Pairs of BF16 values are FP32 values of the same distribution.
        bench::fill_normal(devices_[rank], view.data,
                           view.shape.num_elements() * size_bytes(view.dtype) / 2, 1, stream);
        return view;
      };
      WeightGrads& g = out.grads;
      g.gate = part("d_gate"), g.up = part("d_up"), g.down = part("d_down");
      g.gate_bias = part("d_gate_bias"), g.up_bias = part("d_up_bias");
      g.down_bias = part("d_down_bias");
      g.shared_gate = part("d_shared_gate"), g.shared_up = part("d_shared_up");
      g.shared_down = part("d_shared_down");
      g.shared_output_gate = part("d_shared_output_gate");
      g.accumulate = matrices == DType::f32;
      (g.accumulate ? main_grads_ : backward_outputs).push_back(out);
    }
  }

  TensorView allocate(DType dtype, const Shape& shape, std::size_t rank) {
    memory_.emplace_back(devices_[rank],
                         static_cast<std::size_t>(shape.num_elements() * size_bytes(dtype)));
    return {memory_.back().get(), dtype, shape};
  }
  TensorView random(const Shape& shape, std::size_t rank, double scale, std::uint64_t seed) {
    const TensorView view = allocate(DType::bf16, shape, rank);
    bench::fill_normal(devices_[rank], view.data, shape.num_elements(), static_cast<float>(scale),
                       seed);
    return view;
  }
  TensorView upload(const HostTensor& tensor, std::size_t rank) {
    const TensorView view = allocate(tensor.dtype, tensor.shape, rank);
    bench::copy(view.data, tensor.bytes.data(), tensor.bytes.size());
    return view;
  }

  // x in the rank's own heap, where a pass need not copy it.
  void make_zero_copy_inputs() {
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      ForwardInput in = inputs[rank];
      in.x = TensorView(layer_.input_buffer(static_cast<std::int64_t>(rank)).data, in.x.dtype,
                        in.x.shape);
      bench::copy(const_cast<void*>(in.x.data), inputs[rank].x.data,
                  static_cast<std::size_t>(in.x.shape.num_elements() * size_bytes(in.x.dtype)));
      zero_copy_.push_back(in);
    }
  }

  TimedRun timed(const std::string& run_name, const std::function<void()>& enqueue,
                 const FaultInjection& faults) {
    world_.set_faults(faults);
    enqueue();
    const double estimate_ms = timer_.window(enqueue, 3).ms;
    world_.synchronize();  // throws what went wrong in the passes
    return {run_name, [this, enqueue, estimate_ms, faults](BenchMode mode) {
              world_.set_faults(faults);
              timer_.synchronize();
              std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(kIdleMs));
              const std::int64_t warm_up =
                  mode == BenchMode::burst ? 1 : passes_for(kLoadMs, estimate_ms);
              for (std::int64_t i = 0; i < warm_up; ++i) enqueue();
              const bench::GpuTiming timing =
                  timer_.window(enqueue, passes_for(kWindowMs, estimate_ms));
              world_.synchronize();  // throws what went wrong in the passes
              return Timing{timing.ms, timing.sm_clock_mhz};
            }};
  }

  std::vector<int> devices_;              // [R]
  std::vector<bench::GpuMemory> memory_;  // outlives the layer's last pass: freed after timer_
  World world_;
  Layer layer_;
  std::vector<std::shared_ptr<Layer>> others_;
  bench::GpuTimer timer_;
  std::vector<ForwardInput> zero_copy_;     // [R]
  std::optional<Context> context_;          // backward
  std::list<Context> contexts_;             // backward: of others_
  std::vector<BackwardOutput> main_grads_;  // [R] backward: FP32, added into
};

}  // namespace

std::unique_ptr<BenchTarget> make_cuda_target(const Scenario& scenario, const BenchCase& bench) {
  return std::make_unique<CudaTarget>(scenario, bench);
}

#else

std::unique_ptr<BenchTarget> make_cuda_target(const Scenario&, const BenchCase&) {
  require_cuda();
  return nullptr;
}

#endif

}  // namespace moxie::cli
