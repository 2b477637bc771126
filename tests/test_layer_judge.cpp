// The judge and the bit comparison themselves: results as inexact as BF16 pass, one wrong row does
// not. Results are made from the oracle here, no layer runs.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

LayerCase many_rows(DType dtype) {
  CaseSpec spec{small_problem(2, 4, 2, 64, 64, dtype), {250, 150}};
  spec.problem = with_all_parts(spec.problem, ActivationKind::gpt_oss);
  spec.problem.max_tokens = 250;
  return LayerCase(spec, test_seed());
}

// What a perfect layer would return: the reference, truncated to the storage type.
PassOutputs from_reference(const LayerCase& c, const Reference& ref) {
  PassOutputs out(c, DType::f32);
  for (std::int64_t r = 0; r < c.num_ranks(); ++r) {
    RankOutputs& rank = out.ranks[static_cast<std::size_t>(r)];
    const auto fill = [](OwnedTensor& t, const std::vector<double>& from, std::int64_t begin) {
      for (std::size_t i = 0; i < t.size(); ++i)
        t.set(i, from[static_cast<std::size_t>(begin) + i]);
    };
    const Span tokens = c.tokens_of(r), experts = c.experts_of(r);
    fill(rank.y, ref.y, tokens.begin * c.problem().hidden);
    fill(rank.dx, ref.grads.dx, tokens.begin * c.problem().hidden);
    fill(rank.d_route_weights, ref.grads.d_route_weights, tokens.begin * c.problem().top_k);
    for (std::size_t part = 0; part < kNumParts; ++part) {
      const Part& info = kParts[part];
      if (info.per_expert) {
        const std::int64_t per_expert = part_shape(c.problem(), part, 1).num_elements();
        fill(rank.grads[part], ref.grads.params.*info.values, experts.begin * per_expert);
      } else {
        fill(rank.grads[part], ref.per_rank[static_cast<std::size_t>(r)].params.*info.values, 0);
      }
    }
  }
  return out;
}

class Judge : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, Judge, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& type) { return name(type.param); });

TEST_P(Judge, AcceptsTheReference) {
  const LayerCase c = many_rows(GetParam());
  const Reference ref = reference_of(c);
  expect_close(c, ref, from_reference(c, ref));
}

TEST_P(Judge, SeesOneWrongRow) {
  const LayerCase c = many_rows(GetParam());
  const Reference ref = reference_of(c);
  const std::size_t h = static_cast<std::size_t>(c.problem().hidden), row = 37 * h;
  {
    PassOutputs scaled = from_reference(c, ref);
    OwnedTensor& y = scaled.ranks[1].y;
    for (std::size_t i = row; i < row + h; ++i) y.set(i, y.get(i) * 1.07);
    EXPECT_NONFATAL_FAILURE(expect_close(c, ref, scaled), "y: ");
  }
  {
    PassOutputs swapped = from_reference(c, ref);
    OwnedTensor& dx = swapped.ranks[0].dx;
    for (std::size_t i = 0; i < h; ++i) {
      const double other = dx.get(row + h + i);
      dx.set(row + h + i, dx.get(row + i));
      dx.set(row + i, other);
    }
    EXPECT_NONFATAL_FAILURE(expect_close(c, ref, swapped), "dx: ");
  }
  {
    PassOutputs zeroed = from_reference(c, ref);
    OwnedTensor& grad = zeroed.ranks[1].grads[2];
    for (std::size_t i = row; i < row + h; ++i) grad.set(i, 0);
    EXPECT_NONFATAL_FAILURE(expect_close(c, ref, zeroed), "d_down: ");
  }
  {
    PassOutputs route = from_reference(c, ref);
    OwnedTensor& d = route.ranks[0].d_route_weights;
    d.set(3, d.get(3) + 0.1 * std::abs(d.get(3)) + 1.0);
    EXPECT_NONFATAL_FAILURE(expect_close(c, ref, route), "d_route_weights: ");
  }
}

TEST_P(Judge, SeesOneElementThatIsNotANumber) {
  const LayerCase c = many_rows(GetParam());
  const Reference ref = reference_of(c);
  PassOutputs out = from_reference(c, ref);
  out.ranks[1].grads[9].set(5, std::numeric_limits<double>::quiet_NaN());
  EXPECT_NONFATAL_FAILURE(expect_close(c, ref, out), "d_shared_output_gate of rank 1: ");
}

TEST(JudgeRule, OneWrongRowPassesTheNormAlone) {
  // Why the elementwise condition exists: among 4000 rows, one that is 20 % off moves the norm by
  // 0.3 %.
  std::vector<double> ref(4000 * 64, 1.0), got = ref;
  for (std::size_t i = 0; i < 64; ++i) got[i] *= 1.2;
  const double no_limit = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(close_to("y", ref, got, 64, {5e-3, no_limit}));
  EXPECT_FALSE(close_to("y", ref, got, 64, tolerance_of(DType::bf16)));
}

TEST(JudgeRule, SumsOfOneRowMayBeOffByMoreInAnElement) {
  std::vector<double> ref(128, 1.0), got = ref;
  got[5] += 0.06;
  got[70] += 0.06;
  const std::vector<std::int64_t> one_each = {1, 1}, one_and_two = {1, 2};
  EXPECT_FALSE(close_to("d_gate", ref, got, 64, {1, 2e-2}));
  EXPECT_TRUE(close_to("d_gate", ref, got, 64, {1, 2e-2}, {}, one_each));
  EXPECT_FALSE(close_to("d_gate", ref, got, 64, {1, 2e-2}, {}, one_and_two));
  got[5] += 0.06;
  EXPECT_FALSE(close_to("d_gate", ref, got, 64, {1, 2e-2}, {}, one_each));
}

TEST(JudgeRule, ZeroRowsMustBeExact) {
  std::vector<double> ref(128, 1.0), got = ref;
  std::fill(ref.begin() + 64, ref.end(), 0.0);
  std::fill(got.begin() + 64, got.end(), 0.0);
  EXPECT_TRUE(close_to("y", ref, got, 64, tolerance_of(DType::bf16)));
  got[100] = 1e-30;
  EXPECT_FALSE(close_to("y", ref, got, 64, tolerance_of(DType::bf16)));
}

TEST(JudgeRule, BitComparisonNamesThePlace) {
  const LayerCase c = many_rows(DType::bf16);
  const Reference ref = reference_of(c);
  const PassOutputs want = from_reference(c, ref);
  PassOutputs got = want;
  EXPECT_TRUE(same_bits(want, got));
  got.ranks[1].dx.set(77, got.ranks[1].dx.get(77) * 2 + 1);
  const auto result = same_bits(want, got);
  EXPECT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("rank 1 dx: 1 of"), std::string::npos)
      << result.message();
  EXPECT_NE(std::string(result.message()).find("first is 77"), std::string::npos);
}

}  // namespace
}  // namespace moxie::test
