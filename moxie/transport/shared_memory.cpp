#include "moxie/transport/shared_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "moxie/core/error.h"

namespace moxie::transport {
namespace {

std::byte* map_bytes(int descriptor, std::int64_t num_bytes) {
  void* data = ::mmap(nullptr, static_cast<std::size_t>(num_bytes), PROT_READ | PROT_WRITE,
                      MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    const int reason = errno;
    ::close(descriptor);
    throw Error(ErrorCode::unavailable,
                fmt::format("{} bytes of shared memory cannot be mapped: {}", num_bytes,
                            std::strerror(reason)));
  }
  return static_cast<std::byte*>(data);
}

}  // namespace

SharedBytes SharedBytes::create(std::int64_t num_bytes) {
  SharedBytes bytes;
  bytes.num_bytes_ = num_bytes > 0 ? num_bytes : 1;
  bytes.descriptor_ = ::memfd_create("moxie", MFD_CLOEXEC);
  if (bytes.descriptor_ < 0 || ::ftruncate(bytes.descriptor_, bytes.num_bytes_) != 0) {
    throw Error(ErrorCode::unavailable, fmt::format("{} bytes of shared memory cannot be had: {}",
                                                    num_bytes, std::strerror(errno)));
  }
  bytes.data_ = map_bytes(bytes.descriptor_, bytes.num_bytes_);
  return bytes;
}

SharedBytes SharedBytes::map(int descriptor, std::int64_t num_bytes) {
  SharedBytes bytes;
  bytes.num_bytes_ = num_bytes > 0 ? num_bytes : 1;
  bytes.data_ = map_bytes(descriptor, bytes.num_bytes_);
  ::close(descriptor);
  return bytes;
}

SharedBytes::SharedBytes(SharedBytes&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      num_bytes_(other.num_bytes_),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

SharedBytes& SharedBytes::operator=(SharedBytes&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

SharedBytes::~SharedBytes() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(num_bytes_));
  close_descriptor();
}

void SharedBytes::close_descriptor() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

}  // namespace moxie::transport
