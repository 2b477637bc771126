// Recording a CUDA pass: the roles of a CTA append events to the CTA's own part of a buffer, the
// host turns them into a Trace (device_trace.h). Times are the GPU's globaltimer. A pass that is
// not traced pays one test of a shared-memory word per tile, per four dispatched rows and per
// merged piece.
#pragma once

#include <cuda/ptx>

#include "moxie/trace/device_trace.h"

namespace moxie::trace {

// In shared memory, one per CTA. `count` goes past the capacity when events are lost.
struct Recorder {
  DeviceEvent* events;  // [capacity] of this CTA; null: nothing is recorded
  uint32_t capacity, count;

  __device__ __forceinline__ bool on() const { return events != nullptr; }
  __device__ __forceinline__ uint64_t now() const {
    return on() ? cuda::ptx::get_sreg_globaltimer() : 0;
  }
  // One thread; ends now. `lane` is the role's: kComputeLane or the warp of a communication role.
  __device__ __forceinline__ void add(Kind kind, uint64_t begin_ns, int32_t lane, int64_t block,
                                      int64_t tile, bool shared = false) {
    if (on()) put(kind, WaitFor{}, begin_ns, now(), lane, block, tile, shared);
  }
  // Dispatched rows and staged tokens are drawn in the lane of the warp, if it has one.
  __device__ __forceinline__ void add_dispatch(uint64_t begin_ns, int32_t block, int32_t row) {
    const auto warp_idx = static_cast<int32_t>(threadIdx.x / 32);
    if (warp_idx < kFirstCommLane + kNumCommLanes)
      add(Kind::dispatch, begin_ns, warp_idx, block, row);
  }
  __device__ __forceinline__ void add_stage(uint64_t begin_ns, int64_t token) {
    const auto warp_idx = static_cast<int32_t>(threadIdx.x / 32);
    if (warp_idx >= kFirstCommLane && warp_idx < kFirstCommLane + kNumCommLanes)
      add(Kind::stage, begin_ns, warp_idx, token, -1);
  }
  // A wait that was over at once is not worth a line.
  __device__ __forceinline__ void add_wait(WaitFor what, uint64_t begin_ns, uint64_t end_ns,
                                           int32_t lane, int64_t index) {
    if (on() && end_ns > begin_ns + kShortestWait_ns)
      put(Kind::wait, what, begin_ns, end_ns, lane, index, -1, false);
  }
  __device__ __forceinline__ void put(Kind kind, WaitFor what, uint64_t begin_ns, uint64_t end_ns,
                                      int32_t lane, int64_t block, int64_t tile, bool shared) {
    const uint32_t at = atomicAdd(&count, 1u);
    if (at >= capacity) return;
    events[at] = {begin_ns,
                  end_ns,
                  static_cast<int32_t>(block),
                  static_cast<int32_t>(tile),
                  static_cast<uint8_t>(kind),
                  static_cast<uint8_t>(what),
                  static_cast<uint8_t>(lane),
                  static_cast<uint8_t>(shared)};
  }

  static constexpr uint64_t kShortestWait_ns = 200;
};

}  // namespace moxie::trace
