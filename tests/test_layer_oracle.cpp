// The oracle itself: its backward against central finite differences of its forward, in FP64, for
// every element of every tensor of a tiny problem; and a few values worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "tests/oracle/oracle.h"
#include "tests/support/env.h"

namespace {

using moxie::ActivationKind;
using moxie::Problem;
using Vector = std::vector<double>;

Vector random_vector(std::mt19937_64& rng, std::int64_t n, double scale) {
  std::normal_distribution<double> normal(0, scale);
  Vector v(static_cast<std::size_t>(n));
  for (double& x : v) x = normal(rng);
  return v;
}

struct Tiny {
  Problem p;
  oracle::Params w;
  oracle::Tokens tokens;
  Vector dy;

  Tiny(ActivationKind kind, std::uint64_t seed) {
    std::mt19937_64 rng(seed);
    p.hidden = 5, p.intermediate = 3, p.num_experts = 4, p.top_k = 3;
    p.activation.kind = kind;
    p.activation.limit = 0.7f;
    p.expert_bias = true;
    p.shared = {.intermediate = 2, .output_gate = true};
    const std::int64_t h = p.hidden, i = p.intermediate, e = p.num_experts, s = 2, n = 4;
    w.gate = random_vector(rng, e * i * h, 0.6), w.up = random_vector(rng, e * i * h, 0.6);
    w.down = random_vector(rng, e * h * i, 0.6);
    w.gate_bias = random_vector(rng, e * i, 0.5), w.up_bias = random_vector(rng, e * i, 0.5);
    w.down_bias = random_vector(rng, e * h, 0.5);
    w.shared_gate = random_vector(rng, s * h, 0.6), w.shared_up = random_vector(rng, s * h, 0.6);
    w.shared_down = random_vector(rng, h * s, 0.6);
    w.shared_output_gate = random_vector(rng, h, 0.6);
    tokens.num_tokens = n;
    tokens.x = random_vector(rng, n * h, 1.0);
    dy = random_vector(rng, n * h, 1.0);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    // An expert without rows (3), a duplicate, masked slots, a token without routes.
    tokens.expert_ids = {0, 1, 2, 2, 2, 0, 1, -1, 0, -1, -1, -1};
    tokens.route_weights = {0.5, 0.0, -0.3, 1e-12, 0.25, 1.5, -1.0, nan, 0.125, nan, nan, nan};
  }
  double loss() const {
    const Vector y = oracle::forward(p, w, tokens);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  }
  double slope(double& value, double step) {
    const double saved = value;
    value = saved + step;
    const double above = loss();
    value = saved - step;
    const double below = loss();
    value = saved;
    return (above - below) / (2 * step);
  }
  // Every element of `values` (a part of this object) against its gradient.
  void check(const char* what, Vector& values, const Vector& gradient) {
    ASSERT_EQ(values.size(), gradient.size()) << what;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) {  // masked slot: never read
        EXPECT_EQ(gradient[i], 0.0) << what << " " << i;
        continue;
      }
      const double bound = 1e-6 * (1 + std::abs(gradient[i]));
      // The shorter step is for the rare value that the longer one carries over the edge of a
      // clamp.
      if (std::abs(slope(values[i], 1e-5) - gradient[i]) <= bound) continue;
      EXPECT_NEAR(slope(values[i], 1e-7), gradient[i], bound) << what << " " << i;
    }
  }
};

class OracleGradients : public ::testing::TestWithParam<ActivationKind> {};

TEST_P(OracleGradients, MatchFiniteDifferences) {
  Tiny t(GetParam(), moxie::test::test_seed());
  const oracle::Gradients g = oracle::backward(t.p, t.w, t.tokens, t.dy);
  t.check("x", t.tokens.x, g.dx);
  t.check("route_weights", t.tokens.route_weights, g.d_route_weights);
  t.check("gate", t.w.gate, g.params.gate);
  t.check("up", t.w.up, g.params.up);
  t.check("down", t.w.down, g.params.down);
  t.check("gate_bias", t.w.gate_bias, g.params.gate_bias);
  t.check("up_bias", t.w.up_bias, g.params.up_bias);
  t.check("down_bias", t.w.down_bias, g.params.down_bias);
  t.check("shared_gate", t.w.shared_gate, g.params.shared_gate);
  t.check("shared_up", t.w.shared_up, g.params.shared_up);
  t.check("shared_down", t.w.shared_down, g.params.shared_down);
  t.check("shared_output_gate", t.w.shared_output_gate, g.params.shared_output_gate);
}

INSTANTIATE_TEST_SUITE_P(Activations, OracleGradients,
                         ::testing::Values(ActivationKind::swiglu, ActivationKind::swiglu_clamped,
                                           ActivationKind::gpt_oss),
                         [](const auto& type) { return moxie::name(type.param); });

// One token, one expert, widths 1: the equations of the contract written out once more.
struct Scalar {
  Problem p;
  oracle::Params w;
  oracle::Tokens tokens{1, {1.0}, {0}, {2.0}};
  explicit Scalar(ActivationKind kind, double g, double u) {
    p.hidden = p.intermediate = p.num_experts = p.top_k = 1;
    p.activation.kind = kind;
    p.activation.limit = 7.0f;
    w.gate = {g}, w.up = {u}, w.down = {1.0};
  }
  double y() const { return oracle::forward(p, w, tokens)[0]; }
};
double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }

TEST(Oracle, ActivationsByHand) {
  EXPECT_NEAR(Scalar(ActivationKind::swiglu, 9, -8).y(), 2 * 9 * sigmoid(9) * -8, 1e-12);
  EXPECT_NEAR(Scalar(ActivationKind::swiglu_clamped, 9, -8).y(), 2 * 7 * sigmoid(7) * -7, 1e-12);
  EXPECT_NEAR(Scalar(ActivationKind::swiglu_clamped, -9, 8).y(), 2 * -9 * sigmoid(-9) * 7, 1e-12);
  const double alpha = 1.702f;
  EXPECT_NEAR(Scalar(ActivationKind::gpt_oss, 9, 8).y(), 2 * 7 * sigmoid(alpha * 7) * 8, 1e-12);
  EXPECT_NEAR(Scalar(ActivationKind::gpt_oss, 2, -1).y(), 0, 1e-12);
}

TEST(Oracle, ClampBoundPassesTheGradient) {
  Scalar s(ActivationKind::swiglu_clamped, 7, -7);  // exactly on both bounds
  const oracle::Gradients g = oracle::backward(s.p, s.w, s.tokens, {1.0});
  EXPECT_NE(g.params.gate[0], 0.0);
  EXPECT_NE(g.params.up[0], 0.0);
  Scalar beyond(ActivationKind::swiglu_clamped, 7.001, -7.001);
  const oracle::Gradients none = oracle::backward(beyond.p, beyond.w, beyond.tokens, {1.0});
  EXPECT_EQ(none.params.gate[0], 0.0);
  EXPECT_EQ(none.params.up[0], 0.0);
}

}  // namespace
