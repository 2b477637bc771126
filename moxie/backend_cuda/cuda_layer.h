// One layer on the GPUs: its memory, its contexts, and a pass in each direction.
#pragma once

#include <memory>
#include <optional>

#include "moxie/backend_cuda/cuda_backward.h"
#include "moxie/backend_cuda/cuda_forward.h"

namespace moxie::backend_cuda {

class CudaLayer final : public BackendLayer {
 public:
  CudaLayer(CudaBackend& backend, const Problem& problem, const Plan& plan);
  ~CudaLayer() override;

  // Throws what only the backward cannot do; a layer that never makes a context need not be able
  // to.
  std::unique_ptr<ContextState> make_context() override;
  void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
               ContextState* context, trace::Trace* trace) override;
  void backward(const ContextState& context, std::span<const BackwardInput> inputs,
                std::span<const BackwardOutput> outputs, trace::Trace* trace) override;
  std::byte* input_buffer(std::int64_t rank) const override { return memory_.input_buffer(rank); }
  std::vector<pipeline::NamedBytes> memory() const override;

  // What the rank's last pass agreed on; after the pass.
  pipeline::Verdict last_verdict(std::int64_t rank) const;
  void clear_counters();  // pass count and both banks, when the world starts from zero
  void heaps_moved();

 private:
  void prepare_backward();

  LayerMemory memory_;
  ForwardPass forward_;
  std::optional<BackwardPass> backward_;
  std::optional<Error> no_backward_;  // why not
};

}  // namespace moxie::backend_cuda
