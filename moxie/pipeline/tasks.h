// Tasks: the one ordered ticket stream of a pass. A compute worker takes the next ticket and runs
// the task it names, waiting inside if rows are missing. Deadlock freedom rests on one property,
// proven for every plan that `check` accepts (tests/test_pipeline_deadlock.cpp): a task waits only
// for rows or for tasks with earlier tickets.
//
//   forward, slabs:  shared FC1, shared FC2 | all FC1 by bands | FC2 slab 0 by bands | FC2 slab 1 |
//   ... forward, lag:    shared FC1, shared FC2 | FC1 band 0 | FC1 band 1 | .. | FC1 band s, FC2
//   band s - lag | .. backward:        step s:  dgrad of chunk s,  then dX and wgrad of chunk s -
//   lag; those of the last chunks come behind all dX (BackwardStream::postponed). Where the
//   backward's dgrad finds no saved z (on the GPU), the chunk's FC1 tiles, which remake it, come
//   before its dgrad tiles.
// Inside a band the column tile is the outer loop: the B operand stays in cache while the band's A
// rows are walked.
#pragma once
#include <cstdint>

#include "moxie/core/ids.h"
#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/plan.h"
#include "moxie/pipeline/tiles.h"

namespace moxie::pipeline {

enum class TaskKind : std::int32_t { fc1, fc2, dgrad, dx, wgrad };

struct Task {
  TaskKind kind = TaskKind::fc1;
  BlockId block;           // fc1, fc2, dgrad, dx
  std::int64_t chunk = 0;  // wgrad
  std::int64_t tile = 0;   // column tile; wgrad: index into WgradTiles
};

struct BlockTile {
  std::int64_t block, tile;
};
// Entry i of a raster over num_blocks x num_tiles in bands. Every other band backwards: it begins
// with the column tiles, and so the weights, that the one before it ended with.
MOXIE_HD constexpr BlockTile raster(std::int64_t i, std::int64_t num_blocks, std::int64_t band,
                                    std::int64_t num_tiles) {
  const std::int64_t bands = quotient(i, band * num_tiles), begin = bands * band,
                     in_band = i - begin * num_tiles;
  const std::int64_t height = min64(band, num_blocks - begin);
  const std::int64_t tile = quotient(in_band, height);
  return {begin + in_band - tile * height, bands % 2 == 0 ? tile : num_tiles - 1 - tile};
}

// Everything the forward stream depends on.
struct ForwardStream {
  TaskOrder order = TaskOrder::slabs;
  std::int64_t shared_blocks = 0, routed_blocks = 0;
  std::int64_t shared_fc1_tiles = 0, fc1_tiles = 0, fc2_tiles = 0;
  std::int64_t band = 1, lag = 1, num_slabs = 1;

  MOXIE_HD constexpr std::int64_t shared_tickets() const {
    return shared_blocks * (shared_fc1_tiles + fc2_tiles);
  }
  MOXIE_HD constexpr std::int64_t num_tickets() const {
    return shared_tickets() + routed_blocks * (fc1_tiles + fc2_tiles);
  }
  // slabs order: the first FC2 ticket of routed blocks
  MOXIE_HD constexpr std::int64_t fc1_end() const {
    return shared_tickets() + routed_blocks * fc1_tiles;
  }
  MOXIE_HD constexpr std::int64_t num_bands() const { return ceil_div(routed_blocks, band); }
  // lag order: first ticket (after the shared ones) of step s
  MOXIE_HD constexpr std::int64_t step_ticket(std::int64_t s) const {
    return min64(s * band, routed_blocks) * fc1_tiles +
           min64(max64(s - lag, 0) * band, routed_blocks) * fc2_tiles;
  }

  MOXIE_HD constexpr Task task(std::int64_t ticket) const {
    if (ticket < shared_tickets()) return shared_task(ticket);
    ticket -= shared_tickets();
    return order == TaskOrder::slabs ? slab_task(ticket) : lag_task(ticket);
  }

 private:
  MOXIE_HD constexpr Task shared_task(std::int64_t i) const {
    const std::int64_t fc1 = shared_blocks * shared_fc1_tiles;
    const bool first = i < fc1;
    const BlockTile at = first ? raster(i, shared_blocks, band, shared_fc1_tiles)
                               : raster(i - fc1, shared_blocks, band, fc2_tiles);
    return {first ? TaskKind::fc1 : TaskKind::fc2, BlockId{at.block}, 0, at.tile};
  }
  MOXIE_HD constexpr Task routed(TaskKind kind, BlockTile at) const {
    return {kind, BlockId{shared_blocks + at.block}, 0, at.tile};
  }
  MOXIE_HD constexpr Task slab_task(std::int64_t i) const {
    const std::int64_t fc1 = routed_blocks * fc1_tiles;
    if (i < fc1) return routed(TaskKind::fc1, raster(i, routed_blocks, band, fc1_tiles));
    i -= fc1;
    const Range tiles = slab_tiles(slab_of_tile(quotient(i, routed_blocks), num_slabs, fc2_tiles),
                                   num_slabs, fc2_tiles);
    BlockTile at = raster(i - tiles.begin * routed_blocks, routed_blocks, band, tiles.size());
    at.tile += tiles.begin;
    return routed(TaskKind::fc2, at);
  }
  MOXIE_HD constexpr Task lag_task(std::int64_t i) const {
    std::int64_t lo = 0, hi = num_bands() + lag;  // the step: last s with step_ticket(s) <= i
    while (hi - lo > 1) {
      const std::int64_t mid = lo + (hi - lo) / 2;
      if (step_ticket(mid) <= i)
        lo = mid;
      else
        hi = mid;
    }
    i -= step_ticket(lo);
    const std::int64_t lead_begin = min64(lo * band, routed_blocks);
    const std::int64_t lead_height = min64(band, routed_blocks - lead_begin);
    if (i < lead_height * fc1_tiles) {
      return routed(TaskKind::fc1,
                    {lead_begin + remainder(i, lead_height), quotient(i, lead_height)});
    }
    i -= lead_height * fc1_tiles;
    const std::int64_t trail_begin = (lo - lag) * band,
                       trail_height = min64(band, routed_blocks - trail_begin);
    return routed(TaskKind::fc2,
                  {trail_begin + remainder(i, trail_height), quotient(i, trail_height)});
  }
};

MOXIE_HD constexpr ForwardStream forward_stream(const Problem& p, const Plan& plan,
                                                const BlockTable& t) {
  ForwardStream s;
  s.order = plan.order;
  s.shared_blocks = t.shared_blocks;
  s.routed_blocks = t.num_blocks - t.shared_blocks;
  s.shared_fc1_tiles = num_fc1_tiles(p.shared.intermediate);
  s.fc1_tiles = num_fc1_tiles(p.intermediate);
  s.fc2_tiles = num_fc2_tiles(p.hidden);
  s.band = plan.band_blocks;
  s.lag = plan.lag_bands;
  s.num_slabs = plan.num_slabs;
  return s;
}

// The weight-gradient tiles of one expert: gate, then up ([I, H]), then down ([H, I]).
enum class WeightMatrix : std::int32_t { gate, up, down };
struct WgradTile {
  WeightMatrix matrix = WeightMatrix::gate;
  Range rows, cols;
};
struct WgradTiles {
  std::int64_t hidden = 0, intermediate = 0;
  MOXIE_HD constexpr std::int64_t fc1_tiles() const {
    return num_wgrad_tiles(intermediate, hidden);
  }
  MOXIE_HD constexpr std::int64_t size() const {
    return 2 * fc1_tiles() + num_wgrad_tiles(hidden, intermediate);
  }
  MOXIE_HD constexpr WgradTile tile(std::int64_t i) const {
    const std::int64_t n = fc1_tiles();
    const WeightMatrix m = i < n       ? WeightMatrix::gate
                           : i < 2 * n ? WeightMatrix::up
                                       : WeightMatrix::down;
    i -= static_cast<std::int64_t>(m) * n;
    const std::int64_t rows = m == WeightMatrix::down ? hidden : intermediate;
    const std::int64_t cols = m == WeightMatrix::down ? intermediate : hidden;
    const std::int64_t row_tiles = ceil_div(rows, kWgradTileRows);
    const std::int64_t col_tiles = ceil_div(cols, kWgradTileCols);
    const BlockTile at = raster(i, row_tiles, band(row_tiles, col_tiles), col_tiles);
    return {m, tile_range(at.block, kWgradTileRows, rows),
            tile_range(at.tile, kWgradTileCols, cols)};
  }
  // Row tiles per band: what runs at once should slide along the longer side of the gradient. 16
  // row tiles x 8 column tiles are about one wave of an H200, and square: up to 2.5 %
  // (docs/decisions/007-hopper-backward-loops.md).
  static MOXIE_HD constexpr std::int64_t band(std::int64_t row_tiles, std::int64_t col_tiles) {
    return row_tiles > 16 && col_tiles <= 12 ? 4 : 16;
  }
};

struct BackwardStream {
  ChunkTable chunks;
  std::int64_t shared_dgrad_tiles = 0, dgrad_tiles = 0, dx_tiles = 0;
  WgradTiles shared_wgrad, wgrad;
  std::int64_t lag = 1, band = 1;
  // So many chunks' weight gradients come last, chunk by chunk in steps of their own: what is
  // merged after the last dX overlaps them. Needs slots that are not used again.
  std::int64_t postponed = 1;
  // FC1 tiles per block that remake z (0: dgrad does it by itself), and the blocks that need none:
  // shared ones, or routed ones up to here.
  std::int64_t shared_fc1_tiles = 0, fc1_tiles = 0;
  std::int64_t saved_end = 0;  // a block of the pass

  MOXIE_HD constexpr bool shared(std::int64_t c) const {
    return chunks.chunk_expert[c] == kSharedExpert;
  }
  MOXIE_HD constexpr std::int64_t dgrad_tiles_of(std::int64_t c) const {
    return shared(c) ? shared_dgrad_tiles : dgrad_tiles;
  }
  MOXIE_HD constexpr const WgradTiles& wgrad_of(std::int64_t c) const {
    return shared(c) ? shared_wgrad : wgrad;
  }
  // Blocks of a chunk whose z is remade.
  MOXIE_HD constexpr Range remade_blocks(std::int64_t c) const {
    const Range b = chunks.blocks(c);
    return {shared(c) ? b.begin : min64(max64(b.begin, saved_end), b.end), b.end};
  }
  MOXIE_HD constexpr std::int64_t fc1_tiles_of(std::int64_t c) const {
    return shared(c) ? shared_fc1_tiles : fc1_tiles;
  }
  MOXIE_HD constexpr std::int64_t fc1_tickets(std::int64_t c) const {
    return fc1_tiles_of(c) == 0 ? 0 : remade_blocks(c).size() * fc1_tiles_of(c);
  }
  MOXIE_HD constexpr std::int64_t dgrad_tickets(std::int64_t c) const {
    return chunks.blocks(c).size() * dgrad_tiles_of(c);
  }
  MOXIE_HD constexpr std::int64_t dx_tickets(std::int64_t c) const {
    return chunks.blocks(c).size() * dx_tiles;
  }
  MOXIE_HD constexpr std::int64_t lead_tickets(std::int64_t c) const {
    return fc1_tickets(c) + dgrad_tickets(c);
  }
  // dX and wgrad tiles; trail_done[c] reaches this number when the chunk's ring slots are free
  // again
  MOXIE_HD constexpr std::int64_t trail_tickets(std::int64_t c) const {
    return dx_tickets(c) + wgrad_of(c).size();
  }
  MOXIE_HD constexpr std::int64_t num_steps() const {
    return chunks.num_chunks == 0 ? 0 : chunks.num_chunks + lag + postponed - 1;
  }
  // The chunks whose dX and whose weight gradients a step has; below 0 or past the last: none.
  MOXIE_HD constexpr std::int64_t dx_chunk(std::int64_t step) const { return step - lag; }
  MOXIE_HD constexpr std::int64_t wgrad_chunk(std::int64_t step) const {
    const std::int64_t c = step - lag, first_postponed = chunks.num_chunks - postponed;
    if (c < first_postponed) return c;
    // The first of them together with the last dX.
    return c < chunks.num_chunks - 1 ? -1 : c - (postponed - 1);
  }
  MOXIE_HD constexpr bool has_chunk(std::int64_t c) const {
    return c >= 0 && c < chunks.num_chunks;
  }
  MOXIE_HD constexpr std::int64_t step_tickets(std::int64_t step) const {
    return (has_chunk(step) ? lead_tickets(step) : 0) +
           (has_chunk(dx_chunk(step)) ? dx_tickets(dx_chunk(step)) : 0) +
           (has_chunk(wgrad_chunk(step)) ? wgrad_of(wgrad_chunk(step)).size() : 0);
  }
  MOXIE_HD constexpr std::int64_t num_tickets() const { return chunks.step_ticket[num_steps()]; }

  MOXIE_HD constexpr Task task(std::int64_t ticket) const {
    const std::int64_t s = last_not_above(chunks.step_ticket, num_steps(), ticket);
    return task(s, ticket - chunks.step_ticket[s]);
  }
  // Ticket i of a step.
  MOXIE_HD constexpr Task task(std::int64_t step, std::int64_t i) const {
    if (step < chunks.num_chunks) {
      if (i < fc1_tickets(step))
        return row_task(TaskKind::fc1, step, remade_blocks(step), fc1_tiles_of(step), i);
      i -= fc1_tickets(step);
      if (i < dgrad_tickets(step))
        return row_task(TaskKind::dgrad, step, chunks.blocks(step), dgrad_tiles_of(step), i);
      i -= dgrad_tickets(step);
    }
    const std::int64_t c = dx_chunk(step);
    if (has_chunk(c)) {
      if (i < dx_tickets(c)) return row_task(TaskKind::dx, c, chunks.blocks(c), dx_tiles, i);
      i -= dx_tickets(c);
    }
    return {TaskKind::wgrad, BlockId{}, wgrad_chunk(step), i};
  }

 private:
  MOXIE_HD constexpr Task row_task(TaskKind kind, std::int64_t chunk, Range blocks,
                                   std::int64_t tiles, std::int64_t i) const {
    const BlockTile at = raster(i, blocks.size(), band, tiles);
    return {kind, BlockId{blocks.begin + at.block}, chunk, at.tile};
  }
};

// What differs between backends.
struct BackwardTiling {
  std::int64_t dgrad_tile_cols = kFc1TileCols;  // decides when a block's dgrad tiles are all done
  bool remakes_z = false;                       // by FC1 tiles; else each dgrad tile for itself
  bool postpones = false;                       // the weight gradients of the last chunks
};
inline constexpr BackwardTiling kGpuBackwardTiling{kWideDgradTileCols, true, true};
// One in so many chunks is postponed. H200, rows of one of two ranks, ms for none, 8, 4, 3, 2:
// qwen3 4.06, 4.05, 4.03, 4.01, 4.03; gpt-oss 10.30, -, 10.19, 10.15, 10.13. Where z is made again,
// none: dgrad waits for z, and the weight gradients beside it are what there is to do meanwhile
// (both ranks' rows, none and 3: qwen3 6.19, 6.65; gpt-oss 16.43, 16.63; kimi 20.8, 20.4).
inline constexpr std::int64_t kChunksPerPostponed = 3;

MOXIE_HD constexpr BackwardStream backward_stream(const Problem& p, const Plan& plan,
                                                  const ChunkTable& chunks,
                                                  std::int64_t shared_blocks,
                                                  std::int64_t num_blocks,
                                                  BackwardTiling tiling = {}) {
  BackwardStream s;
  s.chunks = chunks;
  s.shared_dgrad_tiles = ceil_div(p.shared.intermediate, tiling.dgrad_tile_cols);
  s.dgrad_tiles = ceil_div(p.intermediate, tiling.dgrad_tile_cols);
  s.dx_tiles = num_fc2_tiles(p.hidden);
  s.shared_wgrad = {p.hidden, p.shared.intermediate};
  s.wgrad = {p.hidden, p.intermediate};
  s.lag = plan.lag_chunks;
  s.band = plan.band_blocks;
  if (tiling.postpones && plan.save != SavePolicy::none && plan.lag_chunks < chunks.num_chunks) {
    s.postponed = max64(chunks.num_chunks / kChunksPerPostponed, 1);
    // Nobody waits for slots that are not used again.
    while (s.postponed > 1 && chunks.chunk_block[chunks.num_chunks - s.postponed] <
                                  num_blocks - plan.backward_ring_blocks)
      --s.postponed;
  }
  if (tiling.remakes_z) {
    const bool saves = plan.save != SavePolicy::none;
    s.shared_fc1_tiles = saves ? 0 : num_fc1_tiles(p.shared.intermediate);
    s.fc1_tiles = num_fc1_tiles(p.intermediate);
    s.saved_end = shared_blocks + (saves ? plan.saved_rows / kBlockRows : 0);
  }
  return s;
}

// Communication work is claimed in small units from their own counters.
struct DispatchUnit {
  BlockId block;
  Range rows;  // inside the block; may be empty past the real count
};
MOXIE_HD constexpr std::int64_t num_dispatch_units(const BlockTable& t) {
  return (t.num_blocks - t.shared_blocks) * (kBlockRows / kDispatchUnitRows);
}
MOXIE_HD constexpr BlockId dispatch_block(const BlockTable& t, std::int64_t unit) {
  return BlockId{t.shared_blocks + unit / (kBlockRows / kDispatchUnitRows)};
}
// `rows` of the unit's block
MOXIE_HD constexpr DispatchUnit dispatch_unit(const BlockTable& t, std::int64_t unit,
                                              std::int64_t rows) {
  const std::int64_t begin = unit % (kBlockRows / kDispatchUnitRows) * kDispatchUnitRows;
  return {dispatch_block(t, unit), {min64(begin, rows), min64(begin + kDispatchUnitRows, rows)}};
}
MOXIE_HD constexpr DispatchUnit dispatch_unit(const BlockTable& t, std::int64_t unit) {
  return dispatch_unit(t, unit, t.rows(dispatch_block(t, unit)));
}

// Push dispatch: by block, so that whoever waits for a slot waits for rows that everybody has
// pushed before, then by destination, me first, then parts of this rank's rows in the block. Only
// parts with rows are counted.
MOXIE_HD constexpr std::int64_t num_push_units(Range rows) {
  return ceil_div(rows.size(), kDispatchUnitRows);
}
// `at`: the (block, rotated destination) whose unit it is
MOXIE_HD constexpr PushRows push_unit(const PushTable& t, std::int64_t unit, std::int64_t at) {
  PushRows u = t.rows(quotient(at, t.num_ranks), t.rotated_destination(remainder(at, t.num_ranks)));
  const std::int64_t skip = (unit - t.unit_begin[at]) * kDispatchUnitRows;
  u.rows = {u.rows.begin + skip, min64(u.rows.begin + skip + kDispatchUnitRows, u.rows.end)};
  u.sorted_idx += skip;
  return u;
}
MOXIE_HD constexpr PushRows push_unit(const PushTable& t, std::int64_t unit) {
  return push_unit(t, unit, last_not_above(t.unit_begin, t.num_blocks * t.num_ranks, unit));
}
// Where a block's counters of the destination are, and whose FC1 tiles free its slot: a block
// before the shared ones' end means nobody held it.
MOXIE_HD constexpr BlockId push_block(const PushTable& t, const PushRows& u) {
  return BlockId{t.shared_blocks[u.to.v] + u.block};
}

// Combine by communication workers: slab by slab, as the FC2 tiles come.
struct CombineUnit {
  std::int64_t slab;
  BlockId block;
  Range rows;  // inside the block; may be empty past the real count
};
MOXIE_HD constexpr std::int64_t num_combine_units(const BlockTable& t, std::int64_t num_slabs) {
  return num_dispatch_units(t) * num_slabs;
}
MOXIE_HD constexpr CombineUnit combine_unit(const BlockTable& t, std::int64_t unit) {
  const std::int64_t per_slab = num_dispatch_units(t);
  const DispatchUnit u = dispatch_unit(t, remainder(unit, per_slab));
  return {quotient(unit, per_slab), u.block, u.rows};
}
// The count at which slab_done says that all pieces of a slab are home.
MOXIE_HD constexpr std::int64_t num_slab_pieces(CombineMode combine, const BlockTable& t,
                                                Range slab_tiles) {
  return combine == CombineMode::comm_workers
             ? num_dispatch_units(t)
             : (t.num_blocks - t.shared_blocks) * slab_tiles.size();
}

struct MergeUnit {
  std::int64_t slab;
  Range tokens;
};
MOXIE_HD constexpr std::int64_t num_merge_units(std::int64_t num_tokens, std::int64_t num_slabs) {
  return ceil_div(num_tokens, kTokenUnit) * num_slabs;
}
MOXIE_HD constexpr MergeUnit merge_unit(std::int64_t unit, std::int64_t num_tokens) {
  const std::int64_t per_slab = ceil_div(num_tokens, kTokenUnit);
  return {quotient(unit, per_slab), tile_range(remainder(unit, per_slab), kTokenUnit, num_tokens)};
}

}  // namespace moxie::pipeline
