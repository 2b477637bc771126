// Problem and its parts, and the presets. Plain data with named fields, compared and printed as in
// C++; `Layer` and the planner check it (`moxie::check`).
#include "python/bindings/module.h"

namespace moxie::python {
namespace {

constexpr std::initializer_list<const char*> kActivation = {"kind", "limit", "alpha"};
constexpr std::initializer_list<const char*> kShared = {"intermediate", "output_gate"};
constexpr std::initializer_list<const char*> kProblem = {
    "num_ranks", "max_tokens", "hidden",     "intermediate", "num_experts",
    "top_k",     "dtype",      "activation", "expert_bias",  "shared"};

void bind_parts(nb::module_& m) {
  nb::enum_<DType>(m, "DType", "Storage types. Sums are in float32 whatever is stored.")
      .value("f32", DType::f32)
      .value("bf16", DType::bf16)
      .value("i32", DType::i32, "expert ids only")
      .value("i64", DType::i64, "expert ids only");
  nb::enum_<ActivationKind>(m, "ActivationKind", "g and u are a row's gate and up products.")
      .value("swiglu", ActivationKind::swiglu, "silu(g) * u")
      .value("swiglu_clamped", ActivationKind::swiglu_clamped,
             "g' = min(g, limit), u' = clamp(u, -limit, limit); silu(g') * u'")
      .value("gpt_oss", ActivationKind::gpt_oss,
             "the same clamps; g' * sigmoid(alpha g') * (u' + 1)");
  nb::class_<Activation>(m, "Activation", "The expert's activation and its constants.")
      .def(
          "__init__",
          [](Activation* self, ActivationKind kind, float limit, float alpha) {
            new (self) Activation{kind, limit, alpha};
          },
          nb::kw_only(), nb::arg("kind") = ActivationKind::swiglu, nb::arg("limit") = 7.0f,
          nb::arg("alpha") = 1.702f)
      .def_rw("kind", &Activation::kind)
      .def_rw("limit", &Activation::limit, "clamp of swiglu_clamped and gpt_oss")
      .def_rw("alpha", &Activation::alpha, "gpt_oss only")
      .def(
          "__eq__", [](const Activation& a, const Activation& b) { return a == b; },
          nb::is_operator(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](nb::handle self) { return repr(self, "Activation", kActivation); });
  nb::class_<SharedExpert>(m, "SharedExpert", "An expert that every token of the rank visits.")
      .def(
          "__init__",
          [](SharedExpert* self, std::int64_t intermediate, bool output_gate) {
            new (self) SharedExpert{intermediate, output_gate};
          },
          nb::kw_only(), nb::arg("intermediate") = 0, nb::arg("output_gate") = false)
      .def_rw("intermediate", &SharedExpert::intermediate, "0: no shared expert")
      .def_rw("output_gate", &SharedExpert::output_gate,
              "multiply its output by sigmoid(x . shared_output_gate)")
      .def(
          "__eq__", [](const SharedExpert& a, const SharedExpert& b) { return a == b; },
          nb::is_operator(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](nb::handle self) { return repr(self, "SharedExpert", kShared); });
}

Problem make_problem(std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t hidden,
                     std::int64_t intermediate, std::int64_t num_experts, std::int64_t top_k,
                     DType dtype, const Activation& activation, bool expert_bias,
                     const SharedExpert& shared) {
  return {num_ranks, max_tokens, hidden,     intermediate, num_experts,
          top_k,     dtype,      activation, expert_bias,  shared};
}

void bind_presets(nb::module_& m) {
  nb::class_<Preset>(m, "Preset", "A published layer shape.")
      .def_prop_ro("name", [](const Preset& p) { return std::string(p.name); })
      .def_ro("hidden", &Preset::hidden)
      .def_ro("intermediate", &Preset::intermediate)
      .def_ro("num_experts", &Preset::num_experts)
      .def_ro("top_k", &Preset::top_k)
      .def_ro("shared", &Preset::shared)
      .def_ro("activation", &Preset::activation)
      .def_ro("expert_bias", &Preset::expert_bias)
      .def_ro("sigmoid_router", &Preset::sigmoid_router, "False: softmax")
      .def_prop_ro("note", [](const Preset& p) { return std::string(p.note); })
      .def(
          "problem",
          [](const Preset& p, std::int64_t num_ranks, std::int64_t max_tokens, DType dtype) {
            Problem problem = problem_of(p);
            problem.num_ranks = num_ranks;
            problem.max_tokens = max_tokens;
            problem.dtype = dtype;
            return problem;
          },
          nb::kw_only(), nb::arg("num_ranks"), nb::arg("max_tokens"),
          nb::arg("dtype") = DType::bf16, "The preset's layer on so many ranks.")
      .def("__repr__", [](const Preset& p) { return "<Preset " + std::string(p.name) + ">"; });
  m.def(
      "presets", [] { return std::vector<Preset>(presets().begin(), presets().end()); },
      "The published layer shapes.");
  m.def(
      "find_preset", [](const std::string& name) { return find_preset(name); }, nb::arg("name"),
      "The preset of that name. Raises InvalidArgumentError naming the closest one.");
}

}  // namespace

void bind_problem(nb::module_& m) {
  bind_parts(m);
  nb::class_<Problem>(m, "Problem",
                      "The shape and arithmetic of one MoE layer.\n\n"
                      "R ranks hold E experts in contiguous ranges whose sizes differ by at most "
                      "one; H and I are multiples of 64. Checked by Layer and by the planner.")
      .def(
          "__init__",
          [](Problem* self, std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t hidden,
             std::int64_t intermediate, std::int64_t num_experts, std::int64_t top_k, DType dtype,
             const Activation& activation, bool expert_bias, const SharedExpert& shared) {
            new (self)
                Problem(make_problem(num_ranks, max_tokens, hidden, intermediate, num_experts,
                                     top_k, dtype, activation, expert_bias, shared));
          },
          nb::kw_only(), nb::arg("num_ranks") = 1, nb::arg("max_tokens"), nb::arg("hidden"),
          nb::arg("intermediate"), nb::arg("num_experts"), nb::arg("top_k"),
          nb::arg("dtype") = DType::bf16, nb::arg("activation") = Activation{},
          nb::arg("expert_bias") = false, nb::arg("shared") = SharedExpert{})
      .def_rw("num_ranks", &Problem::num_ranks, "R")
      .def_rw("max_tokens", &Problem::max_tokens, "most tokens any rank brings to one pass")
      .def_rw("hidden", &Problem::hidden, "H, a multiple of 64")
      .def_rw("intermediate", &Problem::intermediate, "I, a multiple of 64")
      .def_rw("num_experts", &Problem::num_experts, "E over all ranks")
      .def_rw("top_k", &Problem::top_k, "K")
      .def_rw("dtype", &Problem::dtype, "storage of x, weights and y: f32 or bf16")
      .def_rw("activation", &Problem::activation)
      .def_rw("expert_bias", &Problem::expert_bias, "biases on gate, up and down")
      .def_rw("shared", &Problem::shared)
      .def(
          "experts_of",
          [](const Problem& p, std::int64_t rank) {
            check(p);
            if (rank < 0 || rank >= p.num_ranks) {
              throw Error(ErrorCode::invalid_argument,
                          fmt::format("rank of experts_of is {}, must be between 0 and {}; nearest "
                                      "legal value {}",
                                      rank, p.num_ranks - 1, rank < 0 ? 0 : p.num_ranks - 1));
            }
            const std::int64_t begin = expert_begin(p.num_experts, p.num_ranks, RankId{rank});
            const nb::object range = nb::module_::import_("builtins").attr("range");
            return range(begin,
                         begin + num_local_experts(p.num_experts, p.num_ranks, RankId{rank}));
          },
          nb::arg("rank"), nb::sig("def experts_of(self, rank: int) -> range"),
          "The global experts that a rank holds.")
      .def(
          "check", [](const Problem& p) { check(p); },
          "Raises InvalidArgumentError for a shape that is not legal.")
      .def(
          "__eq__", [](const Problem& a, const Problem& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](nb::handle self) { return repr(self, "Problem", kProblem); })
      .def("__str__", [](const Problem& p) { return to_string(p); });
  bind_presets(m);
}

}  // namespace moxie::python
