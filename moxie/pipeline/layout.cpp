// Lists made of the layouts: every buffer with its bytes, and what fault injection may spoil.
#include "moxie/pipeline/layout.h"

#include <utility>

#include "moxie/pipeline/cuda_layout.h"

namespace moxie::pipeline {

std::vector<Region> poisoned_heap(const HeapLayout& heap, bool x_in_place) {
  const std::int64_t after_x = heap.x_in.offset + heap.x_in.num_bytes;
  if (!x_in_place) return {{heap.signals_bytes, heap.num_bytes - heap.signals_bytes}};
  return {{heap.signals_bytes, heap.x_in.offset - heap.signals_bytes},
          {after_x, heap.num_bytes - after_x}};
}

std::vector<Region> poisoned_workspace(const WorkspaceLayout& w) {
  return {{0, w.pass_count.offset}, {w.tables_bytes, w.num_bytes - w.tables_bytes}};
}

namespace {

// Without the last line, `total`.
std::vector<NamedBytes> common_bytes(const HeapLayout& h, const WorkspaceLayout& w) {
  return {
      {"heap.signals", h.signals_bytes},
      {"heap.x_in", h.x_in.num_bytes},
      {"heap.dy_in", h.dy_in.num_bytes},
      {"heap.routes", h.routes_sorted.num_bytes + h.weights_sorted.num_bytes +
                          h.route_begin.num_bytes + h.num_tokens.num_bytes},
      {"heap.returns", h.returns.num_bytes},
      {"heap.d_weights", h.d_weights.num_bytes},
      {"workspace.tables", w.tables_bytes},
      {"workspace.shared_out", w.shared_out.num_bytes},
      {"forward.x_ring", w.x_ring.num_bytes},
      {"forward.hidden_ring", w.hidden_ring.num_bytes},
      {"forward.shared_hidden", w.shared_hidden.num_bytes},
      {"forward.y", w.y.num_bytes},
      {"backward.dy_ring", w.dy_ring.num_bytes},
      {"backward.x_ring", w.xb_ring.num_bytes},
      {"backward.dgate_dup_wa",
       w.dgate_ring.num_bytes + w.dup_ring.num_bytes + w.wa_ring.num_bytes},
      {"backward.dw_partial", w.dw_partial.num_bytes},
      {"backward.wgrad_partial", w.wgrad_partial.num_bytes},
  };
}

// Forward and backward share addresses, so a total is no sum.
std::vector<NamedBytes> with_total(std::vector<NamedBytes> table, std::int64_t total) {
  std::erase_if(table, [](const NamedBytes& b) { return b.num_bytes == 0; });
  table.push_back({"total", total});
  return table;
}

}  // namespace

std::vector<NamedBytes> buffer_bytes(const Problem& problem, const Plan& plan) {
  const HeapLayout h = heap_layout(problem);
  const WorkspaceLayout w = workspace_layout(problem, plan);
  return with_total(common_bytes(h, w), h.num_bytes + w.num_bytes);
}

std::vector<NamedBytes> cuda_buffer_bytes(const Problem& problem, const Plan& plan) {
  const HeapLayout h = heap_layout(problem);
  const CudaWorkspaceLayout c = cuda_workspace_layout(problem, plan);
  std::vector<NamedBytes> table = common_bytes(h, workspace_layout(problem, plan));
  table.insert(table.end(), {{"cuda.sort_counts", c.sort_counts.num_bytes},
                             {"cuda.words", c.result.num_bytes + c.words.num_bytes},
                             {"cuda.pulled", c.pulled.num_bytes},
                             {"cuda.row_places", c.row_places.num_bytes},
                             {"cuda.step_pair", c.step_pair.num_bytes},
                             {"cuda.dy_bias", c.dy_bias.num_bytes}});
  return with_total(std::move(table), h.num_bytes + c.num_bytes);
}

}  // namespace moxie::pipeline
