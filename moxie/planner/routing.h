// Where tokens go, as counts: how many routes each rank sends to each expert. That is all the block
// tables need (row order inside an expert is by source), so a simulation of 512 ranks needs no
// tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "moxie/core/problem.h"

namespace moxie::planner {

struct RoutingCounts {
  std::vector<std::int64_t> tokens;       // [R]
  std::vector<std::int32_t> route_begin;  // [R, E + 1] as every rank's sort leaves it
  std::int64_t num_experts = 0;
  const std::int32_t* of_rank(std::int64_t r) const {
    return route_begin.data() + r * (num_experts + 1);
  }
  std::int64_t count(std::int64_t r, std::int64_t e) const {
    return of_rank(r)[e + 1] - of_rank(r)[e];
  }
};

enum class Skew : std::int32_t {
  even,     // every expert the same number of rows, as far as they divide
  uniform,  // K different experts per token, drawn with equal chances
  zipf,     // drawn with chances (1 + place)^-exponent, places shuffled by the seed
  hot,      // one expert takes slot 0 of every token
};
struct RoutingSpec {
  Skew skew = Skew::uniform;
  double exponent = 1.0;    // zipf
  std::int64_t expert = 0;  // hot
  std::uint64_t seed = 1;
};

// tokens: one number per rank. The same spec gives the same counts on every machine.
RoutingCounts make_routing(const Problem& problem, const std::vector<std::int64_t>& tokens,
                           const RoutingSpec& spec = {});
// Counts of given routes: ids[r] is rank r's [T, K], -1 = no route.
RoutingCounts count_routes(const Problem& problem, const std::vector<std::int64_t>& tokens,
                           const std::vector<std::vector<std::int32_t>>& ids);

// Share of rank `source`'s rows for local expert `e` of rank `home` whose token goes to no earlier
// expert there: what is pulled when each token crosses once per (token, rank). The other K - 1
// experts of a token are taken to be drawn with the source's own frequencies.
double fresh_share(const Problem& problem, const RoutingCounts& routing, std::int64_t source,
                   std::int64_t home, std::int64_t e);

}  // namespace moxie::planner
