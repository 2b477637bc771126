#include "cli/planner_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "cli/errors.h"
#include "cli/options.h"

namespace moxie::cli {
namespace {

planner::RoutingSpec parse_routing_spec(const std::string& text) {
  static constexpr std::array<std::string_view, 4> kWords = {"even", "uniform", "zipf", "hot"};
  planner::RoutingSpec spec;
  const std::size_t colon = text.find(':');
  spec.skew = static_cast<planner::Skew>(parse_choice("--routing", text.substr(0, colon), kWords));
  if (colon == std::string::npos) return spec;
  const std::string value = text.substr(colon + 1);
  if (spec.skew == planner::Skew::zipf)
    spec.exponent = parse_real("--routing zipf exponent", value, 0);
  else if (spec.skew == planner::Skew::hot)
    spec.expert = parse_integer("--routing hot expert", value, kInt32);
  else
    throw Usage(
        fmt::format("--routing is '{}'; only zipf:EXPONENT and hot:EXPERT take a value", text));
  return spec;
}

}  // namespace

void add_layer_options(CLI::App& app, LayerOptions& o) {
  constexpr Range kPositive{1, kInt32.max};
  const auto group = [](CLI::Option* option) { option->group("Layer and machine"); };
  group(add_text(app, "--preset", "NAME", "a published layer (`moxie presets`)",
                 [&o](const std::string& text) { o.preset = find_preset(text).name; }));
  group(add_text(app, "--device", "NAME",
                 "b200 | gb300 | h100 | h200, or the path of a device record (.json) [h200]",
                 [&o](const std::string& text) { o.device = text; }));
  group(add_integer(app, "--ranks", o.ranks, kPositive, "GPUs the experts are spread over [8]"));
  group(add_text(app, "--tokens", "N|N,N,...",
                 "tokens of every rank, or one number per rank [8192]",
                 [&o](const std::string& text) {
                   o.tokens.clear();
                   for (const auto part : split(text, ','))
                     o.tokens.push_back(parse_integer("--tokens", part, kInt32));
                 }));
  group(add_text(app, "--routing", "KIND",
                 "even | uniform | zipf[:EXPONENT] | hot[:EXPERT] [uniform]",
                 [&o](const std::string& text) { o.routing = parse_routing_spec(text); }));
  static constexpr std::array<std::string_view, 2> kLoads = {"burst", "sustained"};
  group(add_choice(app, "--load", o.load, kLoads, "clock of a cool or of a hot GPU [burst]"));
  group(app.add_flag("--json", o.json, "print JSON instead of a table"));
}

std::vector<std::int64_t> layer_tokens(const LayerOptions& o) {
  const auto R = static_cast<std::size_t>(o.ranks);
  if (o.tokens.size() == 1) return std::vector<std::int64_t>(R, o.tokens[0]);
  if (o.tokens.size() != R) {
    throw Usage(
        fmt::format("--tokens names {} ranks; --ranks is {}, and both must be the same (or "
                    "--tokens one number)",
                    o.tokens.size(), o.ranks));
  }
  return o.tokens;
}

Problem layer_problem(const LayerOptions& o) {
  if (o.preset.empty())
    throw Usage("--preset is missing; `moxie presets` lists the layers it can name");
  Problem p = problem_of(find_preset(o.preset));
  p.num_ranks = o.ranks;
  const std::vector<std::int64_t> tokens = layer_tokens(o);
  p.max_tokens = *std::max_element(tokens.begin(), tokens.end());
  if (p.max_tokens == 0)
    throw Usage(
        "--tokens is 0 on every rank; there is nothing to do, the nearest legal value is 1");
  check(p);
  if (o.routing.skew == planner::Skew::hot && o.routing.expert >= p.num_experts) {
    throw Usage(fmt::format(
        "--routing hot expert is {}; the layer has {} experts, the nearest legal value is {}",
        o.routing.expert, p.num_experts, p.num_experts - 1));
  }
  return p;
}

planner::Machine layer_machine(const LayerOptions& o) {
  return planner::machine(planner::find_device(o.device), o.load);
}

std::string to_string(const planner::RoutingSpec& r) {
  switch (r.skew) {
    case planner::Skew::even: return "even";
    case planner::Skew::uniform: return "uniform";
    case planner::Skew::zipf: return fmt::format("zipf:{}", r.exponent);
    case planner::Skew::hot: return fmt::format("hot:{}", r.expert);
  }
  return "?";
}

std::string short_plan(const Plan& p) {
  const bool lag = p.order == TaskOrder::lag;
  return fmt::format(
      "{}, {} {}, band {}, minibatch {}, {} dispatch, combine by {}, {}, rings x {} hidden {} "
      "backward {}, chunk {}, save {}",
      name(p.mode), name(p.order), lag ? p.lag_bands : p.num_slabs, p.band_blocks,
      p.minibatch_blocks, name(p.dispatch), name(p.combine),
      p.comm_workers == 0 ? "spare warps communicate"
                          : fmt::format("{} communication CTAs", p.comm_workers),
      p.x_ring_blocks, p.hidden_ring_blocks, p.backward_ring_blocks, p.chunk_blocks, name(p.save));
}

std::string shares(const planner::Uses& uses) {
  const double all = std::accumulate(uses.begin(), uses.end(), 0.0);
  std::string text;
  for (std::size_t i = 0; i < uses.size() && all > 0; ++i) {
    if (uses[i] / all < 0.0005) continue;
    text += fmt::format("{}{} {:.1f} %", text.empty() ? "" : ", ",
                        name(static_cast<planner::Use>(i)), 100 * uses[i] / all);
  }
  return text;
}

Json to_json(const planner::SimResult& r) {
  const auto uses = [](const planner::Uses& u) {
    Json json;
    for (std::size_t i = 0; i < u.size(); ++i) json[name(static_cast<planner::Use>(i))] = u[i];
    return json;
  };
  const auto link = [](const planner::LinkUse& l) {
    return Json{{"out", l.out},
                {"in", l.in},
                {"max_out", l.max_out},
                {"max_in", l.max_in},
                {"sent_bytes", l.sent_bytes}};
  };
  return {{"ms", r.ms},
          {"rank_ms", r.rank_ms},
          {"cta_seconds", uses(r.ctas)},
          {"spare_warp_seconds", uses(r.spare_warps)},
          {"link_use", link(r.link)},
          {"network_use", link(r.network)},
          {"gemm_stretch", r.gemm_stretch},
          {"routed_rows", r.routed_rows},
          {"tasks", r.num_tasks},
          {"units", r.num_units},
          {"events", r.num_events}};
}

Json to_json(const planner::Bounds& b) {
  return {{"gemm_ms", b.gemm_ms},
          {"memory_ms", b.memory_ms},
          {"link_ms", b.link_ms},
          {"network_ms", b.network_ms}};
}

std::string wrapped(const std::string& text, std::size_t indent, std::size_t width) {
  std::string out;
  std::size_t column = indent;
  for (const std::string_view word : split(text, ' ')) {
    if (word.empty()) continue;
    if (column > indent && column + 1 + word.size() > width) {
      out += '\n' + std::string(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
  }
  return out;
}

}  // namespace moxie::cli
