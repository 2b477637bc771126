// Plans, problems and worlds outside their limits: an Error that names the option, the value and
// the nearest legal one.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/env.h"
#include "tests/support/expect_error.h"
#include "tests/support/layer_case.h"

namespace moxie::test {
namespace {

struct BadPlan {
  std::vector<std::string> words;
  Plan plan;
};

TEST(LayerLimits, PlanOptionsOutOfRange) {
  // Two ranks, 100 tokens, K = 2, 8 experts: worst case 4 + 396 / 128 = 7 blocks.
  Problem p = small_problem(2, 8, 2);
  p.max_tokens = 100;
  World world = make_world(world_options(2));
  ASSERT_EQ(pipeline::worst_case_blocks(p), 7);
  const std::vector<BadPlan> bad = {
      {{"num_slabs", "-1", "1"}, {.num_slabs = -1}},
      {{"band_blocks", "-3", "1"}, {.band_blocks = -3}},
      {{"band_blocks", "0", "1"}, {.band_blocks = 0}},
      {{"minibatch_blocks", "-1", "1"}, {.minibatch_blocks = -1}},
      {{"lag_bands", "-2", "1"}, {.order = TaskOrder::lag, .lag_bands = -2}},
      {{"chunk_blocks", "-1", "1"}, {.chunk_blocks = -1}},
      {{"lag_chunks", "-1", "1"}, {.lag_chunks = -1}},
      {{"comm_workers", "-1", "0"}, {.comm_workers = -1}},
      {{"compute_workers", "-5", "1"}, {.compute_workers = -5}},
      {{"capacity_rows", "130", "128"}, {.capacity_rows = 130}},
      {{"capacity_rows", "1", "128"}, {.capacity_rows = 1}},
      {{"capacity_rows", "1024", "896"}, {.capacity_rows = 1024}},
      {{"saved_rows", "4096", "896"}, {.saved_rows = 4096}},
      // Rings below the minimum of the other options, by one.
      {{"x_ring_blocks", "3", "4"}, {.band_blocks = 3, .minibatch_blocks = 2, .x_ring_blocks = 3}},
      {{"x_ring_blocks", "8", "7"}, {.x_ring_blocks = 8}},
      {{"hidden_ring_blocks", "5", "6"},
       {.order = TaskOrder::lag, .band_blocks = 2, .lag_bands = 2, .hidden_ring_blocks = 5}},
      {{"hidden_ring_blocks", "6", "7"}, {.band_blocks = 2, .hidden_ring_blocks = 6}},
      {{"backward_ring_blocks", "4", "5"},
       {.minibatch_blocks = 2, .chunk_blocks = 2, .lag_chunks = 1, .backward_ring_blocks = 4}},
      {{"x_ring_blocks", "6", "7"},
       {.mode = ExecMode::split, .band_blocks = 2, .x_ring_blocks = 6}},
  };
  for (const BadPlan& b : bad) {
    SCOPED_TRACE(b.words[0] + " " + b.words[1]);
    expect_error(ErrorCode::invalid_plan, b.words, [&] { Layer(world, p, b.plan); });
  }
}

struct BadProblem {
  std::vector<std::string> words;
  std::function<void(Problem&)> spoil;
};

TEST(LayerLimits, ProblemSizesOutOfRange) {
  World world = make_world(world_options(2));
  const std::vector<BadProblem> bad = {
      {{"num_ranks", "3", "2"}, [](Problem& p) { p.num_ranks = 3; }},
      {{"max_tokens", "0", "1"}, [](Problem& p) { p.max_tokens = 0; }},
      {{"max_tokens", "-7", "1"}, [](Problem& p) { p.max_tokens = -7; }},
      {{"hidden", "100", "128"}, [](Problem& p) { p.hidden = 100; }},
      {{"hidden", "0", "64"}, [](Problem& p) { p.hidden = 0; }},
      {{"intermediate", "-64", "64"}, [](Problem& p) { p.intermediate = -64; }},
      {{"intermediate", "65", "64"}, [](Problem& p) { p.intermediate = 65; }},
      {{"num_experts", "0", "1"}, [](Problem& p) { p.num_experts = 0; }},
      {{"top_k", "0", "1"}, [](Problem& p) { p.top_k = 0; }},
      {{"dtype", "i32"}, [](Problem& p) { p.dtype = DType::i32; }},
      {{"shared", "96"}, [](Problem& p) { p.shared.intermediate = 96; }},
      {{"output_gate"}, [](Problem& p) { p.shared = {.intermediate = 0, .output_gate = true}; }},
  };
  for (const BadProblem& b : bad) {
    SCOPED_TRACE(b.words[0]);
    Problem p = small_problem(2, 8, 2);
    b.spoil(p);
    expect_error(ErrorCode::invalid_argument, b.words, [&] { Layer(world, p); });
  }
}

TEST(LayerLimits, WorldOptionsOutOfRange) {
  for (std::int64_t ranks : {0, -1}) {
    expect_error(ErrorCode::invalid_argument, {"num_ranks", std::to_string(ranks), "1"},
                 [&] { make_world(world_options(ranks)); });
  }
  WorldOptions options = world_options(1);
  options.timeout_s = -1;
  expect_error(ErrorCode::invalid_argument, {"timeout", "-1", "0"}, [&] { make_world(options); });
}

}  // namespace
}  // namespace moxie::test
