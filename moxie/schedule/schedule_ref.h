// Plain bodies of the schedule stage; the contract is in schedule.h. One worker of a rank runs
// them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "moxie/core/problem.h"
#include "moxie/pipeline/tables.h"

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

// The tables of a rank, shared with the simulator.
using pipeline::build_blocks;
using pipeline::build_chunks;

}  // namespace moxie::schedule
