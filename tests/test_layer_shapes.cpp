// Forward and backward against the oracle over sizes: ranks, uneven experts, ragged and empty
// ranks, K, tails in H and I, rows per expert around a block.
#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

CaseSpec spec_of(const Problem& problem, std::vector<std::int64_t> tokens,
                 Routing routing = Routing::uniform) {
  return {problem, std::move(tokens), routing};
}

class LayerRanks : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(LayerRanks, RaggedTokensUnevenExperts) {
  const std::int64_t r = GetParam();
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < r; ++i) tokens.push_back((i * 13 + 5) % 29);
  Problem p = small_problem(r, r + r / 2 + 1, 2);
  p.shared.intermediate = 64;
  expect_right(LayerCase(spec_of(p, tokens, Routing::zipf), test_seed()));
}

TEST_P(LayerRanks, Bf16EverythingAtOnce) {
  const std::int64_t r = GetParam();
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < r; ++i) tokens.push_back(16 + (i * 7) % 11);
  const Problem p =
      with_all_parts(small_problem(r, 2 * r + 1, 3, 64, 64, DType::bf16), ActivationKind::gpt_oss);
  expect_right(LayerCase(spec_of(p, tokens), test_seed()), {}, DType::bf16);
}
INSTANTIATE_TEST_SUITE_P(Ep, LayerRanks, ::testing::Range<std::int64_t>(1, 9));

struct ExpertSplit {
  std::int64_t experts, ranks;
};
class LayerExperts : public ::testing::TestWithParam<ExpertSplit> {};

TEST_P(LayerExperts, AllExpertsAreServed) {
  const auto [e, r] = GetParam();
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < r; ++i) tokens.push_back(9 + i % 3);
  expect_right(LayerCase(spec_of(small_problem(r, e, 2), tokens), test_seed()));
}
INSTANTIATE_TEST_SUITE_P(Splits, LayerExperts,
                         ::testing::Values(ExpertSplit{10, 3}, ExpertSplit{8, 5}, ExpertSplit{6, 4},
                                           ExpertSplit{3, 4}, ExpertSplit{5, 8}, ExpertSplit{2, 7},
                                           ExpertSplit{256, 3}, ExpertSplit{128, 24}),
                         [](const auto& s) {
                           return "E" + std::to_string(s.param.experts) + "_R" +
                                  std::to_string(s.param.ranks);
                         });

class LayerRagged : public ::testing::TestWithParam<std::vector<std::int64_t>> {};

TEST_P(LayerRagged, EmptyRanksTakePart) {
  const auto& tokens = GetParam();
  Problem p = small_problem(static_cast<std::int64_t>(tokens.size()), 6, 2);
  for (bool shared : {false, true}) {
    p.shared = {.intermediate = shared ? 64 : 0, .output_gate = shared};
    for (Routing routing : {Routing::uniform, Routing::one_expert}) {
      SCOPED_TRACE(::testing::Message()
                   << "shared " << shared << " routing " << static_cast<int>(routing));
      expect_right(LayerCase(spec_of(p, tokens, routing), test_seed()));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(
    Tokens, LayerRagged,
    ::testing::Values(std::vector<std::int64_t>{0, 5, 5, 5}, std::vector<std::int64_t>{0, 0, 0, 0},
                      std::vector<std::int64_t>{0, 0, 17, 0}, std::vector<std::int64_t>{1, 0, 0, 0},
                      std::vector<std::int64_t>{1}, std::vector<std::int64_t>{0},
                      std::vector<std::int64_t>{7, 64, 33}));

TEST(LayerShapes, EverythingRoutedToTheFirstRank) {
  LayerCase c(spec_of(small_problem(4, 8, 2), {0, 30, 64, 11}), test_seed());
  for (std::int64_t& e : c.tokens.expert_ids) e %= 2;  // both experts of rank 0
  c.upload();
  expect_right(c);
}

TEST(LayerShapes, TopOne) {
  expect_right(LayerCase(spec_of(small_problem(3, 7, 1), {40, 1, 20}), test_seed()));
}

TEST(LayerShapes, TopKIsEveryExpert) {
  expect_right(LayerCase(spec_of(small_problem(3, 7, 7), {20, 0, 31}), test_seed()));
  expect_right(LayerCase(spec_of(small_problem(1, 1, 1), {31}), test_seed()));
}

TEST(LayerShapes, TopSixteen) {
  expect_right(
      LayerCase(spec_of(small_problem(2, 40, 16, 64, 64, DType::bf16), {10, 13}), test_seed()));
}

struct Widths {
  std::int64_t hidden, intermediate;
};
class LayerWidths : public ::testing::TestWithParam<Widths> {};

TEST_P(LayerWidths, TailsInBothTypes) {
  const auto [h, i] = GetParam();
  for (DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name(dtype));
    Problem p = small_problem(2, 3, 2, h, i, dtype);
    p.shared.intermediate = 320;
    expect_right(LayerCase(spec_of(p, {18, 25}), test_seed()));
  }
}
INSTANTIATE_TEST_SUITE_P(Tails, LayerWidths,
                         ::testing::Values(Widths{64, 64}, Widths{192, 64}, Widths{320, 192},
                                           Widths{64, 320}, Widths{704, 320}, Widths{576, 448},
                                           Widths{256, 128}, Widths{128, 704}),
                         [](const auto& w) {
                           return "H" + std::to_string(w.param.hidden) + "_I" +
                                  std::to_string(w.param.intermediate);
                         });

class LayerRowCounts : public ::testing::TestWithParam<std::vector<std::int64_t>> {};

TEST_P(LayerRowCounts, PaddingIsNeverRead) {
  // The workspace is full of NaN (0xFF), so a row read past the real count shows in a result.
  const auto& rows = GetParam();
  const std::int64_t total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  for (DType dtype : {DType::f32, DType::bf16}) {
    SCOPED_TRACE(name(dtype));
    Problem p = small_problem(2, static_cast<std::int64_t>(rows.size()), 1, 64, 64, dtype);
    p.max_tokens = total;
    p.expert_bias = true;
    LayerCase c(spec_of(p, {total / 3, total - total / 3}), test_seed());
    c.route_exactly(rows, test_seed() + 1);
    World world = make_world(world_options(2));
    Layer layer(world, p);
    const Reference ref = reference_of(c);
    PassOutputs out(c);
    const Context context = layer.forward(c.forward_inputs(), out.forward());
    layer.backward(context, c.backward_inputs(), out.backward());
    expect_close(c, ref, out);
    PassOutputs again(c);  // a second backward finds the workspace of the first
    layer.forward(c.forward_inputs(), again.forward());
    layer.backward(context, c.backward_inputs(), again.backward());
    EXPECT_TRUE(same_bits(out, again));
  }
}
INSTANTIATE_TEST_SUITE_P(Rows, LayerRowCounts,
                         ::testing::Values(std::vector<std::int64_t>{0, 3, 0, 128, 1, 0, 0, 200},
                                           std::vector<std::int64_t>{0, 1, 127, 128, 129},
                                           std::vector<std::int64_t>{129, 0, 0, 0},
                                           std::vector<std::int64_t>{0, 0, 0, 257},
                                           std::vector<std::int64_t>{256, 384}));

}  // namespace
}  // namespace moxie::test
