#if MOXIE_HAS_NCCL
#include "moxie/transport/window_blocks.h"

#include <fmt/format.h>

#include "moxie/core/error.h"
#include "moxie/transport/cuda_memory.h"
#include "moxie/transport/nccl_pointers.h"

namespace moxie::transport {

WindowBlocks::WindowBlocks(std::shared_ptr<NcclComm> comm, std::int64_t num_bytes,
                           const std::string& what)
    : RankBlocks(num_bytes), comm_(std::move(comm)) {
  const auto size = static_cast<std::size_t>(num_bytes);
  const DeviceGuard guard(comm_->device());
  const CudaStream stream;
  const ncclResult_t result = comm_->api().mem_alloc(&memory_, size);
  if (result != ncclSuccess) {
    throw Error(ErrorCode::unavailable,
                fmt::format("allocating {} bytes for {} on GPU {} failed: {}", num_bytes, what,
                            comm_->device(), comm_->api().words(result)));
  }
  const cudaError_t error = cudaMemsetAsync(memory_, 0, size, stream.get());
  if (error != cudaSuccess) comm_->api().mem_free(memory_);
  check_cuda(error, "clearing " + what);
  stream.synchronize("clearing " + what);
}

WindowBlocks::~WindowBlocks() {
  on_device(comm_->device(), [&] {
    cudaDeviceSynchronize();  // unmapping does not wait for the passes, as cudaFree would
    comm_->deregister_window(window_);
    comm_->api().mem_free(memory_);
  });
}

void WindowBlocks::map(std::int64_t rank, std::int64_t num_ranks, const Deadline& deadline) {
  window_ = comm_->register_window(memory_, static_cast<std::size_t>(num_bytes()), deadline);
  require_symmetric();
  const DeviceGuard guard(comm_->device());
  const NcclApi& api = comm_->api();
  const MappedHost<void*> addresses(static_cast<std::size_t>(num_ranks));
  if (api.get_lsa_device_pointer != nullptr) {
    for (std::int64_t r = 0; r < num_ranks; ++r) {
      const ncclResult_t result = api.get_lsa_device_pointer(
          window_, 0, static_cast<int>(r), &addresses[static_cast<std::size_t>(r)]);
      if (result != ncclSuccess) refuse(api.words(result));
    }
  } else {
    const CudaStream stream;
    check_cuda(read_window_addresses(window_, static_cast<int>(num_ranks),
                                     addresses.device_pointer(), stream.get()),
               "reading the addresses of a window");
    stream.synchronize("reading the addresses of a window");
  }
  addresses[static_cast<std::size_t>(rank)] = memory_;
  for (std::int64_t r = 0; r < num_ranks; ++r) {
    void* address = addresses[static_cast<std::size_t>(r)];
    if (address == nullptr) refuse(fmt::format("rank {} has no address in it", r));
    bases_.push_back(static_cast<std::byte*>(address));
  }
}

void WindowBlocks::refuse(const std::string& why) const {
  throw Error(ErrorCode::unavailable,
              fmt::format("NCCL {} gave GPU {} no symmetric window: {}; the ranks' GPUs must reach "
                          "each other's memory, and neither NCCL_CUMEM_ENABLE nor NCCL_WIN_ENABLE "
                          "may be 0",
                          nccl_words(comm_->api().library.version()), comm_->device(), why));
}

// Where NCCL cannot map memory, registration succeeds all the same: with no window, or with a
// handle that is none.
void WindowBlocks::require_symmetric() const {
  if (window_ == nullptr) refuse("registration succeeded without a window");
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, window_);
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || attributes.type != cudaMemoryTypeDevice)
    refuse("the registration is a local one");
}

}  // namespace moxie::transport
#endif
