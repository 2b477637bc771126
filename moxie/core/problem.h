// Problem: the shape and arithmetic of one MoE layer, and the presets people benchmark. Plain data;
// `check` is the one place that says which shapes are legal.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "moxie/core/dtype.h"
#include "moxie/core/ids.h"

namespace moxie {

enum class ActivationKind : std::int32_t {
  swiglu,          // silu(g) * u
  swiglu_clamped,  // g' = min(g, limit), u' = clamp(u, -limit, limit); silu(g') * u'
  gpt_oss,         // same clamps; g' * sigmoid(alpha g') * (u' + 1)
};
const char* name(ActivationKind kind);

struct Activation {
  ActivationKind kind = ActivationKind::swiglu;
  float limit = 7.0f;    // clamp of swiglu_clamped and gpt_oss
  float alpha = 1.702f;  // gpt_oss only
  friend bool operator==(const Activation&, const Activation&) = default;
};

struct SharedExpert {
  std::int64_t intermediate = 0;  // 0: no shared expert
  bool output_gate = false;       // multiply its output by sigmoid(x . gate_vector)
  friend bool operator==(const SharedExpert&, const SharedExpert&) = default;
};

struct Problem {
  std::int64_t num_ranks = 1;     // R
  std::int64_t max_tokens = 0;    // T_max: most tokens any rank brings to one pass
  std::int64_t hidden = 0;        // H, a multiple of 64
  std::int64_t intermediate = 0;  // I, a multiple of 64
  std::int64_t num_experts = 0;   // E over all ranks
  std::int64_t top_k = 0;         // K
  DType dtype = DType::bf16;      // storage of x, weights, hidden, y
  Activation activation = {};
  bool expert_bias = false;  // biases on gate, up and down
  SharedExpert shared = {};
  friend bool operator==(const Problem&, const Problem&) = default;
};

// Throws Error(invalid_argument) that names the field, its value, the rule and the nearest legal
// value.
void check(const Problem& problem);
std::string to_string(const Problem& problem);

// Experts are split into contiguous ranges whose sizes differ by at most one: the first E % R ranks
// have one more.
MOXIE_HD constexpr std::int64_t expert_begin(std::int64_t num_experts, std::int64_t num_ranks,
                                             RankId rank) {
  const std::int64_t base = num_experts / num_ranks, extra = num_experts % num_ranks;
  return rank.v * base + (rank.v < extra ? rank.v : extra);
}
MOXIE_HD constexpr std::int64_t num_local_experts(std::int64_t num_experts, std::int64_t num_ranks,
                                                  RankId rank) {
  return num_experts / num_ranks + (rank.v < num_experts % num_ranks ? 1 : 0);
}
MOXIE_HD constexpr RankId expert_home(std::int64_t num_experts, std::int64_t num_ranks,
                                      ExpertId expert) {
  const std::int64_t base = num_experts / num_ranks, extra = num_experts % num_ranks;
  const std::int64_t wide = extra * (base + 1);  // experts held by the ranks with one more
  return RankId{expert.v < wide ? expert.v / (base + 1) : extra + (expert.v - wide) / base};
}

struct Preset {
  std::string_view name;
  std::int64_t hidden, intermediate, num_experts, top_k;
  SharedExpert shared = {};
  Activation activation = {};
  bool expert_bias;
  bool sigmoid_router;  // else softmax
  std::string_view note;
};
std::span<const Preset> presets();
Problem problem_of(const Preset& preset);  // of one rank, without tokens: the caller sets these
// Throws Error(invalid_argument) naming the closest known preset.
const Preset& find_preset(std::string_view name);
// The word of `known` with the smallest edit distance to `word`; used by every "unknown X, did you
// mean Y".
std::string_view closest(std::string_view word, std::span<const std::string_view> known);

}  // namespace moxie
