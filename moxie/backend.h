// Backend: what World and Layer ask of a machine. The CPU twin implements it with threads, CUDA
// with one kernel. Everything that decides what happens in which order lives in pipeline/, not
// here.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moxie/moxie.h"
#include "moxie/pipeline/layout.h"

namespace moxie {

struct ContextState {
  virtual ~ContextState() = default;
  std::uint64_t layer_id = 0;            // of the BackendLayer that made it
  bool filled = false;                   // a forward pass has completed into it
  std::vector<std::int64_t> num_tokens;  // [R] of that pass
  std::int64_t num_bytes = 0;            // over all ranks
};

class BackendLayer {
 public:
  BackendLayer() : id(next_id()) {}
  virtual ~BackendLayer() = default;
  virtual std::unique_ptr<ContextState> make_context() = 0;
  // context == nullptr: save nothing. Inputs were checked by the caller.
  virtual void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                       ContextState* context, trace::Trace* trace) = 0;
  virtual void backward(const ContextState& context, std::span<const BackwardInput> inputs,
                        std::span<const BackwardOutput> outputs, trace::Trace* trace) = 0;
  // This rank will not run the pass that its peers run, if ranks are processes: they shall hear
  // why. Does not throw.
  virtual void refuse_pass(const std::string&) {}
  // [T_max, H] where stage puts x of a rank; it copies nothing if the caller's x is there already.
  virtual std::byte* input_buffer(std::int64_t rank) const = 0;
  // Every buffer of one rank, and last their "total". Of the layer's own size where the world's
  // heap is larger.
  virtual std::vector<pipeline::NamedBytes> memory() const = 0;

  const std::uint64_t id;  // never used twice in a process: a context outlives its layer without
                           // mistaking another for it

 private:
  static std::uint64_t next_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::int64_t num_ranks() const = 0;
  virtual RankRange local_ranks() const { return {0, num_ranks()}; }
  virtual const WorldOptions& options() const = 0;
  // problem and plan are checked and resolved.
  virtual std::unique_ptr<BackendLayer> make_layer(const Problem& problem, const Plan& plan) = 0;
  // A rank that will not make a layer, because it is illegal there: where ranks are processes, the
  // others wait to hear of it.
  virtual void refuse_layer(const std::string&) {}
  virtual bool stopped() const = 0;
  virtual void reset() = 0;
  virtual void set_timeout(double seconds) = 0;
  virtual void set_faults(const FaultInjection& faults) = 0;
  virtual std::string describe_gemm() const = 0;
  virtual MachineId machine() const = 0;
  virtual void set_stream(void*) {}  // for backends whose passes are asynchronous, as the next one
  virtual void synchronize() {}

  std::atomic<bool> pass_running{false};
};

// Everything that the ranks of a layer must agree on, as words that a sentence can show.
std::string layer_words(const Problem& problem, const Plan& plan);
// Where ranks are processes: throws when `words`, one of each rank, are not all alike, and when the
// plan needs what a peer cannot reach.
void check_same_layer(const std::vector<std::string>& words, const Plan& plan);

std::unique_ptr<Backend> make_cpu_backend(const WorldOptions& options);
std::unique_ptr<Backend> make_cpu_process_backend(const WorldOptions& options,
                                                  const ProcessOptions& process);
std::unique_ptr<Backend> make_cuda_backend(const WorldOptions& options,
                                           const CudaOptions& cuda);  // with MOXIE_HAS_CUDA
std::unique_ptr<Backend> make_nccl_backend(const WorldOptions& options,
                                           const NcclOptions& nccl);  // with MOXIE_HAS_NCCL
std::string make_nccl_unique_id(const std::string& library);          // likewise

}  // namespace moxie
