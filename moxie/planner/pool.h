// Memory of a simulation: coroutine frames, tables and lists, cut from chunks that the system may
// back with huge pages. Tens of thousands of workers resume in no order, each with its rank's
// tables; spread over small pages each turn missed the TLB, which took 40 % of a simulation of 128
// ranks when only the frames were many, and 10 % once they were few.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moxie::planner {

class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;  // blocks point back to it
  Pool& operator=(const Pool&) = delete;

  // Aligned as by malloc.
  void* allocate(std::size_t num_bytes) {
    const std::size_t steps = (num_bytes + sizeof(Header) + kStep - 1) / kStep,
                      power = static_cast<std::size_t>(std::bit_width(steps - 1)),
                      kind = steps < kSteps ? steps : kSteps + power;
    Header* block = free_[kind];
    if (block != nullptr) {
      free_[kind] = block->next;
    } else {
      block = static_cast<Header*>(cut((steps < kSteps ? steps : std::size_t{1} << power) * kStep));
    }
    block->pool = this;
    block->kind = kind;
    return block + 1;
  }
  // On a line of the cache; lives as long as the pool.
  void* allocate_aligned(std::size_t num_bytes) {
    std::byte* block = static_cast<std::byte*>(cut((num_bytes + 2 * kStep - 1) / kStep * kStep));
    reinterpret_cast<Header*>(block + kStep)[-1].kind = kOnce;
    return block + kStep;
  }
  static void release(void* memory) {
    Header* block = static_cast<Header*>(memory) - 1;
    const std::size_t kind = block->kind;
    if (kind == kOnce) return;
    Pool& pool = *block->pool;
    block->next = pool.free_[kind];
    pool.free_[kind] = block;
  }

 private:
  static constexpr std::size_t kStep = 64, kSteps = 32;  // to 2 KB by these, then powers of two
  static constexpr std::size_t kKinds = kSteps + 64, kOnce = kKinds;
  static constexpr std::size_t kChunkBytes = std::size_t{2} << 20;  // a huge page
  struct alignas(std::max_align_t) Header {
    union {
      Pool* pool;
      Header* next;
    };
    std::size_t kind;
  };
  struct Free {
    void operator()(std::byte* chunk) const { std::free(chunk); }
  };

  void* cut(std::size_t num_bytes) {
    if (left_ < num_bytes) {
      const std::size_t size = (num_bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
      auto* chunk = static_cast<std::byte*>(std::aligned_alloc(kChunkBytes, size));
      if (chunk == nullptr) throw std::bad_alloc();
      chunks_.emplace_back(chunk);
#if defined(__linux__)
      // A wish: where the system does not grant it, pages are small and everything else is the
      // same.
      static_cast<void>(madvise(chunk, size, MADV_HUGEPAGE));
#endif
      at_ = chunk;
      left_ = size;
    }
    void* block = at_;
    at_ += num_bytes;
    left_ -= num_bytes;
    return block;
  }

  std::array<Header*, kKinds> free_{};
  std::vector<std::unique_ptr<std::byte, Free>> chunks_;
  std::byte* at_ = nullptr;
  std::size_t left_ = 0;
};

// For vectors that every turn reads.
template <class T>
struct PoolAllocator {
  using value_type = T;
  Pool* pool;
  PoolAllocator(Pool& from) : pool(&from) {}
  template <class U>
  PoolAllocator(const PoolAllocator<U>& other) : pool(other.pool) {}
  T* allocate(std::size_t n) {
    const std::size_t num_bytes = n * sizeof(T);
    return static_cast<T*>(alignof(T) > alignof(std::max_align_t)
                               ? pool->allocate_aligned(num_bytes)
                               : pool->allocate(num_bytes));
  }
  void deallocate(T* memory, std::size_t) { Pool::release(memory); }
  friend bool operator==(const PoolAllocator& a, const PoolAllocator& b) {
    return a.pool == b.pool;
  }
};
template <class T>
using PoolVector = std::vector<T, PoolAllocator<T>>;

}  // namespace moxie::planner
