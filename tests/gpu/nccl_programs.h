// What ranks over NCCL run in the tests, each in a process or thread and on a GPU of its own, and
// the layer that they run. A program returns what the test compares: bytes of results, or words.
#pragma once

#include "tests/gpu/backward_case.h"
#include "tests/gpu/rank_processes.h"

namespace moxie::test {

CaseSpec nccl_case(std::int64_t num_ranks, std::int64_t hidden = 512);

std::string bytes_of(const PassOutputs& out, std::size_t rank);  // y
std::string bytes_of_pass(const RankOutputs& rank);              // and all gradients

// Every plan, several passes each with shuffled timing, all alike; then two sizes of layers in one
// world, whose heap grows, and a pass after a reset. The others: rank_programs().
std::string passes(const ChildRank& me);

}  // namespace moxie::test
