// World::nccl: the CUDA backend with one rank of this process, held together with the others by
// NCCL.
#if MOXIE_HAS_NCCL
#include "moxie/backend_cuda/cuda_backend.h"
#include "moxie/backend_cuda/sentence.h"
#include "moxie/transport/nccl_window.h"

namespace moxie {

std::unique_ptr<Backend> make_nccl_backend(const WorldOptions& options, const NcclOptions& nccl) {
  const int device = backend_cuda::choose_device(options, nccl.device);
  const backend_cuda::DeviceGuard guard(device);
  auto ranks = transport::make_nccl_ranks({.rank = nccl.rank,
                                           .num_ranks = options.num_ranks,
                                           .unique_id = nccl.unique_id,
                                           .comm = nccl.comm,
                                           .device = device,
                                           .library = nccl.library,
                                           .description = "Moxie " + version(),
                                           .timeout_s = options.timeout_s});
  return std::make_unique<backend_cuda::CudaBackend>(
      options, CudaOptions{{device}, nccl.reserve_sms, nccl.cluster_size}, std::vector{device},
      RankRange{nccl.rank, 1}, std::move(ranks));
}

std::string make_nccl_unique_id(const std::string& library) {
  return transport::make_nccl_id(library);
}

}  // namespace moxie
#endif
