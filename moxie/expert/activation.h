// The three gated activations and their derivatives, one definition for host and device.
//   swiglu:          A = silu(g) u
//   swiglu_clamped:  g' = min(g, limit), u' = clamp(u, -limit, limit);  A = silu(g') u'
//   gpt_oss:         same clamps;  A = g' sigmoid(alpha g') (u' + 1)
// A clamp passes the gradient where the value is inside its bounds, the bound included.
#pragma once
#include <cmath>

#include "moxie/core/hd.h"
#include "moxie/core/problem.h"

namespace moxie::expert {

MOXIE_HD inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

struct GatedInput {
  float gate, up;           // after the clamps
  float alpha, shift;       // A = gate * sigmoid(alpha * gate) * (up + shift)
  bool gate_pass, up_pass;  // the clamps let the gradient through
};

MOXIE_HD inline GatedInput clamp_inputs(const Activation& a, float g, float u) {
  GatedInput in{g, u, 1.0f, 0.0f, true, true};
  if (a.kind == ActivationKind::swiglu) return in;
  // Written so that a NaN stays a NaN: it fails every comparison.
  if (g > a.limit) {
    in.gate = a.limit;
    in.gate_pass = false;
  }
  if (u > a.limit) {
    in.up = a.limit;
    in.up_pass = false;
  }
  if (u < -a.limit) {
    in.up = -a.limit;
    in.up_pass = false;
  }
  if (a.kind == ActivationKind::gpt_oss) {
    in.alpha = a.alpha;
    in.shift = 1.0f;
  }
  return in;
}

MOXIE_HD inline float activate(const Activation& a, float g, float u) {
  const GatedInput in = clamp_inputs(a, g, u);
  return in.gate * sigmoid(in.alpha * in.gate) * (in.up + in.shift);
}

struct ActivationGrad {
  float value;         // A
  float d_gate, d_up;  // dA/dg, dA/du
};
MOXIE_HD inline ActivationGrad activate_grad(const Activation& a, float g, float u) {
  const GatedInput in = clamp_inputs(a, g, u);
  const float s = sigmoid(in.alpha * in.gate), glu = in.gate * s, lift = in.up + in.shift;
  ActivationGrad out;
  out.value = glu * lift;
  out.d_gate = in.gate_pass ? s * (1.0f + in.alpha * in.gate * (1.0f - s)) * lift : 0.0f;
  out.d_up = in.up_pass ? glu : 0.0f;
  return out;
}

}  // namespace moxie::expert
