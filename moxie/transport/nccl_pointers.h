// Peer addresses of a window, where NCCL has no function of the host for them (2.28).
#pragma once
#include <cuda_runtime_api.h>
#include <nccl.h>

namespace moxie::transport {

// One warp reads the window, which lies in GPU memory, and writes the address of each of the team's
// first num_ranks blocks to `addresses`, host memory that the GPU can write. Enqueued.
cudaError_t read_window_addresses(ncclWindow_t window, int num_ranks, void** addresses,
                                  cudaStream_t stream);

}  // namespace moxie::transport
