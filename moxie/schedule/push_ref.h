// Plain body that builds the table of push dispatch. The contract: every rank's counts in, and out
// where this rank's rows lie on each destination; the same arithmetic as schedule_ref.h's
// build_blocks, from the other side.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "moxie/core/problem.h"
#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/tasks.h"

namespace moxie::schedule {

// peer_route_begin[p] is rank p's route_begin [E + 1], peer_tokens[p] its number of tokens. With
// more blocks on a destination than max_blocks the table stays without units: that rank objects,
// and no row moves.
inline pipeline::PushTable build_push(const Problem& p, RankId me,
                                      std::span<const std::int32_t* const> peer_route_begin,
                                      std::span<const std::int32_t> peer_tokens,
                                      std::int64_t max_blocks,
                                      std::int32_t* first_row,      // [E]
                                      std::int32_t* expert_block,   // [E + R]
                                      std::int32_t* shared_blocks,  // [R]
                                      std::int32_t* unit_begin) {   // [max_blocks * R + 1]
  pipeline::PushTable t;
  t.num_ranks = p.num_ranks;
  t.me = me;
  t.num_experts = p.num_experts;
  t.route_begin = peer_route_begin[static_cast<std::size_t>(me.v)];
  t.first_row = first_row;
  t.expert_block = expert_block;
  t.shared_blocks = shared_blocks;
  t.unit_begin = unit_begin;
  for (std::int64_t to = 0; to < p.num_ranks; ++to) {
    const std::int64_t tokens = peer_tokens[static_cast<std::size_t>(to)];
    shared_blocks[to] =
        static_cast<std::int32_t>(p.shared.intermediate > 0 ? pipeline::num_blocks(tokens) : 0);
    std::int64_t block = 0;
    const std::int64_t begin = expert_begin(p.num_experts, p.num_ranks, RankId{to});
    const std::int64_t end = begin + num_local_experts(p.num_experts, p.num_ranks, RankId{to});
    for (std::int64_t e = begin; e < end; ++e) {
      std::int64_t rows = 0;
      for (std::int64_t i = 0; i < p.num_ranks; ++i) {  // the destination's rotated order
        const std::int64_t source = (to + i) % p.num_ranks;
        if (source == me.v) first_row[e] = static_cast<std::int32_t>(rows);
        const std::int32_t* counts = peer_route_begin[static_cast<std::size_t>(source)];
        rows += counts[e + 1] - counts[e];
      }
      expert_block[e + to] = static_cast<std::int32_t>(block);
      block += pipeline::num_blocks(rows);
    }
    expert_block[end + to] = static_cast<std::int32_t>(block);
    t.num_blocks = std::max(t.num_blocks, block);
  }
  if (t.num_blocks > max_blocks) t.num_blocks = 0;
  unit_begin[0] = 0;
  for (std::int64_t i = 0; i < t.num_blocks * p.num_ranks; ++i) {
    const auto rows = t.rows(i / p.num_ranks, t.rotated_destination(i % p.num_ranks)).rows;
    unit_begin[i + 1] = unit_begin[i] + static_cast<std::int32_t>(pipeline::num_push_units(rows));
  }
  return t;
}

}  // namespace moxie::schedule
