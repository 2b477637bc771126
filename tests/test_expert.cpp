// Expert stage: activations against finite differences in FP64, the host GEMM engine against plain
// sums and against its own row-invariance contract, tiles with tails.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "moxie/expert/expert_ref.h"
#include "tests/support/env.h"

namespace moxie::expert {
namespace {

double reference(const Activation& a, double g, double u) {
  if (a.kind != ActivationKind::swiglu) {
    g = std::min<double>(g, a.limit);
    u = std::max<double>(std::min<double>(u, a.limit), -a.limit);
  }
  if (a.kind == ActivationKind::gpt_oss)
    return g / (1 + std::exp(-static_cast<double>(a.alpha) * g)) * (u + 1);
  return g / (1 + std::exp(-g)) * u;
}

TEST(ExpertActivation, ValueAndDerivativesMatchFiniteDifferences) {
  std::mt19937_64 rng(test::test_seed());
  std::uniform_real_distribution<float> uniform(-12.0f, 12.0f);
  for (const ActivationKind kind :
       {ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::gpt_oss}) {
    const Activation a{kind, 7.0f, 1.702f};
    for (int i = 0; i < 20000; ++i) {
      const float g = uniform(rng), u = uniform(rng);
      const double step = 1e-5;
      if (std::abs(g - 7) < 1e-3 || std::abs(std::abs(u) - 7) < 1e-3)
        continue;  // the kinks have no derivative
      const ActivationGrad got = activate_grad(a, g, u);
      const double value = reference(a, g, u);
      const double dg = (reference(a, g + step, u) - reference(a, g - step, u)) / (2 * step);
      const double du = (reference(a, g, u + step) - reference(a, g, u - step)) / (2 * step);
      ASSERT_EQ(got.value, activate(a, g, u));
      ASSERT_NEAR(got.value, value, 1e-5 * (1 + std::abs(value)))
          << name(kind) << " " << g << " " << u;
      ASSERT_NEAR(got.d_gate, dg, 2e-5 * (1 + std::abs(dg)) + 1e-5)
          << name(kind) << " " << g << " " << u;
      ASSERT_NEAR(got.d_up, du, 2e-5 * (1 + std::abs(du)) + 1e-5)
          << name(kind) << " " << g << " " << u;
    }
  }
}

TEST(ExpertActivation, ExtremesStayFinite) {
  for (const float g : {-1e30f, -200.0f, 200.0f})
    for (const ActivationKind kind : {ActivationKind::swiglu_clamped, ActivationKind::gpt_oss}) {
      EXPECT_TRUE(std::isfinite(activate({kind, 7.0f, 1.702f}, g, 3.0f))) << g;
    }
  EXPECT_EQ(activate({}, -200.0f, 3.0f), 0.0f);
  EXPECT_TRUE(std::isnan(activate({ActivationKind::gpt_oss, 7.0f, 1.702f}, std::nanf(""), 1.0f)));
}

class HostGemmTest : public testing::TestWithParam<HostGemm> {};

TEST_P(HostGemmTest, MatchesPlainSums) {
  const HostGemmEngine gemm(GetParam());
  std::mt19937_64 rng(test::test_seed());
  std::normal_distribution<float> normal;
  for (const auto& [m, n, k] :
       {std::array<std::int64_t, 3>{16, 64, 64}, {48, 65, 3}, {128, 256, 320}, {7, 5, 129}})
    for (const Trans ta : {Trans::no, Trans::yes})
      for (const Trans tb : {Trans::no, Trans::yes})
        for (const bool accumulate : {false, true}) {
          std::vector<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n)),
              c(static_cast<std::size_t>(m * n), 2.0f);
          for (float& v : a) v = normal(rng);
          for (float& v : b) v = normal(rng);
          if (!accumulate) std::fill(c.begin(), c.end(), std::nanf(""));
          gemm(ta, tb, m, n, k, a.data(), ta == Trans::yes ? m : k, b.data(),
               tb == Trans::yes ? k : n, accumulate, c.data(), n);
          for (std::int64_t i = 0; i < m; ++i)
            for (std::int64_t j = 0; j < n; ++j) {
              double sum = accumulate ? 2.0 : 0.0, size = 2.0;
              for (std::int64_t q = 0; q < k; ++q) {
                const double x = ta == Trans::yes ? a[static_cast<std::size_t>(q * m + i)]
                                                  : a[static_cast<std::size_t>(i * k + q)];
                const double y = tb == Trans::yes ? b[static_cast<std::size_t>(j * k + q)]
                                                  : b[static_cast<std::size_t>(q * n + j)];
                sum += x * y;
                size += std::abs(x * y);
              }
              ASSERT_NEAR(c[static_cast<std::size_t>(i * n + j)], sum, 1e-6 * size)
                  << gemm.description();
            }
        }
}

TEST_P(HostGemmTest, RowsDoNotDependOnTheirCompany) {
  const HostGemmEngine gemm(GetParam());
  std::mt19937_64 rng(test::test_seed());
  std::normal_distribution<float> normal;
  constexpr std::int64_t kRows = 128, kCols = 192, kDepth = 704;
  std::vector<float> a(kRows * kDepth), b(kCols * kDepth), whole(kPaddedRows * kCols),
      part(whole.size());
  std::vector<float> scratch(kPaddedRows * kDepth), unused;
  for (float& v : a) v = normal(rng);
  for (float& v : b) v = normal(rng);
  for (const Trans tb : {Trans::no, Trans::yes}) {
    const Matrix<float> weight{b.data(), tb == Trans::yes ? kDepth : kCols};
    row_gemm<float>(gemm,
                    padded_rows<float>(gemm, {a.data(), kDepth}, kRows, kDepth, scratch.data()),
                    kRows, tb, weight, kCols, kDepth, false, nullptr, whole.data());
    for (std::int64_t rows = 1; rows <= kRows; rows += 9)
      for (const std::int64_t first :
           {std::int64_t{0}, std::int64_t{1}, std::int64_t{17}, kRows - rows}) {
        if (first + rows > kRows) continue;
        const auto in = padded_rows<float>(gemm, {a.data() + first * kDepth, kDepth}, rows, kDepth,
                                           scratch.data());
        row_gemm<float>(gemm, in, rows, tb, weight, kCols, kDepth, false, nullptr, part.data());
        ASSERT_EQ(std::memcmp(part.data(), whole.data() + first * kCols,
                              static_cast<std::size_t>(rows * kCols) * 4),
                  0)
            << gemm.description() << ": " << rows << " rows from " << first;
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, HostGemmTest,
                         testing::Values(HostGemm::automatic, HostGemm::plain),
                         [](const auto& info) {
                           return info.param == HostGemm::plain ? "plain" : "automatic";
                         });

TEST(ExpertTiles, PaddingReadsNothingPastTheRealRows) {
  const HostGemmEngine gemm(HostGemm::automatic);
  std::vector<bf16> x(3 * 64, bf16(1.0f));
  std::vector<float> scratch(static_cast<std::size_t>(kPaddedRows * 64), std::nanf(""));
  const FloatMatrix m = padded_rows<bf16>(gemm, {x.data(), 64}, 3, 64, scratch.data());
  for (std::int64_t i = 0; i < align_up(3, gemm.row_quantum()); ++i)
    for (std::int64_t j = 0; j < 64; ++j) ASSERT_EQ(m.data[i * m.ld + j], i < 3 ? 1.0f : 0.0f);
}

}  // namespace
}  // namespace moxie::expert
