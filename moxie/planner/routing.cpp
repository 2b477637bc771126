// Drawing counts. Weighted draws use an alias table and redraw duplicates, which is exact for
// "K different experts in draw order".
#include "moxie/planner/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moxie::planner {
namespace {

class Random {  // splitmix64: the same numbers everywhere
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t n) { return (next() >> 32) * n >> 32; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

class AliasTable {
 public:
  explicit AliasTable(const std::vector<double>& weights)
      : keep_(weights.size()), other_(weights.size()) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<std::size_t> small, large;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      keep_[i] = weights[i] * static_cast<double>(weights.size()) / total;
      other_[i] = static_cast<std::int32_t>(i);
      (keep_[i] < 1 ? small : large).push_back(i);
    }
    while (!small.empty() && !large.empty()) {
      const std::size_t s = small.back(), l = large.back();
      small.pop_back();
      other_[s] = static_cast<std::int32_t>(l);
      keep_[l] -= 1 - keep_[s];
      if (keep_[l] < 1) {
        large.pop_back();
        small.push_back(l);
      }
    }
  }
  std::int32_t draw(Random& random) const {
    const std::size_t i = random.below(keep_.size());
    return random.unit() < keep_[i] ? static_cast<std::int32_t>(i) : other_[i];
  }

 private:
  std::vector<double> keep_;
  std::vector<std::int32_t> other_;
};

std::vector<double> expert_weights(const Problem& p, const RoutingSpec& spec) {
  std::vector<double> weights(static_cast<std::size_t>(p.num_experts), 1.0);
  if (spec.skew != Skew::zipf) return weights;
  std::vector<std::size_t> place(weights.size());
  std::iota(place.begin(), place.end(), std::size_t{0});
  Random random(spec.seed ^ 0x5eed);
  for (std::size_t i = place.size(); i > 1; --i) std::swap(place[i - 1], place[random.below(i)]);
  for (std::size_t i = 0; i < place.size(); ++i)
    weights[place[i]] = std::pow(static_cast<double>(i + 1), -spec.exponent);
  return weights;
}

// counts[e] += routes of one rank
void draw_counts(const Problem& p, std::int64_t tokens, const RoutingSpec& spec,
                 const AliasTable& table, Random& random, std::int32_t* counts) {
  std::vector<std::int32_t> taken(static_cast<std::size_t>(p.num_experts), -1);  // by which token
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t slot = 0; slot < p.top_k; ++slot) {
      std::int32_t e = spec.skew == Skew::hot && slot == 0 ? static_cast<std::int32_t>(spec.expert)
                                                           : table.draw(random);
      // K different experts, as long as there are as many
      if (slot < p.num_experts) {
        while (taken[static_cast<std::size_t>(e)] == t) e = table.draw(random);
      }
      taken[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(t);
      ++counts[e];
    }
  }
}

RoutingCounts empty_counts(const Problem& p, const std::vector<std::int64_t>& tokens) {
  RoutingCounts r;
  r.tokens = tokens;
  r.num_experts = p.num_experts;
  r.route_begin.assign(tokens.size() * static_cast<std::size_t>(p.num_experts + 1), 0);
  return r;
}

void counts_to_begin(std::int32_t* counts, std::int64_t num_experts) {
  std::int32_t begin = 0;
  for (std::int64_t e = 0; e <= num_experts; ++e) {
    const std::int32_t count = e < num_experts ? counts[e] : 0;
    counts[e] = begin;
    begin += count;
  }
}

}  // namespace

RoutingCounts make_routing(const Problem& p, const std::vector<std::int64_t>& tokens,
                           const RoutingSpec& spec) {
  RoutingCounts r = empty_counts(p, tokens);
  const AliasTable table(expert_weights(p, spec));
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    std::int32_t* counts =
        r.route_begin.data() + rank * static_cast<std::size_t>(p.num_experts + 1);
    if (spec.skew == Skew::even) {
      for (std::int64_t i = 0; i < p.num_experts; ++i) {
        const std::int64_t routes = tokens[rank] * p.top_k,
                           e = (i + static_cast<std::int64_t>(rank)) % p.num_experts;
        counts[e] = static_cast<std::int32_t>(routes / p.num_experts +
                                              (i < routes % p.num_experts ? 1 : 0));
      }
    } else {
      Random random(spec.seed + 0x100000001b3ull * rank);
      draw_counts(p, tokens[rank], spec, table, random, counts);
    }
    counts_to_begin(counts, p.num_experts);
  }
  return r;
}

RoutingCounts count_routes(const Problem& p, const std::vector<std::int64_t>& tokens,
                           const std::vector<std::vector<std::int32_t>>& ids) {
  RoutingCounts r = empty_counts(p, tokens);
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    std::int32_t* counts =
        r.route_begin.data() + rank * static_cast<std::size_t>(p.num_experts + 1);
    for (const std::int32_t id : ids[rank]) {
      if (id >= 0) ++counts[id];
    }
    counts_to_begin(counts, p.num_experts);
  }
  return r;
}

double fresh_share(const Problem& p, const RoutingCounts& routing, std::int64_t source,
                   std::int64_t home, std::int64_t e) {
  const auto tokens = static_cast<double>(routing.tokens[static_cast<std::size_t>(source)]);
  if (tokens == 0) return 1;
  const std::int64_t first = expert_begin(p.num_experts, p.num_ranks, RankId{home});
  const double others = static_cast<double>(p.top_k - 1) / static_cast<double>(p.top_k);
  double share = 1;
  for (std::int64_t earlier = 0; earlier < e; ++earlier) {
    share *= std::max(
        0.0, 1 - others * static_cast<double>(routing.count(source, first + earlier)) / tokens);
  }
  return share;
}

}  // namespace moxie::planner
