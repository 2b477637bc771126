// What the backward of a CUDA world reports: lost ranks, and what is refused.
#include <chrono>

#include "tests/gpu/backward_case.h"
#include "tests/gpu/lost_rank.h"
#include "tests/support/expect_error.h"

namespace moxie::test {
namespace {

using Clock = std::chrono::steady_clock;

// A rank that does not come to the backward: reported by every other one within the timeout and two
// seconds.
void expect_loss_reported(const std::vector<int>& devices, std::int64_t lost) {
  const auto num_ranks = static_cast<std::int64_t>(devices.size());
  std::vector<std::int64_t> tokens;
  for (std::int64_t r = 0; r < num_ranks; ++r) tokens.push_back(40 + 10 * r);
  const LayerCase c = bf16_case(bf16_problem(num_ranks, 6, 2), tokens);
  BackwardCase on_device(c, devices);
  WorldOptions options = cuda_options(num_ranks);
  options.timeout_s = 1;
  World world = World::cuda(options, {devices});
  Layer layer(world, c.problem());
  const PassOutputs want = on_device.run(world, layer);
  const Context context = layer.forward(on_device.forward_inputs(), on_device.forward_outputs());
  world.synchronize();

  options.faults.late_rank = static_cast<std::int32_t>(lost);
  options.faults.late_ms = 500;
  world.set_faults(options.faults);
  layer.backward(context, on_device.inputs(), on_device.outputs());
  world.synchronize();
  EXPECT_TRUE(same_bits(want, on_device.download()));  // late is not lost

  options.faults.late_rank = -1;
  options.faults.kill_rank = static_cast<std::int32_t>(lost);
  world.set_faults(options.faults);
  const Clock::time_point begin = Clock::now();
  try {
    layer.backward(context, on_device.inputs(), on_device.outputs());
    world.synchronize();
    ADD_FAILURE() << "no Error";
  } catch (const Error& error) {
    expect_lost_rank_named(error, num_ranks, lost);
  }
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), 3.0);
  expect_error(ErrorCode::world_stopped, {"reset"},
               [&] { layer.backward(context, on_device.inputs(), on_device.outputs()); });
  options.faults.kill_rank = -1;
  world.set_faults(options.faults);
  world.reset();
  // The context outlives the reset.
  layer.backward(context, on_device.inputs(), on_device.outputs());
  world.synchronize();
  EXPECT_TRUE(same_bits(want, on_device.download()));
  EXPECT_TRUE(same_bits(want, on_device.run(world, layer)));
}

TEST(CudaBackwardFaults, every_rank_reports_a_lost_one) {
  MOXIE_NEEDS_GPU();
  expect_loss_reported({0, 0, 0}, 2);
  expect_loss_reported({0, 0, 0, 0}, 0);
}

TEST(CudaBackwardFaults, two_gpus_report_a_lost_rank) {
  MOXIE_NEEDS_TWO_GPUS();
  expect_loss_reported({0, 1}, 1);
  expect_loss_reported({0, 1}, 0);
}

// ---- misuse ----

using Inputs = std::vector<BackwardInput>;
using Outputs = std::vector<BackwardOutput>;

TEST(CudaBackwardMisuse, errors_name_rule_and_value_and_write_nothing) {
  MOXIE_NEEDS_GPU();
  const LayerCase c =
      bf16_case(with_all_parts(bf16_problem(2, 6, 2), ActivationKind::swiglu), {20, 31});
  BackwardCase on_device(c), in_bf16(c, {}, DType::bf16);
  World world = World::cuda(cuda_options(2), on_gpu_0(2));
  Layer layer(world, c.problem());
  const PassOutputs want = on_device.run(world, layer);
  const Context context = layer.forward(on_device.forward_inputs(), on_device.forward_outputs());
  world.synchronize();
  on_device.poison_outputs();
  const auto expect_refused = [&](const std::vector<std::string>& words,
                                  const std::function<void(Inputs&, Outputs&)>& spoil) {
    SCOPED_TRACE(words.front());
    Inputs inputs = on_device.inputs();
    Outputs outputs = on_device.outputs();
    spoil(inputs, outputs);
    expect_error(ErrorCode::invalid_argument, words,
                 [&] { layer.backward(context, inputs, outputs); });
    world.synchronize();
    EXPECT_TRUE(on_device.download().backward_untouched());
  };
  const auto shift = [](auto& view) {
    using Data = decltype(view.data);
    view.data = reinterpret_cast<Data>(reinterpret_cast<std::uintptr_t>(view.data) + 8);
  };
  expect_refused({"x of rank 1", "[30, 256]", "[31, 256]"}, [](Inputs& in, Outputs&) {
    in[1].x.shape = {30, 256};
  });
  expect_refused({"dy of rank 0", "16 bytes", "nearest legal value"},
                 [&](Inputs& in, Outputs&) { shift(in[0].dy); });
  expect_refused({"x of rank 1", "16 bytes"}, [&](Inputs& in, Outputs&) { shift(in[1].x); });
  expect_refused({"dx of rank 1", "16 bytes"}, [&](Inputs&, Outputs& out) { shift(out[1].dx); });
  for (const Part& part : kParts) {
    expect_refused({std::string("weights.") + part.name + " of rank 1", "16 bytes"},
                   [&](Inputs& in, Outputs&) { shift(in[1].weights.*part.weight); });
    expect_refused({std::string("grads.") + part.name + " of rank 0", "16 bytes"},
                   [&](Inputs&, Outputs& out) { shift(out[0].grads.*part.grad); });
  }
  // One kernel writes the gradients of all ranks.
  expect_refused({"grads.gate of rank 1", "bf16", "f32", "rank 0"},
                 [&](Inputs&, Outputs& out) { out[1].grads = in_bf16.outputs()[1].grads; });
  expect_refused({"grads.accumulate of rank 1", "true", "false"},
                 [](Inputs&, Outputs& out) { out[1].grads.accumulate = true; });
  expect_refused({"accumulate", "bf16", "f32"}, [&](Inputs&, Outputs& out) {
    for (std::size_t r = 0; r < 2; ++r) out[r].grads = in_bf16.outputs(true)[r].grads;
  });

  const Context never_filled = layer.make_context();
  expect_error(ErrorCode::invalid_argument, {"context", "empty"},
               [&] { layer.backward(never_filled, on_device.inputs(), on_device.outputs()); });
  Layer twin(world, c.problem());
  expect_error(ErrorCode::invalid_argument, {"context", "another layer"},
               [&] { twin.backward(context, on_device.inputs(), on_device.outputs()); });
  WorldOptions options = cuda_options(2);
  options.faults.keep_schedule = true;
  world.set_faults(options.faults);
  expect_error(ErrorCode::unavailable, {"keep_schedule", "backward"},
               [&] { layer.backward(context, on_device.inputs(), on_device.outputs()); });
  world.set_faults(cuda_options(2).faults);

  layer.backward(context, on_device.inputs(), on_device.outputs());
  layer.infer(on_device.forward_inputs(), on_device.forward_outputs());
  world.synchronize();
  EXPECT_TRUE(same_bits(want, on_device.download())) << "the pass after the errors";
}

// What only the backward cannot do is no reason to refuse a layer that infers.
void expect_no_context(const Problem& problem, const Plan& plan, ErrorCode code,
                       const std::vector<std::string>& words) {
  World world = World::cuda(cuda_options(1), on_gpu_0(1));
  Layer layer(world, problem, plan);
  expect_error(code, words, [&] { layer.make_context(); });
}

TEST(CudaBackwardMisuse, limits_of_the_backward_are_told_with_the_context) {
  MOXIE_NEEDS_GPU();
  Problem wide = bf16_problem(1, 1, 1, 64, 65536);
  wide.max_tokens = 1;
  expect_no_context(wide, {}, ErrorCode::invalid_argument,
                    {"problem.intermediate", "65536", "65472"});
  Problem p = bf16_problem(1, 1, 1, 64, 64);
  p.max_tokens = 8192 * 128;
  expect_no_context(p, {.chunk_blocks = 8192, .backward_ring_blocks = 8192},
                    ErrorCode::invalid_plan, {"plan.chunk_blocks", "8192", "8191"});
  p.max_tokens = 8190 * 128;
  expect_no_context(p, {.chunk_blocks = 1}, ErrorCode::invalid_plan,
                    {"plan.chunk_blocks", "is 1", "8190 chunks", "4096", "nearest legal value 2"});
}

}  // namespace
}  // namespace moxie::test
