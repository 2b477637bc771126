// The timeline of a CUDA pass: every task and every row once, nothing at the same time in one lane.
#include <map>
#include <set>

#include "moxie/pipeline/tiles.h"
#include "tests/gpu/device_case.h"

namespace moxie::test {
namespace {

using trace::Event;
using trace::Kind;

void expect_whole_timeline(const LayerCase& c, const std::vector<int>& devices, const Plan& plan,
                           std::int32_t cluster_size) {
  const auto num_ranks = static_cast<std::int64_t>(devices.size());
  DeviceCase on_device(c, devices);
  World world = World::cuda(cuda_options(num_ranks), {devices, 0, cluster_size});
  Layer layer(world, c.problem(), plan);
  const PassOutputs want = on_device.run(world, layer);
  for (int pass = 0; pass < 2; ++pass) {
    on_device.poison_outputs();
    trace::Trace trace;
    layer.infer(on_device.inputs(), on_device.outputs(), &trace);
    EXPECT_TRUE(same_bits(want, on_device.download()));  // tracing changes nothing
    EXPECT_EQ(trace.num_ranks, num_ranks);
    EXPECT_EQ(trace.title.find("lost"), std::string::npos) << trace.title;
    std::vector<std::int64_t> fc1(static_cast<std::size_t>(num_ranks)), fc2(fc1);
    std::set<std::tuple<std::int32_t, Kind, std::int32_t, std::int32_t>> tasks;
    const Event* before = nullptr;
    for (const Event& event : trace.events) {
      ASSERT_LE(event.begin_ns, event.end_ns);
      ASSERT_GE(event.begin_ns, 0);
      if (event.kind == Kind::fc1 || event.kind == Kind::fc2) {
        EXPECT_TRUE(tasks.emplace(event.rank, event.kind, event.block, event.tile).second)
            << "twice: " << name(event.kind) << " block " << event.block << " tile " << event.tile;
        (event.kind == Kind::fc1 ? fc1 : fc2)[static_cast<std::size_t>(event.rank)]++;
      }
      const bool same_lane = before != nullptr && before->rank == event.rank &&
                             before->role == event.role && before->worker == event.worker;
      if (same_lane && event.role == Role::compute)
        EXPECT_LE(before->end_ns, event.begin_ns) << name(before->kind) << ", " << name(event.kind);
      before = &event;
    }
    const Problem& p = c.problem();
    std::int64_t all_fc1 = 0;
    for (std::size_t r = 0; r < fc1.size(); ++r) {
      // As many blocks by FC1 as by FC2.
      EXPECT_EQ(fc1[r] * pipeline::num_fc2_tiles(p.hidden),
                fc2[r] * pipeline::num_fc1_tiles(p.intermediate));
      all_fc1 += fc1[r];
    }
    EXPECT_GT(all_fc1, 0);
  }
}

LayerCase some_case(std::int64_t num_ranks) {
  CaseSpec spec;
  spec.problem = small_problem(num_ranks, 9, 3, 512, 256, DType::bf16);
  spec.tokens.assign(static_cast<std::size_t>(num_ranks), 150);
  spec.problem.max_tokens = 150;
  return LayerCase(spec, test_seed());
}

TEST(CudaTrace, every_task_once) {
  MOXIE_NEEDS_GPU();
  const LayerCase c = some_case(3);
  expect_whole_timeline(c, {0, 0, 0}, {}, 1);
  expect_whole_timeline(c, {0, 0, 0}, {}, 2);
  Plan plan;
  plan.mode = ExecMode::split;
  expect_whole_timeline(c, {0, 0, 0}, plan, 1);
  plan = {};
  plan.comm_workers = 2;
  expect_whole_timeline(c, {0, 0, 0}, plan, 2);
}

TEST(CudaTrace, two_gpus) {
  MOXIE_NEEDS_TWO_GPUS();
  expect_whole_timeline(some_case(2), {0, 1}, {}, 2);
}

}  // namespace
}  // namespace moxie::test
