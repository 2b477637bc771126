// Late and lost workers: a late one is waited for, a lost one is reported by every rank within the
// timeout plus one second, and a reset makes the world as good as new.
#include <gtest/gtest.h>

#include <chrono>
#include <set>

#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(LayerFaults, ALateRankIsWaitedFor) {
  const Problem p = small_problem(3, 6, 2);
  const LayerCase c({p, {10, 20, 30}}, test_seed());
  const PassOutputs want = run_alone(c);
  WorldOptions options = world_options(3);
  options.timeout_s = 30;
  options.faults.late_rank = 1;
  options.faults.late_ms = 300;
  World world = make_world(options);
  Layer layer(world, p);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(same_bits(want, run_pass(layer, c)));
  EXPECT_GT(seconds_since(begin), 0.55) << "the delay was not injected";
  EXPECT_FALSE(world.stopped());
}

TEST(LayerFaults, ARankThatComesAfterTheTimeoutIsToldAtOnce) {
  // Its peers gave up at 0.4 s. It arrives at 0.7 s and must not begin a wait of its own.
  const Problem p = small_problem(3, 6, 2);
  const LayerCase c({p, {10, 20, 30}}, test_seed());
  WorldOptions options = world_options(3);
  options.timeout_s = 0.4;
  options.faults.late_rank = 1;
  options.faults.late_ms = 700;
  World world = make_world(options);
  Layer layer(world, p);
  PassOutputs out(c);
  try {
    layer.forward(c.forward_inputs(), out.forward());
    FAIL() << "no rank gave up";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
    ASSERT_EQ(error.waits().size(), 3u) << error.what();
    for (const WaitRecord& wait : error.waits()) {
      const bool told = wait.told_by == 0 || wait.told_by == 2;
      EXPECT_TRUE(wait.rank != 1 || told) << to_string(wait);
    }
  }
}

struct LostWorker {
  std::string name;
  Role role;
  std::int32_t rank, worker, after_steps;
  bool backward;
  ExecMode mode = ExecMode::fused;
  DispatchMode dispatch = DispatchMode::pull;
  CombineMode combine = CombineMode::epilogue;
};
class LayerLostWorker : public ::testing::TestWithParam<LostWorker> {};

TEST_P(LayerLostWorker, EveryRankReportsInTime) {
  const LostWorker& lost = GetParam();
  constexpr double kTimeout = 0.4;
  const std::int64_t ranks = 3;
  Problem p = small_problem(ranks, 6, 2);
  const LayerCase c({p, {40, 33, 52}}, test_seed());
  Plan plan;
  plan.mode = lost.mode;
  plan.dispatch = lost.dispatch;
  plan.combine = lost.combine;
  if (lost.dispatch == DispatchMode::push && lost.mode == ExecMode::fused)
    plan.band_blocks = 1, plan.x_ring_blocks = 1;  // so that pushers wait for their peers' slots
  WorldOptions options = world_options(ranks);
  World world = make_world(options);
  Layer layer(world, p, plan);
  const PassOutputs want = run_pass(layer, c);

  PassOutputs out(c);
  FaultInjection faults;
  faults.kill_rank = lost.rank;
  faults.kill_role = lost.role;
  faults.kill_worker = lost.worker;
  faults.kill_after_steps = lost.after_steps;
  const Context context = layer.forward(c.forward_inputs(), out.forward());
  out = PassOutputs(c);
  world.set_timeout(kTimeout);
  world.set_faults(faults);
  const auto begin = std::chrono::steady_clock::now();
  try {
    if (lost.backward) {
      layer.backward(context, c.backward_inputs(), out.backward());
    } else {
      layer.forward(c.forward_inputs(), out.forward());
    }
    FAIL() << "a lost worker went unnoticed";
  } catch (const Error& error) {
    EXPECT_LT(seconds_since(begin), kTimeout + 1.0);
    EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
    std::set<std::int32_t> reported;
    bool own_clock = false;
    for (const WaitRecord& wait : error.waits()) {
      reported.insert(wait.rank);
      own_clock |= wait.told_by < 0;
      EXPECT_GE(wait.worker, 0) << to_string(wait);
      EXPECT_GT(wait.epoch, 0u) << to_string(wait);
      EXPECT_LT(wait.seen, wait.wanted) << to_string(wait);
      EXPECT_FALSE(to_string(wait).empty());
    }
    EXPECT_EQ(reported, (std::set<std::int32_t>{0, 1, 2})) << error.what();
    EXPECT_TRUE(own_clock) << "nobody's own clock ran out: " << error.what();
  }
  // The world refuses until it is reset; afterwards it is as good as new.
  EXPECT_TRUE(world.stopped());
  world.set_faults({});
  expect_error(ErrorCode::world_stopped, {"reset"}, [&] { run_pass(layer, c); });
  world.reset();
  world.set_timeout(60);
  EXPECT_FALSE(world.stopped());
  EXPECT_TRUE(same_bits(want, run_pass(layer, c)));
  PassOutputs again(c);
  layer.forward(c.forward_inputs(), again.forward());
  layer.backward(context, c.backward_inputs(), again.backward());  // a context from before
  EXPECT_TRUE(same_bits(want, again));
}
INSTANTIATE_TEST_SUITE_P(
    Workers, LayerLostWorker,
    ::testing::Values(LostWorker{"comm_at_once", Role::comm, 0, 0, 0, false},
                      LostWorker{"comm_later", Role::comm, 1, 0, 4, false},
                      LostWorker{"compute_at_once", Role::compute, 2, 0, 0, false},
                      LostWorker{"compute_later", Role::compute, 1, 0, 3, false},
                      LostWorker{"comm_in_backward", Role::comm, 2, 0, 2, true},
                      LostWorker{"compute_in_backward", Role::compute, 0, 0, 2, true},
                      LostWorker{"comm_in_split", Role::comm, 1, 0, 1, false, ExecMode::split},
                      LostWorker{"compute_in_split", Role::compute, 1, 0, 1, true, ExecMode::split},
                      // Before it pushes; with rows pushed; when it should carry rows home.
                      LostWorker{"pusher", Role::comm, 1, 0, 9, false, ExecMode::fused,
                                 DispatchMode::push},
                      LostWorker{"pusher_later", Role::comm, 2, 0, 22, false, ExecMode::fused,
                                 DispatchMode::push, CombineMode::comm_workers},
                      LostWorker{"carrier", Role::comm, 0, 0, 40, false, ExecMode::fused,
                                 DispatchMode::pull, CombineMode::comm_workers},
                      LostWorker{"compute_with_carrier", Role::compute, 1, 0, 5, false,
                                 ExecMode::fused, DispatchMode::push, CombineMode::comm_workers},
                      LostWorker{"carrier_in_split", Role::comm, 1, 0, 30, false, ExecMode::split,
                                 DispatchMode::push, CombineMode::comm_workers}),
    [](const auto& w) { return w.param.name; });

}  // namespace
}  // namespace moxie::test
