#include "moxie/planner/bounds.h"

#include <algorithm>
#include <cmath>

#include "moxie/pipeline/tasks.h"
#include "moxie/planner/cost.h"

namespace moxie::planner {
namespace {

using pipeline::kBlockRows;

bool x_pulled_again(const Plan& plan, Direction direction) {
  return direction == Direction::backward && plan.save != SavePolicy::z_and_x;
}

}  // namespace

// Each number is the largest of any rank: a bound may mix ranks, none of them finishes sooner.
RankLoad busiest_load(const Problem& p, const RoutingCounts& routing, const Machine& m) {
  RankLoad most;
  const std::int64_t domain = std::max<std::int64_t>(1, m.domain_ranks());
  for (std::int64_t r = 0; r < p.num_ranks; ++r) {
    RankLoad load;
    const std::int64_t first = expert_begin(p.num_experts, p.num_ranks, RankId{r});
    for (std::int64_t e = 0; e < num_local_experts(p.num_experts, p.num_ranks, RankId{r}); ++e) {
      std::int64_t rows = 0;
      for (std::int64_t s = 0; s < p.num_ranks; ++s) {
        const std::int64_t n = routing.count(s, first + e);
        rows += n;
        (s == r                     ? load.own
         : s / domain == r / domain ? load.link
                                    : load.network) += static_cast<double>(n);
      }
      load.rows += static_cast<double>(rows);
      load.experts += rows > 0 ? 1 : 0;
      load.blocks += static_cast<double>(ceil_div(rows, kBlockRows));
    }
    most.rows = std::max(most.rows, load.rows);
    most.blocks = std::max(most.blocks, load.blocks);
    most.experts = std::max(most.experts, load.experts);
    most.own = std::max(most.own, load.own);
    most.link = std::max(most.link, load.link);
    most.network = std::max(most.network, load.network);
    if (p.shared.intermediate > 0)
      most.shared_rows = std::max(most.shared_rows,
                                  static_cast<double>(routing.tokens[static_cast<std::size_t>(r)]));
  }
  return most;
}

double Bounds::lower_ms() const { return std::max({gemm_ms, memory_ms, link_ms, network_ms}); }

Bounds bounds(const Problem& p, const Plan& plan, const RankLoad& load, const Machine& m,
              Direction direction) {
  const double elem = static_cast<double>(size_bytes(p.dtype)), h = static_cast<double>(p.hidden),
               width = static_cast<double>(p.intermediate),
               shared = static_cast<double>(p.shared.intermediate);
  const bool backward = direction == Direction::backward;
  const bool remake_z = backward && plan.save == SavePolicy::none;
  const double flops_per_row = (backward ? (remake_z ? 16 : 12) : 6) * h;
  const double rate = m[Field::num_sms] * m[Field::bf16_flops_per_sm_clock] * m.clock_mhz * 1e3;
  const WireBytes dispatch = plan.dispatch == DispatchMode::pull ? pull_wire(m) : push_wire(m);
  const WireBytes combine = push_wire(m);
  const double tensors = backward ? (x_pulled_again(plan, direction) ? 2 : 1) : 1;
  // What leaves a rank's home port is what its own tokens' routes fetch; for the bound every rank
  // sends what it receives.
  Bounds b;
  const double flops = flops_per_row * (load.rows * width + load.shared_rows * shared);
  b.gemm_ms = flops / rate;
  const double row = h * elem;
  const double weights = 3 * h * elem * (load.experts * width + shared);
  const double bytes = weights * (backward ? 2 : 1) + load.rows * row * (tensors + 3) +
                       load.rows * width * elem * (backward ? 8 : 2);
  b.memory_ms = bytes * 1e-6 / m[Field::hbm_gbps];
  const double wire =
      row * (tensors * (dispatch.forward + dispatch.reverse) + combine.forward + combine.reverse);
  // One direction of the port: rows come in on it, or pieces leave on it, with the other's
  // acknowledgements; dispatch in and combine in are different ranks' rows, equal on average.
  b.link_ms = load.link * wire * 1e-6 / m[Field::link_raw_gbps];
  b.network_ms = load.network * row * (tensors + 1) * 1e-6 / m[Field::network_gbps];
  return b;
}

double estimate_ms(const Problem& p, const Plan& plan, const RankLoad& busiest, const Machine& m,
                   const SimOptions& o) {
  const Bounds b = bounds(p, plan, busiest, m, o.direction);
  const bool backward = o.direction == Direction::backward;
  const double row = static_cast<double>(p.hidden * size_bytes(p.dtype));
  const double ctas =
      m[Field::num_sms] - o.reserve_sms - (plan.mode == ExecMode::split ? 0 : plan.comm_workers);
  // Products: padding to half blocks, overhead per tile, power.
  const double pad = busiest.rows > 0
                         ? (busiest.rows + 32 * busiest.blocks /
                                               std::max(1.0, busiest.rows / busiest.blocks / 128)) /
                               busiest.rows
                         : 1;
  const double k =
      static_cast<double>(backward ? std::min<std::int64_t>(plan.chunk_blocks * kBlockRows, 4096)
                                   : std::min(p.hidden, 2 * p.intermediate));
  const double tile = 2.0 * 128 * 256 * k / m[Field::bf16_flops_per_sm_clock];
  const bool fused_forward = !backward && plan.mode == ExecMode::fused;
  const double overhead =
      1 + 0.6 * m[fused_forward ? Field::fused_tile_cycles : Field::tile_overhead_cycles] / tile;
  const double gemm = b.gemm_ms * pad * overhead * m[Field::num_sms] / ctas;
  const double dispatched =
      busiest.rows * row * (backward ? (x_pulled_again(plan, o.direction) ? 2 : 1) : 1);
  // Weights are read again for each band of an expert's blocks. In split mode what rows move is
  // not beside the products.
  const double bands =
      backward ? 1 : busiest.blocks / std::max(1.0, busiest.experts * plan.band_blocks);
  const double weights =
      3 * row * static_cast<double>(p.intermediate) * busiest.experts * std::max(0.0, bands - 1);
  const double apart = plan.mode == ExecMode::split ? dispatched + 2 * busiest.rows * row : 0;
  const double tflop = gemm * ctas * m[Field::bf16_flops_per_sm_clock] * m.clock_mhz * 1e-9;
  const double excess_gb = b.memory_ms * m[Field::hbm_gbps] * 1e-3 + (weights - apart) * 1e-9 -
                           kProductsGbPerTflop * tflop;
  const double power = std::max(m[Field::moved_ms_per_gb] * excess_gb,
                                (m.clock_mhz / m[Field::clock_peak_mhz] - 1) * gemm);
  const double merge =
      static_cast<double>(p.max_tokens * (p.top_k + 1)) * row * 1e-6 / m[Field::hbm_gbps];
  const double start =
      (m[Field::launch_us] + m[Field::schedule_base_us] + m[Field::signal_us]) * 1e-3 +
      static_cast<double>(p.max_tokens) *
          (2 * row / m[Field::hbm_gbps] +
           static_cast<double>(p.top_k) * m[Field::schedule_ns_per_route]) *
          1e-6;
  const double link = std::max(b.link_ms, b.network_ms);
  const double round = plan.capacity_rows / kBlockRows < pipeline::worst_case_blocks(p)
                           ? m[Field::signal_us] * 1e-3
                           : 0;
  if (plan.mode == ExecMode::split)
    return start + round + gemm + power + link + merge + 5 * m[Field::launch_us] * 1e-3;
  // Communication that the workers cannot move as fast as the link takes it.
  const double movers = plan.comm_workers > 0 ? plan.comm_workers * m[Field::sm_beside_gbps]
                                              : ctas * m[Field::spare_warp_gbps];
  const double dispatch = dispatched * 1e-6 / movers;
  const double slabs = backward || plan.order == TaskOrder::lag ? 1 : plan.num_slabs;
  const double first = static_cast<double>(plan.minibatch_blocks * kBlockRows) * row * 1e-6 /
                       std::min(movers, m[Field::link_raw_gbps]);
  double exposed = merge / slabs + first;
  if (plan.dispatch == DispatchMode::push) exposed += 2 * m[Field::signal_us] * 1e-3;
  if (plan.combine == CombineMode::comm_workers && !backward)
    exposed += busiest.rows * row / slabs * 1e-6 / movers;
  // lag order keeps both stages' traffic in flight all the time; slabs order only the stage's own
  const double shape = plan.order == TaskOrder::slabs && !backward
                           ? std::max(gemm + power, link + 0.2 * gemm)
                           : std::max(gemm + power, link);
  return start + round + std::max(shape, dispatch) + exposed;
}

}  // namespace moxie::planner
