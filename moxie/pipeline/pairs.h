// The backward stream two tickets at a time, for a cluster of two CTAs that shares its B operand.
//
// Both CTAs of a pair must walk equally many K blocks, so a pair never mixes kinds of tasks or
// chunks: each step of the stream is four runs (FC1 and dgrad of its own chunk, dX and wgrad of the
// chunk lag behind), and a run of an odd number of tickets ends with one that has no partner. Pairs
// keep the order of tickets: what waits only for earlier tickets waits only for earlier pairs.
#pragma once
#include <cstdint>

#include "moxie/pipeline/tasks.h"

namespace moxie::pipeline {

struct TicketPair {
  std::int64_t first = 0;
  std::int64_t second = -1;  // -1: no partner
};

struct BackwardPairs {
  BackwardStream stream;
  const std::int64_t* step_pair = nullptr;  // [num_steps + 1] first pair of a step

  static constexpr int kNumRuns = 4;
  // Tickets of run r of a step.
  MOXIE_HD constexpr std::int64_t run_tickets(std::int64_t step, int run) const {
    const std::int64_t chunk = run < 2    ? step
                               : run == 2 ? stream.dx_chunk(step)
                                          : stream.wgrad_chunk(step);
    if (!stream.has_chunk(chunk)) return 0;
    switch (run) {
      case 0: return stream.fc1_tickets(chunk);
      case 1: return stream.dgrad_tickets(chunk);
      case 2: return stream.dx_tickets(chunk);
      default: return stream.wgrad_of(chunk).size();
    }
  }
  MOXIE_HD constexpr std::int64_t step_pairs(std::int64_t step) const {
    std::int64_t pairs = 0;
    for (int run = 0; run < kNumRuns; ++run) pairs += ceil_div(run_tickets(step, run), 2);
    return pairs;
  }
  MOXIE_HD constexpr std::int64_t num_pairs() const { return step_pair[stream.num_steps()]; }

  MOXIE_HD constexpr TicketPair pair(std::int64_t i) const {
    const std::int64_t step = last_not_above(step_pair, stream.num_steps(), i);
    const std::int64_t begin = stream.chunks.step_ticket[step];
    const TicketPair in_step = pair(step, i - step_pair[step]);
    return {begin + in_step.first, in_step.second < 0 ? -1 : begin + in_step.second};
  }
  // Pair i of a step, as tickets of the step.
  MOXIE_HD constexpr TicketPair pair(std::int64_t step, std::int64_t i) const {
    std::int64_t begin = 0;
    for (int run = 0; run < kNumRuns; ++run) {
      const std::int64_t tickets = run_tickets(step, run), pairs = ceil_div(tickets, 2);
      if (i < pairs) {
        const std::int64_t first = begin + 2 * i;
        return {first, first + 1 < begin + tickets ? first + 1 : -1};
      }
      i -= pairs;
      begin += tickets;
    }
    return {begin, -1};
  }
};

// step_pair [num_steps + 1]
inline BackwardPairs number_pairs(const BackwardStream& stream, std::int64_t* step_pair) {
  const BackwardPairs pairs{stream, step_pair};
  step_pair[0] = 0;
  for (std::int64_t step = 0; step < stream.num_steps(); ++step)
    step_pair[step + 1] = step_pair[step] + pairs.step_pairs(step);
  return pairs;
}

}  // namespace moxie::pipeline
