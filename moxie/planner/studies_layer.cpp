// Studies of whole layers: speed-up, end to end, ablation, scale.
#include <fmt/format.h>

#include <algorithm>

#include "moxie/planner/baseline.h"
#include "moxie/planner/choose.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {
namespace {

// What split push libraries do: stages one after another, rows pushed and kept for the backward,
// sorted by expert and back, activated and quantised by kernels of their own, results carried home
// by a stage of their own.
Plan split_push() {
  Plan plan;
  plan.mode = ExecMode::split;
  plan.dispatch = DispatchMode::push;
  plan.combine = CombineMode::comm_workers;
  plan.save = SavePolicy::z_and_x;
  return plan;
}
Mechanisms unfused() {
  Mechanisms m;
  m.fused_activation = false;
  m.separate_kernels = true;
  return m;
}

Plan training_plan() { return {}; }

}  // namespace

Study study_speedup() {
  Study s{
      "speedup",
      "whole layer, Moxie's plan over a split push baseline of the same bodies, GB300, 64 ranks",
      "Mixture-of-Kittens on GB300 against the fastest public baseline, best of its shapes",
      {},
      {}};
  const Machine m = machine(find_device("gb300"));
  double best[2][2] = {};
  for (const bool mxfp8 : {false, true}) {
    for (const char* preset :
         {"kimi-k2.5", "deepseek-v3", "deepseek-v4-pro", "qwen3-235b-a22b", "glm-4.5-air"}) {
      const Problem p = study_problem(preset, 64, 8192);
      Mechanisms fused, split = unfused();
      fused.mxfp8 = split.mxfp8 = mxfp8;
      const double forward =
          forward_ms(p, split_push(), m, split) / forward_ms(p, training_plan(), m, fused);
      const double backward =
          backward_ms(p, split_push(), m, split) / backward_ms(p, training_plan(), m, fused);
      best[mxfp8][0] = std::max(best[mxfp8][0], forward);
      best[mxfp8][1] = std::max(best[mxfp8][1], backward);
      const char* type = mxfp8 ? "MXFP8" : "BF16";
      s.rows.push_back(
          {fmt::format("{} {} forward", preset, type), {}, forward, "x", RowKind::own, ""});
      s.rows.push_back(
          {fmt::format("{} {} backward", preset, type), {}, backward, "x", RowKind::own, ""});
    }
  }
  const char* note =
      "baseline here: Moxie's own GEMM loop, no padding and no host synchronisation; rows are "
      "permuted, activated and quantised by kernels of their own";
  s.rows.push_back({"best BF16 forward", 1.92, best[0][0], "x", RowKind::prediction, note});
  s.rows.push_back({"best BF16 backward", 1.58, best[0][1], "x", RowKind::prediction, note});
  s.rows.push_back({"best MXFP8 forward", 2.37, best[1][0], "x", RowKind::prediction, note});
  s.rows.push_back(
      {"best MXFP8 backward", 1.78, best[1][1], "x", RowKind::prediction,
       "misses: the baseline moves rows in MXFP8, too, and its products run at the full rate; "
       "which public one was measured, and at which precision it dispatches, is not known"});
  // The same against a chain of library kernels, as measured on H200.
  for (const char* preset : {"kimi-k2.5", "deepseek-v3", "qwen3-235b-a22b"}) {
    const Problem p = study_problem(preset, 64, 8192);
    Problem routed = p;
    routed.shared = {};
    const RoutingCounts routing = make_routing(routed, std::vector<std::int64_t>(64, 8192));
    const double chain = nccl_torch_forward(routed, routing, m).ms();
    s.rows.push_back({fmt::format("{} BF16 forward against NCCL + torch", preset),
                      {},
                      chain / forward_ms(routed, training_plan(), m),
                      "x",
                      RowKind::own,
                      "all-to-all share of the link as on H200"});
  }
  return s;
}

Study study_end_to_end() {
  Study s{"end-to-end",
          "training on 512 GPUs in racks of 72, EP64 inside a rack",
          "Mixture-of-Kittens on GB300: 760.9 -> 1070.2 tokens/s per GPU over DeepEP (+41 %)",
          {},
          {}};
  const Machine m = machine(find_device("gb300"));
  const Problem p = study_problem("kimi-k2.5", 64, 8192);
  const double before =
      forward_ms(p, split_push(), m, unfused()) + backward_ms(p, split_push(), m, unfused());
  const double after = forward_ms(p, training_plan(), m) + backward_ms(p, training_plan(), m);
  const double layer = before / after;
  // Amdahl: 1 / (1 - share + share / layer) = 1.406.
  const double gain = 1070.2 / 760.9, share = (1 - 1 / gain) / (1 - 1 / layer);
  s.rows.push_back(
      {"MoE layer, split push baseline, forward + backward", {}, before, "ms", RowKind::own, ""});
  s.rows.push_back({"MoE layer, Moxie's plan", {}, after, "ms", RowKind::own, ""});
  s.rows.push_back({"speed-up of the layer", {}, layer, "x", RowKind::own, ""});
  s.rows.push_back(
      {"step speed-up if the step were nothing but this layer", gain, layer, "x",
       RowKind::prediction,
       "an upper bound: the published model, batch and parallelism are not known, so the "
       "share of the MoE layers in the step cannot be predicted"});
  s.rows.push_back(
      {"share of the step the MoE layers would need for +41 %",
       {},
       100 * share,
       "%",
       RowKind::own,
       share > 1 ? "more than all of it: the baseline here is faster than DeepEP's chain" : ""});
  return s;
}

Study study_ablation() {
  Study s{
      "ablation",
      "forward time of a layer, each mechanism taken away from Moxie's plan (-) and added alone to "
      "the split push baseline (+), ms",
      "nobody published such a table",
      {},
      {}};
  struct Config {
    Plan plan;
    Mechanisms mechanisms;
  };
  struct Mechanism {
    const char* name;
    void (*on)(Config&);
    void (*off)(Config&);
  };
  // "off" of the spare warps: 16 CTAs that only communicate. Minibatch off: 64 blocks share one
  // counter. Ring on: slots for five bands instead of all rows.
  static const Mechanism kMechanisms[] = {
      {"pull dispatch", [](Config& c) { c.plan.dispatch = DispatchMode::pull; },
       [](Config& c) { c.plan.dispatch = DispatchMode::push; }},
      {"one kernel", [](Config& c) { c.plan.mode = ExecMode::fused; },
       [](Config& c) { c.plan.mode = ExecMode::split; }},
      {"spare warps instead of 16 communication CTAs", [](Config& c) { c.plan.comm_workers = 0; },
       [](Config& c) { c.plan.comm_workers = 16; }},
      {"minibatch of 1 block instead of 64", [](Config& c) { c.plan.minibatch_blocks = 1; },
       [](Config& c) { c.plan.minibatch_blocks = 64; }},
      {"ring of 48 blocks instead of all", [](Config& c) { c.plan.x_ring_blocks = 48; },
       [](Config& c) { c.plan.x_ring_blocks = 0; }},
      {"fused activation", [](Config& c) { c.mechanisms.fused_activation = true; },
       [](Config& c) { c.mechanisms.fused_activation = false; }},
      {"combine in the epilogue", [](Config& c) { c.plan.combine = CombineMode::epilogue; },
       [](Config& c) { c.plan.combine = CombineMode::comm_workers; }},
      {"pull once per (token, rank)", [](Config& c) { c.mechanisms.dedupe = true; },
       [](Config& c) { c.mechanisms.dedupe = false; }},
  };
  for (const auto& [preset, device, ranks, tokens] :
       std::vector<std::tuple<const char*, const char*, int, int>>{
           {"kimi-k2.5", "h200", 8, 8192},
           {"qwen3-30b-a3b", "h200", 8, 16384},
           {"mixtral-8x7b", "h200", 8, 8192},
           {"kimi-k2.5", "gb300", 64, 8192},
           {"qwen3-235b-a22b", "gb300", 64, 8192}}) {
    const Machine m = machine(find_device(device));
    const Problem p = study_problem(preset, ranks, tokens);
    Config all, none;
    all.plan.num_slabs = none.plan.num_slabs = 8;
    all.plan.save = none.plan.save = SavePolicy::none;
    for (const Mechanism& x : kMechanisms) {
      x.on(all);
      x.off(none);
    }
    const auto time = [&](const Config& c) {
      Plan plan = c.plan;  // a ring must hold a minibatch and a band; split mode holds all rows
      if (plan.mode == ExecMode::split || plan.minibatch_blocks > 1) plan.x_ring_blocks = 0;
      return forward_ms(p, plan, m, c.mechanisms);
    };
    const std::string where = fmt::format("{} on {} x {}", preset, ranks, device);
    const double full = time(all), bare = time(none);
    s.rows.push_back({where + ": all mechanisms", {}, full, "ms", RowKind::own, ""});
    for (const Mechanism& x : kMechanisms) {
      Config c = all;
      x.off(c);
      const double t = time(c);
      s.rows.push_back({fmt::format("  - {}", x.name),
                        {},
                        t,
                        "ms",
                        RowKind::own,
                        fmt::format("{:+.1f} %", 100 * (t / full - 1))});
    }
    s.rows.push_back({where + ": none",
                      {},
                      bare,
                      "ms",
                      RowKind::own,
                      fmt::format("{:+.1f} %", 100 * (bare / full - 1))});
    for (const Mechanism& x : kMechanisms) {
      Config c = none;
      x.on(c);
      const double t = time(c);
      s.rows.push_back({fmt::format("  + {}", x.name),
                        {},
                        t,
                        "ms",
                        RowKind::own,
                        fmt::format("{:+.1f} % of none", 100 * (t / bare - 1))});
    }
  }
  return s;
}

// Every preset on a whole rack, and on racks where it has experts for as many ranks.
Study study_scale() {
  Study s{"scale",
          "whole layers, forward and backward, one of equal ranks, 8,192 tokens each, GB300",
          "",
          {},
          {}};
  const Machine m = machine(find_device("gb300"));
  for (const Preset& preset : presets()) {
    for (const std::int64_t ranks : {72, 512}) {
      const std::int64_t R = std::min(ranks, preset.num_experts);
      if (R != ranks && ranks == 512) continue;
      const Problem p = study_problem(std::string(preset.name), R, 8192);
      // Rings and capacity as a training job would set them: twice the expected rows.
      Plan plan = training_plan();
      plan.capacity_rows =
          std::min(pipeline::worst_case_blocks(p),
                   ceil_div(2 * 8192 * p.top_k, 128) + ceil_div(p.num_experts, R)) *
          128;
      plan.x_ring_blocks = std::min<std::int64_t>(48, plan.capacity_rows / 128);
      const std::string label = fmt::format("{} on {} ranks", preset.name, R);
      s.rows.push_back({label + ", forward",
                        {},
                        forward_ms(p, plan, m),
                        "ms",
                        RowKind::own,
                        R > 72 ? "rows between racks go over the network" : ""});
      s.rows.push_back({label + ", backward", {}, backward_ms(p, plan, m), "ms", RowKind::own, ""});
    }
  }
  return s;
}

}  // namespace moxie::planner
