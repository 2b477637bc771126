// Communication roles on the virtual clock: stage, schedule, dispatch, combine, merge, leaving.
// Each follows its namesake in backend_cpu/roles_comm.h, wait for wait.
#include <algorithm>

#include "moxie/planner/sim_state.h"

namespace moxie::planner {

using pipeline::kBlockRows;

// Own rank only: inputs into the heap, routes sorted, then one word to every peer.
Process Simulation::stage(Worker& w) {
  RankState& r = *w.rank;
  Time begin = now_;
  if (gpu()) co_await sleep(w, now_ + from_us(machine_[Field::launch_us]));
  used(w, Use::start, begin);
  begin = now_;
  const double tokens = static_cast<double>(r.num_tokens), tensors = forward() ? 1 : 2;
  const double bytes = 2 * tokens * tensors * row_bytes_;
  std::int64_t workers = std::max(plan_.comm_workers, 1);
  if (gpu()) workers = machine_.num_sms() - options_.reserve_sms;
  const double each = bytes / static_cast<double>(workers);
  Time end = std::max(r.memory.serve(now_, each, memory_ps_),
                      now_ + static_cast<Time>(each * 1e3 / machine_[Field::sm_merge_gbps]));
  if (leads(w)) {
    const double routes = tokens * static_cast<double>(problem_.top_k);
    end += static_cast<Time>(routes * machine_[Field::schedule_ns_per_route] * 1e3);
  }
  co_await sleep(w, end);
  record(w, trace::Kind::stage, -1, -1, false, begin, now_);
  used(w, Use::start, begin);
  add(r.stage_done, 1);
  if (!leads(w)) co_return;
  const Crew all = crew();
  co_await wait(w, r.stage_done, all.comm + (split() ? all.compute : 0), WaitFor::stage_done, 0);
  raise(r, &RankState::inputs_ready, now_);
}

// The leader's: every peer's counts, the tables, and if the capacity is not proven everybody's
// verdict.
Process Simulation::schedule_pass(Worker& w) {
  RankState& r = *w.rank;
  const Time begin = now_;
  co_await wait(w, r.inputs_ready.counter, 1, WaitFor::inputs_ready, 0);
  const Time tables = now_;
  co_await sleep(w, now_ + from_us(machine_[Field::schedule_base_us]));
  used(w, Use::start, tables);
  if (plan_.capacity_rows / kBlockRows < pipeline::worst_case_blocks(problem_)) {
    raise(r, &RankState::agreement, now_);
    co_await wait(w, r.agreement.counter, 1, WaitFor::agreement, 0);
  }
  if (r.routed_blocks == 0) {
    for (std::int64_t s = 0; s < num_slabs(); ++s) announce_slab(r, s, now_);
  }
  record(w, trace::Kind::schedule, -1, -1, false, begin, now_);
  add(r.schedule_ready, 1);
}

pipeline::DispatchUnit Simulation::rows_of(const Worker& w) const {
  const RankState& r = *w.rank;
  const BlockId b = pipeline::dispatch_block(r.table, w.unit);
  return pipeline::dispatch_unit(r.table, w.unit, r.block(b.v).rows);
}

// Of the source's rows in a block, those that dispatch moves, and from where. The kernels copy a
// row that another expert of the rank has already pulled, and the rank's own, unless FC1 gathers
// them.
Simulation::RowsMoved Simulation::rows_moved(const RankState& dest, RankId source, BlockId b,
                                             double rows) const {
  const bool own = source == dest.me;
  double fresh = rows;
  // Backward, a token is pulled once as long as slots are used for the first time.
  if (!dest.fresh.empty() && (forward() || b.v < plan_.backward_ring_blocks)) {
    const std::int64_t expert = dest.block(b.v).expert;
    fresh *= dest.fresh[static_cast<std::size_t>(source.v * dest.table.num_experts + expert)];
  }
  if (options_.mechanisms.dedupe) return own ? RowsMoved{0, fresh} : RowsMoved{fresh, 0};
  if (own) fresh = 0;
  return {fresh, gathers_ ? 0 : rows - fresh};
}

// Pulls rows into ring slots, in block order.
bool Simulation::next_rows(Worker& w) {
  RankState& r = *w.rank;
  const std::int64_t units = pipeline::num_dispatch_units(r.table);
  while (r.dispatch_unit < units) {
    w.unit = static_cast<std::int32_t>(r.dispatch_unit++);
    if (rows_of(w).rows.size() == 0) continue;
    ++num_units_;
    begin_rows(w);
    return true;
  }
  return false;
}

void Simulation::begin_rows(Worker& w) {
  RankState& r = *w.rank;
  const pipeline::DispatchUnit unit = rows_of(w);
  const BlockId b = unit.block;
  const Need slot = needed_by_slot(r, b);
  if (!slot.met()) return wait_for(w, slot, Step::rows_wait);
  w.begin = now_;
  const auto routed = static_cast<std::size_t>(r.table.routed_idx(b));
  const double row = dispatch_row_bytes(r, b);
  Time end = now_ + from_us(machine_[Field::remote_load_us]);
  double bytes = 0;
  std::int64_t first = 0;  // row of the block where the source begins
  for (std::int32_t s = r.source_of[routed]; s < r.source_of[routed + 1]; ++s) {
    const BlockSource& source = r.sources[static_cast<std::size_t>(s)];
    const std::int64_t rows =
        std::min(unit.rows.end, first + source.rows) - std::max(unit.rows.begin, first);
    first += source.rows;
    if (rows <= 0) continue;
    const RowsMoved moved = rows_moved(r, RankId{source.rank}, b, static_cast<double>(rows));
    bytes += (moved.from_peer + moved.within) * row;
    if (moved.from_peer > 0) {
      const RankId peer{source.rank};
      end = std::max(end, transfer(peer, r.me, moved.from_peer * row, pull_, true));
    }
    if (moved.within > 0)
      end = std::max(end, transfer(r.me, r.me, moved.within * row, pull_, true));
  }
  wake(w, std::max(end, now_ + static_cast<Time>(bytes * 1e3 / dispatch_gbps(w))), Step::rows);
}

bool Simulation::finish_rows(Worker& w) {
  RankState& r = *w.rank;
  const pipeline::DispatchUnit unit = rows_of(w);
  record(w, trace::Kind::dispatch, unit.block.v, -1, false, w.begin, now_);
  used(w, Use::communicate, w.begin);
  add(r.minibatches[static_cast<std::size_t>(
                        pipeline::minibatch_of(r.table, unit.block, plan_.minibatch_blocks))]
          .ready,
      static_cast<std::uint32_t>(unit.rows.size()));
  return next_rows(w);
}

PushUnit Simulation::push_unit(const RankState& r, std::int64_t unit) const {
  if (options_.symmetric) return r.push_units[static_cast<std::size_t>(unit)];
  const pipeline::PushRows u = pipeline::push_unit(r.push, unit);
  return {u.to.v, static_cast<std::int32_t>(u.block), static_cast<std::int32_t>(u.rows.size())};
}
std::int64_t Simulation::num_push_units(const RankState& r) const {
  return options_.symmetric ? static_cast<std::int64_t>(r.push_units.size()) : r.push.num_units();
}

// Push dispatch: writes own rows into the slots of the ranks that will compute them, and counts
// them there: a count that travels behind the rows.
Process Simulation::push_rows(Worker& w) {
  RankState& r = *w.rank;
  while (r.dispatch_unit < num_push_units(r)) {
    const PushUnit unit = push_unit(r, r.dispatch_unit++);
    ++num_units_;
    const RankId to{unit.dest};
    RankState& dest = at(to);
    const BlockId b{dest.table.shared_blocks + unit.block};
    if (unit.block >= plan_.x_ring_blocks) {
      co_await wait(w, dest.block(b.v - plan_.x_ring_blocks).lead_done,
                    pipeline::num_fc1_tiles(problem_.intermediate), WaitFor::peer_slot_free,
                    unit.dest);
    }
    const Time begin = now_;
    const RowsMoved moved = rows_moved(dest, r.me, b, static_cast<double>(unit.rows));
    const double bytes = (moved.from_peer + moved.within) * dispatch_row_bytes(dest, b);
    Time end = transfer(r.me, to, bytes, push_, true);
    end = std::max(end, now_ + static_cast<Time>(bytes * 1e3 / dispatch_gbps(w)));
    const Time flag = signal_time(r.me, to);  // a release waits until the rows are acknowledged
    co_await sleep(w, end + (to == r.me ? 0 : flag));
    record(w, trace::Kind::dispatch, unit.block, -1, false, begin, now_);
    used(w, Use::communicate, begin);
    later(now_ + flag, dest,
          dest.minibatches[static_cast<std::size_t>(unit.block / plan_.minibatch_blocks)].ready,
          static_cast<std::uint32_t>(unit.rows));
  }
}

// Combine by communication workers: rows of a slab go home, block by block, as FC2 stores them.
Process Simulation::combine_slab(Worker& w, std::int64_t slab) {
  RankState& r = *w.rank;
  const pipeline::Range tiles =
      pipeline::slab_tiles(slab, num_slabs(), pipeline::num_fc2_tiles(problem_.hidden));
  const double cols = static_cast<double>(slab_columns(slab).size());
  const std::int64_t end = pipeline::num_combine_units(r.table, slab + 1);
  while (r.combine_unit < end) {
    const pipeline::CombineUnit unit = pipeline::combine_unit(r.table, r.combine_unit++);
    if (unit.rows.size() > 0) {
      ++num_units_;
      const auto y =
          static_cast<std::size_t>(slab * r.routed_blocks + r.table.routed_idx(unit.block));
      co_await wait(w, r.y_ready[y], tiles.size(), WaitFor::y_ready, unit.block.v);
      const Time begin = now_;
      const double bytes = static_cast<double>(unit.rows.size()) * cols * cost_.elem;
      const Time sent = std::max(push_pieces(r, unit.block, unit.rows, cols),
                                 now_ + static_cast<Time>(bytes * 1e3 / dispatch_gbps(w)));
      co_await sleep(w, sent);
      record(w, trace::Kind::combine, unit.block.v, slab, false, begin, now_);
      used(w, Use::communicate, begin);
    }
    piece_pushed(r, slab, now_);
  }
}

// Merges the token ranges of slabs [0, end) that nobody has claimed, each as soon as every peer has
// pushed its slab.
Simulation::Units Simulation::merge_slabs(Worker& w, std::int64_t end) {
  rest(w).merge_end = pipeline::num_merge_units(w.rank->num_tokens, end);
  return {*this, w, &Simulation::next_merge};
}

bool Simulation::next_merge(Worker& w) {
  RankState& r = *w.rank;
  if (r.merge_unit >= rest(w).merge_end) return false;
  w.unit = static_cast<std::int32_t>(r.merge_unit++);
  ++num_units_;
  begin_merge(w);
  return true;
}

void Simulation::begin_merge(Worker& w) {
  RankState& r = *w.rank;
  const pipeline::MergeUnit unit = pipeline::merge_unit(w.unit, r.num_tokens);
  const Need returns{r.returns_done[static_cast<std::size_t>(unit.slab)].counter, 1,
                     WaitFor::returns_done, 0};
  if (!returns.met()) return wait_for(w, returns, Step::merge_waits);
  const Need shared{r.shared_done, r.table.shared_blocks * pipeline::num_fc2_tiles(problem_.hidden),
                    WaitFor::shared_done, 0};
  if (!shared.met()) return wait_for(w, shared, Step::merge_waits);
  w.begin = now_;
  const std::int64_t pieces = problem_.top_k + (problem_.shared.intermediate > 0 ? 2 : 1);
  const double bytes =
      static_cast<double>(unit.tokens.size() * pieces * slab_columns(unit.slab).size()) *
      cost_.elem;
  wake(w,
       std::max(r.memory.serve(now_, bytes, memory_ps_),
                now_ + static_cast<Time>(bytes * 1e3 / merge_gbps(w))),
       Step::merged);
}

bool Simulation::finish_merge(Worker& w) {
  RankState& r = *w.rank;
  record(w, trace::Kind::merge, w.unit, pipeline::merge_unit(w.unit, r.num_tokens).slab, false,
         w.begin, now_);
  used(w, Use::merge, w.begin);
  add(r.merge_done, 1);
  return next_merge(w);
}

// The leader's: the rank may leave when its output is whole and every peer has pushed everything.
Process Simulation::close_pass(Worker& w) {
  RankState& r = *w.rank;
  for (std::int64_t s = 0; s < num_slabs(); ++s) {
    co_await wait(w, r.returns_done[static_cast<std::size_t>(s)].counter, 1, WaitFor::returns_done,
                  0);
  }
  add(r.closed, 1);
}

}  // namespace moxie::planner
