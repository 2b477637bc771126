// Forward rows do not depend on how many ranks share the work: the same tokens and experts over R =
// 1, 2, 3, ...
#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

constexpr std::int64_t kTokens = 150;

std::vector<std::int64_t> divide(std::int64_t ranks, bool evenly) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(ranks), 0);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    // Unevenly: most tokens on the last rank, none on the first.
    const std::int64_t r = evenly || ranks == 1 ? t % ranks : t % 4 == 0 ? 1 % ranks : ranks - 1;
    ++tokens[static_cast<std::size_t>(r)];
  }
  return tokens;
}

// y of all tokens, in global order, as bytes.
std::vector<std::byte> forward_bits(DType dtype, std::int64_t ranks, bool evenly,
                                    const Plan& plan = {}) {
  Problem p = with_all_parts(small_problem(ranks, 10, 3, 128, 192, dtype), ActivationKind::gpt_oss);
  p.max_tokens = kTokens;
  const LayerCase c({p, divide(ranks, evenly), Routing::zipf}, test_seed());
  World world = make_world(world_options(ranks));
  Layer layer(world, p, plan);
  PassOutputs out(c);
  layer.infer(c.forward_inputs(), out.forward());
  std::vector<std::byte> bytes;
  for (const RankOutputs& rank : out.ranks) {
    bytes.insert(bytes.end(), rank.y.bytes().begin(), rank.y.bytes().end());
  }
  return bytes;
}

class LayerEpSize : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, LayerEpSize, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& type) { return name(type.param); });

TEST_P(LayerEpSize, ForwardRowsAreTheSame) {
  const std::vector<std::byte> want = forward_bits(GetParam(), 1, true);
  for (std::int64_t ranks : {2, 3, 4, 5, 7}) {
    EXPECT_EQ(want, forward_bits(GetParam(), ranks, true)) << ranks << " ranks, evenly";
    EXPECT_EQ(want, forward_bits(GetParam(), ranks, false)) << ranks << " ranks, unevenly";
  }
}

TEST_P(LayerEpSize, AlsoInSplitModeAndWithALag) {
  const std::vector<std::byte> want = forward_bits(GetParam(), 1, true);
  Plan lag;
  lag.order = TaskOrder::lag;
  lag.band_blocks = 2, lag.lag_bands = 1;
  EXPECT_EQ(want, forward_bits(GetParam(), 3, false, {.mode = ExecMode::split}));
  EXPECT_EQ(want, forward_bits(GetParam(), 3, false, lag));
}

TEST_P(LayerEpSize, ATokenDoesNotDependOnItsNeighbours) {
  // The same token in a large batch and alone: the number of rows in a block must not choose the
  // arithmetic.
  Problem p = small_problem(1, 4, 2, 192, 320, GetParam());
  p.max_tokens = 200;
  LayerCase many({p, {200}}, test_seed());
  World world = make_world(world_options(1));
  Layer layer(world, p);
  PassOutputs all(many);
  layer.infer(many.forward_inputs(), all.forward());
  const std::size_t row_bytes = all.ranks[0].y.bytes().size() / 200;
  for (std::int64_t token : {0, 1, 77, 199}) {
    LayerCase alone(many);
    alone.spec.tokens = {1};
    alone.tokens.num_tokens = 1;
    const auto keep = [&](auto& values, std::int64_t width) {
      values = {values.begin() + token * width, values.begin() + (token + 1) * width};
    };
    keep(alone.tokens.x, p.hidden), keep(alone.dy, p.hidden);
    keep(alone.tokens.expert_ids, p.top_k), keep(alone.tokens.route_weights, p.top_k);
    alone.upload();
    PassOutputs one(alone);
    layer.infer(alone.forward_inputs(), one.forward());
    const auto begin =
        all.ranks[0].y.bytes().begin() + token * static_cast<std::ptrdiff_t>(row_bytes);
    EXPECT_TRUE(std::equal(begin, begin + static_cast<std::ptrdiff_t>(row_bytes),
                           one.ranks[0].y.bytes().begin()))
        << "token " << token;
  }
}

}  // namespace
}  // namespace moxie::test
