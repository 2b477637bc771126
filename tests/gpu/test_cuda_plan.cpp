// The plan of a layer on a GPU that is given none: the machine describes itself, a stored plan is
// found and gives the same bits, and a plan that the GPU refuses is no reason to fail.
#include <stdlib.h>

#include <filesystem>

#include "moxie/planner/plan_cache.h"
#include "tests/gpu/device_case.h"

namespace moxie::test {
namespace {

namespace fs = std::filesystem;

TEST(CudaPlan, comes_from_the_cache_when_there_is_an_entry) {
  MOXIE_NEEDS_GPU();
  std::string name = (fs::temp_directory_path() / "moxie_gpu_plans_XXXXXX").string();
  const fs::path folder = ::mkdtemp(name.data());
  WorldOptions options = cuda_options(2);
  options.plan_cache = (folder / "plans.json").string();
  CaseSpec spec;
  spec.problem = small_problem(2, 6, 2, 256, 192, DType::bf16);
  spec.problem.max_tokens = 150;
  spec.tokens = {150, 33};
  const LayerCase c(spec, test_seed());
  World world = World::cuda(options, on_gpu_0(2));
  const MachineId machine = world.machine();
  EXPECT_EQ(machine.backend, "cuda");
  EXPECT_FALSE(machine.device.empty());
  EXPECT_GT(machine.num_sms, 0);
  EXPECT_EQ(machine.ranks_of_devices, std::vector<std::int64_t>{2});
  EXPECT_NE(machine.driver.find('.'), std::string::npos);
  EXPECT_NE(machine.runtime.find('.'), std::string::npos);

  const planner::PlanKey key{c.problem(), machine, planner::Passes::forward};
  const auto expect_plan = [&](PlanOrigin origin, const Plan& plan) {
    const Layer layer(world, c.problem());
    EXPECT_EQ(layer.plan_source().origin, origin) << layer.plan_source().words;
    EXPECT_EQ(layer.plan(), pipeline::resolve(c.problem(), plan));
  };
  expect_plan(PlanOrigin::standard, {});
  const Plan lag{.order = TaskOrder::lag, .comm_workers = 4};
  planner::store_plan(options.plan_cache, key, lag, {});
  expect_plan(PlanOrigin::cache, lag);
  // More communication CTAs than the GPU has SMs: legal in general, refused here.
  planner::store_plan(options.plan_cache, key, {.comm_workers = 1024}, {});
  expect_plan(PlanOrigin::standard, {});
  std::error_code ignored;
  fs::remove_all(folder, ignored);
}

}  // namespace
}  // namespace moxie::test
