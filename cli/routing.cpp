// Synthetic routings draw K distinct experts per token with the exponential-clock method (expert e
// wins with probability proportional to its weight); the router multiplies x with a random matrix
// and takes the top K.
#include "cli/routing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "cli/errors.h"
#include "cli/npy.h"
#include "cli/options.h"
#include "cli/random.h"

namespace moxie::cli {
namespace {

constexpr double kRouterGain = 2.0;  // standard deviation of the logits for x of unit variance

struct Choice {
  double key = 0;
  std::int64_t expert = 0;
};

// The K largest keys first; equal keys by expert number, so that the choice is the same everywhere.
void keep_top_k(std::vector<Choice>& choices, std::int64_t top_k) {
  std::partial_sort(choices.begin(), choices.begin() + top_k, choices.end(),
                    [](const Choice& a, const Choice& b) {
                      return a.key != b.key ? a.key > b.key : a.expert < b.expert;
                    });
}

void set_id(HostTensor& ids, std::size_t index, std::int64_t expert) {
  if (ids.dtype == DType::i64) {
    ids.as<std::int64_t>()[index] = expert;
  } else {
    ids.as<std::int32_t>()[index] = static_cast<std::int32_t>(expert);
  }
}

// Positive weights that sum to one over the slots of a token.
void random_route_weights(std::uint64_t seed, std::int64_t first_token, std::int64_t top_k,
                          HostTensor& weights) {
  const Random random(seed, "route_weights");
  const std::span<float> out = weights.as<float>();
  const auto K = static_cast<std::size_t>(top_k);
  for (std::size_t begin = 0; begin < out.size(); begin += K) {
    double sum = 0;
    for (std::size_t slot = 0; slot < K; ++slot) {
      const double w =
          0.1 + 0.9 * random.uniform(static_cast<std::uint64_t>(first_token) * K + begin + slot);
      out[begin + slot] = static_cast<float>(w);
      sum += w;
    }
    for (std::size_t slot = 0; slot < K; ++slot)
      out[begin + slot] = static_cast<float>(out[begin + slot] / sum);
  }
}

// probability[e] need not be normalised. `forced` >= 0 takes slot 0.
void random_ids(const std::vector<double>& probability, std::int64_t forced, std::uint64_t seed,
                std::int64_t first_token, std::int64_t top_k, HostTensor& ids) {
  const auto E = static_cast<std::int64_t>(probability.size());
  std::vector<Choice> choices(probability.size());
  for (std::int64_t token = 0; token < ids.shape.dim[0]; ++token) {
    const Random random(seed, "routing", first_token + token);
    for (std::int64_t e = 0; e < E; ++e) {
      const auto i = static_cast<std::size_t>(e);
      const double clock =
          std::log(random.uniform(static_cast<std::uint64_t>(e))) / probability[i];  // largest wins
      choices[i] = {e == forced ? 1.0 : clock, e};
    }
    keep_top_k(choices, top_k);
    for (std::int64_t slot = 0; slot < top_k; ++slot) {
      set_id(ids, static_cast<std::size_t>(token * top_k + slot),
             choices[static_cast<std::size_t>(slot)].expert);
    }
  }
}

std::vector<double> expert_probabilities(const Problem& problem, const Routing& routing,
                                         std::uint64_t seed) {
  std::vector<double> probability(static_cast<std::size_t>(problem.num_experts), 1.0);
  if (routing.kind != RoutingKind::zipf) return probability;
  std::vector<std::size_t> order(probability.size());  // which expert is how popular
  std::iota(order.begin(), order.end(), std::size_t{0});
  const Random random(seed, "zipf order");
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i, i)]);
  for (std::size_t i = 0; i < order.size(); ++i) {
    probability[order[i]] = std::pow(static_cast<double>(i + 1), -routing.zipf_exponent);
  }
  return probability;
}

void load_ids(const Problem& problem, const std::string& pattern, std::span<RankTensors> ranks) {
  const std::size_t at = pattern.find("{rank}");
  NpyArray all;
  std::int64_t num_tokens = 0;
  for (const RankTensors& rank : ranks) num_tokens += rank.x.shape.dim[0];
  if (at == std::string::npos) all = read_npy(pattern, "<i4,<i8", {num_tokens, problem.top_k});
  std::size_t begin = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    HostTensor& ids = ranks[r].expert_ids;
    if (at != std::string::npos) {
      const std::string path = std::string(pattern).replace(at, 6, std::to_string(r));
      all = read_npy(path, "<i4,<i8", {ids.shape.dim[0], problem.top_k});
      begin = 0;
    }
    const bool wide = all.descr == "<i8";
    for (std::int64_t i = 0; i < ids.shape.num_elements(); ++i, ++begin) {
      std::int64_t id = 0;
      std::int32_t narrow = 0;
      if (wide) {
        std::memcpy(&id, all.bytes.data() + begin * 8, 8);
      } else {
        std::memcpy(&narrow, all.bytes.data() + begin * 4, 4);
        id = narrow;
      }
      // What the library finds too; but an id beyond 32 bits must not be cut to a legal one here.
      if (id < -1 || id >= problem.num_experts) {
        throw Failure(
            fmt::format("{}: expert id {} of rank {} token {} slot {} is outside -1 .. {}", pattern,
                        id, r, i / problem.top_k, i % problem.top_k, problem.num_experts - 1));
      }
      set_id(ids, static_cast<std::size_t>(i), id);
    }
  }
}

// logits = x . W^T with W of unit variance; then the K best, weighted as the model does.
template <class T>
void route_tokens(const Problem& problem, RouterKind kind, std::uint64_t seed, RankTensors& rank) {
  const auto H = static_cast<std::size_t>(problem.hidden),
             E = static_cast<std::size_t>(problem.num_experts);
  const auto K = static_cast<std::size_t>(problem.top_k);
  std::vector<float> matrix(E * H);  // [E, H]
  Random(seed, "router")
      .fill(std::span<float>(matrix), static_cast<float>(kRouterGain / std::sqrt(problem.hidden)));
  const std::span<const T> x = std::as_const(rank.x).as<T>();
  const std::span<float> weights = rank.route_weights.as<float>();
  std::vector<float> row(H);
  std::vector<Choice> choices(E);
  for (std::int64_t token = 0; token < rank.x.shape.dim[0]; ++token) {
    const std::size_t first = static_cast<std::size_t>(token);
    for (std::size_t h = 0; h < H; ++h) row[h] = static_cast<float>(x[first * H + h]);
    double total = 0;
    for (std::size_t e = 0; e < E; ++e) {
      std::array<float, 8> lanes{};  // fixed order of addition
      for (std::size_t h = 0; h < H; h += 8) {
        for (std::size_t lane = 0; lane < 8; ++lane)
          lanes[lane] += row[h + lane] * matrix[e * H + h + lane];
      }
      const double logit = std::accumulate(lanes.begin(), lanes.end(), 0.0);
      choices[e] = {kind == RouterKind::softmax ? std::exp(logit) : 1 / (1 + std::exp(-logit)),
                    static_cast<std::int64_t>(e)};
    }
    keep_top_k(choices, problem.top_k);
    for (std::size_t slot = 0; slot < K; ++slot) total += choices[slot].key;
    for (std::size_t slot = 0; slot < K; ++slot) {
      set_id(rank.expert_ids, first * K + slot, choices[slot].expert);
      weights[first * K + slot] = static_cast<float>(choices[slot].key / total);
    }
  }
}

}  // namespace

Routing parse_routing(const std::string& text) {
  Routing routing;
  if (text.ends_with(".npy")) {
    routing.kind = RoutingKind::file;
    routing.file = text;
    return routing;
  }
  static constexpr std::array<std::string_view, 4> kWords = {"router", "uniform", "zipf", "hot"};
  const std::size_t colon = text.find(':');
  const std::string word = text.substr(0, colon);
  routing.kind = static_cast<RoutingKind>(parse_choice("--routing", word, kWords));
  if (colon == std::string::npos) return routing;
  const std::string value = text.substr(colon + 1);
  switch (routing.kind) {
    case RoutingKind::zipf:
      routing.zipf_exponent = parse_real("--routing zipf exponent", value, 0);
      break;
    case RoutingKind::hot:
      routing.hot_expert = parse_integer("--routing hot expert", value, kInt32);
      break;
    default:
      throw Usage(
          fmt::format("--routing is '{}'; only zipf:EXPONENT and hot:EXPERT take a value", text));
  }
  return routing;
}

std::string to_string(const Routing& routing) {
  switch (routing.kind) {
    case RoutingKind::router: return "router";
    case RoutingKind::uniform: return "uniform";
    case RoutingKind::zipf: return fmt::format("zipf:{}", routing.zipf_exponent);
    case RoutingKind::hot: return fmt::format("hot:{}", routing.hot_expert);
    case RoutingKind::file: return routing.file;
  }
  return "?";
}

void make_routes(const Problem& problem, const Routing& routing, RouterKind router,
                 std::uint64_t seed, std::span<RankTensors> ranks) {
  if (routing.kind == RoutingKind::hot && routing.hot_expert >= problem.num_experts) {
    throw Usage(fmt::format(
        "--routing hot expert is {}; the layer has {} experts, the nearest legal value is {}",
        routing.hot_expert, problem.num_experts, problem.num_experts - 1));
  }
  const std::vector<double> probability = expert_probabilities(problem, routing, seed);
  const std::int64_t forced = routing.kind == RoutingKind::hot ? routing.hot_expert : -1;
  std::int64_t first_token = 0;
  for (RankTensors& rank : ranks) {
    if (routing.kind == RoutingKind::router) {
      problem.dtype == DType::f32 ? route_tokens<float>(problem, router, seed, rank)
                                  : route_tokens<bf16>(problem, router, seed, rank);
    } else {
      random_route_weights(seed, first_token, problem.top_k, rank.route_weights);
      if (routing.kind != RoutingKind::file) {
        random_ids(probability, forced, seed, first_token, problem.top_k, rank.expert_ids);
      }
    }
    first_token += rank.x.shape.dim[0];
  }
  if (routing.kind == RoutingKind::file) load_ids(problem, routing.file, ranks);
}

RoutingStats routing_stats(const Problem& problem, std::span<const RankTensors> ranks) {
  RoutingStats stats;
  stats.rows_per_expert.resize(static_cast<std::size_t>(problem.num_experts));
  stats.rows_per_rank.resize(static_cast<std::size_t>(problem.num_ranks));
  for (const RankTensors& rank : ranks) {
    stats.num_tokens += rank.x.shape.dim[0];
    for (std::int64_t i = 0; i < rank.expert_ids.shape.num_elements(); ++i) {
      const auto expert = static_cast<std::int64_t>(value_at(rank.expert_ids, i));
      if (expert < 0 || expert >= problem.num_experts)
        continue;  // the library reports the illegal ones
      ++stats.num_rows;
      ++stats.rows_per_expert[static_cast<std::size_t>(expert)];
      const RankId home = expert_home(problem.num_experts, problem.num_ranks, ExpertId{expert});
      ++stats.rows_per_rank[static_cast<std::size_t>(home.v)];
    }
  }
  const auto busiest = std::max_element(stats.rows_per_expert.begin(), stats.rows_per_expert.end());
  stats.busiest_expert = busiest - stats.rows_per_expert.begin();
  stats.idle_experts = std::count(stats.rows_per_expert.begin(), stats.rows_per_expert.end(), 0);
  if (stats.num_rows > 0) {
    stats.busiest_over_mean =
        static_cast<double>(*busiest * problem.num_experts) / static_cast<double>(stats.num_rows);
  }
  return stats;
}

}  // namespace moxie::cli
