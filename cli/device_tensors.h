// The arrays of a run on the GPUs of a CUDA world: copied there, found there by the host array they
// mirror, copied back. The only file of the command, with its .cpp and the bench's, that knows
// CUDA; in a build without it require_cuda() says so and nothing else is called.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "cli/tensors.h"

namespace moxie::cli {

bool built_with_cuda();
// Throws Failure with the way out when this build has no CUDA or this machine no GPU.
void require_cuda();
// The GPU of each rank: cuda.devices, or rank r on device r mod count.
std::vector<int> rank_devices(const CudaOptions& cuda, std::int64_t num_ranks);
// "2 GPUs", for people.
std::string gpus_words(const CudaOptions& cuda, std::int64_t num_ranks);

class DeviceTensors {
 public:
  // Every array of rank r on devices[r]: inputs are copied, results are NaN until a pass writes
  // them. The host arrays must outlive this and stay where they are.
  DeviceTensors(std::span<const int> devices, std::span<const RankTensors> inputs,
                std::span<const RankResults> results);
  ~DeviceTensors();
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;

  TensorView mirror(const HostTensor& tensor) const;  // absent stays absent
  void download(std::span<RankResults> results) const;

 private:
  struct Buffers;
  std::unique_ptr<Buffers> buffers_;
};

}  // namespace moxie::cli
