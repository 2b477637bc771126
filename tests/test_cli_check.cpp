// Does the judge of `moxie run --check` judge? Right results pass; one wrong row, column or number
// in any tensor fails. The program is no library, so the files in question are compiled in
// here.
#include "cli/check.cpp"           // NOLINT
#include "cli/device_tensors.cpp"  // NOLINT
#include "cli/tensors.cpp"         // NOLINT

#include <gtest/gtest.h>

#include <limits>

namespace moxie::cli {
namespace {

class CliCheck : public ::testing::TestWithParam<DType> {
 protected:
  CliCheck() {
    problem_.num_ranks = 2;
    problem_.max_tokens = 12;
    problem_.hidden = 64;
    problem_.intermediate = 64;
    problem_.num_experts = 5;
    problem_.top_k = 2;
    problem_.dtype = GetParam();
    problem_.activation.kind = ActivationKind::gpt_oss;
    problem_.activation.limit = 1.0f;
    problem_.expert_bias = true;
    problem_.shared = {64, true};
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      inputs_.push_back(allocate_inputs(problem_, {}, rank, 12));
      results_.push_back(allocate_results(problem_, {}, rank, 12, true));
      for (const auto& [name, member] : input_names()) fill(name, inputs_.back().*member, rank);
    }
    World world = World::cpu({.num_ranks = 2, .timeout_s = 60, .gemm = HostGemm::plain});
    Layer layer(world, problem_);
    const Context context = layer.forward(forward_inputs(inputs_), forward_outputs(results_));
    layer.backward(context, backward_inputs(inputs_), backward_outputs(results_));
  }

  void fill(const std::string& name, HostTensor& tensor, std::int64_t rank) const {
    const Random random(7, name, rank);
    const bool activation = name == "x" || name == "dy";
    const std::span<std::int32_t> ids = tensor.as<std::int32_t>();
    if (name == "expert_ids") {
      for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = static_cast<std::int32_t>(random.below(i, 6)) - 1;
    } else if (name == "route_weights") {
      for (std::size_t i = 0; i < ids.size(); ++i) tensor.as<float>()[i] = random.unit(i);
    } else if (tensor.dtype == DType::f32) {
      random.fill(tensor.as<float>(), activation ? 1.0f : 0.12f);
    } else {
      random.fill(tensor.as<bf16>(), activation ? 1.0f : 0.12f);
    }
  }
  CheckReport judge() const {
    CheckOptions options;
    options.columns = problem_.intermediate;
    return check_results(problem_, inputs_, results_, options);
  }
  static void set(HostTensor& tensor, std::int64_t index, float value) {
    if (tensor.dtype == DType::f32) {
      tensor.as<float>()[static_cast<std::size_t>(index)] = value;
    } else {
      tensor.as<bf16>()[static_cast<std::size_t>(index)] = bf16(value);
    }
  }

  Problem problem_;
  std::vector<RankTensors> inputs_;
  std::vector<RankResults> results_;
};

TEST_P(CliCheck, RightResultsPass) {
  const CheckReport report = judge();
  EXPECT_TRUE(report.ok()) << report.worst_element;
  EXPECT_EQ(report.tensors.size(), result_names().size());
  EXPECT_EQ(report.tokens_checked, 24);
}

TEST_P(CliCheck, OneWrongElementOfAnyTensorFails) {
  for (const auto& [name, member, backward] : result_names()) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      HostTensor& tensor = results_[rank].*member;
      const std::vector<std::byte> right = tensor.bytes;
      const std::int64_t last = tensor.shape.num_elements() - 1;
      double squares = 0;
      for (std::int64_t i = 0; i <= last; ++i) squares += value_at(tensor, i) * value_at(tensor, i);
      const double rms = std::sqrt(squares / static_cast<double>(last + 1));
      for (const double wrong :
           {value_at(tensor, last) + 3 * rms, std::numeric_limits<double>::quiet_NaN()}) {
        set(tensor, last, static_cast<float>(wrong));
        EXPECT_FALSE(judge().ok()) << name << " of rank " << rank << " = " << wrong;
        EXPECT_NE(judge().worst_element.find(name), std::string::npos) << judge().worst_element;
      }
      tensor.bytes = right;
    }
  }
  EXPECT_TRUE(judge().ok());
}

TEST_P(CliCheck, ASwappedRowFails) {
  HostTensor& y = results_[1].y;
  const std::int64_t row_bytes = 64 * size_bytes(y.dtype);
  std::swap_ranges(y.bytes.begin(), y.bytes.begin() + row_bytes, y.bytes.begin() + 5 * row_bytes);
  EXPECT_FALSE(judge().ok());
}

INSTANTIATE_TEST_SUITE_P(Types, CliCheck, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace moxie::cli
