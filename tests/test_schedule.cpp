// Schedule: a property test over random routings. Every valid route becomes exactly one row, on the
// rank of its expert, in the order (rotated source, token, slot); masked weights are never read.
// Ids of both widths are checked.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "moxie/schedule/schedule_ref.h"
#include "tests/support/env.h"

namespace moxie::schedule {
namespace {

struct RankRoutes {
  std::int64_t num_tokens = 0;
  std::vector<std::int32_t> ids, sorted, begin;
  std::vector<float> weights, sorted_weights;
};

void check_routing(std::mt19937_64& rng) {
  auto draw = [&](std::int64_t lo, std::int64_t hi) {
    return std::uniform_int_distribution<std::int64_t>(lo, hi)(rng);
  };
  Problem p{.num_ranks = draw(1, 9),
            .max_tokens = 300,
            .hidden = 64,
            .intermediate = 64,
            .num_experts = draw(1, 20),
            .top_k = draw(1, 6)};
  p.shared.intermediate = draw(0, 1) * 64;
  std::vector<RankRoutes> ranks(static_cast<std::size_t>(p.num_ranks));
  std::vector<const std::int32_t*> begins;
  const std::int64_t popular = draw(0, p.num_experts - 1), skew = draw(0, 3);
  for (auto& r : ranks) {
    r.num_tokens = draw(0, 3) == 0 ? 0 : draw(0, p.max_tokens);
    const auto n = static_cast<std::size_t>(r.num_tokens * p.top_k);
    for (std::size_t i = 0; i < n; ++i) {
      r.ids.push_back(
          static_cast<std::int32_t>(draw(0, 3) < skew ? popular : draw(-1, p.num_experts - 1)));
      r.weights.push_back(r.ids.back() < 0 ? std::nanf("") : static_cast<float>(draw(1, 1000)));
    }
    r.sorted.assign(n, -7);
    r.sorted_weights.assign(n, 0.0f);
    r.begin.assign(static_cast<std::size_t>(p.num_experts + 1), -7);
    sort_routes(r.ids.data(), r.weights.data(), static_cast<std::int64_t>(n), p.num_experts,
                r.sorted.data(), r.sorted_weights.data(), r.begin.data());
    begins.push_back(r.begin.data());
  }
  std::set<std::pair<std::int32_t, std::int32_t>> seen;  // (rank, route)
  for (std::int64_t me = 0; me < p.num_ranks; ++me) {
    const std::int64_t local = num_local_experts(p.num_experts, p.num_ranks, RankId{me});
    std::vector<std::int64_t> prefix(static_cast<std::size_t>(local * (p.num_ranks + 1)) + 1);
    std::vector<std::int32_t> source(static_cast<std::size_t>(local * p.num_ranks) + 1),
        block(static_cast<std::size_t>(local) + 1);
    const auto t = build_blocks(p, RankId{me}, ranks[static_cast<std::size_t>(me)].num_tokens,
                                begins, prefix.data(), source.data(), block.data());
    ASSERT_EQ(t.shared_blocks,
              p.shared.intermediate > 0
                  ? pipeline::num_blocks(ranks[static_cast<std::size_t>(me)].num_tokens)
                  : 0);
    ASSERT_LE(t.num_blocks - t.shared_blocks, pipeline::worst_case_blocks(p));
    for (BlockId b{t.shared_blocks}; b.v < t.num_blocks; ++b.v) {
      const LocalExpertId e = t.expert(b);
      const std::int64_t global = expert_begin(p.num_experts, p.num_ranks, RankId{me}) + e.v;
      ASSERT_GT(t.rows(b), 0);
      std::pair<std::int64_t, std::int32_t> last{-1, -1};
      for (std::int64_t i = 0; i < t.rows(b); ++i) {
        const auto s = t.source(e, (b.v - t.expert_block[e.v]) * pipeline::kBlockRows + i);
        const RankRoutes& home = ranks[static_cast<std::size_t>(s.rank.v)];
        const std::int32_t route = home.sorted[static_cast<std::size_t>(s.sorted_idx)];
        ASSERT_EQ(home.ids[static_cast<std::size_t>(route)], global);
        ASSERT_EQ(home.sorted_weights[static_cast<std::size_t>(s.sorted_idx)],
                  home.weights[static_cast<std::size_t>(route)]);
        ASSERT_TRUE(seen.insert({s.rank.v, route}).second) << "route seen twice";
        const std::pair<std::int64_t, std::int32_t> order{
            (s.rank.v - me + p.num_ranks) % p.num_ranks, route};
        ASSERT_LT(last, order);
        last = order;
      }
    }
  }
  std::size_t valid = 0;
  for (const auto& r : ranks) {
    for (const std::int32_t id : r.ids) valid += id >= 0;
  }
  ASSERT_EQ(seen.size(), valid);
}

TEST(Schedule, EveryRouteBecomesExactlyOneRow) {
  const std::uint64_t seed = test::test_seed();
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 300; ++i) {
    check_routing(rng);
    if (HasFatalFailure()) FAIL() << "routing " << i << " of seed " << seed;
  }
}

TEST(Schedule, FindsTheFirstBadId) {
  const std::vector<std::int64_t> wide = {0, 3, -1, 1ll << 32, 9};
  std::vector<std::int32_t> out(5);
  const BadRoute bad = narrow_ids(wide.data(), 5, 4, out.data());
  EXPECT_EQ(bad.route, 3);
  EXPECT_EQ(bad.id, 1ll << 32);  // would pass for 0 if it were cut to 32 bits first
  const std::vector<std::int32_t> narrow = {0, -2};
  EXPECT_EQ(narrow_ids(narrow.data(), 2, 4, out.data()).route, 1);
  EXPECT_EQ(narrow_ids(narrow.data(), 1, 4, out.data()).route, -1);
}

// An expert with more rows than 32 bits: the table is virtual.
TEST(Schedule, RowNumbersAre64Bit) {
  const std::int64_t rows = (1ll << 31) + 5;
  const std::vector<std::int64_t> prefix = {0, rows - 3, rows};
  const std::vector<std::int32_t> begin = {7, 11};
  const std::vector<std::int32_t> block = {0,
                                           static_cast<std::int32_t>(pipeline::num_blocks(rows))};
  const pipeline::BlockTable t{
      2, RankId{1}, 1, 0, 0, block[1], prefix.data(), begin.data(), block.data()};
  EXPECT_EQ(t.source(LocalExpertId{0}, rows - 1).rank.v, 0);
  EXPECT_EQ(t.source(LocalExpertId{0}, rows - 1).sorted_idx, 11 + 2);
  EXPECT_EQ(t.source(LocalExpertId{0}, rows - 4).rank.v, 1);
  EXPECT_EQ(t.source(LocalExpertId{0}, rows - 4).sorted_idx, 7 + rows - 4);
  EXPECT_EQ(t.rows(BlockId{block[1] - 1}), rows % 128);
}

}  // namespace
}  // namespace moxie::schedule
