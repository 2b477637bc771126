// The CPU twin: every rank is a group of threads, running the real protocol over heaps that all
// ranks see: those of one process, or of one process per rank over shared memory.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moxie/backend.h"
#include "moxie/backend_cpu/rank_run.h"
#include "moxie/transport/rendezvous.h"
#include "moxie/transport/shared_memory.h"

namespace moxie::backend_cpu {

struct CpuContext final : ContextState {
  std::vector<RankContext> ranks;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const WorldOptions& options);
  CpuBackend(const WorldOptions& options, const ProcessOptions& process);

  std::int64_t num_ranks() const override { return options_.num_ranks; }
  RankRange local_ranks() const override { return local_; }
  bool of_processes() const { return rendezvous_ != nullptr; }
  const WorldOptions& options() const override { return options_; }
  std::unique_ptr<BackendLayer> make_layer(const Problem& problem, const Plan& plan) override;
  bool stopped() const override { return stopped_; }
  void reset() override;
  void set_timeout(double seconds) override { options_.timeout_s = seconds; }
  void set_faults(const FaultInjection& faults) override { options_.faults = faults; }
  std::string describe_gemm() const override { return gemm_.description(); }
  MachineId machine() const override;

  // Heaps are shared by all layers; growing one starts its signals from zero again, which is legal
  // between passes.
  void reserve(const pipeline::HeapLayout& heap);
  // Every rank's memory of that size, all mapped here.
  std::vector<transport::SharedBytes> share(std::int64_t num_bytes, std::vector<std::byte*>& bases);
  void refuse_layer(const std::string& sentence) override;
  // Ranks as processes must make the same layers. Throws on every rank.
  void check_same_layer(const Problem& problem, const Plan& plan);

  const expert::HostGemmEngine& gemm() const { return gemm_; }
  transport::PeerMemory peers() const {
    return of_processes() ? transport::PeerMemory{heap_bases_} : heaps_.memory();
  }
  std::uint64_t generation() const {
    return generation_;
  }  // changes whenever signals and counters start from zero
  void stop() { stopped_ = true; }
  // Of the last pass that this rank refused, since signals started from zero; 0: none.
  std::uint64_t refused_epoch() const { return refused_epoch_; }
  void remember_refused(std::uint64_t epoch) { refused_epoch_ = epoch; }

 private:
  void meet(const char* what) {
    if (of_processes()) rendezvous_->all_gather(what, "here", {}, options_.timeout_s);
  }
  void clear_signals();
  void begin_generation() {
    ++generation_;
    refused_epoch_ = 0;
  }

  WorldOptions options_;
  RankRange local_{0, options_.num_ranks};
  expert::HostGemmEngine gemm_;
  transport::InProcessHeaps heaps_;
  std::unique_ptr<transport::Rendezvous> rendezvous_;  // ranks as processes only, as these:
  std::vector<transport::SharedBytes> shared_heaps_;   // [R]
  std::vector<std::byte*> heap_bases_;                 // [R]
  std::int64_t shared_heap_bytes_ = 0;
  std::int64_t signals_bytes_ = 0;
  std::uint64_t generation_ = 1, refused_epoch_ = 0;
  bool stopped_ = false;
};

class CpuLayer final : public BackendLayer {
 public:
  CpuLayer(CpuBackend& backend, const Problem& problem, const Plan& plan);
  std::unique_ptr<ContextState> make_context() override;
  void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
               ContextState* context, trace::Trace* trace) override;
  void backward(const ContextState& context, std::span<const BackwardInput> inputs,
                std::span<const BackwardOutput> outputs, trace::Trace* trace) override;
  void refuse_pass(const std::string& why) override;
  std::byte* input_buffer(std::int64_t rank) const override;
  std::vector<pipeline::NamedBytes> memory() const override {
    return pipeline::buffer_bytes(shape_.problem, shape_.plan);
  }

 private:
  std::int64_t workers_per_rank() const {
    return shape_.comm_workers + shape_.plan.compute_workers;
  }
  std::byte* scratch(std::int64_t rank, std::int64_t worker) const {
    // rank: of this process, from 0
    return scratch_.get() + (rank * workers_per_rank() + worker) * scratch_bytes_;
  }
  template <class T>
  void run(Direction direction, const std::function<void(RankPass<T>&)>& bind, trace::Trace* trace);
  template <class T>
  void throw_if_failed(const std::vector<RankRun<T>>& runs);
  void poison(CpuContext* fill, const std::function<const void*(std::size_t)>& x);
  void clear_counters();

  CpuBackend& backend_;
  LayerShape shape_;
  std::vector<transport::AlignedBytes> workspaces_;        // [R]  ranks of one process
  std::vector<transport::SharedBytes> shared_workspaces_;  // [R]  ranks as processes
  std::vector<std::byte*> workspace_bases_;                // [R]
  transport::AlignedBytes scratch_;
  std::int64_t scratch_bytes_ = 0;  // per worker
  std::uint64_t generation_ = 0;    // of the world when the counters last started from zero
};

}  // namespace moxie::backend_cpu
