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

}  // namespace

// The ring slot that block b will use is free.
Process Simulation::wait_slot_free(Worker& w, RankState& r, BlockId b) {
  if (forward()) {
    const std::int64_t holder = b.v - plan_.x_ring_blocks;
    if (holder < r.table.shared_blocks) co_return;
    co_await wait(w, r.fc1_done[static_cast<std::size_t>(holder)], r.forward.fc1_tiles,
                  WaitFor::x_slot_free, holder);
  } else {
    const std::int64_t holder = b.v - plan_.backward_ring_blocks;
    if (holder < 0) co_return;
    const std::int64_t chunk = r.backward.chunks.chunk_of(BlockId{holder});
    co_await wait(w, r.trail_done[static_cast<std::size_t>(chunk)], r.backward.trail_tickets(chunk),
                  WaitFor::x_slot_free, chunk);
  }
}

Process Simulation::wait_for_task(Worker& w, const Task& task, std::int64_t ticket) {
  RankState& r = *w.rank;
  const auto b = static_cast<std::size_t>(task.block.v);
  const bool shared = task.kind != TaskKind::wgrad && r.table.is_shared(task.block);
  const std::int64_t width = shared ? problem_.shared.intermediate : problem_.intermediate;
  if (options_.mechanisms.wave_barrier) {
    const std::int64_t kind = static_cast<std::int64_t>(task.kind);
    const std::int64_t band = shared ? -1 - task.block.v / plan_.band_blocks
                                     : r.table.routed_idx(task.block) / plan_.band_blocks;
    if (kind != r.wave_kind || band != r.wave_band) {
      r.wave_kind = kind;
      r.wave_band = band;
      r.wave_begin = ticket;
    }
    co_await wait(w, r.tasks_done, r.wave_begin, WaitFor::phase, band);
  }
  switch (task.kind) {
    case TaskKind::fc1:
    case TaskKind::dgrad: {
      if (shared) {
        if (!forward()) co_await wait_slot_free(w, r, task.block);
        break;
      }
      const auto minibatch = static_cast<std::size_t>(
          pipeline::minibatch_of(r.table, task.block, plan_.minibatch_blocks));
      co_await wait(w, r.x_ready[minibatch], r.minibatch_rows[minibatch], WaitFor::x_ready,
                    task.block.v);
      const std::int64_t holder = task.block.v - plan_.hidden_ring_blocks;
      if (!forward() || holder < r.table.shared_blocks) break;
      co_await wait(w, r.fc2_done[static_cast<std::size_t>(holder)], r.forward.fc2_tiles,
                    WaitFor::hidden_free, holder);
      break;
    }
    case TaskKind::fc2:
    case TaskKind::dx:
      co_await wait(w, r.fc1_done[b], pipeline::num_fc1_tiles(width), WaitFor::fc1_done,
                    task.block.v);
      break;
    case TaskKind::wgrad: {
      const auto& chunks = r.backward.chunks;
      const Range blocks = chunks.blocks(task.chunk);
      for (std::int64_t i = blocks.begin; i < blocks.end; ++i) {
        co_await wait(w, r.fc1_done[static_cast<std::size_t>(i)],
                      r.backward.dgrad_tiles_of(task.chunk), WaitFor::fc1_done, i);
      }
      const std::int64_t after = chunks.chunk_after[task.chunk];
      if (after >= 0) {
        co_await wait(w, r.trail_done[static_cast<std::size_t>(after)],
                      r.backward.trail_tickets(after), WaitFor::wgrad_order, after);
      }
      r.ready_chunk = task.chunk;
      break;
    }
  }
}

// A finished row-piece tile goes home, or to the workers that carry it there. A GPU goes on with
// the next tile while the pieces leave, but not with the next push; a thread of the CPU twin waits.
void Simulation::combine_tile(Worker& w, const Task& task) {
  RankState& r = *w.rank;
  if (r.table.is_shared(task.block)) return add(r.shared_done, 1);
  const std::int64_t tiles = pipeline::num_fc2_tiles(problem_.hidden),
                     slab = pipeline::slab_of_tile(task.tile, num_slabs(), tiles);
  if (combine_by_comm()) {
    const double rows = r.block_rows[static_cast<std::size_t>(task.block.v)];
    r.memory.serve(now_, rows * pipeline::kFc2TileCols * cost_.elem);
    return add(r.y_ready[static_cast<std::size_t>(slab * r.routed_blocks +
                                                  r.table.routed_idx(task.block))],
               1);
  }
  const Range cols = pipeline::tile_range(task.tile, pipeline::kFc2TileCols, problem_.hidden);
  const Range rows{0, r.block_rows[static_cast<std::size_t>(task.block.v)]};
  w.push_free = push_pieces(r, task.block, rows, static_cast<double>(cols.size()));
  piece_pushed(r, slab, w.push_free);
}

// True if the task has nothing to wait for: the common case, decided without a program of its own.
bool Simulation::ready(RankState& r, const Task& task) const {
  if (options_.mechanisms.wave_barrier) return false;
  const auto b = static_cast<std::size_t>(task.block.v);
  switch (task.kind) {
    case TaskKind::fc1:
    case TaskKind::dgrad: {
      if (r.table.is_shared(task.block)) return forward();
      const auto minibatch = static_cast<std::size_t>(
          pipeline::minibatch_of(r.table, task.block, plan_.minibatch_blocks));
      if (r.x_ready[minibatch].value < static_cast<std::uint32_t>(r.minibatch_rows[minibatch]))
        return false;
      return !forward() || task.block.v - plan_.hidden_ring_blocks < r.table.shared_blocks;
    }
    case TaskKind::fc2:
    case TaskKind::dx: return r.fc1_done[b].value >= r.lead_tiles[b];
    case TaskKind::wgrad: return task.chunk == r.ready_chunk;
  }
  return false;
}

// False: no ticket is left.
bool Simulation::claim_tile(Worker& w) {
  RankState& r = *w.rank;
  w.has_task = r.ticket < r.tickets_end;
  if (!w.has_task) return false;
  const std::int64_t ticket = r.ticket++;
  w.task = forward() ? r.forward.task(ticket) : r.backward.task(ticket);
  return true;
}

void Simulation::begin_tile(Worker& w) {
  RankState& r = *w.rank;
  const TileCost cost = known_cost(r, w.task);
  w.has_task = false;
  w.begin = now_;
  w.step = Step::product;
  queue_.push(std::max(r.memory.serve(now_, cost.bytes),
                       now_ + static_cast<Time>(cost.cycles * r.cycle_ps)),
              w.id);
}

// The product has ended: its pieces leave, its counters grow, the next tile begins. False: that is
// for the program to do, which has to wait for something.
bool Simulation::finish_tile(Worker& w) {
  RankState& r = *w.rank;
  const Task& task = w.task;
  const bool shared = task.kind == TaskKind::wgrad ? r.backward.shared(task.chunk)
                                                   : r.table.is_shared(task.block),
             leaves = task.kind == TaskKind::fc2 || task.kind == TaskKind::dx;
  const auto later_step = [&](Step step) {
    w.step = step;
    queue_.push(w.push_free, w.id);
    return true;
  };
  if (w.step == Step::product) {
    record(w, trace_kind(task.kind), task.kind == TaskKind::wgrad ? task.chunk : task.block.v,
           task.tile, shared, w.begin, now_);
    used(w, Use::gemm, w.begin);
    w.begin = now_;
    if (leaves && !shared && w.push_free > now_) return later_step(Step::push);
    w.step = Step::push;
  }
  if (leaves && w.step == Step::push) {
    combine_tile(w, task);
    if (!gpu() && !shared && !combine_by_comm() && w.push_free > now_)
      return later_step(Step::pushed);
  }
  if (leaves) {
    used(w, Use::communicate, w.begin);
    if (!shared && !combine_by_comm() && (now_ > w.begin || !gpu()))
      record(w, trace::Kind::combine, task.block.v, task.tile, false, w.begin, now_);
  }
  const auto b = static_cast<std::size_t>(task.block.v);
  switch (task.kind) {
    case TaskKind::fc1:
    case TaskKind::dgrad: add(r.fc1_done[b], 1); break;
    case TaskKind::fc2: add(r.fc2_done[b], 1); break;
    case TaskKind::dx:
    case TaskKind::wgrad: add(r.trail_done[static_cast<std::size_t>(task.chunk)], 1); break;
  }
  add(r.tasks_done, 1);
  w.step = Step::program;
  if (!claim_tile(w) || !ready(r, w.task)) return false;
  begin_tile(w);
  return true;
}

// Runs tickets in order until `end`, which is the same for all workers of a rank. Tiles that have
// nothing to wait for follow each other in finish_tile: a program that resumes costs ten cache
// lines, a tile that ends one.
Process Simulation::compute_tiles(Worker& w, std::int64_t end) {
  RankState& r = *w.rank;
  r.tickets_end = end;
  bool claimed = claim_tile(w);
  while (claimed) {
    if (!ready(r, w.task)) co_await wait_for_task(w, w.task, r.ticket - 1);
    claimed = co_await Tiles{*this, w};
  }
}

}  // namespace moxie::planner
