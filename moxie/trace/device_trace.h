// Events of a CUDA pass as the kernel writes them, and what becomes of them on the host. Kernel
// side: recorder_cuda.cuh.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "moxie/trace/trace.h"

namespace moxie::trace {

struct DeviceEvent {
  std::uint64_t begin_ns, end_ns;  // globaltimer of the GPU; 64 bits: a wait may last minutes
  std::int32_t block, tile;
  std::uint8_t kind, what, lane, shared;
};

// Lanes of one CTA: its tensor cores, and its two communication warps.
inline constexpr std::int32_t kComputeLane = 0, kFirstCommLane = 2, kNumCommLanes = 2;

// The events of one rank.
struct DeviceTrace {
  std::span<const DeviceEvent> events;        // [num_ctas, capacity]
  std::span<const std::uint32_t> num_events;  // [num_ctas] more than capacity: the rest was lost
  std::int32_t capacity = 0;
  std::int32_t device = 0;  // ranks of one GPU share its clock
};

// Fills `trace`, but for its title: worker w of the compute lanes is CTA w of the rank, workers 2w
// and 2w + 1 of the communication lanes are its two warps. GPUs have clocks of their own: they are
// laid over each other where each GPU's first rank has seen every peer's inputs, which happens
// everywhere within a few microseconds. Returns the number of events lost.
std::int64_t collect(std::span<const DeviceTrace> ranks, Trace& trace);

}  // namespace moxie::trace
