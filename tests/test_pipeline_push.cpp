// Push dispatch: every row goes exactly once to the place where its expert's rank expects it, and
// no accepted plan can deadlock. One in-order pusher and one in-order compute worker per rank, the
// hardest case, over random routings and every ring size from the minimum on; one slot fewer than
// the minimum does deadlock.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "moxie/pipeline/tasks.h"
#include "moxie/schedule/push_ref.h"
#include "moxie/schedule/schedule_ref.h"
#include "tests/support/env.h"

namespace moxie::pipeline {
namespace {

// The tables of every rank for given counts: rows[s][e] routes of rank s to expert e.
struct Tables {
  Problem problem;
  std::vector<std::vector<std::int32_t>> route_begin;  // [R][E + 1]
  struct Rank {
    std::vector<std::int64_t> row_prefix;
    std::vector<std::int32_t> source_begin, expert_block, first_row, push_block, shared, units;
    BlockTable table;
    PushTable push;
  };
  std::vector<Rank> ranks;

  Tables(const std::vector<std::vector<std::int64_t>>& rows,
         const std::vector<std::int32_t>& tokens, std::int64_t shared_intermediate,
         std::int64_t max_blocks) {
    Problem& p = problem;
    p.num_ranks = static_cast<std::int64_t>(rows.size());
    p.num_experts = static_cast<std::int64_t>(rows[0].size());
    p.hidden = 640;
    p.intermediate = 192;
    p.shared.intermediate = shared_intermediate;
    std::vector<const std::int32_t*> begins;
    for (const auto& counts : rows) {
      std::vector<std::int32_t> begin(counts.size() + 1, 0);
      for (std::size_t e = 0; e < counts.size(); ++e)
        begin[e + 1] = begin[e] + static_cast<std::int32_t>(counts[e]);
      route_begin.push_back(begin);
    }
    for (const auto& begin : route_begin) begins.push_back(begin.data());
    const auto n = static_cast<std::size_t>(p.num_ranks),
               e = static_cast<std::size_t>(p.num_experts);
    ranks.resize(n);
    for (std::size_t r = 0; r < n; ++r) {
      Rank& rank = ranks[r];
      rank.row_prefix.resize(e * (n + 1));
      rank.source_begin.resize(e * n);
      rank.expert_block.resize(e + 1);
      rank.first_row.resize(e);
      rank.push_block.resize(e + n);
      rank.shared.resize(n);
      rank.units.resize(static_cast<std::size_t>(max_blocks) * n + 1);
      const RankId me{static_cast<std::int64_t>(r)};
      rank.table = schedule::build_blocks(p, me, tokens[r], begins, rank.row_prefix.data(),
                                          rank.source_begin.data(), rank.expert_block.data());
      rank.push =
          schedule::build_push(p, me, begins, tokens, max_blocks, rank.first_row.data(),
                               rank.push_block.data(), rank.shared.data(), rank.units.data());
    }
  }
  Rank& of(RankId r) { return ranks[static_cast<std::size_t>(r.v)]; }
};

constexpr std::int64_t kMaxBlocks = 200;

Tables random_tables(std::mt19937_64& rng) {
  const auto pick = [&](std::int64_t n) {
    return static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(n));
  };
  const std::int64_t some[] = {0, 0, 1, 15, 17, 100, 128, 129, 300};
  const std::int64_t ranks = 1 + pick(4), experts = 1 + pick(6);
  std::vector<std::vector<std::int64_t>> rows;
  std::vector<std::int32_t> tokens;
  for (std::int64_t r = 0; r < ranks; ++r) {
    rows.emplace_back();
    for (std::int64_t e = 0; e < experts; ++e) rows.back().push_back(some[pick(9)]);
    tokens.push_back(static_cast<std::int32_t>(pick(300)));
  }
  return Tables(rows, tokens, pick(2) * 64, kMaxBlocks);
}

TEST(PipelinePush, EveryRowOnceWhereItsExpertsRankExpectsIt) {
  std::mt19937_64 rng(test::test_seed());
  for (int round = 0; round < 300; ++round) {
    Tables tables = random_tables(rng);
    std::vector<std::vector<int>> hits;
    for (const auto& rank : tables.ranks) hits.emplace_back(rank.table.num_blocks * kBlockRows, 0);
    for (auto& rank : tables.ranks) {
      std::int64_t last_block = 0;
      for (std::int64_t unit = 0; unit < rank.push.num_units(); ++unit) {
        const PushRows u = push_unit(rank.push, unit);
        ASSERT_GE(u.block, last_block);
        last_block = u.block;
        ASSERT_GT(u.rows.size(), 0);
        ASSERT_LE(u.rows.size(), kDispatchUnitRows);
        const BlockTable& there = tables.of(u.to).table;
        const BlockId b = push_block(rank.push, u);
        ASSERT_FALSE(there.is_shared(b));
        ASSERT_LE(u.rows.end, there.rows(b));
        const LocalExpertId e = there.expert(b);
        for (std::int64_t i = u.rows.begin; i < u.rows.end; ++i) {
          const std::int64_t in_expert = (b.v - there.expert_block[e.v]) * kBlockRows + i;
          const RowSource source = there.source(e, in_expert);
          ASSERT_EQ(source.rank, rank.push.me);
          ASSERT_EQ(source.sorted_idx, u.sorted_idx + i - u.rows.begin);
          ++hits[static_cast<std::size_t>(u.to.v)][static_cast<std::size_t>(b.v * kBlockRows + i)];
        }
      }
    }
    for (std::size_t r = 0; r < hits.size(); ++r) {
      const BlockTable& t = tables.ranks[r].table;
      for (BlockId b{t.shared_blocks}; b.v < t.num_blocks; ++b.v)
        for (std::int64_t i = 0; i < kBlockRows; ++i)
          ASSERT_EQ(hits[r][static_cast<std::size_t>(b.v * kBlockRows + i)], i < t.rows(b) ? 1 : 0)
              << "rank " << r << " block " << b.v << " row " << i;
    }
  }
}

TEST(PipelinePush, TooManyBlocksMakeNoUnits) {
  Tables tables({{300, 0}, {1, 1}}, {300, 2}, 0, 2);
  EXPECT_EQ(tables.ranks[0].push.num_units(), 0);
  EXPECT_EQ(tables.ranks[1].push.num_units(), 0);
}

// True when every ticket of every rank runs.
bool completes(Tables& tables, const Plan& plan) {
  struct State {
    ForwardStream stream;
    std::int64_t pushed = 0, ticket = 0;
    std::vector<std::int64_t> rows_ready, fc1_done, fc2_done;  // by block
  };
  std::vector<State> states;
  for (const auto& rank : tables.ranks) {
    const auto blocks = static_cast<std::size_t>(rank.table.num_blocks);
    states.push_back({forward_stream(tables.problem, plan, rank.table), 0, 0,
                      std::vector<std::int64_t>(blocks), std::vector<std::int64_t>(blocks),
                      std::vector<std::int64_t>(blocks)});
  }
  const auto at = [](auto& v, std::int64_t i) -> auto& { return v[static_cast<std::size_t>(i)]; };
  const auto push_one = [&](std::size_t r) {
    const PushTable& t = tables.ranks[r].push;
    if (states[r].pushed == t.num_units()) return false;
    const PushRows u = push_unit(t, states[r].pushed);
    State& to = at(states, u.to.v);
    const std::int64_t block = push_block(t, u).v;
    if (u.block >= plan.x_ring_blocks &&
        at(to.fc1_done, block - plan.x_ring_blocks) < to.stream.fc1_tiles)
      return false;
    at(to.rows_ready, block) += u.rows.size();
    ++states[r].pushed;
    return true;
  };
  const auto compute_one = [&](std::size_t r) {
    State& s = states[r];
    const BlockTable& t = tables.ranks[r].table;
    if (s.ticket == s.stream.num_tickets()) return false;
    const Task task = s.stream.task(s.ticket);
    const std::int64_t b = task.block.v;
    const bool shared = t.is_shared(task.block);
    if (task.kind == TaskKind::fc2) {
      if (at(s.fc1_done, b) < (shared ? s.stream.shared_fc1_tiles : s.stream.fc1_tiles))
        return false;
      ++at(s.fc2_done, b);
    } else {
      if (!shared) {
        const std::int64_t idx = minibatch_of(t, task.block, plan.minibatch_blocks);
        const Minibatch m = minibatch(t, idx, plan.minibatch_blocks);
        std::int64_t rows = 0;
        for (std::int64_t k = m.blocks.begin; k < m.blocks.end; ++k) rows += at(s.rows_ready, k);
        if (rows < m.rows) return false;
        const std::int64_t holder = b - plan.hidden_ring_blocks;
        if (holder >= t.shared_blocks && at(s.fc2_done, holder) < s.stream.fc2_tiles) return false;
      }
      ++at(s.fc1_done, b);
    }
    ++s.ticket;
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < states.size(); ++r) {
      while (push_one(r)) moved = true;
      while (compute_one(r)) moved = true;
    }
  }
  for (std::size_t r = 0; r < states.size(); ++r) {
    if (states[r].pushed != tables.ranks[r].push.num_units()) return false;
    if (states[r].ticket != states[r].stream.num_tickets()) return false;
  }
  return true;
}

TEST(PipelinePush, EveryAcceptedPlanCompletes) {
  std::mt19937_64 rng(test::test_seed());
  std::int64_t plans = 0;
  for (int round = 0; round < 300; ++round) {
    Tables tables = random_tables(rng);
    std::int64_t most = 1;
    for (const auto& rank : tables.ranks)
      most = std::max(most, rank.table.num_blocks - rank.table.shared_blocks);
    for (const TaskOrder order : {TaskOrder::slabs, TaskOrder::lag})
      for (std::int32_t band = 1; band <= 3; ++band)
        for (std::int32_t lag = 1; lag <= 2; ++lag)
          for (std::int32_t minibatch = 1; minibatch <= 3; ++minibatch)
            for (std::int64_t x = std::min(most, min_x_ring_blocks(band, minibatch));
                 x <= std::min(most, min_x_ring_blocks(band, minibatch) + 3); ++x) {
              Plan plan;
              plan.order = order;
              plan.num_slabs = 2;
              plan.band_blocks = band;
              plan.lag_bands = lag;
              plan.minibatch_blocks = minibatch;
              plan.x_ring_blocks = x;
              plan.hidden_ring_blocks = min_hidden_ring_blocks(order, band, lag, most);
              ++plans;
              ASSERT_TRUE(completes(tables, plan))
                  << tables.ranks.size() << " ranks, " << to_string(plan);
            }
  }
  EXPECT_GT(plans, 10000);
}

TEST(PipelinePush, TheRingBoundIsTight) {
  Tables tables({{700, 500}, {800, 900}}, {1, 1}, 0, kMaxBlocks);
  for (std::int32_t band = 1; band <= 4; ++band) {
    Plan plan;
    plan.order = TaskOrder::lag;
    plan.num_slabs = 1;
    plan.band_blocks = band;
    plan.hidden_ring_blocks = kMaxBlocks;
    plan.x_ring_blocks = min_x_ring_blocks(band, 1);
    EXPECT_TRUE(completes(tables, plan)) << band;
    --plan.x_ring_blocks;
    EXPECT_TRUE(plan.x_ring_blocks == 0 || !completes(tables, plan)) << band;
  }
}

}  // namespace
}  // namespace moxie::pipeline
