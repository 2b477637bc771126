// Blocks: which rows a rank received and where each of them comes from. Built by schedule/ once per
// pass, read by every other stage. Block ids count the shared expert's blocks of local tokens
// first, then the local experts in order, each expert starting on a block boundary. Real counts are
// kept: padding exists only as addresses.
#pragma once
#include <cstdint>

#include "moxie/core/ids.h"
#include "moxie/core/problem.h"
#include "moxie/pipeline/tiles.h"

namespace moxie::pipeline {

inline constexpr std::int32_t kSharedExpert = -1;  // "expert" of the shared blocks in tables

// Source of one row: a place in the sorted route list of a rank.
struct RowSource {
  RankId rank;
  std::int64_t sorted_idx = 0;
};

// Index of the last entry of begin[0 .. n) that is <= value (entries ascend; begin[0] <= value).
template <class Int>
MOXIE_HD constexpr std::int64_t last_not_above(const Int* begin, std::int64_t n,
                                               std::int64_t value) {
  std::int64_t lo = 0, hi = n;  // answer in [lo, hi)
  while (hi - lo > 1) {
    const std::int64_t mid = lo + (hi - lo) / 2;
    if (begin[mid] <= value)
      lo = mid;
    else
      hi = mid;
  }
  return lo;
}

struct BlockTable {
  std::int64_t num_ranks = 0;
  RankId me;
  std::int64_t num_experts = 0;  // local
  std::int64_t shared_rows = 0;  // local tokens if there is a shared expert
  std::int64_t shared_blocks = 0;
  std::int64_t num_blocks = 0;  // shared and routed
  const std::int64_t* row_prefix =
      nullptr;  // [E_local, R + 1] rows of the expert from earlier sources
  const std::int32_t* source_begin =
      nullptr;  // [E_local, R] where the expert begins in the source's sorted routes
  const std::int32_t* expert_block = nullptr;  // [E_local + 1] first block of each expert

  MOXIE_HD constexpr bool is_shared(BlockId b) const { return b.v < shared_blocks; }
  MOXIE_HD constexpr std::int64_t routed_idx(BlockId b) const { return b.v - shared_blocks; }

  MOXIE_HD constexpr LocalExpertId expert(BlockId b) const {
    return LocalExpertId{last_not_above(expert_block, num_experts, b.v)};
  }
  MOXIE_HD constexpr std::int64_t expert_rows(LocalExpertId e) const {
    return row_prefix[e.v * (num_ranks + 1) + num_ranks];
  }
  MOXIE_HD constexpr std::int64_t rows(BlockId b) const {
    if (is_shared(b)) return min64(kBlockRows, shared_rows - b.v * kBlockRows);
    return rows(b, expert(b));
  }
  // The same for a routed block whose expert is known.
  MOXIE_HD constexpr std::int64_t rows(BlockId b, LocalExpertId e) const {
    return min64(kBlockRows, expert_rows(e) - (b.v - expert_block[e.v]) * kBlockRows);
  }
  // Sources are taken in rotated order, me first, so that the ranks do not all read from rank 0 at
  // once.
  MOXIE_HD constexpr RankId rotated_source(std::int64_t i) const {
    return RankId{remainder(me.v + i, num_ranks)};
  }

  // Row `row_in_expert` of a local expert. Row order: (rotated source, token, slot).
  MOXIE_HD constexpr RowSource source(LocalExpertId e, std::int64_t row_in_expert) const {
    const std::int64_t* prefix = row_prefix + e.v * (num_ranks + 1);
    const std::int64_t i = last_not_above(prefix, num_ranks, row_in_expert);
    return {rotated_source(i), source_begin[e.v * num_ranks + i] + (row_in_expert - prefix[i])};
  }
};

// The rows that this rank pushes into one block of a destination.
struct PushRows {
  RankId to;
  std::int64_t block = 0;       // routed blocks of the destination, from 0
  Range rows;                   // inside the block
  std::int64_t sorted_idx = 0;  // of the first one, in this rank's sorted routes
};

// Push dispatch: where this rank's rows lie on every destination. Every rank can tell from all
// ranks' route_begin. Built by schedule/ once per pass.
struct PushTable {
  std::int64_t num_ranks = 0;
  RankId me;
  std::int64_t num_experts = 0;               // E
  std::int64_t num_blocks = 0;                // the most routed blocks of a destination
  const std::int32_t* route_begin = nullptr;  // [E + 1] own
  const std::int32_t* first_row =
      nullptr;  // [E] the place inside the expert of this rank's first row
  const std::int32_t* expert_block =
      nullptr;  // [E + R] of each destination: first routed block of its experts, and the end
  const std::int32_t* shared_blocks =
      nullptr;  // [R] of each destination: its counters count them first
  const std::int32_t* unit_begin =
      nullptr;  // [num_blocks * R + 1] first unit of (block, rotated destination)

  MOXIE_HD constexpr RankId rotated_destination(std::int64_t i) const {
    return RankId{remainder(me.v + i, num_ranks)};
  }
  MOXIE_HD constexpr const std::int32_t* expert_block_of(RankId to) const {
    return expert_block + expert_begin(num_experts, num_ranks, to) + to.v;
  }
  MOXIE_HD constexpr std::int64_t num_units() const { return unit_begin[num_blocks * num_ranks]; }

  // This rank's rows of one block of a destination; none past its last block.
  MOXIE_HD constexpr PushRows rows(std::int64_t block, RankId to) const {
    const std::int32_t* begin = expert_block_of(to);
    const std::int64_t n = num_local_experts(num_experts, num_ranks, to);
    if (block >= begin[n]) return {to, block, {0, 0}, 0};
    const std::int64_t local = last_not_above(begin, n, block);
    const std::int64_t e = expert_begin(num_experts, num_ranks, to) + local;
    const std::int64_t at = first_row[e] - (block - begin[local]) * kBlockRows;  // in this block
    const std::int64_t end = at + route_begin[e + 1] - route_begin[e];
    const Range rows{min64(max64(at, 0), kBlockRows), min64(max64(end, 0), kBlockRows)};
    return {to, block, rows, route_begin[e] + rows.begin - at};
  }
};

// A minibatch is a run of blocks that share one readiness counter.
struct Minibatch {
  Range blocks;
  std::int64_t rows = 0;  // real routed rows: the count at which the counter is complete
};
MOXIE_HD constexpr std::int64_t minibatch_of(const BlockTable& t, BlockId b,
                                             std::int64_t minibatch_blocks) {
  return quotient(t.routed_idx(b), minibatch_blocks);
}
MOXIE_HD constexpr Minibatch minibatch(const BlockTable& t, std::int64_t idx,
                                       std::int64_t minibatch_blocks) {
  Minibatch m;
  m.blocks = tile_range(idx, minibatch_blocks, t.num_blocks - t.shared_blocks);
  m.blocks.begin += t.shared_blocks;
  m.blocks.end += t.shared_blocks;
  for (std::int64_t b = m.blocks.begin; b < m.blocks.end; ++b) m.rows += t.rows(BlockId{b});
  return m;
}

// Backward hands rows to the weight gradients chunk by chunk: consecutive blocks of one expert. An
// expert without rows has one empty chunk, whose tasks write its zero gradients.
struct ChunkTable {
  std::int64_t num_chunks = 0;
  const std::int32_t* chunk_block = nullptr;   // [num_chunks + 1] first block
  const std::int32_t* chunk_expert = nullptr;  // [num_chunks] local expert or kSharedExpert
  const std::int32_t* chunk_after =
      nullptr;  // [num_chunks] chunk whose weight gradients must be done first, or -1
  const std::int64_t* step_ticket =
      nullptr;  // [num_chunks + lag + 1] first ticket of each step (tasks.h)

  MOXIE_HD constexpr Range blocks(std::int64_t c) const {
    return {chunk_block[c], chunk_block[c + 1]};
  }
  MOXIE_HD constexpr std::int64_t chunk_of(BlockId b) const {
    return last_not_above(chunk_block, num_chunks, b.v);
  }
  MOXIE_HD constexpr bool first_of_expert(std::int64_t c) const {
    return c == 0 || chunk_expert[c - 1] != chunk_expert[c];
  }
  MOXIE_HD constexpr bool last_of_expert(std::int64_t c) const {
    return c + 1 == num_chunks || chunk_expert[c + 1] != chunk_expert[c];
  }
};

}  // namespace moxie::pipeline
