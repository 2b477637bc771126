// The compute role on the virtual clock: next ticket, its waits, its time, its counter. Follows
// backend_cpu/roles_compute.h.
#include <algorithm>

#include "moxie/planner/sim_state.h"

namespace moxie::planner {

using pipeline::Range;
using pipeline::Task;
using pipeline::TaskKind;

namespace {

trace::Kind trace_kind(TaskKind kind) {
  switch (kind) {
    case TaskKind::fc1: return trace::Kind::fc1;
    case TaskKind::fc2: return trace::Kind::fc2;
    case TaskKind::dgrad: return trace::Kind::dgrad;
    case TaskKind::dx: return trace::Kind::dx;
    case TaskKind::wgrad: return trace::Kind::wgrad;
  }
  return trace::Kind::wait;
}

bool has_pieces(const Task& task) {
  return task.kind == TaskKind::fc2 || task.kind == TaskKind::dx;
}

}  // namespace

// The ring slot that block b will use is free.
Need Simulation::needed_by_slot(RankState& r, BlockId b) {
  if (forward()) {
    const std::int64_t holder = b.v - plan_.x_ring_blocks;
    if (holder < r.table.shared_blocks) return {};
    return {r.block(holder).lead_done, r.forward.fc1_tiles, WaitFor::x_slot_free, holder};
  }
  const std::int64_t holder = b.v - plan_.backward_ring_blocks;
  if (holder < 0) return {};
  const std::int64_t chunk = r.backward.chunks.chunk_of(BlockId{holder});
  return {r.chunk(chunk).trail_done, r.backward.trail_tickets(chunk), WaitFor::x_slot_free, chunk};
}

std::int64_t Simulation::wave_band(const RankState& r, const Task& task) const {
  const bool shared = task.kind != TaskKind::wgrad && r.table.is_shared(task.block);
  return shared ? -1 - task.block.v / plan_.band_blocks
                : r.table.routed_idx(task.block) / plan_.band_blocks;
}

// The first thing that w.task has to wait for.
Need Simulation::needed_by_tile(const Worker& w) {
  RankState& r = *w.rank;
  const Task& task = w.task;
  if (options_.mechanisms.wave_barrier && r.tasks_done.value < rest(w).wave_begin)
    return {r.tasks_done, rest(w).wave_begin, WaitFor::phase, wave_band(r, task)};
  switch (task.kind) {
    case TaskKind::fc1:
    case TaskKind::dgrad: {
      if (r.table.is_shared(task.block)) return forward() ? Need{} : needed_by_slot(r, task.block);
      MinibatchState& minibatch = r.minibatches[static_cast<std::size_t>(
          pipeline::minibatch_of(r.table, task.block, plan_.minibatch_blocks))];
      const Need rows{minibatch.ready, minibatch.rows, WaitFor::x_ready, task.block.v};
      const std::int64_t holder = task.block.v - plan_.hidden_ring_blocks;
      if (!rows.met() || !forward() || holder < r.table.shared_blocks) return rows;
      return {r.block(holder).fc2_done, r.forward.fc2_tiles, WaitFor::hidden_free, holder};
    }
    case TaskKind::fc2:
    case TaskKind::dx:
      return {r.block(task.block.v).lead_done, lead_tiles(r, task.block), WaitFor::fc1_done,
              task.block.v};
    case TaskKind::wgrad: break;
  }
  if (task.chunk == r.ready_chunk) return {};
  const auto& chunks = r.backward.chunks;
  const Range blocks = chunks.blocks(task.chunk);
  for (std::int64_t i = blocks.begin; i < blocks.end; ++i) {
    const Need products{r.block(i).lead_done, r.backward.dgrad_tiles_of(task.chunk),
                        WaitFor::fc1_done, i};
    if (!products.met()) return products;
  }
  const std::int64_t after = chunks.chunk_after[task.chunk];
  if (after >= 0) {
    const Need order{r.chunk(after).trail_done, r.backward.trail_tickets(after),
                     WaitFor::wgrad_order, after};
    if (!order.met()) return order;
  }
  r.ready_chunk = task.chunk;
  return {};
}

// A finished row-piece tile goes home, or to the workers that carry it there. A GPU goes on with
// the next tile while the pieces leave, but not with the next push; a thread of the CPU twin waits.
void Simulation::combine_tile(Worker& w, const Task& task) {
  RankState& r = *w.rank;
  if (r.table.is_shared(task.block)) return add(r.shared_done, 1);
  const std::int64_t tiles = pipeline::num_fc2_tiles(problem_.hidden),
                     slab = pipeline::slab_of_tile(task.tile, num_slabs(), tiles);
  if (combine_by_comm()) {
    const double rows = r.block(task.block.v).rows;
    r.memory.serve(now_, rows * pipeline::kFc2TileCols * cost_.elem, memory_ps_);
    return add(r.y_ready[static_cast<std::size_t>(slab * r.routed_blocks +
                                                  r.table.routed_idx(task.block))],
               1);
  }
  const Range cols = pipeline::tile_range(task.tile, pipeline::kFc2TileCols, problem_.hidden);
  const Range rows{0, r.block(task.block.v).rows};
  w.push_free = push_pieces(r, task.block, rows, static_cast<double>(cols.size()));
  piece_pushed(r, slab, w.push_free);
}

// The worker pushes the tile's pieces to their homes.
bool Simulation::leaves(const Worker& w) const {
  return has_pieces(w.task) && !w.rank->table.is_shared(w.task.block) && !combine_by_comm();
}

// Runs tickets in order until `end`, which is the same for all workers of a rank.
Simulation::Units Simulation::compute_tiles(Worker& w, std::int64_t end) {
  w.rank->tickets_end = end;
  return {*this, w, &Simulation::next_tile};
}

bool Simulation::next_tile(Worker& w) {
  if (!claim_tile(w)) return false;
  begin_tile(w);
  return true;
}

bool Simulation::claim_tile(Worker& w) {
  RankState& r = *w.rank;
  if (r.ticket >= r.tickets_end) return false;
  const std::int64_t ticket = r.ticket++;
  if (forward()) {
    w.task = r.forward.task(ticket);
  } else {
    const std::int64_t* begin = r.backward.chunks.step_ticket;
    while (begin[r.step + 1] <= ticket) ++r.step;  // tickets come in order
    w.task = r.backward.task(r.step, ticket - begin[r.step]);
  }
  if (options_.mechanisms.wave_barrier) {
    const auto kind = static_cast<std::int64_t>(w.task.kind);
    const std::int64_t band = wave_band(r, w.task);
    if (kind != r.wave_kind || band != r.wave_band) {
      r.wave_kind = kind;
      r.wave_band = band;
      r.wave_begin = static_cast<std::uint32_t>(ticket);
    }
    rest(w).wave_begin = r.wave_begin;
  }
  if (w.task.kind != TaskKind::wgrad) __builtin_prefetch(&r.block(w.task.block.v));
  return true;
}

void Simulation::begin_tile(Worker& w) {
  RankState& r = *w.rank;
  const Need need = needed_by_tile(w);
  if (!need.met()) return wait_for(w, need, Step::tile_waits);
  const TileCost cost = known_cost(r, w.task);
  w.begin = now_;
  w.product_end = std::max(r.memory.serve(now_, cost.bytes, memory_ps_),
                           now_ + static_cast<Time>(cost.cycles * r.cycle_ps));
  // Its pieces leave when those of the tile before have left.
  wake(w, leaves(w) ? std::max(w.product_end, w.push_free) : w.product_end, Step::tile);
}

// The product has ended: its pieces leave, its counters grow, the next tile begins.
bool Simulation::finish_tile(Worker& w) {
  RankState& r = *w.rank;
  const Task task = w.task;
  bool claimed = false;
  const bool pushes = leaves(w);
  const bool wgrad = task.kind == TaskKind::wgrad;
  const bool shared = wgrad ? r.backward.shared(task.chunk) : r.table.is_shared(task.block);
  if (w.step == Step::tile) {
    record(w, trace_kind(task.kind), wgrad ? task.chunk : task.block.v, task.tile, shared, w.begin,
           w.product_end);
    used(w, Use::gemm, w.begin, w.product_end);
    w.begin = w.product_end;
    if (gpu()) claimed = claim_tile(w);  // what the next tile needs comes while this one ends
    if (has_pieces(task)) combine_tile(w, task);
    if (!gpu() && pushes && w.push_free > now_) {
      wake(w, w.push_free, Step::pushed);
      return true;
    }
  }
  if (has_pieces(task)) used(w, Use::communicate, w.begin);
  if (pushes && (now_ > w.begin || !gpu()))
    record(w, trace::Kind::combine, task.block.v, task.tile, false, w.begin, now_);
  switch (task.kind) {
    case TaskKind::fc1:
    case TaskKind::dgrad: add(r.block(task.block.v).lead_done, 1); break;
    case TaskKind::fc2: add(r.block(task.block.v).fc2_done, 1); break;
    case TaskKind::dx:
    case TaskKind::wgrad: add(r.chunk(task.chunk).trail_done, 1); break;
  }
  add(r.tasks_done, 1);
  if (!gpu()) claimed = claim_tile(w);
  if (claimed) begin_tile(w);
  return claimed;
}

}  // namespace moxie::planner
