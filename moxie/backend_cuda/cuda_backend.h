// The CUDA backend, host side: which rank runs on which GPU, heaps that all of them see, streams,
// failures. Layers (cuda_layer.cu) fill in kernel parameters and launch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moxie/backend.h"
#include "moxie/backend_cuda/cuda_memory.h"
#include "moxie/backend_cuda/pass_params.h"
#include "moxie/transport/gpu_ranks.h"

namespace moxie::backend_cuda {

// The ranks of one GPU, which share one launch.
struct DeviceGroup {
  int device = 0;
  std::vector<std::int64_t> ranks;
  cudaStream_t stream =
      nullptr;  // of every GPU but the first: orders this GPU's launches after the first one's
  cudaEvent_t event = nullptr;
};

class CudaLayer;

// The GPUs of the ranks of World::cuda, checked; one per rank.
std::vector<int> choose_devices(const WorldOptions& options, const CudaOptions& cuda);
// The GPU of a rank that has a process of its own; -1: the current one.
int choose_device(const WorldOptions& options, int device);

class CudaBackend final : public Backend {
 public:
  // `devices`: of the ranks `local`, which `ranks` holds together with all others.
  CudaBackend(const WorldOptions& options, const CudaOptions& cuda, std::vector<int> devices,
              RankRange local, std::unique_ptr<transport::GpuRanks> ranks);
  ~CudaBackend() override;

  std::int64_t num_ranks() const override { return options_.num_ranks; }
  RankRange local_ranks() const override { return local_; }
  const WorldOptions& options() const override { return options_; }
  std::unique_ptr<BackendLayer> make_layer(const Problem& problem, const Plan& plan) override;
  void refuse_layer(const std::string& sentence) override;
  bool stopped() const override;
  void reset() override;
  void set_timeout(double seconds) override { options_.timeout_s = seconds; }
  void set_faults(const FaultInjection& faults) override { options_.faults = faults; }
  std::string describe_gemm() const override;
  MachineId machine() const override;
  void set_stream(void* stream) override { stream_ = static_cast<cudaStream_t>(stream); }
  void synchronize() override;

  // For layers.
  const std::vector<DeviceGroup>& groups() const { return groups_; }
  bool of_processes() const { return ranks_->of_processes(); }
  const std::vector<std::int64_t>& ranks_here() const { return ranks_here_; }
  std::size_t idx_here(std::int64_t rank) const {
    return static_cast<std::size_t>(rank - local_.begin);
  }
  int device_of(std::int64_t rank) const { return devices_[idx_here(rank)]; }  // of this process
  const CudaOptions& cuda() const { return cuda_; }
  cudaStream_t stream() const { return stream_; }
  std::byte* heap(std::int64_t rank) const { return heaps_->of(rank); }
  std::uint32_t* abort_flag() const {
    return reinterpret_cast<std::uint32_t*>(abort_words_->of(0));
  }
  // One for every rank; peers see them only where they write there. Where ranks are processes all
  // of them call it at once.
  std::unique_ptr<transport::RankBlocks> make_workspaces(std::int64_t num_bytes, const Plan& plan);
  device::ExpiredWait* expired() const { return expired_.device_pointer(); }
  PassReport* report(std::int64_t rank) const { return reports_.device_pointer() + rank; }
  // GPU memory of one rank that is there once for the world, beside the heap.
  std::vector<pipeline::NamedBytes> world_bytes() const {
    return {{"world.abort_words", abort_words_->num_bytes()},
            {"world.board", ranks_->meeting_bytes()}};
  }
  void attach(CudaLayer* layer) { layers_.push_back(layer); }
  void detach(CudaLayer* layer);
  void reserve(const pipeline::HeapLayout& heap);
  // The pass just enqueued, for the sentences of its errors.
  void remember(const Problem& problem, const Plan& plan, const CudaLayer* layer) {
    problem_ = problem, plan_ = plan, last_layer_ = layer;
  }

 private:
  void find_groups();
  void enable_peers();
  std::vector<std::string> meet(const char* what, const std::string& text);
  std::unique_ptr<transport::RankBlocks> allocate(std::int64_t num_bytes, const char* what,
                                                  transport::SeenBy seen_by);
  void clear_words();
  void throw_if_failed();
  void throw_if_called_off(const PassReport& report, std::int64_t rank);
  void synchronize_devices() const;
  void clear_abort_flag();

  WorldOptions options_;
  CudaOptions cuda_;
  RankRange local_;
  std::vector<int> devices_;              // of the ranks of this process
  std::vector<std::int64_t> ranks_here_;  // those ranks
  std::unique_ptr<transport::GpuRanks> ranks_;
  std::vector<DeviceGroup> groups_;
  std::unique_ptr<transport::RankBlocks> heaps_;
  std::int64_t heap_bytes_ = 0, signals_bytes_ = 0;
  // u32 [1 + R] of rank 0: the flag that every wait of every GPU looks at, and each rank's claim.
  std::unique_ptr<transport::RankBlocks> abort_words_;
  MappedHost<device::ExpiredWait> expired_;  // [R]
  MappedHost<PassReport> reports_;           // [R]
  std::vector<CudaLayer*> layers_;
  cudaStream_t stream_ = nullptr;
  Problem problem_;
  Plan plan_;
  const CudaLayer* last_layer_ = nullptr;  // of the last pass; null: none, or it is gone
  bool called_off_ = false;  // making a layer: the other ranks know already that it fails
};

}  // namespace moxie::backend_cuda
