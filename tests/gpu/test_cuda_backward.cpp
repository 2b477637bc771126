// The fused backward kernel on one GPU with virtual ranks, and on two, against the FP64 oracle. Its
// plans and timing: test_cuda_backward_plans.cpp; its use: test_cuda_backward_use.cpp.
#include "tests/gpu/backward_case.h"

namespace moxie::test {
namespace {

// Right, and with clusters of two CTAs to the bit the same.
void expect_right_on_gpu(const LayerCase& c, DType grad_dtype = DType::f32,
                         std::vector<int> devices = {}) {
  BackwardCase on_device(c, std::move(devices), grad_dtype);
  const PassOutputs alone = on_device.run_alone({}, 0, 1);
  expect_close(c, reference_of(c), alone);
  EXPECT_TRUE(same_bits(alone, on_device.run_alone({}, 0, 2)));
}

TEST(CudaBackward, one_rank) {
  MOXIE_NEEDS_GPU();
  expect_right_on_gpu(bf16_case(bf16_problem(1, 4, 2), {64}));
  expect_right_on_gpu(bf16_case(bf16_problem(1, 8, 3, 512, 256), {300}));
  expect_right_on_gpu(bf16_case(bf16_problem(1, 1, 1, 64, 64), {1}));
}

TEST(CudaBackward, virtual_ranks) {
  MOXIE_NEEDS_GPU();
  for (const std::int64_t num_ranks : {2, 3, 4, 5, 6, 7, 8}) {
    SCOPED_TRACE(num_ranks);
    std::vector<std::int64_t> tokens;
    for (std::int64_t r = 0; r < num_ranks; ++r) tokens.push_back((r * 37 + 5) % 100);
    expect_right_on_gpu(bf16_case(bf16_problem(num_ranks, 16, 4), tokens),
                        num_ranks % 2 == 0 ? DType::bf16 : DType::f32);
  }
}

TEST(CudaBackward, ragged_empty_and_uneven) {
  MOXIE_NEEDS_GPU();
  const Problem gated =
      with_all_parts(bf16_problem(4, 6, 3, 128, 64), ActivationKind::swiglu_clamped);
  expect_right_on_gpu(bf16_case(bf16_problem(3, 10, 2), {0, 33, 7}));
  expect_right_on_gpu(bf16_case(gated, {0, 5, 60, 5}));
  expect_right_on_gpu(bf16_case(bf16_problem(4, 3, 2), {20, 0, 9, 1}));  // a rank without experts
  expect_right_on_gpu(bf16_case(bf16_problem(4, 3, 2), {20, 0, 9, 1}), DType::bf16);
  expect_right_on_gpu(bf16_case(bf16_problem(2, 4, 2), {0, 0}));
  expect_right_on_gpu(bf16_case(gated, {0, 0, 0, 0}));
  expect_right_on_gpu(bf16_case(bf16_problem(8, 5, 5), {1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(CudaBackward, routings) {
  MOXIE_NEEDS_GPU();
  for (const Routing routing :
       {Routing::zipf, Routing::one_expert, Routing::masked, Routing::duplicates}) {
    SCOPED_TRACE(static_cast<int>(routing));
    expect_right_on_gpu(bf16_case(bf16_problem(3, 12, 4), {90, 11, 200}, routing));
    expect_right_on_gpu(bf16_case(with_all_parts(bf16_problem(2, 5, 3), ActivationKind::swiglu),
                                  {130, 41}, routing),
                        DType::bf16);
  }
}

TEST(CudaBackward, exact_row_counts) {
  MOXIE_NEEDS_GPU();
  const std::vector<std::int64_t> rows = {0, 3, 0, 128, 1, 0, 0, 200, 127, 129, 64, 65};
  std::int64_t total = 0;
  for (const std::int64_t r : rows) total += r;
  const auto num_experts = static_cast<std::int64_t>(rows.size());
  for (Problem p : {bf16_problem(2, num_experts, 1),
                    with_all_parts(bf16_problem(2, num_experts, 1), ActivationKind::gpt_oss)}) {
    LayerCase c = bf16_case(p, {total / 2, total - total / 2});
    c.route_exactly(rows, test_seed());
    expect_right_on_gpu(c);
    expect_right_on_gpu(c, DType::bf16);
  }
}

TEST(CudaBackward, tails_and_many_experts) {
  MOXIE_NEEDS_GPU();
  expect_right_on_gpu(bf16_case(bf16_problem(2, 3, 2, 2880, 1408), {24, 9}), DType::bf16);
  expect_right_on_gpu(bf16_case(bf16_problem(2, 1024, 16, 64, 64), {70, 30}));
  expect_right_on_gpu(bf16_case(bf16_problem(1, 3, 2, 1088, 320), {150}));
  expect_right_on_gpu(bf16_case(bf16_problem(2, 4, 2, 192, 64), {70, 90}));
}

// One of the routed and the shared expert is wider than the other: they share the ring's rows.
TEST(CudaBackward, shared_expert_of_another_width) {
  MOXIE_NEEDS_GPU();
  for (const auto& [intermediate, shared] :
       {std::pair{64, 192}, {192, 64}, {64, 576}, {320, 64}, {256, 256}}) {
    for (const bool output_gate : {false, true}) {
      SCOPED_TRACE(std::to_string(intermediate) + " and " + std::to_string(shared));
      Problem p = bf16_problem(2, 5, 2, 192, intermediate);
      p.shared = {.intermediate = shared, .output_gate = output_gate};
      const LayerCase c = bf16_case(p, {140, 60});
      expect_right_on_gpu(c);
      BackwardCase on_device(c);
      EXPECT_TRUE(
          same_bits(on_device.run_alone(), on_device.run_alone({.save = SavePolicy::none})));
    }
  }
}

TEST(CudaBackward, biases_activations_and_shared_expert) {
  MOXIE_NEEDS_GPU();
  for (const ActivationKind kind :
       {ActivationKind::swiglu, ActivationKind::swiglu_clamped, ActivationKind::gpt_oss}) {
    SCOPED_TRACE(name(kind));
    for (const DType grad_dtype : {DType::f32, DType::bf16}) {
      expect_right_on_gpu(
          bf16_case(with_all_parts(bf16_problem(3, 7, 3, 320, 192), kind), {130, 0, 40}),
          grad_dtype);
    }
    Problem p = bf16_problem(2, 6, 2);
    p.activation.kind = kind;
    p.shared.intermediate = 320;
    expect_right_on_gpu(bf16_case(p, {140, 60}));
    p.shared.intermediate = 0;
    p.expert_bias = true;
    expect_right_on_gpu(bf16_case(p, {33, 64}));
  }
}

// A gradient made as rowsum(dA . A) / w would be NaN at 0 and noise at 1e-30.
TEST(CudaBackward, router_weights_of_zero_below_and_tiny) {
  MOXIE_NEEDS_GPU();
  for (const bool all_parts : {false, true}) {
    Problem p = bf16_problem(2, 4, 4);
    if (all_parts) p = with_all_parts(p, ActivationKind::gpt_oss);
    LayerCase c = bf16_case(p, {90, 33});
    for (std::int64_t t = 0; t < c.tokens.num_tokens; ++t) {
      c.route_weight(t, 0) = 0.0;
      c.route_weight(t, 1) = -0.75;
      c.route_weight(t, 2) = static_cast<float>(1e-30);
    }
    c.upload();
    expect_right_on_gpu(c);
  }
}

// Every route masked: only the shared expert contributes, and its gate still gets a gradient.
TEST(CudaBackward, shared_expert_only) {
  MOXIE_NEEDS_GPU();
  LayerCase c = bf16_case(with_all_parts(bf16_problem(3, 4, 2, 64, 64), ActivationKind::gpt_oss),
                          {133, 0, 40});
  std::fill(c.tokens.expert_ids.begin(), c.tokens.expert_ids.end(), -1);
  c.upload();
  expect_right_on_gpu(c);
  expect_right_on_gpu(c, DType::bf16);
}

// Rows' gradients; those of weights are sums over rows in an order that begins with each rank's
// own.
TEST(CudaBackward, rows_have_the_same_bits_on_any_number_of_ranks) {
  MOXIE_NEEDS_GPU();
  std::vector<std::byte> wanted;
  for (const std::int64_t num_ranks : {1, 2, 3, 7}) {
    const std::vector<std::int64_t> tokens(static_cast<std::size_t>(num_ranks), 210 / num_ranks);
    const LayerCase c = bf16_case(
        with_all_parts(bf16_problem(num_ranks, 8, 3), ActivationKind::swiglu_clamped), tokens);
    BackwardCase on_device(c);
    std::vector<std::byte> got;
    const PassOutputs outputs = on_device.run_alone();
    for (const OwnedTensor RankOutputs::*part : {&RankOutputs::dx, &RankOutputs::d_route_weights}) {
      for (const RankOutputs& rank : outputs.ranks)
        got.insert(got.end(), (rank.*part).bytes().begin(), (rank.*part).bytes().end());
    }
    if (wanted.empty()) wanted = got;
    EXPECT_EQ(wanted, got) << num_ranks << " ranks";
  }
}

TEST(CudaBackward, several_gpus) {
  MOXIE_NEEDS_TWO_GPUS();
  for (const std::vector<int>& devices : testing::rank_places()) {
    const auto num_ranks = static_cast<std::int64_t>(devices.size());
    std::vector<std::int64_t> tokens(devices.size(), 80);
    tokens[0] = 300;
    tokens[1] = 0;
    for (const bool all_parts : {false, true}) {
      Problem p = bf16_problem(num_ranks, 9, 3, 512, 256);
      if (all_parts) p = with_all_parts(p, ActivationKind::gpt_oss);
      const LayerCase c = bf16_case(p, tokens, Routing::zipf);
      expect_right_on_gpu(c, all_parts ? DType::bf16 : DType::f32, devices);
      // Where the ranks run does not matter to the bits.
      EXPECT_TRUE(same_bits(BackwardCase(c).run_alone(), BackwardCase(c, devices).run_alone()));
    }
  }
}

}  // namespace
}  // namespace moxie::test
