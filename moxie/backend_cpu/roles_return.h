// The way home on the CPU twin: combine by communication workers (by plan, else it is the end of an
// FC2 or dX tile) and merge, slab by slab. Contracts: combine/combine.h, merge/merge.h.
#pragma once
#include <cstdint>

#include "moxie/backend_cpu/roles_comm.h"
#include "moxie/combine/combine_ref.h"
#include "moxie/merge/merge_ref.h"

namespace moxie::backend_cpu {

// Shared-expert tiles (FC2 or dX) this pass must finish before a merge may read shared_out.
template <class T>
std::int64_t shared_tiles(const RankPass<T>& r) {
  return r.table.shared_blocks * pipeline::num_fc2_tiles(r.problem().hidden);
}

template <class T>
Range slab_cols(const RankPass<T>& r, std::int64_t slab) {
  const std::int64_t h = r.problem().hidden;
  const Range tiles = pipeline::slab_tiles(slab, r.num_slabs(), pipeline::num_fc2_tiles(h));
  return {tiles.begin * pipeline::kFc2TileCols, min64(tiles.end * pipeline::kFc2TileCols, h)};
}

// One more piece of a slab is home; the last one tells every peer.
template <class T>
void count_home(Worker<T>& w, std::int64_t slab) {
  RankPass<T>& r = w.rank();
  const Range tiles =
      pipeline::slab_tiles(slab, r.num_slabs(), pipeline::num_fc2_tiles(r.problem().hidden));
  const std::int64_t all = pipeline::num_slab_pieces(r.combine(), r.table, tiles);
  if (w.add(r.shape.counters.slab_done + slab, 1) == all) announce_slab(w, slab);
}

// Carries the rows of a slab home, block by block, as FC2 stores them.
template <class T>
void combine_slab(Worker<T>& w, std::int64_t slab) {
  RankPass<T>& r = w.rank();
  const Range tiles =
      pipeline::slab_tiles(slab, r.num_slabs(), pipeline::num_fc2_tiles(r.problem().hidden));
  while (const auto unit = w.claim(r.shape.counters.combine_unit,
                                   pipeline::num_combine_units(r.table, slab + 1))) {
    const pipeline::CombineUnit u = pipeline::combine_unit(r.table, *unit);
    if (u.rows.size() > 0) {
      w.wait_counter(r.y_ready_word(slab, u.block), tiles.size(), WaitFor::y_ready, u.block.v);
      w.traced(trace::Kind::combine, u.block.v, slab, false, [&] {
        combine::push_stored<T>(r.peers, r.shape.heap.returns.offset, r.origins(u.block), u.rows,
                                slab_cols(r, slab), r.problem().hidden, r.y_rows(u.block));
      });
    }
    count_home(w, slab);
  }
}

template <class T>
void merge_slab(Worker<T>& w, const pipeline::MergeUnit& unit) {
  RankPass<T>& r = w.rank();
  const Problem& p = r.problem();
  const Range cols = slab_cols(r, unit.slab);
  const auto* ids = r.template ws<const std::int32_t>(r.shape.workspace.ids);
  const T* shared_out =
      p.shared.intermediate > 0 ? r.template ws<const T>(r.shape.workspace.shared_out) : nullptr;
  merge::merge_tokens<T>(ids, r.template heap<const T>(r.shape.heap.returns), shared_out,
                         unit.tokens, cols, p.top_k, p.hidden, r.out);
  if (r.direction == Direction::forward) return;
  const auto* d_weights = r.template heap<const float>(r.shape.heap.d_weights);
  for (std::int64_t i = unit.tokens.begin * p.top_k; i < unit.tokens.end * p.top_k; ++i) {
    r.d_route_weights[i] = ids[i] >= 0 ? d_weights[i] : 0.0f;
  }
}

// Merges the token ranges of slabs [0, end) that nobody has claimed, each as soon as every peer has
// pushed its slab.
template <class T>
void merge_slabs(Worker<T>& w, std::int64_t end) {
  RankPass<T>& r = w.rank();
  const auto& c = r.shape.counters;
  const std::uint64_t wanted = pipeline::make_signal(r.epoch);
  while (const auto at = w.claim(c.merge_unit, pipeline::num_merge_units(r.num_tokens, end))) {
    const pipeline::MergeUnit unit = pipeline::merge_unit(*at, r.num_tokens);
    for (std::int64_t i = 0; i < r.problem().num_ranks; ++i) {
      w.wait_signal(r.shape.heap.returns_done, i * pipeline::kMaxSlabs + unit.slab, wanted,
                    WaitFor::returns_done, i);
    }
    w.wait_counter(c.shared_done, shared_tiles(r), WaitFor::shared_done, 0);
    w.traced(trace::Kind::merge, *at, unit.slab, false, [&] { merge_slab(w, unit); });
    w.add(c.merge_done, 1);
  }
}

// What is left of a worker's pass when its rows or tickets are out. A slab is carried home before
// the one before it is merged: the merge waits for peers, and they may wait for what this rank
// carries.
template <class T>
void return_rows(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  for (std::int64_t s = 0; r.combine() == CombineMode::comm_workers && s < r.num_slabs(); ++s) {
    combine_slab(w, s);
    merge_slabs(w, s);
  }
  merge_slabs(w, r.num_slabs());
}

}  // namespace moxie::backend_cpu
