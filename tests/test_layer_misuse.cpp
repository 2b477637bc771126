// Wrong tensors through the API: every broken rule is an Error that names what, the value seen and
// the legal value; outputs stay as they were, and the next correct pass gives the right bits.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

class LayerMisuse : public ::testing::Test {
 protected:
  static CaseSpec spec() {
    CaseSpec s{small_problem(2, 6, 2, 128, 64, DType::bf16), {20, 31}};
    s.problem = with_all_parts(s.problem, ActivationKind::gpt_oss);
    s.problem.max_tokens = 40;
    return s;
  }
  LayerMisuse()
      : layer_case(spec(), test_seed()),
        world(make_world(world_options(2))),
        layer(world, layer_case.problem()),
        want(run_pass(layer, layer_case)) {}

  using Inputs = std::vector<ForwardInput>;
  using Outputs = std::vector<ForwardOutput>;
  void expect_forward_error(const std::vector<std::string>& words,
                            const std::function<void(Inputs&, Outputs&)>& spoil) {
    SCOPED_TRACE(words.front());
    PassOutputs out(layer_case);
    Inputs inputs = layer_case.forward_inputs();
    Outputs outputs = out.forward();
    spoil(inputs, outputs);
    expect_error(ErrorCode::invalid_argument, words, [&] { layer.forward(inputs, outputs); });
    expect_error(ErrorCode::invalid_argument, words, [&] { layer.infer(inputs, outputs); });
    EXPECT_TRUE(out.forward_untouched());
    EXPECT_FALSE(world.stopped());
  }
  using GradInputs = std::vector<BackwardInput>;
  using GradOutputs = std::vector<BackwardOutput>;
  void expect_backward_error(const std::vector<std::string>& words,
                             const std::function<void(GradInputs&, GradOutputs&)>& spoil,
                             DType grad_dtype = DType::f32) {
    SCOPED_TRACE(words.front());
    PassOutputs out(layer_case, grad_dtype);
    const Context context = layer.forward(layer_case.forward_inputs(), out.forward());
    GradInputs inputs = layer_case.backward_inputs();
    GradOutputs outputs = out.backward();
    spoil(inputs, outputs);
    expect_error(ErrorCode::invalid_argument, words,
                 [&] { layer.backward(context, inputs, outputs); });
    EXPECT_TRUE(out.backward_untouched());
  }
  void TearDown() override {
    EXPECT_TRUE(same_bits(want, run_pass(layer, layer_case))) << "the pass after the errors";
  }

  LayerCase layer_case;
  World world;
  Layer layer;
  PassOutputs want;
};

TEST_F(LayerMisuse, NumberOfRanks) {
  expect_forward_error({"inputs", "1", "2"}, [](Inputs& in, Outputs&) { in.pop_back(); });
  expect_forward_error({"outputs", "3", "2"},
                       [](Inputs&, Outputs& out) { out.push_back(out.back()); });
  expect_backward_error({"inputs", "1", "2"}, [](GradInputs& in, GradOutputs&) { in.pop_back(); });
  expect_backward_error({"outputs", "1", "2"},
                        [](GradInputs&, GradOutputs& out) { out.pop_back(); });
}

TEST_F(LayerMisuse, ForwardShapes) {
  expect_forward_error({"x of rank 1", "[31, 64]", "[T, 128]"}, [](Inputs& in, Outputs&) {
    in[1].x.shape = {31, 64};
  });
  expect_forward_error({"expert_ids of rank 0", "[20, 3]", "[20, 2]"}, [](Inputs& in, Outputs&) {
    in[0].expert_ids.shape = {20, 3};
  });
  expect_forward_error({"route_weights of rank 1", "[30, 2]", "[31, 2]"}, [](Inputs& in, Outputs&) {
    in[1].route_weights.shape = {30, 2};
  });
  expect_forward_error({"y of rank 0", "[21, 128]", "[20, 128]"}, [](Inputs&, Outputs& out) {
    out[0].y.shape = {21, 128};
  });
  expect_forward_error({"gate of rank 1", "[4, 64, 128]", "[3, 64, 128]"},
                       [](Inputs& in, Outputs&) {
                         in[1].weights.gate.shape = {4, 64, 128};
                       });
  expect_forward_error(
      {"down of rank 0", "[3, 64, 128]", "[3, 128, 64]"}, [](Inputs& in, Outputs&) {
        in[0].weights.down.shape = {3, 64, 128};  // the transposed matrix has as many elements
      });
  expect_forward_error({"shared_down of rank 0", "[192, 128]", "[128, 192]"},
                       [](Inputs& in, Outputs&) {
                         in[0].weights.shared_down.shape = {192, 128};
                       });
}

TEST_F(LayerMisuse, TooManyTokens) {
  expect_forward_error({"rank 1", "41", "40"}, [](Inputs& in, Outputs& out) {
    in[1].x.shape = {41, 128};
    in[1].expert_ids.shape = in[1].route_weights.shape = {41, 2};
    out[1].y.shape = {41, 128};
  });
}

TEST_F(LayerMisuse, ForwardTypes) {
  expect_forward_error({"x of rank 0", "f32", "bf16"},
                       [](Inputs& in, Outputs&) { in[0].x.dtype = DType::f32; });
  expect_forward_error({"expert_ids of rank 1", "f32", "i32", "i64"},
                       [](Inputs& in, Outputs&) { in[1].expert_ids.dtype = DType::f32; });
  expect_forward_error({"route_weights of rank 1", "bf16", "f32"},
                       [](Inputs& in, Outputs&) { in[1].route_weights.dtype = DType::bf16; });
  expect_forward_error({"up_bias of rank 0", "f32", "bf16"},
                       [](Inputs& in, Outputs&) { in[0].weights.up_bias.dtype = DType::f32; });
  expect_forward_error({"y of rank 1", "f32", "bf16"},
                       [](Inputs&, Outputs& out) { out[1].y.dtype = DType::f32; });
}

TEST_F(LayerMisuse, AbsentAndSuperfluousTensors) {
  for (const Part& part : kParts) {
    expect_forward_error({std::string(part.name) + " of rank 1", "absent"},
                         [&](Inputs& in, Outputs&) { in[1].weights.*part.weight = {}; });
  }
  expect_forward_error({"x of rank 0", "absent"}, [](Inputs& in, Outputs&) { in[0].x = {}; });
  expect_forward_error({"y of rank 0"}, [](Inputs&, Outputs& out) { out[0].y = TensorView(); });
  expect_forward_error({"x of rank 0", "null"},
                       [](Inputs& in, Outputs&) { in[0].x.data = nullptr; });
}

TEST(LayerMisuseParts, ATensorTheProblemHasNot) {
  CaseSpec spec{small_problem(1, 2, 1), {3}};
  const LayerCase c(spec, test_seed());
  World world = make_world(world_options(1));
  Layer layer(world, c.problem());
  PassOutputs out(c);
  auto inputs = c.forward_inputs();
  inputs[0].weights.gate_bias = c.ranks[0].weights[0].view();
  expect_error(ErrorCode::invalid_argument, {"gate_bias of rank 0"},
               [&] { layer.forward(inputs, out.forward()); });
}

TEST_F(LayerMisuse, BackwardTensors) {
  expect_backward_error({"dy of rank 0", "[20, 64]", "[20, 128]"},
                        [](GradInputs& in, GradOutputs&) {
                          in[0].dy.shape = {20, 64};
                        });
  expect_backward_error({"x of rank 1", "[30, 128]", "[31, 128]"},
                        [](GradInputs& in, GradOutputs&) {
                          in[1].x.shape = {30, 128};
                        });
  expect_backward_error({"dx of rank 1", "f32", "bf16"},
                        [](GradInputs&, GradOutputs& out) { out[1].dx.dtype = DType::f32; });
  expect_backward_error(
      {"d_route_weights of rank 1", "bf16", "f32"},
      [](GradInputs&, GradOutputs& out) { out[1].d_route_weights.dtype = DType::bf16; });
  expect_backward_error({"down_bias", "rank 0", "bf16", "f32"}, [](GradInputs&, GradOutputs& out) {
    out[0].grads.down_bias.dtype = DType::bf16;
  });
  expect_backward_error({"down", "rank 1", "[3, 64, 128]", "[3, 128, 64]"},
                        [](GradInputs&, GradOutputs& out) {
                          out[1].grads.down.shape = {3, 64, 128};
                        });
  expect_backward_error({"up", "rank 0", "bf16"}, [](GradInputs&, GradOutputs& out) {
    out[0].grads.up.dtype = DType::bf16;  // gate is f32: matrices must be alike
  });
}

TEST_F(LayerMisuse, AccumulationNeedsF32) {
  expect_backward_error(
      {"accumulate", "bf16", "f32"},
      [](GradInputs&, GradOutputs& out) {
        out[0].grads.accumulate = out[1].grads.accumulate = true;
      },
      DType::bf16);
}

TEST_F(LayerMisuse, BackwardNeedsAForward) {
  PassOutputs out(layer_case);
  const Context never_filled = layer.make_context();
  expect_error(ErrorCode::invalid_argument, {"context"},
               [&] { layer.backward(never_filled, layer_case.backward_inputs(), out.backward()); });
  EXPECT_TRUE(out.backward_untouched());
}

TEST_F(LayerMisuse, ContextOfAnotherLayer) {
  Problem other = layer_case.problem();
  other.top_k = 3;
  const LayerCase c({other, {20, 31}}, test_seed());
  Layer other_layer(world, other);
  PassOutputs out(c), mine(layer_case);
  const Context context = other_layer.forward(c.forward_inputs(), out.forward());
  expect_error(ErrorCode::invalid_argument, {"context"},
               [&] { layer.backward(context, layer_case.backward_inputs(), mine.backward()); });
  EXPECT_TRUE(mine.backward_untouched());
}

}  // namespace
}  // namespace moxie::test
