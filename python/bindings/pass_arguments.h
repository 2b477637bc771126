// From the per-rank Python lists of a pass to the spans that Layer takes, and the results back.
#pragma once
#include <optional>
#include <vector>

#include "python/bindings/arrays.h"
#include "python/bindings/handles.h"

namespace moxie::python {

struct ForwardCall {
  ForwardCall(const LayerHandle& layer, nb::handle x, nb::handle expert_ids,
              nb::handle route_weights, nb::handle weights, nb::handle out);
  PassArrays arrays;
  std::vector<ForwardInput> inputs;
  std::vector<ForwardOutput> outputs;
  nb::list y;  // what the caller gets
};

struct BackwardCall {
  BackwardCall(const LayerHandle& layer, nb::handle x, nb::handle dy, nb::handle weights,
               nb::handle out, bool accumulate, std::optional<DType> grads_dtype);
  PassArrays arrays;
  std::vector<BackwardInput> inputs;
  std::vector<BackwardOutput> outputs;
  nb::list gradients;  // of moxie.Gradients
};

}  // namespace moxie::python
