#include "tests/support/layer_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <span>

namespace moxie::test {
namespace {

using Rng = std::mt19937_64;

// Values for problems with clamps lie on a grid: 1/8 for x, 1/64 for parameters. Then gate and up
// are exact in FP32 and FP64 alike, and whether a value lies within the clamp is never a matter of
// rounding.
double on_grid(double value, double steps) { return std::round(value * steps) / steps; }

struct Generator {
  Rng rng;
  DType dtype;
  bool grid;
  std::normal_distribution<double> normal{};

  std::vector<double> values(std::int64_t count, double scale, double grid_steps) {
    std::vector<double> out(static_cast<std::size_t>(count));
    for (double& v : out) {
      v = std::clamp(normal(rng), -4.0, 4.0) * scale;
      v = grid ? on_grid(v, grid_steps) : representable(v, dtype);
    }
    return out;
  }
};

// Mostly ordinary weights; some zero, some negative, some tiny: a router gradient that divides by
// the weight shows.
double random_route_weight(Rng& rng) {
  const double u = std::uniform_real_distribution<double>(0, 1)(rng);
  const double value = u < 0.06 ? 0.0 : u < 0.12 ? 1e-20 * (1 + u) : u < 0.24 ? -0.5 * u - 0.1 : u;
  return static_cast<float>(value);
}

std::vector<std::int64_t> random_experts(Rng& rng, const Problem& p, Routing routing) {
  std::vector<double> likelihood(static_cast<std::size_t>(p.num_experts), 1.0);
  if (routing == Routing::zipf || routing == Routing::duplicates) {
    for (std::size_t e = 0; e < likelihood.size(); ++e) likelihood[e] = std::pow(e + 1.0, -1.3);
  }
  std::vector<std::int64_t> ids;
  for (std::int64_t k = 0; k < p.top_k; ++k) {
    if (routing == Routing::one_expert) {
      ids.push_back(p.num_experts - 1);
      continue;
    }
    std::discrete_distribution<std::int64_t> pick(likelihood.begin(), likelihood.end());
    const std::int64_t e = pick(rng);
    if (routing != Routing::duplicates && k + 1 < p.num_experts) {
      likelihood[static_cast<std::size_t>(e)] = 0;
    }
    ids.push_back(e);
  }
  return ids;
}

}  // namespace

const std::array<Part, kNumParts> kParts = {{
    {"gate", &Weights::gate, &WeightGrads::gate, &oracle::Params::gate, true, false},
    {"up", &Weights::up, &WeightGrads::up, &oracle::Params::up, true, false},
    {"down", &Weights::down, &WeightGrads::down, &oracle::Params::down, true, false},
    {"gate_bias", &Weights::gate_bias, &WeightGrads::gate_bias, &oracle::Params::gate_bias, true,
     true},
    {"up_bias", &Weights::up_bias, &WeightGrads::up_bias, &oracle::Params::up_bias, true, true},
    {"down_bias", &Weights::down_bias, &WeightGrads::down_bias, &oracle::Params::down_bias, true,
     true},
    {"shared_gate", &Weights::shared_gate, &WeightGrads::shared_gate, &oracle::Params::shared_gate,
     false, false},
    {"shared_up", &Weights::shared_up, &WeightGrads::shared_up, &oracle::Params::shared_up, false,
     false},
    {"shared_down", &Weights::shared_down, &WeightGrads::shared_down, &oracle::Params::shared_down,
     false, false},
    {"shared_output_gate", &Weights::shared_output_gate, &WeightGrads::shared_output_gate,
     &oracle::Params::shared_output_gate, false, true},
}};

Shape part_shape(const Problem& p, std::size_t part, std::int64_t num_experts) {
  const std::int64_t h = p.hidden, i = p.intermediate, s = p.shared.intermediate;
  const Shape absent;
  switch (part) {
    case 0:
    case 1: return {num_experts, i, h};
    case 2: return {num_experts, h, i};
    case 3:
    case 4: return p.expert_bias ? Shape{num_experts, i} : absent;
    case 5: return p.expert_bias ? Shape{num_experts, h} : absent;
    case 6:
    case 7: return s > 0 ? Shape{s, h} : absent;
    case 8: return s > 0 ? Shape{h, s} : absent;
    default: return p.shared.output_gate ? Shape{h} : absent;
  }
}

Problem small_problem(std::int64_t num_ranks, std::int64_t num_experts, std::int64_t top_k,
                      std::int64_t hidden, std::int64_t intermediate, DType dtype) {
  Problem p;
  p.num_ranks = num_ranks;
  p.max_tokens = 64;
  p.hidden = hidden;
  p.intermediate = intermediate;
  p.num_experts = num_experts;
  p.top_k = top_k;
  p.dtype = dtype;
  return p;
}

Problem with_all_parts(Problem p, ActivationKind kind) {
  p.activation.kind = kind;
  // Between two BF16 values and on the rounding boundary: rounding gate or up to BF16 never moves
  // it across.
  p.activation.limit = 1.0f + 1.0f / 256;
  p.expert_bias = true;
  p.shared = {.intermediate = 192, .output_gate = true};
  return p;
}

LayerCase::LayerCase(const CaseSpec& spec_in, std::uint64_t seed) : spec(spec_in) {
  const Problem& p = spec.problem;
  const std::int64_t n = std::accumulate(spec.tokens.begin(), spec.tokens.end(), std::int64_t{0});
  Generator gen{Rng(seed), p.dtype, p.activation.kind != ActivationKind::swiglu};
  for (std::size_t part = 0; part < kNumParts; ++part) {
    const Shape shape = part_shape(p, part, p.num_experts);
    if (shape.rank == 0) continue;
    const bool is_bias = part >= 3 && part <= 5;
    const double fan_in = static_cast<double>(shape.dim[static_cast<std::size_t>(shape.rank - 1)]);
    params.*kParts[part].values =
        gen.values(shape.num_elements(), is_bias ? 0.5 : 1 / std::sqrt(fan_in), 64);
  }
  tokens.num_tokens = n;
  tokens.x = gen.values(n * p.hidden, 1.0, 8);
  dy = gen.values(n * p.hidden, 1.0, 8);
  for (std::int64_t t = 0; t < n; ++t) {
    std::vector<std::int64_t> ids = random_experts(gen.rng, p, spec.routing);
    for (std::int64_t& e : ids) {
      if (spec.routing == Routing::masked && (t % 5 == 2 || gen.rng() % 3 == 0)) e = -1;
      tokens.expert_ids.push_back(e);
      double w = random_route_weight(gen.rng);
      // Several slots of one expert: weights of one sign, or the whole row might cancel to nothing.
      if (spec.routing == Routing::one_expert || spec.routing == Routing::duplicates)
        w = std::abs(w);
      tokens.route_weights.push_back(e < 0 ? std::numeric_limits<double>::quiet_NaN() : w);
    }
  }
  upload();
}

Span LayerCase::tokens_of(std::int64_t rank) const {
  const auto first = spec.tokens.begin();
  const std::int64_t begin = std::accumulate(first, first + rank, std::int64_t{0});
  return {begin, begin + spec.tokens[static_cast<std::size_t>(rank)]};
}

Span LayerCase::experts_of(std::int64_t rank) const {
  // Dealt out one at a time, in turn: the first E % R ranks end up with one more. Ranges are
  // contiguous.
  std::vector<std::int64_t> count(static_cast<std::size_t>(num_ranks()), 0);
  for (std::int64_t e = 0; e < problem().num_experts; ++e) {
    ++count[static_cast<std::size_t>(e % num_ranks())];
  }
  const std::int64_t begin = std::accumulate(count.begin(), count.begin() + rank, std::int64_t{0});
  return {begin, begin + count[static_cast<std::size_t>(rank)]};
}

void LayerCase::upload() {
  const Problem& p = problem();
  ranks.clear();
  ranks.resize(static_cast<std::size_t>(p.num_ranks));
  const auto slice = [](const auto& values, std::int64_t begin, std::int64_t count) {
    return std::span(values).subspan(static_cast<std::size_t>(begin),
                                     static_cast<std::size_t>(count));
  };
  for (std::int64_t r = 0; r < p.num_ranks; ++r) {
    RankInputs& in = ranks[static_cast<std::size_t>(r)];
    const auto [t0, t1] = tokens_of(r);
    const std::int64_t t = t1 - t0, h = p.hidden, k = p.top_k;
    in.x = OwnedTensor(p.dtype, {t, h}, slice(tokens.x, t0 * h, t * h));
    in.dy = OwnedTensor(p.dtype, {t, h}, slice(dy, t0 * h, t * h));
    in.expert_ids = OwnedTensor(spec.id_dtype, {t, k}, slice(tokens.expert_ids, t0 * k, t * k));
    in.route_weights = OwnedTensor(DType::f32, {t, k}, slice(tokens.route_weights, t0 * k, t * k));
    const Span experts = experts_of(r);
    for (std::size_t part = 0; part < kNumParts; ++part) {
      const Shape shape = part_shape(p, part, experts.size());
      if (shape.rank == 0) continue;
      const std::int64_t count = shape.num_elements();
      const std::int64_t begin = kParts[part].per_expert && experts.size() > 0
                                     ? count / experts.size() * experts.begin
                                     : 0;
      in.weights[part] =
          OwnedTensor(p.dtype, shape, slice(params.*kParts[part].values, begin, count));
    }
  }
}

void LayerCase::route_exactly(const std::vector<std::int64_t>& rows, std::uint64_t seed) {
  std::vector<std::int64_t> ids;
  for (std::size_t e = 0; e < rows.size(); ++e) {
    ids.insert(ids.end(), static_cast<std::size_t>(rows[e]), static_cast<std::int64_t>(e));
  }
  ids.resize(tokens.expert_ids.size(), -1);
  Rng rng(seed);
  std::shuffle(ids.begin(), ids.end(), rng);
  tokens.expert_ids = ids;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    tokens.route_weights[i] = ids[i] < 0 ? std::nan("") : random_route_weight(rng);
  }
  upload();
}

Weights LayerCase::weights_of(std::int64_t rank) const {
  Weights w;
  const RankInputs& in = ranks[static_cast<std::size_t>(rank)];
  for (std::size_t part = 0; part < kNumParts; ++part) {
    if (!in.weights[part].absent()) w.*kParts[part].weight = in.weights[part].view();
  }
  return w;
}

std::vector<ForwardInput> LayerCase::forward_inputs() const {
  std::vector<ForwardInput> out;
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    const RankInputs& in = ranks[static_cast<std::size_t>(r)];
    out.push_back({in.x.view(), in.expert_ids.view(), in.route_weights.view(), weights_of(r)});
  }
  return out;
}

std::vector<BackwardInput> LayerCase::backward_inputs() const {
  std::vector<BackwardInput> out;
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    const RankInputs& in = ranks[static_cast<std::size_t>(r)];
    out.push_back({in.x.view(), in.dy.view(), weights_of(r)});
  }
  return out;
}

}  // namespace moxie::test
