// Push dispatch, combine by communication warps and x written in place, on the GPU: the bits of
// pull, epilogue and a copy, in every form of communication, on one GPU and on two.
#include "tests/gpu/device_case.h"
#include "tests/support/expect_error.h"

namespace moxie::test {
namespace {

LayerCase case_of(Problem problem, std::vector<std::int64_t> tokens,
                  Routing routing = Routing::zipf) {
  for (const std::int64_t t : tokens) problem.max_tokens = std::max(problem.max_tokens, t);
  CaseSpec spec;
  spec.problem = problem;
  spec.tokens = std::move(tokens);
  spec.routing = routing;
  return LayerCase(spec, test_seed());
}
Problem bf16_problem(std::int64_t num_ranks, std::int64_t num_experts, std::int64_t top_k,
                     std::int64_t hidden = 256, std::int64_t intermediate = 192) {
  return small_problem(num_ranks, num_experts, top_k, hidden, intermediate, DType::bf16);
}

// `base` with push, with combine by communication warps, and with both.
std::vector<Plan> with_options(const Plan& base) {
  std::vector<Plan> plans(3, base);
  plans[0].dispatch = plans[2].dispatch = DispatchMode::push;
  plans[1].combine = plans[2].combine = CombineMode::comm_workers;
  return plans;
}
Plan smallest_rings() {
  Plan plan;
  plan.order = TaskOrder::lag;
  plan.band_blocks = plan.lag_bands = 1;
  plan.x_ring_blocks = 1, plan.hidden_ring_blocks = 2;
  return plan;
}
std::vector<Plan> bases() {
  std::vector<Plan> plans(5);
  plans[1] = smallest_rings();
  plans[2].minibatch_blocks = 3, plans[2].band_blocks = 2, plans[2].x_ring_blocks = 4;
  plans[3].num_slabs = 3;
  plans[3].save = SavePolicy::z_and_x, plans[3].saved_rows = 256;
  plans[4].order = TaskOrder::lag;
  plans[4].num_slabs = 2;
  return plans;
}

TEST(CudaOptions, same_bits_in_every_form_of_communication) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = case_of(
      with_all_parts(bf16_problem(3, 10, 4, 768, 320), ActivationKind::swiglu), {333, 0, 150});
  DeviceCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  expect_close(c, reference_of(c, false), first, false, false);
  for (const Plan& base : bases()) {
    for (Plan plan : with_options(base)) {
      for (const std::int32_t comm_workers : {0, 1, 4}) {
        plan.comm_workers = comm_workers;
        SCOPED_TRACE(to_string(plan));
        World world = World::cuda(cuda_options(3), on_gpu_0(3));
        Layer layer(world, c.problem(), plan);
        for (int i = 0; i < 3; ++i)
          EXPECT_TRUE(same_bits(first, on_device.run(world, layer, true)));
        if (plan.order == TaskOrder::slabs && comm_workers % 2 == 0) {
          EXPECT_TRUE(same_bits(first, on_device.run_alone(plan, 0, 2))) << "clusters";
        }
      }
    }
  }
  for (Plan plan : with_options(smallest_rings()))
    EXPECT_TRUE(same_bits(first, on_device.run_alone(plan, 125))) << "few CTAs";
}

TEST(CudaOptions, same_bits_in_split_mode) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = case_of(bf16_problem(4, 9, 3, 512, 256), {200, 31, 0, 90});
  DeviceCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  Plan split;
  split.mode = ExecMode::split;
  for (const Plan& plan : with_options(split))
    EXPECT_TRUE(same_bits(first, on_device.run_alone(plan))) << to_string(plan);
}

TEST(CudaOptions, ragged_empty_and_uneven) {
  MOXIE_NEEDS_GPU();
  const LayerCase cases[] = {
      case_of(bf16_problem(3, 10, 2), {0, 33, 7}, Routing::uniform),
      case_of(bf16_problem(4, 3, 2), {200, 0, 9, 1}, Routing::duplicates),
      case_of(bf16_problem(2, 4, 2), {0, 0}),
      case_of(bf16_problem(1, 5, 3), {130}),
      case_of(bf16_problem(8, 5, 5), {1, 2, 3, 4, 5, 6, 7, 300}, Routing::one_expert),
      case_of(bf16_problem(5, 11, 4), {150, 90, 0, 300, 10}, Routing::masked),
      case_of(bf16_problem(2, 1024, 16, 64, 64), {70, 30}, Routing::uniform),
  };
  for (const LayerCase& c : cases) {
    SCOPED_TRACE(std::to_string(c.num_ranks()) + " ranks");
    DeviceCase on_device(c);
    const PassOutputs first = on_device.run_alone();
    expect_close(c, reference_of(c, false), first, false, false);
    for (const Plan& base : {Plan{}, smallest_rings()}) {
      for (const Plan& plan : with_options(base))
        EXPECT_TRUE(same_bits(first, on_device.run_alone(plan))) << to_string(plan);
    }
  }
}

TEST(CudaOptions, same_bits_under_random_delays) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = case_of(bf16_problem(4, 10, 3, 512, 256), {300, 0, 77, 400});
  DeviceCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  const std::int64_t passes = num_passes(120);
  Plan slabs;
  slabs.comm_workers = 2;
  for (const Plan& base : {smallest_rings(), slabs}) {
    const Plan plan = with_options(base)[2];
    WorldOptions options = cuda_options(4);
    options.faults.max_delay_us = 20;
    World world = World::cuda(options, on_gpu_0(4));
    Layer layer(world, c.problem(), plan);
    for (std::int64_t i = 0; i < passes / 2; ++i) {
      options.faults.shuffle_seed = test_seed() + static_cast<std::uint64_t>(i) + 1;
      world.set_faults(options.faults);
      ASSERT_TRUE(same_bits(first, on_device.run(world, layer)))
          << to_string(plan) << " pass " << i;
    }
  }
}

TEST(CudaOptions, errors_are_those_of_pull) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = case_of(bf16_problem(3, 6, 2), {300, 300, 300}, Routing::one_expert);
  DeviceCase on_device(c);
  const PassOutputs want = on_device.run_alone();
  WorldOptions options = cuda_options(3);
  options.timeout_s = 1;
  World world = World::cuda(options, on_gpu_0(3));
  Plan plan = with_options({})[2];
  plan.capacity_rows = 512;  // its push tables stay small, whatever the routing
  Layer narrow(world, c.problem(), plan);
  expect_error(ErrorCode::capacity_exceeded, {"rank 2", "capacity_rows 512"},
               [&] { on_device.run(world, narrow); });
  Layer wide(world, c.problem(), with_options(smallest_rings())[2]);
  EXPECT_TRUE(same_bits(want, on_device.run(world, wide)));
  options.faults.kill_rank = 1;
  world.set_faults(options.faults);
  expect_error(ErrorCode::timeout, {"World::reset()"}, [&] { on_device.run(world, wide); });
  options.faults.kill_rank = -1;
  world.set_faults(options.faults);
  world.reset();
  EXPECT_TRUE(same_bits(want, on_device.run(world, wide)));
}

TEST(CudaOptions, several_gpus) {
  MOXIE_NEEDS_TWO_GPUS();
  Plan dedicated;
  dedicated.comm_workers = 2;
  dedicated.save = SavePolicy::z_and_x;
  for (const std::vector<int>& devices : testing::rank_places()) {
    const auto num_ranks = static_cast<std::int64_t>(devices.size());
    std::vector<std::int64_t> tokens(devices.size(), 80);
    tokens[0] = 400;
    const LayerCase c = case_of(bf16_problem(num_ranks, 9, 3, 512, 256), tokens);
    DeviceCase virtual_ranks(c), spread(c, devices);
    const PassOutputs want = virtual_ranks.run_alone();
    expect_close(c, reference_of(c, false), want, false, false);
    for (const Plan& base : {Plan{}, smallest_rings(), dedicated}) {
      for (const Plan& plan : with_options(base)) {
        WorldOptions options = cuda_options(num_ranks);
        World world = World::cuda(options, {devices});
        Layer layer(world, c.problem(), plan);
        for (std::int64_t i = 0; i < num_passes(20); ++i) {
          options.faults.shuffle_seed =
              i % 2 == 0 ? 0 : test_seed() + static_cast<std::uint64_t>(i);
          world.set_faults(options.faults);
          ASSERT_TRUE(same_bits(want, spread.run(world, layer, true)))
              << to_string(plan) << " pass " << i;
        }
      }
    }
  }
}

TEST(CudaOptions, x_in_place_gives_the_bits_of_a_copy) {
  MOXIE_NEEDS_GPU();
  const LayerCase c =
      case_of(with_all_parts(bf16_problem(3, 8, 3), ActivationKind::swiglu), {90, 0, 64});
  DeviceCase on_device(c);
  const PassOutputs want = on_device.run_alone();
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  for (const Plan& plan : {Plan{}, with_options({})[2]}) {
    Layer layer(world, c.problem(), plan);
    std::vector<ForwardInput> inputs = on_device.inputs();
    for (std::size_t r = 0; r < inputs.size(); r += 2) {
      const TensorView buffer = layer.input_buffer(static_cast<std::int64_t>(r));
      cudaMemcpy(buffer.data, inputs[r].x.data,
                 static_cast<std::size_t>(inputs[r].x.shape.num_elements() * 2),
                 cudaMemcpyDeviceToDevice);
      inputs[r].x = {buffer.data, buffer.dtype, inputs[r].x.shape};
    }
    for (int i = 0; i < 3; ++i) {
      on_device.poison_outputs();
      layer.infer(inputs, on_device.outputs());
      world.synchronize();
      EXPECT_TRUE(same_bits(want, on_device.download())) << to_string(plan) << " pass " << i;
    }
  }
}

TEST(CudaOptions, a_kept_schedule_is_refused_with_push) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = case_of(bf16_problem(1, 4, 2), {20});
  DeviceCase on_device(c);
  WorldOptions options = cuda_options(1);
  World world = World::cuda(options, on_gpu_0(1));
  Layer layer(world, c.problem(), with_options({})[0]);
  on_device.run(world, layer);
  options.faults.keep_schedule = true;
  world.set_faults(options.faults);
  expect_error(ErrorCode::unavailable, {"keep_schedule", "push"},
               [&] { on_device.run(world, layer); });
}

}  // namespace
}  // namespace moxie::test
