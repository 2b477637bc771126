// The planner: which plan for a layer on a machine, bounds in closed form, and the reasons.
#include "moxie/planner/choose.h"

#include "moxie/planner/explain.h"
#include "python/bindings/module.h"

namespace moxie::python {
namespace {

using namespace planner;

std::string explain_text(const PlanChoice& choice) {
  std::string text = choice.why;
  for (const std::string& note : choice.notes) text += "\n\nNote: " + note;
  if (!choice.assumed.empty()) {
    text += "\n\nAssumed:";
    for (const std::string& rule : choice.assumed) text += "\n- " + rule;
  }
  return text;
}

PlanChoice choose(const Problem& problem, const Machine& machine, Passes passes,
                  const RoutingSpec& routing, std::int32_t reserve_sms, bool all_ranks,
                  double memory_gb) {
  check(problem);
  const nb::gil_scoped_release release;
  return choose_plan({.problem = problem,
                      .passes = passes,
                      .routing = routing,
                      .reserve_sms = reserve_sms,
                      .all_ranks = all_ranks,
                      .memory_gb = memory_gb},
                     machine);
}

Bounds pass_bounds(const Problem& problem, const Machine& machine, const std::optional<Plan>& plan,
                   const RoutingSpec& routing, Direction direction) {
  check(problem);
  const Plan resolved = pipeline::resolve(problem, plan ? *plan : pipeline::default_plan(problem));
  pipeline::check(problem, resolved);
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(problem.num_ranks),
                                         problem.max_tokens);
  const RankLoad load = busiest_load(problem, make_routing(problem, tokens, routing), machine);
  return bounds(problem, resolved, load, machine, direction);
}

}  // namespace

void bind_planner(nb::module_& m) {
  nb::enum_<Passes>(m, "Passes", "Which passes a plan is to be good at.")
      .value("forward", Passes::forward)
      .value("backward", Passes::backward)
      .value("both", Passes::both);
  nb::class_<Bounds>(m, "Bounds", "Lower bounds of a pass: what no plan can beat.")
      .def_ro("gemm_ms", &Bounds::gemm_ms, "real FLOPs of the busiest rank at full rate")
      .def_ro("memory_ms", &Bounds::memory_ms, "weights and rows once through memory")
      .def_ro("link_ms", &Bounds::link_ms, "bytes of the busiest port")
      .def_ro("network_ms", &Bounds::network_ms, "the same between domains")
      .def_prop_ro("lower_ms", &Bounds::lower_ms, "the largest of them")
      .def("__repr__", [](nb::handle self) {
        return repr(self, "Bounds", {"gemm_ms", "memory_ms", "link_ms", "network_ms"});
      });
  nb::class_<RatedPlan>(m, "RatedPlan", "A plan, its simulated times and its memory.")
      .def_prop_ro(
          "plan", [](const RatedPlan& r) { return Plan(r.plan); }, "resolved, legal")
      .def_ro("forward_ms", &RatedPlan::forward_ms, "0: not asked for, or it does not fit")
      .def_ro("backward_ms", &RatedPlan::backward_ms)
      .def_prop_ro("total_ms", &RatedPlan::total_ms)
      .def_ro("memory_gb", &RatedPlan::memory_gb, "of one rank")
      .def_ro("what", &RatedPlan::what, "of an alternative: what differs from the chosen plan")
      .def("__repr__", [](const RatedPlan& r) {
        return fmt::format("<RatedPlan {:.3f} ms, {:.2f} GB: {}>", r.total_ms(), r.memory_gb,
                           r.what.empty() ? to_string(r.plan) : r.what);
      });
  nb::class_<PlanChoice>(m, "PlanChoice", "The planner's answer.")
      .def_ro("chosen", &PlanChoice::chosen)
      .def_ro("default_plan", &PlanChoice::default_plan)
      .def_ro("alternatives", &PlanChoice::alternatives, "the nearest in time, best first")
      .def_ro("forward_bounds", &PlanChoice::forward_bounds)
      .def_ro("backward_bounds", &PlanChoice::backward_bounds)
      .def_ro("forward", &PlanChoice::forward, "the chosen plan, simulated")
      .def_ro("backward", &PlanChoice::backward)
      .def_ro("why", &PlanChoice::why, "one paragraph")
      .def_ro("notes", &PlanChoice::notes, "what a user must know: capacity, domains")
      .def_ro("assumed", &PlanChoice::assumed, "what the device record does not say")
      .def_ro("num_estimated", &PlanChoice::num_estimated)
      .def_ro("num_simulated", &PlanChoice::num_simulated)
      .def("__repr__", [](const PlanChoice& c) {
        return fmt::format("<PlanChoice {:.3f} ms: {}>", c.chosen.total_ms(),
                           to_string(c.chosen.plan));
      });
  m.def("choose_plan", &choose, nb::kw_only(), nb::arg("problem"), nb::arg("machine"),
        nb::arg("passes") = Passes::both, nb::arg("routing") = RoutingSpec{},
        nb::arg("reserve_sms") = 0, nb::arg("all_ranks") = true, nb::arg("memory_gb") = 0.0,
        "Which plan for this layer on this machine, and why.\n\n"
        "max_tokens of the problem counts as the tokens of every rank. memory_gb: of one rank for "
        "heap, workspace and saved rows; 0: a quarter of the device's. all_ranks: simulate the "
        "chosen plan on all ranks. Raises InvalidArgumentError, InvalidPlanError when no plan "
        "fits.");
  m.def("bounds", &pass_bounds, nb::kw_only(), nb::arg("problem"), nb::arg("machine"),
        nb::arg("plan") = nb::none(), nb::arg("routing") = RoutingSpec{},
        nb::arg("direction") = Direction::forward, "Lower bounds in closed form.");
  m.def("explain", &explain_text, nb::arg("choice"),
        "The reasons for a choice, what to know about it, and what it assumed, as text.");
}

}  // namespace moxie::python
