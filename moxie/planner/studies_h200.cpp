// Rows measured on 2 x H200 against the simulator: Moxie's own forward (bench/results/
// h200x2-forward.json), the split baseline and the feasibility kernel's variants. The test
// tests/test_planner_rows.cpp holds each to its bound and docs/planner.md shows the table.
#include <fmt/format.h>

#include "moxie/planner/baseline.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {
namespace {

struct Shape {
  const char* name;
  std::int64_t hidden, intermediate, experts_per_rank, top_k, tokens;
  double burst_ms, sustained_ms, nccl_torch_ms;
};
// bench/results/h200x2-forward.json: medians of "moxie burst" and "moxie sustained".
constexpr Shape kShapes[] = {
    {"kimi-k2.5 slice", 7168, 2048, 6, 8, 8192, 8.031, 9.272, 18.56},
    {"deepseek-v3 slice", 7168, 2048, 8, 8, 8192, 8.046, 9.385, 18.40},
    {"qwen3-30b", 2048, 768, 64, 8, 16384, 2.191, 2.483, 8.61},
    {"mixtral-8x7b", 4096, 14336, 4, 2, 8192, 7.780, 9.201, 11.06},
    {"gpt-oss-120b", 2880, 2880, 64, 4, 16384, 5.085, 5.924, 10.59},
};

Problem problem_of(const Shape& shape) {
  Problem p;
  p.num_ranks = 2;
  p.max_tokens = shape.tokens;
  p.hidden = shape.hidden;
  p.intermediate = shape.intermediate;
  p.num_experts = 2 * shape.experts_per_rank;
  p.top_k = shape.top_k;
  return p;
}

}  // namespace

Study study_h200() {
  Study s{
      "h200",
      "rows measured on 2 x H200, ms",
      "bench/results/h200x2-forward.json; baselines and feasibility kernel measured 2026-11-29/30",
      {"clock_burst_mhz, clock_sustained_mhz, tile_overhead_cycles: on the compute-only kernel, "
       "kimi-k2.5 slice "
       "(7.15 ms)",
       "moved_ms_per_gb: on the feasibility kernel's whole layer, kimi-k2.5 slice (7.85 to 8.02 "
       "ms)",
       "pull_reverse_bytes: on both ranks pulling at once (335 GB/s)",
       "sm_beside_gbps: on qwen3-30b with 4 dispatch CTAs (4.48 ms)",
       "all-to-all share of the link 0.40: on the NCCL + torch row of the kimi-k2.5 slice (18.56 "
       "ms)"},
      {}};
  Plan plan;
  plan.save = SavePolicy::none;
  for (const Load load : {Load::burst, Load::sustained}) {
    const Machine m = machine(find_device("h200"), load);
    for (const Shape& shape : kShapes) {
      s.rows.push_back({fmt::format("Moxie forward, {}, {}", shape.name, name(load)),
                        load == Load::burst ? shape.burst_ms : shape.sustained_ms,
                        forward_ms(problem_of(shape), plan, m, {}, false), "ms",
                        RowKind::prediction, ""});
    }
  }
  const Machine sustained = machine(find_device("h200"), Load::sustained);
  for (const Shape& shape : kShapes) {
    const Problem p = problem_of(shape);
    const bool kimi = &shape == kShapes;
    s.rows.push_back(
        {fmt::format("NCCL + torch forward, {}", shape.name), shape.nccl_torch_ms,
         nccl_torch_forward(p, make_routing(p, {shape.tokens, shape.tokens}), sustained).ms(), "ms",
         kimi ? RowKind::calibrated : RowKind::prediction, ""});
  }
  const Machine m = machine(find_device("h200"));
  const auto with_ctas = [&](const Shape& shape, std::int32_t ctas, double measured) {
    Plan dedicated = plan;
    dedicated.comm_workers = ctas;
    const bool calibrated = ctas == 4 && shape.intermediate == 768;
    s.rows.push_back({fmt::format("{} with {} dispatch CTAs", shape.name, ctas), measured,
                      forward_ms(problem_of(shape), dedicated, m, {}, false), "ms",
                      calibrated ? RowKind::calibrated : RowKind::prediction,
                      "feasibility kernel, schedule outside of it"});
  };
  with_ctas(kShapes[0], 4, 8.99);
  with_ctas(kShapes[0], 16, 8.27);
  with_ctas(kShapes[2], 4, 4.48);
  with_ctas(kShapes[2], 8, 2.80);
  with_ctas(kShapes[2], 16, 2.275);
  return s;
}

}  // namespace moxie::planner
