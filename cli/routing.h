// Where the tokens go: synthetic routings (uniform, Zipf, one hot expert), routings from .npy
// files, and the router that computes them from the activations as a model does. Also the numbers
// that describe a routing's skew.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/tensors.h"

namespace moxie::cli {

enum class RoutingKind { router, uniform, zipf, hot, file };
struct Routing {
  RoutingKind kind = RoutingKind::router;
  double zipf_exponent = 1.0;
  std::int64_t hot_expert = 0;
  std::string file;  // "ids.npy" [sum T, K], or "ids_{rank}.npy" [T, K] each
};
// "uniform", "zipf:1.2", "hot:3", "router" or a file name that ends in .npy. Throws Usage.
Routing parse_routing(const std::string& text);
std::string to_string(const Routing& routing);

enum class RouterKind { softmax, sigmoid };

// Fills expert_ids and route_weights of every rank; x must be there for RoutingKind::router.
void make_routes(const Problem& problem, const Routing& routing, RouterKind router,
                 std::uint64_t seed, std::span<RankTensors> ranks);

struct RoutingStats {
  std::vector<std::int64_t> rows_per_expert;  // [E]
  std::vector<std::int64_t> rows_per_rank;    // [R]
  std::int64_t num_tokens = 0, num_rows = 0;
  std::int64_t idle_experts = 0, busiest_expert = 0;
  double busiest_over_mean = 0;
};
RoutingStats routing_stats(const Problem& problem, std::span<const RankTensors> ranks);

}  // namespace moxie::cli
