// What tasks cost: tensor cycles and memory bytes of each tile, from shapes and the device record.
// Products take rows in halves of a block (64), columns and K as the tile has them; the overhead
// per tile is the record's. Weights count once per band and expert, rows once per band: within a
// band the L2 cache serves the rest.
#pragma once
#include <cstdint>

#include "moxie/core/problem.h"
#include "moxie/pipeline/tasks.h"
#include "moxie/planner/device.h"
#include "moxie/planner/simulate.h"

namespace moxie::planner {

struct TileCost {
  double cycles = 0;  // of one SM
  double bytes = 0;   // of the rank's memory
};

// Memory traffic of products alone, at a device's clock_burst_mhz: what this model counts for FC1,
// SwiGLU and FC2 of the kimi-k2.5 slice, 8.6 GB beside 11.15 M cycles of 132 SMs.
inline constexpr double kProductsGbPerTflop = 1.42;

struct CostModel {
  double elem = 2;                // bytes of a stored element
  double weight_elem = 2;         // ... of a weight
  double flops_per_cycle = 4096;  // of one SM, in the storage type
  double overhead = 0;            // cycles per tile of a kernel of its own, and of wgrad
  double fused_overhead = 0;      // ... of FC1, FC2 and dX in one kernel
  double stored_overhead = 0;     // ... of 128 x 256 of dgrad, or of z made again
  double hidden = 0;              // H
  bool fused_activation = true;

  static CostModel make(const Problem& p, const Machine& m, const Mechanisms& mechanisms,
                        ExecMode mode) {
    CostModel c;
    c.elem = static_cast<double>(size_bytes(p.dtype));
    c.flops_per_cycle = m[Field::bf16_flops_per_sm_clock];
    if (p.dtype == DType::f32) c.flops_per_cycle /= 2;  // as if TF32
    c.overhead = m[Field::tile_overhead_cycles];
    // Nothing goes on beside the tiles of separate kernels, and nobody waits for them.
    const bool fused = mode == ExecMode::fused && !mechanisms.separate_kernels;
    c.fused_overhead = fused ? m[Field::fused_tile_cycles] : c.overhead;
    c.stored_overhead = mechanisms.separate_kernels ? c.overhead : m[Field::stored_tile_cycles];
    c.hidden = static_cast<double>(p.hidden);
    c.fused_activation = mechanisms.fused_activation;
    c.weight_elem = c.elem;
    if (mechanisms.mxfp8) {
      c.flops_per_cycle = m[Field::fp8_flops_per_sm_clock];
      c.weight_elem = 33.0 / 32;
    }
    return c;
  }

  static double half_blocks(std::int64_t rows) {
    return static_cast<double>(align_up(rows, pipeline::kBlockRows / 2));
  }
  double product(std::int64_t rows, double cols, double k) const {
    return 2 * half_blocks(rows) * cols * k / flops_per_cycle;
  }

  // `sharers`: blocks of the same expert in the band, which use the same weights.
  TileCost fc1(std::int64_t rows, std::int64_t width, std::int64_t sharers, bool save_z) const {
    const double cols = 2 * pipeline::kFc1TileCols, n = static_cast<double>(rows);
    const double tiles = static_cast<double>(pipeline::num_fc1_tiles(width));
    TileCost c{product(rows, cols, hidden) + fused_overhead, 0};
    c.bytes = weight_elem * cols * hidden / static_cast<double>(sharers) +
              elem * (n * hidden / tiles + n * pipeline::kFc1TileCols);
    if (save_z) c.bytes += elem * n * cols;
    if (!fused_activation) c.bytes += 2 * elem * n * cols;
    return c;
  }
  TileCost fc2(std::int64_t rows, std::int64_t width, std::int64_t sharers) const {
    const double cols = pipeline::kFc2TileCols, k = static_cast<double>(width),
                 n = static_cast<double>(rows);
    const double tiles =
        static_cast<double>(pipeline::num_fc2_tiles(static_cast<std::int64_t>(hidden)));
    return {product(rows, cols, k) + fused_overhead,
            weight_elem * cols * k / static_cast<double>(sharers) + elem * n * k / tiles};
  }
  // dA' = dY Wd over 128 columns of I (a GPU's tile has 256); z remade where it was not saved
  TileCost dgrad(std::int64_t rows, std::int64_t width, std::int64_t sharers, bool has_z) const {
    const double cols = pipeline::kFc1TileCols, n = static_cast<double>(rows);
    TileCost c{product(rows, cols, hidden) + stored_overhead / 2, 0};
    const double tiles = static_cast<double>(pipeline::num_fc1_tiles(width));
    c.bytes = elem * (cols * hidden / static_cast<double>(sharers) + n * hidden / tiles +
                      3 * n * cols + 2 * n * cols);
    if (!has_z) {
      c.cycles += product(rows, 2 * cols, hidden) + stored_overhead;
      c.bytes += elem * (2 * cols * hidden / static_cast<double>(sharers) + n * hidden / tiles);
    }
    return c;
  }
  TileCost dx(std::int64_t rows, std::int64_t width, std::int64_t sharers) const {
    return fc2(rows, 2 * width, sharers);
  }
  // One 128 x 256 tile over a chunk's rows. Running sums between chunks are FP32 in memory.
  TileCost wgrad(std::int64_t rows, const pipeline::WgradTile& t, bool first, bool last) const {
    const double m = static_cast<double>(t.rows.size()), n = static_cast<double>(t.cols.size()),
                 k = static_cast<double>(align_up(max64(rows, 1), 64));
    TileCost c{
        2.0 * pipeline::kWgradTileRows * pipeline::kWgradTileCols * k / flops_per_cycle + overhead,
        elem * static_cast<double>(rows) * (m + n) / 4};  // 4: tiles share operands in L2
    c.bytes += m * n * (first ? 0 : 4) + m * n * (last ? elem : 4);
    return c;
  }
};

}  // namespace moxie::planner
