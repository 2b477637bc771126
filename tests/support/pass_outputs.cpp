#include "tests/support/pass_outputs.h"

#include <cstring>

#include "tests/support/env.h"

namespace moxie::test {

PassOutputs::PassOutputs(const LayerCase& c, DType grad_dtype) {
  const Problem& p = c.problem();
  for (std::int64_t r = 0; r < p.num_ranks; ++r) {
    RankOutputs out;
    const std::int64_t t = c.tokens_of(r).size();
    out.y = OwnedTensor(p.dtype, {t, p.hidden});
    out.dx = OwnedTensor(p.dtype, {t, p.hidden});
    out.d_route_weights = OwnedTensor(DType::f32, {t, p.top_k});
    for (std::size_t part = 0; part < kNumParts; ++part) {
      const Shape shape = part_shape(p, part, c.experts_of(r).size());
      if (shape.rank == 0) continue;
      out.grads[part] = OwnedTensor(kParts[part].is_vector ? DType::f32 : grad_dtype, shape);
    }
    ranks.push_back(std::move(out));
  }
}

std::vector<ForwardOutput> PassOutputs::forward() {
  std::vector<ForwardOutput> out;
  for (RankOutputs& rank : ranks) out.push_back({rank.y.view()});
  return out;
}

std::vector<BackwardOutput> PassOutputs::backward(bool accumulate) {
  std::vector<BackwardOutput> out;
  for (RankOutputs& rank : ranks) {
    BackwardOutput o;
    o.dx = rank.dx.view();
    o.d_route_weights = rank.d_route_weights.view();
    o.grads.accumulate = accumulate;
    for (std::size_t part = 0; part < kNumParts; ++part) {
      if (!rank.grads[part].absent()) o.grads.*kParts[part].grad = rank.grads[part].view();
    }
    out.push_back(o);
  }
  return out;
}

double PassOutputs::prefilled(std::size_t part, std::size_t index) {
  return 0.25 * static_cast<double>(index % 7) - 0.5 + 0.125 * static_cast<double>(part);
}

void PassOutputs::prefill_grads() {
  for (RankOutputs& rank : ranks) {
    for (std::size_t part = 0; part < kNumParts; ++part) {
      OwnedTensor& grad = rank.grads[part];
      for (std::size_t i = 0; i < grad.size(); ++i) grad.set(i, prefilled(part, i));
    }
  }
}

bool PassOutputs::forward_untouched() const {
  for (const RankOutputs& rank : ranks) {
    if (!rank.y.untouched()) return false;
  }
  return true;
}

bool PassOutputs::backward_untouched() const {
  for (const RankOutputs& rank : ranks) {
    if (!rank.dx.untouched() || !rank.d_route_weights.untouched()) return false;
    for (const OwnedTensor& grad : rank.grads) {
      if (!grad.untouched()) return false;
    }
  }
  return true;
}

PassOutputs run_pass(Layer& layer, const LayerCase& c, DType grad_dtype) {
  PassOutputs out(c, grad_dtype);
  const Context context = layer.forward(c.forward_inputs(), out.forward());
  layer.backward(context, c.backward_inputs(), out.backward());
  return out;
}

PassOutputs run_alone(const LayerCase& c, const Plan& plan, DType grad_dtype) {
  World world = make_world(world_options(c.num_ranks()));
  Layer layer(world, c.problem(), plan);
  return run_pass(layer, c, grad_dtype);
}

::testing::AssertionResult same_bits(const std::string& what, const OwnedTensor& want,
                                     const OwnedTensor& got) {
  if (want.dtype() != got.dtype() || want.shape() != got.shape()) {
    return ::testing::AssertionFailure() << what << ": shapes or types differ";
  }
  if (want.bytes() == got.bytes()) return ::testing::AssertionSuccess();
  const std::size_t element_bytes = static_cast<std::size_t>(size_bytes(want.dtype()));
  std::size_t first = want.size(), count = 0;
  for (std::size_t i = want.size(); i-- > 0;) {
    if (std::memcmp(&want.bytes()[i * element_bytes], &got.bytes()[i * element_bytes],
                    element_bytes) != 0) {
      first = i;
      ++count;
    }
  }
  return ::testing::AssertionFailure()
         << what << ": " << count << " of " << want.size() << " elements differ, the first is "
         << first << ": " << want.get(first) << " against " << got.get(first);
}

::testing::AssertionResult same_bits(const PassOutputs& want, const PassOutputs& got) {
  if (want.ranks.size() != got.ranks.size()) return ::testing::AssertionFailure() << "ranks";
  for (std::size_t r = 0; r < want.ranks.size(); ++r) {
    const RankOutputs &a = want.ranks[r], &b = got.ranks[r];
    const std::string prefix = "rank " + std::to_string(r) + " ";
    if (auto same = same_bits(prefix + "y", a.y, b.y); !same) return same;
    if (auto same = same_bits(prefix + "dx", a.dx, b.dx); !same) return same;
    if (auto same = same_bits(prefix + "d_route_weights", a.d_route_weights, b.d_route_weights);
        !same) {
      return same;
    }
    for (std::size_t part = 0; part < kNumParts; ++part) {
      auto same = same_bits(prefix + "d_" + kParts[part].name, a.grads[part], b.grads[part]);
      if (!same) return same;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace moxie::test
