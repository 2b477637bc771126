// The planner: its plans are legal for every preset, device and number of ranks, run on the CPU
// backend at reduced size, cost the memory it says, and are the fastest it simulated; bad requests
// are refused with a way out.
#include <gtest/gtest.h>

#include <algorithm>

#include "moxie/pipeline/cuda_layout.h"
#include "moxie/pipeline/layout.h"
#include "moxie/planner/choose.h"
#include "moxie/planner/explain.h"
#include "moxie/planner/knobs.h"
#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/pass_outputs.h"

namespace moxie::planner {
namespace {

using test::expect_error;

Problem preset_problem(const Preset& preset, std::int64_t ranks, std::int64_t tokens) {
  Problem p = problem_of(preset);
  p.num_ranks = ranks;
  p.max_tokens = tokens;
  return p;
}

// The same plan on a layer of a laptop's size: block counts that no longer fit are cut to it, as
// `resolve` would, everything else stays.
Plan reduced_plan(const Problem& small, Plan plan) {
  plan.capacity_rows = 0;
  plan.saved_rows = std::min<std::int64_t>(plan.saved_rows, 256);
  const std::int64_t x = plan.x_ring_blocks, hidden = plan.hidden_ring_blocks,
                     backward = plan.backward_ring_blocks;
  plan.x_ring_blocks = plan.hidden_ring_blocks = plan.backward_ring_blocks = 0;
  plan = pipeline::resolve(small, plan);
  const std::int64_t least = pipeline::min_x_ring_blocks(plan.band_blocks, plan.minibatch_blocks);
  plan.x_ring_blocks = std::min(std::max(x, least), plan.x_ring_blocks);
  if (plan.order == TaskOrder::lag)
    plan.hidden_ring_blocks = std::min(hidden, plan.hidden_ring_blocks);
  const std::int64_t least_backward =
      pipeline::min_backward_ring_blocks(plan.chunk_blocks, plan.lag_chunks, plan.minibatch_blocks);
  plan.backward_ring_blocks =
      std::min(std::max(backward, least_backward), plan.backward_ring_blocks);
  return plan;
}

class PlannerPresets : public ::testing::TestWithParam<std::tuple<const char*, std::int64_t>> {};

TEST_P(PlannerPresets, PlansAreLegalForEveryPresetAndRun) {
  const auto [device, ranks] = GetParam();
  const Machine m = machine(find_device(device));
  std::vector<Plan> distinct;
  std::int64_t refused = 0, planned = 0;
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(std::string(preset.name) + " R=" + std::to_string(ranks));
    PlanRequest request;
    request.problem = preset_problem(preset, ranks, 128);
    request.all_ranks = false;
    // Backward too where ranks hold few enough experts for a quick test.
    request.passes = ranks >= 8 ? Passes::both : Passes::forward;
    if (ranks > preset.num_experts) {
      ++refused;
      expect_error(ErrorCode::invalid_argument,
                   {"num_ranks is 72", "nearest legal value " + std::to_string(preset.num_experts)},
                   [&] { choose_plan(request, m); });
      continue;
    }
    const PlanChoice c = choose_plan(request, m);
    ++planned;
    for (const RatedPlan* plan : {&c.chosen, &c.alternatives.front()}) {
      EXPECT_NO_THROW(pipeline::check(request.problem, plan->plan));
      EXPECT_GT(plan->forward_ms, 0);
      EXPECT_EQ(plan->backward_ms > 0, ranks >= 8);
    }
    EXPECT_EQ(c.alternatives.size(), 5u);
    EXPECT_FALSE(c.why.empty());
    Plan run = c.chosen.plan;
    run.capacity_rows = run.saved_rows = run.hidden_ring_blocks = 0;
    if (std::find(distinct.begin(), distinct.end(), run) == distinct.end()) {
      distinct.push_back(run);
      Problem small = test::small_problem(2, 6, 2, 320, 192);
      small.max_tokens = 200;
      small.shared.intermediate = preset.shared.intermediate > 0 ? 64 : 0;
      test::CaseSpec spec{small, {200, 130}};
      const test::LayerCase layer_case(spec, 3);
      EXPECT_TRUE(test::same_bits(test::run_alone(layer_case, {}),
                                  test::run_alone(layer_case, reduced_plan(small, c.chosen.plan))));
    }
  }
  EXPECT_EQ(planned + refused, static_cast<std::int64_t>(presets().size()));
  EXPECT_EQ(refused, ranks == 72 ? 3 : 0);  // mixtral 8, llama-4-scout 16, moonlight 64 experts
}
INSTANTIATE_TEST_SUITE_P(Devices, PlannerPresets,
                         ::testing::Combine(::testing::Values("h100", "h200", "gb300"),
                                            ::testing::Values<std::int64_t>(1, 2, 4, 8, 72)),
                         [](const auto& one) {
                           return std::string(std::get<0>(one.param)) + "_" +
                                  std::to_string(std::get<1>(one.param));
                         });

TEST(PlannerChoose, SameRequestSameAnswer) {
  PlanRequest request;
  request.problem = preset_problem(find_preset("qwen3-30b-a3b"), 4, 1024);
  const Machine m = machine(find_device("h200"));
  const PlanChoice a = choose_plan(request, m), b = choose_plan(request, m);
  EXPECT_EQ(a.chosen.plan, b.chosen.plan);
  EXPECT_EQ(a.chosen.forward_ms, b.chosen.forward_ms);
  EXPECT_EQ(a.why, b.why);
}

TEST(PlannerChoose, NeverWorseThanTheDefaultPlanNorThanItsNeighbours) {
  for (const char* preset : {"moonlight-16b", "qwen3-30b-a3b"}) {
    for (const Passes passes : {Passes::forward, Passes::backward, Passes::both}) {
      SCOPED_TRACE(std::string(preset) + " " + name(passes));
      PlanRequest request;
      request.problem = preset_problem(find_preset(preset), 8, 512);
      request.passes = passes;
      request.memory_gb = 100;
      request.model_error = 0;
      const PlanChoice c = choose_plan(request, machine(find_device("h200")));
      EXPECT_LE(c.chosen.total_ms(), c.default_plan.total_ms() * 1.01);
      for (const RatedPlan& a : c.alternatives)
        EXPECT_GE(a.total_ms(), c.chosen.total_ms() * 0.99) << a.what;
      EXPECT_EQ(c.chosen.forward_ms > 0, passes != Passes::backward);
      EXPECT_EQ(c.chosen.backward_ms > 0, passes != Passes::forward);
    }
  }
}

// What is predicted to gain less than the model errs is not chosen, but shown and told.
TEST(PlannerChoose, KeepsTheDefaultPlanWithinTheModelsError) {
  PlanRequest request;
  request.problem = preset_problem(find_preset("qwen3-30b-a3b"), 2, 4096);
  request.passes = Passes::forward;
  const Machine m = machine(find_device("h200"));
  const PlanChoice kept = choose_plan(request, m);
  EXPECT_EQ(kept.chosen.plan, kept.default_plan.plan);
  EXPECT_TRUE(std::any_of(kept.notes.begin(), kept.notes.end(), [](const std::string& note) {
    return note.starts_with("the default plan is kept");
  }));
  request.model_error = 0;
  const PlanChoice sure = choose_plan(request, m);
  EXPECT_LT(sure.chosen.forward_ms, kept.chosen.forward_ms);
  EXPECT_GT(sure.chosen.forward_ms, kept.chosen.forward_ms * (1 - kModelError));
  request.memory_gb = kept.chosen.memory_gb * 0.7;  // the default plan does not fit
  request.model_error = kModelError;
  EXPECT_LE(choose_plan(request, m).chosen.memory_gb, request.memory_gb);
}

// All bounds are of the busiest rank, so only a simulation of all ranks can be held to them.
TEST(PlannerChoose, NothingIsFasterThanItsBounds) {
  for (const char* preset : {"qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b"}) {
    for (const char* device : {"h200", "gb300"}) {
      for (const std::int64_t tokens : {16, 512, 4096}) {
        SCOPED_TRACE(std::string(preset) + " " + device + " T=" + std::to_string(tokens));
        const Problem p = preset_problem(find_preset(preset), 4, tokens);
        const Machine m = machine(find_device(device));
        const RoutingCounts routing = make_routing(p, std::vector<std::int64_t>(4, tokens));
        const Plan plan = pipeline::resolve(p, {});
        for (const Direction d : {Direction::forward, Direction::backward}) {
          const Bounds b = bounds(p, plan, busiest_load(p, routing, m), m, d);
          EXPECT_GE(simulate(p, plan, routing, m, {.direction = d}).ms, b.lower_ms())
              << name(d) << " GEMM " << b.gemm_ms << " memory " << b.memory_ms << " link "
              << b.link_ms;
        }
      }
    }
  }
}

// Few tokens: launching the stages one by one beats one kernel only where the record says launches
// are cheap; the planner must at least consider it, and never propose split for large layers.
TEST(PlannerChoose, LargeLayersAreFused) {
  PlanRequest request;
  request.problem = preset_problem(find_preset("kimi-k2.5"), 8, 4096);
  request.all_ranks = false;
  EXPECT_EQ(choose_plan(request, machine(find_device("gb300"))).chosen.plan.mode, ExecMode::fused);
}

// Every memory number by hand, from shapes alone.
TEST(PlannerChoose, MemoryIsWhatTheClosedFormSays) {
  for (const Preset& preset : presets()) {
    for (const std::int64_t ranks : {1, 8}) {
      SCOPED_TRACE(std::string(preset.name) + " R=" + std::to_string(ranks));
      const Problem p = preset_problem(preset, ranks, 1000);
      for (const std::int32_t hidden_small : {0, 1}) {
        KnobSet knobs{};
        at(knobs, Knob::x_ring) = 1;
        at(knobs, Knob::backward_ring) = 1;
        at(knobs, Knob::hidden_ring) = hidden_small;
        at(knobs, Knob::order) = hidden_small ? 4 : 0;
        const auto built = build(p, knobs, Passes::both, 1000 * p.top_k, 132);
        if (!built) continue;
        const Plan& plan = *built;
        const std::int64_t H = p.hidden, I = p.intermediate, W = std::max(I, p.shared.intermediate),
                           T = 1000, K = p.top_k, routed = plan.capacity_rows / 128;
        const auto expect = [&](const char* name, std::int64_t want) {
          std::int64_t got = 0;
          for (const pipeline::NamedBytes& b : pipeline::buffer_bytes(p, plan))
            if (std::string_view(b.name) == name) got = b.num_bytes;
          EXPECT_EQ(got, want) << name;
        };
        expect("heap.x_in", T * H * 2);
        expect("heap.dy_in", T * H * 2);
        expect("heap.returns", T * K * H * 2);
        expect("heap.d_weights", T * K * 4);
        expect("workspace.shared_out", p.shared.intermediate > 0 ? T * H * 2 : 0);
        expect("forward.x_ring", plan.x_ring_blocks * 128 * H * 2);
        expect("forward.hidden_ring", plan.hidden_ring_blocks * 128 * I * 2);
        expect("forward.shared_hidden", T * p.shared.intermediate * 2);
        expect("backward.dy_ring", plan.backward_ring_blocks * 128 * H * 2);
        expect("backward.x_ring", plan.backward_ring_blocks * 128 * H * 2);
        expect("backward.dgate_dup_wa", plan.backward_ring_blocks * 128 * W * 2 * 3);
        expect("backward.dw_partial", plan.backward_ring_blocks * 128 * ((W + 127) / 128) * 4);
        const std::int64_t shared_blocks = p.shared.intermediate > 0 ? (T + 127) / 128 : 0;
        const bool spans = plan.chunk_blocks < std::max(routed, shared_blocks);
        const auto tiles = [](std::int64_t rows, std::int64_t cols) {
          return (rows + 127) / 128 * ((cols + 255) / 256);
        };
        expect("backward.wgrad_partial",
               spans ? (2 * tiles(W, H) + tiles(H, W)) * 128 * 256 * 4 : 0);
        // Worst case: all rows of all ranks here, every expert but the fullest holding one row.
        const std::int64_t experts = (p.num_experts + ranks - 1) / ranks, rows = ranks * T * K;
        EXPECT_EQ(routed, experts + (rows - experts) / 128);
        double kept = 0;
        for (const NamedGb& c : context_gb(p, plan)) kept += c.gb;
        const double want = static_cast<double>(
            T * K * 8 + plan.saved_rows * 2 * I * 2 +
            (p.shared.intermediate > 0 ? T * 2 * p.shared.intermediate * 2 : 0));
        EXPECT_NEAR(kept * 1e9, want, 1);
        const pipeline::NamedBytes total = pipeline::cuda_buffer_bytes(p, plan).back();
        EXPECT_STREQ(total.name, "total");
        EXPECT_NEAR(plan_memory_gb(p, plan, Passes::both) * 1e9,
                    static_cast<double>(total.num_bytes) + want, 1);
      }
    }
  }
}

TEST(PlannerChoose, BadRequestsAreRefusedWithAWayOut) {
  const Machine m = machine(find_device("h200"));
  PlanRequest request;
  request.problem = preset_problem(find_preset("qwen3-30b-a3b"), 2, 256);
  const auto refuse = [&](ErrorCode code, const std::vector<std::string>& words) {
    expect_error(code, words, [&] { choose_plan(request, m); });
  };
  request.problem.max_tokens = 0;
  refuse(ErrorCode::invalid_argument, {"max_tokens is 0", "nearest legal value 1"});
  request.problem.max_tokens = 256;
  request.problem.num_ranks = 200;
  refuse(ErrorCode::invalid_argument, {"num_ranks is 200", "nearest legal value 128"});
  request.problem.num_ranks = 2;
  request.problem.hidden = 100;
  refuse(ErrorCode::invalid_argument, {"hidden is 100", "nearest legal value 128"});
  request.problem.hidden = 2048;
  request.memory_gb = 0.001;
  refuse(ErrorCode::invalid_plan, {"no plan fits into 0.001 GB", "the smallest needs"});

  const Problem p = preset_problem(find_preset("qwen3-30b-a3b"), 2, 256);
  const RoutingCounts routing = make_routing(p, {256, 256});
  Plan plan = pipeline::resolve(p, {});
  Plan crowded = plan;
  crowded.comm_workers = 132;
  expect_error(ErrorCode::invalid_plan, {"comm_workers is 132", "nearest legal value 131"},
               [&] { simulate(p, crowded, routing, m); });
  plan.x_ring_blocks = 2;
  expect_error(ErrorCode::invalid_plan, {"x_ring_blocks is 2", "nearest legal value 8"},
               [&] { simulate(p, plan, routing, m); });
  plan = pipeline::resolve(p, {});
  plan.capacity_rows = 128;
  plan = pipeline::resolve(p, Plan{.capacity_rows = 128});
  expect_error(ErrorCode::capacity_exceeded,
               {"rank 0 would receive", "nearest legal capacity_rows"},
               [&] { simulate(p, plan, routing, m); });
  expect_error(ErrorCode::invalid_argument, {"tokens of rank 1 is 300", "nearest legal value 256"},
               [&] {
                 simulate(p, pipeline::resolve(p, {}), make_routing(p, {256, 300}), m);
               });
}

}  // namespace
}  // namespace moxie::planner
