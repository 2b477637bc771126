// Compute role of the CPU twin: take the next ticket, run its task. One function per task kind;
// each begins with the signals it waits for and ends with the one it raises.
#pragma once
#include <algorithm>
#include <cstdint>

#include "moxie/backend_cpu/roles_dispatch.h"
#include "moxie/backend_cpu/roles_return.h"
#include "moxie/expert/expert_ref.h"

namespace moxie::backend_cpu {

using pipeline::Task;
using pipeline::TaskKind;

// A finished row-piece tile goes home, or waits in y until a communication worker carries it there.
template <class T>
void combine_tile(Worker<T>& w, BlockId b, std::int64_t tile, Range cols) {
  RankPass<T>& r = w.rank();
  const auto& c = r.shape.counters;
  const std::int64_t h = r.problem().hidden, rows = r.table.rows(b), n = cols.size();
  const float* pieces = w.scratch().c0;
  const auto store = [&](T* out) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < n; ++j) out[i * h + j] = T(pieces[i * n + j]);
    }
  };
  if (r.shared(b)) {
    store(r.template ws<T>(r.shape.workspace.shared_out) + b.v * pipeline::kBlockRows * h +
          cols.begin);
    w.add(c.shared_done, 1);
    return;
  }
  const std::int64_t slab = pipeline::slab_of_tile(tile, r.num_slabs(), pipeline::num_fc2_tiles(h));
  if (r.combine() == CombineMode::comm_workers) {
    store(r.y_rows(b) + cols.begin);
    w.add(r.y_ready_word(slab, b), 1);
    return;
  }
  w.traced(trace::Kind::combine, b.v, tile, false, [&] {
    combine::push_pieces<T>(r.peers, r.shape.heap.returns.offset, r.origins(b), rows, cols, h,
                            pieces);
  });
  count_home(w, slab);
}

template <class T>
void run_fc1(Worker<T>& w, const Task& task) {
  RankPass<T>& r = w.rank();
  const BlockId b = task.block;
  const bool shared = r.shared(b);
  if (!shared) wait_rows_ready(w, b);
  // A GPU waits for the hidden slot as late as its epilogue; here nothing is lost by waiting before
  // the product.
  const BlockId holder{b.v - r.plan().hidden_ring_blocks};
  if (!shared && holder.v >= r.table.shared_blocks) {
    w.wait_counter(r.shape.counters.fc2_done + holder.v, r.forward.fc2_tiles, WaitFor::hidden_free,
                   holder.v);
  }
  const std::int64_t width = r.intermediate(shared), rows = r.table.rows(b);
  const Range cols = pipeline::tile_range(task.tile, pipeline::kFc1TileCols, width);
  w.traced(trace::Kind::fc1, b.v, task.tile, shared, [&] {
    const auto m = r.matrices(shared, shared ? 0 : r.table.expert(b).v);
    expert::fc1_accumulate<T>(r.gemm, m, {r.x_rows(b), m.hidden}, rows, cols, w.scratch());
    expert::fc1_epilogue<T>(
        r.problem().activation, w.scratch(), rows, cols, width,
        [&](std::int64_t i) { return r.row_weight(b, i); }, r.hidden_rows(b));
    if (T* z = r.z_rows(r.fill, b)) {
      expert::store_z<T>(w.scratch(), rows, cols.size(), expert::saved_z_tile(z, width, cols));
    }
  });
  w.add(r.shape.counters.fc1_done + b.v, 1);
}

template <class T>
void run_fc2(Worker<T>& w, const Task& task) {
  RankPass<T>& r = w.rank();
  const BlockId b = task.block;
  const bool shared = r.shared(b);
  const std::int64_t width = r.intermediate(shared), rows = r.table.rows(b);
  w.wait_counter(r.shape.counters.fc1_done + b.v, pipeline::num_fc1_tiles(width), WaitFor::fc1_done,
                 b.v);
  const Range cols = pipeline::tile_range(task.tile, pipeline::kFc2TileCols, r.problem().hidden);
  w.traced(trace::Kind::fc2, b.v, task.tile, shared, [&] {
    const auto m = r.matrices(shared, shared ? 0 : r.table.expert(b).v);
    expert::fc2_accumulate<T>(
        r.gemm, m, {r.hidden_rows(b), width}, rows, cols,
        [&](std::int64_t i) { return r.row_weight(b, i); }, w.scratch());
  });
  combine_tile(w, b, task.tile, cols);
  w.add(r.shape.counters.fc2_done + b.v, 1);
}

template <class T>
void run_dgrad(Worker<T>& w, const Task& task) {
  RankPass<T>& r = w.rank();
  const BlockId b = task.block;
  const bool shared = r.shared(b);
  if (shared)
    wait_slot_free(w, b);  // its rows lie in place, but dgrad writes a ring slot
  else
    wait_rows_ready(w, b);
  const std::int64_t width = r.intermediate(shared), rows = r.table.rows(b);
  const Range cols = pipeline::tile_range(task.tile, pipeline::kFc1TileCols, width);
  w.traced(trace::Kind::dgrad, b.v, task.tile, shared, [&] {
    const auto m = r.matrices(shared, shared ? 0 : r.table.expert(b).v);
    expert::ZTile<const T> z;
    if (const T* kept = r.z_rows(r.saved, b)) {
      z = expert::saved_z_tile(kept, width, cols);
    } else {  // remade, and rounded as a saved one would be: the bits do not depend on the policy
      T* scratch = reinterpret_cast<T*>(w.scratch().z);
      const expert::ZTile<T> remade{scratch, scratch + cols.size(), 2 * cols.size()};
      expert::fc1_accumulate<T>(r.gemm, m, {r.x_rows(b), m.hidden}, rows, cols, w.scratch());
      expert::store_z<T>(w.scratch(), rows, cols.size(), remade);
      z = {remade.gate, remade.up, remade.ld};
    }
    expert::dgrad_accumulate<T>(r.gemm, m, {r.dy_rows(b), m.hidden}, rows, cols, w.scratch());
    expert::dgrad_epilogue<T>(
        r.problem().activation, w.scratch(), rows, cols, z,
        [&](std::int64_t i) { return r.row_weight(b, i); }, r.dgrad_rows(b),
        r.dw_partial(b) + task.tile, r.dw_ld());
  });
  w.add(r.shape.counters.fc1_done + b.v, 1);
}

// Gradient of row i's weight; for a gated shared expert, of the gate's logit.
template <class T>
float row_weight_grad(const RankPass<T>& r, const expert::ExpertMatrices<T>& m, BlockId b,
                      std::int64_t i) {
  const float dw = expert::router_grad<T>(r.dw_partial(b) + i * r.dw_ld(),
                                          pipeline::num_fc1_tiles(m.intermediate),
                                          r.dy_rows(b) + i * m.hidden, m);
  if (!r.shared(b)) return dw;
  const float s = r.row_weight(b, i);
  return dw * s * (1.0f - s);
}

template <class T>
void run_dx(Worker<T>& w, const Task& task) {
  RankPass<T>& r = w.rank();
  const BlockId b = task.block;
  const bool shared = r.shared(b);
  const std::int64_t width = r.intermediate(shared), rows = r.table.rows(b);
  w.wait_counter(r.shape.counters.fc1_done + b.v, pipeline::num_fc1_tiles(width), WaitFor::fc1_done,
                 b.v);
  const Range cols = pipeline::tile_range(task.tile, pipeline::kFc2TileCols, r.problem().hidden);
  const auto m = r.matrices(shared, shared ? 0 : r.table.expert(b).v);
  w.traced(trace::Kind::dx, b.v, task.tile, shared, [&] {
    expert::dx_accumulate<T>(r.gemm, m, r.dgrad_rows(b), rows, cols, w.scratch());
    if (shared && r.problem().shared.output_gate) {
      const T* gate = r.weights->shared_output_gate.template as<T>() + cols.begin;
      for (std::int64_t i = 0; i < rows; ++i) {
        const float d_logit = row_weight_grad(r, m, b, i);
        for (std::int64_t j = 0; j < cols.size(); ++j) {
          w.scratch().c0[i * cols.size() + j] += d_logit * expert::widen(gate[j]);
        }
      }
    }
    if (!shared && task.tile == 0) {
      for (std::int64_t i = 0; i < rows; ++i) {
        const pipeline::RowOrigin& o = r.origins(b)[i];
        r.peers.template at<float>(RankId{o.rank}, r.shape.heap.d_weights.offset)[o.route] =
            row_weight_grad(r, m, b, i);
      }
    }
  });
  combine_tile(w, b, task.tile, cols);
  w.add(r.shape.counters.trail_done + task.chunk, 1);
}

// Where one expert's gradient matrix lives between chunks and at the end.
template <class T>
struct WgradTarget {
  TensorView out;          // caller's matrix of this kind
  std::int64_t first = 0;  // element where this expert's matrix begins
  std::int64_t ld = 0;
  float* partial = nullptr;  // FP32 running sums if `out` cannot hold them
};

template <class T>
WgradTarget<T> wgrad_target(const RankPass<T>& r, pipeline::WeightMatrix matrix, bool shared,
                            std::int64_t e) {
  const WeightGrads& g = *r.grads;
  const std::int64_t h = r.problem().hidden, width = r.intermediate(shared), size = h * width;
  WgradTarget<T> t;
  t.ld = matrix == pipeline::WeightMatrix::down ? width : h;
  t.first = shared ? 0 : e * size;
  switch (matrix) {
    case pipeline::WeightMatrix::gate: t.out = shared ? g.shared_gate : g.gate; break;
    case pipeline::WeightMatrix::up: t.out = shared ? g.shared_up : g.up; break;
    case pipeline::WeightMatrix::down: t.out = shared ? g.shared_down : g.down; break;
  }
  if (t.out.dtype != DType::f32) {
    t.partial = r.template ws<float>(r.shape.workspace.wgrad_partial) +
                static_cast<std::int64_t>(matrix) * size;
  }
  return t;
}

// Loads the accumulators of a tile: zeros, the caller's main-grad, or what the expert's earlier
// chunks left.
template <class T>
void load_wgrad(const WgradTarget<T>& t, const pipeline::WgradTile& tile, bool zero, float* acc) {
  const std::int64_t n = tile.cols.size();
  const float* from = t.partial != nullptr ? t.partial : t.out.template as<float>() + t.first;
  for (std::int64_t i = 0; i < tile.rows.size(); ++i) {
    if (zero)
      std::fill_n(acc + i * n, n, 0.0f);
    else
      std::copy_n(from + (tile.rows.begin + i) * t.ld + tile.cols.begin, n, acc + i * n);
  }
}

template <class T>
void store_wgrad(const WgradTarget<T>& t, const pipeline::WgradTile& tile, bool final,
                 const float* acc) {
  const std::int64_t n = tile.cols.size();
  for (std::int64_t i = 0; i < tile.rows.size(); ++i) {
    const std::int64_t at = (tile.rows.begin + i) * t.ld + tile.cols.begin;
    if (t.partial == nullptr) {
      std::copy_n(acc + i * n, n, t.out.template as<float>() + t.first + at);
    } else if (!final) {
      std::copy_n(acc + i * n, n, t.partial + at);
    } else {
      for (std::int64_t j = 0; j < n; ++j)
        t.out.template as<T>()[t.first + at + j] = T(acc[i * n + j]);
    }
  }
}

// Vector gradients ride along with the tiles at the edge of their matrix: biases with the first
// column tile, the shared output gate with the first row tile. FP32 always, summed in row order.
template <class T>
void vector_grads(Worker<T>& w, const pipeline::WgradTile& tile, std::int64_t chunk, bool zero) {
  RankPass<T>& r = w.rank();
  const Problem& p = r.problem();
  const bool shared = r.backward.shared(chunk);
  const std::int64_t e = r.backward.chunks.chunk_expert[chunk];
  const bool biases = !shared && p.expert_bias && tile.cols.begin == 0;
  const bool gate_vector = shared && p.shared.output_gate &&
                           tile.matrix == pipeline::WeightMatrix::gate && tile.rows.begin == 0;
  if (!biases && !gate_vector) return;
  const Range range = biases ? tile.rows : tile.cols;
  const WeightGrads& g = *r.grads;
  float* out = nullptr;
  if (gate_vector)
    out = g.shared_output_gate.as<float>();
  else if (tile.matrix == pipeline::WeightMatrix::gate)
    out = g.gate_bias.as<float>() + e * p.intermediate;
  else if (tile.matrix == pipeline::WeightMatrix::up)
    out = g.up_bias.as<float>() + e * p.intermediate;
  else
    out = g.down_bias.as<float>() + e * p.hidden;
  out += range.begin;
  if (zero) std::fill_n(out, range.size(), 0.0f);
  const auto m = r.matrices(shared, shared ? 0 : e);
  const Range blocks = r.backward.chunks.blocks(chunk);
  for (BlockId b{blocks.begin}; b.v < blocks.end; ++b.v) {
    const auto d = r.dgrad_rows(b);
    const auto one = [](std::int64_t) { return 1.0f; };
    if (gate_vector) {
      expert::column_sums<T>(
          {r.x_rows(b), p.hidden}, range, r.table.rows(b),
          [&](std::int64_t i) { return row_weight_grad(r, m, b, i); }, out);
    } else if (tile.matrix == pipeline::WeightMatrix::down) {
      expert::column_sums<T>(
          {r.dy_rows(b), p.hidden}, range, r.table.rows(b),
          [&](std::int64_t i) { return r.row_weight(b, i); }, out);
    } else {
      const T* rows = tile.matrix == pipeline::WeightMatrix::gate ? d.dgate : d.dup;
      expert::column_sums<T>({rows, d.ld}, range, r.table.rows(b), one, out);
    }
  }
}

template <class T>
void run_wgrad(Worker<T>& w, const Task& task) {
  RankPass<T>& r = w.rank();
  const auto& c = r.shape.counters;
  const auto& chunks = r.backward.chunks;
  const std::int64_t chunk = task.chunk, after = chunks.chunk_after[chunk];
  const Range blocks = chunks.blocks(chunk);
  for (std::int64_t b = blocks.begin; b < blocks.end; ++b) {
    w.wait_counter(c.fc1_done + b, r.backward.dgrad_tiles_of(chunk), WaitFor::fc1_done, b);
  }
  if (after >= 0)
    w.wait_counter(c.trail_done + after, r.backward.trail_tickets(after), WaitFor::wgrad_order,
                   after);
  const bool shared = r.backward.shared(chunk);
  w.traced(trace::Kind::wgrad, chunk, task.tile, shared, [&] {
    const pipeline::WgradTile tile = r.backward.wgrad_of(chunk).tile(task.tile);
    const auto target = wgrad_target(r, tile.matrix, shared, chunks.chunk_expert[chunk]);
    const bool zero = chunks.first_of_expert(chunk) && !r.grads->accumulate;
    float* acc = w.scratch().c0;
    load_wgrad(target, tile, zero, acc);
    for (BlockId b{blocks.begin}; b.v < blocks.end; ++b.v) {
      const auto d = r.dgrad_rows(b);
      const expert::Matrix<T> x{r.x_rows(b), r.problem().hidden},
          dy{r.dy_rows(b), r.problem().hidden};
      expert::Matrix<T> left = dy, right{d.wa, d.ld};
      if (tile.matrix != pipeline::WeightMatrix::down) {
        left = {tile.matrix == pipeline::WeightMatrix::gate ? d.dgate : d.dup, d.ld};
        right = x;
      }
      expert::wgrad_accumulate<T>(r.gemm, left, tile.rows, right, tile.cols, r.table.rows(b),
                                  w.scratch(), acc);
    }
    store_wgrad(target, tile, chunks.last_of_expert(chunk), acc);
    vector_grads(w, tile, chunk, zero);
  });
  w.add(c.trail_done + chunk, 1);
}

// Runs tickets in order until `end`.
template <class T>
void compute_tiles(Worker<T>& w, std::int64_t end) {
  RankPass<T>& r = w.rank();
  while (const auto ticket = w.claim(r.shape.counters.ticket, end)) {
    const Task task =
        r.direction == Direction::forward ? r.forward.task(*ticket) : r.backward.task(*ticket);
    switch (task.kind) {
      case TaskKind::fc1: run_fc1(w, task); break;
      case TaskKind::fc2: run_fc2(w, task); break;
      case TaskKind::dgrad: run_dgrad(w, task); break;
      case TaskKind::dx: run_dx(w, task); break;
      case TaskKind::wgrad: run_wgrad(w, task); break;
    }
    w.add(r.shape.counters.tasks_done, 1);
  }
}

}  // namespace moxie::backend_cpu
