// The fused backward: the same bits in every plan, whatever the rings, chunks, workers, what the
// context keeps, and the timing.
#include "tests/gpu/backward_case.h"

namespace moxie::test {
namespace {

// Experts of many blocks and of none, a wide shared expert of several blocks, biases.
LayerCase many_blocks() {
  Problem p = with_all_parts(bf16_problem(2, 5, 3, 256, 192), ActivationKind::swiglu);
  p.shared.intermediate = 320;
  return bf16_case(p, {400, 150}, Routing::zipf);
}

struct Chunking {
  std::int32_t chunk_blocks, lag_chunks, minibatch_blocks;
};

// The smallest ring that check() accepts, one more, and all blocks. chunk_blocks 0: whole experts,
// or 8 blocks where the ring is smaller.
std::vector<Plan> with_rings(const Problem& problem, const Chunking& chunking) {
  Plan plan;
  plan.chunk_blocks = chunking.chunk_blocks;
  plan.lag_chunks = chunking.lag_chunks;
  plan.minibatch_blocks = chunking.minibatch_blocks;
  const std::int64_t blocks = pipeline::resolve(problem, plan).backward_ring_blocks;
  const std::int32_t cut = plan.chunk_blocks != 0 ? plan.chunk_blocks : 8;
  const std::int64_t smallest = std::min(
      blocks, pipeline::min_backward_ring_blocks(cut, plan.lag_chunks, plan.minibatch_blocks));
  std::vector<Plan> plans;
  for (const std::int64_t ring : {smallest, smallest + 1, blocks}) {
    plan.backward_ring_blocks = std::min(ring, blocks);
    plans.push_back(plan);
  }
  return plans;
}

TEST(CudaBackwardPlans, same_bits_in_every_ring_and_chunk) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = many_blocks();
  for (const DType grad_dtype : {DType::f32, DType::bf16}) {
    BackwardCase on_device(c, {}, grad_dtype);
    const PassOutputs first = on_device.run_alone();
    expect_close(c, reference_of(c), first);
    std::size_t num_runs = 0;
    for (const std::int32_t chunk_blocks : {1, 2, 0}) {
      for (const std::int32_t lag_chunks : {1, 2}) {
        for (const std::int32_t minibatch_blocks : {1, 2}) {
          for (Plan plan : with_rings(c.problem(), {chunk_blocks, lag_chunks, minibatch_blocks})) {
            plan.save = num_runs % 2 == 0 ? SavePolicy::z : SavePolicy::none;
            plan.comm_workers = std::array{0, 2, 8}[num_runs++ % 3];
            SCOPED_TRACE(to_string(plan));
            EXPECT_TRUE(same_bits(first, on_device.run_alone(plan, 0, 1)));
            EXPECT_TRUE(same_bits(first, on_device.run_alone(plan, 0, 2)));
          }
        }
      }
    }
  }
}

TEST(CudaBackwardPlans, same_bits_whatever_the_context_keeps) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = many_blocks();
  BackwardCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  for (const SavePolicy save : {SavePolicy::none, SavePolicy::z, SavePolicy::z_and_x}) {
    for (const std::int64_t saved_rows : {-1, 0, 1, 128, 200, 512}) {
      for (const bool small_ring : {false, true}) {
        Plan plan;
        plan.save = save;
        plan.saved_rows = saved_rows;
        if (small_ring) plan.chunk_blocks = 1, plan.backward_ring_blocks = 2;
        SCOPED_TRACE(to_string(plan));
        EXPECT_TRUE(same_bits(first, on_device.run_alone(plan, 0, saved_rows == 1 ? 2 : 1)));
      }
    }
  }
}

// What the forward's part of a plan says is nothing to the backward.
TEST(CudaBackwardPlans, same_bits_in_every_mode_order_and_form_of_communication) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = many_blocks();
  BackwardCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  std::vector<Plan> plans(7);
  plans[0].mode = ExecMode::split;
  plans[1].order = TaskOrder::lag;
  plans[2].order = TaskOrder::lag;
  plans[2].band_blocks = plans[2].lag_bands = 1;
  plans[2].x_ring_blocks = 1, plans[2].hidden_ring_blocks = 2;
  plans[3].dispatch = DispatchMode::push;
  plans[4].combine = CombineMode::comm_workers, plans[4].comm_workers = 4;
  plans[5].num_slabs = 1;
  plans[6].comm_workers = 1;  // odd: no clusters
  for (const Plan& plan : plans) {
    SCOPED_TRACE(to_string(plan));
    EXPECT_TRUE(same_bits(first, on_device.run_alone(plan)));
  }
  for (const std::int32_t reserve_sms : {1, 60, 120}) {
    for (const std::int32_t cluster_size : {1, 2}) {
      EXPECT_TRUE(same_bits(first, on_device.run_alone({}, reserve_sms, cluster_size)))
          << reserve_sms << " SMs reserved, clusters of " << cluster_size;
    }
  }
}

// One layer, pass after pass: both banks of counters, every parity.
TEST(CudaBackwardPlans, passes_follow_each_other) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = many_blocks();
  BackwardCase on_device(c);
  const PassOutputs first = on_device.run_alone();
  Plan small_ring;
  small_ring.chunk_blocks = 1, small_ring.backward_ring_blocks = 2;
  for (const Plan& plan : {Plan{}, small_ring}) {
    World world = World::cuda(cuda_options(2), on_gpu_0(2));
    Layer layer(world, c.problem(), plan);
    for (int i = 0; i < 5; ++i) {
      EXPECT_TRUE(same_bits(first, on_device.run(world, layer))) << "pass " << i;
      on_device.poison_outputs();
      layer.infer(on_device.forward_inputs(), on_device.forward_outputs());  // an odd number
    }
  }
}

void expect_same_bits_under_delays(const LayerCase& c, const std::vector<int>& devices,
                                   std::int64_t passes) {
  BackwardCase on_device(c, devices);
  const PassOutputs first = on_device.run_alone();
  std::vector<Plan> plans(5);
  plans[1].chunk_blocks = 1, plans[1].backward_ring_blocks = 2;
  plans[1].save = SavePolicy::none;
  plans[2].chunk_blocks = 2, plans[2].minibatch_blocks = 2, plans[2].backward_ring_blocks = 5;
  plans[2].comm_workers = 2;
  plans[3].save = SavePolicy::z_and_x;
  plans[3].comm_workers = 2;
  plans[4].save = SavePolicy::none;
  const auto num_ranks = static_cast<std::int64_t>(devices.size());
  for (std::size_t p = 0; p < plans.size(); ++p) {
    WorldOptions options = cuda_options(num_ranks);
    World world = World::cuda(options, {devices, 0, p % 2 == 0 ? 2 : 1});
    Layer layer(world, c.problem(), plans[p]);
    Context context = layer.make_context();
    for (std::int64_t i = 0; i < passes; ++i) {
      options.faults.shuffle_seed =
          i % 4 == 3 ? 0 : test_seed() + static_cast<std::uint64_t>(i) + 1;
      world.set_faults(options.faults);
      ASSERT_TRUE(same_bits(first, on_device.run(world, layer, context)))
          << to_string(plans[p]) << " pass " << i;
    }
  }
}

TEST(CudaBackwardPlans, same_bits_under_random_delays) {
  MOXIE_NEEDS_GPU();
  Problem p = with_all_parts(bf16_problem(3, 7, 3, 256, 192), ActivationKind::gpt_oss);
  p.shared.intermediate = 64;
  expect_same_bits_under_delays(bf16_case(p, {200, 0, 177}, Routing::zipf), {0, 0, 0},
                                num_passes(300) / 5);
}

TEST(CudaBackwardPlans, same_bits_under_random_delays_on_several_gpus) {
  MOXIE_NEEDS_TWO_GPUS();
  for (const std::vector<int>& devices : testing::rank_places()) {
    std::vector<std::int64_t> tokens(devices.size(), 80);
    tokens[0] = 300;
    if (devices.size() > 2) tokens[1] = 0, tokens[2] = 1;
    const auto num_ranks = static_cast<std::int64_t>(devices.size());
    const LayerCase c = bf16_case(bf16_problem(num_ranks, 9, 3, 512, 256), tokens, Routing::zipf);
    expect_same_bits_under_delays(c, devices, num_passes(devices.size() == 2 ? 150 : 100) / 5);
  }
}

}  // namespace
}  // namespace moxie::test
