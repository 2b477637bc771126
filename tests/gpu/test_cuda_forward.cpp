// The fused forward kernel on one GPU, with virtual ranks: right against the FP64 oracle, the same
// bits in every plan, timing and replay, errors where the CPU twin has them.
#include <chrono>

#include "tests/gpu/device_case.h"
#include "tests/support/expect_error.h"

namespace moxie::test {
namespace {

CaseSpec spec_of(Problem problem, std::vector<std::int64_t> tokens,
                 Routing routing = Routing::uniform) {
  for (const std::int64_t t : tokens) problem.max_tokens = std::max(problem.max_tokens, t);
  CaseSpec spec;
  spec.problem = problem;
  spec.tokens = std::move(tokens);
  spec.routing = routing;
  return spec;
}
Problem bf16_problem(std::int64_t num_ranks, std::int64_t num_experts, std::int64_t top_k,
                     std::int64_t hidden = 256, std::int64_t intermediate = 192) {
  return small_problem(num_ranks, num_experts, top_k, hidden, intermediate, DType::bf16);
}

// Right, and with clusters of two CTAs to the bit the same.
void expect_right_on_gpu(const CaseSpec& spec) {
  const LayerCase c(spec, test_seed());
  DeviceCase on_device(c);
  const PassOutputs alone = on_device.run_alone({}, 0, 1);
  expect_close(c, reference_of(c, false), alone, false, false);
  EXPECT_TRUE(same_bits(alone, on_device.run_alone({}, 0, 2)));
}

TEST(CudaForward, one_rank) {
  MOXIE_NEEDS_GPU();
  expect_right_on_gpu(spec_of(bf16_problem(1, 4, 2), {64}));
  expect_right_on_gpu(spec_of(bf16_problem(1, 8, 3, 512, 256), {300}));
  expect_right_on_gpu(spec_of(bf16_problem(1, 1, 1, 64, 64), {1}));
}

TEST(CudaForward, virtual_ranks) {
  MOXIE_NEEDS_GPU();
  for (const std::int64_t num_ranks : {2, 3, 4, 5, 6, 7, 8}) {
    SCOPED_TRACE(num_ranks);
    std::vector<std::int64_t> tokens;
    for (std::int64_t r = 0; r < num_ranks; ++r) tokens.push_back((r * 37 + 5) % 100);
    expect_right_on_gpu(spec_of(bf16_problem(num_ranks, 16, 4), tokens));
  }
}

TEST(CudaForward, ragged_empty_and_uneven) {
  MOXIE_NEEDS_GPU();
  expect_right_on_gpu(spec_of(bf16_problem(3, 10, 2), {0, 33, 7}));
  expect_right_on_gpu(spec_of(bf16_problem(4, 6, 3), {0, 5, 5, 5}));
  expect_right_on_gpu(spec_of(bf16_problem(4, 3, 2), {20, 0, 9, 1}));  // fewer experts than ranks
  expect_right_on_gpu(spec_of(bf16_problem(2, 4, 2), {0, 0}));
  expect_right_on_gpu(spec_of(bf16_problem(8, 5, 5), {1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(CudaForward, routings) {
  MOXIE_NEEDS_GPU();
  for (const Routing routing :
       {Routing::zipf, Routing::one_expert, Routing::masked, Routing::duplicates}) {
    SCOPED_TRACE(static_cast<int>(routing));
    CaseSpec spec = spec_of(bf16_problem(3, 12, 4), {90, 11, 200}, routing);
    expect_right_on_gpu(spec);
    spec.id_dtype = DType::i32;
    expect_right_on_gpu(spec);
  }
}

TEST(CudaForward, exact_row_counts) {
  MOXIE_NEEDS_GPU();
  const std::vector<std::int64_t> rows = {0, 3, 0, 128, 1, 0, 0, 200, 127, 129, 64, 65};
  std::int64_t total = 0;
  for (const std::int64_t r : rows) total += r;
  LayerCase c(spec_of(bf16_problem(2, static_cast<std::int64_t>(rows.size()), 1),
                      {total / 2, total - total / 2}),
              test_seed());
  c.route_exactly(rows, test_seed());
  DeviceCase on_device(c);
  expect_close(c, reference_of(c, false), on_device.run_alone(), false, false);
}

TEST(CudaForward, tails_and_many_experts) {
  MOXIE_NEEDS_GPU();
  expect_right_on_gpu(spec_of(bf16_problem(2, 4, 2, 2880, 1408), {24, 9}));
  expect_right_on_gpu(spec_of(bf16_problem(2, 1024, 16, 64, 64), {70, 30}));
  expect_right_on_gpu(spec_of(bf16_problem(1, 3, 2, 1088, 320), {150}));
}

TEST(CudaForward, biases_activations_and_shared_expert) {
  MOXIE_NEEDS_GPU();
  for (const ActivationKind kind :
       {ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::gpt_oss}) {
    SCOPED_TRACE(name(kind));
    expect_right_on_gpu(
        spec_of(with_all_parts(bf16_problem(3, 7, 3, 320, 192), kind), {130, 0, 40}));
    Problem p = bf16_problem(2, 6, 2);
    p.activation.kind = kind;
    p.shared.intermediate = 320;
    expect_right_on_gpu(spec_of(p, {140, 60}));
  }
}

// Plans, grids and faults that must not move a bit.
std::vector<Plan> some_plans() {
  std::vector<Plan> plans(13);
  plans[1].num_slabs = 1;
  plans[2].num_slabs = 3;
  plans[2].band_blocks = 3;
  plans[3].order = TaskOrder::lag;
  plans[4].order = TaskOrder::lag;
  plans[4].band_blocks = 2, plans[4].lag_bands = 1;
  plans[4].x_ring_blocks = 2, plans[4].hidden_ring_blocks = 4;
  plans[5].order = TaskOrder::lag;
  plans[5].band_blocks = 1, plans[5].lag_bands = 1, plans[5].x_ring_blocks = 1,
  plans[5].hidden_ring_blocks = 2;
  plans[6].minibatch_blocks = 4;
  plans[7].minibatch_blocks = 3, plans[7].band_blocks = 2, plans[7].x_ring_blocks = 4;
  plans[8].save = SavePolicy::none;
  plans[9].save = SavePolicy::z_and_x;
  plans[9].saved_rows = 256;
  plans[10].mode = ExecMode::split;
  plans[11].comm_workers = 2;  // and with the smallest rings, in lag order
  plans[12] = plans[5];
  plans[12].comm_workers = 2;
  return plans;
}

TEST(CudaForward, same_bits_in_every_plan) {
  MOXIE_NEEDS_GPU();
  const LayerCase c(spec_of(with_all_parts(bf16_problem(3, 9, 4, 768, 320), ActivationKind::swiglu),
                            {333, 0, 150}, Routing::zipf),
                    test_seed());
  DeviceCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  expect_close(c, reference_of(c, false), first, false, false);
  for (const Plan& plan : some_plans()) {
    SCOPED_TRACE(to_string(plan));
    EXPECT_TRUE(same_bits(first, on_device.run_alone(plan)));
    World world = World::cuda(cuda_options(3), on_gpu_0(3));
    Layer layer(world, c.problem(), plan);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(first, on_device.run(world, layer, true)));
  }
  for (const std::int32_t reserve_sms : {1, 60, 120}) {
    for (const std::int32_t cluster_size : {1, 2}) {
      EXPECT_TRUE(same_bits(first, on_device.run_alone({}, reserve_sms, cluster_size)));
    }
  }
}

TEST(CudaForward, same_bits_on_any_number_of_ranks) {
  MOXIE_NEEDS_GPU();
  PassOutputs first(LayerCase(spec_of(bf16_problem(1, 8, 3), {210}), test_seed()));
  std::vector<std::byte> wanted;
  for (const std::int64_t num_ranks : {1, 2, 3, 7}) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(num_ranks), 210 / num_ranks);
    const LayerCase c(spec_of(bf16_problem(num_ranks, 8, 3), tokens), test_seed());
    DeviceCase on_device(c);
    std::vector<std::byte> got;
    for (const RankOutputs& rank : on_device.run_alone().ranks)
      got.insert(got.end(), rank.y.bytes().begin(), rank.y.bytes().end());
    if (wanted.empty()) wanted = got;
    EXPECT_EQ(wanted, got) << num_ranks << " ranks";
  }
}

TEST(CudaForward, same_bits_under_random_delays) {
  MOXIE_NEEDS_GPU();
  const LayerCase c(spec_of(bf16_problem(4, 10, 3, 512, 256), {100, 0, 77, 200}, Routing::zipf),
                    test_seed());
  DeviceCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  const std::int64_t passes = num_passes(200);
  std::vector<Plan> plans = some_plans();
  for (std::size_t p : {0, 4, 5, 7}) {
    WorldOptions options = cuda_options(4);
    options.faults.max_delay_us = 20;
    CudaOptions cuda = on_gpu_0(4);
    cuda.cluster_size = plans[p].order == TaskOrder::slabs ? 2 : 1;
    World world = World::cuda(options, cuda);
    Layer layer(world, c.problem(), plans[p]);
    for (std::int64_t i = 0; i < passes / 4; ++i) {
      options.faults.shuffle_seed = test_seed() + static_cast<std::uint64_t>(i) + 1;
      world.set_faults(options.faults);
      ASSERT_TRUE(same_bits(first, on_device.run(world, layer)))
          << to_string(plans[p]) << " pass " << i;
    }
  }
}

TEST(CudaForward, layers_share_a_world) {
  MOXIE_NEEDS_GPU();
  const LayerCase small(spec_of(bf16_problem(2, 6, 2), {30, 4}), test_seed());
  const LayerCase big(spec_of(bf16_problem(2, 6, 2, 512, 128), {200, 100}), test_seed());
  DeviceCase small_device(small), big_device(big);
  const PassOutputs want_small = small_device.run_alone(), want_big = big_device.run_alone();
  World world = World::cuda(cuda_options(2), on_gpu_0(2));
  Layer a(world, small.problem()), b(world, big.problem());
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(same_bits(want_small, small_device.run(world, a)));
    EXPECT_TRUE(same_bits(want_big, big_device.run(world, b)));
    EXPECT_TRUE(same_bits(want_big, big_device.run(world, b)));
  }
}

TEST(CudaForward, graph_replay_with_changed_inputs) {
  MOXIE_NEEDS_GPU();
  LayerCase c(spec_of(bf16_problem(2, 8, 3), {64, 64}), test_seed());
  DeviceCase on_device(c);
  WorldOptions options = cuda_options(2);
  options.faults.poison_workspace = false;
  World world = World::cuda(options, on_gpu_0(2));
  Layer layer(world, c.problem());
  cudaStream_t stream;
  ASSERT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  world.set_stream(stream);
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.infer(on_device.inputs(), on_device.outputs());
  ASSERT_EQ(cudaSuccess, cudaStreamEndCapture(stream, &graph));
  ASSERT_EQ(cudaSuccess, cudaGraphInstantiate(&replay, graph, 0));
  size_t num_nodes = 0;
  cudaGraphGetNodes(graph, nullptr, &num_nodes);
  EXPECT_EQ(1u, num_nodes);  // the whole pass is one kernel
  for (int i = 0; i < 12; ++i) {
    // Of rank 1's 64 tokens 64, then 8, then none keep their routes.
    const std::int64_t kept = i % 3 == 0 ? 64 : i % 3 == 1 ? 8 : 0;
    const LayerCase fresh(c.spec, test_seed() + static_cast<std::uint64_t>(i));
    c.tokens = fresh.tokens;
    for (std::int64_t t = 64 + kept; t < 128; ++t) {
      for (std::int64_t k = 0; k < 3; ++k) c.expert_id(t, k) = -1;
    }
    c.upload();
    on_device.upload();
    const PassOutputs want = on_device.run_alone();
    on_device.poison_outputs();
    ASSERT_EQ(cudaSuccess, cudaGraphLaunch(replay, stream));
    world.synchronize();
    ASSERT_TRUE(same_bits(want, on_device.download())) << "replay " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  world.set_stream(nullptr);
  cudaStreamDestroy(stream);
}

TEST(CudaForward, invalid_ids_and_capacity_end_in_errors) {
  MOXIE_NEEDS_GPU();
  LayerCase c(spec_of(bf16_problem(3, 6, 2), {40, 50, 60}), test_seed());
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer layer(world, c.problem());
  DeviceCase good(c);
  const PassOutputs want = good.run(world, layer);
  c.expert_id(40 + 7, 1) = 6;
  c.upload();
  DeviceCase bad(c);
  expect_error(ErrorCode::invalid_route, {"rank 1 token 7 slot 1 is 6", "0 and 5"},
               [&] { bad.run(world, layer); });
  EXPECT_TRUE(bad.download().forward_untouched());
  EXPECT_TRUE(same_bits(want, good.run(world, layer)));  // the world goes on

  LayerCase crowded(spec_of(bf16_problem(3, 6, 2), {300, 300, 300}, Routing::one_expert),
                    test_seed());
  Plan plan;
  plan.capacity_rows = 512;
  Layer narrow(world, crowded.problem(), plan);
  DeviceCase on_device(crowded);
  expect_error(ErrorCode::capacity_exceeded, {"rank 2", "capacity_rows 512"},
               [&] { on_device.run(world, narrow); });
  EXPECT_TRUE(on_device.download().forward_untouched());
  Layer wide(world, crowded.problem());
  expect_close(crowded, reference_of(crowded, false), on_device.run(world, wide), false, false);
}

TEST(CudaForward, a_late_rank_works_and_a_dead_one_is_reported) {
  MOXIE_NEEDS_GPU();
  const LayerCase c(spec_of(bf16_problem(3, 6, 2), {40, 50, 60}), test_seed());
  DeviceCase on_device(c);
  const PassOutputs want = on_device.run_alone();
  WorldOptions options = cuda_options(3);
  options.timeout_s = 1;
  options.faults.late_rank = 1;
  options.faults.late_ms = 500;
  World world = World::cuda(options, on_gpu_0(3));
  Layer layer(world, c.problem());
  EXPECT_TRUE(same_bits(want, on_device.run(world, layer)));
  options.faults.late_rank = -1;
  options.faults.kill_rank = 2;
  world.set_faults(options.faults);
  const auto begin = std::chrono::steady_clock::now();
  expect_error(ErrorCode::timeout, {"World::reset()"}, [&] { on_device.run(world, layer); });
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 3.0);
  options.faults.kill_rank = -1;
  world.set_faults(options.faults);
  expect_error(ErrorCode::world_stopped, {"reset"}, [&] { on_device.run(world, layer); });
  world.reset();
  EXPECT_TRUE(same_bits(want, on_device.run(world, layer)));
}

TEST(CudaForward, several_gpus) {
  MOXIE_NEEDS_TWO_GPUS();
  for (const std::vector<int>& devices : testing::rank_places()) {
    const auto num_ranks = static_cast<std::int64_t>(devices.size());
    std::vector<std::int64_t> tokens(devices.size(), 80);
    tokens[0] = 300;
    const LayerCase c(spec_of(bf16_problem(num_ranks, 9, 3, 512, 256), tokens, Routing::zipf),
                      test_seed());
    DeviceCase virtual_ranks(c), spread(c, devices);
    const PassOutputs want = virtual_ranks.run_alone();
    expect_close(c, reference_of(c, false), want, false, false);
    WorldOptions options = cuda_options(num_ranks);
    World world = World::cuda(options, {devices});
    Layer layer(world, c.problem());
    for (std::int64_t i = 0; i < num_passes(100); ++i) {
      options.faults.shuffle_seed = i % 2 == 0 ? 0 : test_seed() + static_cast<std::uint64_t>(i);
      world.set_faults(options.faults);
      ASSERT_TRUE(same_bits(want, spread.run(world, layer))) << "pass " << i;
    }
    options.timeout_s = 1;
    options.faults.kill_rank = 1;
    world.set_timeout(1);
    world.set_faults(options.faults);
    expect_error(ErrorCode::timeout, {"World::reset()"}, [&] { spread.run(world, layer); });
    options.faults.kill_rank = -1;
    world.set_faults(options.faults);
    world.reset();
    EXPECT_TRUE(same_bits(want, spread.run(world, layer)));
  }
}

TEST(CudaForward, what_is_not_there_is_refused) {
  MOXIE_NEEDS_GPU();
  World world = World::cuda(cuda_options(1), on_gpu_0(1));
  expect_error(ErrorCode::unavailable, {"f32", "bf16"},
               [&] { Layer(world, small_problem(1, 4, 2)); });
  CudaOptions all_reserved;
  all_reserved.reserve_sms = 4096;
  World none = World::cuda(cuda_options(1), all_reserved);
  expect_error(ErrorCode::invalid_argument, {"reserve_sms", "4096"},
               [&] { Layer(none, bf16_problem(1, 4, 2)); });
}

}  // namespace
}  // namespace moxie::test
