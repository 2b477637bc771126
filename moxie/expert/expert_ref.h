// Plain bodies of the expert stage: tiles of FC1, FC2 and of their gradients. The contract, with
// every rounding point, is in expert.h. T is the storage type (float or bf16); arithmetic is FP32;
// GEMM tiles go through HostGemmEngine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "moxie/core/checked.h"
#include "moxie/core/dtype.h"
#include "moxie/expert/activation.h"
#include "moxie/expert/host_gemm.h"
#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tiles.h"

namespace moxie::expert {

inline constexpr std::int64_t kPaddedRows =
    pipeline::kBlockRows + kMaxRowQuantum;  // any quantum's padding fits

// FP32 scratch of one compute worker; sizes from `scratch_floats`.
struct TileScratch {
  float* a = nullptr;   // [kPaddedRows, max(H, I, I_s)]   widened or padded left operand
  float* b = nullptr;   // [256, max(H, I, I_s)]           widened right operand
  float* c0 = nullptr;  // [kPaddedRows, 256]              accumulators
  float* c1 = nullptr;  // [kPaddedRows, 256]
  float* z = nullptr;   // [128, 2 * 128] of any storage type: z of a tile that was not saved
};
constexpr std::int64_t kScratchCols = 256;
static_assert(pipeline::kFc2TileCols <= kScratchCols && pipeline::kWgradTileCols <= kScratchCols &&
              pipeline::kFc1TileCols <= kScratchCols &&
              pipeline::kWgradTileRows <= pipeline::kBlockRows);

constexpr std::int64_t scratch_floats(const Problem& p) {
  const std::int64_t wide = std::max({p.hidden, p.intermediate, p.shared.intermediate});
  return (kPaddedRows + kScratchCols) * wide + 2 * kPaddedRows * kScratchCols +
         2 * pipeline::kBlockRows * pipeline::kFc1TileCols;
}
inline TileScratch carve_scratch(const Problem& p, float* floats) {
  const std::int64_t wide = std::max({p.hidden, p.intermediate, p.shared.intermediate});
  TileScratch s;
  s.a = floats;
  s.b = s.a + kPaddedRows * wide;
  s.c0 = s.b + kScratchCols * wide;
  s.c1 = s.c0 + kPaddedRows * kScratchCols;
  s.z = s.c1 + kPaddedRows * kScratchCols;
  return s;
}

// A storage-typed matrix [rows, cols] with leading dimension ld.
template <class T>
struct Matrix {
  const T* data = nullptr;
  std::int64_t ld = 0;
};
struct FloatMatrix {
  const float* data = nullptr;
  std::int64_t ld = 0;
};

inline float widen(float v) { return v; }
inline float widen(bf16 v) { return static_cast<float>(v); }

// [rows, cols] as FP32: in place for float, widened into `scratch` for bf16.
template <class T>
FloatMatrix as_float(Matrix<T> m, std::int64_t rows, std::int64_t cols, float* scratch) {
  if constexpr (std::is_same_v<T, float>) {
    return {m.data, m.ld};
  } else {
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* from = m.data + i * m.ld;
      float* to = scratch + i * cols;
      for (std::int64_t j = 0; j < cols; ++j) to[j] = widen(from[j]);
    }
    return {scratch, cols};
  }
}

// Left operand of a row GEMM, padded with zero rows to the engine's quantum, so that the bits of a
// row do not depend on its company. Rows past the real count are never read.
template <class T>
FloatMatrix padded_rows(const HostGemmEngine& gemm, Matrix<T> m, std::int64_t rows,
                        std::int64_t cols, float* scratch) {
  const std::int64_t padded = align_up(rows, gemm.row_quantum());
  if (std::is_same_v<T, float> && padded == rows) return as_float(m, rows, cols, scratch);
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* from = m.data + i * m.ld;
    float* to = scratch + i * cols;
    for (std::int64_t j = 0; j < cols; ++j) to[j] = widen(from[j]);
  }
  std::fill(scratch + rows * cols, scratch + padded * cols, 0.0f);
  return {scratch, cols};
}

// c [rows, n] = rows_in [rows, k] * weight^T, weight [n, k] (trans_b) or weight [k, n].
template <class T>
void row_gemm(const HostGemmEngine& gemm, FloatMatrix rows_in, std::int64_t rows, Trans trans_b,
              Matrix<T> weight, std::int64_t n, std::int64_t k, bool accumulate, float* b_scratch,
              float* c) {
  const FloatMatrix b =
      trans_b == Trans::yes ? as_float(weight, n, k, b_scratch) : as_float(weight, k, n, b_scratch);
  gemm(Trans::no, trans_b, align_up(rows, gemm.row_quantum()), n, k, rows_in.data, rows_in.ld,
       b.data, b.ld, accumulate, c, n);
}

// Weights of one expert; shared experts have no biases.
template <class T>
struct ExpertMatrices {
  const T* gate = nullptr;       // [I, H]
  const T* up = nullptr;         // [I, H]
  const T* down = nullptr;       // [H, I]
  const T* gate_bias = nullptr;  // [I] or null
  const T* up_bias = nullptr;    // [I] or null
  const T* down_bias = nullptr;  // [H] or null
  std::int64_t hidden = 0, intermediate = 0;
};

// FC1 without activation: s.c0 = g, s.c1 = u, both [rows, cols.size()], biases added.
template <class T>
void fc1_accumulate(const HostGemmEngine& gemm, const ExpertMatrices<T>& w, Matrix<T> x,
                    std::int64_t rows, pipeline::Range cols, const TileScratch& s) {
  const std::int64_t n = cols.size(), h = w.hidden;
  const FloatMatrix a = padded_rows(gemm, x, rows, h, s.a);
  row_gemm<T>(gemm, a, rows, Trans::yes, {w.gate + cols.begin * h, h}, n, h, false, s.b, s.c0);
  row_gemm<T>(gemm, a, rows, Trans::yes, {w.up + cols.begin * h, h}, n, h, false, s.b, s.c1);
  if (w.gate_bias == nullptr) return;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      s.c0[i * n + j] += widen(w.gate_bias[cols.begin + j]);
      s.c1[i * n + j] += widen(w.up_bias[cols.begin + j]);
    }
  }
}

// A column tile of z = [gate, up] in storage precision; both pointers stand at the tile's first
// column.
template <class T>
struct ZTile {
  T* gate = nullptr;
  T* up = nullptr;
  std::int64_t ld = 0;
};
// The tile inside a saved block, whose rows are [gate (I), up (I)].
template <class T>
ZTile<T> saved_z_tile(T* z_block, std::int64_t intermediate, pipeline::Range cols) {
  return {z_block + cols.begin, z_block + intermediate + cols.begin, 2 * intermediate};
}

template <class T>
void store_z(const TileScratch& s, std::int64_t rows, std::int64_t cols, const ZTile<T>& z) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      z.gate[i * z.ld + j] = T(s.c0[i * cols + j]);
      z.up[i * z.ld + j] = T(s.c1[i * cols + j]);
    }
  }
}

// FC1 epilogue: hidden[i, cols] = round(w_i * act(g, u)).
template <class T, class WeightOf>
void fc1_epilogue(const Activation& act, const TileScratch& s, std::int64_t rows,
                  pipeline::Range cols, std::int64_t intermediate, WeightOf weight_of,
                  T* hidden) {  // hidden [rows, I]
  const std::int64_t n = cols.size();
  for (std::int64_t i = 0; i < rows; ++i) {
    const float w = weight_of(i);
    T* to = hidden + i * intermediate + cols.begin;
    for (std::int64_t j = 0; j < n; ++j)
      to[j] = T(w * activate(act, s.c0[i * n + j], s.c1[i * n + j]));
  }
}

// FC2: s.c0 [rows, cols.size()] = hidden Wd^T + w * bd.
template <class T, class WeightOf>
void fc2_accumulate(const HostGemmEngine& gemm, const ExpertMatrices<T>& w, Matrix<T> hidden,
                    std::int64_t rows, pipeline::Range cols, WeightOf weight_of,
                    const TileScratch& s) {
  const std::int64_t n = cols.size(), k = w.intermediate;
  const FloatMatrix a = padded_rows(gemm, hidden, rows, k, s.a);
  row_gemm<T>(gemm, a, rows, Trans::yes, {w.down + cols.begin * k, k}, n, k, false, s.b, s.c0);
  if (w.down_bias == nullptr) return;
  for (std::int64_t i = 0; i < rows; ++i) {
    const float weight = weight_of(i);
    for (std::int64_t j = 0; j < n; ++j)
      s.c0[i * n + j] += weight * widen(w.down_bias[cols.begin + j]);
  }
}

// s.c0 [rows, cols.size()] = dA' = dY Wd, unweighted.
template <class T>
void dgrad_accumulate(const HostGemmEngine& gemm, const ExpertMatrices<T>& w, Matrix<T> dy,
                      std::int64_t rows, pipeline::Range cols, const TileScratch& s) {
  const FloatMatrix a = padded_rows(gemm, dy, rows, w.hidden, s.a);
  row_gemm<T>(gemm, a, rows, Trans::no, {w.down + cols.begin, w.intermediate}, cols.size(),
              w.hidden, false, s.b, s.c0);
}

// Slot rows of one block that dgrad writes and dX and wgrad read. All [128, ld] with ld = max(I,
// I_s).
template <class T>
struct DgradRows {
  T* dgate = nullptr;
  T* dup = nullptr;
  T* wa = nullptr;
  std::int64_t ld = 0;
};

// dgrad epilogue from dA' (s.c0) and z: dgate, dup, wA, and this column tile's part of the
// router-weight gradient.
template <class T, class WeightOf>
void dgrad_epilogue(const Activation& act, const TileScratch& s, std::int64_t rows,
                    pipeline::Range cols, const ZTile<const T>& z, WeightOf weight_of,
                    const DgradRows<T>& out, float* dw_partial,
                    std::int64_t dw_ld) {  // [rows] with stride dw_ld
  const std::int64_t n = cols.size();
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* gate = z.gate + i * z.ld;
    const T* up = z.up + i * z.ld;
    const float w = weight_of(i);
    float row_sum = 0.0f;
    for (std::int64_t j = 0; j < n; ++j) {
      const float da = s.c0[i * n + j];
      const ActivationGrad g = activate_grad(act, widen(gate[j]), widen(up[j]));
      row_sum += da * g.value;
      out.dgate[i * out.ld + cols.begin + j] = T(w * da * g.d_gate);
      out.dup[i * out.ld + cols.begin + j] = T(w * da * g.d_up);
      out.wa[i * out.ld + cols.begin + j] = T(w * g.value);
    }
    dw_partial[i * dw_ld] = row_sum;
  }
}

// Router-weight gradient of row i: the tiles' parts in column order, plus the bias term dY . bd.
template <class T>
float router_grad(const float* dw_partial, std::int64_t num_tiles, const T* dy_row,
                  const ExpertMatrices<T>& w) {
  float sum = 0.0f;
  for (std::int64_t t = 0; t < num_tiles; ++t) sum += dw_partial[t];
  if (w.down_bias != nullptr) {
    for (std::int64_t h = 0; h < w.hidden; ++h) sum += widen(dy_row[h]) * widen(w.down_bias[h]);
  }
  return sum;
}

// s.c0 [rows, cols.size()] = dgate Wg + dup Wu.
template <class T>
void dx_accumulate(const HostGemmEngine& gemm, const ExpertMatrices<T>& w, const DgradRows<T>& d,
                   std::int64_t rows, pipeline::Range cols, const TileScratch& s) {
  const std::int64_t n = cols.size(), k = w.intermediate;
  const FloatMatrix gate = padded_rows<T>(gemm, {d.dgate, d.ld}, rows, k, s.a);
  row_gemm<T>(gemm, gate, rows, Trans::no, {w.gate + cols.begin, w.hidden}, n, k, false, s.b, s.c0);
  const FloatMatrix up = padded_rows<T>(gemm, {d.dup, d.ld}, rows, k, s.a);
  row_gemm<T>(gemm, up, rows, Trans::no, {w.up + cols.begin, w.hidden}, n, k, true, s.b, s.c0);
}

// acc [128, 256] += left^T right over the rows of one block; left [rows, lrange], right [rows,
// rrange]. Called block by block in row order, so the sum does not depend on how blocks are grouped
// into chunks.
template <class T>
void wgrad_accumulate(const HostGemmEngine& gemm, Matrix<T> left, pipeline::Range lrange,
                      Matrix<T> right, pipeline::Range rrange, std::int64_t rows,
                      const TileScratch& s, float* acc) {
  const FloatMatrix a = as_float<T>({left.data + lrange.begin, left.ld}, rows, lrange.size(), s.a);
  const FloatMatrix b =
      as_float<T>({right.data + rrange.begin, right.ld}, rows, rrange.size(), s.b);
  gemm(Trans::yes, Trans::no, lrange.size(), rrange.size(), rows, a.data, a.ld, b.data, b.ld, true,
       acc, rrange.size());
}

// acc[j] += sum over rows of scale(i) * m[i, range.begin + j], in row order.
template <class T, class ScaleOf>
void column_sums(Matrix<T> m, pipeline::Range range, std::int64_t rows, ScaleOf scale_of,
                 float* acc) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const float scale = scale_of(i);
    for (std::int64_t j = 0; j < range.size(); ++j)
      acc[j] += scale * widen(m.data[i * m.ld + range.begin + j]);
  }
}

}  // namespace moxie::expert
