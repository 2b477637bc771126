// What each task of a rank costs, once per block and chunk, and how much the power limit stretches
// products while memory is read and written beside them.
#include <algorithm>

#include "moxie/pipeline/cuda_layout.h"
#include "moxie/planner/sim_state.h"

namespace moxie::planner {

using pipeline::kBlockRows;
using pipeline::Range;

bool Simulation::z_saved(const RankState& r, BlockId b) const {
  if (plan_.save == SavePolicy::none) return false;
  return r.table.is_shared(b) || r.table.routed_idx(b) < plan_.saved_rows / kBlockRows;
}

// Bytes dispatch moves for one row of a block: x, or dY and, unless saved, x.
double Simulation::dispatch_row_bytes(const RankState& r, BlockId b) const {
  if (forward()) return options_.mechanisms.mxfp8 ? row_bytes_ / cost_.elem * 33 / 32 : row_bytes_;
  const bool x_saved = plan_.save == SavePolicy::z_and_x && z_saved(r, b);
  return x_saved ? row_bytes_ : 2 * row_bytes_;
}

// Blocks of the same expert that share a band (backward: a chunk), and so its weights in cache.
std::int64_t Simulation::sharers(const RankState& r, BlockId b) const {
  Range band;
  if (forward()) {
    const std::int64_t first = r.table.is_shared(b) ? 0 : r.table.shared_blocks;
    const std::int64_t last = r.table.is_shared(b) ? r.table.shared_blocks : r.table.num_blocks;
    band.begin = first + (b.v - first) / plan_.band_blocks * plan_.band_blocks;
    band.end = std::min<std::int64_t>(band.begin + plan_.band_blocks, last);
  } else {
    band = r.backward.chunks.blocks(r.backward.chunks.chunk_of(b));
  }
  if (!r.table.is_shared(b)) {
    const auto e = static_cast<std::size_t>(r.block(b.v).expert);
    band.begin = std::max<std::int64_t>(band.begin, r.expert_block[e]);
    band.end = std::min<std::int64_t>(band.end, r.expert_block[e + 1]);
  }
  return std::max<std::int64_t>(1, band.size());
}

// What every task of a kind costs, once per block and chunk.
void Simulation::price_tasks(RankState& r) {
  using pipeline::Task;
  using pipeline::TaskKind;
  for (std::int64_t b = 0; b < r.table.num_blocks; ++b) {
    r.block(b).lead =
        task_cost(r, Task{forward() ? TaskKind::fc1 : TaskKind::dgrad, BlockId{b}, 0, 0});
    r.block(b).trail =
        task_cost(r, Task{forward() ? TaskKind::fc2 : TaskKind::dx, BlockId{b}, 0, 0});
  }
  if (forward()) return;
  for (std::int64_t c = 0; c < r.backward.chunks.num_chunks; ++c) {
    const Range blocks = r.backward.chunks.blocks(c);
    for (std::int64_t b = blocks.begin; b < blocks.end; ++b) r.chunk(c).rows += r.block(b).rows;
  }
}

TileCost Simulation::known_cost(const RankState& r, const pipeline::Task& task) const {
  switch (task.kind) {
    case pipeline::TaskKind::fc1:
    case pipeline::TaskKind::dgrad: return r.block(task.block.v).lead;
    case pipeline::TaskKind::fc2:
    case pipeline::TaskKind::dx: return r.block(task.block.v).trail;
    case pipeline::TaskKind::wgrad: break;
  }
  const auto& chunks = r.backward.chunks;
  return cost_.wgrad(r.chunks[static_cast<std::size_t>(task.chunk)].rows,
                     r.backward.wgrad_of(task.chunk).tile(task.tile),
                     chunks.first_of_expert(task.chunk), chunks.last_of_expert(task.chunk));
}

TileCost Simulation::task_cost(const RankState& r, const pipeline::Task& task) const {
  const bool shared = r.table.is_shared(task.block);
  const std::int64_t width = shared ? problem_.shared.intermediate : problem_.intermediate;
  const std::int64_t rows = r.block(task.block.v).rows, same = sharers(r, task.block);
  switch (task.kind) {
    case pipeline::TaskKind::fc1: return cost_.fc1(rows, width, same, z_saved(r, task.block));
    case pipeline::TaskKind::fc2: return cost_.fc2(rows, width, same);
    case pipeline::TaskKind::dgrad: return cost_.dgrad(rows, width, same, z_saved(r, task.block));
    default: return cost_.dx(rows, width, same);
  }
}

TileCost Simulation::all_tiles(const RankState& r) const {
  TileCost sum;
  const auto add = [&](double count, const TileCost& each) {
    sum.cycles += count * each.cycles;
    sum.bytes += count * each.bytes;
  };
  const auto fc2_tiles = static_cast<double>(pipeline::num_fc2_tiles(problem_.hidden));
  for (std::int64_t b = 0; b < r.table.num_blocks; ++b) {
    add(static_cast<double>(lead_tiles(r, BlockId{b})), r.block(b).lead);
    add(fc2_tiles, r.block(b).trail);
  }
  for (std::int64_t c = 0; !forward() && c < r.backward.chunks.num_chunks; ++c) {
    const pipeline::Task task{pipeline::TaskKind::wgrad, BlockId{}, c, 0};
    add(static_cast<double>(r.backward.wgrad_of(c).size()), known_cost(r, task));
  }
  return sum;
}

bool Simulation::dedupes() const {
  if (options_.mechanisms.dedupe) return *options_.mechanisms.dedupe;
  if (!gpu() || options_.mechanisms.separate_kernels) return false;
  return forward() ? pipeline::pulls_once(problem_, plan_)
                   : pipeline::backward_pulls_once(problem_);
}

// FC1 fetches rows from where their tokens lie, nobody copies them.
bool Simulation::gathers() const {
  return forward() && gpu() && !options_.mechanisms.dedupe &&
         !options_.mechanisms.separate_kernels && pipeline::gathers_rows(problem_, plan_);
}

// Read and written beside what tiles do: rows in, pieces out, pieces merged.
double Simulation::moved_bytes(const RankState& r) const {
  double bytes = 0;
  for (std::int64_t b = r.table.shared_blocks; b < r.table.num_blocks; ++b) {
    const double n = r.block(b).rows, row = dispatch_row_bytes(r, BlockId{b});
    const auto routed = static_cast<std::size_t>(r.table.routed_idx(BlockId{b}));
    for (std::int32_t s = r.source_of[routed]; s < r.source_of[routed + 1]; ++s) {
      const BlockSource& source = r.sources[static_cast<std::size_t>(s)];
      const RowsMoved moved = rows_moved(r, RankId{source.rank}, BlockId{b}, source.rows);
      bytes += (moved.from_peer + moved.within) * row;
    }
    bytes += n * row_bytes_ * (combine_by_comm() ? 3 : 2);
    if (!options_.mechanisms.fused_activation)
      bytes += n * 4 * static_cast<double>(problem_.intermediate) * cost_.elem;
  }
  return bytes;
}

// A power-limited GPU lowers its clock as memory is read and written beside the products; the
// record's clock is that of large products alone. Stages that run one after another do not
// share the power.
void Simulation::judge_power(RankState& r) {
  const double cycle_ps = 1e6 / machine_.clock_mhz;
  r.cycle_ps = cycle_ps;
  if (!gpu()) return;
  const double ctas = static_cast<double>(machine_.num_sms() - options_.reserve_sms -
                                          (split() ? 0 : plan_.comm_workers));
  const TileCost tiles = all_tiles(r);
  const double gemm_ms = tiles.cycles / ctas * cycle_ps * 1e-9;
  if (gemm_ms <= 0) return;
  const double usual_gb = kProductsGbPerTflop * 1e-12 * tiles.cycles * cost_.flops_per_cycle;
  const double excess_gb = (tiles.bytes + (split() ? 0 : moved_bytes(r))) * 1e-9 - usual_gb;
  r.stretch = std::max(machine_.clock_mhz / machine_[Field::clock_peak_mhz],
                       1 + machine_[Field::moved_ms_per_gb] * excess_gb / gemm_ms);
  r.cycle_ps = cycle_ps * r.stretch;
}

}  // namespace moxie::planner
