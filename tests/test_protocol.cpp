// The protocol under seeded shuffles: tiny passes with every ring at its minimum, each bit-equal
// with the first. Meant for the thread sanitizer too, hence the plain GEMM loops. MOXIE_TEST_PASSES
// sets the number of passes of each scene.
#include <gtest/gtest.h>

#include <algorithm>

#include "moxie/pipeline/tiles.h"
#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

struct Scene {
  std::string name;
  std::int64_t ranks, experts, top_k;
  std::vector<std::int64_t> tokens;
  Routing routing;
  bool shared;
  Plan plan;
  std::int32_t longest_delay_us = 100;
};

Plan tight(Plan plan, const Problem& p) {
  plan.chunk_blocks = std::max(plan.chunk_blocks, 1);
  plan.lag_chunks = std::max(plan.lag_chunks, 1);
  const std::int64_t blocks = pipeline::worst_case_blocks(p);
  const std::int64_t all =
      blocks + (p.shared.intermediate > 0 ? pipeline::num_blocks(p.max_tokens) : 0);
  plan.x_ring_blocks =
      std::min(blocks, pipeline::min_x_ring_blocks(plan.band_blocks, plan.minibatch_blocks));
  plan.hidden_ring_blocks = std::min(
      blocks,
      pipeline::min_hidden_ring_blocks(plan.order, plan.band_blocks, plan.lag_bands, blocks));
  plan.backward_ring_blocks =
      std::min(all, pipeline::min_backward_ring_blocks(plan.chunk_blocks, plan.lag_chunks,
                                                       plan.minibatch_blocks));
  return plan;
}

Plan lag_plan(std::int32_t band, std::int32_t minibatch, std::int32_t comm, std::int32_t compute) {
  return {.order = TaskOrder::lag,
          .num_slabs = 1,
          .band_blocks = band,
          .lag_bands = 1,
          .minibatch_blocks = minibatch,
          .chunk_blocks = 1,
          .lag_chunks = 1,
          .comm_workers = comm,
          .compute_workers = compute};
}

std::vector<Scene> scenes() {
  Plan slabs{
      .num_slabs = 1, .band_blocks = 1, .chunk_blocks = 1, .comm_workers = 1, .compute_workers = 2};
  Plan push = lag_plan(1, 1, 2, 2), push_combine = lag_plan(1, 2, 2, 1);
  push.dispatch = push_combine.dispatch = DispatchMode::push;
  push_combine.combine = CombineMode::comm_workers;
  push_combine.save = SavePolicy::z_and_x;
  Plan split{.mode = ExecMode::split, .comm_workers = 2, .compute_workers = 2};
  return {
      {"lag_2ranks", 2, 8, 2, {40, 13}, Routing::zipf, true, lag_plan(1, 1, 2, 2)},
      {"lag_3ranks", 3, 10, 3, {17, 0, 40}, Routing::masked, false, lag_plan(2, 2, 1, 2)},
      {"lag_4ranks", 4, 9, 2, {3, 40, 0, 21}, Routing::uniform, false, lag_plan(1, 2, 1, 1)},
      {"slabs_2ranks", 2, 8, 2, {25, 40}, Routing::duplicates, false, slabs},
      {"slabs_4ranks", 4, 3, 1, {9, 9, 9, 9}, Routing::one_expert, true, slabs},
      // Several chunks of one expert: their weight gradients must be added in order, also when a
      // worker sleeps for longer than a tile takes.
      {"hot_4ranks",
       4,
       4,
       2,
       {40, 31, 40, 40},
       Routing::one_expert,
       false,
       lag_plan(1, 1, 1, 3),
       1000},
      {"split_3ranks", 3, 6, 2, {20, 31, 0}, Routing::uniform, true, split},
      // Home ranks write into the rings and counters of their peers; the rings have one slot or
      // two.
      {"push_4ranks", 4, 5, 2, {40, 31, 0, 40}, Routing::zipf, true, push},
      {"push_combine_3ranks", 3, 7, 2, {40, 1, 33}, Routing::duplicates, false, push_combine},
  };
}

class Protocol : public ::testing::TestWithParam<Scene> {};
INSTANTIATE_TEST_SUITE_P(Scenes, Protocol, ::testing::ValuesIn(scenes()),
                         [](const auto& s) { return s.param.name; });

TEST_P(Protocol, ShuffledPassesGiveTheSameBits) {
  const Scene& s = GetParam();
  Problem p = small_problem(s.ranks, s.experts, s.top_k);
  p.max_tokens = 40;
  if (s.shared) p.shared = {.intermediate = 64, .output_gate = true};
  const LayerCase c({p, s.tokens, s.routing}, test_seed());
  WorldOptions options = world_options(s.ranks);
  options.gemm = HostGemm::plain;
  options.timeout_s = 120;
  World world = make_world(options);
  Layer layer(world, p, s.plan.mode == ExecMode::split ? s.plan : tight(s.plan, p));

  const PassOutputs want = run_pass(layer, c);
  expect_close(c, reference_of(c), want);
  PassOutputs got(c);
  Context context = layer.make_context();
  const auto inputs = c.forward_inputs();
  const auto grad_inputs = c.backward_inputs();
  const std::int64_t passes = num_passes(50);
  const std::int32_t delays[] = {0, 5, 50, s.longest_delay_us};
  for (std::int64_t pass = 0; pass < passes; ++pass) {
    FaultInjection faults;
    faults.shuffle_seed = test_seed() + static_cast<std::uint64_t>(pass) + 1;
    faults.max_delay_us = delays[pass % 4];
    faults.poison_workspace = pass % 8 == 0;
    world.set_faults(faults);
    layer.forward(inputs, got.forward(), context);
    layer.backward(context, grad_inputs, got.backward());
    ASSERT_TRUE(same_bits(want, got)) << "pass " << pass << ", " << to_string(layer.plan());
    for (RankOutputs& rank : got.ranks) rank.y.poison(), rank.dx.poison();
  }
}

// Passes back to back: no rank waits for another between them, and each overwrites its inputs the
// moment it leaves a pass. One rank is late in all of them, so the others are a pass ahead of it
// all the time. That is the proof of docs/protocol.md that leaving needs no barrier, put to the
// test.
void run_back_to_back(Plan plan) {
  const Problem p = small_problem(4, 9, 2);
  const LayerCase c({p, {3, 40, 0, 21}, Routing::uniform}, test_seed());
  WorldOptions options = world_options(4);
  options.gemm = HostGemm::plain;
  World world = make_world(options);
  Layer layer(world, p, tight(plan, p));
  const PassOutputs want = run_pass(layer, c);
  for (std::int32_t late = 0; late < 4; ++late) {
    FaultInjection faults;
    faults.poison_workspace = true;
    faults.shuffle_seed = test_seed() + static_cast<std::uint64_t>(late);
    faults.max_delay_us = 100;
    faults.late_rank = late;
    faults.late_ms = 1;
    faults.back_to_back = static_cast<std::int32_t>(num_passes(50));
    world.set_faults(faults);
    ASSERT_TRUE(same_bits(want, run_pass(layer, c))) << "rank " << late << " late";
  }
}
TEST(ProtocolBackToBack, RanksMayBeAPassAhead) { run_back_to_back(lag_plan(1, 1, 2, 2)); }
TEST(ProtocolBackToBack, RanksMayBeAPassAheadAndPush) {
  Plan plan = lag_plan(1, 1, 2, 2);
  plan.dispatch = DispatchMode::push;
  plan.combine = CombineMode::comm_workers;
  run_back_to_back(plan);
}

// Two layers take turns on one heap with different shapes: a rank that is early in one must not
// disturb a rank that is late in the other.
TEST(ProtocolTurns, TwoLayersAlternateUnderShuffles) {
  const Problem pa = small_problem(3, 7, 2), pb = small_problem(3, 4, 1, 128, 64, DType::bf16);
  const LayerCase a({pa, {20, 0, 31}, Routing::zipf}, test_seed());
  const LayerCase b({pb, {1, 40, 0}, Routing::uniform}, test_seed());
  WorldOptions options = world_options(3);
  options.gemm = HostGemm::plain;
  World world = make_world(options);
  Layer layer_a(world, pa, tight(lag_plan(1, 1, 1, 2), pa));
  Layer layer_b(world, pb, tight(lag_plan(2, 1, 2, 1), pb));
  const PassOutputs want_a = run_pass(layer_a, a), want_b = run_pass(layer_b, b);
  for (std::int64_t pass = 0; pass < num_passes(50) / 2; ++pass) {
    FaultInjection faults;
    faults.shuffle_seed = test_seed() + 1000 + static_cast<std::uint64_t>(pass);
    world.set_faults(faults);
    PassOutputs got_a(a), got_b(b);
    const Context context_a = layer_a.forward(a.forward_inputs(), got_a.forward());
    const Context context_b = layer_b.forward(b.forward_inputs(), got_b.forward());
    layer_a.backward(context_a, a.backward_inputs(), got_a.backward());
    layer_b.backward(context_b, b.backward_inputs(), got_b.backward());
    ASSERT_TRUE(same_bits(want_a, got_a)) << "pass " << pass;
    ASSERT_TRUE(same_bits(want_b, got_b)) << "pass " << pass;
  }
}

}  // namespace
}  // namespace moxie::test
