// Forward and backward against the FP64 oracle: arithmetic variants. Shapes and routes have their
// own files.
#include <gtest/gtest.h>

#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

struct Variant {
  DType dtype;
  ActivationKind activation;
};
class LayerNumerics : public ::testing::TestWithParam<Variant> {
 protected:
  // Enough tokens per rank that a bound on the error of their sums means something.
  CaseSpec spec() const {
    CaseSpec s{small_problem(2, 5, 3, 128, 192, GetParam().dtype), {41, 64}};
    s.problem.activation = {.kind = GetParam().activation, .limit = 1.0f + 1.0f / 256};
    return s;
  }
};

TEST_P(LayerNumerics, RoutedOnly) { expect_right(LayerCase(spec(), test_seed())); }

TEST_P(LayerNumerics, Biases) {
  CaseSpec s = spec();
  s.problem.expert_bias = true;
  expect_right(LayerCase(s, test_seed()));
}

TEST_P(LayerNumerics, SharedExpertOfAnotherWidth) {
  CaseSpec s = spec();
  s.problem.shared = {.intermediate = 320, .output_gate = false};
  expect_right(LayerCase(s, test_seed()));
}

TEST_P(LayerNumerics, EverythingAtOnce) {
  CaseSpec s = spec();
  s.problem = with_all_parts(s.problem, GetParam().activation);
  s.routing = Routing::masked;
  expect_right(LayerCase(s, test_seed()));
}

TEST_P(LayerNumerics, GradientsInStorageType) {
  CaseSpec s = spec();
  s.problem = with_all_parts(s.problem, GetParam().activation);
  expect_right(LayerCase(s, test_seed()), {}, s.problem.dtype);
}

INSTANTIATE_TEST_SUITE_P(Variants, LayerNumerics,
                         ::testing::Values(Variant{DType::f32, ActivationKind::swiglu},
                                           Variant{DType::f32, ActivationKind::swiglu_clamped},
                                           Variant{DType::f32, ActivationKind::gpt_oss},
                                           Variant{DType::bf16, ActivationKind::swiglu},
                                           Variant{DType::bf16, ActivationKind::swiglu_clamped},
                                           Variant{DType::bf16, ActivationKind::gpt_oss}),
                         [](const auto& v) {
                           return std::string(name(v.param.dtype)) + "_" + name(v.param.activation);
                         });

TEST(LayerNumericsRouter, ZeroNegativeAndTinyWeightsHaveExactGradients) {
  // A gradient made as rowsum(dA . A) / w would be NaN at 0 and noise at 1e-30.
  LayerCase c({small_problem(2, 4, 4), {20, 12}}, test_seed());
  for (std::int64_t t = 0; t < c.tokens.num_tokens; ++t) {
    c.route_weight(t, 0) = 0.0;
    c.route_weight(t, 1) = -0.75;
    c.route_weight(t, 2) = static_cast<float>(1e-30);
  }
  c.upload();
  expect_right(c);
}

TEST(LayerNumericsRouter, SharedExpertOnly) {
  // Every route masked: only the shared expert contributes, and its gate still gets a gradient.
  CaseSpec s{small_problem(3, 4, 2, 64, 64, DType::bf16), {33, 0, 40}};
  s.problem = with_all_parts(s.problem, ActivationKind::gpt_oss);
  LayerCase c(s, test_seed());
  std::fill(c.tokens.expert_ids.begin(), c.tokens.expert_ids.end(), -1);
  c.upload();
  expect_right(c);
}

}  // namespace
}  // namespace moxie::test
