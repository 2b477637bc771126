// The layer's equations, one route at a time. Backward is derived by hand from forward and checked
// against finite differences in tests/test_layer_oracle.cpp.
#include "tests/oracle/oracle.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace oracle {
namespace {

using moxie::Activation;
using moxie::ActivationKind;
using moxie::Problem;
using Vector = std::vector<double>;

// Eight partial sums: the compiler may vectorise this without being allowed to reorder one sum.
double dot(const double* a, const double* b, std::int64_t n) {
  std::array<double, 8> sum{};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (std::int64_t j = 0; j < 8; ++j) sum[static_cast<std::size_t>(j)] += a[i + j] * b[i + j];
  }
  double total = 0;
  for (double s : sum) total += s;
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

void add_scaled(double* out, double scale, const double* in, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] += scale * in[i];
}

void add_squares(double* out, double scale, const double* in, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] += scale * in[i] * scale * in[i];
}

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

struct ActivationValue {
  double a;  // act(g, u)
  double da_dg, da_du;
};

ActivationValue activate(const Activation& act, double g, double u) {
  const double limit = act.limit;
  const bool clamped = act.kind != ActivationKind::swiglu;
  const bool g_passes = !clamped || g <= limit;
  const bool u_passes = !clamped || (u <= limit && u >= -limit);
  const double gc = g_passes ? g : limit;
  const double uc = u_passes ? u : (u > limit ? limit : -limit);
  // swish(g) = g sigmoid(alpha g); silu is alpha = 1. gpt_oss adds one to the up value.
  const double alpha = act.kind == ActivationKind::gpt_oss ? act.alpha : 1.0;
  const double shift = act.kind == ActivationKind::gpt_oss ? 1.0 : 0.0;
  const double s = sigmoid(alpha * gc);
  const double swish = gc * s;
  const double dswish = s + gc * alpha * s * (1.0 - s);
  return {swish * (uc + shift), g_passes ? dswish * (uc + shift) : 0.0, u_passes ? swish : 0.0};
}

// One feed-forward network, [width, H] in and [H, width] out; biases may be null.
struct Ffn {
  std::int64_t hidden, width;
  const double *gate, *up, *down;
  const double *gate_bias, *up_bias, *down_bias;
};
struct FfnGrad {
  double *gate, *up, *down;
  double *gate_bias, *up_bias, *down_bias;
};
struct FfnState {
  Vector a, da_dg, da_du;  // [width]
  Vector y;                // [H], before the route weight
};

FfnState ffn_forward(const Activation& act, const Ffn& f, const double* x) {
  FfnState s{Vector(f.width), Vector(f.width), Vector(f.width), Vector(f.hidden)};
  for (std::int64_t i = 0; i < f.width; ++i) {
    const double g = dot(f.gate + i * f.hidden, x, f.hidden) + (f.gate_bias ? f.gate_bias[i] : 0);
    const double u = dot(f.up + i * f.hidden, x, f.hidden) + (f.up_bias ? f.up_bias[i] : 0);
    const ActivationValue v = activate(act, g, u);
    s.a[i] = v.a, s.da_dg[i] = v.da_dg, s.da_du[i] = v.da_du;
  }
  for (std::int64_t h = 0; h < f.hidden; ++h) {
    s.y[h] = dot(f.down + h * f.width, s.a.data(), f.width) + (f.down_bias ? f.down_bias[h] : 0);
  }
  return s;
}

struct ScaleGrad {
  double value = 0;    // sum of d * y
  double squares = 0;  // sum of the squares
};

// d = gradient of `scale * y`; adds into grad, squares and dx, returns d(scale).
ScaleGrad ffn_backward(const Ffn& f, const FfnState& s, const double* x, const double* d,
                       double scale, const FfnGrad& grad, const FfnGrad& squares, double* dx) {
  Vector da(f.width, 0.0);  // gradient of a, before the scale
  for (std::int64_t h = 0; h < f.hidden; ++h) {
    add_scaled(da.data(), d[h], f.down + h * f.width, f.width);
    add_scaled(grad.down + h * f.width, scale * d[h], s.a.data(), f.width);
    add_squares(squares.down + h * f.width, scale * d[h], s.a.data(), f.width);
  }
  Vector dg(f.width), du(f.width);
  for (std::int64_t i = 0; i < f.width; ++i) {
    dg[i] = scale * da[i] * s.da_dg[i], du[i] = scale * da[i] * s.da_du[i];
    add_scaled(grad.gate + i * f.hidden, dg[i], x, f.hidden);
    add_scaled(grad.up + i * f.hidden, du[i], x, f.hidden);
    add_squares(squares.gate + i * f.hidden, dg[i], x, f.hidden);
    add_squares(squares.up + i * f.hidden, du[i], x, f.hidden);
    add_scaled(dx, dg[i], f.gate + i * f.hidden, f.hidden);
    add_scaled(dx, du[i], f.up + i * f.hidden, f.hidden);
  }
  if (grad.gate_bias) {
    add_scaled(grad.gate_bias, 1, dg.data(), f.width);
    add_scaled(grad.up_bias, 1, du.data(), f.width);
    add_scaled(grad.down_bias, scale, d, f.hidden);
    add_squares(squares.gate_bias, 1, dg.data(), f.width);
    add_squares(squares.up_bias, 1, du.data(), f.width);
    add_squares(squares.down_bias, scale, d, f.hidden);
  }
  ScaleGrad d_scale{dot(d, s.y.data(), f.hidden)};
  for (std::int64_t h = 0; h < f.hidden; ++h) d_scale.squares += d[h] * s.y[h] * d[h] * s.y[h];
  return d_scale;
}

const double* at(const Vector& v, std::int64_t offset) { return v.empty() ? nullptr : &v[offset]; }
double* at(Vector& v, std::int64_t offset) { return v.empty() ? nullptr : &v[offset]; }

Ffn expert_ffn(const Problem& p, const Params& w, std::int64_t e) {
  const std::int64_t h = p.hidden, i = p.intermediate;
  return {h,
          i,
          at(w.gate, e * i * h),
          at(w.up, e * i * h),
          at(w.down, e * h * i),
          at(w.gate_bias, e * i),
          at(w.up_bias, e * i),
          at(w.down_bias, e * h)};
}
FfnGrad expert_part(const Problem& p, Params& g, std::int64_t e) {
  const std::int64_t h = p.hidden, i = p.intermediate;
  return {at(g.gate, e * i * h),  at(g.up, e * i * h),  at(g.down, e * h * i),
          at(g.gate_bias, e * i), at(g.up_bias, e * i), at(g.down_bias, e * h)};
}
Ffn shared_ffn(const Problem& p, const Params& w) {
  return {p.hidden,
          p.shared.intermediate,
          at(w.shared_gate, 0),
          at(w.shared_up, 0),
          at(w.shared_down, 0),
          nullptr,
          nullptr,
          nullptr};
}

FfnGrad shared_part(Params& g) {
  return {
      at(g.shared_gate, 0), at(g.shared_up, 0), at(g.shared_down, 0), nullptr, nullptr, nullptr};
}

double output_gate(const Problem& p, const Params& w, const double* x) {
  if (!p.shared.output_gate) return 1.0;
  return sigmoid(dot(x, w.shared_output_gate.data(), p.hidden));
}

}  // namespace

Vector forward(const Problem& p, const Params& w, const Tokens& tokens) {
  Vector out(tokens.num_tokens * p.hidden, 0.0);
  for (std::int64_t t = 0; t < tokens.num_tokens; ++t) {
    const double* x = &tokens.x[t * p.hidden];
    double* y = &out[t * p.hidden];
    for (std::int64_t k = 0; k < p.top_k; ++k) {
      const std::int64_t e = tokens.expert_ids[t * p.top_k + k];
      if (e < 0) continue;
      const FfnState s = ffn_forward(p.activation, expert_ffn(p, w, e), x);
      add_scaled(y, tokens.route_weights[t * p.top_k + k], s.y.data(), p.hidden);
    }
    if (p.shared.intermediate > 0) {
      const FfnState s = ffn_forward(p.activation, shared_ffn(p, w), x);
      add_scaled(y, output_gate(p, w, x), s.y.data(), p.hidden);
    }
  }
  return out;
}

Gradients backward(const Problem& p, const Params& w, const Tokens& tokens, const Vector& dy) {
  Gradients g;
  g.dx.assign(tokens.x.size(), 0.0);
  g.d_route_weights.assign(tokens.expert_ids.size(), 0.0);
  g.d_route_squares.assign(tokens.expert_ids.size(), 0.0);
  for (auto part : {&Params::gate, &Params::up, &Params::down, &Params::gate_bias, &Params::up_bias,
                    &Params::down_bias, &Params::shared_gate, &Params::shared_up,
                    &Params::shared_down, &Params::shared_output_gate}) {
    (g.params.*part).assign((w.*part).size(), 0.0);
    (g.squares.*part).assign((w.*part).size(), 0.0);
  }
  for (std::int64_t t = 0; t < tokens.num_tokens; ++t) {
    const double* x = &tokens.x[t * p.hidden];
    const double* d = &dy[t * p.hidden];
    double* dx = &g.dx[t * p.hidden];
    for (std::int64_t k = 0; k < p.top_k; ++k) {
      const std::int64_t route = t * p.top_k + k, e = tokens.expert_ids[route];
      if (e < 0) continue;
      const Ffn f = expert_ffn(p, w, e);
      const FfnState s = ffn_forward(p.activation, f, x);
      const ScaleGrad d_weight =
          ffn_backward(f, s, x, d, tokens.route_weights[route], expert_part(p, g.params, e),
                       expert_part(p, g.squares, e), dx);
      g.d_route_weights[route] = d_weight.value;
      g.d_route_squares[route] = d_weight.squares;
    }
    if (p.shared.intermediate > 0) {
      const Ffn f = shared_ffn(p, w);
      const FfnState s = ffn_forward(p.activation, f, x);
      const double gate = output_gate(p, w, x);
      const ScaleGrad d_gate =
          ffn_backward(f, s, x, d, gate, shared_part(g.params), shared_part(g.squares), dx);
      if (p.shared.output_gate) {
        const double d_logit = d_gate.value * gate * (1.0 - gate);
        add_scaled(g.params.shared_output_gate.data(), d_logit, x, p.hidden);
        add_squares(g.squares.shared_output_gate.data(),
                    std::sqrt(d_gate.squares) * gate * (1.0 - gate), x, p.hidden);
        add_scaled(dx, d_logit, w.shared_output_gate.data(), p.hidden);
      }
    }
  }
  return g;
}

}  // namespace oracle
