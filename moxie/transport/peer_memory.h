// Peer memory: one symmetric heap per rank, all mapped into this process. It moves bytes and knows
// no tokens: stages ask for "offset o of rank r". In-process ranks share one address space; CUDA
// peers and NCCL windows fill the same bases.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "moxie/core/ids.h"

namespace moxie::transport {

inline constexpr std::size_t kHeapAlign = 4096;

struct AlignedDelete {
  void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{kHeapAlign}); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;
inline AlignedBytes allocate_bytes(std::int64_t num_bytes) {
  const auto size = static_cast<std::size_t>(num_bytes > 0 ? num_bytes : 1);
  return AlignedBytes(static_cast<std::byte*>(::operator new (size, std::align_val_t{kHeapAlign})));
}

// What a stage sees: the base address of every rank's heap.
struct PeerMemory {
  std::span<std::byte* const> bases;  // [R]
  template <class T>
  T* at(RankId rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(bases[static_cast<std::size_t>(rank.v)] + offset);
  }
};

// Ranks of one process. `reserve` may move the heaps, so it is called between passes only; contents
// are not kept.
class InProcessHeaps {
 public:
  explicit InProcessHeaps(std::int64_t num_ranks)
      : heaps_(static_cast<std::size_t>(num_ranks)),
        bases_(static_cast<std::size_t>(num_ranks), nullptr) {}
  // Returns true when the heaps were allocated anew (their bytes are then undefined).
  bool reserve(std::int64_t num_bytes) {
    if (num_bytes <= num_bytes_) return false;
    for (std::size_t r = 0; r < heaps_.size(); ++r) {
      heaps_[r].reset();
      heaps_[r] = allocate_bytes(num_bytes);
      bases_[r] = heaps_[r].get();
    }
    num_bytes_ = num_bytes;
    return true;
  }
  PeerMemory memory() const { return {bases_}; }
  std::int64_t num_bytes() const { return num_bytes_; }

 private:
  std::vector<AlignedBytes> heaps_;
  std::vector<std::byte*> bases_;
  std::int64_t num_bytes_ = 0;
};

}  // namespace moxie::transport
