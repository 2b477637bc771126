// Rows measured on H200 against the simulator: Moxie's own passes on one GPU and on two (bench/
// results), the split baseline and the feasibility kernel's variants. The test
// tests/test_planner_rows.cpp holds each to its bound and docs/planner.md shows the tables.
#include <fmt/format.h>

#include "moxie/planner/baseline.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {
namespace {

struct Shape {
  const char* name;
  std::int64_t hidden, intermediate, experts, top_k, tokens;  // tokens of a rank

  Problem problem(std::int64_t num_ranks) const {
    Problem p;
    p.num_ranks = num_ranks;
    p.max_tokens = tokens;
    p.hidden = hidden;
    p.intermediate = intermediate;
    p.num_experts = experts;
    p.top_k = top_k;
    return p;
  }
};

struct TwoGpuShape : Shape {
  double burst_ms, sustained_ms, nccl_torch_ms;
};
// bench/results/h200x2-forward.json: medians of "moxie burst" and "moxie sustained".
constexpr TwoGpuShape kShapes[] = {
    {{"kimi-k2.5 slice", 7168, 2048, 12, 8, 8192}, 8.091, 9.366, 18.56},
    {{"deepseek-v3 slice", 7168, 2048, 16, 8, 8192}, 8.112, 9.377, 18.40},
    {{"qwen3-30b", 2048, 768, 128, 8, 16384}, 2.198, 2.499, 8.61},
    {{"mixtral-8x7b", 4096, 14336, 8, 2, 8192}, 7.895, 9.226, 11.06},
    {{"gpt-oss-120b", 2880, 2880, 128, 4, 16384}, 5.181, 5.974, 10.59},
};

}  // namespace

Study study_h200() {
  Study s{
      "h200",
      "rows measured on 2 x H200, ms",
      "bench/results/h200x2-forward.json; baselines and feasibility kernel measured 2026-11-29/30",
      {"clock_burst_mhz, clock_sustained_mhz, tile_overhead_cycles: on the compute-only kernel, "
       "kimi-k2.5 slice "
       "(7.15 ms)",
       "fused_tile_cycles, moved_ms_per_gb: on three rows of one H200 (study h200-forward)",
       "pull_reverse_bytes: on both ranks pulling at once (335 GB/s)",
       "sm_beside_gbps: on qwen3-30b with 4 dispatch CTAs (4.48 ms)",
       "all-to-all share of the link 0.40: on the NCCL + torch row of the kimi-k2.5 slice (18.56 "
       "ms)"},
      {}};
  Plan plan;
  plan.save = SavePolicy::none;
  for (const Load load : {Load::burst, Load::sustained}) {
    const Machine m = machine(find_device("h200"), load);
    for (const TwoGpuShape& shape : kShapes) {
      s.rows.push_back({fmt::format("Moxie forward, {}, {}", shape.name, name(load)),
                        load == Load::burst ? shape.burst_ms : shape.sustained_ms,
                        forward_ms(shape.problem(2), plan, m, {}, false), "ms", RowKind::prediction,
                        ""});
    }
  }
  const Machine sustained = machine(find_device("h200"), Load::sustained);
  for (const TwoGpuShape& shape : kShapes) {
    const Problem p = shape.problem(2);
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
                      forward_ms(shape.problem(2), dedicated, m, {.dedupe = false}, false), "ms",
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

namespace {

// One GPU with the rows of each of two ranks and the experts of both: no link.
struct OneGpuShape : Shape {
  // bench/results/h200-forward.json: medians of "moxie burst" and "moxie sustained"
  double forward_burst_ms, forward_sustained_ms;
  // bench/results/h200-backward.json: the same, "moxie save_none burst", "moxie save_z_and_x burst"
  double burst_ms, sustained_ms, save_none_ms, save_z_and_x_ms;
};
constexpr OneGpuShape kOneGpuShapes[] = {
    {{"kimi-k2.5", 7168, 2048, 12, 8, 8192}, 7.642, 8.860, 15.327, 17.976, 20.659, 15.360},
    {{"deepseek-v3", 7168, 2048, 16, 8, 8192}, 7.641, 8.886, 15.351, 18.114, 20.993, 15.623},
    {{"qwen3-30b", 2048, 768, 128, 8, 16384}, 2.081, 2.352, 4.326, 5.035, 6.111, 4.192},
    {{"mixtral-8x7b", 4096, 14336, 8, 2, 8192}, 7.580, 8.953, 15.963, 18.287, 21.081, 15.725},
    {{"gpt-oss-120b", 2880, 2880, 128, 4, 16384}, 5.317, 6.080, 11.940, 13.921, 16.218, 11.989},
};

}  // namespace

Study study_h200_forward() {
  Study s{"h200-forward",
          "forward passes measured on one H200, default plan, ms",
          "bench/results/h200-forward.json",
          {"fused_tile_cycles, moved_ms_per_gb: together on deepseek-v3, qwen3-30b and "
           "gpt-oss-120b, burst"},
          {}};
  Plan plan;
  plan.save = SavePolicy::none;
  for (const Load load : {Load::burst, Load::sustained}) {
    const bool burst = load == Load::burst;
    for (const OneGpuShape& shape : kOneGpuShapes) {
      const std::string_view name = shape.name;
      const bool calibrated = burst && name != "kimi-k2.5" && name != "mixtral-8x7b";
      s.rows.push_back({fmt::format("forward, {}, {}", name, planner::name(load)),
                        burst ? shape.forward_burst_ms : shape.forward_sustained_ms,
                        forward_ms(shape.problem(1), plan, machine(find_device("h200"), load)),
                        "ms", calibrated ? RowKind::calibrated : RowKind::prediction, ""});
    }
  }
  return s;
}

Study study_h200_backward() {
  Study s{"h200-backward",
          "backward passes measured on one H200, default plan, ms",
          "bench/results/h200-backward.json",
          {"stored_tile_cycles: between qwen3-30b, burst, z saved (4.45 ms) and nothing saved "
           "(6.23 ms)"},
          {}};
  for (const OneGpuShape& shape : kOneGpuShapes) {
    const Problem p = shape.problem(1);
    const bool qwen3 = shape.name == std::string_view("qwen3-30b");
    const auto add = [&](const std::string& what, SavePolicy save, Load load, double ms,
                         RowKind kind) {
      Plan plan;
      plan.save = save;
      s.rows.push_back({fmt::format("{}, {}", shape.name, what), ms,
                        backward_ms(p, plan, machine(find_device("h200"), load)), "ms", kind, ""});
    };
    add("burst", SavePolicy::z, Load::burst, shape.burst_ms,
        qwen3 ? RowKind::calibrated : RowKind::prediction);
    add("sustained", SavePolicy::z, Load::sustained, shape.sustained_ms, RowKind::prediction);
    add("nothing saved, burst", SavePolicy::none, Load::burst, shape.save_none_ms,
        qwen3 ? RowKind::calibrated : RowKind::prediction);
    add("z and x saved, burst", SavePolicy::z_and_x, Load::burst, shape.save_z_and_x_ms,
        RowKind::prediction);
  }
  return s;
}

}  // namespace moxie::planner
