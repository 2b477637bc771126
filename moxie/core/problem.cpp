// The rules of a legal Problem, and the preset table (shapes from the models' published
// configurations).
#include "moxie/core/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "moxie/core/checked.h"
#include "moxie/core/error.h"

namespace moxie {
namespace {

constexpr std::int64_t kSizeStep = 64;       // H and I: one shared-memory swizzle row of BF16
constexpr std::int64_t kMaxTopK = 1024;      // far above any model; keeps route ids small
constexpr std::int64_t kMaxRanks = 1 << 15;  // rank + 1 fits the payload of a signal

constexpr Activation kGptOss{ActivationKind::gpt_oss, 7.0f, 1.702f};
constexpr std::array kPresets = {
    Preset{"mixtral-8x7b", 4096, 14336, 8, 2, {}, {}, false, false, ""},
    Preset{"deepseek-v3",
           7168,
           2048,
           256,
           8,
           {2048, false},
           {},
           false,
           true,
           "sigmoid, grouped routing"},
    Preset{"kimi-k2.5", 7168, 2048, 384, 8, {2048, false}, {}, false, true, ""},
    Preset{"deepseek-v4-pro", 7168, 3072, 384, 6, {3072, false}, {}, false, true, ""},
    Preset{"qwen3-30b-a3b",
           2048,
           768,
           128,
           8,
           {},
           {},
           false,
           false,
           "link-bound at EP8 without dedupe"},
    Preset{"qwen3-235b-a22b", 4096, 1536, 128, 8, {}, {}, false, false, ""},
    Preset{"qwen3-next-80b", 2048, 512, 512, 10, {512, true}, {}, false, false, ""},
    Preset{
        "qwen3.5-397b", 4096, 1024, 512, 10, {1024, true}, {}, false, false, "shared output gate"},
    Preset{"gpt-oss-120b",
           2880,
           2880,
           128,
           4,
           {},
           kGptOss,
           true,
           false,
           "biases; 2880 is no multiple of 128"},
    Preset{"glm-4.5-air",
           4096,
           1408,
           128,
           8,
           {1408, false},
           {},
           false,
           true,
           "1408 = 11 x 128: odd tile count"},
    Preset{"llama-4-scout", 5120, 8192, 16, 1, {8192, false}, {}, false, true, "top-1"},
    Preset{"moonlight-16b", 2048, 1408, 64, 6, {2816, false}, {}, false, true, "small"},
};

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_argument, sentence);
}

void check_range(const char* field, std::int64_t value, std::int64_t lo, std::int64_t hi) {
  if (value >= lo && value <= hi) return;
  fail(fmt::format("{} is {}, must be between {} and {}; nearest legal value {}", field, value, lo,
                   hi, std::clamp(value, lo, hi)));
}

void check_width(const char* field, std::int64_t value) {
  if (value > 0 && value % kSizeStep == 0 && value <= INT32_MAX) return;
  const std::int64_t near =
      value <= kSizeStep ? kSizeStep
                         : std::min<std::int64_t>((value + kSizeStep / 2) / kSizeStep * kSizeStep,
                                                  INT32_MAX / kSizeStep * kSizeStep);
  fail(fmt::format("{} is {}, must be a positive multiple of {}; nearest legal value {}", field,
                   value, kSizeStep, near));
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t best =
          std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1] ? 1 : 0)});
      diagonal = std::exchange(row[j], best);
    }
  }
  return row.back();
}

}  // namespace

const char* name(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::swiglu: return "swiglu";
    case ActivationKind::swiglu_clamped: return "swiglu_clamped";
    case ActivationKind::gpt_oss: return "gpt_oss";
  }
  return "unknown";
}

void check(const Problem& p) {
  check_range("num_ranks", p.num_ranks, 1, kMaxRanks);
  check_range("max_tokens", p.max_tokens, 1, INT32_MAX);
  check_width("hidden", p.hidden);
  check_width("intermediate", p.intermediate);
  check_range("num_experts", p.num_experts, 1, 1 << 20);
  check_range("top_k", p.top_k, 1, kMaxTopK);
  if (p.dtype != DType::f32 && p.dtype != DType::bf16) {
    fail(fmt::format("dtype is {}, must be f32 or bf16; nearest legal value bf16", name(p.dtype)));
  }
  if (p.max_tokens * p.top_k > INT32_MAX) {
    fail(
        fmt::format("max_tokens * top_k is {}, must fit in 31 bits because a route id is 32-bit; "
                    "nearest legal max_tokens {}",
                    p.max_tokens * p.top_k, INT32_MAX / p.top_k));
  }
  if (p.shared.intermediate != 0) check_width("shared.intermediate", p.shared.intermediate);
  if (p.shared.output_gate && p.shared.intermediate == 0) {
    fail(
        "shared.output_gate is true but shared.intermediate is 0: an output gate needs a shared "
        "expert; "
        "nearest legal value shared.intermediate = 64");
  }
  const bool clamps = p.activation.kind != ActivationKind::swiglu;
  if (clamps && !(p.activation.limit > 0)) {
    fail(fmt::format("activation.limit is {}, must be positive; nearest legal value 7",
                     p.activation.limit));
  }
}

std::string to_string(const Problem& p) {
  std::string text =
      fmt::format("R={} T_max={} H={} I={} E={} K={} {} {}", p.num_ranks, p.max_tokens, p.hidden,
                  p.intermediate, p.num_experts, p.top_k, name(p.dtype), name(p.activation.kind));
  if (p.expert_bias) text += " bias";
  if (p.shared.intermediate > 0) {
    text +=
        fmt::format(" shared={}{}", p.shared.intermediate, p.shared.output_gate ? " gated" : "");
  }
  return text;
}

Problem problem_of(const Preset& preset) {
  Problem p;
  p.hidden = preset.hidden;
  p.intermediate = preset.intermediate;
  p.num_experts = preset.num_experts;
  p.top_k = preset.top_k;
  p.activation = preset.activation;
  p.expert_bias = preset.expert_bias;
  p.shared = preset.shared;
  return p;
}

std::span<const Preset> presets() { return kPresets; }

std::string_view closest(std::string_view word, std::span<const std::string_view> known) {
  std::string_view best;
  std::size_t best_distance = SIZE_MAX;
  for (const std::string_view candidate : known) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

const Preset& find_preset(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Preset& preset : kPresets) {
    if (preset.name == name) return preset;
    names.push_back(preset.name);
  }
  fail(fmt::format("preset '{}' is not known; the nearest known one is '{}'", name,
                   closest(name, names)));
}

}  // namespace moxie
