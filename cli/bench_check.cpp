// The check before the clock: results of a few tokens, written from the definition in FP64, expert
// by expert so that each expert's matrices are fetched once; for the backward also a row of two
// experts' weight gradients, which all their tokens add to. Rows run on all cores.
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
  std::int64_t slot = 0;  // of the sample
};
struct Sample {
  std::size_t rank;
  std::int64_t token;
  Row x, y;        // [H]; y: the sum of the experts seen so far
  Row dy, dx, dw;  // [H], [H], [K]; backward, dx as y
};

// `num_elements` values from `first` on, as they lie in the tensor.
HostTensor fetch(const BenchTarget& target, const ConstTensorView& view, std::int64_t first,
                 std::int64_t num_elements) {
  HostTensor tensor(view.dtype, {num_elements});
  const std::int64_t item = size_bytes(view.dtype);
  target.copy(tensor.bytes.data(), static_cast<const std::byte*>(view.data) + first * item,
              tensor.bytes.size());
  return tensor;
}
HostTensor fetch(const BenchTarget& target, const ConstTensorView& view) {
  return fetch(target, view, 0, view.shape.num_elements());
}

std::int64_t num_cores() { return std::max<std::int64_t>(1, std::thread::hardware_concurrency()); }

// work(core, row) for every row; a core has consecutive rows.
template <class Work>
void for_each_row(std::int64_t num_rows, Work&& work) {
  const std::int64_t cores = num_cores();
  std::vector<std::jthread> threads;
  for (std::int64_t core = 0; core < cores; ++core) {
    threads.emplace_back([&, core] {
      for (std::int64_t row = num_rows * core / cores; row < num_rows * (core + 1) / cores; ++row)
        work(core, row);
    });
  }
}

// Sums that every core has a part of.
class PartialSums {
 public:
  PartialSums(std::size_t num_sums, std::int64_t size)
      : parts_(static_cast<std::size_t>(num_cores()),
               std::vector<Row>(num_sums, Row(static_cast<std::size_t>(size)))) {}
  Row& of(std::int64_t core, std::size_t sum) {
    return parts_[static_cast<std::size_t>(core)][sum];
  }
  Row total(std::size_t sum) const {
    Row row(parts_.front()[sum].size());
    for (const auto& part : parts_) add_scaled(row, 1, part[sum]);
    return row;
  }

 private:
  std::vector<std::vector<Row>> parts_;  // [cores][sums]
};

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

double bias_at(const HostTensor& tensor, std::int64_t i) {
  return tensor.absent() ? 0 : value_at(tensor, i);
}

// y += weight * F(x). Backward: dx += weight * dF/dx (dy), and returns dy . F(x) of every route.
Row add_expert(const Problem& p, const Expert& e, const std::vector<Route>& routes,
               std::vector<Sample>& samples) {
  const std::int64_t H = p.hidden, I = e.width;
  const bool backward = !samples.front().dy.empty();
  const auto sample_of = [&](std::size_t r) -> Sample& { return samples[routes[r].sample]; };
  std::vector<Row> hidden(routes.size(), Row(static_cast<std::size_t>(I)));
  std::vector<std::vector<Activated>> activated(
      routes.size(), std::vector<Activated>(static_cast<std::size_t>(backward ? I : 0)));
  for_each_row(I, [&](std::int64_t, std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    const Row g = load(e.gate, i * H, H), u = load(e.up, i * H, H);
    for (std::size_t r = 0; r < routes.size(); ++r) {
      const Row& x = sample_of(r).x;
      const Activated a = activate(p.activation, p.dtype, dot(g, x) + bias_at(e.gate_bias, i),
                                   dot(u, x) + bias_at(e.up_bias, i));
      hidden[r][at] = a.value;
      if (backward) activated[r][at] = a;
    }
  });
  std::vector<Row> results(routes.size(), Row(static_cast<std::size_t>(H)));
  PartialSums da(backward ? routes.size() : 0, I);
  for_each_row(H, [&](std::int64_t core, std::int64_t h) {
    const auto at = static_cast<std::size_t>(h);
    const Row d = load(e.down, h * I, I);
    for (std::size_t r = 0; r < routes.size(); ++r) {
      results[r][at] = dot(d, hidden[r]) + bias_at(e.down_bias, h);
      if (backward) add_scaled(da.of(core, r), sample_of(r).dy[at], d);
    }
  });
  for (std::size_t r = 0; r < routes.size(); ++r)
    add_scaled(sample_of(r).y, routes[r].weight, results[r]);
  if (!backward) return {};
  Row products(routes.size());
  std::vector<Row> da_of(routes.size());
  for (std::size_t r = 0; r < routes.size(); ++r) {
    products[r] = dot(sample_of(r).dy, results[r]);
    da_of[r] = da.total(r);
  }
  PartialSums dx(routes.size(), H);
  for_each_row(I, [&](std::int64_t core, std::int64_t i) {
    const auto at = static_cast<std::size_t>(i);
    const Row g = load(e.gate, i * H, H), u = load(e.up, i * H, H);
    for (std::size_t r = 0; r < routes.size(); ++r) {
      const Activated& a = activated[r][at];
      add_scaled(dx.of(core, r), da_of[r][at] * a.by_gate, g);
      add_scaled(dx.of(core, r), da_of[r][at] * a.by_up, u);
    }
  });
  for (std::size_t r = 0; r < routes.size(); ++r)
    add_scaled(sample_of(r).dx, routes[r].weight, dx.total(r));
  return products;
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
  if (routes.empty()) return;
  const Row products = add_expert(p, expert, routes, samples);
  for (std::size_t r = 0; !gate.empty() && r < products.size(); ++r) {
    const double s = routes[r].weight;
    add_scaled(samples[routes[r].sample].dx, products[r] * s * (1 - s), gate);
  }
}

// The largest |got - wanted| / |wanted| so far.
class WorstError {
 public:
  void compare(const Row& wanted, Row got) {
    add_scaled(got, -1, wanted);
    const double error = std::sqrt(dot(got, got)), size = std::sqrt(dot(wanted, wanted));
    const double relative = error == 0 ? 0 : error / std::max(size, 1e-300);  // NaN stays NaN
    if (!(relative <= worst_)) worst_ = std::isnan(relative) ? HUGE_VAL : relative;
  }
  double value() const { return worst_; }

 private:
  double worst_ = 0;
};

std::vector<Sample> choose_samples(const BenchTarget& target, std::int64_t tokens_per_rank) {
  const std::int64_t H = target.problem.hidden;
  std::vector<Sample> samples;
  for (std::size_t rank = 0; rank < target.inputs.size(); ++rank) {
    const std::int64_t T = target.inputs[rank].x.shape.dim[0];
    const std::int64_t count = std::min(T, tokens_per_rank);
    for (std::int64_t n = 0; n < count; ++n) {  // the first, the last, and some between
      const std::int64_t token = count == 1 ? 0 : n * (T - 1) / (count - 1);
      const auto row = [&](const ConstTensorView& view) {
        return load(fetch(target, view, token * H, H), 0, H);
      };
      const Row none(static_cast<std::size_t>(H));
      Sample sample{rank, token, row(target.inputs[rank].x), none, {}, {}, {}};
      if (!target.backward_inputs.empty()) {
        sample.dy = row(target.backward_inputs[rank].dy);
        sample.dx = none;
        sample.dw.resize(static_cast<std::size_t>(target.problem.top_k));
      }
      samples.push_back(std::move(sample));
    }
  }
  return samples;
}

void check_tokens(const BenchTarget& target, std::int64_t tokens_per_rank, WorstError& worst) {
  const Problem& p = target.problem;
  const std::int64_t H = p.hidden, K = p.top_k;
  const bool backward = !target.backward_inputs.empty();
  std::vector<Sample> samples = choose_samples(target, tokens_per_rank);
  std::map<std::int64_t, std::vector<Route>> routes;  // by expert
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const RankTensors& of_rank = target.routes[samples[i].rank];
    for (std::int64_t slot = 0; slot < K; ++slot) {
      const std::int64_t at = samples[i].token * K + slot;
      const auto expert = static_cast<std::int64_t>(value_at(of_rank.expert_ids, at));
      if (expert >= 0) routes[expert].push_back({i, value_at(of_rank.route_weights, at), slot});
    }
  }
  for (const auto& [expert, of_expert] : routes) {
    const Row products = add_expert(p, fetch_expert(target, expert), of_expert, samples);
    for (std::size_t r = 0; r < products.size(); ++r)
      samples[of_expert[r].sample].dw[static_cast<std::size_t>(of_expert[r].slot)] = products[r];
  }
  for (std::size_t rank = 0; p.shared.intermediate > 0 && rank < target.inputs.size(); ++rank)
    add_shared(target, rank, samples);
  Row dw, got_dw;  // of all samples: a single one is a sum of signed terms that may be near zero
  for (const Sample& sample : samples) {
    const auto row = [&](const ConstTensorView& view, std::int64_t columns) {
      return load(fetch(target, view, sample.token * columns, columns), 0, columns);
    };
    worst.compare(sample.y, row(target.outputs[sample.rank].y, H));
    if (!backward) continue;
    const BackwardOutput& out = target.backward_outputs[sample.rank];
    worst.compare(sample.dx, row(out.dx, H));
    const Row got = row(out.d_route_weights, K);
    dw.insert(dw.end(), sample.dw.begin(), sample.dw.end());
    got_dw.insert(got_dw.end(), got.begin(), got.end());
  }
  worst.compare(dw, got_dw);
}

// Row i of d(gate) and d(up), column i of d(down): sums over all rows of the expert.
void check_weight_gradients(const BenchTarget& target, std::int64_t expert, WorstError& worst) {
  const Problem& p = target.problem;
  const std::int64_t H = p.hidden, I = p.intermediate, K = p.top_k;
  const RankId home = expert_home(p.num_experts, p.num_ranks, ExpertId{expert});
  const std::int64_t local = expert - expert_begin(p.num_experts, p.num_ranks, home);
  const Expert e = fetch_expert(target, expert);
  const std::int64_t i = (expert * 37 + 11) % I;  // any
  const Row gate = load(e.gate, i * H, H), up = load(e.up, i * H, H),
            down = load_column(e.down, i, I, H);
  PartialSums sums(3, H);
  for (std::size_t rank = 0; rank < target.inputs.size(); ++rank) {
    const HostTensor x = fetch(target, target.inputs[rank].x),
                     dy = fetch(target, target.backward_inputs[rank].dy);
    const RankTensors& routes = target.routes[rank];
    for_each_row(routes.expert_ids.shape.num_elements(), [&](std::int64_t core, std::int64_t at) {
      if (static_cast<std::int64_t>(value_at(routes.expert_ids, at)) != expert) return;
      const double weight = value_at(routes.route_weights, at);
      const Row x_row = load(x, at / K * H, H), dy_row = load(dy, at / K * H, H);
      const Activated a =
          activate(p.activation, p.dtype, dot(gate, x_row) + bias_at(e.gate_bias, i),
                   dot(up, x_row) + bias_at(e.up_bias, i));
      const double da = weight * dot(dy_row, down);
      add_scaled(sums.of(core, 0), da * a.by_gate, x_row);
      add_scaled(sums.of(core, 1), da * a.by_up, x_row);
      add_scaled(sums.of(core, 2), weight * a.value, dy_row);
    });
  }
  const WeightGrads& got = target.backward_outputs[static_cast<std::size_t>(home.v)].grads;
  const auto row_of = [&](const TensorView& view) {
    return load(fetch(target, view, (local * I + i) * H, H), 0, H);
  };
  worst.compare(sums.total(0), row_of(got.gate));
  worst.compare(sums.total(1), row_of(got.up));
  worst.compare(sums.total(2), load_column(fetch(target, got.down, local * H * I, H * I), i, I, H));
}

}  // namespace

double max_relative_l2(const BenchTarget& target, std::int64_t tokens_per_rank) {
  WorstError worst;
  check_tokens(target, tokens_per_rank, worst);
  if (!target.backward_inputs.empty()) {
    check_weight_gradients(target, 0, worst);
    if (target.problem.num_experts > 1)
      check_weight_gradients(target, target.problem.num_experts - 1, worst);
  }
  return worst.value();
}

}  // namespace moxie::cli
