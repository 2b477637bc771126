// The grouped GEMM against plain FP64 loops, and against itself: bitwise, whatever the order of the
// work.
//
// The reference shares no code with the kernel: its own row offsets, its own sums, exp instead of
// tanh.
#include <chrono>

#include "tests/gpu/gemm_case.h"

namespace moxie {
namespace {

using expert::GroupedGemmArguments;
using expert::GroupedProduct;

struct Case {
  const char* name;
  GroupedProduct product;
  std::vector<int32_t> expert_rows;
  int32_t n, k;
};

// ---- inputs and reference ----

// One thread per element of C; expert_of_row is -1 in padding.
__global__ void reference_kernel(const Bf16* a, const Bf16* b, const Bf16* b_up,
                                 const float* row_weight, const int32_t* expert_of_row,
                                 int64_t rows, int n, int k, double* out) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= rows * n) return;
  const int64_t row = i / n, column = i % n;
  const int e = expert_of_row[row];
  if (e < 0) return;
  const auto dot = [&](const Bf16* matrices) {
    double sum = 0;
    for (int j = 0; j < k; ++j) {
      sum += double{__bfloat162float(a[row * k + j])} *
             __bfloat162float(matrices[(int64_t{e} * n + column) * k + j]);
    }
    return sum;
  };
  const double gate = dot(b);
  out[i] = b_up == nullptr ? gate : gate / (1 + exp(-gate)) * dot(b_up) * row_weight[row];
}

struct Problem {
  int64_t rows = 0;
  std::vector<int32_t> expert_of_row;  // -1: padding
  DeviceBuffer<int32_t> expert_rows;
  DeviceBuffer<__nv_bfloat16> a, b, b_up, out;
  DeviceBuffer<float> row_weight;
  Case spec;

  static int64_t padded_rows(const Case& c) {
    int64_t rows = 0;
    for (const int32_t count : c.expert_rows) rows += (count + 127) / 128 * 128;
    return rows;
  }

  Problem(const Case& c, uint64_t seed)
      : rows(padded_rows(c)),
        expert_of_row(rows, -1),
        expert_rows(c.expert_rows),
        a(rows * c.k),
        b(c.expert_rows.size() * c.n * c.k),
        b_up(c.product == GroupedProduct::swiglu ? c.expert_rows.size() * c.n * c.k : 0),
        out(rows * c.n),
        row_weight(rows),
        spec(c) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    int64_t row = 0;
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.k));
    for (size_t e = 0; e < c.expert_rows.size(); ++e) {  // real rows only: the rest stays 0xFF
      const int32_t count = c.expert_rows[e];
      std::vector<float> weights(count);
      for (auto& w : weights) w = uniform(random);
      if (count > 0) {
        fill_kernel<<<256, 256>>>(a.get() + row * c.k, int64_t{count} * c.k, seed + 1000 * row,
                                  1.0f);
        cudaMemcpy(row_weight.get() + row, weights.data(), count * sizeof(float),
                   cudaMemcpyHostToDevice);
      }
      for (int32_t i = 0; i < count; ++i) expert_of_row[row + i] = static_cast<int32_t>(e);
      row += (count + 127) / 128 * 128;
    }
    fill_kernel<<<1024, 256>>>(b.get(), b.size(), seed * 3 + 1, 2 * scale);
    if (b_up.size() > 0) fill_kernel<<<1024, 256>>>(b_up.get(), b_up.size(), seed * 5 + 2, scale);
  }

  GroupedGemmArguments arguments() const {
    const auto as_bf16 = [](const DeviceBuffer<__nv_bfloat16>& x) {
      return reinterpret_cast<bf16*>(x.get());
    };
    return {spec.product,
            as_bf16(a),
            as_bf16(b),
            as_bf16(b_up),
            row_weight.get(),
            as_bf16(out),
            expert_rows.get(),
            static_cast<int32_t>(spec.expert_rows.size()),
            rows,
            spec.n,
            spec.k};
  }

  std::vector<double> reference() const {
    DeviceBuffer<int32_t> experts(expert_of_row);
    DeviceBuffer<double> wanted(rows * spec.n);
    const bool swiglu = spec.product == GroupedProduct::swiglu;
    if (rows > 0) {
      reference_kernel<<<static_cast<unsigned>((rows * spec.n + 255) / 256), 256>>>(
          a.get(), b.get(), swiglu ? b_up.get() : nullptr, row_weight.get(), experts.get(), rows,
          spec.n, spec.k, wanted.get());
    }
    return wanted.to_host();
  }
};

void check_against_reference(const Problem& problem) {
  std::vector<uint8_t> real;
  for (const int32_t e : problem.expert_of_row) real.push_back(e >= 0);
  judge(problem.spec.name, problem.out.to_host(), problem.reference(), problem.spec.n, real);
}

__global__ void count_differences_kernel(const uint16_t* x, const uint16_t* y, int64_t count,
                                         unsigned long long* differences) {
  unsigned long long mine = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    mine += x[i] != y[i];
  }
  if (mine > 0) atomicAdd(differences, mine);
}

std::vector<Case> all_cases() {
  constexpr auto plain = GroupedProduct::plain, swiglu = GroupedProduct::swiglu;
  return {
      {"plain 2880 x 2880", plain, kEdges, 2880, 2880},
      {"plain 1408 x 2048", plain, kEdges, 1408, 2048},
      {"plain 768 x 2048", plain, kSparse, 768, 2048},
      {"plain 2048 x 768", plain, kEven, 2048, 768},
      {"plain 256 x 64, one K block", plain, kEven, 256, 64},
      {"plain 72 x 72, tails of 8", plain, kSparse, 72, 72},
      {"plain 320 x 136", plain, kEdges, 320, 136},
      {"plain 256 x 7168", plain, kEdges, 256, 7168},
      {"plain, 100 experts", plain, random_counts(100, 150, 1), 512, 256},
      {"plain, 1024 experts", plain, random_counts(1024, 3, 2), 64, 64},
      {"plain, no rows at all", plain, {0, 0, 0}, 256, 128},
      {"plain, one row", plain, {0, 1, 0}, 256, 128},
      {"swiglu 2880 x 2880", swiglu, kEdges, 2880, 2880},
      {"swiglu 1408 x 2048", swiglu, kSparse, 1408, 2048},
      {"swiglu 768 x 2048", swiglu, kEdges, 768, 2048},
      {"swiglu 72 x 72, tails of 8", swiglu, kEven, 72, 72},
      {"swiglu 128 x 64, one K block", swiglu, kEdges, 128, 64},
      {"swiglu, 100 experts", swiglu, random_counts(100, 150, 3), 256, 512},
  };
}

// ---- tests ----

TEST(ExpertGroupedGemm, matches_fp64_reference) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(c.name);
    for (const int32_t cluster_size : {1, 2}) {
      Problem problem(c, seed);
      launch_grouped_gemm(problem.arguments(), options_of(cluster_size), workspace, nullptr);
      expect_no_expired_wait(workspace);
      check_against_reference(problem);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ExpertGroupedGemm, bitwise_equal_over_repeats_clusters_bands_and_grid_sizes) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  DeviceBuffer<unsigned long long> differences(1);
  for (const Case& c :
       {Case{"plain", GroupedProduct::plain, random_counts(24, 700, seed), 2048, 1408},
        Case{"swiglu", GroupedProduct::swiglu, random_counts(24, 700, seed), 1408, 512},
        Case{"edges", GroupedProduct::plain, kEdges, 2880, 320}}) {
    SCOPED_TRACE(c.name);
    Problem problem(c, seed);
    DeviceBuffer<__nv_bfloat16> first(problem.out.size());
    cudaMemset(differences.get(), 0, sizeof(unsigned long long));
    for (int repeat = 0; repeat < 200; ++repeat) {
      problem.out.poison();
      launch_grouped_gemm(problem.arguments(), varied(repeat), workspace, nullptr);
      if (repeat == 0) {
        cudaMemcpy(first.get(), problem.out.get(), first.bytes(), cudaMemcpyDeviceToDevice);
      } else {
        count_differences_kernel<<<264, 256>>>(reinterpret_cast<uint16_t*>(first.get()),
                                               reinterpret_cast<uint16_t*>(problem.out.get()),
                                               first.size(), differences.get());
      }
    }
    expect_no_expired_wait(workspace);
    EXPECT_EQ(0u, differences.to_host()[0]);
  }
}

// Every warp keeps every stage back for a different, random time: store() runs before the next
// release.
struct DelayedStore : expert::StoreEpilogue<> {
  template <class Values>
  __device__ void store(const Values& values, int32_t piece, const expert::Tile& tile,
                        const expert::EpilogueWarp& warp) const {
    uint32_t h = (tile.row_begin + warp.warp_row + piece * 7u) * 2654435761u + clock();
    h ^= h >> 15;
    __nanosleep(h % 5000);
    expert::StoreEpilogue<>::store(values, piece, tile, warp);
  }
};

// Gives up first: the warps that wait for its stages do so for as long.
struct NeverReady {
  __device__ bool wait(const expert::Tile& tile, device::WaitLimits limits) const {
    limits.limit_ns /= 2;
    return device::bounded_wait(
        [] { return false; }, [] { return uint64_t{0}; }, limits,
        {expert::kWaitReadiness, static_cast<uint64_t>(tile.row_begin / expert::BLOCK_M), 1});
  }
};

template <int kClusterSize, class Epilogue = expert::StoreEpilogue<>, class Readiness>
void launch_with(const Problem& problem, const Readiness& readiness,
                 const GroupedGemmOptions& options, const GroupedGemmWorkspace& workspace) {
  expert::GemmParams<expert::BandSchedule<kClusterSize>, Readiness, Epilogue, 1> params{};
  const GroupedGemmArguments x = problem.arguments();
  params.operands[0] = expert::describe_operands(x);
  params.epilogue.out = expert::describe_output(x);
  params.schedule = expert::describe_schedule<kClusterSize>(x, options);
  params.readiness = readiness;
  params.tickets = reinterpret_cast<expert::TicketCounter*>(workspace.words());
  params.limits = expert::describe_limits(options, workspace);
  // With two deferred pieces: the registers a kernel has whose other warps communicate.
  constexpr bool kFewRegisters = Epilogue::kNumDeferred == 2;
  using Config =
      expert::GemmConfig<kClusterSize, kFewRegisters ? 104 : 40, kFewRegisters ? 200 : 232>;
  expert::launch_gemm_kernel<Config>(params, options.reserve_sms, nullptr);
}

TEST(ExpertGroupedGemm, bitwise_equal_under_random_delays) {
  MOXIE_NEEDS_GPU();
  const uint64_t seed = new_seed();
  GroupedGemmWorkspace workspace;
  Problem problem({"delays", GroupedProduct::plain, random_counts(24, 700, seed), 768, 192}, seed);
  DeviceBuffer<__nv_bfloat16> first(problem.out.size());
  DeviceBuffer<unsigned long long> differences(1);
  cudaMemset(differences.get(), 0, sizeof(unsigned long long));
  GroupedGemmOptions options;
  options.limit_ns = 2'000'000'000;
  launch_grouped_gemm(problem.arguments(), options, workspace, nullptr);
  cudaMemcpy(first.get(), problem.out.get(), first.bytes(), cudaMemcpyDeviceToDevice);
  for (uint32_t repeat = 0; repeat < 4000; ++repeat) {
    problem.out.poison();
    const RandomDelay delay{static_cast<uint32_t>(seed) + repeat * 7919u};
    switch (repeat % 4) {
      case 0: launch_with<2>(problem, delay, options, workspace); break;
      case 1: launch_with<1>(problem, delay, options, workspace); break;
      case 2: launch_with<2, expert::StoreEpilogue<2>>(problem, delay, options, workspace); break;
      case 3: launch_with<2, DelayedStore>(problem, delay, options, workspace); break;
    }
    count_differences_kernel<<<264, 256>>>(reinterpret_cast<uint16_t*>(first.get()),
                                           reinterpret_cast<uint16_t*>(problem.out.get()),
                                           first.size(), differences.get());
  }
  expect_no_expired_wait(workspace);
  EXPECT_EQ(0u, differences.to_host()[0]);
}

TEST(ExpertGroupedGemm, a_block_that_never_comes_ends_in_a_record) {
  MOXIE_NEEDS_GPU();
  const Case c{"never", GroupedProduct::plain, kEven, 512, 256};
  for (const int32_t cluster_size : {1, 2}) {
    GroupedGemmWorkspace workspace;
    Problem problem(c, 1);
    GroupedGemmOptions options;
    options.limit_ns = 50'000'000;
    const auto begin = std::chrono::steady_clock::now();
    if (cluster_size == 1)
      launch_with<1>(problem, NeverReady{}, options, workspace);
    else
      launch_with<2>(problem, NeverReady{}, options, workspace);
    MOXIE_CUDA(cudaDeviceSynchronize());
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_LT(seconds, 5.0);
    EXPECT_EQ(1u, workspace.record()->written);
    EXPECT_EQ(expert::kWaitReadiness, workspace.record()->what);
    EXPECT_EQ(0u, workspace.record()->warp);
    for (const auto value : problem.out.to_host()) ASSERT_EQ(0xFFFF, __bfloat16_as_ushort(value));
  }
}

TEST(ExpertGroupedGemm, refuses_what_it_cannot_run) {
  MOXIE_NEEDS_GPU();
  GroupedGemmWorkspace workspace;
  Problem problem({"small", GroupedProduct::plain, {5}, 256, 64}, 1);
  GroupedGemmArguments x = problem.arguments();
  x.n = 100;
  EXPECT_THROW(launch_grouped_gemm(x, {}, workspace, nullptr), Error);
  GroupedGemmOptions options;
  options.reserve_sms = 4096;
  EXPECT_THROW(launch_grouped_gemm(problem.arguments(), options, workspace, nullptr), Error);
}

}  // namespace
}  // namespace moxie
