// Late and lost ranks on GPUs: who says what, how soon, and that the GPUs are usable afterwards.
#include <chrono>

#include "tests/gpu/device_case.h"
#include "tests/gpu/lost_rank.h"
#include "tests/support/expect_error.h"

namespace moxie::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

LayerCase small_case(std::int64_t num_ranks) {
  CaseSpec spec;
  spec.problem = small_problem(num_ranks, 6, 2, 256, 192, DType::bf16);
  for (std::int64_t r = 0; r < num_ranks; ++r) spec.tokens.push_back(40 + 10 * r);
  spec.problem.max_tokens = spec.tokens.back();
  return LayerCase(spec, test_seed());
}

// A rank that never comes: reported by every other one within the timeout and two seconds.
void expect_loss_reported(const std::vector<int>& devices, std::int64_t lost) {
  const auto num_ranks = static_cast<std::int64_t>(devices.size());
  const LayerCase c = small_case(num_ranks);
  DeviceCase on_device(c, devices);
  WorldOptions options = cuda_options(num_ranks);
  options.timeout_s = 1;
  World world = World::cuda(options, {devices});
  Layer layer(world, c.problem());
  const PassOutputs want = on_device.run(world, layer);
  options.faults.kill_rank = static_cast<std::int32_t>(lost);
  world.set_faults(options.faults);
  const Clock::time_point begin = Clock::now();
  try {
    on_device.run(world, layer);
    ADD_FAILURE() << "no Error";
  } catch (const Error& error) {
    expect_lost_rank_named(error, num_ranks, lost);
  }
  EXPECT_LT(seconds_since(begin), 3.0);
  expect_error(ErrorCode::world_stopped, {"reset"}, [&] { on_device.run(world, layer); });
  options.faults.kill_rank = -1;
  world.set_faults(options.faults);
  world.reset();
  EXPECT_TRUE(same_bits(want, on_device.run(world, layer)));
}

TEST(CudaFaults, every_rank_reports_a_lost_one) {
  MOXIE_NEEDS_GPU();
  expect_loss_reported({0, 0, 0}, 2);
  expect_loss_reported({0, 0, 0, 0}, 0);
}

TEST(CudaFaults, two_gpus_report_a_lost_rank) {
  MOXIE_NEEDS_TWO_GPUS();
  expect_loss_reported({0, 1}, 1);
  expect_loss_reported({0, 1}, 0);
}

// 20 s are promised: MOXIE_TEST_LATE_MS=20000.
TEST(CudaFaults, two_gpus_wait_for_a_late_rank) {
  MOXIE_NEEDS_TWO_GPUS();
  const LayerCase c = small_case(2);
  DeviceCase on_device(c, {0, 1});
  WorldOptions options = cuda_options(2);
  options.timeout_s = 60;
  World world = World::cuda(options, {{0, 1}});
  Layer layer(world, c.problem());
  const PassOutputs want = on_device.run(world, layer);
  options.faults.late_rank = 1;
  options.faults.late_ms = late_ms(1000);
  world.set_faults(options.faults);
  const Clock::time_point begin = Clock::now();
  EXPECT_TRUE(same_bits(want, on_device.run(world, layer)));
  EXPECT_GE(seconds_since(begin), options.faults.late_ms / 1000.0);
}

}  // namespace
}  // namespace moxie::test
