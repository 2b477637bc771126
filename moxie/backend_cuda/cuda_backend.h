// The CUDA backend, host side: which rank runs on which GPU, heaps that all of them see, streams,
// failures. Layers (cuda_layer.cu) fill in kernel parameters and launch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moxie/backend.h"
#include "moxie/backend_cuda/cuda_memory.h"
#include "moxie/backend_cuda/pass_params.h"

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

class CudaBackend final : public Backend {
 public:
  CudaBackend(const WorldOptions& options, const CudaOptions& cuda);
  ~CudaBackend() override;

  std::int64_t num_ranks() const override { return options_.num_ranks; }
  const WorldOptions& options() const override { return options_; }
  std::unique_ptr<BackendLayer> make_layer(const Problem& problem, const Plan& plan) override;
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
  int device_of(std::int64_t rank) const { return devices_[static_cast<std::size_t>(rank)]; }
  const CudaOptions& cuda() const { return cuda_; }
  cudaStream_t stream() const { return stream_; }
  std::byte* heap(std::int64_t rank) const { return heaps_[static_cast<std::size_t>(rank)].get(); }
  std::uint32_t* abort_flag() const { return abort_flag_.as<std::uint32_t>(); }
  device::ExpiredWait* expired() const { return expired_.device_pointer(); }
  PassReport* report(std::int64_t rank) const { return reports_.device_pointer() + rank; }
  void attach(CudaLayer* layer) { layers_.push_back(layer); }
  void detach(CudaLayer* layer) { std::erase(layers_, layer); }
  void reserve(const pipeline::HeapLayout& heap);
  // The pass just enqueued, for the sentences of its errors.
  void remember(const Problem& problem, const Plan& plan) { problem_ = problem, plan_ = plan; }

 private:
  void find_groups();
  void enable_peers();
  void throw_if_failed();
  void synchronize_devices() const;
  void clear_abort_flag();

  WorldOptions options_;
  CudaOptions cuda_;
  std::vector<int> devices_;  // [R]
  std::vector<DeviceGroup> groups_;
  std::vector<DeviceBytes> heaps_;  // [R]
  std::int64_t heap_bytes_ = 0, signals_bytes_ = 0;
  DeviceBytes abort_flag_;  // u32 [1 + R] on rank 0's GPU: the flag that every wait of every GPU
                            // looks at, and each rank's claim
  MappedHost<device::ExpiredWait> expired_;  // [R]
  MappedHost<PassReport> reports_;           // [R]
  std::vector<CudaLayer*> layers_;
  cudaStream_t stream_ = nullptr;
  Problem problem_;
  Plan plan_;
};

}  // namespace moxie::backend_cuda
