// Before the clock starts: every rank's tables (the ones its schedule builds), what its blocks are
// made of, and who works. What tasks cost is in sim_prices.cpp.
#include <fmt/format.h>

#include <algorithm>

#include "moxie/core/error.h"
#include "moxie/planner/sim_state.h"

namespace moxie::planner {

using pipeline::BlockTable;
using pipeline::kBlockRows;
using pipeline::Range;

Simulation::Simulation(const Problem& problem, const Plan& plan, const RoutingCounts& routing,
                       const Machine& machine, const SimOptions& options)
    : problem_(problem),
      plan_(plan),
      routing_(routing),
      machine_(machine),
      options_(options),
      cost_(CostModel::make(problem, machine, options.mechanisms, plan.mode)),
      pull_(pull_wire(machine)),
      push_(push_wire(machine)),
      row_bytes_(static_cast<double>(problem.hidden * size_bytes(problem.dtype))),
      dedupes_(dedupes()),
      gathers_(gathers()),
      memory_ps_(1e3 / machine[Field::hbm_gbps]),
      link_ps_(1e3 / machine[Field::link_raw_gbps]),
      network_ps_(1e3 / machine[Field::network_gbps]),
      queue_(pool_, static_cast<std::uint32_t>(options.symmetric ? 1 : problem.num_ranks),
             shortest_way()) {
  for (std::int64_t r = 0; r < problem.num_ranks; ++r) {
    domain_of_.push_back(
        static_cast<std::int32_t>(r / std::max<std::int64_t>(1, machine.domain_ranks())));
  }
  const std::int64_t count = options.symmetric ? 1 : problem.num_ranks;
  ranks_.reserve(static_cast<std::size_t>(count));
  for (std::int64_t r = 0; r < count; ++r) build_rank(r);
  const Crew each = crew();
  workers_.reserve(static_cast<std::size_t>(count * (each.comm + each.compute)));
  programs_.reserve(workers_.capacity());
  for (RankState& r : ranks_) {
    if (dispatch_by_push()) options.symmetric ? mirror_pushes(r) : build_push(r);
    judge_power(r);
    add_workers(r, each);
  }
}

// From one rank to another.
Time Simulation::shortest_way() const {
  return from_us(std::min(machine_[Field::signal_us], machine_[Field::network_us]));
}

void Simulation::build_rank(std::int64_t index) {
  RankState& r = ranks_.emplace_back(pool_);
  r.me = RankId{index};
  r.num_tokens = routing_.tokens[static_cast<std::size_t>(index)];
  const auto R = static_cast<std::size_t>(problem_.num_ranks);
  const auto local =
      static_cast<std::size_t>(num_local_experts(problem_.num_experts, problem_.num_ranks, r.me));
  r.row_prefix.resize(local * (R + 1));
  r.source_begin.resize(local * R);
  r.expert_block.resize(local + 1);
  std::vector<const std::int32_t*> route_begin;
  for (std::int64_t p = 0; p < problem_.num_ranks; ++p) route_begin.push_back(routing_.of_rank(p));
  r.table = pipeline::build_blocks(problem_, r.me, r.num_tokens, route_begin, r.row_prefix.data(),
                                   r.source_begin.data(), r.expert_block.data());
  const BlockTable& t = r.table;
  r.routed_blocks = t.num_blocks - t.shared_blocks;
  if (r.routed_blocks > plan_.capacity_rows / kBlockRows) {
    throw Error(ErrorCode::capacity_exceeded,
                fmt::format("rank {} would receive {} rows (padded to blocks of {}), must be at "
                            "most plan.capacity_rows {}; nearest legal capacity_rows {}",
                            index, r.routed_blocks * kBlockRows, kBlockRows, plan_.capacity_rows,
                            r.routed_blocks * kBlockRows));
  }
  r.blocks.resize(static_cast<std::size_t>(t.num_blocks));
  for (std::int64_t b = 0; b < t.num_blocks; ++b) {
    const BlockId block{b};
    const std::int32_t e = t.is_shared(block) ? -1 : t.expert(block).v;
    r.block(b).expert = e;
    r.block(b).rows =
        static_cast<std::int32_t>(e < 0 ? t.rows(block) : t.rows(block, LocalExpertId{e}));
  }
  build_sources(r);
  r.minibatches.reserve(
      static_cast<std::size_t>(ceil_div(r.routed_blocks, plan_.minibatch_blocks)));
  for (std::int64_t i = 0; i < r.routed_blocks; i += plan_.minibatch_blocks) {
    r.minibatches.push_back(
        {{},
         static_cast<std::int32_t>(
             pipeline::minibatch(t, i / plan_.minibatch_blocks, plan_.minibatch_blocks).rows)});
  }
  if (forward()) {
    r.forward = pipeline::forward_stream(problem_, plan_, t);
    r.num_tickets = r.forward.num_tickets();
  } else {
    const std::size_t chunks = r.blocks.size() + local + 2;
    r.chunk_block.resize(chunks + 1);
    r.chunk_expert.resize(chunks);
    r.chunk_after.resize(chunks);
    r.step_ticket.resize(chunks + static_cast<std::size_t>(plan_.lag_chunks) + 2);
    r.backward =
        pipeline::build_chunks(problem_, plan_, t, r.chunk_block.data(), r.chunk_expert.data(),
                               r.chunk_after.data(), r.step_ticket.data());
    r.num_tickets = r.backward.num_tickets();
    r.chunks.resize(static_cast<std::size_t>(r.backward.chunks.num_chunks));
  }
  for (std::int64_t s = 0; s < num_slabs(); ++s) {
    const Range tiles =
        pipeline::slab_tiles(s, num_slabs(), pipeline::num_fc2_tiles(problem_.hidden));
    r.slabs[static_cast<std::size_t>(s)].pieces_left = pipeline::num_slab_pieces(
        combine_by_comm() ? CombineMode::comm_workers : CombineMode::epilogue, t, tiles);
  }
  if (combine_by_comm()) r.y_ready.resize(static_cast<std::size_t>(num_slabs() * r.routed_blocks));
  price_tasks(r);
}

// Home ranks of each block's rows, in row order.
void Simulation::build_sources(RankState& r) {
  const BlockTable& t = r.table;
  const std::int64_t R = problem_.num_ranks;
  r.source_of.push_back(0);
  for (std::int64_t e = 0; e < t.num_experts; ++e) {
    const std::int64_t* prefix = t.row_prefix + e * (R + 1);
    std::int64_t i = 0;
    for (std::int64_t row = 0; row < prefix[R]; row += kBlockRows) {
      const std::int64_t end = std::min(row + kBlockRows, prefix[R]);
      for (std::int64_t at = row; at < end;) {
        while (prefix[i + 1] <= at) ++i;
        const std::int64_t upto = std::min(end, prefix[i + 1]);
        r.sources.push_back({t.rotated_source(i).v, static_cast<std::int32_t>(upto - at)});
        at = upto;
      }
      r.source_of.push_back(static_cast<std::int32_t>(r.sources.size()));
    }
  }
  if (!dedupes_) return;
  for (std::int64_t source = 0; source < R; ++source) {
    for (std::int64_t e = 0; e < t.num_experts; ++e)
      r.fresh.push_back(static_cast<float>(fresh_share(problem_, routing_, source, r.me.v, e)));
  }
}

// Push dispatch: where this rank's rows lie on every destination.
void Simulation::build_push(RankState& r) {
  const auto R = static_cast<std::size_t>(problem_.num_ranks);
  const std::int64_t capacity = plan_.capacity_rows / kBlockRows;
  std::vector<const std::int32_t*> route_begin;
  std::vector<std::int32_t> tokens;
  std::int64_t most = 0;
  for (std::int64_t p = 0; p < problem_.num_ranks; ++p) {
    route_begin.push_back(routing_.of_rank(p));
    tokens.push_back(static_cast<std::int32_t>(routing_.tokens[static_cast<std::size_t>(p)]));
    most = std::max(most, at(RankId{p}).routed_blocks);
  }
  r.push_first_row.resize(static_cast<std::size_t>(problem_.num_experts));
  r.push_expert_block.resize(static_cast<std::size_t>(problem_.num_experts) + R);
  r.push_shared_blocks.resize(R);
  r.push_unit_begin.resize(static_cast<std::size_t>(most) * R + 1);
  r.push = pipeline::build_push(problem_, r.me, route_begin, tokens, capacity,
                                r.push_first_row.data(), r.push_expert_block.data(),
                                r.push_shared_blocks.data(), r.push_unit_begin.data());
}

// In a symmetric simulation what my peers push here stands for what I push to them.
void Simulation::mirror_pushes(RankState& r) {
  for (std::int32_t b = 0; b < r.routed_blocks; ++b) {
    for (std::int32_t i = r.source_of[static_cast<std::size_t>(b)];
         i < r.source_of[static_cast<std::size_t>(b + 1)]; ++i) {
      const BlockSource& s = r.sources[static_cast<std::size_t>(i)];
      for (std::int32_t row = 0; row < s.rows; row += pipeline::kDispatchUnitRows)
        r.push_units.push_back({s.rank, b,
                                static_cast<std::int32_t>(std::min<std::int64_t>(
                                    pipeline::kDispatchUnitRows, s.rows - row))});
    }
  }
}

Simulation::Crew Simulation::crew() const {
  const std::int64_t sms = machine_.num_sms() - options_.reserve_sms;
  if (gpu() && plan_.comm_workers >= sms) {
    throw Error(
        ErrorCode::invalid_plan,
        fmt::format("plan.comm_workers is {}, must be between 0 and {} (the device has {} SMs, one "
                    "must compute); nearest legal value {}",
                    plan_.comm_workers, sms - 1, sms, sms - 1));
  }
  std::int64_t comm = std::max(plan_.comm_workers, 1), compute = plan_.compute_workers;
  const bool spare = gpu() && plan_.comm_workers == 0 && !split();
  if (gpu()) {
    comm = split() ? 1 : spare ? sms : plan_.comm_workers;
    compute = split() ? sms - 1 : sms - plan_.comm_workers;
  }
  return {comm, compute, spare};
}

void Simulation::add_workers(RankState& r, const Crew& crew) {
  for (std::int64_t i = 0; i < crew.comm + crew.compute; ++i) {
    Worker& w = workers_.emplace_back();
    WorkerProgram& rest = programs_.emplace_back();
    rest.role = i < crew.comm ? Role::comm : Role::compute;
    rest.idx = static_cast<std::int32_t>(i < crew.comm ? i : i - crew.comm);
    w.rank = &r;
    w.is_cta = rest.role == Role::compute || (gpu() && !crew.spare);
    ++r.uses[w.is_cta ? 0 : 1].workers;
  }
}

}  // namespace moxie::planner
