// The backward's products against plain FP64 loops, and against themselves: bitwise, whatever the
// order of the work.
//
// The reference shares no code with the kernels: its own row offsets, its own sums, exp instead of
// tanh. Rows past an expert's count hold 0xFF = NaN in every operand.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "gpu_test.h"
#include "moxie/expert/backward_gemm_launch_cuda.cuh"

namespace moxie {
namespace {

using expert::BackwardRows;
using expert::GroupedGemmOptions;
using expert::GroupedGemmWorkspace;
using expert::WgradOutput;
using testing::DeviceBuffer;
using Bf16 = __nv_bfloat16;

// ---- inputs ----

__global__ void fill_kernel(Bf16* out, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t h = (static_cast<uint64_t>(i) + seed) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    h ^= h >> 31;
    float sum = -2.0f;  // four uniforms: close to normal
    for (int part = 0; part < 4; ++part)
      sum += static_cast<float>(h >> (16 * part) & 0xFFFF) / 65536.0f;
    out[i] = __float2bfloat16(sum * 1.7320508f * scale);
  }
}

// Rows of experts, each of which begins on a block of 128.
struct Rows {
  std::vector<int32_t> counts;
  std::vector<int64_t> begin;
  std::vector<int32_t> expert_of_row;  // -1: padding
  DeviceBuffer<int32_t> device_counts, device_experts;

  explicit Rows(const std::vector<int32_t>& expert_rows)
      : counts(expert_rows), device_counts(expert_rows), device_experts(experts_of(*this)) {}

  int64_t size() const { return static_cast<int64_t>(expert_of_row.size()); }
  int32_t num_experts() const { return static_cast<int32_t>(counts.size()); }
  BackwardRows describe(int32_t hidden, int32_t intermediate) const {
    return {device_counts.get(), num_experts(), size(), hidden, intermediate};
  }

 private:
  static const std::vector<int32_t>& experts_of(Rows& rows) {
    for (size_t e = 0; e < rows.counts.size(); ++e) {
      rows.begin.push_back(rows.size());
      for (int32_t i = 0; i < (rows.counts[e] + 127) / 128 * 128; ++i)
        rows.expert_of_row.push_back(i < rows.counts[e] ? static_cast<int32_t>(e) : -1);
    }
    return rows.expert_of_row;
  }
};

// Device memory whose every byte is 0xFF but for the real rows.
struct RowsOfBf16 : DeviceBuffer<Bf16> {
  RowsOfBf16(const Rows& rows, int32_t columns) : DeviceBuffer(rows.size() * columns) {}
  RowsOfBf16(const Rows& rows, int32_t columns, uint64_t seed, float scale)
      : RowsOfBf16(rows, columns) {
    for (size_t e = 0; e < rows.counts.size(); ++e) {
      if (rows.counts[e] == 0) continue;
      fill_kernel<<<256, 256>>>(get() + rows.begin[e] * columns, int64_t{rows.counts[e]} * columns,
                                seed + 977 * e, scale);
    }
  }
  bf16* data() const { return reinterpret_cast<bf16*>(get()); }
};

struct Weights : DeviceBuffer<Bf16> {
  Weights(int64_t count, uint64_t seed, float scale) : DeviceBuffer(count) {
    fill_kernel<<<1024, 256>>>(get(), count, seed, scale);
  }
  bf16* data() const { return reinterpret_cast<bf16*>(get()); }
};

uint64_t new_seed() {
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

GroupedGemmOptions options_of(int32_t cluster_size) {
  GroupedGemmOptions options;
  options.cluster_size = cluster_size;
  options.limit_ns = 2'000'000'000;
  return options;
}

void expect_no_expired_wait(const GroupedGemmWorkspace& workspace) {
  MOXIE_CUDA(cudaDeviceSynchronize());
  ASSERT_EQ(0u, workspace.record()->written) << "a wait expired: site " << workspace.record()->what;
}

// ---- judge ----

float as_float(Bf16 x) { return __bfloat162float(x); }
float as_float(float x) { return x; }
template <class T>
bool is_poison(const T& x) {
  uint8_t bytes[sizeof(T)];
  std::memcpy(bytes, &x, sizeof(T));
  return std::all_of(bytes, bytes + sizeof(T), [](uint8_t byte) { return byte == 0xFF; });
}

// Contract of the numerics, of BF16 results: everything within 5e-3 relative L2, every row within
// 1e-2, every element within 2e-2 * (rms of the row) + 2e-2 * |ref|; `tightness` of FP32 results is
// below 1. Rows without an expert (row_is_real[i] == 0) are as poisoned.
template <class T>
void judge(const char* what, const std::vector<T>& got, const std::vector<double>& wanted,
           int64_t columns, const std::vector<uint8_t>& row_is_real, double tightness = 1) {
  ASSERT_EQ(got.size(), wanted.size());
  double error = 0, norm = 0;
  for (size_t row = 0; row < row_is_real.size(); ++row) {
    double row_error = 0, row_norm = 0;
    const size_t begin = row * columns, end = begin + columns;
    for (size_t i = begin; i < end; ++i) {
      if (!row_is_real[row]) {
        ASSERT_TRUE(is_poison(got[i])) << what << ": padding row " << row << " was written";
        continue;
      }
      const double d = as_float(got[i]) - wanted[i];
      ASSERT_FALSE(std::isnan(d)) << what << ": row " << row << " column " << i - begin;
      row_error += d * d;
      row_norm += wanted[i] * wanted[i];
    }
    if (!row_is_real[row]) continue;
    if (row_norm == 0) {
      ASSERT_EQ(0, row_error) << what << ": row " << row << " must be exactly zero";
      continue;
    }
    ASSERT_LE(std::sqrt(row_error / row_norm), 1e-2 * tightness) << what << ": row " << row;
    const double rms = std::sqrt(row_norm / static_cast<double>(columns));
    for (size_t i = begin; i < end; ++i) {
      ASSERT_LE(std::abs(as_float(got[i]) - wanted[i]),
                tightness * (2e-2 * rms + 2e-2 * std::abs(wanted[i])))
          << what << ": row " << row << " column " << i - begin;
    }
    error += row_error;
    norm += row_norm;
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : 0;
  std::printf("  %-44s relative L2 %.2e\n", what, relative);
  EXPECT_LE(relative, 5e-3 * tightness) << what;
}

std::vector<uint8_t> real_rows(const Rows& rows) {
  std::vector<uint8_t> real;
  for (const int32_t e : rows.expert_of_row) real.push_back(e >= 0);
  return real;
}

// ---- dgrad ----

struct DgradReference {
  double *dgate, *dup, *wa, *terms;  // [rows, I]; terms: dA' * A, whose row sum is d(weight)
};

// One thread per element of [rows, I].
__global__ void dgrad_reference_kernel(const Bf16* dy, const Bf16* down, const Bf16* z,
                                       const float* row_weight, const int32_t* expert_of_row,
                                       int64_t rows, int hidden, int intermediate,
                                       Activation activation, DgradReference out) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= rows * intermediate) return;
  const int64_t row = i / intermediate, column = i % intermediate;
  const int e = expert_of_row[row];
  if (e < 0) return;
  double da = 0;
  for (int h = 0; h < hidden; ++h) {
    da += double{__bfloat162float(dy[row * hidden + h])} *
          __bfloat162float(down[(int64_t{e} * hidden + h) * intermediate + column]);
  }
  double gate = __bfloat162float(z[row * 2 * intermediate + column]);
  double up = __bfloat162float(z[row * 2 * intermediate + intermediate + column]);
  double alpha = 1, shift = 0, d_clamped_gate = 1, d_clamped_up = 1;
  if (activation.kind != ActivationKind::swiglu) {
    const double limit = activation.limit;
    if (gate > limit) gate = limit, d_clamped_gate = 0;
    if (up > limit) up = limit, d_clamped_up = 0;
    if (up < -limit) up = -limit, d_clamped_up = 0;
  }
  if (activation.kind == ActivationKind::gpt_oss) alpha = activation.alpha, shift = 1;
  const double s = 1 / (1 + exp(-alpha * gate)), weight = row_weight[row];
  const double value = gate * s * (up + shift);
  out.dgate[i] = weight * da * (s + alpha * gate * s * (1 - s)) * (up + shift) * d_clamped_gate;
  out.dup[i] = weight * da * gate * s * d_clamped_up;
  out.wa[i] = weight * value;
  out.terms[i] = da * value;
}

struct DgradCase {
  const char* name;
  std::vector<int32_t> expert_rows;
  int32_t hidden, intermediate;
  Activation activation;
  bool bias;
};

struct DgradProblem {
  DgradCase spec;
  Rows rows;
  BackwardRows described;
  RowsOfBf16 dy, z, dgate, dup, wa;
  Weights down, bias;
  DeviceBuffer<float> row_weight, dw_partial, d_weight;

  DgradProblem(const DgradCase& c, uint64_t seed)
      : spec(c),
        rows(c.expert_rows),
        described(rows.describe(c.hidden, c.intermediate)),
        dy(rows, c.hidden, seed + 1, 1.0f),
        z(rows, 2 * c.intermediate, seed + 2, 1.5f),
        dgate(rows, c.intermediate),
        dup(rows, c.intermediate),
        wa(rows, c.intermediate),
        down(int64_t{rows.num_experts()} * c.hidden * c.intermediate, seed + 3,
             1.0f / std::sqrt(static_cast<float>(c.hidden))),
        bias(int64_t{rows.num_experts()} * c.hidden, seed + 4, 0.3f),
        row_weight(rows.size()),
        dw_partial(rows.size() * expert::column_tiles(c.intermediate)),
        d_weight(rows.size()) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> weights(rows.size());
    for (int64_t i = 0; i < rows.size(); ++i) {  // zero, tiny, negative ones among them
      weights[i] = i % 7 == 3 ? 0.0f : i % 7 == 5 ? 1e-6f : uniform(random);
      if (rows.expert_of_row[i] < 0) weights[i] = NAN;
    }
    cudaMemcpy(row_weight.get(), weights.data(), row_weight.bytes(), cudaMemcpyHostToDevice);
  }

  expert::DgradArguments arguments() const {
    return {dy.data(),  down.data(), z.data(),         row_weight.get(), dgate.data(),
            dup.data(), wa.data(),   dw_partial.get(), spec.activation};
  }
  void poison_outputs() {
    for (RowsOfBf16* out : {&dgate, &dup, &wa}) out->poison();
    dw_partial.poison();
    d_weight.poison();
  }
  void run(const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace) {
    poison_outputs();
    launch_dgrad(described, arguments(), options, workspace, nullptr);
    launch_router_grad(
        described, {dw_partial.get(), dy.data(), spec.bias ? bias.data() : nullptr, d_weight.get()},
        nullptr);
  }

  void check() const {
    const int64_t n = spec.intermediate, count = rows.size() * n;
    DeviceBuffer<double> dgate_ref(count), dup_ref(count), wa_ref(count), terms(count);
    if (count > 0) {
      dgrad_reference_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
          dy.get(), down.get(), z.get(), row_weight.get(), rows.device_experts.get(), rows.size(),
          spec.hidden, spec.intermediate, spec.activation,
          {dgate_ref.get(), dup_ref.get(), wa_ref.get(), terms.get()});
    }
    const std::vector<uint8_t> real = real_rows(rows);
    const std::string name = spec.name;
    judge((name + ": dgate").c_str(), dgate.to_host(), dgate_ref.to_host(), n, real);
    judge((name + ": dup").c_str(), dup.to_host(), dup_ref.to_host(), n, real);
    judge((name + ": wA").c_str(), wa.to_host(), wa_ref.to_host(), n, real);

    const std::vector<double> all_terms = terms.to_host();
    const std::vector<float> got = d_weight.to_host();
    const std::vector<Bf16> dy_host = dy.to_host(), bias_host = bias.to_host();
    for (int64_t row = 0; row < rows.size(); ++row) {
      if (!real[row]) {
        ASSERT_TRUE(is_poison(got[row])) << "weight gradient of padding row " << row;
        continue;
      }
      double wanted = 0, norm = 0;
      for (int64_t i = row * n; i < (row + 1) * n; ++i) {
        wanted += all_terms[i];
        norm += all_terms[i] * all_terms[i];
      }
      for (int64_t h = 0; spec.bias && h < spec.hidden; ++h) {
        wanted += double{as_float(dy_host[row * spec.hidden + h])} *
                  as_float(bias_host[rows.expert_of_row[row] * int64_t{spec.hidden} + h]);
      }
      // Terms are off by tanh's 2^-11 at most, independently.
      ASSERT_LE(std::abs(got[row] - wanted), 5e-3 * std::sqrt(norm) + 1e-3 * std::abs(wanted))
          << name << ": weight gradient of row " << row << ": " << got[row] << " for " << wanted;
    }
  }
};

std::vector<int32_t> random_counts(size_t num_experts, int32_t most, uint64_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> counts(num_experts);
  for (auto& count : counts) count = static_cast<int32_t>(random() % (most + 1));
  return counts;
}

const std::vector<int32_t> kEdges = {0, 1, 127, 128, 129};
const std::vector<int32_t> kSparse = {0, 3, 0, 128, 1, 0, 0, 200};
const std::vector<int32_t> kEven = {256, 64, 384, 65};

const Activation kClamped{ActivationKind::swiglu_clamped, 1.25f, 1.0f};
const Activation kGptOss{ActivationKind::gpt_oss, 1.5f, 1.702f};

TEST(ExpertBackwardGemm, dgrad_matches_fp64_reference) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  for (const DgradCase& c : {
           DgradCase{"dgrad 2880 -> 1408", kEdges, 2880, 1408, {}, false},
           DgradCase{"dgrad 2048 -> 768", kSparse, 2048, 768, {}, false},
           DgradCase{"dgrad 64 -> 64, one K block", kEven, 64, 64, {}, false},
           DgradCase{"dgrad 320 -> 192", kEdges, 320, 192, {}, false},
           DgradCase{"dgrad 1408 -> 2880", kEven, 1408, 2880, {}, true},
           DgradCase{"dgrad, 100 experts", random_counts(100, 150, seed), 256, 320, {}, false},
           DgradCase{"dgrad, no rows at all", {0, 0, 0}, 128, 256, {}, false},
           DgradCase{"dgrad, one row", {0, 1, 0}, 128, 256, {}, false},
           DgradCase{"dgrad clamped 320 -> 1408", kEdges, 320, 1408, kClamped, false},
           DgradCase{"dgrad gpt-oss 2880 -> 2880", kEdges, 2880, 2880, kGptOss, true},
           DgradCase{"dgrad gpt-oss 64 -> 192", kSparse, 64, 192, kGptOss, true},
       }) {
    SCOPED_TRACE(c.name);
    for (const int32_t cluster_size : {1, 2}) {
      DgradProblem problem(c, seed);
      problem.run(options_of(cluster_size), workspace);
      expect_no_expired_wait(workspace);
      problem.check();
      if (HasFatalFailure()) return;
    }
  }
}

// ---- dX ----

__global__ void dx_reference_kernel(const Bf16* dgate, const Bf16* dup, const Bf16* gate,
                                    const Bf16* up, const int32_t* expert_of_row, int64_t rows,
                                    int hidden, int intermediate, double* out) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= rows * hidden) return;
  const int64_t row = i / hidden, column = i % hidden;
  const int e = expert_of_row[row];
  if (e < 0) return;
  double sum = 0;
  for (int j = 0; j < intermediate; ++j) {
    const int64_t left = row * intermediate + j,
                  right = (int64_t{e} * intermediate + j) * hidden + column;
    sum += double{__bfloat162float(dgate[left])} * __bfloat162float(gate[right]) +
           double{__bfloat162float(dup[left])} * __bfloat162float(up[right]);
  }
  out[i] = sum;
}

struct DxCase {
  const char* name;
  std::vector<int32_t> expert_rows;
  int32_t hidden, intermediate;
};

struct DxProblem {
  DxCase spec;
  Rows rows;
  BackwardRows described;
  RowsOfBf16 dgate, dup, dx;
  Weights gate, up;

  DxProblem(const DxCase& c, uint64_t seed)
      : spec(c),
        rows(c.expert_rows),
        described(rows.describe(c.hidden, c.intermediate)),
        dgate(rows, c.intermediate, seed + 1, 1.0f),
        dup(rows, c.intermediate, seed + 2, 1.0f),
        dx(rows, c.hidden),
        gate(int64_t{rows.num_experts()} * c.hidden * c.intermediate, seed + 3, 0.05f),
        up(int64_t{rows.num_experts()} * c.hidden * c.intermediate, seed + 4, 0.05f) {}

  void run(const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace) {
    dx.poison();
    launch_dx(described, {dgate.data(), dup.data(), gate.data(), up.data(), dx.data()}, options,
              workspace, nullptr);
  }
  void check() const {
    const int64_t count = rows.size() * spec.hidden;
    DeviceBuffer<double> wanted(count);
    if (count > 0) {
      dx_reference_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
          dgate.get(), dup.get(), gate.get(), up.get(), rows.device_experts.get(), rows.size(),
          spec.hidden, spec.intermediate, wanted.get());
    }
    judge(spec.name, dx.to_host(), wanted.to_host(), spec.hidden, real_rows(rows));
  }
};

TEST(ExpertBackwardGemm, dx_matches_fp64_reference) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  for (const DxCase& c : {
           DxCase{"dx 1408 -> 2880", kEdges, 2880, 1408},
           DxCase{"dx 768 -> 2048", kSparse, 2048, 768},
           DxCase{"dx 64 -> 64, one K block each", kEven, 64, 64},
           DxCase{"dx 192 -> 320", kEdges, 320, 192},
           DxCase{"dx, 100 experts", random_counts(100, 150, seed), 320, 256},
           DxCase{"dx, no rows at all", {0, 0, 0}, 128, 256},
       }) {
    SCOPED_TRACE(c.name);
    for (const int32_t cluster_size : {1, 2}) {
      DxProblem problem(c, seed);
      problem.run(options_of(cluster_size), workspace);
      expect_no_expired_wait(workspace);
      problem.check();
      if (HasFatalFailure()) return;
    }
  }
}

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

TEST(ExpertBackwardGemm, wgrad_matches_fp64_reference) {
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

TEST(ExpertBackwardGemm, wgrad_adds_four_microbatches) {
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

TEST(ExpertBackwardGemm, three_wgrads_in_one_launch_are_those_of_three) {
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

TEST(ExpertBackwardGemm, bias_grads_match_fp64_sums) {
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

template <class T>
void expect_same_bits(const DeviceBuffer<T>& x, const std::vector<T>& wanted, const char* what) {
  const std::vector<T> got = x.to_host();
  EXPECT_EQ(0, std::memcmp(got.data(), wanted.data(), wanted.size() * sizeof(T))) << what;
}

GroupedGemmOptions varied(int repeat) {
  GroupedGemmOptions options = options_of(1 + repeat % 2);
  options.band_blocks = 2 << (repeat / 2 % 5);
  options.reserve_sms = repeat % 3 == 2 ? 101 : 0;
  return options;
}

TEST(ExpertBackwardGemm, bitwise_equal_over_repeats_clusters_bands_and_grid_sizes) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  const std::vector<int32_t> counts = random_counts(24, 700, seed);
  GroupedGemmWorkspace workspace;
  DgradProblem dgrad({"dgrad", counts, 512, 1408, {}, false}, seed);
  DxProblem dx({"dx", counts, 1408, 320}, seed);
  WgradProblem wgrad({"wgrad", counts, 704, 832}, seed);
  DeviceBuffer<Bf16> dw(wgrad.size());
  DeviceBuffer<float> dw_f32(wgrad.size());
  std::vector<Bf16> dgate, dup, wa, dx_bits, dw_bits;
  std::vector<float> d_weight, dw_f32_bits;
  for (int repeat = 0; repeat < 24; ++repeat) {
    dgrad.run(varied(repeat), workspace);
    dx.run(varied(repeat), workspace);
    dw.poison();
    dw_f32.poison();
    wgrad.run(WgradOutput::bf16, dw.get(), varied(repeat), workspace);
    wgrad.run(WgradOutput::f32, dw_f32.get(), varied(repeat), workspace);
    expect_no_expired_wait(workspace);
    if (HasFatalFailure()) return;
    if (repeat == 0) {
      dgate = dgrad.dgate.to_host();
      dup = dgrad.dup.to_host();
      wa = dgrad.wa.to_host();
      d_weight = dgrad.d_weight.to_host();
      dx_bits = dx.dx.to_host();
      dw_bits = dw.to_host();
      dw_f32_bits = dw_f32.to_host();
      continue;
    }
    expect_same_bits(dgrad.dgate, dgate, "dgate");
    expect_same_bits(dgrad.dup, dup, "dup");
    expect_same_bits(dgrad.wa, wa, "wA");
    expect_same_bits(dgrad.d_weight, d_weight, "weight gradient");
    expect_same_bits(dx.dx, dx_bits, "dX");
    expect_same_bits(dw, dw_bits, "dW");
    expect_same_bits(dw_f32, dw_f32_bits, "dW in FP32");
    if (HasFailure()) return;
  }
}

// Every tile's load is held back by a different, random time.
struct RandomDelay {
  uint32_t seed;
  __device__ bool wait(const expert::Tile& tile, const device::WaitLimits&) const {
    uint32_t h = (tile.row_begin * 31u + tile.n_tile) * 2654435761u + seed;
    h ^= h >> 15;
    __nanosleep(h % 20000);
    return true;
  }
};

// Every warp keeps every epilogue stage back for a different, random time.
struct DelayedDgrad : expert::DgradEpilogue<false> {
  __device__ void convert_stage(const float (&acc)[128], const Prepared& prepared, Sums& sums,
                                const expert::Tile& tile, int32_t piece,
                                const expert::EpilogueWarp& warp, bf16* a, bf16* b) const {
    uint32_t h = (tile.row_begin + warp.warp_row + piece * 7u) * 2654435761u + clock();
    h ^= h >> 15;
    __nanosleep(h % 5000);
    expert::DgradEpilogue<false>::convert_stage(acc, prepared, sums, tile, piece, warp, a, b);
  }
};

template <int kClusterSize, class Epilogue>
void launch_delayed(const DgradProblem& problem, uint32_t seed,
                    const GroupedGemmWorkspace& workspace) {
  const GroupedGemmOptions options = options_of(kClusterSize);
  const expert::DgradArguments x = problem.arguments();
  expert::GemmParams<expert::BandSchedule<kClusterSize>, RandomDelay, Epilogue, 1,
                     expert::DgradOperands>
      params{};
  params.operands[0] = expert::describe_dgrad(problem.described, x);
  static_cast<expert::DgradEpilogue<false>&>(params.epilogue) =
      expert::describe_dgrad_epilogue<false>(problem.described, x);
  params.schedule = expert::row_schedule<kClusterSize>(problem.described, problem.spec.intermediate,
                                                       problem.spec.hidden, options);
  params.readiness = {seed};
  params.tickets = reinterpret_cast<expert::TicketCounter*>(workspace.words());
  params.limits = expert::describe_limits(options, workspace);
  expert::launch_gemm_kernel<expert::GemmConfig<kClusterSize>>(params, 0, nullptr);
}

TEST(ExpertBackwardGemm, dgrad_bitwise_equal_under_random_delays) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  DgradProblem problem({"delays", random_counts(24, 700, seed), 192, 768, {}, false}, seed);
  problem.run(options_of(2), workspace);
  expect_no_expired_wait(workspace);
  const std::vector<Bf16> dgate = problem.dgate.to_host(), dup = problem.dup.to_host(),
                          wa = problem.wa.to_host();
  for (uint32_t repeat = 0; repeat < 60; ++repeat) {
    problem.poison_outputs();
    const uint32_t delay = static_cast<uint32_t>(seed) + repeat * 7919u;
    switch (repeat % 4) {
      case 0: launch_delayed<2, expert::DgradEpilogue<false>>(problem, delay, workspace); break;
      case 1: launch_delayed<1, DelayedDgrad>(problem, delay, workspace); break;
      default: launch_delayed<2, DelayedDgrad>(problem, delay, workspace); break;
    }
    expect_no_expired_wait(workspace);
    expect_same_bits(problem.dgate, dgate, "dgate");
    expect_same_bits(problem.dup, dup, "dup");
    expect_same_bits(problem.wa, wa, "wA");
    if (HasFailure()) return;
  }
}

TEST(ExpertBackwardGemm, refuses_what_it_cannot_run) {
  MOXIE_NEEDS_GPU();
  GroupedGemmWorkspace workspace;
  WgradProblem problem({"small", {5}, 64, 64}, 1);
  DeviceBuffer<Bf16> out(problem.size());
  expert::WgradArguments x = problem.arguments(WgradOutput::bf16, out.get());
  x.m = 72;
  EXPECT_THROW(launch_wgrads(problem.described, {&x, 1}, {}, workspace, nullptr), Error);
  BackwardRows rows = problem.described;
  rows.hidden = 100;
  EXPECT_THROW(launch_dx(rows, {}, {}, workspace, nullptr), Error);
  GroupedGemmOptions options;
  options.cluster_size = 3;
  EXPECT_THROW(problem.run(WgradOutput::bf16, out.get(), options, workspace), Error);
}

}  // namespace
}  // namespace moxie
