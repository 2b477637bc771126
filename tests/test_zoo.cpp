// The failure zoo: what broke in kernels of this kind, on the input that shows it. Here: state that
// outlives a pass, overflow, bad routes, NaN. Lost workers are in test_layer_faults, rows about
// shapes and arithmetic in test_layer_*.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>

#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

// --- state that outlives a pass ---

TEST(ZooCounts, ChangeAtEveryStep) {
  Problem p = small_problem(4, 9, 2);
  p.max_tokens = 140;
  p.shared = {.intermediate = 64, .output_gate = true};
  World world = make_world(world_options(4));
  Layer layer(world, p);
  Context context = layer.make_context();
  std::mt19937_64 rng(test_seed());
  std::vector<std::vector<std::int64_t>> steps = {
      {140, 140, 140, 140}, {7, 64, 33, 128}, {1, 0, 0, 0},     {0, 0, 0, 0},
      {64, 8, 0, 1},        {0, 0, 0, 0},     {140, 0, 140, 0}, {5, 5, 5, 5}};
  for (int i = 0; i < 30; ++i) {
    std::vector<std::int64_t> tokens;
    for (int r = 0; r < 4; ++r) {
      const auto most = static_cast<std::uint64_t>(i % 3 == 0 ? 141 : 12);
      tokens.push_back(static_cast<std::int64_t>(rng() % most));
    }
    steps.push_back(tokens);
  }
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Routing routing = static_cast<Routing>(rng() % 5);
    const LayerCase c({p, steps[i], routing}, test_seed() + i);
    PassOutputs out(c);
    layer.forward(c.forward_inputs(), out.forward(), context);
    layer.backward(context, c.backward_inputs(), out.backward());
    SCOPED_TRACE(::testing::Message() << "step " << i);
    expect_close(c, reference_of(c), out);
    if (HasFailure()) return;
  }
}

TEST(ZooCounts, LargeThenOneToken) {
  Problem p = small_problem(2, 8, 2);
  p.max_tokens = 4095;
  World world = make_world(world_options(2));
  Layer layer(world, p);
  const LayerCase large({p, {4095, 4095}, Routing::zipf}, test_seed());
  const LayerCase small({p, {4095, 1}, Routing::zipf}, test_seed() + 1);
  const PassOutputs first = run_pass(layer, large);
  expect_close(large, reference_of(large), first);
  const PassOutputs second = run_pass(layer, small);
  expect_close(small, reference_of(small), second);
}

TEST(ZooCounts, CapacityDoesNotChangeTheBits) {
  // The same live tokens with T_max = 32 and 200,000: offsets of the second exceed 32 bits of rows
  // times bytes.
  Plan plan;
  plan.order = TaskOrder::lag;
  plan.band_blocks = plan.lag_bands = plan.chunk_blocks = plan.lag_chunks = 1;
  plan.x_ring_blocks = 1, plan.hidden_ring_blocks = plan.backward_ring_blocks = 2;
  plan.save = SavePolicy::none;
  Problem p = small_problem(2, 4, 1, 64, 64, DType::bf16);
  WorldOptions options = world_options(2);
  options.faults.poison_workspace = false;  // the large heap would take longer to fill than to use
  std::vector<PassOutputs> outs;
  for (std::int64_t max_tokens : {32, 200000}) {
    p.max_tokens = max_tokens;
    const LayerCase c({p, {32, 27}}, test_seed());
    World world = make_world(options);
    Layer layer(world, p, plan);
    outs.push_back(run_pass(layer, c));
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
}

// 5,000 passes in which no rank waits for another between two of them, random delays in all of
// them.
TEST(ZooEpochs, FiveThousandPassesBackToBack) {
  const Problem p = small_problem(4, 8, 1);
  const LayerCase c({p, {2, 3, 0, 1}, Routing::uniform}, test_seed());
  WorldOptions options = world_options(4);
  options.gemm = HostGemm::plain;
  World world = make_world(options);
  Layer layer(world, p);
  const PassOutputs want = run_pass(layer, c);
  FaultInjection faults;
  faults.poison_workspace = true;
  faults.shuffle_seed = test_seed() + 1;
  faults.max_delay_us = 50;
  faults.back_to_back = static_cast<std::int32_t>(num_passes(5000));
  world.set_faults(faults);
  PassOutputs got(c);
  Context context = layer.make_context();
  layer.forward(c.forward_inputs(), got.forward(), context);
  for (std::size_t r = 0; r < 4; ++r) EXPECT_TRUE(same_bits("y", want.ranks[r].y, got.ranks[r].y));
}

TEST(ZooEpochs, ALaggingRankIsNotLapped) {
  // Two inputs in turn, one rank always late: a flag left over from the pass before would let a
  // peer read old rows.
  const Problem p = small_problem(4, 8, 2);
  const LayerCase a({p, {9, 9, 9, 9}}, test_seed()), b({p, {9, 9, 9, 9}}, test_seed() + 1);
  World world = make_world(world_options(4));
  Layer layer(world, p);
  const PassOutputs want_a = run_pass(layer, a), want_b = run_pass(layer, b);
  std::mt19937_64 rng(test_seed());
  for (int pass = 0; pass < 120; ++pass) {
    FaultInjection faults;
    faults.late_rank = static_cast<std::int32_t>(rng() % 4);
    faults.late_ms = static_cast<std::int32_t>(rng() % 4);
    world.set_faults(faults);
    const bool first = rng() % 2 == 0;
    ASSERT_TRUE(same_bits(first ? want_a : want_b, run_pass(layer, first ? a : b)))
        << "pass " << pass;
  }
}

// --- overflow and bad routes: found before data moves ---

class ZooCapacity : public ::testing::TestWithParam<ExecMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, ZooCapacity, ::testing::Values(ExecMode::fused, ExecMode::split),
                         [](const auto& m) { return name(m.param); });

TEST_P(ZooCapacity, ExceededIsAnErrorOnEveryRankAndTheNextPassWorks) {
  Problem p = small_problem(4, 4, 1);
  p.max_tokens = 256;
  p.shared.intermediate = 64;
  Plan plan;
  plan.mode = GetParam();
  plan.capacity_rows = 128;
  World world = make_world(world_options(4));
  Layer layer(world, p, plan);
  const LayerCase too_many({p, {256, 256, 256, 256}, Routing::one_expert}, test_seed());
  const LayerCase one_over({p, {100, 0, 0, 29}, Routing::one_expert}, test_seed());
  const LayerCase fits({p, {100, 0, 0, 28}, Routing::one_expert}, test_seed());
  const PassOutputs want = run_alone(fits);
  for (int round = 0; round < 2; ++round) {
    for (const LayerCase* c : {&too_many, &one_over}) {
      PassOutputs out(*c);
      expect_error(ErrorCode::capacity_exceeded, {"rank 3", "128"},
                   [&] { layer.forward(c->forward_inputs(), out.forward()); });
      EXPECT_TRUE(out.forward_untouched());
      EXPECT_FALSE(world.stopped());
    }
    EXPECT_TRUE(same_bits(want, run_pass(layer, fits)));
  }
}

TEST_P(ZooCapacity, AContextSurvivesAFailedForward) {
  Problem p = small_problem(2, 2, 1);
  p.max_tokens = 256;
  Plan plan;
  plan.mode = GetParam();
  plan.capacity_rows = 128;
  World world = make_world(world_options(2));
  Layer layer(world, p, plan);
  const LayerCase fits({p, {50, 60}}, test_seed());
  const LayerCase too_many({p, {256, 256}, Routing::one_expert}, test_seed());
  PassOutputs out(fits), spoilt(too_many);
  const Context context = layer.forward(fits.forward_inputs(), out.forward());
  expect_error(ErrorCode::capacity_exceeded, {"rank 1"},
               [&] { layer.forward(too_many.forward_inputs(), spoilt.forward()); });
  layer.backward(context, fits.backward_inputs(), out.backward());
  EXPECT_TRUE(same_bits(run_alone(fits), out));
}

class ZooRoutes : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ids, ZooRoutes, ::testing::Values(9, 4711, -2, 2147483647, -2147483648));

TEST_P(ZooRoutes, AnInvalidIdIsNamedAndTheNextPassWorks) {
  for (ExecMode mode : {ExecMode::fused, ExecMode::split}) {
    for (DType id_dtype : {DType::i32, DType::i64}) {
      CaseSpec spec{small_problem(3, 9, 3), {20, 14, 0}};
      spec.id_dtype = id_dtype;
      LayerCase c(spec, test_seed());
      Plan plan;
      plan.mode = mode;
      World world = make_world(world_options(3));
      Layer layer(world, c.problem(), plan);
      const PassOutputs want = run_pass(layer, c);
      const std::int64_t good = std::exchange(c.expert_id(20 + 13, 2), GetParam());
      c.upload();
      PassOutputs out(c);
      expect_error(ErrorCode::invalid_route,
                   {"rank 1", "token 13", "slot 2", std::to_string(GetParam()), "8"},
                   [&] { layer.forward(c.forward_inputs(), out.forward()); });
      EXPECT_TRUE(out.forward_untouched());
      EXPECT_FALSE(world.stopped());
      c.expert_id(20 + 13, 2) = good;
      c.upload();
      EXPECT_TRUE(same_bits(want, run_pass(layer, c)));
    }
  }
}

TEST(ZooRoutesWide, AnIdThatWrapsIn32Bits) {
  LayerCase c({small_problem(2, 9, 3), {20, 14}}, test_seed());
  c.expert_id(1, 0) = (std::int64_t{1} << 32) + 3;  // the low half is a legal expert
  c.upload();
  World world = make_world(world_options(2));
  Layer layer(world, c.problem());
  PassOutputs out(c);
  expect_error(ErrorCode::invalid_route, {"rank 0", "token 1", "slot 0", "4294967299"},
               [&] { layer.forward(c.forward_inputs(), out.forward()); });
}

// --- numbers that are none ---

TEST(ZooNan, StaysInItsToken) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    CaseSpec spec{small_problem(3, 5, 2, 64, 128, dtype), {30, 41, 12}};
    spec.problem = with_all_parts(spec.problem, ActivationKind::gpt_oss);
    LayerCase c(spec, test_seed());
    World world = make_world(world_options(3));
    Layer layer(world, c.problem());
    PassOutputs clean(c), out(c);
    layer.infer(c.forward_inputs(), clean.forward());
    const std::size_t bad = 30 + 17;  // token 17 of rank 1
    c.tokens.x[bad * 64 + 5] = std::nan("");
    c.upload();
    layer.infer(c.forward_inputs(), out.forward());
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_TRUE(std::isnan(out.ranks[1].y.get(17 * 64 + i)));
      clean.ranks[1].y.set(17 * 64 + i, 0);
      out.ranks[1].y.set(17 * 64 + i, 0);
    }
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(same_bits("y", clean.ranks[r].y, out.ranks[r].y)) << "rank " << r;
    }
  }
}

}  // namespace
}  // namespace moxie::test
