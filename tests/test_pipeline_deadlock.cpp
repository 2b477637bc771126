// No accepted plan can deadlock: exhaustively for small sizes, the ticket stream is run by one
// in-order compute worker and one in-order dispatcher, the hardest case: if the lowest unfinished
// ticket can always proceed, so can any number of workers. The bounds are also shown to be tight
// where the protocol makes them so: one slot fewer does deadlock.
#include <gtest/gtest.h>

#include <vector>

#include "moxie/pipeline/plan.h"
#include "moxie/pipeline/tasks.h"
#include "moxie/schedule/schedule_ref.h"

namespace moxie::pipeline {
namespace {

// A rank's rows as blocks per expert, all full, one source.
struct Blocks {
  std::vector<std::int64_t> row_prefix;
  std::vector<std::int32_t> source_begin, expert_block;
  BlockTable table;
  Blocks(std::int64_t shared_blocks, const std::vector<std::int64_t>& per_expert) {
    std::int64_t block = shared_blocks;
    for (const std::int64_t n : per_expert) {
      row_prefix.push_back(0);
      row_prefix.push_back(n * kBlockRows);
      source_begin.push_back(0);
      expert_block.push_back(static_cast<std::int32_t>(block));
      block += n;
    }
    expert_block.push_back(static_cast<std::int32_t>(block));
    table = {1,
             RankId{0},
             static_cast<std::int64_t>(per_expert.size()),
             shared_blocks * kBlockRows,
             shared_blocks,
             block,
             row_prefix.data(),
             source_begin.data(),
             expert_block.data()};
  }
};

bool minibatch_pulled(const BlockTable& t, BlockId b, std::int64_t minibatch_blocks,
                      std::int64_t pulled) {
  return minibatch(t, minibatch_of(t, b, minibatch_blocks), minibatch_blocks).blocks.end <= pulled;
}

// True when every ticket runs. `pulled` = blocks dispatched so far, absolute ids.
bool forward_completes(const ForwardStream& s, const BlockTable& t, std::int64_t minibatch_blocks,
                       std::int64_t x_ring, std::int64_t hidden_ring) {
  std::vector<std::int64_t> fc1_done(static_cast<std::size_t>(t.num_blocks)), fc2_done = fc1_done;
  std::int64_t pulled = t.shared_blocks;
  auto done = [](const std::vector<std::int64_t>& v, std::int64_t b) {
    return v[static_cast<std::size_t>(b)];
  };
  for (std::int64_t ticket = 0; ticket < s.num_tickets(); ++ticket) {
    while (pulled < t.num_blocks) {
      const std::int64_t holder = pulled - x_ring;
      if (holder >= t.shared_blocks && done(fc1_done, holder) < s.fc1_tiles) break;
      ++pulled;
    }
    const Task task = s.task(ticket);
    const std::int64_t b = task.block.v;
    const bool shared = t.is_shared(task.block);
    if (task.kind == TaskKind::fc1) {
      if (!shared && !minibatch_pulled(t, task.block, minibatch_blocks, pulled)) return false;
      const std::int64_t holder = b - hidden_ring;
      if (!shared && holder >= t.shared_blocks && done(fc2_done, holder) < s.fc2_tiles)
        return false;
      ++fc1_done[static_cast<std::size_t>(b)];
    } else {
      if (done(fc1_done, b) < (shared ? s.shared_fc1_tiles : s.fc1_tiles)) return false;
      ++fc2_done[static_cast<std::size_t>(b)];
    }
  }
  return pulled == t.num_blocks;
}

TEST(PipelineDeadlock, EveryAcceptedForwardPlanCompletes) {
  std::int64_t plans = 0;
  for (const TaskOrder order : {TaskOrder::slabs, TaskOrder::lag})
    for (std::int64_t shared = 0; shared <= 1; ++shared)
      for (std::int64_t routed = 0; routed <= 9; ++routed) {
        const Blocks blocks(shared, {routed / 2, routed - routed / 2});
        for (std::int64_t fc1 = 1; fc1 <= 2; ++fc1)
          for (std::int64_t fc2 = 1; fc2 <= 3; fc2 += 2)
            for (std::int64_t band = 1; band <= 4; ++band)
              for (std::int64_t lag = 1; lag <= 3; ++lag)
                for (std::int64_t minibatch = 1; minibatch <= 4; ++minibatch)
                  for (std::int64_t x = std::min(std::max<std::int64_t>(routed, 1),
                                                 min_x_ring_blocks(band, minibatch));
                       x <= std::max<std::int64_t>(routed, 1); ++x)
                    for (std::int64_t h = std::max<std::int64_t>(
                             1, min_hidden_ring_blocks(order, band, lag, routed));
                         h <= std::max<std::int64_t>(routed, 1); ++h) {
                      const ForwardStream s{order, shared, routed,
                                            1,     fc1,    fc2,
                                            band,  lag,    std::min<std::int64_t>(2, fc2)};
                      ++plans;
                      ASSERT_TRUE(forward_completes(s, blocks.table, minibatch, x, h))
                          << name(order) << " routed=" << routed << " fc1=" << fc1 << " fc2=" << fc2
                          << " band=" << band << " lag=" << lag << " minibatch=" << minibatch
                          << " x_ring=" << x << " hidden_ring=" << h;
                    }
      }
  EXPECT_GT(plans, 30000);
}

TEST(PipelineDeadlock, ForwardBoundsAreTight) {
  const Blocks blocks(0, {12});
  for (std::int64_t band = 1; band <= 4; ++band)
    for (std::int64_t lag = 1; lag <= 2; ++lag) {
      const ForwardStream s{TaskOrder::lag, 0, 12, 0, 2, 2, band, lag, 1};
      EXPECT_TRUE(forward_completes(s, blocks.table, 1, min_x_ring_blocks(band, 1), 12));
      EXPECT_FALSE(forward_completes(s, blocks.table, 1, min_x_ring_blocks(band, 1) - 1, 12));
      const std::int64_t h = min_hidden_ring_blocks(TaskOrder::lag, band, lag, 12);
      EXPECT_TRUE(forward_completes(s, blocks.table, 1, 12, h));
      EXPECT_FALSE(forward_completes(s, blocks.table, 1, 12, h - 1))
          << "band " << band << " lag " << lag;
    }
}

struct Chunks {
  std::vector<std::int32_t> block, expert, after;
  std::vector<std::int64_t> step;
  BackwardStream stream;
  Chunks(const BlockTable& t, const Problem& p, const Plan& plan, BackwardTiling tiling = {})
      : block(64),
        expert(64),
        after(64),
        step(128),
        stream(schedule::build_chunks(p, plan, t, block.data(), expert.data(), after.data(),
                                      step.data(), tiling)) {}
};

bool backward_completes(const BackwardStream& s, const BlockTable& t, std::int64_t minibatch_blocks,
                        std::int64_t ring) {
  std::vector<std::int64_t> dgrad_done(static_cast<std::size_t>(t.num_blocks)), trail_done(64);
  auto slot_free = [&](std::int64_t b) {
    if (b < ring) return true;
    const std::int64_t c = s.chunks.chunk_of(BlockId{b - ring});
    return trail_done[static_cast<std::size_t>(c)] == s.trail_tickets(c);
  };
  std::int64_t pulled = t.shared_blocks;
  for (std::int64_t ticket = 0; ticket < s.num_tickets(); ++ticket) {
    while (pulled < t.num_blocks && slot_free(pulled)) ++pulled;
    const Task task = s.task(ticket);
    const auto chunk = static_cast<std::size_t>(task.chunk);
    if (task.kind == TaskKind::dgrad) {
      if (t.is_shared(task.block) ? !slot_free(task.block.v)
                                  : !minibatch_pulled(t, task.block, minibatch_blocks, pulled))
        return false;
      ++dgrad_done[static_cast<std::size_t>(task.block.v)];
      continue;
    }
    const Range needs = task.kind == TaskKind::dx ? Range{task.block.v, task.block.v + 1}
                                                  : s.chunks.blocks(task.chunk);
    for (std::int64_t b = needs.begin; b < needs.end; ++b) {
      if (dgrad_done[static_cast<std::size_t>(b)] < s.dgrad_tiles_of(task.chunk)) return false;
    }
    const std::int64_t after = s.chunks.chunk_after[chunk];
    if (task.kind == TaskKind::wgrad && after >= 0 &&
        trail_done[static_cast<std::size_t>(after)] < s.trail_tickets(after))
      return false;
    ++trail_done[chunk];
  }
  for (std::int64_t c = 0; c < s.chunks.num_chunks; ++c) {
    if (trail_done[static_cast<std::size_t>(c)] != s.trail_tickets(c)) return false;
  }
  return pulled == t.num_blocks;
}

TEST(PipelineDeadlock, EveryAcceptedBackwardPlanCompletes) {
  const std::vector<std::vector<std::int64_t>> routings = {{0, 0}, {1, 0}, {0, 3},    {5, 1},
                                                           {2, 2}, {7, 0}, {3, 0, 4}, {1, 1, 1, 1}};
  std::int64_t plans = 0, postponed = 0;
  for (std::int64_t shared = 0; shared <= 3; ++shared)
    for (const auto& routing : routings) {
      Problem p{.num_ranks = 1,
                .max_tokens = 512,
                .hidden = 320,
                .intermediate = 192,
                .num_experts = static_cast<std::int64_t>(routing.size()),
                .top_k = 1};
      p.shared.intermediate = shared > 0 ? 64 : 0;
      const Blocks blocks(shared, routing);
      const std::int64_t total = std::max<std::int64_t>(blocks.table.num_blocks, 1);
      for (std::int32_t chunk = 1; chunk <= 4; ++chunk)
        for (std::int32_t lag = 1; lag <= 4; ++lag)
          for (std::int64_t minibatch = 1; minibatch <= 3; ++minibatch)
            for (std::int64_t ring =
                     std::min(total, min_backward_ring_blocks(chunk, lag, minibatch));
                 ring <= total; ++ring)
              for (const bool postpones : {false, true}) {
                Plan plan;
                plan.chunk_blocks = chunk;
                plan.lag_chunks = lag;
                plan.backward_ring_blocks = ring;
                const Chunks chunks(blocks.table, p, plan, {.postpones = postpones});
                ++plans;
                postponed += chunks.stream.postponed > 1;
                ASSERT_TRUE(backward_completes(chunks.stream, blocks.table, minibatch, ring))
                    << "shared=" << shared << " chunk=" << chunk << " lag=" << lag
                    << " minibatch=" << minibatch << " ring=" << ring
                    << " postponed=" << chunks.stream.postponed;
              }
    }
  EXPECT_GT(plans, 4000);
  EXPECT_GT(postponed, 500);  // weight gradients of last chunks behind all dX
}

TEST(PipelineDeadlock, BackwardBoundIsTight) {
  const Blocks blocks(0, {12});
  const Problem p{.num_ranks = 1,
                  .max_tokens = 2048,
                  .hidden = 64,
                  .intermediate = 64,
                  .num_experts = 1,
                  .top_k = 1};
  for (std::int32_t chunk = 1; chunk <= 3; ++chunk)
    for (std::int32_t lag = 1; lag <= 2; ++lag) {
      Plan plan;
      plan.chunk_blocks = chunk;
      plan.lag_chunks = lag;
      const Chunks chunks(blocks.table, p, plan);
      const std::int64_t ring = min_backward_ring_blocks(chunk, lag, 1);
      EXPECT_TRUE(backward_completes(chunks.stream, blocks.table, 1, ring));
      EXPECT_FALSE(backward_completes(chunks.stream, blocks.table, 1, ring - 1))
          << "chunk " << chunk << " lag " << lag;
    }
}

TEST(PipelineDeadlock, BackwardRunsEveryTileExactlyOnce) {
  const Blocks blocks(2, {3, 0, 1, 5});
  Problem p{.num_ranks = 1,
            .max_tokens = 2048,
            .hidden = 320,
            .intermediate = 192,
            .num_experts = 4,
            .top_k = 1};
  p.shared.intermediate = 64;
  for (std::int32_t chunk = 1; chunk <= 6; ++chunk)
    for (std::int32_t lag = 1; lag <= 12; ++lag) {
      Plan plan;
      plan.chunk_blocks = chunk;
      plan.lag_chunks = lag;
      const Chunks c(blocks.table, p, plan);
      const BackwardStream& s = c.stream;
      std::vector<int> dgrad(11 * 8), dx(11 * 8);
      std::vector<std::vector<int>> wgrad(static_cast<std::size_t>(s.chunks.num_chunks));
      for (std::int64_t k = 0; k < s.chunks.num_chunks; ++k) {
        wgrad[static_cast<std::size_t>(k)].resize(static_cast<std::size_t>(s.wgrad_of(k).size()));
      }
      for (std::int64_t t = 0; t < s.num_tickets(); ++t) {
        const Task task = s.task(t);
        const auto at = static_cast<std::size_t>(task.block.v * 8 + task.tile);
        if (task.kind == TaskKind::dgrad)
          ++dgrad[at];
        else if (task.kind == TaskKind::dx)
          ++dx[at];
        else
          ++wgrad[static_cast<std::size_t>(task.chunk)][static_cast<std::size_t>(task.tile)];
      }
      for (std::int64_t b = 0; b < 11; ++b)
        for (std::int64_t t = 0; t < 8; ++t) {
          const auto at = static_cast<std::size_t>(b * 8 + t);
          EXPECT_EQ(dgrad[at], t < (b < 2 ? 1 : 2) ? 1 : 0);
          EXPECT_EQ(dx[at], t < 2 ? 1 : 0);
        }
      for (const auto& tiles : wgrad)
        for (const int n : tiles) EXPECT_EQ(n, 1);
    }
}

}  // namespace
}  // namespace moxie::pipeline
