// oneDNN's sgemm behind HostGemmEngine, its row-invariance self-check, and the plain loops.
#include "moxie/expert/host_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <vector>

#ifdef MOXIE_HAS_ONEDNN
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#endif

#include "moxie/core/checked.h"

namespace moxie::expert {
namespace {

constexpr std::int64_t kPlainDepth = 64, kPlainCols = 64;  // panel of B that stays in L1

// Every element sums over k in ascending order, one multiply and one add at a time, whatever m and
// n are.
void plain_gemm(Trans trans_a, Trans trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                const float* a, std::int64_t lda, const float* b, std::int64_t ldb, bool accumulate,
                float* c, std::int64_t ldc) {
  if (!accumulate) {
    for (std::int64_t i = 0; i < m; ++i) std::fill(c + i * ldc, c + i * ldc + n, 0.0f);
  }
  float panel[kPlainDepth * kPlainCols];
  float row[kPlainCols];
  for (std::int64_t k0 = 0; k0 < k; k0 += kPlainDepth) {
    const std::int64_t depth = std::min(kPlainDepth, k - k0);
    for (std::int64_t j0 = 0; j0 < n; j0 += kPlainCols) {
      const std::int64_t cols = std::min(kPlainCols, n - j0);
      for (std::int64_t kk = 0; kk < depth; ++kk) {
        for (std::int64_t j = 0; j < cols; ++j) {
          panel[kk * kPlainCols + j] =
              trans_b == Trans::yes ? b[(j0 + j) * ldb + k0 + kk] : b[(k0 + kk) * ldb + j0 + j];
        }
      }
      for (std::int64_t i = 0; i < m; ++i) {
        std::copy_n(c + i * ldc + j0, cols, row);
        for (std::int64_t kk = 0; kk < depth; ++kk) {
          const float x = trans_a == Trans::yes ? a[(k0 + kk) * lda + i] : a[i * lda + k0 + kk];
          for (std::int64_t j = 0; j < cols; ++j) row[j] += x * panel[kk * kPlainCols + j];
        }
        std::copy_n(row, cols, c + i * ldc + j0);
      }
    }
  }
}

#ifdef MOXIE_HAS_ONEDNN
void onednn_gemm(Trans trans_a, Trans trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                 const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                 bool accumulate, float* c, std::int64_t ldc) {
  // The calling worker is one thread of ours: oneDNN must not start a team of its own. The setting
  // is per thread.
  thread_local const bool single = (omp_set_num_threads(1), true);
  (void)single;
  dnnl_sgemm(trans_a == Trans::yes ? 'T' : 'N', trans_b == Trans::yes ? 'T' : 'N', m, n, k, 1.0f, a,
             lda, b, ldb, accumulate ? 1.0f : 0.0f, c, ldc);
}

// Do the bits of a row survive a change of its tile's row count and of its place, at multiples of
// `quantum` rows?
bool rows_invariant(std::int64_t quantum) {
  constexpr std::int64_t kRows = 144;  // a multiple of every candidate
  std::mt19937 rng(12345);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (const std::int64_t k : {64, 100, 513, 2048}) {
    for (const std::int64_t n : {64, 128, 256}) {
      std::vector<float> a(static_cast<std::size_t>(kRows * k)), b(static_cast<std::size_t>(n * k));
      for (float& v : a) v = uniform(rng);
      for (float& v : b) v = uniform(rng);
      for (const Trans trans_b : {Trans::no, Trans::yes}) {
        const std::int64_t ldb = trans_b == Trans::yes ? k : n;
        std::vector<float> whole(static_cast<std::size_t>(kRows * n)), part(whole.size());
        onednn_gemm(Trans::no, trans_b, kRows, n, k, a.data(), k, b.data(), ldb, false,
                    whole.data(), n);
        for (std::int64_t m = quantum; m < kRows; m += quantum) {
          for (const std::int64_t first :
               {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, kRows - m}) {
            if (first + m > kRows) continue;
            onednn_gemm(Trans::no, trans_b, m, n, k, a.data() + first * k, k, b.data(), ldb, false,
                        part.data(), n);
            if (std::memcmp(part.data(), whole.data() + first * n,
                            static_cast<std::size_t>(m * n) * 4) != 0)
              return false;
          }
        }
      }
    }
  }
  return true;
}

// Smallest quantum that passes, 0 if none does. Once per process.
std::int64_t onednn_row_quantum() {
  static const std::int64_t quantum = [] {
    const int threads = omp_get_max_threads();
    std::int64_t found = 0;
    for (const std::int64_t candidate : {std::int64_t{16}, std::int64_t{24}, kMaxRowQuantum}) {
      if (rows_invariant(candidate)) {
        found = candidate;
        break;
      }
    }
    omp_set_num_threads(threads);  // the caller's own OpenMP code keeps its team
    return found;
  }();
  return quantum;
}
#endif

}  // namespace

HostGemmEngine::HostGemmEngine(HostGemm choice) {
  description_ = "plain loops";
#ifdef MOXIE_HAS_ONEDNN
  if (choice == HostGemm::plain) return;
  const dnnl_version_t* v = dnnl_version();
  row_quantum_ = onednn_row_quantum();
  if (row_quantum_ > 0) {
    onednn_ = true;
    description_ = fmt::format("oneDNN {}.{}.{}, rows padded to {}", v->major, v->minor, v->patch,
                               row_quantum_);
    return;
  }
  row_quantum_ = 1;
  description_ = fmt::format(
      "plain loops (oneDNN {}.{}.{} failed the row-invariance self-check on this processor)",
      v->major, v->minor, v->patch);
  if (choice == HostGemm::onednn) {
    throw Error(ErrorCode::unavailable,
                fmt::format("host GEMM onednn was asked for, but oneDNN {}.{}.{} gives a row "
                            "different bits in different "
                            "tiles on this processor; nearest legal value HostGemm::plain",
                            v->major, v->minor, v->patch));
  }
#else
  if (choice == HostGemm::onednn) {
    throw Error(ErrorCode::unavailable,
                "host GEMM onednn was asked for, but this build has no oneDNN; nearest legal value "
                "HostGemm::plain");
  }
#endif
}

void HostGemmEngine::operator()(Trans trans_a, Trans trans_b, std::int64_t m, std::int64_t n,
                                std::int64_t k, const float* a, std::int64_t lda, const float* b,
                                std::int64_t ldb, bool accumulate, float* c,
                                std::int64_t ldc) const {
#ifdef MOXIE_HAS_ONEDNN
  if (onednn_) return onednn_gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
#endif
  plain_gemm(trans_a, trans_b, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
}

}  // namespace moxie::expert
