// The arithmetic of the check: rows in double, the activation with its derivatives, and how close
// is close enough. Plain loops, sharing nothing with the library but its data types.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cli/tensors.h"

namespace moxie::cli {

struct Tolerance {
  double relative_l2, element;
};
// BF16: storage of the hidden row, of each pushed row and of the result, 2^-9 each; backward rounds
// z and its gradients too. FP32: sums of some thousand terms in another order.
inline Tolerance tolerance(DType dtype) {
  return dtype == DType::f32 ? Tolerance{2e-5, 2e-4} : Tolerance{5e-3, 2e-2};
}

// A row of a stored tensor, in double.
using Row = std::vector<double>;
inline void load_into(Row& row, const HostTensor& tensor, std::int64_t first) {
  const auto begin = static_cast<std::size_t>(first);
  if (tensor.dtype == DType::f32) {
    const auto in = tensor.as<float>();
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = double{in[begin + i]};
  } else {
    const auto in = tensor.as<bf16>();
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = double{static_cast<float>(in[begin + i])};
  }
}
inline Row load(const HostTensor& tensor, std::int64_t first, std::int64_t n) {
  Row row(static_cast<std::size_t>(n));
  load_into(row, tensor, first);
  return row;
}
inline Row load_column(const HostTensor& tensor, std::int64_t first, std::int64_t stride,
                       std::int64_t n) {
  Row column(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i)
    column[static_cast<std::size_t>(i)] = value_at(tensor, first + i * stride);
  return column;
}

inline double dot(const Row& a, const Row& b) {
  std::array<double, 4> sums{};
  const std::size_t whole = a.size() / 4 * 4;
  for (std::size_t i = 0; i < whole; i += 4) {
    for (std::size_t lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (std::size_t i = whole; i < a.size(); ++i) sums[0] += a[i] * b[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}
inline void add_scaled(Row& out, double scale, const Row& in) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] += scale * in[i];
}
inline void add_magnitude(Row& out, double scale, const Row& in) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] += std::abs(scale * in[i]);
}
inline double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }

// A(g, u), its partial derivatives, and what the roundings of g and u before them can do.
struct Activated {
  double value, by_gate, by_up;
  double jump_gate,
      jump_up;  // g or u lies so close to a clamp that the derivative may as well be this much off
  double size_gate,
      size_up;  // the usual size of the derivative: the yardstick where it crosses zero
};
inline Activated activate(const Activation& activation, DType dtype, double g, double u) {
  const double limit = double{activation.limit},
               band = limit * (dtype == DType::f32 ? 1e-5 : 0x1.0p-7);
  const bool clamped = activation.kind != ActivationKind::swiglu;
  const bool gate_free = !clamped || g < limit, up_free = !clamped || std::abs(u) < limit;
  const bool gate_unsure = clamped && std::abs(g - limit) <= band;
  const bool up_unsure = clamped && std::abs(std::abs(u) - limit) <= band;
  if (clamped) {
    g = std::min(g, limit);
    u = std::clamp(u, -limit, limit);
  }
  const bool oss = activation.kind == ActivationKind::gpt_oss;
  const double alpha = oss ? double{activation.alpha} : 1.0;
  const double shifted = oss ? u + 1 : u;
  const double s = sigmoid(alpha * g);
  const double by_gate = (s + alpha * g * s * (1 - s)) * shifted, by_up = g * s;
  return {.value = g * s * shifted,
          .by_gate = gate_free ? by_gate : 0,
          .by_up = up_free ? by_up : 0,
          .jump_gate = gate_unsure ? std::abs(by_gate) : 0,
          .jump_up = up_unsure ? std::abs(by_up) : 0,
          .size_gate = std::abs(by_gate) + 0.5 * std::abs(shifted),
          .size_up = std::abs(by_up) + 0.5 * std::abs(g)};
}

// How close is close: |d| - slack <= element * (scale + |reference|).
struct Yardstick {
  Tolerance allowed{};
  double scale = -1;  // < 0: the rms of the reference row
  Row slack{};        // empty: none
  bool scalar =
      false;  // one sum of signed terms: in relative_l2 it counts with the size of its terms
};

// The gradient of one row of a weight matrix: a sum over the expert's rows of factor * vector.
struct Column {
  Row sum, slack;
  double bias = 0, bias_slack = 0, squares = 0, bias_squares = 0;
  explicit Column(std::size_t H) : sum(H), slack(H) {}
  // `size`: the usual size of such a factor; `jump`: by how much it may be off.
  void add(double factor, double size, double jump, const Row& vector) {
    add_scaled(sum, factor, vector);
    if (jump != 0) add_magnitude(slack, jump, vector);
    bias += factor;
    bias_slack += std::abs(jump);
    bias_squares += size * size;
    squares += size * size * dot(vector, vector) / static_cast<double>(vector.size());
  }
  Yardstick yardstick(Tolerance allowed) const {
    return {.allowed = allowed, .scale = std::sqrt(squares), .slack = slack};
  }
  Yardstick bias_yardstick(Tolerance allowed) const {
    return {.allowed = allowed,
            .scale = std::sqrt(bias_squares),
            .slack = {bias_slack},
            .scalar = true};
  }
};

}  // namespace moxie::cli
