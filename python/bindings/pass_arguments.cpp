#include "python/bindings/pass_arguments.h"

#include "python/bindings/parts.h"

namespace moxie::python {
namespace {

nb::object python_class(const char* name) {
  return nb::module_::import_("moxie._weights").attr(name);
}

void require_class(nb::handle object, const nb::object& type, const char* name, std::int64_t rank) {
  if (nb::isinstance(object, type)) return;
  raise("ArgumentTypeError",
        fmt::format("{} of rank {} is of type {}, must be moxie.{}", name, rank,
                    python_type(object), nb::cast<std::string>(nb::str(type.attr("__name__")))));
}

Weights read_weights(PassArrays& arrays, nb::handle object, const nb::object& type,
                     std::int64_t rank, DType dtype) {
  require_class(object, type, "weights", rank);
  Weights weights;
  for (const Part& part : kParts)
    weights.*part.weight = arrays.read(object.attr(part.name), part.weight_name, rank, {dtype});
  return weights;
}

// The caller's array, or a new one.
nb::object given_or_empty(nb::object given, const Shape& shape, nb::handle like, const char* name) {
  return given.is_none() ? empty_array(shape, like, name) : given;
}

Shape like_rows(const ConstTensorView& x, std::int64_t columns) {
  return {x.shape.rank > 0 ? x.shape.dim[0] : 0, columns};
}

}  // namespace

ForwardCall::ForwardCall(const LayerHandle& layer, nb::handle x, nb::handle expert_ids,
                         nb::handle route_weights, nb::handle weights, nb::handle out)
    : arrays(layer.world->on_cuda) {
  const Problem& p = layer.problem;
  const RankRange local = layer.world->local;
  const auto xs = per_rank(x, "x", local.count);
  const auto ids = per_rank(expert_ids, "expert_ids", local.count);
  const auto ws = per_rank(route_weights, "route_weights", local.count);
  const auto parts = per_rank(weights, "weights", local.count);
  const auto ys = out.is_none() ? std::vector<nb::object>(xs.size(), nb::none())
                                : per_rank(out, "out", local.count);
  const nb::object type = python_class("Weights");
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const std::int64_t rank = local.begin + static_cast<std::int64_t>(i);
    ForwardInput in;
    in.x = arrays.read(xs[i], "x", rank, {p.dtype});
    in.expert_ids = arrays.read(ids[i], "expert_ids", rank, {DType::i32, DType::i64});
    in.route_weights = arrays.read(ws[i], "route_weights", rank, {DType::f32});
    in.weights = read_weights(arrays, parts[i], type, rank, p.dtype);
    const nb::object result = given_or_empty(ys[i], like_rows(in.x, p.hidden), xs[i], "y");
    outputs.push_back({arrays.write(result, "y", rank, {p.dtype})});
    inputs.push_back(in);
    y.append(result);
  }
  arrays.check_overlaps();
}

BackwardCall::BackwardCall(const LayerHandle& layer, nb::handle x, nb::handle dy,
                           nb::handle weights, nb::handle out, bool accumulate,
                           std::optional<DType> grads_dtype)
    : arrays(layer.world->on_cuda) {
  const Problem& p = layer.problem;
  const RankRange local = layer.world->local;
  const auto xs = per_rank(x, "x", local.count);
  const auto dys = per_rank(dy, "dy", local.count);
  const auto parts = per_rank(weights, "weights", local.count);
  const auto outs = out.is_none() ? std::vector<nb::object>(xs.size(), nb::none())
                                  : per_rank(out, "out", local.count);
  const nb::object weights_class = python_class("Weights"),
                   result_class = python_class("Gradients");
  const std::vector<DType> matrix_types =
      p.dtype == DType::f32 ? std::vector{DType::f32} : std::vector{DType::f32, p.dtype};
  if (grads_dtype && *grads_dtype != DType::f32 && *grads_dtype != p.dtype) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("grads_dtype is {}, must be f32 or problem.dtype {}; nearest legal "
                            "value f32",
                            name(*grads_dtype), name(p.dtype)));
  }
  const bool narrow = grads_dtype && *grads_dtype != DType::f32;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const std::int64_t rank = local.begin + static_cast<std::int64_t>(i);
    const std::int64_t num_local = num_local_experts(p.num_experts, p.num_ranks, RankId{rank});
    BackwardInput in;
    in.x = arrays.read(xs[i], "x", rank, {p.dtype});
    in.dy = arrays.read(dys[i], "dy", rank, {p.dtype});
    in.weights = read_weights(arrays, parts[i], weights_class, rank, p.dtype);
    const nb::object result = outs[i].is_none() ? result_class() : outs[i];
    require_class(result, result_class, "out", rank);
    BackwardOutput o;
    const auto bind = [&](nb::handle holder, const char* field, const char* sentence_name,
                          const Shape& shape, nb::handle like, const std::vector<DType>& types) {
      const nb::object array = given_or_empty(holder.attr(field), shape, like, sentence_name);
      nb::setattr(holder, field, array);
      return arrays.write(array, sentence_name, rank, types);
    };
    o.dx = bind(result, "dx", "dx", like_rows(in.x, p.hidden), xs[i], {p.dtype});
    o.d_route_weights = bind(result, "d_route_weights", "d_route_weights", like_rows(in.x, p.top_k),
                             nb::none(), {DType::f32});
    if (nb::getattr(result, "weights").is_none()) nb::setattr(result, "weights", weights_class());
    const nb::object grads = result.attr("weights");
    require_class(grads, weights_class, "out.weights", rank);
    o.grads.accumulate = accumulate;
    for (const Part& part : kParts) {
      const nb::object given = grads.attr(part.name);
      if (given.is_none() && !part.exists(p)) continue;
      if (given.is_none() && accumulate) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("{} of rank {} is absent with accumulate, must be the array that "
                                "gradients are added to",
                                part.grad_name, rank));
      }
      const nb::object like =
          narrow && part.is_matrix ? parts[i].attr(part.name) : nb::object(nb::none());
      o.grads.*part.grad = bind(grads, part.name, part.grad_name, part.shape(p, num_local), like,
                                part.is_matrix ? matrix_types : std::vector{DType::f32});
    }
    inputs.push_back(in);
    outputs.push_back(o);
    gradients.append(result);
  }
  arrays.check_overlaps();
}

}  // namespace moxie::python
