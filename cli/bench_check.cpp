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
  target.copy(tensor.bytes.data(), static_cast<const std::byte*>(view.data) + first * item,
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

// The matrices of one expert on the host; absent where the problem has none.
struct Expert {
  HostTensor gate, up, down, gate_bias, up_bias, down_bias;
  std::int64_t width = 0;
};

Expert fetch_expert(const BenchTarget& target, std::int64_t expert) {
  const Problem& p = target.problem;
  const std::int64_t H = p.hidden, I = p.intermediate;
  const RankId home = expert_home(p.num_experts, p.num_ranks, ExpertId{expert});
  const std::int64_t local = expert - expert_begin(p.num_experts, p.num_ranks, home);
  const Weights& w = target.inputs[static_cast<std::size_t>(home.v)].weights;
  const auto part = [&](const ConstTensorView& view, std::int64_t size) {
    return view.absent() ? HostTensor{} : fetch(target, view, local * size, size);
  };
  return {part(w.gate, I * H),
          part(w.up, I * H),
          part(w.down, H * I),
          part(w.gate_bias, I),
          part(w.up_bias, I),
          part(w.down_bias, H),
          I};
}

void add_expert(const Problem& p, const Expert& e, const std::vector<Route>& routes,
                std::vector<Sample>& samples) {
  const std::int64_t H = p.hidden, I = e.width;
  const auto bias = [](const HostTensor& tensor, std::int64_t i) {
    return tensor.absent() ? 0 : value_at(tensor, i);
  };
  std::vector<Row> hidden(routes.size(), Row(static_cast<std::size_t>(I)));
  for_each_row(I, [&](std::int64_t i) {
    const Row g = load(e.gate, i * H, H), u = load(e.up, i * H, H);
    for (std::size_t r = 0; r < routes.size(); ++r) {
      const Row& x = samples[routes[r].sample].x;
      hidden[r][static_cast<std::size_t>(i)] =
          activate(p.activation, p.dtype, dot(g, x) + bias(e.gate_bias, i),
                   dot(u, x) + bias(e.up_bias, i))
              .value;
    }
  });
  for_each_row(H, [&](std::int64_t h) {
    const Row d = load(e.down, h * I, I);
    for (std::size_t r = 0; r < routes.size(); ++r)
      samples[routes[r].sample].y[static_cast<std::size_t>(h)] +=
          routes[r].weight * (dot(d, hidden[r]) + bias(e.down_bias, h));
  });
}

// The shared expert, which every rank has its own copy of: of the samples of one rank.
void add_shared(const BenchTarget& target, std::size_t rank, std::vector<Sample>& samples) {
  const Problem& p = target.problem;
  const std::int64_t H = p.hidden, I = p.shared.intermediate;
  const Weights& w = target.inputs[rank].weights;
  const Expert expert{fetch(target, w.shared_gate, 0, I * H),
                      fetch(target, w.shared_up, 0, I * H),
                      fetch(target, w.shared_down, 0, H * I),
                      {},
                      {},
                      {},
                      I};
  Row gate;
  if (p.shared.output_gate) gate = load(fetch(target, w.shared_output_gate, 0, H), 0, H);
  std::vector<Route> routes;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].rank == rank)
      routes.push_back({i, gate.empty() ? 1 : sigmoid(dot(samples[i].x, gate))});
  }
  add_expert(p, expert, routes, samples);
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
  for (const auto& [expert, of_expert] : routes)
    add_expert(p, fetch_expert(target, expert), of_expert, samples);
  for (std::size_t rank = 0; p.shared.intermediate > 0 && rank < target.inputs.size(); ++rank)
    add_shared(target, rank, samples);
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
