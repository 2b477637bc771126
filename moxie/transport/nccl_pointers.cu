#if MOXIE_HAS_NCCL
#include "moxie/transport/nccl_pointers.h"

#include <nccl_device.h>

namespace moxie::transport {
namespace {

__global__ void window_addresses_kernel(ncclWindow_t window, int num_ranks, void** addresses) {
  for (int r = static_cast<int>(threadIdx.x); r < num_ranks; r += static_cast<int>(blockDim.x))
    addresses[r] = ncclGetLsaPointer(window, 0, r);
}

}  // namespace

cudaError_t read_window_addresses(ncclWindow_t window, int num_ranks, void** addresses,
                                  cudaStream_t stream) {
  window_addresses_kernel<<<1, 32, 0, stream>>>(window, num_ranks, addresses);
  return cudaGetLastError();
}

}  // namespace moxie::transport
#endif
