// Forward and backward of a layer case on the GPUs: what DeviceCase has, dY and every gradient
// there, so that the judge of the CPU twin decides. Nothing is read that no pass wrote: outputs are
// 0xFF before each run.
#pragma once

#include <functional>

#include "tests/gpu/device_case.h"

namespace moxie::test {

class BackwardCase {
 public:
  explicit BackwardCase(const LayerCase& c, std::vector<int> devices = {},
                        DType grad_dtype = DType::f32)
      : case_(c), forward_(c, devices), devices_(std::move(devices)), grad_dtype_(grad_dtype) {
    devices_.resize(static_cast<std::size_t>(c.num_ranks()), 0);
    PassOutputs host(c, grad_dtype);
    std::vector<BackwardOutput> host_outputs = host.backward();
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      cudaSetDevice(devices_[r]);
      BackwardInput in = c.backward_inputs()[r];
      in.x = forward_.inputs()[r].x;
      in.weights = forward_.inputs()[r].weights;
      in.dy.data = allocate(bytes_of(in.dy));
      inputs_.push_back(in);
      outputs_.push_back({});
      for_each_pair(host_outputs[r], outputs_[r], [&](const TensorView& there, TensorView& here) {
        here = there;
        here.data = allocate(bytes_of(there));
      });
    }
    cudaSetDevice(0);
    upload_dy();
  }

  const std::vector<ForwardInput>& forward_inputs() const { return forward_.inputs(); }
  const std::vector<ForwardOutput>& forward_outputs() const { return forward_.outputs(); }
  const std::vector<BackwardInput>& inputs() const { return inputs_; }
  std::vector<BackwardOutput> outputs(bool accumulate = false) const {
    std::vector<BackwardOutput> out = outputs_;
    for (BackwardOutput& o : out) o.grads.accumulate = accumulate;
    return out;
  }

  // The host case's x, dY and routes again, in place: a captured graph reads them.
  void upload() {
    forward_.upload();
    upload_dy();
  }
  void poison_outputs() {
    forward_.poison_outputs();
    for (BackwardOutput& out : outputs_)
      for_each_pair(out, out, [](const TensorView&, TensorView& view) {
        cudaMemset(view.data, 0xFF, bytes_of(view));
      });
  }
  // Gradients that already hold something.
  void upload_grads(PassOutputs& host) {
    std::vector<BackwardOutput> from = host.backward();
    for (std::size_t r = 0; r < outputs_.size(); ++r)
      for_each_pair(from[r], outputs_[r], [](const TensorView& there, TensorView& here) {
        cudaMemcpy(here.data, there.data, bytes_of(here), cudaMemcpyHostToDevice);
      });
  }
  PassOutputs download() const {
    PassOutputs host(case_, grad_dtype_);
    std::vector<BackwardOutput> to = host.backward(), from = outputs_;
    for (std::size_t r = 0; r < from.size(); ++r) {
      const TensorView y = forward_.outputs()[r].y;
      cudaMemcpy(host.ranks[r].y.view().data, y.data, bytes_of(y), cudaMemcpyDeviceToHost);
      for_each_pair(from[r], to[r], [](const TensorView& there, TensorView& here) {
        cudaMemcpy(here.data, there.data, bytes_of(here), cudaMemcpyDeviceToHost);
      });
    }
    return host;
  }

  // Forward and backward into poisoned outputs.
  PassOutputs run(World& world, Layer& layer) {
    Context context = layer.make_context();
    return run(world, layer, context);
  }
  PassOutputs run(World& world, Layer& layer, Context& context) {
    poison_outputs();
    layer.forward(forward_inputs(), forward_outputs(), context);
    layer.backward(context, inputs_, outputs_);
    world.synchronize();
    return download();
  }
  // The same in a world of its own.
  PassOutputs run_alone(const Plan& plan = {}, std::int32_t reserve_sms = 0,
                        std::int32_t cluster_size = 0) {
    return run_in_own_world(*this, case_, devices_, plan, reserve_sms, cluster_size);
  }

 private:
  template <class Call>
  static void for_each_pair(BackwardOutput& a, BackwardOutput& b, const Call& call) {
    call(a.dx, b.dx);
    call(a.d_route_weights, b.d_route_weights);
    for (const Part& part : kParts) {
      if (!(a.grads.*part.grad).absent()) call(a.grads.*part.grad, b.grads.*part.grad);
    }
  }
  void* allocate(std::size_t num_bytes) {
    buffers_.emplace_back(num_bytes);
    return buffers_.back().get();
  }
  void upload_dy() {
    for (std::size_t r = 0; r < inputs_.size(); ++r) {
      const ConstTensorView host = case_.backward_inputs()[r].dy;
      cudaMemcpy(const_cast<void*>(inputs_[r].dy.data), host.data, bytes_of(host),
                 cudaMemcpyHostToDevice);
    }
  }

  const LayerCase& case_;
  DeviceCase forward_;
  std::vector<int> devices_;
  DType grad_dtype_;
  std::list<testing::DeviceBuffer<std::byte>> buffers_;
  std::vector<BackwardInput> inputs_;
  std::vector<BackwardOutput> outputs_;
};

inline LayerCase bf16_case(Problem problem, std::vector<std::int64_t> tokens,
                           Routing routing = Routing::uniform) {
  problem.dtype = DType::bf16;
  for (const std::int64_t t : tokens) problem.max_tokens = std::max(problem.max_tokens, t);
  CaseSpec spec;
  spec.problem = problem;
  spec.tokens = std::move(tokens);
  spec.routing = routing;
  return LayerCase(spec, test_seed());
}
inline Problem bf16_problem(std::int64_t num_ranks, std::int64_t num_experts, std::int64_t top_k,
                            std::int64_t hidden = 256, std::int64_t intermediate = 192) {
  return small_problem(num_ranks, num_experts, top_k, hidden, intermediate, DType::bf16);
}

}  // namespace moxie::test
