// A plan changes time and memory, never a bit: every option from its minimum to its maximum, fused
// and split, quiet and shuffled, against one reference plan. One problem with many blocks: a hot
// expert of several, many experts of few rows.
#include <gtest/gtest.h>

#include "moxie/pipeline/tiles.h"
#include "tests/support/env.h"
#include "tests/support/judge.h"

namespace moxie::test {
namespace {

struct NamedPlan {
  std::string name;
  Plan plan;
};

Problem plan_problem(DType dtype) {
  Problem p =
      small_problem(2, 20, 3, 320, 192, dtype);  // 2 FC1 tiles, 2 FC2 tiles, both with tails
  p.max_tokens = 130;
  p.expert_bias = true;
  p.shared = {.intermediate = 64, .output_gate = true};
  return p;
}

// Rings of `extra` blocks above the minimum of the other options.
Plan with_rings(const Problem& problem, Plan plan, std::int64_t extra) {
  if (plan.chunk_blocks == 0) plan.chunk_blocks = 8;
  if (plan.lag_chunks == 0) plan.lag_chunks = 1;
  const std::int64_t blocks = pipeline::worst_case_blocks(problem);
  const std::int64_t shared_blocks = pipeline::num_blocks(problem.max_tokens);
  plan.x_ring_blocks = std::min(
      blocks, pipeline::min_x_ring_blocks(plan.band_blocks, plan.minibatch_blocks) + extra);
  plan.hidden_ring_blocks =
      std::min(blocks, extra + pipeline::min_hidden_ring_blocks(plan.order, plan.band_blocks,
                                                                plan.lag_bands, blocks));
  plan.backward_ring_blocks =
      std::min(blocks + shared_blocks,
               extra + pipeline::min_backward_ring_blocks(plan.chunk_blocks, plan.lag_chunks,
                                                          plan.minibatch_blocks));
  return plan;
}

Plan lag_plan(std::int32_t band, std::int32_t lag, std::int32_t minibatch) {
  Plan p;
  p.order = TaskOrder::lag;
  p.band_blocks = band;
  p.lag_bands = lag;
  p.minibatch_blocks = minibatch;
  p.num_slabs = 1;
  return p;
}

std::vector<NamedPlan> forward_plans(const Problem& problem) {
  std::vector<NamedPlan> plans;
  const auto add = [&](const std::string& label, const Plan& plan) {
    plans.push_back({label, plan});
  };
  for (std::int32_t slabs : {1, 2, 4, 16}) {
    Plan p;
    p.num_slabs = slabs;
    add("slabs" + std::to_string(slabs), p);
  }
  for (std::int32_t band : {1, 3, 64}) {
    for (std::int32_t minibatch : {1, 2, 5}) {
      Plan p;
      p.band_blocks = band, p.minibatch_blocks = minibatch;
      const std::string label =
          "band" + std::to_string(band) + "_minibatch" + std::to_string(minibatch);
      add(label, p);
      add(label + "_min_rings", with_rings(problem, p, 0));
    }
  }
  for (std::int32_t band : {1, 2, 5}) {
    for (std::int32_t lag : {1, 2, 3}) {
      const Plan p = lag_plan(band, lag, band == 2 ? 3 : 1);
      const std::string label = "lag" + std::to_string(lag) + "_band" + std::to_string(band);
      add(label, p);
      add(label + "_min_rings", with_rings(problem, p, 0));
      add(label + "_rings_plus1", with_rings(problem, p, 1));
    }
  }
  return plans;
}

std::vector<NamedPlan> backward_plans(const Problem& problem) {
  std::vector<NamedPlan> plans;
  for (std::int32_t chunk : {1, 2, 8}) {
    for (std::int32_t lag : {1, 2, 1000}) {
      for (std::int32_t minibatch : {1, 3}) {
        Plan p;
        p.chunk_blocks = chunk, p.lag_chunks = lag, p.minibatch_blocks = minibatch;
        const std::string label = "chunk" + std::to_string(chunk) + "_lag" + std::to_string(lag) +
                                  "_minibatch" + std::to_string(minibatch);
        if (lag < 1000) plans.push_back({label + "_min_ring", with_rings(problem, p, 0)});
        if (lag == 2) plans.push_back({label + "_ring_plus1", with_rings(problem, p, 1)});
        plans.push_back({label, p});
      }
    }
  }
  return plans;
}

std::vector<NamedPlan> worker_plans(const Problem& problem) {
  std::vector<NamedPlan> plans;
  for (std::int32_t comm : {1, 2, 3}) {
    for (std::int32_t compute : {1, 2, 3}) {
      for (bool tight : {false, true}) {
        Plan p = tight ? lag_plan(2, 1, 2) : Plan{};
        p.chunk_blocks = tight ? 1 : 8;
        if (tight) p = with_rings(problem, p, 0);
        p.comm_workers = comm, p.compute_workers = compute;
        plans.push_back({"comm" + std::to_string(comm) + "_compute" + std::to_string(compute) +
                             (tight ? "_min_rings" : ""),
                         p});
      }
    }
  }
  return plans;
}

std::vector<NamedPlan> split_plans() {
  std::vector<NamedPlan> plans;
  for (std::int32_t workers : {1, 3}) {
    for (SavePolicy save : {SavePolicy::none, SavePolicy::z, SavePolicy::z_and_x}) {
      Plan p;
      p.mode = ExecMode::split;
      p.comm_workers = p.compute_workers = workers;
      p.save = save;
      plans.push_back({"split_workers" + std::to_string(workers) + "_" + name(save), p});
    }
  }
  return plans;
}

// Push dispatch and combine by communication workers, alone and together, in every mode.
std::vector<NamedPlan> option_plans(const Problem& problem) {
  std::vector<NamedPlan> plans;
  const auto add = [&](const std::string& label, const Plan& base) {
    for (const auto dispatch : {DispatchMode::pull, DispatchMode::push})
      for (const auto combine : {CombineMode::epilogue, CombineMode::comm_workers}) {
        Plan p = base;
        p.dispatch = dispatch, p.combine = combine;
        plans.push_back({label + "_" + name(dispatch) + "_" + name(combine), p});
      }
  };
  for (std::int32_t comm : {0, 1, 3}) {
    const std::string workers = "_comm" + std::to_string(comm);
    for (std::int32_t slabs : {1, 2}) {
      Plan p;
      p.num_slabs = slabs, p.comm_workers = comm, p.compute_workers = 2;
      p.save = SavePolicy::z_and_x;
      add("slabs" + std::to_string(slabs) + workers, p);
      p.band_blocks = 1 + slabs, p.minibatch_blocks = 3;
      p.saved_rows = 256;
      add("slabs" + std::to_string(slabs) + workers + "_min_rings", with_rings(problem, p, 0));
    }
    for (std::int32_t band : {1, 2}) {
      Plan p = lag_plan(band, 1, 3 - band);
      p.num_slabs = band, p.comm_workers = comm;
      add("lag_band" + std::to_string(band) + workers, with_rings(problem, p, 0));
    }
    Plan split;
    split.mode = ExecMode::split;
    split.comm_workers = comm;
    add("split" + workers, split);
  }
  return plans;
}

class LayerPlans : public ::testing::TestWithParam<DType> {
 protected:
  LayerPlans()
      : layer_case({plan_problem(GetParam()), {75, 130}, Routing::zipf}, test_seed()),
        want(run_alone(layer_case)) {}
  const Problem& problem() const { return layer_case.problem(); }

  void expect_same(const std::vector<NamedPlan>& plans, std::uint64_t shuffle_seed = 0) {
    WorldOptions options = world_options(2);
    options.faults.shuffle_seed = shuffle_seed;
    options.faults.max_delay_us = 5;
    World world = make_world(options);
    for (const NamedPlan& p : plans) {
      Layer layer(world, problem(), p.plan);
      ASSERT_TRUE(same_bits(want, run_pass(layer, layer_case)))
          << p.name << ": " << to_string(layer.plan());
    }
  }
  LayerCase layer_case;
  PassOutputs want;
};
INSTANTIATE_TEST_SUITE_P(Types, LayerPlans, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& type) { return name(type.param); });

TEST_P(LayerPlans, ReferenceIsRight) { expect_close(layer_case, reference_of(layer_case), want); }
TEST_P(LayerPlans, ForwardOptions) { expect_same(forward_plans(problem())); }
TEST_P(LayerPlans, BackwardOptions) { expect_same(backward_plans(problem())); }
TEST_P(LayerPlans, Workers) { expect_same(worker_plans(problem())); }
TEST_P(LayerPlans, SplitMode) { expect_same(split_plans()); }
TEST_P(LayerPlans, DispatchAndCombine) { expect_same(option_plans(problem())); }
TEST_P(LayerPlans, Shuffled) {
  expect_same(worker_plans(problem()), test_seed() | 1);
  expect_same(option_plans(problem()), test_seed() | 1);
  expect_same(split_plans(), test_seed() | 1);
}
TEST_P(LayerPlans, CapacityThatJustSuffices) {
  // 128-row blocks per local expert, counted here with plain arithmetic.
  std::int64_t most = 0;
  for (std::int64_t r = 0; r < 2; ++r) {
    std::int64_t blocks = 0;
    for (std::int64_t e = layer_case.experts_of(r).begin; e < layer_case.experts_of(r).end; ++e) {
      blocks += (std::ranges::count(layer_case.tokens.expert_ids, e) + 127) / 128;
    }
    most = std::max(most, blocks);
  }
  Plan plan;
  plan.capacity_rows = most * 128;
  expect_same({{"exact_capacity", plan}});
  plan.capacity_rows -= 128;
  World world = make_world(world_options(2));
  Layer layer(world, problem(), plan);
  try {
    run_pass(layer, layer_case);
    ADD_FAILURE() << "one block less than needed was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::capacity_exceeded) << error.what();
  }
}

// The options on routings that leave ranks, experts and blocks empty or crowded, with experts that
// do not divide among the ranks, and with a capacity below the worst case, so that ranks must
// agree.
TEST_P(LayerPlans, DispatchAndCombineOnEdgeRoutings) {
  struct Edge {
    std::int64_t ranks, experts, top_k;
    std::vector<std::int64_t> tokens;
    Routing routing;
    bool shared;
  };
  const Edge edges[] = {
      {3, 7, 2, {130, 0, 77}, Routing::one_expert, true},
      {3, 10, 3, {17, 129, 1}, Routing::masked, true},
      {4, 3, 1, {0, 130, 0, 0}, Routing::zipf, false},
      {5, 5, 4, {1, 0, 64, 130, 7}, Routing::duplicates, true},
      {2, 4, 4, {0, 0}, Routing::uniform, true},
      {1, 6, 3, {130}, Routing::zipf, true},
  };
  for (const Edge& edge : edges) {
    Problem p = small_problem(edge.ranks, edge.experts, edge.top_k, 320, 64, GetParam());
    p.max_tokens = 130;
    if (edge.shared) p.shared = {.intermediate = 64, .output_gate = true};
    const LayerCase c({p, edge.tokens, edge.routing}, test_seed());
    const PassOutputs reference = run_alone(c);
    expect_close(c, reference_of(c), reference);
    World world = make_world(world_options(edge.ranks));
    for (const auto order : {TaskOrder::slabs, TaskOrder::lag})
      for (const auto combine : {CombineMode::epilogue, CombineMode::comm_workers}) {
        Plan plan = lag_plan(1, 1, 2);
        plan.order = order, plan.num_slabs = 2;
        plan.dispatch = DispatchMode::push, plan.combine = combine;
        plan = with_rings(p, plan, 0);
        // One block less than the worst case, where the routing needs far less.
        const bool must_agree = order == TaskOrder::lag && edge.routing != Routing::one_expert;
        const std::int64_t blocks = pipeline::worst_case_blocks(p) - (must_agree ? 1 : 0);
        plan.capacity_rows = blocks * 128;
        plan.x_ring_blocks = std::min(plan.x_ring_blocks, blocks);
        plan.hidden_ring_blocks = std::min(plan.hidden_ring_blocks, blocks);
        plan.backward_ring_blocks = 0;
        Layer layer(world, p, plan);
        ASSERT_TRUE(same_bits(reference, run_pass(layer, c)))
            << edge.ranks << " ranks, " << to_string(layer.plan());
      }
  }
}

TEST_P(LayerPlans, RepeatedPassesInOneLayer) {
  World world = make_world(world_options(2));
  Layer layer(world, problem(), with_rings(problem(), lag_plan(2, 1, 1), 0));
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(same_bits(want, run_pass(layer, layer_case))) << "pass " << i;
  }
}

}  // namespace
}  // namespace moxie::test
