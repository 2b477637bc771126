// With CUDA: plain cudaMalloc and cudaMemcpy; a run's arrays are small. In a build without it every
// function but built_with_cuda() refuses.
#include "cli/device_tensors.h"

#include <fmt/format.h>

#include <set>
#include <unordered_map>

#include "cli/errors.h"
#if MOXIE_HAS_CUDA
#include "moxie/backend_cuda/cuda_memory.h"
#endif

namespace moxie::cli {

std::string gpus_words(const CudaOptions& cuda, std::int64_t num_ranks) {
  const std::vector<int> devices = rank_devices(cuda, num_ranks);
  const std::size_t count = std::set<int>(devices.begin(), devices.end()).size();
  return fmt::format("{} GPU{}", count, count == 1 ? "" : "s");
}

#if MOXIE_HAS_CUDA
using backend_cuda::check_cuda;

struct DeviceTensors::Buffers {
  std::unordered_map<const HostTensor*, backend_cuda::DeviceBytes> of;
};

bool built_with_cuda() { return true; }

void require_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  throw Failure(fmt::format(
      "--backend cuda found no GPU ({}); `moxie doctor` says what is missing, --backend cpu runs "
      "everywhere",
      error == cudaSuccess ? "the driver lists none" : cudaGetErrorString(error)));
}

std::vector<int> rank_devices(const CudaOptions& cuda, std::int64_t num_ranks) {
  if (!cuda.devices.empty()) return cuda.devices;
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "counting the GPUs");
  std::vector<int> devices;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank)
    devices.push_back(static_cast<int>(rank % count));
  return devices;
}

DeviceTensors::DeviceTensors(std::span<const int> devices, std::span<const RankTensors> inputs,
                             std::span<const RankResults> results)
    : buffers_(std::make_unique<Buffers>()) {
  const auto allocate = [&](const HostTensor& tensor, std::size_t rank, const char* name) {
    return buffers_->of
        .emplace(&tensor, backend_cuda::DeviceBytes(
                              devices[rank], static_cast<std::int64_t>(tensor.bytes.size()), name))
        .first->second.get();
  };
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    for (const auto& [name, member] : input_names()) {
      const HostTensor& tensor = inputs[rank].*member;
      if (tensor.bytes.empty()) continue;
      check_cuda(cudaMemcpy(allocate(tensor, rank, name), tensor.bytes.data(), tensor.bytes.size(),
                            cudaMemcpyHostToDevice),
                 fmt::format("copying {} of rank {} to its GPU", name, rank));
    }
    for (const auto& [name, member, backward] : result_names()) {
      const HostTensor& tensor = results[rank].*member;
      if (tensor.bytes.empty()) continue;
      check_cuda(cudaMemset(allocate(tensor, rank, name), 0xFF, tensor.bytes.size()),
                 fmt::format("filling {} of rank {}", name, rank));
    }
  }
}

DeviceTensors::~DeviceTensors() = default;

TensorView DeviceTensors::mirror(const HostTensor& tensor) const {
  if (tensor.absent()) return {};
  const auto found = buffers_->of.find(&tensor);
  return {found == buffers_->of.end() ? nullptr : found->second.get(), tensor.dtype, tensor.shape};
}

void DeviceTensors::download(std::span<RankResults> results) const {
  for (RankResults& rank : results) {
    for (const auto& [name, member, backward] : result_names()) {
      HostTensor& tensor = rank.*member;
      if (tensor.bytes.empty()) continue;
      check_cuda(cudaMemcpy(tensor.bytes.data(), mirror(tensor).data, tensor.bytes.size(),
                            cudaMemcpyDeviceToHost),
                 fmt::format("copying {} back from a GPU", name));
    }
  }
}

#else

struct DeviceTensors::Buffers {};

bool built_with_cuda() { return false; }

void require_cuda() {
  throw Failure(
      "--backend cuda needs a build with CUDA, which this is not; `make cuda` (nvcc 12.9 or newer) "
      "puts one at build/cuda/bin/moxie, --backend cpu runs everywhere");
}

std::vector<int> rank_devices(const CudaOptions&, std::int64_t) {
  require_cuda();
  return {};
}
DeviceTensors::DeviceTensors(std::span<const int>, std::span<const RankTensors>,
                             std::span<const RankResults>) {
  require_cuda();
}
DeviceTensors::~DeviceTensors() = default;
TensorView DeviceTensors::mirror(const HostTensor&) const {
  require_cuda();
  return {};
}
void DeviceTensors::download(std::span<RankResults>) const { require_cuda(); }

#endif

}  // namespace moxie::cli
