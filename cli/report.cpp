// The table and the JSON of a run. A figure that was not measured is null in the JSON and absent
// from the table.
#include "cli/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "moxie/trace/writers.h"

namespace moxie::cli {
namespace {

std::string line(const char* label, const std::string& text) {
  return fmt::format("{:<11}{}\n", label, text);
}

std::string time_words(double ms) {
  return ms < 1        ? fmt::format("{:.0f} us", ms * 1000)
         : ms < 10'000 ? fmt::format("{:.1f} ms", ms)
                       : fmt::format("{:.1f} s", ms / 1000);
}

struct MinMeanMax {
  std::int64_t min = 0, max = 0;
  double mean = 0;
};
MinMeanMax min_mean_max(const std::vector<std::int64_t>& values) {
  const auto [lowest, highest] = std::minmax_element(values.begin(), values.end());
  const std::int64_t sum = std::accumulate(values.begin(), values.end(), std::int64_t{0});
  return {*lowest, *highest, static_cast<double>(sum) / static_cast<double>(values.size())};
}

std::string input_words(const RunReport& report) {
  const std::string_view router =
      report.setup.router == RouterKind::softmax ? "softmax" : "sigmoid";
  if (report.origin.starts_with("folder")) return report.origin;
  if (report.setup.routing.kind == RoutingKind::router)
    return fmt::format("{}, {} router", report.origin, router);
  return fmt::format("{}, routing {}", report.origin, to_string(report.setup.routing));
}

std::string token_words(const RunReport& report) {
  const MinMeanMax tokens = min_mean_max(report.setup.tokens);
  if (tokens.min == tokens.max) {
    return fmt::format("{} on {}", tokens.min,
                       report.setup.tokens.size() == 1
                           ? "one rank"
                           : fmt::format("each of {} ranks", report.setup.tokens.size()));
  }
  const bool few = report.setup.tokens.size() <= 16;
  return few ? fmt::format("{} per rank", fmt::join(report.setup.tokens, ", "))
             : fmt::format("{} to {} on {} ranks", tokens.min, tokens.max,
                           report.setup.tokens.size());
}

std::string row_words(const RoutingStats& routing) {
  const MinMeanMax rows = min_mean_max(routing.rows_per_rank);
  std::string text = fmt::format("{} routed; per rank min {}, mean {:.0f}, max {}",
                                 routing.num_rows, rows.min, rows.mean, rows.max);
  if (routing.num_rows == 0) return text;
  return text + fmt::format("; busiest expert {} has {:.1f}x the mean, {} of {} idle",
                            routing.busiest_expert, routing.busiest_over_mean, routing.idle_experts,
                            routing.rows_per_expert.size());
}

std::string pass_line(const char* name, const Samples& samples, double tokens, double flops) {
  const double seconds = samples.median() * 1e-3;
  return fmt::format("{:<11}{:>10}{:>10}{:>10}{:>12.0f}{:>10.1f}\n", name,
                     time_words(samples.median()), time_words(samples.percentile(10)),
                     time_words(samples.percentile(90)), tokens / seconds, flops / seconds * 1e-9);
}

std::string pass_table(const RunReport& report) {
  const PassTimes& times = report.times;
  const double tokens = static_cast<double>(report.routing.num_tokens);
  const double flops = forward_flops(report.setup.problem, report.routing);
  std::string text =
      fmt::format("{:<11}{:>10}{:>10}{:>10}{:>12}{:>10}   n = {}\n", "pass", "median", "p10", "p90",
                  "tokens/s", "GFLOP/s", times.forward.ms.size());
  text += pass_line("forward", times.forward, tokens, flops);
  if (report.setup.backward) text += pass_line("backward", times.backward, tokens, 2 * flops);
  return text;
}

std::string stage_table(const std::vector<trace::Trace>& traces) {
  std::string text = fmt::format("{:<11}", "stage");
  std::vector<std::array<std::int64_t, trace::kNumKinds>> sums;
  std::vector<double> all;
  for (std::size_t pass = 0; pass < traces.size(); ++pass) {
    text += fmt::format("{:>10}{:>8}", pass == 0 ? "forward" : "backward", "share");
    sums.push_back(trace::time_by_kind_ns(traces[pass]));
    all.push_back(
        static_cast<double>(trace::span_ns(traces[pass]) * trace::num_workers(traces[pass])));
  }
  text += "   time of all workers in one traced pass\n";
  for (const trace::Kind kind : trace::kDataFlowOrder) {
    const auto at = static_cast<std::size_t>(kind);
    if (std::all_of(sums.begin(), sums.end(), [at](const auto& sum) { return sum[at] == 0; }))
      continue;
    text += fmt::format("  {:<9}", name(kind));
    for (std::size_t pass = 0; pass < sums.size(); ++pass) {
      const double ns = static_cast<double>(sums[pass][at]);
      text += ns == 0 ? fmt::format("{:>10}{:>8}", "-", "-")
                      : fmt::format("{:>10}{:>6.1f} %", time_words(ns * 1e-6),
                                    all[pass] > 0 ? 100 * ns / all[pass] : 0.0);
    }
    text += '\n';
  }
  return text;
}

std::string check_table(const CheckReport& check) {
  std::string text = fmt::format("{:<11}against plain FP64 loops: {} of {} tokens", "check",
                                 check.tokens_checked, check.tokens);
  if (check.columns > 0) {
    text += fmt::format(", {} of {} columns of every expert's weight gradients",
                        check.columns_checked, check.columns);
  }
  text += '\n';
  for (const CheckedTensor& tensor : check.tensors) {
    text += fmt::format(
        "  {:<22}relative L2 {:.2e} (limit {:.0e}), worst element {:.0f} % of its bound: {}\n",
        tensor.name, tensor.relative_l2, tensor.limit, 100 * tensor.worst,
        tensor.ok() ? "ok" : "WRONG");
  }
  return text;
}

Json samples_json(const Samples& samples, double tokens, double flops) {
  if (samples.ms.empty()) return nullptr;
  const double seconds = samples.median() * 1e-3;
  return {{"median_ms", samples.median()},
          {"p10_ms", samples.percentile(10)},
          {"p90_ms", samples.percentile(90)},
          {"n", samples.ms.size()},
          {"samples_ms", samples.ms},
          {"tokens_per_s", tokens / seconds},
          {"gflop_per_s", flops / seconds * 1e-9}};
}

Json stages_json(const std::vector<trace::Trace>& traces, std::size_t pass) {
  if (pass >= traces.size()) return nullptr;
  const auto sums = trace::time_by_kind_ns(traces[pass]);
  Json json;
  for (const trace::Kind kind : trace::kDataFlowOrder)
    json[name(kind)] = static_cast<double>(sums[static_cast<std::size_t>(kind)]) * 1e-6;
  json["span"] = static_cast<double>(trace::span_ns(traces[pass])) * 1e-6;
  return json;
}

Json check_json(const CheckReport& check) {
  Json tensors = Json::array();
  for (const CheckedTensor& t : check.tensors) {
    tensors.push_back({{"tensor", t.name},
                       {"relative_l2", t.relative_l2},
                       {"limit", t.limit},
                       {"worst_element", t.worst},
                       {"elements", t.elements},
                       {"ok", t.ok()}});
  }
  return {{"ok", check.ok()},
          {"tokens_checked", check.tokens_checked},
          {"tokens", check.tokens},
          {"tensors", tensors}};
}

}  // namespace

double forward_flops(const Problem& problem, const RoutingStats& routing) {
  const auto H = static_cast<double>(problem.hidden);
  return 6 * H *
         (static_cast<double>(routing.num_rows) * static_cast<double>(problem.intermediate) +
          static_cast<double>(routing.num_tokens) *
              static_cast<double>(problem.shared.intermediate));
}

std::string shape_words(const Problem& p) {
  std::string text = fmt::format("H {}, I {}, {} experts, top {}", p.hidden, p.intermediate,
                                 p.num_experts, p.top_k);
  if (p.shared.intermediate > 0) {
    text += fmt::format(", shared expert {}{}", p.shared.intermediate,
                        p.shared.output_gate ? " with output gate" : "");
  }
  return text + fmt::format(", {}{}, {}", name(p.activation.kind),
                            p.expert_bias ? " with biases" : "", name(p.dtype));
}

std::string plan_words(const Plan& p, BackendKind backend) {
  std::string text = fmt::format("{}, {}", name(p.mode), name(p.order));
  text += p.order == TaskOrder::slabs ? fmt::format(" {}", p.num_slabs)
                                      : fmt::format(" {} bands behind", p.lag_bands);
  if (p.dispatch == DispatchMode::push) text += ", push dispatch";
  if (p.combine == CombineMode::comm_workers) text += ", combine by communication workers";
  text += fmt::format(", band {}, minibatch {}, rings x {} hidden {} backward {}, save {}",
                      p.band_blocks, p.minibatch_blocks, p.x_ring_blocks, p.hidden_ring_blocks,
                      p.backward_ring_blocks, name(p.save));
  if (backend == BackendKind::cpu)
    return text + fmt::format(", {} comm + {} compute per rank", std::max(p.comm_workers, 1),
                              p.compute_workers);
  return text + (p.comm_workers == 0
                     ? std::string(", communication in every CTA")
                     : fmt::format(", {} communication CTAs per rank", p.comm_workers));
}

std::string to_table(const RunReport& report) {
  std::string text =
      fmt::format("Moxie {}: one Mixture-of-Experts layer over {} rank{} on {} ({})\n\n", version(),
                  report.setup.problem.num_ranks, report.setup.problem.num_ranks == 1 ? "" : "s",
                  report.place, report.gemm);
  text += line("layer",
               fmt::format("{}: {}", report.setup.shape_name, shape_words(report.setup.problem)));
  text += line("input", input_words(report));
  text += line("tokens", token_words(report));
  text += line("rows", row_words(report.routing));
  text += line("plan", plan_words(report.plan, report.setup.backend));
  if (report.plan_source.origin == PlanOrigin::cache ||
      report.plan_source.origin == PlanOrigin::planner)
    text += line("", "from " + report.plan_source.words);
  text += line("memory", fmt::format("{:.1f} MB per rank for heap and workspace",
                                     static_cast<double>(report.memory_bytes) * 1e-6));
  text += '\n' + pass_table(report);
  if (!report.times.traces.empty()) text += '\n' + stage_table(report.times.traces);
  if (report.check) text += '\n' + check_table(*report.check);
  if (report.same_bits) {
    const std::string plans = fmt::format("{}", fmt::join(report.same_bits->plans, "; "));
    text += line("same bits", report.same_bits->ok
                                  ? "yes: " + plans
                                  : "NO: " + report.same_bits->difference + " differs in " + plans);
  }
  for (const std::string& file : report.files)
    text += line(&file == &report.files.front() ? "written" : "", file);
  return text;
}

Json to_json(const RunReport& report) {
  const double tokens = static_cast<double>(report.routing.num_tokens);
  const double flops = forward_flops(report.setup.problem, report.routing);
  Json json = {{"moxie", version()},
               {"command", report.command},
               {"machine", machine_json()},
               {"backend", report.setup.backend == BackendKind::cuda ? "cuda" : "cpu"},
               {"place", report.place},
               {"gemm", report.gemm},
               {"shape_name", report.setup.shape_name},
               {"problem", to_json(report.setup.problem)},
               {"tokens", report.setup.tokens},
               {"input", input_words(report)},
               {"plan", to_json(report.plan)},
               {"plan_source",
                {{"origin", name(report.plan_source.origin)}, {"words", report.plan_source.words}}},
               {"memory_bytes_per_rank", report.memory_bytes}};
  json["rows"] = {{"per_rank", report.routing.rows_per_rank},
                  {"per_expert", report.routing.rows_per_expert}};
  json["forward"] = samples_json(report.times.forward, tokens, flops);
  json["backward"] = samples_json(report.times.backward, tokens, 2 * flops);
  json["stages_ms"] = {{"forward", stages_json(report.times.traces, 0)},
                       {"backward", stages_json(report.times.traces, 1)}};
  json["check"] = report.check ? check_json(*report.check) : Json();
  json["same_bits"] = report.same_bits
                          ? Json{{"ok", report.same_bits->ok}, {"plans", report.same_bits->plans}}
                          : Json();
  json["files"] = report.files;
  return json;
}

}  // namespace moxie::cli
