// Dispatch of the CPU twin: rows come to their experts' ranks, pulled by them (both directions) or
// pushed by their home ranks (forward, by plan). Contract: dispatch/dispatch.h.
#pragma once
#include <cstdint>

#include "moxie/backend_cpu/worker.h"
#include "moxie/dispatch/dispatch_ref.h"

namespace moxie::backend_cpu {

// Waits until the ring slot that `b` will use is free.
template <class T>
void wait_slot_free(Worker<T>& w, BlockId b) {
  RankPass<T>& r = w.rank();
  const auto& c = r.shape.counters;
  if (r.direction == Direction::forward) {
    const BlockId holder{b.v - r.plan().x_ring_blocks};
    if (holder.v < r.table.shared_blocks) return;
    w.wait_counter(c.fc1_done + holder.v, r.forward.fc1_tiles, WaitFor::x_slot_free, holder.v);
  } else {
    const BlockId holder{b.v - r.plan().backward_ring_blocks};
    if (holder.v < 0) return;
    const std::int64_t chunk = r.backward.chunks.chunk_of(holder);
    w.wait_counter(c.trail_done + chunk, r.backward.trail_tickets(chunk), WaitFor::x_slot_free,
                   chunk);
  }
}

// Pulls rows into ring slots, in block order.
template <class T>
void pull_rows(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  const std::int64_t row_elems = r.problem().hidden,
                     row_bytes = row_elems * static_cast<std::int64_t>(sizeof(T));
  while (const auto unit =
             w.claim(r.shape.counters.dispatch_unit, pipeline::num_dispatch_units(r.table))) {
    const pipeline::DispatchUnit u = pipeline::dispatch_unit(r.table, *unit);
    if (u.rows.size() == 0) continue;
    wait_slot_free(w, u.block);
    pipeline::RowOrigin* origins = r.origins(u.block);
    dispatch::resolve_origins(r.table, r.shape.heap, r.peers, u.block, u.rows, origins);
    for (std::int64_t row = u.rows.begin; row < u.rows.end; ++row) {
      // Signalled by the row's home rank: its tokens lie in its heap.
      const RankId home{origins[row].rank};
      if (row == u.rows.begin || home.v != origins[row - 1].rank)
        w.wait_signal(r.shape.heap.x_staged, home.v, pipeline::make_signal(r.epoch),
                      WaitFor::x_staged, home.v);
    }
    w.traced(trace::Kind::dispatch, u.block.v, -1, false, [&] {
      auto pull = [&](const pipeline::Region& tensor, T* block, T* keep) {
        dispatch::pull_rows(r.peers, origins, u.rows, r.problem().top_k, row_bytes,
                            {tensor.offset, reinterpret_cast<std::byte*>(block),
                             reinterpret_cast<std::byte*>(keep)});
      };
      if (r.direction == Direction::forward) {
        T* keep = r.fill != nullptr && r.x_saved(u.block)
                      ? reinterpret_cast<T*>(r.fill->x.get()) +
                            r.table.routed_idx(u.block) * pipeline::kBlockRows * row_elems
                      : nullptr;
        pull(r.shape.heap.x_in, r.x_rows(u.block), keep);
      } else {
        pull(r.shape.heap.dy_in, const_cast<T*>(r.dy_rows(u.block)), nullptr);
        if (!r.x_saved(u.block)) pull(r.shape.heap.x_in, r.x_rows(u.block), nullptr);
      }
    });
    w.add(r.shape.counters.x_ready +
              pipeline::minibatch_of(r.table, u.block, r.plan().minibatch_blocks),
          static_cast<std::uint32_t>(u.rows.size()));
  }
}

// Pushes own rows into the destinations' ring slots, and counts them there.
template <class T>
void push_rows(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  const auto& c = r.shape.counters;
  const std::int64_t row_elems = r.problem().hidden, ring = r.plan().x_ring_blocks;
  const dispatch::PushSource source{r.template heap<const std::int32_t>(r.shape.heap.routes_sorted),
                                    r.template heap<const float>(r.shape.heap.weights_sorted),
                                    r.template heap<const std::byte>(r.shape.heap.x_in)};
  while (const auto unit = w.claim(c.dispatch_unit, r.push.num_units())) {
    const pipeline::PushRows u = pipeline::push_unit(r.push, *unit);
    const std::int64_t block = pipeline::push_block(r.push, u).v;
    // Signalled by FC1 of the destination: all its tiles of the block that holds the slot are done.
    if (u.block >= ring)
      w.wait_counter_of(u.to, c.fc1_done + block - ring,
                        pipeline::num_fc1_tiles(r.problem().intermediate), WaitFor::peer_slot_free,
                        u.to.v);
    w.traced(trace::Kind::dispatch, u.block, -1, false, [&] {
      const auto rows_at = [&](auto* rows, std::int64_t b) {
        return reinterpret_cast<std::byte*>(rows) +
               b * pipeline::kBlockRows * row_elems * static_cast<std::int64_t>(sizeof(T));
      };
      dispatch::PushTarget to;
      to.origins =
          r.workspaces.template at<pipeline::RowOrigin>(u.to, r.shape.workspace.origins.offset) +
          u.block * pipeline::kBlockRows;
      to.block = rows_at(r.workspaces.template at<T>(u.to, r.shape.workspace.x_ring.offset),
                         u.block % ring);
      if (!r.all_fill.empty() && r.shape.saves_x && u.block < r.shape.saved_blocks)
        to.keep = rows_at(r.all_fill[static_cast<std::size_t>(u.to.v)].x.get(), u.block);
      dispatch::push_rows(source, r.me, u, r.problem().top_k,
                          row_elems * static_cast<std::int64_t>(sizeof(T)), to);
    });
    // The rows and their origins, to FC1 and combine of the destination.
    w.add_at(u.to, c.x_ready + u.block / r.plan().minibatch_blocks,
             static_cast<std::uint32_t>(u.rows.size()));
  }
}

template <class T>
void dispatch_rows(Worker<T>& w) {
  if (w.rank().dispatch() == DispatchMode::push)
    push_rows(w);
  else
    pull_rows(w);
}

template <class T>
void wait_rows_ready(Worker<T>& w, BlockId b) {
  RankPass<T>& r = w.rank();
  const std::int64_t idx = pipeline::minibatch_of(r.table, b, r.plan().minibatch_blocks);
  const pipeline::Minibatch m = pipeline::minibatch(r.table, idx, r.plan().minibatch_blocks);
  w.wait_counter(r.shape.counters.x_ready + idx, m.rows, WaitFor::x_ready, m.blocks.begin);
}

}  // namespace moxie::backend_cpu
