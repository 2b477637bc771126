// The parts of a rank's weights and of their gradients: one table that reading, allocating and
// returning walk. Their shapes are those of moxie/moxie.h.
#pragma once
#include <array>

#include "moxie/moxie.h"

namespace moxie::python {

struct Part {
  const char *name, *weight_name, *grad_name;
  ConstTensorView Weights::*weight;
  TensorView WeightGrads::*grad;
  bool is_matrix;   // gradients of vectors are float32
  bool per_expert;  // dimension 0 is the rank's experts
  bool (*exists)(const Problem&);
  Shape (*shape)(const Problem&, std::int64_t num_local);
};

namespace detail {
using P = const Problem&;
using N = std::int64_t;
inline constexpr auto kAlways = [](P) { return true; };
inline constexpr auto kBias = [](P p) { return p.expert_bias; };
inline constexpr auto kShared = [](P p) { return p.shared.intermediate > 0; };
inline constexpr auto kOutputGate = [](P p) { return p.shared.output_gate; };
inline constexpr auto kIH = [](P p, N n) { return Shape{n, p.intermediate, p.hidden}; };
inline constexpr auto kHI = [](P p, N n) { return Shape{n, p.hidden, p.intermediate}; };
inline constexpr auto kI = [](P p, N n) { return Shape{n, p.intermediate}; };
inline constexpr auto kH = [](P p, N n) { return Shape{n, p.hidden}; };
inline constexpr auto kSharedIH = [](P p, N) { return Shape{p.shared.intermediate, p.hidden}; };
inline constexpr auto kSharedHI = [](P p, N) { return Shape{p.hidden, p.shared.intermediate}; };
inline constexpr auto kGateH = [](P p, N) { return Shape{p.hidden}; };
}  // namespace detail

#define MOXIE_PART(part) #part, "weights." #part, "grads." #part, &Weights::part, &WeightGrads::part
inline constexpr std::array<Part, 10> kParts = {{
    {MOXIE_PART(gate), true, true, detail::kAlways, detail::kIH},
    {MOXIE_PART(up), true, true, detail::kAlways, detail::kIH},
    {MOXIE_PART(down), true, true, detail::kAlways, detail::kHI},
    {MOXIE_PART(gate_bias), false, true, detail::kBias, detail::kI},
    {MOXIE_PART(up_bias), false, true, detail::kBias, detail::kI},
    {MOXIE_PART(down_bias), false, true, detail::kBias, detail::kH},
    {MOXIE_PART(shared_gate), true, false, detail::kShared, detail::kSharedIH},
    {MOXIE_PART(shared_up), true, false, detail::kShared, detail::kSharedIH},
    {MOXIE_PART(shared_down), true, false, detail::kShared, detail::kSharedHI},
    {MOXIE_PART(shared_output_gate), false, false, detail::kOutputGate, detail::kGateH},
}};
#undef MOXIE_PART

}  // namespace moxie::python
