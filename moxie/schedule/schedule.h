// Stage 1, schedule: from the router's choices to "which rows do I get, and from where".
//
//   own rank:   expert_ids [T, K], route_weights [T, K]
//           ->  routes_sorted, weights_sorted, route_begin [E + 1]      in its heap: a stable
//           counting sort by expert
//   each rank:  every peer's route_begin of my experts  ->  BlockTable (and ChunkTable for
//   backward)
//
// Row order inside an expert is (rotated source, token, slot): fixed by the inputs, so every later
// sum has one order. Routes with id -1 are left out and their weights are never read. Reference
// body: schedule_ref.h.
#pragma once
#include <cstdint>

#include "moxie/core/problem.h"

namespace moxie::schedule {

struct Cost {
  std::int64_t flops = 0, local_bytes = 0, link_bytes = 0;
};

// Cost of one rank's sort and of reading the peers' counts. num_routes = T * K.
constexpr Cost cost(const Problem& p, std::int64_t num_routes) {
  const std::int64_t local_experts =
      p.num_experts / p.num_ranks + (p.num_experts % p.num_ranks != 0);
  return {0, num_routes * (4 + 4) * 2 + p.num_experts * 4,
          (p.num_ranks - 1) * (local_experts + 1) * 4};
}

}  // namespace moxie::schedule
