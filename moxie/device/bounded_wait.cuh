// Waits that end: every spin of a kernel goes through bounded_wait.
//
// A wait that expires does not trap. It writes a record the host can read and raises the abort
// flag; all other waits see the flag within about a millisecond and give up too, the first one of
// each other rank with a record of its own, so every role runs to its end. Time comes from
// globaltimer: limits by poll count did not fire for minutes. Cost of a wait that succeeds at once:
// the one instruction that tests it.
#pragma once

#include <cstdint>
#include <cuda/ptx>

namespace moxie::device {

// Written once, by the rank's first thread whose wait expired or was called off; lives in mapped
// host memory.
struct ExpiredWait {
  uint32_t written;  // 1 after all other fields
  uint32_t rank;
  uint32_t cta;
  uint32_t warp;
  uint32_t what;  // a WaitSite of the kernel
  uint32_t epoch;
  uint32_t told_by;  // 0: its own time was up; else 1 + the rank whose wait expired first
  uint64_t index;    // which barrier, slot or block
  uint64_t wanted;   // value or phase waited for
  uint64_t seen;
  uint64_t waited_ns;
};

struct WaitLimits {
  uint32_t* abort_flag;  // device memory, 0 before the launch; then 1 + the rank that gave up first
  ExpiredWait* record;   // mapped host memory, or null
  uint64_t limit_ns;     // 0: wait for ever
  uint32_t rank;
  uint32_t epoch;
  uint32_t* claim;  // device memory, 0 before the launch; then 1: the rank's record has an owner
};

struct WaitTarget {
  uint32_t what;
  uint64_t index;
  uint64_t wanted;
};

inline constexpr int kFreeTries = 32;                    // before the timer is read at all
inline constexpr uint64_t kAbortPollAfter_ns = 1000000;  // before the abort flag is read

__device__ inline void write_record(const WaitLimits& limits, const WaitTarget& target,
                                    uint32_t told_by, uint64_t seen, uint64_t waited_ns) {
  volatile ExpiredWait* record = limits.record;
  record->rank = limits.rank;
  record->cta = blockIdx.x;
  record->warp = threadIdx.x / 32;
  record->what = target.what;
  record->epoch = limits.epoch;
  record->told_by = told_by;
  record->index = target.index;
  record->wanted = target.wanted;
  record->seen = seen;
  record->waited_ns = waited_ns;
  __threadfence_system();  // the fields before `written`, to the host
  record->written = 1;
}

// `abort` is what the wait saw in the abort flag: not 0, it was called off. The flag is raised
// last, so that none of the rank's waits that are called off claims the record first.
__device__ inline void report_wait(const WaitLimits& limits, const WaitTarget& target,
                                   uint32_t abort, uint64_t seen, uint64_t waited_ns) {
  if (atomicCAS(limits.claim, 0u, 1u) == 0u && limits.record != nullptr)
    write_record(limits, target, abort, seen, waited_ns);
  if (abort == 0) atomicCAS_system(limits.abort_flag, 0u, limits.rank + 1);
}

// Spins until ready() is true. False: the wait expired, or another one did. `seen` is called only
// for the record.
template <class Ready, class Seen>
__device__ __forceinline__ bool bounded_wait(Ready ready, Seen seen, const WaitLimits& limits,
                                             const WaitTarget& target) {
#pragma unroll 1
  for (int i = 0; i < kFreeTries; ++i) {
    if (ready()) return true;
  }
  const uint64_t begin_ns = cuda::ptx::get_sreg_globaltimer();
  while (!ready()) {
    const uint64_t waited_ns = cuda::ptx::get_sreg_globaltimer() - begin_ns;
    if (waited_ns < kAbortPollAfter_ns) continue;
    const uint32_t abort = *static_cast<volatile uint32_t*>(limits.abort_flag);
    if (abort != 0 || (limits.limit_ns != 0 && waited_ns > limits.limit_ns)) {
      report_wait(limits, target, abort, seen(), waited_ns);
      return false;
    }
  }
  return true;
}

// Waits for the end of the phase with this parity of an mbarrier of this CTA. What the arriving
// threads of this CTA wrote before, and the bytes of the copies it counted, are visible afterwards.
__device__ __forceinline__ bool mbarrier_wait(uint64_t* mbarrier, uint32_t parity,
                                              const WaitLimits& limits, const WaitTarget& target) {
  return bounded_wait([&] { return cuda::ptx::mbarrier_try_wait_parity(mbarrier, parity); },
                      [&] { return uint64_t{parity ^ 1}; }, limits, target);
}

// The same, also for data that other CTAs of the cluster wrote (st.async). Costs more: once per
// tile.
__device__ __forceinline__ bool mbarrier_wait_cluster(uint64_t* mbarrier, uint32_t parity,
                                                      const WaitLimits& limits,
                                                      const WaitTarget& target) {
  return bounded_wait(
      [&] {
        return cuda::ptx::mbarrier_try_wait_parity(cuda::ptx::sem_acquire, cuda::ptx::scope_cluster,
                                                   mbarrier, parity);
      },
      [&] { return uint64_t{parity ^ 1}; }, limits, target);
}

}  // namespace moxie::device
