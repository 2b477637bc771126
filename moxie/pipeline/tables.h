// The tables of one rank and pass, from the numbers that every rank can read: BlockTable (which
// rows arrive, in which order) and the chunks of the backward stream. Plain bodies for the CPU twin
// and the simulator; the CUDA twin is schedule/schedule_cuda.cuh. Row order inside an expert is
// (rotated source, token, slot).
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "moxie/core/problem.h"
#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/plan.h"
#include "moxie/pipeline/tasks.h"

namespace moxie::pipeline {

// Fills the tables of rank `me`. peer_route_begin[p] is rank p's route_begin [E + 1]. Returns the
// table; num_blocks may exceed the plan's capacity, which the caller must judge before it touches
// any row.
inline BlockTable build_blocks(const Problem& p, RankId me, std::int64_t num_tokens,
                               std::span<const std::int32_t* const> peer_route_begin,
                               std::int64_t* row_prefix,      // [E_local, R + 1]
                               std::int32_t* source_begin,    // [E_local, R]
                               std::int32_t* expert_block) {  // [E_local + 1]
  BlockTable t;
  t.num_ranks = p.num_ranks;
  t.me = me;
  t.num_experts = num_local_experts(p.num_experts, p.num_ranks, me);
  t.shared_rows = p.shared.intermediate > 0 ? num_tokens : 0;
  t.shared_blocks = num_blocks(t.shared_rows);
  t.row_prefix = row_prefix;
  t.source_begin = source_begin;
  t.expert_block = expert_block;
  const std::int64_t first_expert = expert_begin(p.num_experts, p.num_ranks, me);
  std::int64_t block = t.shared_blocks;
  for (std::int64_t e = 0; e < t.num_experts; ++e) {
    std::int64_t* prefix = row_prefix + e * (p.num_ranks + 1);
    prefix[0] = 0;
    for (std::int64_t i = 0; i < p.num_ranks; ++i) {
      const std::int32_t* begin =
          peer_route_begin[static_cast<std::size_t>(t.rotated_source(i).v)] + first_expert + e;
      source_begin[e * p.num_ranks + i] = begin[0];
      prefix[i + 1] = prefix[i] + (begin[1] - begin[0]);
    }
    expert_block[e] = static_cast<std::int32_t>(block);
    block += num_blocks(prefix[p.num_ranks]);
  }
  expert_block[t.num_experts] = static_cast<std::int32_t>(block);
  t.num_blocks = block;
  return t;
}

// Cuts every expert (the shared one first) into chunks of at most chunk_blocks blocks and numbers
// the tickets.
inline BackwardStream build_chunks(const Problem& p, const Plan& plan, const BlockTable& t,
                                   std::int32_t* chunk_block, std::int32_t* chunk_expert,
                                   std::int32_t* chunk_after, std::int64_t* step_ticket,
                                   BackwardTiling tiling = {}) {
  ChunkTable c;
  c.chunk_block = chunk_block;
  c.chunk_expert = chunk_expert;
  c.chunk_after = chunk_after;
  c.step_ticket = step_ticket;
  std::int32_t last_of_many = -1;  // last chunk of the latest expert that has several
  auto add_expert = [&](std::int32_t expert, std::int64_t begin, std::int64_t end) {
    const bool many = end - begin > plan.chunk_blocks;
    std::int64_t b = begin;
    do {
      chunk_block[c.num_chunks] = static_cast<std::int32_t>(b);
      chunk_expert[c.num_chunks] = expert;
      chunk_after[c.num_chunks] = many ? last_of_many : -1;
      if (many) last_of_many = static_cast<std::int32_t>(c.num_chunks);
      ++c.num_chunks;
      b += plan.chunk_blocks;
    } while (b < end);
  };
  if (p.shared.intermediate > 0) add_expert(kSharedExpert, 0, t.shared_blocks);
  for (std::int64_t e = 0; e < t.num_experts; ++e) {
    add_expert(static_cast<std::int32_t>(e), t.expert_block[e], t.expert_block[e + 1]);
  }
  chunk_block[c.num_chunks] = static_cast<std::int32_t>(t.num_blocks);
  BackwardStream s = backward_stream(p, plan, c, t.shared_blocks, t.num_blocks, tiling);
  step_ticket[0] = 0;
  for (std::int64_t step = 0; step < s.num_steps(); ++step) {
    step_ticket[step + 1] = step_ticket[step] + s.step_tickets(step);
  }
  return s;
}

// peer_route_begin[p] is rank p's route_begin [E + 1], peer_tokens[p] its number of tokens. With
// more blocks on a destination than max_blocks the table stays without units: that rank objects,
// and no row moves.
inline PushTable build_push(const Problem& p, RankId me,
                            std::span<const std::int32_t* const> peer_route_begin,
                            std::span<const std::int32_t> peer_tokens, std::int64_t max_blocks,
                            std::int32_t* first_row,      // [E]
                            std::int32_t* expert_block,   // [E + R]
                            std::int32_t* shared_blocks,  // [R]
                            std::int32_t* unit_begin) {   // [max_blocks * R + 1]
  PushTable t;
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
        static_cast<std::int32_t>(p.shared.intermediate > 0 ? num_blocks(tokens) : 0);
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
      block += num_blocks(rows);
    }
    expert_block[end + to] = static_cast<std::int32_t>(block);
    t.num_blocks = std::max(t.num_blocks, block);
  }
  if (t.num_blocks > max_blocks) t.num_blocks = 0;
  unit_begin[0] = 0;
  for (std::int64_t i = 0; i < t.num_blocks * p.num_ranks; ++i) {
    const auto rows = t.rows(i / p.num_ranks, t.rotated_destination(i % p.num_ranks)).rows;
    unit_begin[i + 1] = unit_begin[i] + static_cast<std::int32_t>(num_push_units(rows));
  }
  return t;
}

// Split mode: where each phase of the ticket stream ends. Forward: shared FC1, shared FC2, FC1,
// FC2.
inline std::vector<std::int64_t> phase_ends(const ForwardStream& s) {
  return {s.shared_blocks * s.shared_fc1_tiles, s.shared_tickets(), s.fc1_end(), s.num_tickets()};
}
// Backward: all dgrad, then dX and wgrad.
inline std::vector<std::int64_t> phase_ends(const BackwardStream& s) {
  std::int64_t leads = 0;
  for (std::int64_t c = 0; c < s.chunks.num_chunks; ++c) leads += s.lead_tickets(c);
  return {leads, s.num_tickets()};
}

}  // namespace moxie::pipeline
