// One layer on the GPUs: workspaces, kernel parameters, launch.
#pragma once

#include <vector>

#include "moxie/backend_cuda/cuda_backend.h"
#include "moxie/backend_cuda/trace_buffers.h"

namespace moxie::backend_cuda {

// Saved by forward for the backward; one entry per rank.
struct CudaContext final : ContextState {
  struct Rank {
    DeviceBytes ids;       // i32 [T_max * K]
    DeviceBytes weights;   // f32 [T_max * K]
    DeviceBytes z;         // bf16 [saved blocks * 128, 2 I]
    DeviceBytes x;         // bf16 [saved blocks * 128, H]
    DeviceBytes shared_z;  // bf16 [T_max, 2 I_s]
  };
  std::vector<Rank> ranks;
};

class CudaLayer final : public BackendLayer {
 public:
  CudaLayer(CudaBackend& backend, const Problem& problem, const Plan& plan);
  ~CudaLayer() override;

  std::unique_ptr<ContextState> make_context() override;
  void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
               ContextState* context, trace::Trace* trace) override;
  void backward(const ContextState& context, std::span<const BackwardInput> inputs,
                std::span<const BackwardOutput> outputs, trace::Trace* trace) override;
  std::byte* input_buffer(std::int64_t rank) const override;

  // What the rank's last pass agreed on; after the pass.
  pipeline::Verdict last_verdict(std::int64_t rank) const;
  void clear_counters();  // pass count and both banks, when the world starts from zero
  void heaps_moved();

 private:
  void fill_common();
  void describe_rank(std::int64_t rank);
  void describe_weights(std::int64_t rank, const Weights& weights, const ConstTensorView& x);
  void bind_rank(std::int64_t rank, const ForwardInput& input, const ForwardOutput& output);
  void bind_context(std::int64_t rank, const CudaContext* context);
  ForwardKernel kernel_of(const DeviceGroup& group) const;
  void prepare_kernel(const DeviceGroup& group);
  void launch(const DeviceGroup& group, std::uint32_t phases, cudaStream_t stream);
  std::int32_t ctas_of(const DeviceGroup& group) const {
    return ctas_per_rank_[static_cast<std::size_t>(&group - backend_.groups().data())];
  }
  std::int32_t event_capacity(std::int32_t num_ctas) const;
  void poison(const CudaContext* fill, std::int64_t rank, cudaStream_t stream) const;

  CudaBackend& backend_;
  Problem problem_;
  Plan plan_;
  std::byte* workspace(std::int64_t rank) const { return workspaces_->of(rank); }
  std::unique_ptr<transport::RankBlocks> workspaces_;
  ForwardCommon common_{};
  std::vector<RankParams> ranks_;  // [R], those of this process filled; tensor maps are made again
                                   // only when a pointer changes
  std::vector<Weights> weights_;   // [R] the pointers in them
  std::vector<ConstTensorView> inputs_;  // [R] and x's, which the shared expert reads
  std::int32_t cluster_size_ = 1;
  std::vector<std::int32_t> ctas_per_rank_;  // [groups]
  TraceBuffers traces_;
};

}  // namespace moxie::backend_cuda
