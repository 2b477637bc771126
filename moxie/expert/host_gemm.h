// Host GEMM tiles in FP32: oneDNN, or plain loops. The contract of the layer is that a row's bits
// depend on nothing but its own operands: not on how many rows share its tile, nor where it stands.
// Libraries break that for row counts that do not fill their register tile, so a self-check finds
// the smallest `row_quantum` (16 on AVX-512, 24 on AVX2) that keeps it, and callers pad rows to it
// (docs/decisions/001-onednn-row-quantum.md).
#pragma once
#include <cstdint>
#include <string>

#include "moxie/core/error.h"
#include "moxie/core/host_gemm.h"

namespace moxie::expert {

enum class Trans : std::int32_t { no, yes };

inline constexpr std::int64_t kMaxRowQuantum = 48;

class HostGemmEngine {
 public:
  // Throws Error(unavailable) if oneDNN is asked for and absent or not row-invariant.
  explicit HostGemmEngine(HostGemm choice);

  // C[m, n] = op(A)[m, k] * op(B)[k, n] + (accumulate ? C : 0). Row-major; op(A) = A^T where
  // trans_a is yes.
  void operator()(Trans trans_a, Trans trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                  const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                  bool accumulate, float* c, std::int64_t ldc) const;

  std::int64_t row_quantum() const { return row_quantum_; }
  const std::string& description() const { return description_; }

 private:
  bool onednn_ = false;
  std::int64_t row_quantum_ = 1;
  std::string description_;
};

}  // namespace moxie::expert
