// Tile sizes and counts: the arithmetic every role walks. One block is 128 rows of one expert; a
// GEMM task is one block times one column tile. The CPU twin uses the GPU's tile sizes, so that
// tasks, counters and orders are the same.
#pragma once
#include <cstdint>

#include "moxie/core/checked.h"

namespace moxie::pipeline {

inline constexpr std::int64_t kBlockRows = 128;  // rows of one block (BLOCK_M)
inline constexpr std::int64_t kFc1TileCols =
    128;  // columns of gate, and as many of up, in one FC1 tile
inline constexpr std::int64_t kWideDgradTileCols = 256;  // columns of I in a dgrad tile on the GPU;
                                                         // the twin takes those of FC1
inline constexpr std::int64_t kFc2TileCols = 256;    // columns of H in one FC2 or dX tile (BLOCK_N)
inline constexpr std::int64_t kWgradTileRows = 128;  // rows of one weight-gradient tile
inline constexpr std::int64_t kWgradTileCols = 256;  // columns of one weight-gradient tile
inline constexpr std::int64_t kDispatchUnitRows =
    16;                                         // rows a communication worker claims at a time
inline constexpr std::int64_t kTokenUnit = 16;  // tokens staged or merged at a time

// A half-open range of columns (or rows) of one tile, clipped at the end: tails are short tiles,
// never padding.
struct Range {
  std::int64_t begin = 0, end = 0;
  MOXIE_HD constexpr std::int64_t size() const { return end - begin; }
  MOXIE_HD friend constexpr bool operator==(Range a, Range b) {
    return a.begin == b.begin && a.end == b.end;
  }
};
MOXIE_HD constexpr Range tile_range(std::int64_t tile_idx, std::int64_t tile_size,
                                    std::int64_t total) {
  return {tile_idx * tile_size, min64((tile_idx + 1) * tile_size, total)};
}

MOXIE_HD constexpr std::int64_t num_blocks(std::int64_t rows) { return ceil_div(rows, kBlockRows); }
MOXIE_HD constexpr std::int64_t num_fc1_tiles(std::int64_t intermediate) {
  return ceil_div(intermediate, kFc1TileCols);
}
MOXIE_HD constexpr std::int64_t num_fc2_tiles(std::int64_t hidden) {
  return ceil_div(hidden, kFc2TileCols);
}
MOXIE_HD constexpr std::int64_t num_wgrad_tiles(std::int64_t rows, std::int64_t cols) {
  return ceil_div(rows, kWgradTileRows) * ceil_div(cols, kWgradTileCols);
}

// FC2 columns are grouped into slabs of whole tiles, the first ones one tile wider where they do
// not divide. (Slabs that get narrower shorten the last merge, which nothing hides, and gain
// nothing: docs/decisions/005-power-and-the-pass.md.)
MOXIE_HD constexpr Range slab_tiles(std::int64_t slab, std::int64_t num_slabs,
                                    std::int64_t num_tiles) {
  const std::int64_t base = quotient(num_tiles, num_slabs), extra = num_tiles - base * num_slabs;
  const std::int64_t begin = slab * base + min64(slab, extra);
  return {begin, begin + base + (slab < extra ? 1 : 0)};
}
MOXIE_HD constexpr std::int64_t slab_of_tile(std::int64_t tile, std::int64_t num_slabs,
                                             std::int64_t num_tiles) {
  const std::int64_t base = quotient(num_tiles, num_slabs), extra = num_tiles - base * num_slabs,
                     wide = extra * (base + 1);
  return tile < wide ? quotient(tile, base + 1) : extra + quotient(tile - wide, base);
}

}  // namespace moxie::pipeline
