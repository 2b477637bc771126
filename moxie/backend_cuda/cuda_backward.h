// The host side of the fused backward: kernel parameters from the caller's tensors and a context,
// and the launch.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "moxie/backend_cuda/backward_params.h"
#include "moxie/backend_cuda/cuda_pass.h"

namespace moxie::backend_cuda {

class BackwardPass final : public CudaPass {
 public:
  // Throws invalid_plan, invalid_argument or unavailable for what the kernel cannot do.
  explicit BackwardPass(const LayerMemory& memory);

  void heaps_moved() { describe_common(common_); }
  // One launch, in every plan. The context is this layer's and was filled.
  void run(const CudaContext& context, std::span<const BackwardInput> inputs,
           std::span<const BackwardOutput> outputs, trace::Trace* trace);

 private:
  struct KnownMaps {
    std::optional<MapKey> weights, grads, tokens, context;
  };

  void describe_rank(std::int64_t rank);
  void describe_weights(std::int64_t rank, const Weights& weights);
  void describe_grads(std::int64_t rank, const WeightGrads& grads);
  void describe_tokens(std::int64_t rank, const BackwardInput& input);
  void describe_context(std::int64_t rank, const CudaContext::Rank& context);
  void bind_grad_kind(std::span<const BackwardOutput> outputs);
  void bind_rank(std::int64_t rank, const CudaContext& context, const BackwardInput& input,
                 const BackwardOutput& output);
  std::int64_t num_events() const;
  std::int64_t num_experts(std::int64_t rank) const {
    return num_local_experts(memory_.problem.num_experts, memory_.problem.num_ranks, RankId{rank});
  }

  BackwardCommon common_{};
  std::vector<BackwardRank> ranks_;  // [R]
  std::vector<KnownMaps> known_;     // [R]
};

}  // namespace moxie::backend_cuda
