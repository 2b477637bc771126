// x written straight into the rank's heap: no copy, the same bits, and nothing but another pass
// spoils it.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

class InputBuffer : public ::testing::TestWithParam<DispatchMode> {
 protected:
  InputBuffer()
      : layer_case({with_all_parts(small_problem(3, 7, 2), ActivationKind::swiglu),
                    {40, 0, 64},
                    Routing::zipf},
                   test_seed()) {
    plan.dispatch = GetParam();
  }
  // The case's inputs, with x in the heap of the ranks that `in_place` names.
  std::vector<ForwardInput> inputs(Layer& layer, const std::vector<bool>& in_place) const {
    std::vector<ForwardInput> in = layer_case.forward_inputs();
    for (std::size_t r = 0; r < in.size(); ++r) {
      if (!in_place[r]) continue;
      const TensorView buffer = layer.input_buffer(static_cast<std::int64_t>(r));
      const std::vector<std::byte>& x = layer_case.ranks[r].x.bytes();
      if (!x.empty()) std::memcpy(buffer.data, x.data(), x.size());
      in[r].x = {buffer.data, buffer.dtype, in[r].x.shape};
    }
    return in;
  }
  LayerCase layer_case;
  Plan plan;
};
INSTANTIATE_TEST_SUITE_P(Dispatch, InputBuffer,
                         ::testing::Values(DispatchMode::pull, DispatchMode::push),
                         [](const auto& mode) { return name(mode.param); });

TEST_P(InputBuffer, GivesTheBitsOfACopy) {
  const PassOutputs want = run_alone(layer_case);
  World world = make_world(world_options(3));
  Layer layer(world, layer_case.problem(), plan);
  for (const auto& in_place : std::vector<std::vector<bool>>{
           {true, true, true}, {true, false, false}, {false, true, true}}) {
    PassOutputs got(layer_case);
    const auto in = inputs(layer, in_place);
    const Context context = layer.forward(in, got.forward());
    auto grad_in = layer_case.backward_inputs();
    // The forward pass has left x as it was, so backward may find it there, too.
    for (std::size_t r = 0; r < in.size(); ++r) grad_in[r].x = in[r].x;
    layer.backward(context, grad_in, got.backward());
    EXPECT_TRUE(same_bits(want, got));
  }
}

TEST_P(InputBuffer, LastsThroughPassesBackToBack) {
  const PassOutputs want = run_alone(layer_case);
  World world = make_world(world_options(3));
  Layer layer(world, layer_case.problem(), plan);
  FaultInjection faults;
  faults.poison_workspace = true;
  faults.back_to_back = 5;
  faults.shuffle_seed = test_seed();
  world.set_faults(faults);
  PassOutputs got(layer_case);
  Context context = layer.make_context();
  layer.forward(inputs(layer, {true, true, false}), got.forward(), context);
  layer.backward(context, layer_case.backward_inputs(), got.backward());
  EXPECT_TRUE(same_bits(want, got));
}

TEST_P(InputBuffer, MovesOnlyForALargerHeap) {
  World world = make_world(world_options(3));
  Layer layer(world, layer_case.problem(), plan);
  const void* before = layer.input_buffer(2).data;
  EXPECT_EQ(layer.input_buffer(2).shape, (Shape{64, 64}));
  Layer smaller(world, small_problem(3, 4, 1));
  EXPECT_EQ(layer.input_buffer(2).data, before);
  EXPECT_EQ(smaller.input_buffer(2).data, before) << "one heap for all layers";
  Layer larger(world, small_problem(3, 4, 2, 4096));
  EXPECT_EQ(layer.input_buffer(2).data, larger.input_buffer(2).data);
  PassOutputs got(layer_case);
  layer.infer(inputs(layer, {true, true, true}), got.forward());
  const PassOutputs want = run_alone(layer_case);
  for (std::size_t r = 0; r < 3; ++r)
    EXPECT_TRUE(same_bits("y", want.ranks[r].y, got.ranks[r].y)) << "rank " << r;
}

TEST(InputBufferMisuse, RankOutOfRange) {
  World world = make_world(world_options(2));
  Layer layer(world, small_problem(2, 4, 1));
  expect_error(ErrorCode::invalid_argument, {"input_buffer", "is 2", "nearest legal value 1"},
               [&] { layer.input_buffer(2); });
  expect_error(ErrorCode::invalid_argument, {"input_buffer", "is -1", "nearest legal value 0"},
               [&] { layer.input_buffer(-1); });
}

}  // namespace
}  // namespace moxie::test
