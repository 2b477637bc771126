// A layer case of tests/support on the GPUs: copied there, run through World::cuda, copied back, so
// that the same judge decides. Virtual ranks on GPU 0 unless told otherwise.
#pragma once

#include <list>
#include <vector>

#include "moxie/moxie.h"
#include "tests/gpu/gpu_test.h"
#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {

// Waits end long before a test runner loses patience; the workspace is poisoned before each pass.
inline WorldOptions cuda_options(std::int64_t num_ranks) {
  WorldOptions options;
  options.num_ranks = num_ranks;
  options.timeout_s = 10;
  options.faults.poison_workspace = true;
  return options;
}
inline CudaOptions on_gpu_0(std::int64_t num_ranks) {
  CudaOptions cuda;
  cuda.devices.assign(static_cast<std::size_t>(num_ranks), 0);
  return cuda;
}

// Bytes of a view, 0 of an absent one.
template <class View>
std::size_t bytes_of(const View& view) {
  return view.absent()
             ? 0
             : static_cast<std::size_t>(view.shape.num_elements() * size_bytes(view.dtype));
}

// One pass, or forward and backward, of a case on these GPUs in a world of its own.
template <class OnDevice>
PassOutputs run_in_own_world(OnDevice& on_device, const LayerCase& c,
                             const std::vector<int>& devices, const Plan& plan,
                             std::int32_t reserve_sms, std::int32_t cluster_size) {
  World world = World::cuda(cuda_options(c.num_ranks()), {devices, reserve_sms, cluster_size});
  Layer layer(world, c.problem(), plan);
  return on_device.run(world, layer);
}

class DeviceCase {
 public:
  explicit DeviceCase(const LayerCase& c, std::vector<int> devices = {})
      : case_(c), devices_(std::move(devices)) {
    devices_.resize(static_cast<std::size_t>(c.num_ranks()), 0);
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      cudaSetDevice(devices_[r]);
      ForwardInput in = c.forward_inputs()[r];
      in.x = copy(in.x);
      in.expert_ids = copy(in.expert_ids);
      in.route_weights = copy(in.route_weights);
      for (const Part& part : kParts) {
        if (!(in.weights.*part.weight).absent())
          in.weights.*part.weight = copy(in.weights.*part.weight);
      }
      inputs_.push_back(in);
      const Shape shape{in.x.shape.dim[0], c.problem().hidden};
      buffers_.emplace_back(static_cast<std::size_t>(shape.num_elements() * 2));
      outputs_.push_back({TensorView(buffers_.back().get(), DType::bf16, shape)});
    }
    cudaSetDevice(0);
  }

  const std::vector<ForwardInput>& inputs() const { return inputs_; }
  const std::vector<ForwardOutput>& outputs() const { return outputs_; }

  // The host case's x, ids and weights of the routes again, in place: a captured graph reads them.
  void upload() {
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      const ForwardInput in = case_.forward_inputs()[r];
      refresh(inputs_[r].x, in.x);
      refresh(inputs_[r].expert_ids, in.expert_ids);
      refresh(inputs_[r].route_weights, in.route_weights);
    }
  }
  void poison_outputs() {
    for (const ForwardOutput& out : outputs_) cudaMemset(out.y.data, 0xFF, bytes_of(out.y));
  }
  PassOutputs download() const {
    PassOutputs out(case_);
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      cudaMemcpy(out.ranks[r].y.view().data, outputs_[r].y.data, bytes_of(outputs_[r].y),
                 cudaMemcpyDeviceToHost);
    }
    return out;
  }

  // One pass into poisoned outputs. With `save`, z (and x) are kept for a backward.
  PassOutputs run(World& world, Layer& layer, bool save = false) {
    poison_outputs();
    if (save) {
      const Context context = layer.forward(inputs_, outputs_);
      world.synchronize();
    } else {
      layer.infer(inputs_, outputs_);
      world.synchronize();
    }
    return download();
  }
  // The same in a world of its own.
  PassOutputs run_alone(const Plan& plan = {}, std::int32_t reserve_sms = 0,
                        std::int32_t cluster_size = 0) {
    return run_in_own_world(*this, case_, devices_, plan, reserve_sms, cluster_size);
  }

 private:
  ConstTensorView copy(const ConstTensorView& host) {
    buffers_.emplace_back(bytes_of(host));
    cudaMemcpy(buffers_.back().get(), host.data, bytes_of(host), cudaMemcpyHostToDevice);
    return {buffers_.back().get(), host.dtype, host.shape};
  }
  static void refresh(const ConstTensorView& device, const ConstTensorView& host) {
    cudaMemcpy(const_cast<void*>(device.data), host.data, bytes_of(host), cudaMemcpyHostToDevice);
  }

  const LayerCase& case_;
  std::vector<int> devices_;
  std::list<testing::DeviceBuffer<std::byte>> buffers_;
  std::vector<ForwardInput> inputs_;
  std::vector<ForwardOutput> outputs_;
};

}  // namespace moxie::test
