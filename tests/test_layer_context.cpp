// Contexts and repeated use: one Layer many times, several live contexts, backward in any order and
// any number of times, every saving policy, accumulation over microbatches.
#include <gtest/gtest.h>

#include <deque>

#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

CaseSpec context_spec(DType dtype) {
  CaseSpec spec{small_problem(3, 7, 2, 64, 128, dtype), {40, 0, 64}, Routing::zipf};
  spec.problem = with_all_parts(spec.problem, ActivationKind::swiglu_clamped);
  spec.problem.shared.intermediate = 64;
  return spec;
}

class LayerContext : public ::testing::TestWithParam<DType> {
 protected:
  LayerContext() : world(make_world(world_options(3))) {
    for (std::uint64_t i = 0; i < 4; ++i) {
      // Microbatches of one model: other tokens, the same weights.
      cases.emplace_back(context_spec(GetParam()), test_seed() + i);
      cases.back().params = cases.front().params;
      cases.back().upload();
    }
  }
  const Problem& problem() const { return cases.front().problem(); }
  World world;
  std::deque<LayerCase> cases;
};
INSTANTIATE_TEST_SUITE_P(Types, LayerContext, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& type) { return name(type.param); });

TEST_P(LayerContext, LiveContextsBackwardInReverse) {
  Layer layer(world, problem());
  std::vector<PassOutputs> outs;
  std::vector<Context> contexts;
  for (const LayerCase& c : cases) {
    outs.emplace_back(c);
    contexts.push_back(layer.forward(c.forward_inputs(), outs.back().forward()));
  }
  for (std::size_t i = cases.size(); i-- > 0;) {
    layer.backward(contexts[i], cases[i].backward_inputs(), outs[i].backward());
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    EXPECT_TRUE(same_bits(run_alone(cases[i]), outs[i])) << "microbatch " << i;
  }
  expect_close(cases[3], reference_of(cases[3]), outs[3]);
}

TEST_P(LayerContext, BackwardTwiceGivesTheSameBits) {
  Layer layer(world, problem());
  PassOutputs first(cases[0]);
  const Context context = layer.forward(cases[0].forward_inputs(), first.forward());
  layer.backward(context, cases[0].backward_inputs(), first.backward());
  PassOutputs second = first;
  for (RankOutputs& rank : second.ranks) {
    rank.dx.poison(), rank.d_route_weights.poison();
    for (OwnedTensor& grad : rank.grads) grad.poison();
  }
  layer.backward(context, cases[0].backward_inputs(), second.backward());
  EXPECT_TRUE(same_bits(first, second));
}

TEST_P(LayerContext, AContextIsReusable) {
  Layer layer(world, problem());
  Context context = layer.make_context();
  for (std::size_t i : {0u, 1u, 2u, 0u, 3u}) {
    PassOutputs out(cases[i]);
    layer.forward(cases[i].forward_inputs(), out.forward(), context);
    layer.backward(context, cases[i].backward_inputs(), out.backward());
    EXPECT_TRUE(same_bits(run_alone(cases[i]), out)) << "microbatch " << i;
  }
}

TEST_P(LayerContext, TwoLayersShareOneWorld) {
  Layer a(world, problem());
  Problem other = problem();
  other.hidden = 192, other.shared = {}, other.expert_bias = false, other.top_k = 3;
  Layer b(world, other);
  const LayerCase c({other, {11, 64, 2}}, test_seed());
  PassOutputs out_a(cases[0]), out_b(c);
  const Context context_a = a.forward(cases[0].forward_inputs(), out_a.forward());
  const Context context_b = b.forward(c.forward_inputs(), out_b.forward());
  a.backward(context_a, cases[0].backward_inputs(), out_a.backward());
  b.backward(context_b, c.backward_inputs(), out_b.backward());
  EXPECT_TRUE(same_bits(run_alone(cases[0]), out_a));
  EXPECT_TRUE(same_bits(run_alone(c), out_b));
}

TEST_P(LayerContext, InferGivesTheForwardBits) {
  Layer layer(world, problem());
  PassOutputs trained(cases[0]), inferred(cases[0]);
  layer.forward(cases[0].forward_inputs(), trained.forward());
  layer.infer(cases[0].forward_inputs(), inferred.forward());
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(same_bits("y", trained.ranks[r].y, inferred.ranks[r].y)) << "rank " << r;
  }
}

TEST_P(LayerContext, EverySavePolicyGivesTheSameBits) {
  const PassOutputs want = run_alone(cases[0], {.save = SavePolicy::z});
  expect_close(cases[0], reference_of(cases[0]), want);
  for (SavePolicy save : {SavePolicy::none, SavePolicy::z, SavePolicy::z_and_x}) {
    for (std::int64_t saved_rows : {-1, 0, 1, 128, 200, 384}) {
      Plan plan;
      plan.save = save;
      plan.saved_rows = saved_rows;
      EXPECT_TRUE(same_bits(want, run_alone(cases[0], plan)))
          << name(save) << ", saved_rows " << saved_rows;
    }
  }
}

TEST_P(LayerContext, SavingLessTakesLessMemory) {
  Plan plan;
  const auto bytes = [&](SavePolicy save) {
    plan.save = save;
    return Layer(world, problem(), plan).make_context().num_bytes();
  };
  EXPECT_LT(bytes(SavePolicy::none), bytes(SavePolicy::z));
  EXPECT_LT(bytes(SavePolicy::z), bytes(SavePolicy::z_and_x));
}

TEST_P(LayerContext, AccumulatesFourMicrobatchesIntoMainGrad) {
  Layer layer(world, problem());
  PassOutputs sum(cases[0]);
  sum.prefill_grads();
  Reference total = reference_of(cases[0]);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Context context = layer.forward(cases[i].forward_inputs(), sum.forward());
    layer.backward(context, cases[i].backward_inputs(), sum.backward(/*accumulate=*/true));
    if (i == 0) continue;
    const Reference more = reference_of(cases[i]);
    add_weight_grads(total, more);
    total.y = more.y, total.grads.dx = more.grads.dx;
    total.grads.d_route_weights = more.grads.d_route_weights;
    total.grads.d_route_squares = more.grads.d_route_squares;
  }
  expect_close(cases.back(), total, sum, /*with_backward=*/true, /*prefilled=*/true);
}

TEST_P(LayerContext, AccumulationLeavesIdleExpertsAlone) {
  LayerCase c(cases[0]);
  for (std::int64_t& e : c.tokens.expert_ids) e = e == 4 ? 5 : e;  // expert 4: rank 1's second
  c.upload();
  World fresh = make_world(world_options(3));
  Layer layer(fresh, problem());
  PassOutputs out(c);
  out.prefill_grads();
  const PassOutputs before = out;
  const Context context = layer.forward(c.forward_inputs(), out.forward());
  layer.backward(context, c.backward_inputs(), out.backward(true));
  for (std::size_t part = 0; part < 6; ++part) {
    const OwnedTensor &was = before.ranks[1].grads[part], &is = out.ranks[1].grads[part];
    const std::size_t per_expert = was.size() / 2;
    for (std::size_t i = per_expert; i < was.size(); ++i) {
      ASSERT_EQ(was.get(i), is.get(i)) << kParts[part].name << " element " << i;
    }
  }
}

TEST_P(LayerContext, OverwritingZeroesIdleExperts) {
  LayerCase c(cases[0]);
  for (std::int64_t& e : c.tokens.expert_ids) e = e == 4 ? 5 : e;
  c.upload();
  for (DType grad_dtype : {DType::f32, GetParam()}) {
    const PassOutputs out = run_alone(c, {}, grad_dtype);
    for (std::size_t part = 0; part < 6; ++part) {
      const OwnedTensor& grad = out.ranks[1].grads[part];
      for (std::size_t i = grad.size() / 2; i < grad.size(); ++i) {
        ASSERT_EQ(grad.get(i), 0.0) << kParts[part].name << " element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace moxie::test
