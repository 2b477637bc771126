// Weight and bias gradients against plain FP64 loops, and against themselves: bitwise, whatever the
// order of the work.
//
// The reference shares no code with the kernels. Rows past an expert's count hold 0xFF = NaN in
// both operands: the sums must end at the real count.
#include <memory>

#include "tests/gpu/gemm_case.h"

namespace moxie {
namespace {

using expert::WgradOutput;

// ---- wgrad ----

// out [E, m, n] += left^T right over each expert's real rows; one thread per element.
__global__ void wgrad_reference_kernel(const Bf16* left, const Bf16* right, const int64_t* begin,
                                       const int32_t* counts, int num_experts, int m, int n,
                                       double* out) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= int64_t{num_experts} * m * n) return;
  const int e = static_cast<int>(i / (int64_t{m} * n));
  const int row = static_cast<int>(i / n % m), column = static_cast<int>(i % n);
  double sum = 0;
  for (int64_t r = begin[e]; r < begin[e] + counts[e]; ++r) {
    sum += double{__bfloat162float(left[r * m + row])} * __bfloat162float(right[r * n + column]);
  }
  out[i] += sum;
}

struct WgradCase {
  const char* name;
  std::vector<int32_t> expert_rows;
  int32_t m, n;
};

struct WgradProblem {
  WgradCase spec;
  Rows rows;
  BackwardRows described;
  RowsOfBf16 left, right;
  DeviceBuffer<int64_t> begin;

  WgradProblem(const WgradCase& c, uint64_t seed)
      : spec(c),
        rows(c.expert_rows),
        described(rows.describe(64, 64)),
        left(rows, c.m, seed + 1, 1.0f),
        right(rows, c.n, seed + 2, 1.0f),
        begin(rows.begin) {}

  int64_t size() const { return int64_t{rows.num_experts()} * spec.m * spec.n; }
  expert::WgradArguments arguments(WgradOutput output, void* out) const {
    return {left.data(), right.data(), out, output, spec.m, spec.n};
  }
  void run(WgradOutput output, void* out, const GroupedGemmOptions& options,
           const GroupedGemmWorkspace& workspace) const {
    const expert::WgradArguments x = arguments(output, out);
    launch_wgrads(described, {&x, 1}, options, workspace, nullptr);
  }
  void add_reference(const DeviceBuffer<double>& out) const {
    wgrad_reference_kernel<<<static_cast<unsigned>((size() + 255) / 256), 256>>>(
        left.get(), right.get(), begin.get(), rows.device_counts.get(), rows.num_experts(), spec.m,
        spec.n, out.get());
  }
  std::vector<uint8_t> all_rows() const {
    return std::vector<uint8_t>(static_cast<size_t>(rows.num_experts()) * spec.m, 1);
  }
};

std::vector<WgradCase> wgrad_cases(uint64_t seed) {
  return {
      {"wgrad 2880 x 576", kEdges, 2880, 576},
      {"wgrad 1408 x 704", kEdges, 1408, 704},
      {"wgrad 768 x 2048", kSparse, 768, 2048},
      {"wgrad 320 x 2880", kEven, 320, 2880},
      {"wgrad 64 x 64", kEdges, 64, 64},
      {"wgrad 192 x 320, long", {1000, 3000, 0, 513}, 192, 320},
      {"wgrad, 100 experts", random_counts(100, 300, seed), 128, 192},
      {"wgrad, 1024 experts", random_counts(1024, 3, seed), 64, 64},
      {"wgrad, no rows at all", {0, 0, 0}, 128, 256},
  };
}

TEST(ExpertWeightGrads, wgrad_matches_fp64_reference) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  for (const WgradCase& c : wgrad_cases(seed)) {
    SCOPED_TRACE(c.name);
    const WgradProblem problem(c, seed);
    DeviceBuffer<double> reference(problem.size());
    cudaMemset(reference.get(), 0, reference.bytes());
    problem.add_reference(reference);
    const std::vector<double> wanted = reference.to_host();
    for (const int32_t cluster_size : {1, 2}) {
      DeviceBuffer<Bf16> out(problem.size());
      problem.run(WgradOutput::bf16, out.get(), options_of(cluster_size), workspace);
      expect_no_expired_wait(workspace);
      judge(c.name, out.to_host(), wanted, c.n, problem.all_rows());
      if (HasFatalFailure()) return;
      DeviceBuffer<float> out_f32(problem.size());
      problem.run(WgradOutput::f32, out_f32.get(), options_of(cluster_size), workspace);
      expect_no_expired_wait(workspace);
      judge("  in FP32", out_f32.to_host(), wanted, c.n, problem.all_rows(), 1e-2);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ExpertWeightGrads, wgrad_adds_four_microbatches) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  const std::vector<std::vector<int32_t>> microbatches = {
      {0, 1, 127, 0, 129}, {0, 130, 0, 0, 700}, {0, 64, 128, 0, 1}, {0, 0, 333, 0, 90}};
  const int32_t m = 1408, n = 576;
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-30, 30);
  std::vector<float> before(5 * m * n);
  for (float& x : before) x = uniform(random);
  before[17] = -0.0f;  // expert 0 has no rows: not even its sign may change
  DeviceBuffer<double> reference(std::vector<double>(before.begin(), before.end()));
  DeviceBuffer<float> one(before), two(before);
  for (size_t i = 0; i < microbatches.size(); ++i) {
    const WgradProblem problem({"add", microbatches[i], m, n}, seed + i);
    problem.add_reference(reference);
    problem.run(WgradOutput::add_f32, one.get(), options_of(2), workspace);
    problem.run(WgradOutput::add_f32, two.get(), options_of(1), workspace);
    expect_no_expired_wait(workspace);
  }
  const std::vector<float> got = one.to_host();
  judge("wgrad added four times", got, reference.to_host(), n, std::vector<uint8_t>(5 * m, 1),
        1e-2);
  EXPECT_EQ(0, std::memcmp(got.data(), two.to_host().data(), one.bytes()));
  const size_t expert_size = static_cast<size_t>(m) * n;
  for (const size_t e : {0, 3}) {
    EXPECT_EQ(0, std::memcmp(&got[e * expert_size], &before[e * expert_size], expert_size * 4));
  }
}

TEST(ExpertWeightGrads, three_wgrads_in_one_launch_are_those_of_three) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  const std::vector<int32_t> counts = {0, 1, 127, 500, 129, 64};
  const WgradProblem gate({"gate", counts, 704, 2880}, seed),
      up({"up", counts, 704, 2880}, seed + 10), down({"down", counts, 2880, 704}, seed + 20);
  for (const WgradOutput output : {WgradOutput::bf16, WgradOutput::f32, WgradOutput::add_f32}) {
    for (const int32_t cluster_size : {1, 2}) {
      std::vector<std::unique_ptr<DeviceBuffer<float>>> alone, together;
      std::vector<expert::WgradArguments> all;
      for (const WgradProblem* p : {&gate, &up, &down}) {
        for (auto* buffers : {&alone, &together}) {
          buffers->push_back(std::make_unique<DeviceBuffer<float>>(p->size()));
          cudaMemset(buffers->back()->get(), 0x11, buffers->back()->bytes());
        }
        p->run(output, alone.back()->get(), options_of(cluster_size), workspace);
        all.push_back(p->arguments(output, together.back()->get()));
      }
      launch_wgrads(gate.described, all, options_of(cluster_size), workspace, nullptr);
      expect_no_expired_wait(workspace);
      for (size_t i = 0; i < all.size(); ++i) {
        const std::vector<float> wanted = alone[i]->to_host(), got = together[i]->to_host();
        ASSERT_EQ(0, std::memcmp(got.data(), wanted.data(), alone[i]->bytes())) << "gradient " << i;
      }
    }
  }
}

// ---- bias gradients ----

TEST(ExpertWeightGrads, bias_grads_match_fp64_sums) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  const int32_t columns = 320;
  const Rows rows(kEdges);
  const RowsOfBf16 m(rows, columns, seed, 1.0f);
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> weights(rows.size()), before(kEdges.size() * columns);
  for (int64_t i = 0; i < rows.size(); ++i)
    weights[i] = rows.expert_of_row[i] < 0 ? NAN : uniform(random);
  for (float& x : before) x = uniform(random);
  const DeviceBuffer<float> row_weight(weights), added(before), plain(before.size());
  launch_bias_grad(rows.describe(64, 64), {m.data(), nullptr, plain.get(), columns, false},
                   nullptr);
  launch_bias_grad(rows.describe(64, 64), {m.data(), row_weight.get(), added.get(), columns, true},
                   nullptr);
  MOXIE_CUDA(cudaDeviceSynchronize());
  const std::vector<Bf16> values = m.to_host();
  std::vector<double> sums(before.size(), 0.0), weighted(before.begin(), before.end());
  for (int64_t row = 0; row < rows.size(); ++row) {
    if (rows.expert_of_row[row] < 0) continue;
    for (int32_t c = 0; c < columns; ++c) {
      const double value = as_float(values[row * columns + c]);
      sums[rows.expert_of_row[row] * columns + c] += value;
      weighted[rows.expert_of_row[row] * columns + c] += weights[row] * value;
    }
  }
  const std::vector<uint8_t> real(kEdges.size(), 1);
  judge("bias gradient", plain.to_host(), sums, columns, real, 1e-3);
  judge("bias gradient, weighted and added", added.to_host(), weighted, columns, real, 1e-3);
}

// ---- bitwise ----

TEST(ExpertWeightGrads, bitwise_equal_over_repeats_clusters_bands_and_grid_sizes) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  WgradProblem wgrad({"wgrad", random_counts(24, 700, seed), 704, 832}, seed);
  DeviceBuffer<Bf16> dw(wgrad.size());
  DeviceBuffer<float> dw_f32(wgrad.size());
  std::vector<Bf16> dw_bits;
  std::vector<float> dw_f32_bits;
  for (int repeat = 0; repeat < 24; ++repeat) {
    dw.poison();
    dw_f32.poison();
    wgrad.run(WgradOutput::bf16, dw.get(), varied(repeat), workspace);
    wgrad.run(WgradOutput::f32, dw_f32.get(), varied(repeat), workspace);
    expect_no_expired_wait(workspace);
    if (HasFatalFailure()) return;
    if (repeat == 0) {
      dw_bits = dw.to_host();
      dw_f32_bits = dw_f32.to_host();
      continue;
    }
    expect_same_bits(dw, dw_bits, "dW");
    expect_same_bits(dw_f32, dw_f32_bits, "dW in FP32");
    if (HasFailure()) return;
  }
}

TEST(ExpertWeightGrads, refuses_what_it_cannot_run) {
  MOXIE_NEEDS_GPU();
  GroupedGemmWorkspace workspace;
  WgradProblem problem({"small", {5}, 64, 64}, 1);
  DeviceBuffer<Bf16> out(problem.size());
  expert::WgradArguments x = problem.arguments(WgradOutput::bf16, out.get());
  x.m = 72;
  EXPECT_THROW(launch_wgrads(problem.described, {&x, 1}, {}, workspace, nullptr), Error);
  GroupedGemmOptions options;
  options.cluster_size = 3;
  EXPECT_THROW(problem.run(WgradOutput::bf16, out.get(), options, workspace), Error);
}

}  // namespace
}  // namespace moxie
