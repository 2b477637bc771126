// Pairs of the backward stream: every ticket once, in order, never two kinds or chunks in one pair.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "moxie/pipeline/pairs.h"
#include "moxie/pipeline/tables.h"

namespace moxie::pipeline {
namespace {

struct Stream {
  std::vector<std::int32_t> expert_block{0}, block, expert, after;
  std::vector<std::int64_t> step_ticket, step_pair;
  BackwardPairs pairs;

  // blocks[e] of each expert, shared_blocks of the shared one
  Stream(const Problem& p, const Plan& plan, std::int64_t shared_blocks,
         const std::vector<std::int32_t>& blocks, std::int64_t dgrad_tile_cols) {
    expert_block[0] = static_cast<std::int32_t>(shared_blocks);
    for (const std::int32_t n : blocks) expert_block.push_back(expert_block.back() + n);
    const std::size_t most = static_cast<std::size_t>(expert_block.back()) + blocks.size() + 2;
    block.resize(most + 1);
    expert.resize(most);
    after.resize(most);
    step_ticket.resize(most + static_cast<std::size_t>(plan.lag_chunks) + 2);
    step_pair.resize(step_ticket.size());
    BlockTable t;
    t.num_experts = static_cast<std::int64_t>(blocks.size());
    t.shared_blocks = shared_blocks;
    t.num_blocks = expert_block.back();
    t.expert_block = expert_block.data();
    pairs = number_pairs(build_chunks(p, plan, t, block.data(), expert.data(), after.data(),
                                      step_ticket.data(), dgrad_tile_cols),
                         step_pair.data());
  }
};

TEST(PipelinePairs, EveryTicketOnceInOrderAndNeverTwoKinds) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto below = [&](unsigned n) { return static_cast<std::int32_t>(random() % n); };
  for (int repeat = 0; repeat < 2000; ++repeat) {
    Problem p;
    p.hidden = 64 * (1 + below(12));
    p.intermediate = 64 * (1 + below(12));
    p.shared.intermediate = below(3) == 0 ? 64 * (1 + below(6)) : 0;
    Plan plan;
    plan.chunk_blocks = 1 + below(5);
    plan.lag_chunks = 1 + below(3);
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(1 + below(5)));
    for (auto& n : blocks) n = below(8);
    const Stream s(p, plan, p.shared.intermediate > 0 ? below(4) : 0, blocks,
                   below(2) == 0 ? kFc1TileCols : kWideDgradTileCols);
    const BackwardStream& stream = s.pairs.stream;
    std::int64_t next = 0;
    for (std::int64_t i = 0; i < s.pairs.num_pairs(); ++i) {
      const TicketPair pair = s.pairs.pair(i);
      ASSERT_EQ(pair.first, next++) << "pair " << i;
      if (pair.second < 0) continue;
      ASSERT_EQ(pair.second, next++) << "pair " << i;
      const Task one = stream.task(pair.first), two = stream.task(pair.second);
      ASSERT_EQ(one.kind, two.kind);
      ASSERT_EQ(one.chunk, two.chunk);
    }
    ASSERT_EQ(next, stream.num_tickets());
  }
}

TEST(PipelinePairs, WideDgradTilesHalveTheirNumber) {
  Problem p;
  p.hidden = 256;
  p.intermediate = 1408;
  const Plan plan;
  const Stream twin(p, plan, 0, {3, 0, 1}, kFc1TileCols),
      gpu(p, plan, 0, {3, 0, 1}, kWideDgradTileCols);
  EXPECT_EQ(twin.pairs.stream.dgrad_tiles, 11);
  EXPECT_EQ(gpu.pairs.stream.dgrad_tiles, 6);
  EXPECT_EQ(twin.pairs.stream.num_tickets() - gpu.pairs.stream.num_tickets(), 4 * (11 - 6));
}

}  // namespace
}  // namespace moxie::pipeline
