// The host side of the fused forward: kernel parameters from the caller's tensors, and the launch.
#pragma once

#include <optional>
#include <vector>

#include "moxie/backend_cuda/cuda_pass.h"
#include "moxie/backend_cuda/forward_params.h"

namespace moxie::backend_cuda {

class ForwardPass final : public CudaPass {
 public:
  explicit ForwardPass(const LayerMemory& memory);

  void heaps_moved() { describe_common(common_); }
  // context == nullptr: saves nothing.
  void run(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
           const CudaContext* context, trace::Trace* trace);

 private:
  void describe_rank(std::int64_t rank);
  void describe_weights(std::int64_t rank, const Weights& weights, const ConstTensorView& x);
  void bind_rank(std::int64_t rank, const ForwardInput& input, const ForwardOutput& output);
  void bind_context(std::int64_t rank, const CudaContext* context);
  void poison(std::int64_t rank, const CudaContext* context, cudaStream_t stream) const;
  std::int64_t num_events() const;

  ForwardCommon common_{};
  std::vector<ForwardRank> ranks_;            // [R]
  std::vector<std::optional<MapKey>> known_;  // [R] of the operands: weights, and x if shared rows
};

}  // namespace moxie::backend_cuda
