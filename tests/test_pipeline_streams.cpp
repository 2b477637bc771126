// Task streams and tilings: every unit of work appears exactly once, for every small size and every
// plan shape.
#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

#include "moxie/pipeline/tasks.h"

namespace moxie::pipeline {
namespace {

using Key = std::tuple<TaskKind, std::int64_t, std::int64_t>;  // kind, block or chunk, tile

std::map<Key, int> count_tasks(const ForwardStream& s) {
  std::map<Key, int> seen;
  for (std::int64_t t = 0; t < s.num_tickets(); ++t) {
    const Task task = s.task(t);
    ++seen[{task.kind, task.block.v, task.tile}];
  }
  return seen;
}

TEST(PipelineStreams, ForwardRunsEveryTileExactlyOnce) {
  for (const TaskOrder order : {TaskOrder::slabs, TaskOrder::lag})
    for (std::int64_t shared = 0; shared <= 3; ++shared)
      for (std::int64_t routed = 0; routed <= 9; ++routed)
        for (std::int64_t fc1 = 1; fc1 <= 3; ++fc1)
          for (std::int64_t fc2 = 1; fc2 <= 5; ++fc2)
            for (std::int64_t band = 1; band <= 4; ++band)
              for (std::int64_t lag = 1; lag <= 3; ++lag)
                for (std::int64_t slabs = 1; slabs <= fc2; ++slabs) {
                  const ForwardStream s{order, shared, routed, 2, fc1, fc2, band, lag, slabs};
                  const auto seen = count_tasks(s);
                  std::size_t expected = 0;
                  for (std::int64_t b = 0; b < shared + routed; ++b) {
                    const std::int64_t tiles = b < shared ? 2 : fc1;
                    for (std::int64_t t = 0; t < tiles; ++t, ++expected)
                      ASSERT_EQ(seen.count({TaskKind::fc1, b, t}), 1u);
                    for (std::int64_t t = 0; t < fc2; ++t, ++expected)
                      ASSERT_EQ(seen.count({TaskKind::fc2, b, t}), 1u);
                  }
                  ASSERT_EQ(static_cast<std::size_t>(s.num_tickets()),
                            expected);  // so no count is above one
                  ASSERT_EQ(seen.size(), expected);
                }
}

TEST(PipelineStreams, SlabsOrderFinishesASlabBeforeTheNext) {
  const ForwardStream s{TaskOrder::slabs, 0, 5, 0, 2, 7, 2, 1, 3};
  std::int64_t slab = 0;
  for (std::int64_t t = 5 * 2; t < s.num_tickets(); ++t) {
    const std::int64_t now = slab_of_tile(s.task(t).tile, 3, 7);
    EXPECT_GE(now, slab);
    slab = now;
  }
  EXPECT_EQ(slab, 2);
}

TEST(PipelineStreams, LagOrderTrailsByLagBands) {
  const ForwardStream s{TaskOrder::lag, 0, 12, 0, 2, 3, 2, 2, 1};
  std::int64_t fc1_band = -1;
  for (std::int64_t t = 0; t < s.num_tickets(); ++t) {
    const Task task = s.task(t);
    const std::int64_t band = task.block.v / 2;
    if (task.kind == TaskKind::fc1)
      fc1_band = band;
    else
      EXPECT_EQ(std::min<std::int64_t>(band + 2, 5), fc1_band) << "ticket " << t;
  }
}

TEST(PipelineStreams, SlabsPartitionTheTiles) {
  for (std::int64_t tiles = 1; tiles <= 40; ++tiles)
    for (std::int64_t slabs = 1; slabs <= tiles; ++slabs) {
      std::int64_t next = 0;
      for (std::int64_t s = 0; s < slabs; ++s) {
        const Range r = slab_tiles(s, slabs, tiles);
        ASSERT_EQ(r.begin, next);
        ASSERT_GT(r.size(), 0);
        for (std::int64_t t = r.begin; t < r.end; ++t) ASSERT_EQ(slab_of_tile(t, slabs, tiles), s);
        next = r.end;
      }
      ASSERT_EQ(next, tiles);
    }
}

TEST(PipelineStreams, WgradTilesCoverEachMatrixOnce) {
  for (const auto& [h, i] :
       {std::pair<std::int64_t, std::int64_t>{64, 64}, {320, 192}, {704, 1408}, {2880, 64}}) {
    const WgradTiles tiles{h, i};
    std::vector<std::vector<int>> hits(3, std::vector<int>(static_cast<std::size_t>(h * i), 0));
    for (std::int64_t t = 0; t < tiles.size(); ++t) {
      const WgradTile w = tiles.tile(t);
      const std::int64_t ld = w.matrix == WeightMatrix::down ? i : h;
      for (std::int64_t r = w.rows.begin; r < w.rows.end; ++r)
        for (std::int64_t c = w.cols.begin; c < w.cols.end; ++c)
          ++hits[static_cast<std::size_t>(w.matrix)][static_cast<std::size_t>(r * ld + c)];
    }
    for (const auto& m : hits)
      for (const int n : m) ASSERT_EQ(n, 1);
  }
}

TEST(PipelineStreams, DispatchAndMergeUnitsCoverEverything) {
  const std::vector<std::int64_t> prefix = {0, 0, 130, 130,
                                            131};  // experts with 0, 130, 0, 1 rows on one rank
  std::vector<std::int64_t> row_prefix;
  std::vector<std::int32_t> begin(4, 0), blocks = {2, 2, 4, 4, 5};
  for (std::size_t e = 0; e < 4; ++e) {
    row_prefix.push_back(0);
    row_prefix.push_back(prefix[e + 1] - prefix[e]);
  }
  BlockTable t{1, RankId{0}, 4, 200, 2, 5, row_prefix.data(), begin.data(), blocks.data()};
  std::map<std::pair<std::int64_t, std::int64_t>, int> rows;
  for (std::int64_t u = 0; u < num_dispatch_units(t); ++u) {
    const DispatchUnit d = dispatch_unit(t, u);
    for (std::int64_t r = d.rows.begin; r < d.rows.end; ++r) ++rows[{d.block.v, r}];
  }
  EXPECT_EQ(rows.size(), 131u);
  for (const auto& [where, n] : rows) EXPECT_EQ(n, 1);
  EXPECT_EQ(t.rows(BlockId{0}), 128);
  EXPECT_EQ(t.rows(BlockId{1}), 72);
  EXPECT_EQ(t.expert(BlockId{3}).v, 1);
  EXPECT_EQ(t.expert(BlockId{4}).v, 3);
  for (const std::int64_t tokens : {0, 1, 15, 16, 17, 100})
    for (const std::int64_t slabs : {1, 3}) {
      std::map<std::pair<std::int64_t, std::int64_t>, int> seen;
      for (std::int64_t u = 0; u < num_merge_units(tokens, slabs); ++u) {
        const MergeUnit m = merge_unit(u, tokens);
        for (std::int64_t k = m.tokens.begin; k < m.tokens.end; ++k) ++seen[{m.slab, k}];
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(tokens * slabs));
    }
}

}  // namespace
}  // namespace moxie::pipeline
