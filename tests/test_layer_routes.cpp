// What a route may look like: id types, -1, duplicates; and what must not be read or written
// because of it.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

TEST(LayerRoutes, Int32AndInt64IdsGiveTheSameBits) {
  CaseSpec spec{small_problem(3, 7, 3, 64, 128, DType::bf16), {21, 0, 30}, Routing::masked};
  spec.id_dtype = DType::i64;
  const LayerCase wide(spec, test_seed());
  spec.id_dtype = DType::i32;
  const LayerCase narrow(spec, test_seed());
  EXPECT_TRUE(same_bits(run_alone(wide), run_alone(narrow)));
}

TEST(LayerRoutes, MaskedSlotsAreNeitherReadNorWritten) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    LayerCase c({small_problem(2, 5, 2, 64, 64, dtype), {16, 19}}, test_seed());
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto mask = [&](std::int64_t token, std::int64_t slot) {
      c.expert_id(token, slot) = -1;
      c.route_weight(token, slot) = nan;
    };
    c.expert_id(3, 0) = 3;
    mask(3, 1);
    mask(4, 0), mask(4, 1);
    mask(5, 0);
    mask(20, 0), mask(20, 1);  // on rank 1
    c.upload();
    const PassOutputs out = run_alone(c);
    expect_close(c, reference_of(c), out);
    // A token without routes: exactly +0, not merely small.
    const auto all_zero_bits = [](const OwnedTensor& t, std::int64_t row) {
      const std::size_t bytes = t.bytes().size() / static_cast<std::size_t>(t.shape().dim[0]);
      for (std::size_t i = 0; i < bytes; ++i) {
        if (t.bytes()[static_cast<std::size_t>(row) * bytes + i] != std::byte{0}) return false;
      }
      return true;
    };
    EXPECT_TRUE(all_zero_bits(out.ranks[0].y, 4));
    EXPECT_TRUE(all_zero_bits(out.ranks[0].dx, 4));
    EXPECT_TRUE(all_zero_bits(out.ranks[0].d_route_weights, 4));
    EXPECT_TRUE(all_zero_bits(out.ranks[1].y, 4));
    EXPECT_TRUE(all_zero_bits(out.ranks[1].dx, 4));
    EXPECT_EQ(out.ranks[0].d_route_weights.get(3 * 2 + 1), 0.0);
    EXPECT_EQ(out.ranks[0].d_route_weights.get(5 * 2 + 0), 0.0);
  }
}

TEST(LayerRoutes, TokensWithoutRoutesDoNotSpreadTheirNans) {
  // Nobody pulls x of a token without routes, so what it holds cannot matter (no shared expert
  // here).
  CaseSpec spec{small_problem(2, 5, 2), {16, 19}};
  LayerCase c(spec, test_seed());
  for (std::int64_t slot = 0; slot < 2; ++slot) c.expert_id(7, slot) = -1;
  c.upload();
  const PassOutputs clean = run_alone(c);
  for (std::int64_t h = 0; h < 64; ++h)
    c.tokens.x[static_cast<std::size_t>(7 * 64 + h)] = std::nan("");
  c.upload();
  EXPECT_TRUE(same_bits(clean, run_alone(c)));
}

TEST(LayerRoutes, EveryRouteMasked) {
  LayerCase c({small_problem(3, 5, 2), {6, 0, 9}}, test_seed());
  std::fill(c.tokens.expert_ids.begin(), c.tokens.expert_ids.end(), -1);
  c.upload();
  expect_right(c);  // zero outputs and exact zero gradients: the judge allows nothing else
}

TEST(LayerRoutes, DuplicateExpertsBothCount) {
  CaseSpec spec{small_problem(3, 64, 4), {12, 20, 3}};
  LayerCase c(spec, test_seed());
  for (std::int64_t t = 0; t < c.tokens.num_tokens; t += 2) {
    const std::int64_t ids[] = {62, 62, 13, 5};
    for (std::int64_t k = 0; k < 4; ++k) {
      c.expert_id(t, k) = ids[k];
      c.route_weight(t, k) = 0.25 * static_cast<double>(k + 1);
    }
  }
  c.upload();
  expect_right(c);
}

TEST(LayerRoutes, MergeSumsInSlotOrder) {
  // Each slot alone gives its piece exactly; the whole is their FP32 sum, first slot first. Any
  // other order differs in the last bits of some element.
  const std::int64_t k = 5, h = 64;
  const LayerCase whole({small_problem(3, 11, k), {25, 8, 31}}, test_seed());
  World world = make_world(world_options(3));
  Layer layer(world, whole.problem());
  std::vector<float> sum(static_cast<std::size_t>(whole.tokens.num_tokens * h), 0.0f);
  for (std::int64_t slot = 0; slot < k; ++slot) {
    LayerCase one(whole);
    for (std::int64_t t = 0; t < one.tokens.num_tokens; ++t) {
      for (std::int64_t other = 0; other < k; ++other) {
        if (other != slot) one.expert_id(t, other) = -1;
      }
    }
    one.upload();
    PassOutputs piece(one);
    layer.infer(one.forward_inputs(), piece.forward());
    std::size_t at = 0;
    for (const RankOutputs& rank : piece.ranks) {
      for (double v : rank.y.values()) sum[at++] += static_cast<float>(v);
    }
  }
  PassOutputs out(whole);
  layer.infer(whole.forward_inputs(), out.forward());
  std::size_t at = 0;
  for (const RankOutputs& rank : out.ranks) {
    for (double v : rank.y.values()) ASSERT_EQ(static_cast<float>(v), sum[at++]);
  }
}

class LayerRouting : public ::testing::TestWithParam<Routing> {};

TEST_P(LayerRouting, MatchesTheOracle) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name(dtype));
    CaseSpec spec{small_problem(3, 9, 4, 64, 64, dtype), {50, 64, 22}, GetParam()};
    expect_right(LayerCase(spec, test_seed()));
  }
}
INSTANTIATE_TEST_SUITE_P(Kinds, LayerRouting,
                         ::testing::Values(Routing::uniform, Routing::zipf, Routing::one_expert,
                                           Routing::masked, Routing::duplicates));

}  // namespace
}  // namespace moxie::test
