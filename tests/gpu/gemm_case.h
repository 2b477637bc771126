// What the tests of the stand-alone products share: random rows of experts whose padding is 0xFF =
// NaN, the judge of results against FP64, options that vary the order of the work.
//
// Everything lies in an unnamed namespace: kernels of a header are of the unit that includes it.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "gpu_test.h"
#include "moxie/expert/backward_gemm_launch_cuda.cuh"

namespace moxie {
namespace {

using expert::BackwardRows;
using expert::GroupedGemmOptions;
using expert::GroupedGemmWorkspace;
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

inline uint64_t new_seed() {
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

inline std::vector<int32_t> random_counts(size_t num_experts, int32_t most, uint64_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> counts(num_experts);
  for (auto& count : counts) count = static_cast<int32_t>(random() % (most + 1));
  return counts;
}

const std::vector<int32_t> kEdges = {0, 1, 127, 128, 129};
const std::vector<int32_t> kSparse = {0, 3, 0, 128, 1, 0, 0, 200};
const std::vector<int32_t> kEven = {256, 64, 384, 65};

// ---- launches ----

inline GroupedGemmOptions options_of(int32_t cluster_size) {
  GroupedGemmOptions options;
  options.cluster_size = cluster_size;
  options.limit_ns = 2'000'000'000;
  return options;
}

inline void expect_no_expired_wait(const GroupedGemmWorkspace& workspace) {
  MOXIE_CUDA(cudaDeviceSynchronize());
  ASSERT_EQ(0u, workspace.record()->written) << "a wait expired: site " << workspace.record()->what;
}

inline GroupedGemmOptions varied(int repeat) {
  GroupedGemmOptions options = options_of(1 + repeat % 2);
  options.band_blocks = 2 << (repeat / 2 % 5);
  options.reserve_sms = repeat % 3 == 2 ? 101 : 0;
  return options;
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

// ---- judge ----

inline float as_float(Bf16 x) { return __bfloat162float(x); }
inline float as_float(float x) { return x; }
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

inline std::vector<uint8_t> real_rows(const Rows& rows) {
  std::vector<uint8_t> real;
  for (const int32_t e : rows.expert_of_row) real.push_back(e >= 0);
  return real;
}

template <class T>
void expect_same_bits(const DeviceBuffer<T>& x, const std::vector<T>& wanted, const char* what) {
  const std::vector<T> got = x.to_host();
  EXPECT_EQ(0, std::memcmp(got.data(), wanted.data(), wanted.size() * sizeof(T))) << what;
}

}  // namespace
}  // namespace moxie
