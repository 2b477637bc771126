// Layer and Context. A pass reads its Python arguments under the GIL, lets it go while the ranks
// work, and hands back arrays.
#include "python/bindings/pass_arguments.h"

namespace moxie::python {
namespace {

using LayerPtr = std::shared_ptr<LayerHandle>;
using ContextPtr = std::shared_ptr<ContextHandle>;

// The arguments of a pass, read from Python. What is wrong with them, ranks in other processes
// hear.
template <class Call, class... Arguments>
Call read_call(const LayerPtr& self, Layer& layer, const Arguments&... arguments) {
  const auto refuse = [&](const std::string& why) {
    const RunningPass running(*self->world);
    const nb::gil_scoped_release release;
    layer.refuse(why);
  };
  try {
    return Call(*self, arguments...);
  } catch (const Error& error) {
    refuse(error.what());
    throw;
  } catch (const nb::python_error& error) {
    refuse(nb::cast<std::string>(nb::str(error.value())));
    throw;
  }
}

constexpr const char* kForwardSignature =
    "def forward(self, *, x: collections.abc.Sequence[typing.Any], expert_ids: "
    "collections.abc.Sequence[typing.Any], route_weights: collections.abc.Sequence[typing.Any], "
    "weights: collections.abc.Sequence[moxie._weights.Weights], out: "
    "collections.abc.Sequence[typing.Any] | None = None, context: Context | None = None, trace: "
    "Trace | None = None) -> tuple[list[typing.Any], Context]";
constexpr const char* kForwardDoc =
    "Runs the layer over all ranks and keeps what backward needs.\n\n"
    "One entry per rank in each list; T is that rank's number of tokens, 0 to max_tokens.\n"
    "  x              [T, H] problem.dtype\n"
    "  expert_ids     [T, K] int32 or int64; global expert, -1 is no route\n"
    "  route_weights  [T, K] float32; not read where the id is -1\n"
    "  weights        moxie.Weights of the rank's experts\n"
    "  out            [T, H] problem.dtype to write y into; allocated when None\n"
    "  context        one that forward returned before, to be filled anew; made when None\n"
    "  trace          moxie.trace.Trace that receives the timeline of this pass\n"
    "Returns the list of y, [T, H] each, and the context. Raises InvalidArgumentError or "
    "ArgumentTypeError for arrays that break a rule, InvalidRouteError, CapacityExceededError, "
    "NonFiniteError (validation), WaitTimeoutError, WorldStoppedError, ClosedError.";

nb::tuple forward(const LayerPtr& self, nb::handle x, nb::handle expert_ids,
                  nb::handle route_weights, nb::handle weights, nb::handle out, nb::handle context,
                  trace::Trace* trace) {
  Layer& layer = self->open("forward");
  ContextPtr into;
  if (!context.is_none()) {
    into = nb::cast<ContextPtr>(context);
    into->open("Layer.forward");
  }
  auto call = read_call<ForwardCall>(self, layer, x, expert_ids, route_weights, weights, out);
  if (!into) into = std::make_shared<ContextHandle>(self, layer.make_context());
  {
    const RunningPass running(*self->world);
    const nb::gil_scoped_release release;
    layer.forward(call.inputs, call.outputs, *into->context, trace);
  }
  return nb::make_tuple(call.y, context.is_none() ? nb::cast(into) : nb::borrow(context));
}

constexpr const char* kInferSignature =
    "def infer(self, *, x: collections.abc.Sequence[typing.Any], expert_ids: "
    "collections.abc.Sequence[typing.Any], route_weights: collections.abc.Sequence[typing.Any], "
    "weights: collections.abc.Sequence[moxie._weights.Weights], out: "
    "collections.abc.Sequence[typing.Any] | None = None, trace: Trace | None = None) -> "
    "list[typing.Any]";
nb::list infer(const LayerPtr& self, nb::handle x, nb::handle expert_ids, nb::handle route_weights,
               nb::handle weights, nb::handle out, trace::Trace* trace) {
  Layer& layer = self->open("infer");
  auto call = read_call<ForwardCall>(self, layer, x, expert_ids, route_weights, weights, out);
  {
    const RunningPass running(*self->world);
    const nb::gil_scoped_release release;
    layer.infer(call.inputs, call.outputs, trace);
  }
  return call.y;
}

constexpr const char* kBackwardSignature =
    "def backward(self, context: Context, *, x: collections.abc.Sequence[typing.Any], dy: "
    "collections.abc.Sequence[typing.Any], weights: "
    "collections.abc.Sequence[moxie._weights.Weights], out: "
    "collections.abc.Sequence[moxie._weights.Gradients] | None = None, accumulate: bool = False, "
    "grads_dtype: DType | None = None, trace: Trace | None = None) -> "
    "list[moxie._weights.Gradients]";
constexpr const char* kBackwardDoc =
    "Gradients of a forward pass, of which `context` came. May be called as often as you like.\n\n"
    "  x, weights   the same values as in forward\n"
    "  dy           [T, H] problem.dtype\n"
    "  out          moxie.Gradients per rank whose arrays are written; those that are None are "
    "allocated\n"
    "  accumulate   add weight gradients (float32) to what out holds; else they are overwritten, "
    "zeros for idle experts\n"
    "  grads_dtype  of allocated matrices: f32 (when None) or problem.dtype; vectors are float32\n"
    "Returns moxie.Gradients per rank. Raises as forward does.";
nb::list backward(const LayerPtr& self, const ContextPtr& context, nb::handle x, nb::handle dy,
                  nb::handle weights, nb::handle out, bool accumulate,
                  std::optional<DType> grads_dtype, trace::Trace* trace) {
  Layer& layer = self->open("backward");
  const Context& saved = context->open("Layer.backward");
  auto call = read_call<BackwardCall>(self, layer, x, dy, weights, out, accumulate, grads_dtype);
  {
    const RunningPass running(*self->world);
    const nb::gil_scoped_release release;
    layer.backward(saved, call.inputs, call.outputs, trace);
  }
  return call.gradients;
}

// An array over heap memory. Its owner counts as a view of the world: the heap is neither moved nor
// freed while it lives.
nb::object input_buffer(const LayerPtr& self, std::int64_t rank) {
  const TensorView view = self->open("input_buffer").input_buffer(rank);
  using Owner = std::shared_ptr<WorldHandle>;
  ++self->world->views;
  const nb::capsule owner(new Owner(self->world), [](void* p) noexcept {
    const std::unique_ptr<Owner> world(static_cast<Owner*>(p));
    (*world)->view_released();
  });
  const std::size_t shape[2] = {static_cast<std::size_t>(view.shape.dim[0]),
                                static_cast<std::size_t>(view.shape.dim[1])};
  const bool is_f32 = view.dtype == DType::f32;
  if (!self->world->on_cuda) {
    const auto type = is_f32 ? nb::dtype<float>() : nb::dtype<std::uint16_t>();
    return nb::cast(nb::ndarray<nb::numpy>(view.data, 2, shape, owner, nullptr, type));
  }
  const auto type =
      is_f32 ? nb::dtype<float>()
             : nb::dlpack::dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  return nb::cast(
      nb::ndarray<>(view.data, 2, shape, owner, nullptr, type, nb::device::cuda::value));
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<ContextHandle>(m, "Context",
                            "What backward needs of one forward pass. Keeps its Layer alive; "
                            "several may be alive at a time.")
      .def_prop_ro(
          "num_bytes", [](ContextHandle& c) { return c.open("Context.num_bytes").num_bytes(); },
          "over all ranks")
      .def_prop_ro("layer", [](ContextHandle& c) { return c.layer; });
  nb::class_<LayerHandle>(
      m, "Layer",
      "One MoE layer over the ranks of a World: plan proven, memory allocated.\n\n"
      "Without a plan: the one that `moxie tune` stored for this problem and machine, else the "
      "planner's where it is sure, else default_plan's. Keeps its World alive. Raises "
      "InvalidArgumentError or InvalidPlanError.")
      .def(
          "__init__",
          [](LayerHandle* self, std::shared_ptr<WorldHandle> world, const Problem& problem,
             const std::optional<Plan>& plan) { new (self) LayerHandle(world, problem, plan); },
          nb::arg("world"), nb::arg("problem"), nb::arg("plan") = nb::none())
      .def_prop_ro("world", [](LayerHandle& l) { return l.world; })
      .def_prop_ro("problem", [](const LayerHandle& l) { return Problem(l.problem); })
      .def_prop_ro(
          "plan", [](const LayerHandle& l) { return Plan(l.plan); },
          "resolved: no zeros left but that of comm_workers")
      .def_prop_ro(
          "plan_source", [](const LayerHandle& l) { return l.plan_source; },
          "where the plan is from, and why not from a better place: one line for people")
      .def_prop_ro("closed", [](const LayerHandle& l) { return !l.layer.has_value(); })
      .def("forward", &forward, nb::kw_only(), nb::arg("x"), nb::arg("expert_ids"),
           nb::arg("route_weights"), nb::arg("weights"), nb::arg("out") = nb::none(),
           nb::arg("context") = nb::none(), nb::arg("trace") = nb::none(),
           nb::sig(kForwardSignature), kForwardDoc)
      .def("infer", &infer, nb::kw_only(), nb::arg("x"), nb::arg("expert_ids"),
           nb::arg("route_weights"), nb::arg("weights"), nb::arg("out") = nb::none(),
           nb::arg("trace") = nb::none(), nb::sig(kInferSignature),
           "As forward, but keeps nothing for backward. Returns the list of y.")
      .def("backward", &backward, nb::arg("context"), nb::kw_only(), nb::arg("x"), nb::arg("dy"),
           nb::arg("weights"), nb::arg("out") = nb::none(), nb::arg("accumulate") = false,
           nb::arg("grads_dtype") = nb::none(), nb::arg("trace") = nb::none(),
           nb::sig(kBackwardSignature), kBackwardDoc)
      .def(
          "make_context",
          [](const LayerPtr& self) {
            return std::make_shared<ContextHandle>(self, self->open("make_context").make_context());
          },
          nb::sig("def make_context(self) -> Context"),
          "A context for forward to fill, its memory allocated; so that no pass has to.")
      .def(
          "input_buffer", &input_buffer, nb::arg("rank"),
          nb::sig("def input_buffer(self, rank: int) -> typing.Any"),
          "[max_tokens, H] of the rank's heap, where a pass puts x for its peers to read.\n\n"
          "A pass whose x of that rank is its first T rows copies nothing. float32, or BF16 bits "
          "as uint16, on the CPU; an array with DLPack on CUDA. Overwritten by passes with another "
          "x. While it is alive, no layer that would move the heap can be made.")
      .def(
          "memory",
          [](LayerHandle& l) {
            nb::dict bytes;
            for (const BufferBytes& b : l.open("memory").memory())
              bytes[b.name.c_str()] = b.num_bytes;
            return bytes;
          },
          nb::sig("def memory(self) -> dict[str, int]"),
          "Bytes of one rank by buffer, and their total: forward and backward share addresses.")
      .def("close", &LayerHandle::close,
           "Frees the layer's memory and that of its contexts. Closing twice is legal.")
      .def("__enter__", [](nb::object self) { return self; })
      .def(
          "__exit__", [](LayerHandle& l, nb::handle, nb::handle, nb::handle) { l.close(); },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none())
      .def("__repr__", [](const LayerHandle& l) {
        return l.layer ? "<Layer " + to_string(l.problem) + ">" : std::string("<Layer closed>");
      });
}

}  // namespace moxie::python
