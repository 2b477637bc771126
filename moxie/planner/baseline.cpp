#include "moxie/planner/baseline.h"

#include <algorithm>
#include <numeric>

#include "moxie/planner/bounds.h"
#include "moxie/planner/cost.h"

namespace moxie::planner {
namespace {

constexpr double kAllToAllShare = 0.40;  // of the raw link rate: 181 of 450 GB/s; calibrated
constexpr double kTorchCycles = 1.10;  // decision 003: torch over Moxie's loop, mean of 15 products
constexpr double kLaunches = 30, kHostSyncs_us = 60;  // counted in the script; 20 us a sync

}  // namespace

double Baseline::ms() const {
  return std::accumulate(steps.begin(), steps.end(), 0.0,
                         [](double sum, const BaselineStep& s) { return sum + s.ms; });
}

Baseline nccl_torch_forward(const Problem& p, const RoutingCounts& routing, const Machine& m) {
  const CostModel cost = CostModel::make(p, m, {}, ExecMode::split);
  const RankLoad load = busiest_load(p, routing, m);
  const double elem = static_cast<double>(size_bytes(p.dtype));
  const double row = static_cast<double>(p.hidden) * elem,
               inner = static_cast<double>(p.intermediate) * elem;
  const double sent = static_cast<double>(p.max_tokens * p.top_k), rows = load.rows;
  const auto pass = [&](double bytes) { return bytes * 1e-6 / m[Field::hbm_gbps]; };
  const double exchange = load.link * row * 1e-6 / (kAllToAllShare * m[Field::link_raw_gbps]) +
                          load.network * row * 1e-6 / m[Field::network_gbps] +
                          pass(2 * load.own * row);
  const double fc1 = cost.fc1(pipeline::kBlockRows, p.intermediate, 1, false).cycles,
               fc2 = cost.fc2(pipeline::kBlockRows, p.intermediate, 1).cycles;
  const double cycles =
      load.blocks * (fc1 * static_cast<double>(pipeline::num_fc1_tiles(p.intermediate)) +
                     fc2 * static_cast<double>(pipeline::num_fc2_tiles(p.hidden)));
  Baseline b;
  b.steps = {
      {"sort, counts, launches, host syncs",
       (kLaunches * m[Field::launch_us] + kHostSyncs_us) * 1e-3},
      {"gather rows to send", pass(2 * sent * row)},
      {"all-to-all", exchange},
      {"gather by expert", pass(2 * rows * row)},
      {"grouped GEMM x 3", kTorchCycles * cycles / m[Field::num_sms] / m.clock_mhz * 1e-3},
      {"silu, multiply", pass(5 * rows * inner)},
      {"scatter back (clone and copy)", pass(4 * rows * row)},
      {"all-to-all", exchange},
      {"scatter to slots (clone and copy)", pass(4 * sent * row)},
      {"weigh and sum", pass(3 * sent * row)},
  };
  return b;
}

}  // namespace moxie::planner
