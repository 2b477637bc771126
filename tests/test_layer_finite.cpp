// Validation mode: a NaN or an infinity in any input is an Error that names tensor, rank and
// position, before the pass.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

class LayerFinite : public ::testing::Test {
 protected:
  LayerFinite() : layer_case(spec(), test_seed()) {
    WorldOptions options = world_options(2);
    options.validate_finite = true;
    world.emplace(make_world(options));
    layer.emplace(*world, layer_case.problem());
  }
  static CaseSpec spec() {
    CaseSpec s{small_problem(2, 4, 2, 64, 64, DType::bf16), {20, 31}};
    s.problem = with_all_parts(s.problem, ActivationKind::gpt_oss);
    return s;
  }
  LayerCase layer_case;
  std::optional<World> world;
  std::optional<Layer> layer;
};

TEST_F(LayerFinite, GoodInputsPass) {
  EXPECT_TRUE(same_bits(run_alone(layer_case), run_pass(*layer, layer_case)));
}

TEST_F(LayerFinite, MaskedWeightsAreNotChecked) {
  layer_case.expert_id(3, 1) = -1;
  layer_case.route_weight(3, 1) = std::nan("");
  layer_case.upload();
  expect_close(layer_case, reference_of(layer_case), run_pass(*layer, layer_case));
}

TEST_F(LayerFinite, TheTensorRankAndPositionAreNamed) {
  const auto spoil = [&](const std::vector<std::string>& words, OwnedTensor& tensor,
                         std::size_t index, double value) {
    const double good = tensor.get(index);
    tensor.set(index, value);
    PassOutputs out(layer_case);
    expect_error(ErrorCode::non_finite, words,
                 [&] { layer->forward(layer_case.forward_inputs(), out.forward()); });
    EXPECT_TRUE(out.forward_untouched());
    tensor.set(index, good);
  };
  RankInputs& rank = layer_case.ranks[1];
  const double infinity = std::numeric_limits<double>::infinity();
  spoil({"x of rank 1", "13", "57"}, rank.x, 13 * 64 + 57, std::nan(""));
  spoil({"route_weights of rank 1", "29", "1"}, rank.route_weights, 29 * 2 + 1, infinity);
  spoil({"up of rank 1", "1", "33", "47"}, rank.weights[1], (64 + 33) * 64 + 47, -infinity);
  spoil({"shared_output_gate of rank 1", "63"}, rank.weights[9], 63, std::nan(""));
  EXPECT_TRUE(same_bits(run_alone(layer_case), run_pass(*layer, layer_case)));
}

TEST_F(LayerFinite, GradientsAreCheckedBeforeBackward) {
  PassOutputs out(layer_case);
  const Context context = layer->forward(layer_case.forward_inputs(), out.forward());
  layer_case.ranks[0].dy.set(19 * 64 + 58, std::nan(""));
  expect_error(ErrorCode::non_finite, {"dy of rank 0", "19", "58"},
               [&] { layer->backward(context, layer_case.backward_inputs(), out.backward()); });
  EXPECT_TRUE(out.backward_untouched());
}

}  // namespace
}  // namespace moxie::test
