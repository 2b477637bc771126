// `moxie simulate`: one pass of a layer on a virtual machine, with its timeline; or a study, which
// holds published figures against the simulator.
#include <fmt/format.h>

#include <array>
#include <memory>
#include <numeric>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/planner_words.h"
#include "cli/verbs.h"
#include "moxie/planner/studies.h"
#include "moxie/trace/writers.h"

namespace moxie::cli {
namespace {

struct SimulateOptions {
  LayerOptions layer;
  std::string study, trace;
  planner::Passes passes = planner::Passes::both;
  Plan plan;
  planner::Mechanisms mechanisms;
  std::int64_t reserve_sms = 0;
  bool one_rank = false;
};

void add_plan_options(CLI::App& app, SimulateOptions& o) {
  Plan& p = o.plan;
  const auto group = [](CLI::Option* option) { option->group("Plan"); };
  static constexpr std::array<std::string_view, 2> kModes = {"fused", "split"},
                                                   kOrders = {"slabs", "lag"},
                                                   kDispatch = {"pull", "push"},
                                                   kCombine = {"epilogue", "comm_workers"};
  static constexpr std::array<std::string_view, 3> kSaves = {"none", "z", "z+x"};
  group(add_choice(app, "--mode", p.mode, kModes, "[fused]"));
  group(add_choice(app, "--order", p.order, kOrders, "[slabs]"));
  group(add_integer(app, "--slabs", p.num_slabs, kInt32, "column slabs [4]"));
  group(add_integer(app, "--band", p.band_blocks, kInt32, "blocks of a raster band [8]"));
  group(add_integer(app, "--lag", p.lag_bands, kInt32, "lag order: bands between FC1 and FC2 [2]"));
  group(add_integer(app, "--minibatch", p.minibatch_blocks, kInt32,
                    "blocks that share one readiness counter [1]"));
  group(add_choice(app, "--dispatch", p.dispatch, kDispatch, "[pull]"));
  group(add_choice(app, "--combine", p.combine, kCombine, "[epilogue]"));
  group(add_integer(app, "--comm-workers", p.comm_workers, kInt32,
                    "CTAs that only communicate, 0: the spare warps of all [0]"));
  group(add_integer(app, "--capacity-rows", p.capacity_rows, Range{}, "0: the worst case [0]"));
  group(add_integer(app, "--x-ring", p.x_ring_blocks, Range{}, "slots for rows, 0: all [0]"));
  group(add_integer(app, "--hidden-ring", p.hidden_ring_blocks, Range{}, "0: all [0]"));
  group(add_integer(app, "--chunk", p.chunk_blocks, kInt32,
                    "backward: blocks per chunk [0: whole experts, or by the ring]"));
  group(add_integer(app, "--lag-chunks", p.lag_chunks, kInt32, "0: enough of them [0]"));
  group(add_integer(app, "--backward-ring", p.backward_ring_blocks, Range{},
                    "0: most of the expected rows [0]"));
  group(add_choice(app, "--save", p.save, kSaves, "what forward keeps for backward [z]"));
  const auto extra = [](CLI::Option* option) { option->group("Mechanisms without a plan option"); };
  extra(app.add_flag("--dedupe,!--no-dedupe", o.mechanisms.dedupe,
                     "move a token once per (token, rank) [as the kernels do: over links, where "
                     "the plan has a slot for every row]"));
  extra(app.add_flag("--wave-barrier", o.mechanisms.wave_barrier,
                     "all CTAs meet after each band's FC1 and FC2"));
  extra(app.add_flag("--mxfp8", o.mechanisms.mxfp8, "products and dispatched rows in FP8"));
  extra(app.add_flag_function(
      "--unfused-activation", [&o](std::int64_t) { o.mechanisms.fused_activation = false; },
      "gate and up make a round trip through memory"));
}

void print_result(const char* pass, const planner::SimResult& r) {
  fmt::print("{:<11}{:.3f} ms on the slowest rank, {:.3f} on the fastest; {} tasks, {} rows\n",
             pass, r.ms, *std::min_element(r.rank_ms.begin(), r.rank_ms.end()), r.num_tasks,
             r.routed_rows);
  fmt::print("  CTA time   {}\n", wrapped(shares(r.ctas), 13));
  if (std::accumulate(r.spare_warps.begin(), r.spare_warps.end(), 0.0) > 0)
    fmt::print("  spare warps {}\n", wrapped(shares(r.spare_warps), 14));
  fmt::print("  link       out {:.1f} %, in {:.1f} %; busiest rank out {:.1f} %, in {:.1f} %\n",
             100 * r.link.out, 100 * r.link.in, 100 * r.link.max_out, 100 * r.link.max_in);
  if (r.network.sent_bytes > 0)
    fmt::print("  network    out {:.1f} %, in {:.1f} %; busiest rank out {:.1f} %, in {:.1f} %\n",
               100 * r.network.out, 100 * r.network.in, 100 * r.network.max_out,
               100 * r.network.max_in);
  if (r.gemm_stretch > 1)
    fmt::print("  power      products stretched by {:.1f} %\n", 100 * (r.gemm_stretch - 1));
}

int run_pass(const SimulateOptions& o) {
  const Problem problem = layer_problem(o.layer);
  const planner::Machine machine = layer_machine(o.layer);
  Plan plan = pipeline::resolve(problem, o.plan);
  pipeline::check(problem, plan);
  const planner::RoutingCounts routing =
      planner::make_routing(problem, layer_tokens(o.layer), o.layer.routing);
  planner::SimOptions options;
  options.symmetric = o.one_rank;
  options.reserve_sms = static_cast<std::int32_t>(o.reserve_sms);
  options.trace = !o.trace.empty();
  options.mechanisms = o.mechanisms;
  std::vector<planner::SimResult> results;
  Json json = {{"preset", o.layer.preset},
               {"problem", to_json(problem)},
               {"device", machine.device},
               {"load", name(o.layer.load)},
               {"routing", to_string(o.layer.routing)},
               {"plan", to_json(plan)}};
  for (const planner::Direction d : {planner::Direction::forward, planner::Direction::backward}) {
    const bool wanted = d == planner::Direction::forward ? o.passes != planner::Passes::backward
                                                         : o.passes != planner::Passes::forward;
    if (!wanted) continue;
    options.direction = d;
    results.push_back(planner::simulate(problem, plan, routing, machine, options));
    json[name(d)] = to_json(results.back());
  }
  json["assumed"] = machine.assumed;
  std::vector<trace::Trace> traces;
  for (planner::SimResult& r : results) traces.push_back(std::move(r.trace));
  if (!o.trace.empty()) {
    write_file(o.trace + ".svg",
               trace::to_svg(traces, {.title = "Moxie simulated: " + o.layer.preset,
                                      .subtitle = short_plan(plan)}));
    write_file(o.trace + ".json", trace::to_perfetto_json(traces));
  }
  if (o.layer.json) {
    fmt::print("{}", to_text(json));
    return kExitOk;
  }
  fmt::print("layer      {}: {}\n", o.layer.preset, to_string(problem));
  fmt::print("machine    {}, {} SMs at {:.0f} MHz ({}), {} routing\n", machine.device,
             machine.num_sms(), machine.clock_mhz, name(o.layer.load), to_string(o.layer.routing));
  fmt::print("plan       {}\n", wrapped(short_plan(plan), 11));
  std::size_t at = 0;
  if (o.passes != planner::Passes::backward) print_result("forward", results[at++]);
  if (o.passes != planner::Passes::forward) print_result("backward", results[at++]);
  if (!o.trace.empty())
    fmt::print(
        "written    {0}.svg (picture of the timeline)\n           {0}.json (the same for "
        "ui.perfetto.dev)\n",
        o.trace);
  return kExitOk;
}

int run_named_study(const SimulateOptions& o) {
  const planner::Study s = planner::run_study(o.study);
  if (o.layer.json) {
    Json json = {{"study", s.name},
                 {"title", s.title},
                 {"source", s.source},
                 {"calibrated", s.constants},
                 {"rows", Json::array()}};
    for (const planner::StudyRow& r : s.rows) {
      json["rows"].push_back({{"label", r.label},
                              {"published", r.published ? Json(*r.published) : Json()},
                              {"simulated", r.simulated},
                              {"ratio", r.published ? Json(r.simulated / *r.published) : Json()},
                              {"unit", r.unit},
                              {"kind", name(r.kind)},
                              {"note", r.note}});
    }
    fmt::print("{}", to_text(json));
    return kExitOk;
  }
  fmt::print("{}: {}\n", s.name, s.title);
  if (!s.source.empty()) fmt::print("published  {}\n", wrapped(s.source, 11));
  for (const std::string& c : s.constants) fmt::print("calibrated {}\n", wrapped(c, 11));
  std::size_t width = 5;
  for (const planner::StudyRow& r : s.rows) width = std::max(width, r.label.size());
  fmt::print("\n{:<{}}{:>11}{:>11}{:>8}  {:<5}{:<11} {}\n", "row", width, "published", "simulated",
             "ratio", "unit", "kind", "note");
  for (const planner::StudyRow& r : s.rows) {
    const std::string published = r.published ? fmt::format("{:.3f}", *r.published) : "-";
    const std::string ratio = r.published ? fmt::format("{:.3f}", r.simulated / *r.published) : "-";
    fmt::print("{:<{}}{:>11}{:>11.3f}{:>8}  {:<5}{:<11} {}\n", r.label, width, published,
               r.simulated, ratio, r.unit, name(r.kind), r.note);
  }
  return kExitOk;
}

}  // namespace

Verb add_simulate(CLI::App& app) {
  CLI::App* verb = app.add_subcommand(
      "simulate", "run a layer on a virtual machine, or a study of published figures");
  const auto options = std::make_shared<SimulateOptions>();
  add_layer_options(*verb, options->layer);
  add_text(*verb, "--study", "NAME",
           "signalling | packet-bytes | imbalance | minibatch | speedup | end-to-end | ablation | "
           "scale | h200",
           [options](const std::string& text) { options->study = text; });
  static constexpr std::array<std::string_view, 3> kPasses = {"forward", "backward", "both"};
  add_choice(*verb, "--direction", options->passes, kPasses, "[both]");
  add_integer(*verb, "--reserve-sms", options->reserve_sms, Range{0, 1024},
              "SMs left to other kernels [0]");
  verb->add_flag("--one-rank", options->one_rank,
                 "simulate one of equal ranks: quick, and without the imbalance between them");
  add_text(*verb, "--trace", "PREFIX", "write PREFIX.svg and PREFIX.json, as `moxie run` does",
           [options](const std::string& text) { options->trace = text; });
  add_plan_options(*verb, *options);
  return {verb, [options] {
            return options->study.empty() ? run_pass(*options) : run_named_study(*options);
          }};
}

}  // namespace moxie::cli
