// `moxie plan`: which plan for a layer on a machine, what it will take, and why. Needs no GPU.
#include <fmt/format.h>

#include <array>
#include <memory>

#include "cli/errors.h"
#include "cli/options.h"
#include "cli/planner_words.h"
#include "cli/verbs.h"
#include "moxie/pipeline/cuda_layout.h"
#include "moxie/planner/explain.h"

namespace moxie::cli {
namespace {

struct PlanOptions {
  LayerOptions layer;
  planner::Passes passes = planner::Passes::both;
  double memory_gb = 0;
  std::int64_t reserve_sms = 0;
};

std::string bound_words(const planner::Bounds& b) {
  std::string text = fmt::format("GEMM only {:.3f} ms, link only {:.3f} ms, memory only {:.3f} ms",
                                 b.gemm_ms, b.link_ms, b.memory_ms);
  if (b.network_ms > 0) text += fmt::format(", network only {:.3f} ms", b.network_ms);
  return text;
}

std::string time_words(const planner::RatedPlan& plan, planner::Passes passes) {
  if (plan.total_ms() == 0) return fmt::format("does not fit: {:.1f} GB per rank", plan.memory_gb);
  if (passes == planner::Passes::forward) return fmt::format("forward {:.3f} ms", plan.forward_ms);
  if (passes == planner::Passes::backward)
    return fmt::format("backward {:.3f} ms", plan.backward_ms);
  return fmt::format("forward {:.3f} ms, backward {:.3f} ms", plan.forward_ms, plan.backward_ms);
}

void print_memory(const Problem& problem, const Plan& plan, planner::Passes passes) {
  std::int64_t total = 0;
  for (const pipeline::NamedBytes& b : pipeline::cuda_buffer_bytes(problem, plan)) {
    if (std::string_view(b.name) == "total") {
      total = b.num_bytes;
      continue;
    }
    if (passes == planner::Passes::forward && std::string_view(b.name).starts_with("backward."))
      continue;
    fmt::print("  {:<26}{:>18}\n", b.name, b.num_bytes);
  }
  fmt::print(
      "  {:<26}{:>18}  heap and workspace of one rank (forward and backward share addresses)\n",
      "total", total);
  if (passes == planner::Passes::forward) return;
  for (const planner::NamedGb& kept : planner::context_gb(problem, plan))
    fmt::print("  {:<26}{:>18}  kept from forward for backward\n", kept.name,
               static_cast<std::int64_t>(kept.gb * 1e9 + 0.5));
}

void print_table(const PlanOptions& o, const Problem& problem, const planner::Machine& machine,
                 const planner::PlanChoice& c) {
  const bool forward = o.passes != planner::Passes::backward,
             backward = o.passes != planner::Passes::forward;
  fmt::print("layer      {}: {}\n", o.layer.preset, to_string(problem));
  fmt::print("machine    {}, {} SMs at {:.0f} MHz ({}), {} ranks, {} routing\n", machine.device,
             machine.num_sms(), machine.clock_mhz, name(o.layer.load), problem.num_ranks,
             to_string(o.layer.routing));
  fmt::print("plan       {}\n", wrapped(short_plan(c.chosen.plan), 11));
  fmt::print("predicted  {}, {:.2f} GB per rank\n", time_words(c.chosen, o.passes),
             c.chosen.memory_gb);
  fmt::print("default    {}\n", time_words(c.default_plan, o.passes));
  if (forward) fmt::print("bounds     forward: {}\n", bound_words(c.forward_bounds));
  if (backward)
    fmt::print("{:<11}backward: {}\n", forward ? "" : "bounds", bound_words(c.backward_bounds));
  if (forward) fmt::print("CTA time   forward: {}\n", shares(c.forward.ctas));
  if (backward)
    fmt::print("{:<11}backward: {}\n", forward ? "" : "CTA time", shares(c.backward.ctas));
  fmt::print("\n{:<10}{:>10}{:>10}{:>10}  {}\n", "nearest", "forward", "backward", "GB", "change");
  for (const planner::RatedPlan& a : c.alternatives) {
    const auto ms = [](double t) { return t > 0 ? fmt::format("{:.3f}", t) : std::string("-"); };
    fmt::print("{:<10}{:>10}{:>10}{:>10.2f}  {}\n",
               fmt::format("{:+.1f} %", 100 * (a.total_ms() / c.chosen.total_ms() - 1)),
               ms(a.forward_ms), ms(a.backward_ms), a.memory_gb, a.what);
  }
  fmt::print("\nmemory     bytes of one rank\n");
  print_memory(problem, c.chosen.plan, o.passes);
  fmt::print("\nwhy        {}\n", wrapped(c.why, 11));
  for (const std::string& note : c.notes) fmt::print("note       {}\n", wrapped(note, 11));
  if (!c.assumed.empty()) {
    fmt::print("assumed    what the record of {} leaves open:\n", machine.device);
    for (const std::string& rule : c.assumed) fmt::print("           {}\n", wrapped(rule, 13));
  }
  fmt::print("search     {} plans estimated, {} simulated passes\n", c.num_estimated,
             c.num_simulated);
}

Json rated_json(const planner::RatedPlan& r) {
  return {{"plan", to_json(r.plan)},
          {"forward_ms", r.forward_ms > 0 ? Json(r.forward_ms) : Json()},
          {"backward_ms", r.backward_ms > 0 ? Json(r.backward_ms) : Json()},
          {"memory_gb", r.memory_gb},
          {"change", r.what}};
}

Json choice_json(const PlanOptions& o, const Problem& problem, const planner::Machine& machine,
                 const planner::PlanChoice& c) {
  Json json = {{"preset", o.layer.preset},
               {"problem", to_json(problem)},
               {"device", machine.device},
               {"load", name(o.layer.load)},
               {"routing", to_string(o.layer.routing)},
               {"direction", name(o.passes)},
               {"chosen", rated_json(c.chosen)},
               {"default", rated_json(c.default_plan)}};
  for (const planner::RatedPlan& a : c.alternatives) json["alternatives"].push_back(rated_json(a));
  if (o.passes != planner::Passes::backward) {
    json["bounds"]["forward"] = to_json(c.forward_bounds);
    json["forward"] = to_json(c.forward);
  }
  if (o.passes != planner::Passes::forward) {
    json["bounds"]["backward"] = to_json(c.backward_bounds);
    json["backward"] = to_json(c.backward);
  }
  for (const pipeline::NamedBytes& b : pipeline::cuda_buffer_bytes(problem, c.chosen.plan))
    json["memory_bytes"][b.name] = b.num_bytes;
  json["why"] = c.why;
  json["notes"] = c.notes;
  json["assumed"] = c.assumed;
  return json;
}

int run_plan(const PlanOptions& o) {
  planner::PlanRequest request;
  request.problem = layer_problem(o.layer);
  if (o.layer.tokens.size() > 1)
    throw Usage(
        "--tokens must be one number here: a plan is made for equal ranks; `moxie simulate` "
        "takes one per rank");
  request.passes = o.passes;
  request.routing = o.layer.routing;
  request.memory_gb = o.memory_gb;
  request.reserve_sms = static_cast<std::int32_t>(o.reserve_sms);
  const planner::Machine machine = layer_machine(o.layer);
  const planner::PlanChoice choice = planner::choose_plan(request, machine);
  if (o.layer.json)
    fmt::print("{}", to_text(choice_json(o, request.problem, machine, choice)));
  else
    print_table(o, request.problem, machine, choice);
  return kExitOk;
}

}  // namespace

Verb add_plan(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("plan", "choose a plan for a layer on a machine, and say why");
  const auto options = std::make_shared<PlanOptions>();
  add_layer_options(*verb, options->layer);
  static constexpr std::array<std::string_view, 3> kPasses = {"forward", "backward", "both"};
  add_choice(*verb, "--direction", options->passes, kPasses, "[both]");
  add_text(
      *verb, "--memory", "GB",
      "most memory of one rank for heap, workspace and saved rows [a quarter of the device's]",
      [options](const std::string& text) { options->memory_gb = parse_real("--memory", text, 0); });
  add_integer(*verb, "--reserve-sms", options->reserve_sms, Range{0, 1024},
              "SMs left to other kernels [0]");
  return {verb, [options] { return run_plan(*options); }};
}

}  // namespace moxie::cli
