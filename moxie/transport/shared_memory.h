// Memory that several processes map: an anonymous file, known by its descriptor only. It has no
// name in /dev/shm or elsewhere, so nothing is left behind however its owners end.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moxie::transport {

class SharedBytes {
 public:
  SharedBytes() = default;
  // Zeroes. Throws Error(unavailable) when the machine gives no such memory.
  static SharedBytes create(std::int64_t num_bytes);
  // Maps a descriptor that another process created; the descriptor is taken and closed.
  static SharedBytes map(int descriptor, std::int64_t num_bytes);
  SharedBytes(SharedBytes&& other) noexcept;
  SharedBytes& operator=(SharedBytes&& other) noexcept;
  ~SharedBytes();
  std::byte* get() const { return data_; }
  int descriptor() const { return descriptor_; }  // of the creator; -1 when mapped or closed
  void close_descriptor();                        // the memory stays mapped

 private:
  std::byte* data_ = nullptr;
  std::int64_t num_bytes_ = 0;
  int descriptor_ = -1;
};

}  // namespace moxie::transport
