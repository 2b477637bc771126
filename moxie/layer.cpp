// Layer and Context: they check what the user hands in, and pass it to the backend. Every "x of
// rank 2 is ..." sentence is written here, before anything runs. World: world.cpp.
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "moxie/backend.h"
#include "moxie/core/environment.h"
#include "moxie/moxie.h"
#include "moxie/pipeline/layout.h"
#include "moxie/planner/layer_plan.h"

namespace moxie {
namespace {

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_argument, sentence);
}

// What a tensor must look like: dtype one of `dtypes`, the given shape.
struct Expected {
  std::vector<DType> dtypes;
  Shape shape;
  bool open_rows = false;  // the first dimension is T, 0 .. max_tokens
};

std::string describe(const Shape& shape, const std::vector<DType>& dtypes, bool open_rows) {
  std::string text = to_string(shape);
  if (open_rows) text = "[T" + (shape.rank > 1 ? ", " + std::to_string(shape.dim[1]) : "") + "]";
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    text += (i == 0 ? " " : " or ") + std::string(name(dtypes[i]));
  return text;
}

class TensorChecker {
 public:
  explicit TensorChecker(std::int64_t rank) : rank_(rank) {}

  template <class View>
  void require(const char* what, const View& view, const Expected& want) const {
    if (view.absent()) {
      fail(fmt::format("{} of rank {} is absent, must be {}", what, rank_,
                       describe(want.shape, want.dtypes, want.open_rows)));
    }
    bool dtype_ok = false;
    for (const DType t : want.dtypes) dtype_ok |= view.dtype == t;
    Shape shape = view.shape;
    if (want.open_rows && shape.rank > 0) shape.dim[0] = want.shape.dim[0];
    if (!dtype_ok || !(shape == want.shape)) {
      fail(fmt::format("{} of rank {} is {} {}, must be {}", what, rank_, to_string(view.shape),
                       name(view.dtype), describe(want.shape, want.dtypes, want.open_rows)));
    }
    if (view.data == nullptr && view.shape.num_elements() > 0) {
      fail(fmt::format("{} of rank {} is a null pointer to {} elements, must point to them", what,
                       rank_, view.shape.num_elements()));
    }
  }
  template <class View>
  void forbid(const char* what, const View& view, const char* why) const {
    if (!view.absent())
      fail(fmt::format("{} of rank {} was given, must be absent because {}", what, rank_, why));
  }
  template <class View>
  void require_if(bool part, const char* why_not, const char* what, const View& view,
                  const Expected& want) const {
    if (part)
      require(what, view, want);
    else
      forbid(what, view, why_not);
  }

 private:
  std::int64_t rank_;
};

constexpr const char* kNoBias = "problem.expert_bias is false";
constexpr const char* kNoShared = "problem.shared.intermediate is 0";
constexpr const char* kNoGate = "problem.shared.output_gate is false";

// Weights and their gradients have the same parts; matrices and vectors may differ in dtype.
template <class Parts>
void check_weights(const TensorChecker& c, const Problem& p, std::int64_t rank, const Parts& w,
                   const std::string& prefix, const std::vector<DType>& matrix,
                   const std::vector<DType>& vector) {
  const std::int64_t e = num_local_experts(p.num_experts, p.num_ranks, RankId{rank}), h = p.hidden,
                     i = p.intermediate, is = p.shared.intermediate;
  auto n = [&](const char* part) { return prefix + part; };
  c.require(n("gate").c_str(), w.gate, {matrix, {e, i, h}});
  c.require(n("up").c_str(), w.up, {matrix, {e, i, h}});
  c.require(n("down").c_str(), w.down, {matrix, {e, h, i}});
  c.require_if(p.expert_bias, kNoBias, n("gate_bias").c_str(), w.gate_bias, {vector, {e, i}});
  c.require_if(p.expert_bias, kNoBias, n("up_bias").c_str(), w.up_bias, {vector, {e, i}});
  c.require_if(p.expert_bias, kNoBias, n("down_bias").c_str(), w.down_bias, {vector, {e, h}});
  c.require_if(is > 0, kNoShared, n("shared_gate").c_str(), w.shared_gate, {matrix, {is, h}});
  c.require_if(is > 0, kNoShared, n("shared_up").c_str(), w.shared_up, {matrix, {is, h}});
  c.require_if(is > 0, kNoShared, n("shared_down").c_str(), w.shared_down, {matrix, {h, is}});
  c.require_if(p.shared.output_gate, kNoGate, n("shared_output_gate").c_str(), w.shared_output_gate,
               {vector, {h}});
}

void check_tokens(std::int64_t rank, std::int64_t tokens, std::int64_t max_tokens) {
  if (tokens < 0 || tokens > max_tokens) {
    fail(fmt::format(
        "x of rank {} has {} tokens, must be between 0 and max_tokens {}; nearest legal value {}",
        rank, tokens, max_tokens, tokens < 0 ? 0 : max_tokens));
  }
}

void check_count(const char* what, std::size_t seen, std::int64_t num_ranks) {
  if (static_cast<std::int64_t>(seen) != num_ranks) {
    fail(
        fmt::format("{} has {} entries, must have one per rank of this process; nearest legal "
                    "value {}",
                    what, seen, num_ranks));
  }
}

// Validation mode. `skip(i)` leaves elements out that the layer never reads.
template <class Skip>
void check_finite(const char* what, std::int64_t rank, const ConstTensorView& view, Skip skip) {
  if (view.absent()) return;
  for (std::int64_t i = 0; i < view.shape.num_elements(); ++i) {
    const float v =
        view.dtype == DType::bf16 ? static_cast<float>(view.as<bf16>()[i]) : view.as<float>()[i];
    if (std::isfinite(v) || skip(i)) continue;
    std::string at;
    std::int64_t rest = i;
    for (std::int32_t d = view.shape.rank - 1; d >= 0; --d) {
      const std::int64_t dim = view.shape.dim[static_cast<std::size_t>(d)];
      at = std::to_string(rest % dim) + (at.empty() ? "" : ", ") + at;
      rest /= dim;
    }
    throw Error(ErrorCode::non_finite,
                fmt::format("{} of rank {} is {} at [{}], must be finite in validation mode; "
                            "nearest legal value 0",
                            what, rank, v, at));
  }
}
void check_finite(const char* what, std::int64_t rank, const ConstTensorView& view) {
  check_finite(what, rank, view, [](std::int64_t) { return false; });
}
void check_finite(std::int64_t rank, const Weights& w) {
  check_finite("weights.gate", rank, w.gate);
  check_finite("weights.up", rank, w.up);
  check_finite("weights.down", rank, w.down);
  check_finite("weights.gate_bias", rank, w.gate_bias);
  check_finite("weights.up_bias", rank, w.up_bias);
  check_finite("weights.down_bias", rank, w.down_bias);
  check_finite("weights.shared_gate", rank, w.shared_gate);
  check_finite("weights.shared_up", rank, w.shared_up);
  check_finite("weights.shared_down", rank, w.shared_down);
  check_finite("weights.shared_output_gate", rank, w.shared_output_gate);
}

std::int64_t expert_id_at(const ConstTensorView& ids, std::int64_t i) {
  return ids.dtype == DType::i64 ? ids.as<std::int64_t>()[i] : ids.as<std::int32_t>()[i];
}

}  // namespace

Context::Context(std::unique_ptr<ContextState> state) : state_(std::move(state)) {}
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;
std::int64_t Context::num_bytes() const { return state_->num_bytes; }

// One pass at a time on a World: its ranks share heaps and epochs.
class PassGuard {
 public:
  explicit PassGuard(Backend& backend) : backend_(backend) {
    if (backend_.pass_running.exchange(true)) {
      fail(
          "a pass was started while another one runs on the same World, must be one at a time; use "
          "one World per thread");
    }
  }
  ~PassGuard() { backend_.pass_running = false; }
  PassGuard(const PassGuard&) = delete;
  PassGuard& operator=(const PassGuard&) = delete;

 private:
  Backend& backend_;
};

struct Layer::State {
  Backend* backend = nullptr;
  Problem problem;
  Plan plan;
  PlanSource source;
  std::unique_ptr<BackendLayer> impl;

  State(World& world, const Problem& of);
  void set_plan(const Plan& chosen, const PlanSource& from);
  template <class Check>
  void checked(const Check& check_layer);
  void check_running(const char* what) const {
    if (!backend->stopped()) return;
    throw Error(
        ErrorCode::world_stopped,
        fmt::format("{} was called on a World whose last pass timed out; call World::reset() first",
                    what));
  }
  void refuse(const std::string& why);
  template <class Check>
  void checked_pass(const Check& check_arguments);
  void check_context(const ContextState& context, const char* what) const {
    if (context.layer_id != impl->id) {
      fail(fmt::format("context given to {} belongs to another layer, must come from this layer",
                       what));
    }
  }
  void check_forward(std::span<const ForwardInput> inputs,
                     std::span<const ForwardOutput> outputs) const;
  void check_backward(const ContextState& context, std::span<const BackwardInput> inputs,
                      std::span<const BackwardOutput> outputs) const;
  void run_forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                   ContextState* context, trace::Trace* trace) {
    check_running("forward");
    checked_pass([&] {
      if (context != nullptr) check_context(*context, "forward");
      check_forward(inputs, outputs);
    });
    const PassGuard guard(*backend);
    if (context != nullptr) {
      context->filled = false;
      context->num_tokens.clear();
      for (const ForwardInput& in : inputs) context->num_tokens.push_back(in.x.shape.dim[0]);
    }
    impl->forward(inputs, outputs, context, trace);
    if (context != nullptr) context->filled = true;
  }
};

// Not while a pass of another thread runs, nor in a stopped world: their peers know already.
void Layer::State::refuse(const std::string& why) {
  if (backend->stopped()) return;
  try {
    const PassGuard guard(*backend);
    impl->refuse_pass(why);
  } catch (const Error&) {  // the caller throws what is wrong here
  }
}

template <class Check>
void Layer::State::checked_pass(const Check& check_arguments) {
  try {
    check_arguments();
  } catch (const Error& error) {
    refuse(error.what());
    throw;
  }
}

void Layer::State::check_forward(std::span<const ForwardInput> inputs,
                                 std::span<const ForwardOutput> outputs) const {
  const Problem& p = problem;
  const RankRange local = backend->local_ranks();
  check_count("forward inputs", inputs.size(), local.count);
  check_count("forward outputs", outputs.size(), local.count);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::int64_t r = local.begin + static_cast<std::int64_t>(i);
    const ForwardInput& in = inputs[i];
    const TensorChecker c(r);
    c.require("x", in.x, {{p.dtype}, {0, p.hidden}, true});
    const std::int64_t tokens = in.x.shape.dim[0];
    check_tokens(r, tokens, p.max_tokens);
    c.require("expert_ids", in.expert_ids, {{DType::i32, DType::i64}, {tokens, p.top_k}});
    c.require("route_weights", in.route_weights, {{DType::f32}, {tokens, p.top_k}});
    c.require("y", outputs[i].y, {{p.dtype}, {tokens, p.hidden}});
    check_weights(c, p, r, in.weights, "weights.", {p.dtype}, {p.dtype});
    if (!backend->options().validate_finite) continue;
    check_finite("x", r, in.x);
    check_finite("route_weights", r, in.route_weights,
                 [&](std::int64_t route) { return expert_id_at(in.expert_ids, route) < 0; });
    check_finite(r, in.weights);
  }
}

void Layer::State::check_backward(const ContextState& context,
                                  std::span<const BackwardInput> inputs,
                                  std::span<const BackwardOutput> outputs) const {
  const Problem& p = problem;
  check_context(context, "backward");
  if (!context.filled)
    fail("context given to backward is empty, must come from a forward pass that succeeded");
  const RankRange local = backend->local_ranks();
  check_count("backward inputs", inputs.size(), local.count);
  check_count("backward outputs", outputs.size(), local.count);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::int64_t r = local.begin + static_cast<std::int64_t>(i);
    const BackwardInput& in = inputs[i];
    const BackwardOutput& out = outputs[i];
    const std::int64_t tokens = context.num_tokens[i];
    const TensorChecker c(r);
    c.require("x", in.x, {{p.dtype}, {tokens, p.hidden}});
    c.require("dy", in.dy, {{p.dtype}, {tokens, p.hidden}});
    c.require("dx", out.dx, {{p.dtype}, {tokens, p.hidden}});
    c.require("d_route_weights", out.d_route_weights, {{DType::f32}, {tokens, p.top_k}});
    check_weights(c, p, r, in.weights, "weights.", {p.dtype}, {p.dtype});
    const DType matrix = out.grads.gate.dtype;
    if (out.grads.accumulate && matrix != DType::f32) {
      fail(
          fmt::format("grads.gate of rank {} is {} with accumulate, must be f32: sums of many "
                      "microbatches lose bits in {}; "
                      "nearest legal value f32",
                      r, name(matrix), name(matrix)));
    }
    check_weights(c, p, r, out.grads, "grads.",
                  matrix == DType::f32 ? std::vector{DType::f32} : std::vector{p.dtype},
                  {DType::f32});
    if (!backend->options().validate_finite) continue;
    check_finite("x", r, in.x);
    check_finite("dy", r, in.dy);
    check_finite(r, in.weights);
  }
}

// What one rank alone finds wrong, the ranks in other processes hear of too.
template <class Check>
void Layer::State::checked(const Check& check_layer) {
  try {
    check_layer();
  } catch (const Error& error) {
    backend->refuse_layer(error.what());
    throw;
  }
}

Layer::State::State(World& world, const Problem& of) : backend(&world.backend()), problem(of) {
  checked([&] {
    check(problem);
    if (problem.num_ranks != world.num_ranks()) {
      fail(fmt::format(
          "problem.num_ranks is {}, must be the world's number of ranks; nearest legal value {}",
          problem.num_ranks, world.num_ranks()));
    }
  });
}

void Layer::State::set_plan(const Plan& chosen, const PlanSource& from) {
  plan = pipeline::resolve(problem, chosen);
  pipeline::check(problem, plan);
  source = from;
}

Layer::Layer(World& world, const Problem& problem, const Plan& plan)
    : state_(std::make_unique<State>(world, problem)) {
  state_->checked([&] { state_->set_plan(plan, {PlanOrigin::caller, "given by the caller"}); });
  state_->impl = world.backend().make_layer(problem, state_->plan);
}

// A plan that nobody asked for must not be why a layer cannot be made.
Layer::Layer(World& world, const Problem& problem)
    : state_(std::make_unique<State>(world, problem)) {
  Backend& backend = *state_->backend;
  const planner::LayerPlan chosen = planner::plan_for_layer(
      problem, backend.machine(), plan_cache_file(backend.options().plan_cache));
  PlanSource standard = chosen.source;
  if (chosen.source.origin != PlanOrigin::standard) {
    try {
      state_->set_plan(chosen.plan, chosen.source);
      state_->impl = backend.make_layer(problem, state_->plan);
      return;
    } catch (const Error& error) {
      standard = {PlanOrigin::standard,
                  fmt::format("default: {} cannot be used: {}", chosen.source.words, error.what())};
    }
  }
  state_->checked([&] { state_->set_plan(pipeline::default_plan(problem), standard); });
  state_->impl = backend.make_layer(problem, state_->plan);
}
Layer::Layer(Layer&&) noexcept = default;
Layer::~Layer() = default;

const Problem& Layer::problem() const { return state_->problem; }
const Plan& Layer::plan() const { return state_->plan; }
const PlanSource& Layer::plan_source() const { return state_->source; }

Context Layer::make_context() const {
  auto context = state_->impl->make_context();
  context->layer_id = state_->impl->id;
  return Context(std::move(context));
}

void Layer::forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                    Context& context, trace::Trace* trace) {
  state_->run_forward(inputs, outputs, context.state_.get(), trace);
}

Context Layer::forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                       trace::Trace* trace) {
  Context context = make_context();
  forward(inputs, outputs, context, trace);
  return context;
}

void Layer::infer(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                  trace::Trace* trace) {
  state_->run_forward(inputs, outputs, nullptr, trace);
}

void Layer::backward(const Context& context, std::span<const BackwardInput> inputs,
                     std::span<const BackwardOutput> outputs, trace::Trace* trace) {
  state_->check_running("backward");
  state_->checked_pass([&] { state_->check_backward(*context.state_, inputs, outputs); });
  const PassGuard guard(*state_->backend);
  state_->impl->backward(*context.state_, inputs, outputs, trace);
}

void Layer::refuse(const std::string& why) { state_->refuse(why); }

TensorView Layer::input_buffer(std::int64_t rank) const {
  const Problem& p = state_->problem;
  const RankRange local = state_->backend->local_ranks();
  const std::int64_t last = local.begin + local.count - 1;
  if (rank < local.begin || rank > last) {
    fail(
        fmt::format("rank of input_buffer is {}, must be between {} and {}; nearest legal value {}",
                    rank, local.begin, last, rank < local.begin ? local.begin : last));
  }
  return {state_->impl->input_buffer(rank), p.dtype, {p.max_tokens, p.hidden}};
}

std::vector<BufferBytes> Layer::memory() const {
  std::vector<BufferBytes> out;
  for (const pipeline::NamedBytes& b : state_->impl->memory()) out.push_back({b.name, b.num_bytes});
  return out;
}

std::string version() { return MOXIE_VERSION; }

}  // namespace moxie
