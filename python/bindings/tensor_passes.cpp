// Passes as moxie.torch makes them: addresses instead of arrays. It has looked at dtype, shape,
// device and contiguity of every tensor already, so a pass costs one call of plain numbers. Each
// tensor is that of all ranks of this process; their shares are worked out here: rank i of n takes
// tokens T * i / n to T * (i + 1) / n, and experts lie behind each other.
#include "python/bindings/arrays.h"
#include "python/bindings/handles.h"
#include "python/bindings/parts.h"

namespace moxie::python {
namespace {

using LayerPtr = std::shared_ptr<LayerHandle>;
using ContextPtr = std::shared_ptr<ContextHandle>;
using Address = std::uintptr_t;
using Addresses = std::vector<Address>;  // of the parts that the layer has, in the order of kParts

// What each rank sees of the tensors, and that no result lies where something else does.
class Shares {
 public:
  Shares(const LayerHandle& layer, std::int64_t num_tokens)
      : problem_(layer.problem), local_(layer.world->local), num_tokens_(num_tokens) {
    experts_before_.push_back(0);
    for (std::int64_t i = 0; i < local_.count; ++i)
      experts_before_.push_back(experts_before_.back() + num_experts(i));
  }

  const Problem& problem() const { return problem_; }
  std::int64_t num_ranks() const { return local_.count; }
  void check_overlaps() { overlaps_.check(); }

  // Of [T, columns].
  ConstTensorView read_rows(const char* name, Address at, DType dtype, std::int64_t columns,
                            std::int64_t i) {
    return read(name, rows(name, at, dtype, columns, i), i);
  }
  TensorView write_rows(const char* name, Address at, DType dtype, std::int64_t columns,
                        std::int64_t i) {
    return write(name, rows(name, at, dtype, columns, i), i);
  }
  Weights read_weights(const Addresses& at, std::int64_t i) {
    Weights weights;
    for_each_part(at, [&](const Part& part, Address address) {
      const std::int64_t before = part.per_expert ? experts_before(i) : 0;
      weights.*part.weight = read(
          part.weight_name, share(part.weight_name, part, address, problem_.dtype, before, i), i);
    });
    return weights;
  }
  // Those of a shared expert are [n, ...]: every rank has its own.
  WeightGrads write_grads(const Addresses& at, bool accumulate, std::int64_t i) {
    WeightGrads grads;
    grads.accumulate = accumulate;
    const DType matrix = accumulate ? DType::f32 : problem_.dtype;
    for_each_part(at, [&](const Part& part, Address address) {
      const std::int64_t before = part.per_expert ? experts_before(i) : i;
      grads.*part.grad = write(
          part.grad_name,
          share(part.grad_name, part, address, part.is_matrix ? matrix : DType::f32, before, i), i);
    });
    return grads;
  }

 private:
  std::int64_t rank(std::int64_t i) const { return local_.begin + i; }
  std::int64_t first_token(std::int64_t i) const { return num_tokens_ * i / local_.count; }
  std::int64_t num_experts(std::int64_t i) const {
    return num_local_experts(problem_.num_experts, problem_.num_ranks, RankId{rank(i)});
  }
  std::int64_t experts_before(std::int64_t i) const {
    return experts_before_[static_cast<std::size_t>(i)];
  }
  TensorView view(const char* name, Address at, std::int64_t offset, DType dtype, Shape shape,
                  std::int64_t i) const {
    auto* data = reinterpret_cast<void*>(at + static_cast<Address>(offset * size_bytes(dtype)));
    require_element_aligned(data, dtype, name, rank(i));
    return {data, dtype, shape};
  }
  TensorView rows(const char* name, Address at, DType dtype, std::int64_t columns,
                  std::int64_t i) const {
    const std::int64_t begin = first_token(i);
    return view(name, at, begin * columns, dtype, {first_token(i + 1) - begin, columns}, i);
  }
  TensorView share(const char* name, const Part& part, Address at, DType dtype, std::int64_t before,
                   std::int64_t i) const {
    return view(name, at, before * part.shape(problem_, 1).num_elements(), dtype,
                part.shape(problem_, num_experts(i)), i);
  }
  ConstTensorView read(const char* name, const TensorView& view, std::int64_t i) {
    overlaps_.reads(view, name, rank(i));
    return view;
  }
  TensorView write(const char* name, const TensorView& view, std::int64_t i) {
    overlaps_.writes(view, name, rank(i));
    return view;
  }
  template <class Call>
  void for_each_part(const Addresses& at, const Call& call) const {
    std::size_t next = 0;
    for (const Part& part : kParts)
      if (part.exists(problem_)) call(part, at.at(next++));
  }

  const Problem& problem_;
  RankRange local_;
  std::int64_t num_tokens_;
  std::vector<std::int64_t> experts_before_;  // [ranks of this process + 1]
  Overlaps overlaps_;
};

// `context` may be null: nothing is kept then.
void forward(const LayerPtr& self, ContextHandle* context, Address stream, std::int64_t num_tokens,
             Address x, Address expert_ids, bool ids_are_i64, Address route_weights,
             const Addresses& weights, Address y) {
  Layer& layer = self->open(context != nullptr ? "forward" : "infer");
  Context* into = context != nullptr ? &context->open("Layer.forward") : nullptr;
  Shares shares(*self, num_tokens);
  const Problem& p = shares.problem();
  std::vector<ForwardInput> inputs;
  std::vector<ForwardOutput> outputs;
  for (std::int64_t i = 0; i < shares.num_ranks(); ++i) {
    ForwardInput in;
    in.x = shares.read_rows("x", x, p.dtype, p.hidden, i);
    in.expert_ids = shares.read_rows("expert_ids", expert_ids,
                                     ids_are_i64 ? DType::i64 : DType::i32, p.top_k, i);
    in.route_weights = shares.read_rows("route_weights", route_weights, DType::f32, p.top_k, i);
    in.weights = shares.read_weights(weights, i);
    inputs.push_back(in);
    outputs.push_back({shares.write_rows("y", y, p.dtype, p.hidden, i)});
  }
  shares.check_overlaps();
  const RunningPass running(*self->world);
  const nb::gil_scoped_release release;
  self->world->world->set_stream(reinterpret_cast<void*>(stream));
  if (into != nullptr)
    layer.forward(inputs, outputs, *into);
  else
    layer.infer(inputs, outputs);
}

void backward(const LayerPtr& self, ContextHandle& context, Address stream, std::int64_t num_tokens,
              Address x, Address dy, const Addresses& weights, Address dx, Address d_route_weights,
              const Addresses& grads, bool accumulate) {
  Layer& layer = self->open("backward");
  const Context& saved = context.open("Layer.backward");
  Shares shares(*self, num_tokens);
  const Problem& p = shares.problem();
  std::vector<BackwardInput> inputs;
  std::vector<BackwardOutput> outputs;
  for (std::int64_t i = 0; i < shares.num_ranks(); ++i) {
    BackwardInput in;
    in.x = shares.read_rows("x", x, p.dtype, p.hidden, i);
    in.dy = shares.read_rows("dy", dy, p.dtype, p.hidden, i);
    in.weights = shares.read_weights(weights, i);
    inputs.push_back(in);
    BackwardOutput out;
    out.dx = shares.write_rows("dx", dx, p.dtype, p.hidden, i);
    out.d_route_weights =
        shares.write_rows("d_route_weights", d_route_weights, DType::f32, p.top_k, i);
    out.grads = shares.write_grads(grads, accumulate, i);
    outputs.push_back(out);
  }
  shares.check_overlaps();
  const RunningPass running(*self->world);
  const nb::gil_scoped_release release;
  self->world->world->set_stream(reinterpret_cast<void*>(stream));
  layer.backward(saved, inputs, outputs);
}

}  // namespace

void bind_tensor_passes(nb::module_& m) {
  m.def("_forward", &forward, nb::arg("layer"), nb::arg("context").none(), nb::arg("stream"),
        nb::arg("num_tokens"), nb::arg("x"), nb::arg("expert_ids"), nb::arg("ids_are_i64"),
        nb::arg("route_weights"), nb::arg("weights"), nb::arg("y"));
  m.def("_backward", &backward, nb::arg("layer"), nb::arg("context"), nb::arg("stream"),
        nb::arg("num_tokens"), nb::arg("x"), nb::arg("dy"), nb::arg("weights"), nb::arg("dx"),
        nb::arg("d_route_weights"), nb::arg("grads"), nb::arg("accumulate"));
}

}  // namespace moxie::python
