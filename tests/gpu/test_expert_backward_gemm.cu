// dA' with SwiGLU backward, and dX, against plain FP64 loops, and against themselves: bitwise,
// whatever the order of the work.
//
// The reference shares no code with the kernels: its own row offsets, its own sums, exp instead of
// tanh. Rows past an expert's count hold 0xFF = NaN in every operand.
#include "tests/gpu/gemm_case.h"

namespace moxie {
namespace {

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

// ---- bitwise ----

TEST(ExpertBackwardGemm, bitwise_equal_over_repeats_clusters_bands_and_grid_sizes) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  const std::vector<int32_t> counts = random_counts(24, 700, seed);
  GroupedGemmWorkspace workspace;
  DgradProblem dgrad({"dgrad", counts, 512, 1408, {}, false}, seed);
  DxProblem dx({"dx", counts, 1408, 320}, seed);
  std::vector<Bf16> dgate, dup, wa, dx_bits;
  std::vector<float> d_weight;
  for (int repeat = 0; repeat < 24; ++repeat) {
    dgrad.run(varied(repeat), workspace);
    dx.run(varied(repeat), workspace);
    expect_no_expired_wait(workspace);
    if (HasFatalFailure()) return;
    if (repeat == 0) {
      dgate = dgrad.dgate.to_host();
      dup = dgrad.dup.to_host();
      wa = dgrad.wa.to_host();
      d_weight = dgrad.d_weight.to_host();
      dx_bits = dx.dx.to_host();
      continue;
    }
    expect_same_bits(dgrad.dgate, dgate, "dgate");
    expect_same_bits(dgrad.dup, dup, "dup");
    expect_same_bits(dgrad.wa, wa, "wA");
    expect_same_bits(dgrad.d_weight, d_weight, "weight gradient");
    expect_same_bits(dx.dx, dx_bits, "dX");
    if (HasFailure()) return;
  }
}

// Every warp keeps every epilogue stage back for a different, random time.
struct DelayedDgrad : expert::DgradEpilogue<false> {
  __device__ void convert_stage(const float4* own, const Prepared& prepared, Sums& sums,
                                const expert::Tile& tile, int32_t piece,
                                const expert::EpilogueWarp& warp, bf16* a, bf16* b) const {
    uint32_t h = (tile.row_begin + warp.warp_row + piece * 7u) * 2654435761u + clock();
    h ^= h >> 15;
    __nanosleep(h % 5000);
    expert::DgradEpilogue<false>::convert_stage(own, prepared, sums, tile, piece, warp, a, b);
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
  const Rows rows({5});
  EXPECT_THROW(launch_dx(rows.describe(100, 64), {}, {}, workspace, nullptr), Error);
}

}  // namespace
}  // namespace moxie
