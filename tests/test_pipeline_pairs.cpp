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
         const std::vector<std::int32_t>& blocks, BackwardTiling tiling) {
    expert_block[0] = static_cast<std::int32_t>(shared_blocks);
    for (const std::int32_t n : blocks) expert_block.push_back(expert_block.back() + n);
    const std::size_t most = static_cast<std::size_t>(expert_block.back()) + blocks.size() + 2;
    block.resize(most + 1);
    expert.resize(most);
    after.resize(most);
    step_ticket.resize(2 * most + static_cast<std::size_t>(plan.lag_chunks) + 2);
    step_pair.resize(step_ticket.size());
    BlockTable t;
    t.num_experts = static_cast<std::int64_t>(blocks.size());
    t.shared_blocks = shared_blocks;
    t.num_blocks = expert_block.back();
    t.expert_block = expert_block.data();
    pairs = number_pairs(build_chunks(p, plan, t, block.data(), expert.data(), after.data(),
                                      step_ticket.data(), tiling),
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
    plan.save = below(2) == 0 ? SavePolicy::none : SavePolicy::z;
    plan.saved_rows = plan.save == SavePolicy::none ? 0 : below(8) * kBlockRows;
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(1 + below(5)));
    for (auto& n : blocks) n = below(8);
    const Stream s(p, plan, p.shared.intermediate > 0 ? below(4) : 0, blocks,
                   below(2) == 0 ? BackwardTiling{} : kGpuBackwardTiling);
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
  const Plan plan{.chunk_blocks = 8, .saved_rows = 4 * kBlockRows};
  const Stream twin(p, plan, 0, {3, 0, 1}, {}), gpu(p, plan, 0, {3, 0, 1}, kGpuBackwardTiling);
  EXPECT_EQ(twin.pairs.stream.dgrad_tiles, 11);
  EXPECT_EQ(gpu.pairs.stream.dgrad_tiles, 6);
  EXPECT_EQ(twin.pairs.stream.num_tickets() - gpu.pairs.stream.num_tickets(), 4 * (11 - 6));
}

// Where z is remade, by tiles before the dgrad tiles that read it, and for no block that has it.
TEST(PipelinePairs, RemadeBlocksComeBeforeTheirDgradTiles) {
  Problem p;
  p.hidden = 256;
  p.intermediate = 320;
  p.shared.intermediate = 192;
  for (const SavePolicy save : {SavePolicy::none, SavePolicy::z}) {
    const std::int64_t saved = save == SavePolicy::none ? 0 : 2, shared = 2;
    const Plan plan{.chunk_blocks = 2, .save = save, .saved_rows = saved * kBlockRows};
    const Stream s(p, plan, shared, {3, 0, 2}, kGpuBackwardTiling);
    const BackwardStream& stream = s.pairs.stream;
    std::vector<std::int64_t> remade(shared + 5);
    for (std::int64_t i = 0; i < stream.num_tickets(); ++i) {
      const Task task = stream.task(i);
      const auto b = static_cast<std::size_t>(task.block.v);
      if (task.kind == TaskKind::fc1) ++remade[b];
      if (task.kind != TaskKind::dgrad) continue;
      const bool is_shared = task.block.v < shared;
      const bool has_z = is_shared ? save != SavePolicy::none : task.block.v < shared + saved;
      EXPECT_EQ(remade[b], has_z ? 0 : num_fc1_tiles(is_shared ? 192 : 320)) << "block " << b;
    }
  }
}

// The weight gradients of the last chunks come behind all dX, each once and in order, as far as
// nobody waits for their slots.
TEST(PipelinePairs, LastWeightGradientsComeBehindAllDx) {
  Problem p;
  p.hidden = 256;
  p.intermediate = 320;
  const std::vector<std::int32_t> blocks{1, 2, 0, 1, 1, 2, 1, 0, 3, 1, 1, 1, 2};  // 16 of them
  // The last four chunks have five blocks: of a ring of five none of theirs is used again.
  for (const auto& [ring, postponed] :
       {std::pair{64, 4}, {16, 4}, {5, 4}, {4, 3}, {3, 2}, {2, 1}}) {
    const Plan plan{.chunk_blocks = 64, .backward_ring_blocks = ring};
    const Stream s(p, plan, 0, blocks, kGpuBackwardTiling);
    const BackwardStream& stream = s.pairs.stream;
    ASSERT_EQ(stream.postponed, postponed) << "ring " << ring;
    std::int64_t last_dx = -1, chunk = 0, behind = 0;
    std::vector<std::int64_t> wgrads(blocks.size());
    for (std::int64_t i = 0; i < stream.num_tickets(); ++i) {
      const Task task = stream.task(i);
      if (task.kind == TaskKind::dx) last_dx = i;
      if (task.kind != TaskKind::wgrad) continue;
      EXPECT_GE(task.chunk, chunk);
      chunk = task.chunk;
      ++wgrads[static_cast<std::size_t>(task.chunk)];
    }
    for (std::int64_t i = last_dx + 1; i < stream.num_tickets(); ++i)
      behind += stream.task(i).kind == TaskKind::wgrad;
    EXPECT_EQ(behind, postponed * stream.wgrad.size());
    for (const std::int64_t n : wgrads) EXPECT_EQ(n, stream.wgrad.size());
  }
}

}  // namespace
}  // namespace moxie::pipeline
