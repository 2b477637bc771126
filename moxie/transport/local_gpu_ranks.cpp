#if MOXIE_HAS_CUDA
#include "moxie/transport/local_gpu_ranks.h"

#include "moxie/transport/cuda_memory.h"

namespace moxie::transport {
namespace {

class LocalBlocks final : public RankBlocks {
 public:
  LocalBlocks(const std::vector<int>& devices, std::int64_t num_bytes, const std::string& what)
      : RankBlocks(num_bytes) {
    for (std::size_t r = 0; r < devices.size(); ++r) {
      bytes_.emplace_back(devices[r], num_bytes, what + " of rank " + std::to_string(r));
      bases_.push_back(bytes_.back().get());
      if (num_bytes == 0) continue;
      const DeviceGuard guard(devices[r]);
      check_cuda(cudaMemset(bases_.back(), 0, static_cast<std::size_t>(num_bytes)),
                 "clearing " + what);
      check_cuda(cudaDeviceSynchronize(), "clearing " + what);
    }
  }

 private:
  std::vector<DeviceBytes> bytes_;  // [R]
};

class LocalGpuRanks final : public GpuRanks {
 public:
  explicit LocalGpuRanks(const std::vector<int>& devices) : devices_(devices) {}
  bool of_processes() const override { return false; }
  std::unique_ptr<RankBlocks> allocate(std::int64_t num_bytes, const char* what, SeenBy,
                                       double) override {
    return std::make_unique<LocalBlocks>(devices_, num_bytes, what);
  }
  std::vector<std::string> all_gather(const char*, const std::string& text, double) override {
    return std::vector<std::string>(devices_.size(), text);
  }

 private:
  const std::vector<int> devices_;  // [R]
};

}  // namespace

std::unique_ptr<GpuRanks> make_local_gpu_ranks(const std::vector<int>& devices) {
  return std::make_unique<LocalGpuRanks>(devices);
}

}  // namespace moxie::transport
#endif
