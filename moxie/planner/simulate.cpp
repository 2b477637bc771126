// One pass on the virtual clock: a program per worker, events in order of time, then the sums.
#include "moxie/planner/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "moxie/core/error.h"
#include "moxie/planner/sim_state.h"

namespace moxie::planner {

using pipeline::kBlockRows;

const char* name(Direction direction) {
  return direction == Direction::forward ? "forward" : "backward";
}

const char* name(Use use) {
  switch (use) {
    case Use::start: return "start";
    case Use::gemm: return "GEMM";
    case Use::wait_rows: return "wait for rows";
    case Use::wait_slots: return "wait for slots";
    case Use::wait_order: return "wait for order";
    case Use::communicate: return "communicate";
    case Use::merge: return "merge";
    case Use::tail: return "tail";
  }
  return "unknown";
}

// Split mode: stage after stage, all workers in every stage; on a GPU each stage is a launch.
Process Simulation::end_phase(Worker& w, std::int64_t phase) {
  RankState& r = *w.rank;
  Counter& met = r.phase[static_cast<std::size_t>(phase)];
  const std::int64_t workers = gpu() ? machine_.num_sms() - options_.reserve_sms
                                     : std::max(plan_.comm_workers, 1) + plan_.compute_workers;
  add(met, 1);
  co_await wait(w, met, workers, WaitFor::phase, phase);
  const Time begin = now_;
  if (gpu()) co_await sleep(w, now_ + from_us(machine_[Field::launch_us]));
  used(w, Use::start, begin);
}

// A kernel that only moves bytes through memory, all CTAs of the rank together.
Process Simulation::memory_kernel(Worker& w, double bytes) {
  const Time begin = now_;
  const double launch_us = gpu() ? machine_[Field::launch_us] : 0;
  co_await sleep(w, now_ + from_us(launch_us) + static_cast<Time>(bytes * memory_ps_));
  used(w, Use::gemm, begin);
}

std::int64_t Simulation::routed_rows(const RankState& r) const {
  std::int64_t rows = 0;
  for (std::int64_t b = r.table.shared_blocks; b < r.table.num_blocks; ++b) rows += r.block(b).rows;
  return rows;
}

// Activation as a kernel of its own, or its backward; MXFP8: and what the products want quantised.
double Simulation::activation_bytes(const RankState& r) const {
  const double rows = static_cast<double>(routed_rows(r)),
               width = rows * static_cast<double>(problem_.intermediate);
  // Reads gate and up, writes hidden; reads z and dA', writes dgate, dup and the weighted hidden.
  double bytes = (forward() ? 3 : 6) * width * cost_.elem;
  if (!options_.mechanisms.mxfp8 || !options_.mechanisms.separate_kernels) return bytes;
  const double scaled = 33.0 / 32, once = cost_.elem + scaled, both_ways = cost_.elem + 2 * scaled;
  if (forward()) return bytes + once * width;
  // Products over K and over rows want blocks of scales along different sides.
  const double hidden = rows * static_cast<double>(problem_.hidden);
  return bytes + both_ways * (hidden + 2 * width) + once * width;
}

Process Simulation::run_split(Worker& w) {
  RankState& r = *w.rank;
  std::int64_t phase = 0;
  if (dispatch_by_push())
    co_await push_rows(w);
  else
    co_await pull_rows(w);
  co_await end_phase(w, phase++);
  const bool separate = options_.mechanisms.separate_kernels;
  const double rows_bytes =
      separate ? 2 * static_cast<double>(r.routed_blocks * kBlockRows) * row_bytes_ : 0;
  if (separate) co_await memory_kernel(w, rows_bytes);
  const std::vector<std::int64_t> ends =
      forward() ? pipeline::phase_ends(r.forward) : pipeline::phase_ends(r.backward);
  for (const std::int64_t end : ends) {
    co_await compute_tiles(w, end);
    co_await end_phase(w, phase++);
    if (options_.mechanisms.fused_activation || end != ends[forward() ? 2 : 0]) continue;
    co_await memory_kernel(w, activation_bytes(r));
  }
  if (separate) co_await memory_kernel(w, rows_bytes);
  if (combine_by_comm()) {
    for (std::int64_t s = 0; s < num_slabs(); ++s) co_await combine_slab(w, s);
    co_await end_phase(w, phase++);
  }
}

// A worker's pass. What only some workers do, or only some plans have, lies in programs of its own:
// this one is in memory for every worker.
Process Simulation::program(Worker& w) {
  RankState& r = *w.rank;
  if (rest(w).role == Role::comm || split()) co_await stage(w);
  if (leads(w)) co_await schedule_pass(w);
  co_await wait(w, r.schedule_ready, 1, WaitFor::schedule_ready, 0);
  if (split()) {
    co_await run_split(w);
  } else {
    if (rest(w).role == Role::comm) {
      if (dispatch_by_push())
        co_await push_rows(w);
      else
        co_await pull_rows(w);
    }
    // CTAs of their own join the products when they are out of rows.
    const bool joins = gpu() && !spare(w) && !combine_by_comm();
    if (rest(w).role == Role::compute || joins) co_await compute_tiles(w, r.num_tickets);
    for (std::int64_t s = 0; combine_by_comm() && s < num_slabs(); ++s) {
      co_await combine_slab(w, s);
      co_await merge_slabs(w, s);
    }
  }
  co_await merge_slabs(w, num_slabs());
  co_await Units{*this, w, &Simulation::next_end};
  if (leads(w)) co_await close_pass(w);
  rest(w).done = now_;
}

// What must have ended before the worker ends: all of the rank's merges and tasks, then the pass,
// which the leader closes.
bool Simulation::next_end(Worker& w) {
  RankState& r = *w.rank;
  const Need merges{r.merge_done, pipeline::num_merge_units(r.num_tokens, num_slabs()),
                    WaitFor::merge_done, 0},
      tasks{r.tasks_done, r.num_tickets, WaitFor::tasks_done, 0},
      pass{r.closed, 1, WaitFor::pass_closed, 0};
  const Need* next = !merges.met()              ? &merges
                     : !tasks.met()             ? &tasks
                     : !pass.met() && !leads(w) ? &pass
                                                : nullptr;
  if (next != nullptr) wait_for(w, *next, Step::end_waits);
  return next != nullptr;
}

// False: the worker's program has to go on.
bool Simulation::take_turn(Worker& w) {
  switch (w.step) {
    case Step::program: return false;
    case Step::tile:
    case Step::pushed: return finish_tile(w);
    case Step::rows: return finish_rows(w);
    case Step::merged: return finish_merge(w);
    case Step::tile_waits:
      waited(w);
      begin_tile(w);
      return true;
    case Step::rows_wait:
      waited(w);
      begin_rows(w);
      return true;
    case Step::merge_waits:
      waited(w);
      begin_merge(w);
      return true;
    case Step::end_waits: waited(w); return next_end(w);
  }
  return false;
}

SimResult Simulation::run() {
  for (Worker& w : workers_) {
    rest(w).program = program(w);
    rest(w).goes_on = rest(w).program.handle();
    wake(w, 0, Step::program);
  }
  SimResult result;
  while (!queue_.empty()) {
    __builtin_prefetch(workers_.data() + queue_.soon());
    const QueuedEvent event = queue_.pop();
    now_ = event.time;
    ++result.num_events;
    if (event.id < workers_.size()) {
      Worker& w = workers_[event.id];
      if (!take_turn(w)) rest(w).goes_on.resume();
    } else {
      const std::uint32_t at = event.id - static_cast<std::uint32_t>(workers_.size());
      const Delivery delivery = deliveries_[at];
      free_deliveries_.push_back(at);
      add(*delivery.counter, delivery.amount);
    }
  }
  for (Worker& w : workers_) {
    if (rest(w).done < 0) {
      throw Error(ErrorCode::invalid_plan,
                  fmt::format("this plan would deadlock: worker {} of rank {} waits for ever; "
                              "pipeline::check must refuse it",
                              rest(w).idx, w.rank->me.v));
    }
    w.rank->end = std::max(w.rank->end, rest(w).done);
  }
  for (RankState& r : ranks_) {
    for (Uses* sums : {&result.ctas, &result.spare_warps}) {
      auto& [workers, use] = r.uses[sums == &result.ctas ? 0 : 1];
      // What no role accounts for is waiting at the end.
      const Time known = std::accumulate(use.begin(), use.end(), Time{0});
      use[static_cast<std::size_t>(Use::tail)] += std::max<Time>(0, workers * r.end - known);
      for (std::size_t i = 0; i < kNumUses; ++i)
        (*sums)[i] += static_cast<double>(use[i]) / kPsPerSecond;
    }
  }
  const auto ports = [&](Port RankState::*port, LinkUse& use, double rate) {
    for (const RankState& r : ranks_) {
      const double capacity = rate * 1e9 * static_cast<double>(r.end) / kPsPerSecond;
      const double out = (r.*port).out.bytes / capacity, in = (r.*port).in.bytes / capacity;
      use.out += out / static_cast<double>(ranks_.size());
      use.in += in / static_cast<double>(ranks_.size());
      use.max_out = std::max(use.max_out, out);
      use.max_in = std::max(use.max_in, in);
      use.sent_bytes += (r.*port).out.bytes;
    }
  };
  ports(&RankState::link, result.link, machine_[Field::link_raw_gbps]);
  ports(&RankState::network, result.network, machine_[Field::network_gbps]);
  result.num_units = num_units_;
  for (const RankState& r : ranks_) {
    result.rank_ms.push_back(to_ms(r.end));
    result.ms = std::max(result.ms, to_ms(r.end));
    result.gemm_stretch = std::max(result.gemm_stretch, r.stretch);
    result.num_tasks += r.num_tickets;
    result.routed_rows += routed_rows(r);
  }
  if (!options_.trace) return result;
  trace::Trace& t = result.trace;
  t.num_ranks = static_cast<std::int32_t>(ranks_.size());
  for (Worker& w : workers_) {
    if (w.rank != &ranks_.front()) break;
    ++(rest(w).role == Role::comm ? t.comm_workers : t.compute_workers);
  }
  t.title = fmt::format("{} on {}, {} ranks, {} {} (simulated)", name(options_.direction),
                        machine_.device, problem_.num_ranks, name(plan_.mode), name(plan_.order));
  t.events = std::move(events_);
  std::stable_sort(t.events.begin(), t.events.end(),
                   [](const trace::Event& a, const trace::Event& b) {
                     return std::tuple(a.rank, a.role, a.worker, a.begin_ns) <
                            std::tuple(b.rank, b.role, b.worker, b.begin_ns);
                   });
  return result;
}

SimResult simulate(const Problem& problem, const Plan& plan, const RoutingCounts& routing,
                   const Machine& machine, const SimOptions& options) {
  check(problem);
  pipeline::check(problem, plan);
  if (static_cast<std::int64_t>(routing.tokens.size()) != problem.num_ranks) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("routing has {} ranks, must be num_ranks {}", routing.tokens.size(),
                            problem.num_ranks));
  }
  for (std::size_t r = 0; r < routing.tokens.size(); ++r) {
    if (routing.tokens[r] > problem.max_tokens) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("tokens of rank {} is {}, must be at most max_tokens {}; nearest "
                              "legal value {}",
                              r, routing.tokens[r], problem.max_tokens, problem.max_tokens));
    }
  }
  Simulation simulation(problem, plan, routing, machine, options);
  return simulation.run();
}

}  // namespace moxie::planner
