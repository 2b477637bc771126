// core/: BF16 rounding over all bit patterns, expert partition, rules of a Problem, presets, error
// sentences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "moxie/core/checked.h"
#include "moxie/core/error.h"
#include "moxie/core/problem.h"
#include "moxie/core/tensor.h"

namespace moxie {
namespace {

TEST(CoreDtype, EveryBf16SurvivesARoundTrip) {
  for (std::uint32_t b = 0; b < 65536; ++b) {
    bf16 v;
    v.bits = static_cast<std::uint16_t>(b);
    const float f = static_cast<float>(v);
    if (std::isnan(f))
      EXPECT_TRUE(std::isnan(static_cast<float>(bf16(f))));
    else
      ASSERT_EQ(bf16(f).bits, v.bits) << b;
  }
}

TEST(CoreDtype, RoundsToNearestTiesToEven) {
  EXPECT_EQ(bf16(1.0f + 1.0f / 256).bits, bf16(1.0f).bits);                   // tie, even below
  EXPECT_EQ(static_cast<float>(bf16(1.0f + 3.0f / 256)), 1.0f + 4.0f / 256);  // tie, even above
  EXPECT_EQ(static_cast<float>(bf16(1.0f + 1.01f / 256)), 1.0f + 2.0f / 256);
  EXPECT_TRUE(std::isinf(static_cast<float>(bf16(3.4e38f))));
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::nanf("")))));
}

TEST(CorePartition, EveryExpertHasOneHome) {
  for (std::int64_t e = 1; e <= 40; ++e)
    for (std::int64_t r = 1; r <= 12; ++r) {
      std::int64_t next = 0;
      for (std::int64_t rank = 0; rank < r; ++rank) {
        const RankId id{rank};
        ASSERT_EQ(expert_begin(e, r, id), next);
        const std::int64_t n = num_local_experts(e, r, id);
        ASSERT_TRUE(n == e / r || n == e / r + 1);
        for (std::int64_t k = next; k < next + n; ++k)
          ASSERT_EQ(expert_home(e, r, ExpertId{k}), id) << e << " " << r;
        next += n;
      }
      ASSERT_EQ(next, e);
    }
}

Problem legal() {
  return {.num_ranks = 4,
          .max_tokens = 64,
          .hidden = 256,
          .intermediate = 128,
          .num_experts = 8,
          .top_k = 2};
}

std::string sentence(const Problem& p) {
  try {
    check(p);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    return e.what();
  }
  return "";
}

TEST(CoreProblem, SaysFieldValueRuleAndNearest) {
  EXPECT_EQ(sentence(legal()), "");
  Problem p = legal();
  p.hidden = 100;
  EXPECT_EQ(sentence(p),
            "hidden is 100, must be a positive multiple of 64; nearest legal value 128");
  p = legal();
  p.intermediate = -3;
  EXPECT_EQ(sentence(p),
            "intermediate is -3, must be a positive multiple of 64; nearest legal value 64");
  p = legal();
  p.num_experts = 0;
  EXPECT_EQ(sentence(p), "num_experts is 0, must be between 1 and 1048576; nearest legal value 1");
  p = legal();
  p.max_tokens = 0;
  EXPECT_EQ(sentence(p),
            "max_tokens is 0, must be between 1 and 2147483647; nearest legal value 1");
  p = legal();
  p.max_tokens = 2'000'000'000;
  EXPECT_NE(sentence(p).find("max_tokens * top_k is 4000000000"), std::string::npos);
  p = legal();
  p.shared.output_gate = true;
  EXPECT_NE(sentence(p).find("shared.output_gate"), std::string::npos);
  p = legal();
  p.dtype = DType::i32;
  EXPECT_NE(sentence(p).find("dtype is i32"), std::string::npos);
}

TEST(CoreProblem, PresetsAreLegalAndFoundByName) {
  EXPECT_EQ(presets().size(), 12u);
  for (const Preset& preset : presets()) {
    Problem p{.num_ranks = 8,
              .max_tokens = 4096,
              .hidden = preset.hidden,
              .intermediate = preset.intermediate,
              .num_experts = preset.num_experts,
              .top_k = preset.top_k};
    p.shared = preset.shared;
    p.activation = preset.activation;
    EXPECT_NO_THROW(check(p)) << preset.name;
    EXPECT_EQ(&find_preset(preset.name), &preset);
  }
  try {
    find_preset("kimi-k2");
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "preset 'kimi-k2' is not known; the nearest known one is 'kimi-k2.5'");
  }
}

TEST(CoreChecked, ProductsThatDoNotFit) {
  EXPECT_EQ(mul_or_negative(1ll << 40, 1ll << 22), 1ll << 62);
  EXPECT_EQ(mul_or_negative(1ll << 40, 1ll << 23), -1);
  EXPECT_EQ(mul_or_negative(0, INT64_MAX), 0);
}

TEST(CoreError, RecordReadsAsASentence) {
  const WaitRecord r{2, Role::compute, 1, WaitFor::x_ready, 7, 128, 96, 5, -1};
  EXPECT_EQ(to_string(r),
            "rank 2 compute worker 1 waited for x_ready[7] of epoch 5: wanted 128, saw 96");
  for (int w = 0; w <= static_cast<int>(WaitFor::phase); ++w)
    EXPECT_STRNE(name(static_cast<WaitFor>(w)), "unknown");
  EXPECT_EQ(to_string(Shape{64, 512}), "[64, 512]");
}

}  // namespace
}  // namespace moxie
