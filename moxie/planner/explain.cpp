#include "moxie/planner/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "moxie/pipeline/layout.h"

namespace moxie::planner {
namespace {

double share(const Uses& uses, Use use) {
  const double all = std::accumulate(uses.begin(), uses.end(), 0.0);
  return all > 0 ? uses[static_cast<std::size_t>(use)] / all : 0;
}

// One direction: where its time goes, and the bound it is nearest to.
std::string limits(const char* pass, const SimResult& r, const Bounds& b) {
  const double gemm = share(r.ctas, Use::gemm), link = std::max(r.link.max_out, r.link.max_in),
               network = std::max(r.network.max_out, r.network.max_in);
  std::string text = fmt::format(
      "The {} pass takes {:.3f} ms, {:.2f} times its lower bound ({} "
      "{:.3f} ms). ",
      pass, r.ms, r.ms / b.lower_ms(),
      b.lower_ms() == b.network_ms  ? "network"
      : b.lower_ms() == b.link_ms   ? "link"
      : b.lower_ms() == b.memory_ms ? "memory"
                                    : "GEMM",
      b.lower_ms());
  if (network > 0.85)
    text += fmt::format("The network between domains limits it: {:.0f} % busy", 100 * network);
  else if (link > 0.85)
    text += fmt::format("The link limits it: {:.0f} % busy in its busier direction", 100 * link);
  else if (gemm > 0.8)
    text +=
        fmt::format("The products limit it: {:.0f} % of all CTA time, the link is {:.0f} % busy",
                    100 * gemm, 100 * link);
  else
    text +=
        fmt::format("No resource is full (products {:.0f} %, link {:.0f} %): latencies limit it",
                    100 * gemm, 100 * link);
  text += fmt::format(
      "; start {:.1f} %, waiting for rows {:.1f} %, for slots {:.1f} %, for order "
      "{:.1f} %, communication {:.1f} %, merge {:.1f} %, tail {:.1f} %",
      100 * share(r.ctas, Use::start), 100 * share(r.ctas, Use::wait_rows),
      100 * share(r.ctas, Use::wait_slots), 100 * share(r.ctas, Use::wait_order),
      100 * share(r.ctas, Use::communicate), 100 * share(r.ctas, Use::merge),
      100 * share(r.ctas, Use::tail));
  if (r.gemm_stretch > 1.02)
    text += fmt::format(
        "; moving bytes beside them takes power and stretches the products by "
        "{:.0f} %",
        100 * (r.gemm_stretch - 1));
  return text + ". ";
}

}  // namespace

std::vector<NamedGb> context_gb(const Problem& p, const Plan& plan) {
  const pipeline::ContextBytes kept = pipeline::context_bytes(p, plan);
  std::vector<NamedGb> list;
  const auto add = [&](const char* name, std::int64_t bytes) {
    if (bytes > 0) list.push_back({name, static_cast<double>(bytes) * 1e-9});
  };
  add("context.routes", kept.routes);
  add("context.z", kept.z);
  add("context.x", kept.x);
  add("context.shared_z", kept.shared_z);
  return list;
}

std::string explain(const PlanRequest& request, const PlanChoice& choice,
                    std::vector<KnobEffect> effects) {
  std::string text;
  if (request.passes != Passes::backward)
    text += limits("forward", choice.forward, choice.forward_bounds);
  if (request.passes != Passes::forward)
    text += limits("backward", choice.backward, choice.backward_bounds);
  std::stable_sort(effects.begin(), effects.end(),
                   [](const KnobEffect& a, const KnobEffect& b) { return a.slower > b.slower; });
  const auto small = std::count_if(effects.begin(), effects.end(),
                                   [](const KnobEffect& e) { return e.slower < 0.005; });
  if (!effects.empty() && effects.front().slower >= 0.005) {
    text += "The knobs that matter: ";
    for (std::size_t i = 0; i < std::min<std::size_t>(3, effects.size()); ++i) {
      if (effects[i].slower < 0.005) break;
      text += fmt::format("{}{} costs {:.1f} %", i == 0 ? "" : ", ", effects[i].change,
                          100 * effects[i].slower);
    }
    text += fmt::format("; {} of {} other single changes move the time by less than 0.5 %.", small,
                        effects.size());
  } else if (!effects.empty()) {
    text += "No single knob moves the time by 0.5 %.";
  }
  return text;
}

std::vector<std::string> plan_notes(const PlanRequest& request, const Machine& machine,
                                    const PlanChoice& choice) {
  std::vector<std::string> notes;
  const Problem& p = request.problem;
  const Plan& plan = choice.chosen.plan;
  const std::int64_t worst = pipeline::worst_case_blocks(p) * pipeline::kBlockRows;
  if (plan.capacity_rows < worst) {
    notes.push_back(
        fmt::format("capacity {} rows, not the worst case {}: a pass that sends one rank more is "
                    "refused on every rank before a row moves",
                    plan.capacity_rows, worst));
  }
  if (p.num_ranks > machine.domain_ranks()) {
    notes.push_back(fmt::format(
        "{} ranks span {} domains of {}: rows between them go over the network; "
        "Moxie's backends reach one domain today",
        p.num_ranks, ceil_div(p.num_ranks, machine.domain_ranks()), machine.domain_ranks()));
  }
  if (!choice.whole_machine)
    notes.push_back(
        "alternatives were simulated as one of many equal ranks and scaled with the chosen plan, "
        "which was simulated on all of them");
  return notes;
}

}  // namespace moxie::planner
