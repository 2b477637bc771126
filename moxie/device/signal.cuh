// Counters and signal words in global memory: one name per (scope, order), and bounded waits for
// them.
//
// Counters are 32-bit and, but for push dispatch, stay inside a GPU; signals are 64-bit words that
// ranks write into each other's heaps, so they use system scope. Orders are those of
// cuda::atomic_ref (CCCL): an acquire that reads what a release wrote makes everything visible that
// the releasing thread wrote or had itself acquired.
#pragma once

#include <cuda/atomic>

#include "moxie/device/bounded_wait.cuh"

namespace moxie::device {

template <class Word, cuda::thread_scope kScope>
__device__ __forceinline__ Word load_acquire(const Word* word) {
  return cuda::atomic_ref<Word, kScope>(*const_cast<Word*>(word)).load(cuda::memory_order_acquire);
}
__device__ __forceinline__ uint64_t load_relaxed_gpu(const uint64_t* word) {
  return cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(*const_cast<uint64_t*>(word))
      .load(cuda::memory_order_relaxed);
}
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* counter) {
  return load_acquire<uint32_t, cuda::thread_scope_device>(counter);
}
__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* signal) {
  return load_acquire<uint64_t, cuda::thread_scope_system>(signal);
}

__device__ __forceinline__ void store_release_sys(uint64_t* signal, uint64_t value) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_system>(*signal).store(value,
                                                                       cuda::memory_order_release);
}
__device__ __forceinline__ void add_release_gpu(uint32_t* counter, uint32_t amount) {
  cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*counter).fetch_add(
      amount, cuda::memory_order_release);
}
__device__ __forceinline__ void add_release_sys(uint32_t* counter, uint32_t amount) {
  cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*counter).fetch_add(
      amount, cuda::memory_order_release);
}
// Return the count before.
__device__ __forceinline__ uint32_t add_relaxed_gpu(uint32_t* counter, uint32_t amount) {
  return cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*counter).fetch_add(
      amount, cuda::memory_order_relaxed);
}
__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* counter, uint32_t amount) {
  return cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*counter).fetch_add(
      amount, cuda::memory_order_acq_rel);
}
__device__ __forceinline__ uint32_t add_acq_rel_sys(uint32_t* counter, uint32_t amount) {
  return cuda::atomic_ref<uint32_t, cuda::thread_scope_system>(*counter).fetch_add(
      amount, cuda::memory_order_acq_rel);
}

inline constexpr uint32_t kPollPause_ns = 100;  // leaves issue slots and L2 to those who work

template <cuda::thread_scope kScope>
__device__ __forceinline__ bool wait_counter_of_scope(const uint32_t* counter, uint32_t wanted,
                                                      const WaitLimits& limits, uint32_t what,
                                                      int64_t index) {
  uint32_t seen = 0;
  return bounded_wait(
      [&] {
        seen = load_acquire<uint32_t, kScope>(counter);
        if (seen >= wanted) return true;
        __nanosleep(kPollPause_ns);
        return false;
      },
      [&] { return uint64_t{seen}; }, limits, {what, static_cast<uint64_t>(index), wanted});
}

// One thread. False: gave up.
__device__ __forceinline__ bool wait_counter(const uint32_t* counter, uint32_t wanted,
                                             const WaitLimits& limits, uint32_t what,
                                             int64_t index) {
  return wait_counter_of_scope<cuda::thread_scope_device>(counter, wanted, limits, what, index);
}
// The same for a counter that a thread of another GPU adds to, or that lies there.
__device__ __forceinline__ bool wait_counter_sys(const uint32_t* counter, uint32_t wanted,
                                                 const WaitLimits& limits, uint32_t what,
                                                 int64_t index) {
  return wait_counter_of_scope<cuda::thread_scope_system>(counter, wanted, limits, what, index);
}

// Claims the next unit of a counter below `limit`; `limit` itself when there is none. One thread;
// relaxed: what the unit needs is awaited by its own signals.
__device__ __forceinline__ uint32_t claim_below(uint32_t* counter, uint32_t limit) {
  const cuda::atomic_ref<uint32_t, cuda::thread_scope_device> next(*counter);
  uint32_t unit = next.load(cuda::memory_order_relaxed);
  while (unit < limit && !next.compare_exchange_weak(unit, unit + 1, cuda::memory_order_relaxed)) {
  }
  return min(unit, limit);
}

// One thread; `seen` is the word that ended the wait.
__device__ __forceinline__ bool wait_signal(const uint64_t* signal, uint64_t wanted,
                                            const WaitLimits& limits, uint32_t what, int64_t index,
                                            uint64_t& seen) {
  return bounded_wait(
      [&] {
        seen = load_acquire_sys(signal);
        if (seen >= wanted) return true;
        __nanosleep(kPollPause_ns);
        return false;
      },
      [&] { return seen; }, limits, {what, static_cast<uint64_t>(index), wanted});
}

}  // namespace moxie::device
