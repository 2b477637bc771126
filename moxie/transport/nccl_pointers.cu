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
  void* arguments[] = {&window, &num_ranks, &addresses};
  // Not <<<>>> and cudaGetLastError: that may be an error of the caller's, from long before.
  return cudaLaunchKernel(reinterpret_cast<const void*>(window_addresses_kernel), dim3(1), dim3(32),
                          arguments, 0, stream);
}

}  // namespace moxie::transport
#endif
