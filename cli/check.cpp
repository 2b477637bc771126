// y[t] = sum over slots of w (A(x W_gate^T, x W_up^T) W_down^T + b_down) + the shared expert, and
// its derivatives, token by token in double. A token gives y, dx and d_route_weights; a column i of
// I gives d_gate[e, i, :], d_up[e, i, :] and d_down[e, :, i], because these need only that column
// of the hidden row. So a sample of tokens and columns judges every tensor at a cost that fits any
// shape.
#include "cli/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "cli/check_math.h"
#include "cli/random.h"

namespace moxie::cli {
namespace {

constexpr double kBudget = 2.0e9;  // multiply-adds for the sample: about two seconds
constexpr std::int64_t kMostColumns = 16;

// The three matrices of one expert, or of the shared one, and where they lie.
struct Expert {
  const HostTensor *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
  std::int64_t local = 0, width = 0;  // index within the rank's tensors, I
};

struct Place {
  std::size_t rank;
  std::int64_t token;
};
struct Route {
  Place place;
  double weight;
};

class Judge {
 public:
  Judge(const Problem& problem, std::span<const RankTensors> inputs,
        std::span<const RankResults> results, const CheckOptions& options)
      : problem_(problem), inputs_(inputs), results_(results), options_(options) {}

  CheckReport run() {
    const std::vector<Place> places = sample_tokens();
    const double column_part = options_.backward ? 0.2 : 0;
    for (std::size_t i = 0; i < places.size(); ++i) {
      check_token(places[i]);
      if (options_.progress)
        options_.progress((1 - column_part) * static_cast<double>(i + 1) / places.size());
    }
    if (options_.backward) check_weight_gradients(1 - column_part);
    for (CheckedTensor& tensor : report_.tensors) {
      Sums& sums = sums_[static_cast<std::size_t>(&tensor - report_.tensors.data())];
      tensor.relative_l2 =
          sums.error == 0 ? 0 : std::sqrt(sums.error / std::max(sums.reference, 1e-300));
    }
    return std::move(report_);
  }

 private:
  struct Sums {
    double error = 0, reference = 0;
  };

  std::vector<Place> sample_tokens() {
    std::vector<Place> places;
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      for (std::int64_t token = 0; token < inputs_[rank].x.shape.dim[0]; ++token)
        places.push_back({rank, token});
    }
    const double per_row = static_cast<double>(problem_.hidden) * (options_.backward ? 6 : 3);
    const double per_token = per_row * static_cast<double>(problem_.top_k * problem_.intermediate +
                                                           problem_.shared.intermediate);
    const auto affordable =
        std::max<std::int64_t>(8, static_cast<std::int64_t>(kBudget / per_token));
    const auto wanted =
        static_cast<std::size_t>(options_.tokens < 0 ? affordable : options_.tokens);
    report_.tokens = static_cast<std::int64_t>(places.size());
    const Random random(options_.seed, "check");
    for (std::size_t i = places.size(); i > 1; --i)
      std::swap(places[i - 1], places[random.below(i, i)]);
    places.resize(std::min(places.size(), wanted));
    report_.tokens_checked = static_cast<std::int64_t>(places.size());
    return places;
  }

  Expert expert(std::int64_t id) const {
    const RankId home = expert_home(problem_.num_experts, problem_.num_ranks, ExpertId{id});
    const RankTensors& t = inputs_[static_cast<std::size_t>(home.v)];
    const std::int64_t local = id - expert_begin(problem_.num_experts, problem_.num_ranks, home);
    return {&t.gate,    &t.up,        &t.down, &t.gate_bias,
            &t.up_bias, &t.down_bias, local,   problem_.intermediate};
  }
  Expert shared_expert(std::size_t rank) const {
    const RankTensors& t = inputs_[rank];
    static const HostTensor kNone;
    return {&t.shared_gate,
            &t.shared_up,
            &t.shared_down,
            &kNone,
            &kNone,
            &kNone,
            0,
            problem_.shared.intermediate};
  }

  // What one token gets and gives back.
  struct TokenRows {
    Row y, dx, dx_slack;  // [H]; slack: see Activated::jump_gate
  };
  struct Product {
    double value = 0, size = 0;  // dy . F(x) and the root of the sum of its squared terms
  };

  // y += scale * F(x), dx += scale * dF/dx (dy); returns dy . F(x). Rows of the matrices are read
  // in the order they lie in memory.
  Product pass_expert(const Expert& e, const Row& x, const Row& dy, double scale,
                      TokenRows& token) const {
    const bool backward = options_.backward;
    const std::int64_t H = problem_.hidden, I = e.width;
    Row gate(x.size()), up(x.size()), down(static_cast<std::size_t>(I)), sum(x.size());
    std::vector<Activated> hidden(down.size());
    Row value(down.size()), da(down.size());
    for (std::int64_t i = 0; i < I; ++i) {
      const auto at = static_cast<std::size_t>(i);
      load_into(gate, *e.gate, (e.local * I + i) * H);
      load_into(up, *e.up, (e.local * I + i) * H);
      double g = dot(gate, x), u = dot(up, x);
      if (!e.gate_bias->absent()) g += value_at(*e.gate_bias, e.local * I + i);
      if (!e.up_bias->absent()) u += value_at(*e.up_bias, e.local * I + i);
      hidden[at] = activate(problem_.activation, problem_.dtype, g, u);
      value[at] = hidden[at].value;
    }
    if (!e.down_bias->absent()) load_into(sum, *e.down_bias, e.local * H);
    for (std::int64_t h = 0; h < H; ++h) {
      const auto at = static_cast<std::size_t>(h);
      load_into(down, *e.down, (e.local * H + h) * I);
      sum[at] += dot(value, down);
      if (backward) add_scaled(da, dy[at], down);
    }
    add_scaled(token.y, scale, sum);
    if (!backward) return {};
    for (std::int64_t i = 0; i < I; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const Activated& a = hidden[at];
      load_into(gate, *e.gate, (e.local * I + i) * H);
      load_into(up, *e.up, (e.local * I + i) * H);
      add_scaled(token.dx, scale * da[at] * a.by_gate, gate);
      add_scaled(token.dx, scale * da[at] * a.by_up, up);
      if (a.jump_gate > 0) add_magnitude(token.dx_slack, scale * da[at] * a.jump_gate, gate);
      if (a.jump_up > 0) add_magnitude(token.dx_slack, scale * da[at] * a.jump_up, up);
    }
    Row terms(sum.size());
    for (std::size_t h = 0; h < sum.size(); ++h) terms[h] = dy[h] * sum[h];
    return {std::accumulate(terms.begin(), terms.end(), 0.0), std::sqrt(dot(terms, terms))};
  }

  void check_token(Place place) {
    const std::int64_t H = problem_.hidden, K = problem_.top_k;
    const RankTensors& in = inputs_[place.rank];
    const RankResults& got = results_[place.rank];
    const Row x = load(in.x, place.token * H, H);
    const Row dy = options_.backward ? load(in.dy, place.token * H, H) : Row{};
    TokenRows token{Row(x.size()), Row(x.size()), Row(x.size())};
    Row dw(static_cast<std::size_t>(K));
    double dw_size = 0;
    for (std::int64_t slot = 0; slot < K; ++slot) {
      const auto id = static_cast<std::int64_t>(value_at(in.expert_ids, place.token * K + slot));
      if (id < 0) continue;
      const double weight = value_at(in.route_weights, place.token * K + slot);
      const Product product = pass_expert(expert(id), x, dy, weight, token);
      dw[static_cast<std::size_t>(slot)] = product.value;
      dw_size = std::max(dw_size, product.size);
    }
    if (problem_.shared.intermediate > 0) {
      const Row v = problem_.shared.output_gate ? load(in.shared_output_gate, 0, H) : Row{};
      const double s = v.empty() ? 1 : sigmoid(dot(x, v));
      const double ds = pass_expert(shared_expert(place.rank), x, dy, s, token).value;
      if (options_.backward && !v.empty()) add_scaled(token.dx, ds * s * (1 - s), v);
    }
    const std::string where = fmt::format("rank {} token {}", place.rank, place.token);
    compare("y", where, token.y, load(got.y, place.token * H, H),
            {.allowed = tolerance(problem_.dtype)});
    if (!options_.backward) return;
    const Tolerance allowed = tolerance(problem_.dtype);
    compare("dx", where, token.dx, load(got.dx, place.token * H, H),
            {.allowed = allowed, .slack = token.dx_slack});
    compare("d_route_weights", where, dw, load(got.d_route_weights, place.token * K, K),
            {.allowed = allowed, .scale = dw_size, .scalar = true});
  }

  void check_weight_gradients(double progress_begin) {
    std::vector<std::vector<Route>> routes(static_cast<std::size_t>(problem_.num_experts));
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) {
      const RankTensors& in = inputs_[rank];
      for (std::int64_t i = 0; i < in.expert_ids.shape.num_elements(); ++i) {
        const auto id = static_cast<std::int64_t>(value_at(in.expert_ids, i));
        if (id < 0) continue;
        routes[static_cast<std::size_t>(id)].push_back(
            {{rank, i / problem_.top_k}, value_at(in.route_weights, i)});
      }
    }
    std::size_t rows = 0;
    for (const auto& list : routes) rows += list.size();
    const double per_column = static_cast<double>(std::max<std::size_t>(rows, 1)) *
                              static_cast<double>(problem_.hidden) * 8;
    report_.columns = problem_.intermediate;
    const auto affordable = static_cast<std::int64_t>(0.2 * kBudget / per_column);
    const std::int64_t wanted = options_.columns < 0
                                    ? std::clamp<std::int64_t>(affordable, 1, kMostColumns)
                                    : options_.columns;
    report_.columns_checked = std::min(problem_.intermediate, wanted);
    for (std::int64_t id = 0; id < problem_.num_experts; ++id) {
      const RankId home = expert_home(problem_.num_experts, problem_.num_ranks, ExpertId{id});
      const RankResults& got = results_[static_cast<std::size_t>(home.v)];
      check_columns(fmt::format("expert {}", id), "", expert(id),
                    routes[static_cast<std::size_t>(id)], got.d_gate, got.d_up, got.d_down,
                    got.d_gate_bias, got.d_up_bias);
      check_down_bias(id, routes[static_cast<std::size_t>(id)], got.d_down_bias);
      if (options_.progress) {
        options_.progress(progress_begin + (1 - progress_begin) * static_cast<double>(id + 1) /
                                               problem_.num_experts);
      }
    }
    if (problem_.shared.intermediate == 0) return;
    for (std::size_t rank = 0; rank < inputs_.size(); ++rank) check_shared(rank);
  }

  void check_columns(const std::string& who, const std::string& prefix, const Expert& e,
                     const std::vector<Route>& routes, const HostTensor& d_gate,
                     const HostTensor& d_up, const HostTensor& d_down,
                     const HostTensor& d_gate_bias, const HostTensor& d_up_bias) {
    const std::int64_t H = problem_.hidden;
    const Tolerance allowed = tolerance(problem_.dtype);
    // Different columns, beginning anywhere, evenly spread.
    const std::int64_t count = std::min(report_.columns_checked, e.width);
    const auto begin = static_cast<std::int64_t>(
        Random(options_.seed, who).below(0, static_cast<std::uint64_t>(e.width)));
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t i = (begin + n * e.width / count) % e.width;
      const std::int64_t at = e.local * e.width + i;
      const Row gate = load(*e.gate, at * H, H), up = load(*e.up, at * H, H);
      const Row down = load_column(*e.down, e.local * H * e.width + i, e.width, H);
      Column g_column(gate.size()), u_column(gate.size()), d_column(gate.size());
      for (const auto& [place, weight] : routes) {
        const Row x = load(inputs_[place.rank].x, place.token * H, H),
                  dy = load(inputs_[place.rank].dy, place.token * H, H);
        double g = dot(gate, x), u = dot(up, x);
        if (!e.gate_bias->absent()) g += value_at(*e.gate_bias, at);
        if (!e.up_bias->absent()) u += value_at(*e.up_bias, at);
        const Activated a = activate(problem_.activation, problem_.dtype, g, u);
        const double da = weight * dot(dy, down);
        g_column.add(da * a.by_gate, da * a.size_gate, da * a.jump_gate, x);
        u_column.add(da * a.by_up, da * a.size_up, da * a.jump_up, x);
        d_column.add(weight * a.value, weight * (a.size_gate + a.size_up), 0, dy);
      }
      const std::string where = fmt::format("{} column {}", who, i);
      compare("d_" + prefix + "gate", where, g_column.sum, load(d_gate, at * H, H),
              g_column.yardstick(allowed));
      compare("d_" + prefix + "up", where, u_column.sum, load(d_up, at * H, H),
              u_column.yardstick(allowed));
      compare("d_" + prefix + "down", where, d_column.sum,
              load_column(d_down, e.local * H * e.width + i, e.width, H),
              d_column.yardstick(allowed));
      if (!e.gate_bias->absent()) {
        compare("d_gate_bias", where, {g_column.bias}, {value_at(d_gate_bias, at)},
                g_column.bias_yardstick(allowed));
        compare("d_up_bias", where, {u_column.bias}, {value_at(d_up_bias, at)},
                u_column.bias_yardstick(allowed));
      }
    }
  }

  static double scale_of(const Row& row) {
    return std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0) /
                     static_cast<double>(row.size()));
  }

  void check_down_bias(std::int64_t id, const std::vector<Route>& routes,
                       const HostTensor& d_down_bias) {
    if (d_down_bias.absent()) return;
    const std::int64_t H = problem_.hidden;
    Row sum(static_cast<std::size_t>(H));
    for (const auto& [place, weight] : routes)
      add_scaled(sum, weight, load(inputs_[place.rank].dy, place.token * H, H));
    const Expert e = expert(id);
    compare("d_down_bias", fmt::format("expert {}", id), sum, load(d_down_bias, e.local * H, H),
            {.allowed = tolerance(problem_.dtype)});
  }

  void check_shared(std::size_t rank) {
    const std::int64_t H = problem_.hidden, T = inputs_[rank].x.shape.dim[0];
    const RankTensors& in = inputs_[rank];
    const RankResults& got = results_[rank];
    const bool gated = problem_.shared.output_gate;
    const Row v = gated ? load(in.shared_output_gate, 0, H) : Row{};
    std::vector<Route> routes;
    for (std::int64_t token = 0; token < T; ++token) {
      routes.push_back({{rank, token}, gated ? sigmoid(dot(load(in.x, token * H, H), v)) : 1.0});
    }
    static const HostTensor kNone;
    check_columns(fmt::format("shared expert of rank {}", rank), "shared_", shared_expert(rank),
                  routes, got.d_shared_gate, got.d_shared_up, got.d_shared_down, kNone, kNone);
    const double cost =
        static_cast<double>(T) * static_cast<double>(H * problem_.shared.intermediate) * 3;
    if (!gated || cost > kBudget) return;
    Column sum(v.size());
    for (const auto& [place, s] : routes) {
      const Row x = load(in.x, place.token * H, H), dy = load(in.dy, place.token * H, H);
      TokenRows token{Row(v.size()), Row(v.size()), Row(v.size())};
      const Product product = pass_expert(shared_expert(rank), x, dy, 1, token);
      sum.add(product.value * s * (1 - s), product.size * s * (1 - s), 0, x);
    }
    compare("d_shared_output_gate", fmt::format("rank {}", rank), sum.sum,
            load(got.d_shared_output_gate, 0, H), sum.yardstick(tolerance(problem_.dtype)));
  }

  void compare(const std::string& tensor_name, const std::string& where, const Row& expected,
               const Row& got, const Yardstick& by) {
    auto tensor = std::find_if(report_.tensors.begin(), report_.tensors.end(),
                               [&](const CheckedTensor& t) { return t.name == tensor_name; });
    if (tensor == report_.tensors.end()) {
      report_.tensors.push_back({.name = tensor_name, .limit = by.allowed.relative_l2});
      sums_.emplace_back();
      tensor = report_.tensors.end() - 1;
    }
    Sums& sums = sums_[static_cast<std::size_t>(tensor - report_.tensors.begin())];
    const double scale = by.scale < 0 ? scale_of(expected) : by.scale;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      double difference = std::abs(got[i] - expected[i]);
      const double slack = by.slack.empty() ? 0 : by.slack[i];
      difference = difference <= slack ? 0 : difference - slack;  // NaN stays NaN
      sums.error += difference * difference;
      sums.reference += std::max(expected[i] * expected[i], by.scalar ? scale * scale : 0);
      const double bound = by.allowed.element * (scale + std::abs(expected[i]));
      const double ratio =
          difference == 0 ? 0 : difference / std::max(bound, 1e-300);  // NaN stays NaN
      if (!(ratio <= tensor->worst)) tensor->worst = std::isnan(ratio) ? HUGE_VAL : ratio;
      if (!(ratio <= report_.worst)) {
        report_.worst = std::isnan(ratio) ? HUGE_VAL : ratio;
        report_.worst_element = fmt::format("{} of {} [{}] is {:.6g}, expected {:.6g}", tensor_name,
                                            where, i, got[i], expected[i]);
      }
    }
    tensor->elements += static_cast<std::int64_t>(expected.size());
  }

  const Problem& problem_;
  std::span<const RankTensors> inputs_;
  std::span<const RankResults> results_;
  const CheckOptions& options_;
  CheckReport report_;
  std::vector<Sums> sums_;  // as report_.tensors
};

}  // namespace

bool CheckReport::ok() const {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const CheckedTensor& tensor) { return tensor.ok(); });
}

CheckReport check_results(const Problem& problem, std::span<const RankTensors> inputs,
                          std::span<const RankResults> results, const CheckOptions& options) {
  return Judge(problem, inputs, results, options).run();
}

}  // namespace moxie::cli
