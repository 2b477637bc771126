// Memory of the simulated workers' coroutine frames: blocks of a few sizes, cut from chunks that
// the system may back with huge pages. Tens of thousands of programs resume in no order; spread
// over small pages each resumption missed the TLB, which took 40 % of a simulation of 128 ranks.
#pragma once
#include <array>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moxie::planner {

class FramePool {
 public:
  FramePool() = default;
  FramePool(const FramePool&) = delete;  // frames point back to it
  FramePool& operator=(const FramePool&) = delete;

  void* allocate(std::size_t num_bytes) {
    const std::size_t kind = (num_bytes + sizeof(Header) + kStep - 1) / kStep;
    Header* block = nullptr;
    if (kind >= kKinds) {
      block = static_cast<Header*>(::operator new(kind* kStep));
    } else if (free_[kind] != nullptr) {
      block = free_[kind];
      free_[kind] = block->next;
    } else {
      block = static_cast<Header*>(cut(kind * kStep));
    }
    block->pool = this;
    block->kind = kind;
    return block + 1;
  }
  static void release(void* frame) {
    Header* block = static_cast<Header*>(frame) - 1;
    const std::size_t kind = block->kind;
    if (kind >= kKinds) return ::operator delete(block);
    FramePool& pool = *block->pool;
    block->next = pool.free_[kind];
    pool.free_[kind] = block;
  }

 private:
  static constexpr std::size_t kStep = 64, kKinds = 32;             // blocks up to 2 KB
  static constexpr std::size_t kChunkBytes = std::size_t{2} << 20;  // a huge page
  struct alignas(std::max_align_t) Header {
    union {
      FramePool* pool;
      Header* next;
    };
    std::size_t kind;
  };
  struct Free {
    void operator()(std::byte* chunk) const { std::free(chunk); }
  };

  void* cut(std::size_t num_bytes) {
    if (left_ < num_bytes) {
      auto* chunk = static_cast<std::byte*>(std::aligned_alloc(kChunkBytes, kChunkBytes));
      if (chunk == nullptr) throw std::bad_alloc();
      chunks_.emplace_back(chunk);
#if defined(__linux__)
      // A wish: where the system does not grant it, pages are small and everything else is the
      // same.
      static_cast<void>(madvise(chunk, kChunkBytes, MADV_HUGEPAGE));
#endif
      at_ = chunk;
      left_ = kChunkBytes;
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

}  // namespace moxie::planner
