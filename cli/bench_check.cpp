// The check before the clock: y of a few tokens, written from the definition in FP64, expert by
// expert so that each expert's matrices are fetched once. Rows of a product run on all cores.
#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "cli/bench_target.h"
#include "cli/check_math.h"

namespace moxie::cli {
namespace {

struct Route {
  std::size_t sample;
  double weight;
};
struct Sample {
  std::size_t rank;
  std::int64_t token;
  Row x, y;  // [H]; y: the sum of the experts seen so far
};

// `num_elements` BF16 values from `first` on, as they lie in the tensor.
HostTensor fetch(const BenchTarget& target, const ConstTensorView& view, std::int64_t first,
                 std::int64_t num_elements) {
  HostTensor tensor(view.dtype, {num_elements});
  const std::int64_t item = size_bytes(view.dtype);
  target.copy_to_host(tensor.bytes.data(), static_cast<const std::byte*>(view.data) + first * item,
                      tensor.bytes.size());
  return tensor;
}

template <class Work>
void for_each_row(std::int64_t num_rows, Work&& work) {
  const auto cores = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
  std::vector<std::jthread> threads;
  for (std::int64_t core = 0; core < cores; ++core) {
    threads.emplace_back([&, core] {
      for (std::int64_t row = num_rows * core / cores; row < num_rows * (core + 1) / cores; ++row)
        work(row);
    });
  }
}

void add_expert(const BenchTarget& target, std::int64_t expert, const std::vector<Route>& routes,
                std::vector<Sample>& samples) {
  const Problem& p = target.problem;
  const std::int64_t H = p.hidden, I = p.intermediate;
  const RankId home = expert_home(p.num_experts, p.num_ranks, ExpertId{expert});
  const std::int64_t local = expert - expert_begin(p.num_experts, p.num_ranks, home);
  const Weights& weights = target.inputs[static_cast<std::size_t>(home.v)].weights;
  const HostTensor gate = fetch(target, weights.gate, local * I * H, I * H);
  const HostTensor up = fetch(target, weights.up, local * I * H, I * H);
  const HostTensor down = fetch(target, weights.down, local * H * I, H * I);
  std::vector<Row> hidden(routes.size(), Row(static_cast<std::size_t>(I)));
  for_each_row(I, [&](std::int64_t i) {
    const Row g = load(gate, i * H, H), u = load(up, i * H, H);
    for (std::size_t r = 0; r < routes.size(); ++r) {
      const Row& x = samples[routes[r].sample].x;
      hidden[r][static_cast<std::size_t>(i)] =
          activate(p.activation, p.dtype, dot(g, x), dot(u, x)).value;
    }
  });
  for_each_row(H, [&](std::int64_t h) {
    const Row d = load(down, h * I, I);
    for (std::size_t r = 0; r < routes.size(); ++r)
      samples[routes[r].sample].y[static_cast<std::size_t>(h)] +=
          routes[r].weight * dot(d, hidden[r]);
  });
}

}  // namespace

double max_relative_l2(const BenchTarget& target, std::int64_t tokens_per_rank) {
  const Problem& p = target.problem;
  const std::int64_t H = p.hidden, K = p.top_k;
  std::vector<Sample> samples;
  std::map<std::int64_t, std::vector<Route>> routes;  // by expert
  for (std::size_t rank = 0; rank < target.inputs.size(); ++rank) {
    const std::int64_t T = target.inputs[rank].x.shape.dim[0];
    const std::int64_t count = std::min(T, tokens_per_rank);
    for (std::int64_t n = 0; n < count; ++n) {  // the first, the last, and some between
      const std::int64_t token = count == 1 ? 0 : n * (T - 1) / (count - 1);
      const HostTensor x = fetch(target, target.inputs[rank].x, token * H, H);
      for (std::int64_t slot = token * K; slot < (token + 1) * K; ++slot) {
        const auto expert =
            static_cast<std::int64_t>(value_at(target.routes[rank].expert_ids, slot));
        if (expert < 0) continue;
        routes[expert].push_back(
            {samples.size(), value_at(target.routes[rank].route_weights, slot)});
      }
      samples.push_back({rank, token, load(x, 0, H), Row(static_cast<std::size_t>(H))});
    }
  }
  for (const auto& [expert, of_expert] : routes) add_expert(target, expert, of_expert, samples);
  double worst = 0;
  for (const Sample& sample : samples) {
    const HostTensor got = fetch(target, target.outputs[sample.rank].y, sample.token * H, H);
    Row difference = load(got, 0, H);
    add_scaled(difference, -1, sample.y);
    const double error = std::sqrt(dot(difference, difference));
    const double size = std::sqrt(dot(sample.y, sample.y));
    const double relative = error == 0 ? 0 : error / std::max(size, 1e-300);  // NaN stays NaN
    if (!(relative <= worst)) worst = std::isnan(relative) ? HUGE_VAL : relative;
  }
  return worst;
}

}  // namespace moxie::cli
