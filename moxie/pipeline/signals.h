// Signals: the 64-bit words that ranks write into each other's heaps. A word is (epoch, payload);
// words only grow, so a wait is one comparison `word >= wanted`, never "!= 0", and a rank that is a
// pass behind cannot be lapped: the proof is in docs/protocol.md. Counters inside a rank are plain
// 32-bit counts in two banks, used by passes in turn.
#pragma once
#include <cstdint>

#include "moxie/core/hd.h"

namespace moxie::pipeline {

inline constexpr int kPayloadBits = 16;
inline constexpr std::int64_t kMaxSlabs = 16;  // returns_done has one word per (peer, slab)

MOXIE_HD constexpr std::uint64_t make_signal(std::uint64_t epoch, std::uint32_t payload = 0) {
  return (epoch << kPayloadBits) | payload;
}
MOXIE_HD constexpr std::uint64_t epoch_of(std::uint64_t word) { return word >> kPayloadBits; }
MOXIE_HD constexpr std::uint32_t payload_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word & ((1u << kPayloadBits) - 1));
}
MOXIE_HD constexpr bool reached(std::uint64_t word, std::uint64_t wanted) { return word >= wanted; }

// Payload of inputs_ready and agreement: how the sender judges this pass, before any row moves.
enum class Verdict : std::uint32_t {
  go = 0,
  invalid_route = 1,      // its sort met an id outside -1 .. E-1
  capacity_exceeded = 2,  // its experts would receive more blocks than the plan holds
  refused = 3,            // its caller's arguments break a rule; layout.h, refusal_of says which
};

// The bank of rank-local counters that a pass uses; the pass clears the other one for its
// successor. Workspaces count their own passes: layers that share a heap share its epochs, but each
// has counters of its own.
MOXIE_HD constexpr int counter_bank(std::uint64_t pass_count) {
  return static_cast<int>(pass_count & 1);
}

}  // namespace moxie::pipeline
