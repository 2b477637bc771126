// The simulator: one pass on a virtual clock.
#include "moxie/planner/simulate.h"

#include "python/bindings/module.h"

namespace moxie::python {
namespace {

using namespace planner;

nb::dict uses_dict(const Uses& uses) {
  nb::dict out;
  for (std::size_t i = 0; i < uses.size(); ++i) out[name(static_cast<Use>(i))] = uses[i];
  return out;
}

SimResult simulate_pass(const Problem& problem, const Machine& machine,
                        const std::optional<Plan>& plan, std::vector<std::int64_t> tokens,
                        const RoutingSpec& routing, Direction direction, Workers workers,
                        std::int32_t reserve_sms, bool one_rank, bool trace,
                        const Mechanisms& mechanisms) {
  check(problem);
  const Plan resolved = pipeline::resolve(problem, plan ? *plan : pipeline::default_plan(problem));
  pipeline::check(problem, resolved);
  const auto num_ranks = static_cast<std::size_t>(problem.num_ranks);
  if (tokens.empty()) tokens.assign(num_ranks, problem.max_tokens);
  if (tokens.size() != num_ranks) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("tokens has {} entries, must have one per rank; nearest legal value {}",
                            tokens.size(), num_ranks));
  }
  for (std::size_t r = 0; r < num_ranks; ++r) {
    if (tokens[r] >= 0 && tokens[r] <= problem.max_tokens) continue;
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("tokens of rank {} is {}, must be between 0 and max_tokens {}; nearest "
                    "legal value {}",
                    r, tokens[r], problem.max_tokens, tokens[r] < 0 ? 0 : problem.max_tokens));
  }
  const nb::gil_scoped_release release;
  return simulate(problem, resolved, make_routing(problem, tokens, routing), machine,
                  {.direction = direction,
                   .workers = workers,
                   .reserve_sms = reserve_sms,
                   .symmetric = one_rank,
                   .trace = trace,
                   .mechanisms = mechanisms});
}

void bind_inputs(nb::module_& m) {
  nb::enum_<Direction>(m, "Direction", "Which pass.")
      .value("forward", Direction::forward)
      .value("backward", Direction::backward);
  nb::enum_<Workers>(m, "Workers", "Who does the work of a rank.")
      .value("gpu", Workers::gpu, "the SMs of the device")
      .value("as_plan", Workers::as_plan, "the plan's workers, as the threads of the CPU twin");
  nb::enum_<Skew>(m, "Skew", "How unevenly tokens go to experts.")
      .value("even", Skew::even, "every expert the same number of rows, as far as they divide")
      .value("uniform", Skew::uniform, "K different experts per token, equal chances")
      .value("zipf", Skew::zipf, "chances (1 + place)^-exponent")
      .value("hot", Skew::hot, "one expert takes slot 0 of every token");
  const RoutingSpec d;
  nb::class_<RoutingSpec>(m, "RoutingSpec", "Where tokens go, as a rule.")
      .def(
          "__init__",
          [](RoutingSpec* self, Skew skew, double exponent, std::int64_t expert,
             std::uint64_t seed) {
            new (self) RoutingSpec{skew, exponent, expert, seed};
          },
          nb::kw_only(), nb::arg("skew") = d.skew, nb::arg("exponent") = d.exponent,
          nb::arg("expert") = d.expert, nb::arg("seed") = d.seed)
      .def_rw("skew", &RoutingSpec::skew)
      .def_rw("exponent", &RoutingSpec::exponent, "zipf")
      .def_rw("expert", &RoutingSpec::expert, "hot")
      .def_rw("seed", &RoutingSpec::seed)
      .def("__repr__", [](nb::handle self) {
        return repr(self, "RoutingSpec", {"skew", "exponent", "expert", "seed"});
      });
  nb::class_<Mechanisms>(m, "Mechanisms", "What the pipeline has no plan option for.")
      .def(
          "__init__",
          [](Mechanisms* self, std::optional<bool> dedupe, bool fused_activation, bool mxfp8,
             bool wave_barrier) {
            new (self) Mechanisms{.dedupe = dedupe,
                                  .fused_activation = fused_activation,
                                  .mxfp8 = mxfp8,
                                  .wave_barrier = wave_barrier};
          },
          nb::kw_only(), nb::arg("dedupe") = nb::none(), nb::arg("fused_activation") = true,
          nb::arg("mxfp8") = false, nb::arg("wave_barrier") = false)
      .def_rw("dedupe", &Mechanisms::dedupe,
              "dispatch moves a token once per (token, rank); None: as the kernels do, over links, "
              "where the "
              "plan has a slot for every row")
      .def_rw("fused_activation", &Mechanisms::fused_activation)
      .def_rw("mxfp8", &Mechanisms::mxfp8)
      .def_rw("wave_barrier", &Mechanisms::wave_barrier)
      .def("__repr__", [](nb::handle self) {
        return repr(self, "Mechanisms", {"dedupe", "fused_activation", "mxfp8", "wave_barrier"});
      });
}

}  // namespace

void bind_simulator(nb::module_& m) {
  bind_inputs(m);
  nb::class_<LinkUse>(m, "LinkUse", "Share of a port's capacity in use over the pass.")
      .def_ro("out", &LinkUse::out, "mean over ranks")
      .def_prop_ro(
          "into", [](const LinkUse& l) { return l.in; }, "mean over ranks")
      .def_ro("max_out", &LinkUse::max_out)
      .def_prop_ro("max_into", [](const LinkUse& l) { return l.max_in; })
      .def_ro("sent_bytes", &LinkUse::sent_bytes, "on the wire, all ranks, one direction");
  nb::class_<SimResult>(m, "SimResult", "One simulated pass.")
      .def_ro("ms", &SimResult::ms, "of the slowest rank")
      .def_ro("rank_ms", &SimResult::rank_ms)
      .def_prop_ro(
          "cta_seconds", [](const SimResult& r) { return uses_dict(r.ctas); },
          nb::sig("def cta_seconds(self) -> dict[str, float]"), "where the time of all CTAs goes")
      .def_prop_ro(
          "spare_warp_seconds", [](const SimResult& r) { return uses_dict(r.spare_warps); },
          nb::sig("def spare_warp_seconds(self) -> dict[str, float]"))
      .def_ro("link", &SimResult::link)
      .def_ro("network", &SimResult::network)
      .def_ro("gemm_stretch", &SimResult::gemm_stretch, "1.02: power stretches products by 2 %")
      .def_ro("num_tasks", &SimResult::num_tasks, "tiles of products")
      .def_ro("num_units", &SimResult::num_units, "of rows and tokens: dispatch, combine, merge")
      .def_ro("num_events", &SimResult::num_events)
      .def_ro("routed_rows", &SimResult::routed_rows)
      .def_prop_ro(
          "trace", [](const SimResult& r) { return r.trace; }, "empty unless asked for")
      .def("__repr__", [](const SimResult& r) {
        return fmt::format("<SimResult {:.3f} ms, {} ranks>", r.ms, r.rank_ms.size());
      });
  m.def("simulate", &simulate_pass, nb::kw_only(), nb::arg("problem"), nb::arg("machine"),
        nb::arg("plan") = nb::none(), nb::arg("tokens") = std::vector<std::int64_t>{},
        nb::arg("routing") = RoutingSpec{}, nb::arg("direction") = Direction::forward,
        nb::arg("workers") = Workers::gpu, nb::arg("reserve_sms") = 0, nb::arg("one_rank") = false,
        nb::arg("trace") = false, nb::arg("mechanisms") = Mechanisms{},
        "One pass on a virtual clock; the same arguments give the same answer everywhere.\n\n"
        "plan: default_plan's when None. tokens: one number per rank, max_tokens when empty. "
        "one_rank: simulate rank 0 of equal ranks only. Raises InvalidArgumentError, "
        "InvalidPlanError.");
}

}  // namespace moxie::python
