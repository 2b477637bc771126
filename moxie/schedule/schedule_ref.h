// Plain bodies of the schedule stage; the contract is in schedule.h. One worker of a rank runs
// them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "moxie/core/problem.h"
#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tasks.h"

namespace moxie::schedule {

// The first route whose id is outside -1 .. E-1; route < 0 means none.
struct BadRoute {
  std::int64_t route = -1;
  std::int64_t id = 0;
};

// ids [num_routes] as the router wrote them -> ids32 [num_routes], checked.
template <class IdInt>
BadRoute narrow_ids(const IdInt* ids, std::int64_t num_routes, std::int64_t num_experts,
                    std::int32_t* ids32) {
  for (std::int64_t r = 0; r < num_routes; ++r) {
    if (ids[r] < -1 || ids[r] >= num_experts) return {r, static_cast<std::int64_t>(ids[r])};
    ids32[r] = static_cast<std::int32_t>(ids[r]);
  }
  return {};
}

// Stable counting sort by expert: entries of expert e are [route_begin[e], route_begin[e + 1]), in
// (token, slot) order.
inline void sort_routes(const std::int32_t* ids32,   // [num_routes]
                        const float* route_weights,  // [num_routes], unread where id = -1
                        std::int64_t num_routes, std::int64_t num_experts,
                        std::int32_t* routes_sorted,  // [num_routes]
                        float* weights_sorted,        // [num_routes]
                        std::int32_t* route_begin) {  // [E + 1]
  std::fill(route_begin, route_begin + num_experts + 1, 0);
  for (std::int64_t r = 0; r < num_routes; ++r) {
    if (ids32[r] >= 0) ++route_begin[ids32[r] + 1];
  }
  for (std::int64_t e = 0; e < num_experts; ++e) route_begin[e + 1] += route_begin[e];
  // route_begin[e] serves as the running end of expert e, then is shifted back into place.
  for (std::int64_t r = 0; r < num_routes; ++r) {
    if (ids32[r] < 0) continue;
    const std::int32_t at = route_begin[ids32[r]]++;
    routes_sorted[at] = static_cast<std::int32_t>(r);
    weights_sorted[at] = route_weights[r];
  }
  for (std::int64_t e = num_experts; e > 0; --e) route_begin[e] = route_begin[e - 1];
  route_begin[0] = 0;
}

// Fills the tables of rank `me`. peer_route_begin[p] is rank p's route_begin [E + 1]. Returns the
// table; num_blocks may exceed the plan's capacity, which the caller must judge before it touches
// any row.
inline pipeline::BlockTable build_blocks(const Problem& p, RankId me, std::int64_t num_tokens,
                                         std::span<const std::int32_t* const> peer_route_begin,
                                         std::int64_t* row_prefix,      // [E_local, R + 1]
                                         std::int32_t* source_begin,    // [E_local, R]
                                         std::int32_t* expert_block) {  // [E_local + 1]
  pipeline::BlockTable t;
  t.num_ranks = p.num_ranks;
  t.me = me;
  t.num_experts = num_local_experts(p.num_experts, p.num_ranks, me);
  t.shared_rows = p.shared.intermediate > 0 ? num_tokens : 0;
  t.shared_blocks = pipeline::num_blocks(t.shared_rows);
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
    block += pipeline::num_blocks(prefix[p.num_ranks]);
  }
  expert_block[t.num_experts] = static_cast<std::int32_t>(block);
  t.num_blocks = block;
  return t;
}

// Cuts every expert (the shared one first) into chunks of at most chunk_blocks blocks and numbers
// the tickets.
inline pipeline::BackwardStream build_chunks(const Problem& p, const Plan& plan,
                                             const pipeline::BlockTable& t,
                                             std::int32_t* chunk_block, std::int32_t* chunk_expert,
                                             std::int32_t* chunk_after, std::int64_t* step_ticket) {
  pipeline::ChunkTable c;
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
  if (p.shared.intermediate > 0) add_expert(pipeline::kSharedExpert, 0, t.shared_blocks);
  for (std::int64_t e = 0; e < t.num_experts; ++e) {
    add_expert(static_cast<std::int32_t>(e), t.expert_block[e], t.expert_block[e + 1]);
  }
  chunk_block[c.num_chunks] = static_cast<std::int32_t>(t.num_blocks);
  pipeline::BackwardStream s = pipeline::backward_stream(p, plan, c);
  step_ticket[0] = 0;
  for (std::int64_t step = 0; step < s.num_steps(); ++step) {
    const std::int64_t lead = step < c.num_chunks ? s.lead_tickets(step) : 0;
    const std::int64_t trail = step >= s.lag ? s.trail_tickets(step - s.lag) : 0;
    step_ticket[step + 1] = step_ticket[step] + lead + trail;
  }
  return s;
}

}  // namespace moxie::schedule
