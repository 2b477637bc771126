// Backend: what World and Layer ask of a machine. The CPU twin implements it with threads, CUDA with one kernel.
// Everything that decides what happens in which order lives in pipeline/, not here.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moxie/moxie.h"

namespace moxie {

struct ContextState {
  virtual ~ContextState() = default;
  const void* owner = nullptr;  // the BackendLayer that made it
  bool filled = false;          // a forward pass has completed into it
  std::vector<std::int64_t> num_tokens;  // [R] of that pass
  std::int64_t num_bytes = 0;   // over all ranks
};

class BackendLayer {
 public:
  virtual ~BackendLayer() = default;
  virtual std::unique_ptr<ContextState> make_context() = 0;
  // context == nullptr: save nothing. Inputs were checked by the caller.
  virtual void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                       ContextState* context, trace::Trace* trace) = 0;
  virtual void backward(const ContextState& context, std::span<const BackwardInput> inputs,
                        std::span<const BackwardOutput> outputs, trace::Trace* trace) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::int64_t num_ranks() const = 0;
  virtual const WorldOptions& options() const = 0;
  // problem and plan are checked and resolved.
  virtual std::unique_ptr<BackendLayer> make_layer(const Problem& problem, const Plan& plan) = 0;
  virtual bool stopped() const = 0;
  virtual void reset() = 0;
  virtual void set_timeout(double seconds) = 0;
  virtual void set_faults(const FaultInjection& faults) = 0;
  virtual std::string describe_gemm() const = 0;

  std::atomic<bool> pass_running{false};
};

std::unique_ptr<Backend> make_cpu_backend(const WorldOptions& options);

}  // namespace moxie
