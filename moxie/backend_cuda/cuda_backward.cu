// Contract: cuda_backward.h.
#include "moxie/backend_cuda/cuda_backward.h"

#include <algorithm>

#include "moxie/backend_cuda/sentence.h"
#include "moxie/device/tensor_map.h"

namespace moxie::backend_cuda {
namespace {

using device::Bf16Matrices;
using pipeline::kBlockRows;
using pipeline::Region;

// ---- what the kernel cannot do ----

// Of a weight-gradient tile: chunk and column tile have this many values, a chunk this many rows.
constexpr std::int64_t kMaxChunks = 1 << 12, kMaxColumns = (1 << 16) - 64,
                       kMaxBlocksOfChunk = (1 << 20) / kBlockRows - 1;
// Of a tile of rows.
constexpr std::int64_t kMaxBlocks = 1 << 22;

// The most chunks of a rank: one for each expert without rows, and every expert may end in one that
// is not full.
std::int64_t most_chunks(const pipeline::Extents& e, std::int64_t chunk_blocks) {
  return e.local_experts + std::max<std::int64_t>(e.routed_blocks - 1, 0) / chunk_blocks +
         ceil_div(e.shared_blocks, chunk_blocks);
}

void check_columns(const char* field, std::int64_t columns) {
  if (columns <= kMaxColumns) return;
  throw Error(ErrorCode::invalid_argument,
              sentence("problem.{} is {}, must be at most {} for backward in a CUDA world; nearest "
                       "legal value {}",
                       field, columns, kMaxColumns, kMaxColumns));
}

void check_chunks(const pipeline::Extents& e, std::int64_t chunk_blocks) {
  // No chunk is larger than its expert.
  const std::int64_t largest = std::min(chunk_blocks, std::max(e.routed_blocks, e.shared_blocks));
  if (largest > kMaxBlocksOfChunk) {
    throw Error(ErrorCode::invalid_plan,
                sentence("plan.chunk_blocks is {}, must be at most {} for backward in a CUDA world "
                         "where an expert can have {} blocks; nearest legal value {}",
                         chunk_blocks, kMaxBlocksOfChunk, largest, kMaxBlocksOfChunk));
  }
  const std::int64_t chunks = most_chunks(e, chunk_blocks);
  if (chunks > kMaxChunks) {
    std::int64_t fewest = chunk_blocks;  // blocks of a chunk with which there are few enough
    while (most_chunks(e, fewest) > kMaxChunks) ++fewest;
    throw Error(ErrorCode::invalid_plan,
                sentence("plan.chunk_blocks is {}, which makes up to {} chunks per pass, must make "
                         "at most {} for backward in a CUDA world; nearest legal value {}",
                         chunk_blocks, chunks, kMaxChunks, fewest));
  }
}

// Limits of the words in which the kernel hands tiles from warp to warp.
const LayerMemory& supported(const LayerMemory& memory) {
  const Problem& p = memory.problem;
  check_columns("hidden", p.hidden);
  check_columns("intermediate", p.intermediate);
  check_columns("shared.intermediate", p.shared.intermediate);
  const pipeline::Extents e = pipeline::extents(p, memory.plan);
  if (e.blocks > kMaxBlocks) {
    const std::int64_t most = std::max<std::int64_t>(kMaxBlocks - e.shared_blocks, 1) * kBlockRows;
    throw Error(ErrorCode::invalid_plan,
                sentence("plan.capacity_rows {} makes up to {} blocks per pass, must be at most {} "
                         "for backward in a CUDA world; nearest legal capacity_rows {}",
                         memory.plan.capacity_rows, e.blocks, kMaxBlocks, most));
  }
  check_chunks(e, memory.plan.chunk_blocks);
  return memory;
}

// Pairs are possible in every order of the forward; they dispatch together. They do not pay where
// experts are narrow, so that tiles of dX have few K blocks: qwen3 (I = 768) 4.24 ms without, 4.30
// with; kimi (I = 2048) 17.3 and 16.4.
std::int32_t choose_cluster_size(const LayerMemory& memory) {
  constexpr std::int64_t kNarrow = 1024;
  const std::int32_t wanted = memory.backend.cuda().cluster_size;
  const bool narrow = wanted == 0 && memory.problem.intermediate < kNarrow;
  if (memory.plan.comm_workers % 2 != 0 || narrow) return 1;
  return choose_by_rows_per_expert(memory.problem, wanted);
}

// ---- tensor maps ----

CUtensorMap checked(const char* what, cudaError_t (*encode)(CUtensorMap*, const Bf16Matrices&),
                    const Bf16Matrices& matrices) {
  CUtensorMap map;
  check_cuda(encode(&map, matrices), sentence("the tensor map of {}", what));
  return map;
}
CUtensorMap map_by_rows(const char* what, const Bf16Matrices& matrices,
                        std::uint32_t box_rows = kBlockRows) {
  CUtensorMap map;
  check_cuda(device::encode_tensor_map(&map, matrices, box_rows),
             sentence("the tensor map of {}", what));
  return map;
}
CUtensorMap map_by_columns(const char* what, const Bf16Matrices& matrices) {
  return checked(what, device::encode_column_map, matrices);
}
CUtensorMap map_bounded(const char* what, const Bf16Matrices& matrices) {
  return checked(what, device::encode_bounded_column_map, matrices);
}
CUtensorMap map_by_chunks(const char* what, const Bf16Matrices& matrices) {
  return checked(what, device::encode_chunk_map, matrices);
}

// d(matrix) of all experts [experts * m, n], as the epilogue stores it.
CUtensorMap map_of_grad(const char* what, const TensorView& grad, const void* data,
                        std::int64_t num_rows, std::int64_t num_columns) {
  constexpr std::uint32_t kStoreRows = 16;
  if (grad.dtype == DType::bf16)
    return map_by_rows(what, {data, num_columns, num_rows, 1}, kStoreRows);
  CUtensorMap map;
  check_cuda(device::encode_float_map(&map, static_cast<const float*>(data), num_columns, num_rows),
             sentence("the tensor map of {}", what));
  return map;
}

// One map reaches several rings if they lie behind each other.
void require_adjacent(const Region& first, const Region& second) {
  if (second.offset == first.offset + first.num_bytes) return;
  throw Error(ErrorCode::unavailable,
              sentence("a ring of the backward begins at byte {} of the workspace, must begin at "
                       "{}, the end of the one before it",
                       second.offset, first.offset + first.num_bytes));
}

}  // namespace

BackwardPass::BackwardPass(const LayerMemory& memory)
    : CudaPass(supported(memory), backward_kernel, choose_cluster_size(memory)) {
  const Problem& problem = memory.problem;
  const Plan& plan = memory.plan;
  describe_common(common_);
  common_.num_slabs = 1;  // rows go home whole
  common_.pulls_once = pipeline::backward_pulls_once(problem);
  common_.ring_rows = plan.backward_ring_blocks * kBlockRows;
  common_.ring_width = common_.extents.wide_intermediate;
  common_.pulls_x = common_.workspace.xb_ring.num_bytes > 0;
  common_.saves_z = plan.save != SavePolicy::none;
  const pipeline::WorkspaceLayout& l = common_.workspace;
  if (common_.pulls_x) require_adjacent(l.dy_ring, l.xb_ring);
  require_adjacent(l.dgate_ring, l.dup_ring);
  require_adjacent(l.dup_ring, l.wa_ring);
  ranks_.resize(static_cast<std::size_t>(problem.num_ranks));
  known_.resize(ranks_.size());
  for (const std::int64_t r : memory.backend.ranks_here()) describe_rank(r);
}

// What depends on addresses of this layer's own memory.
void BackwardPass::describe_rank(std::int64_t rank) {
  const Problem& problem = memory_.problem;
  BackwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  r.me = RankId{rank};
  r.workspace = memory_.workspace(rank);
  r.id_dtype = DType::i32;  // the context's
  const std::int64_t rows = common_.ring_rows;
  const auto ring = [&](const Region& region, std::int64_t columns, std::int64_t planes) {
    return Bf16Matrices{r.workspace + region.offset, columns, planes * rows, 1};
  };
  const pipeline::WorkspaceLayout& l = common_.workspace;
  const Bf16Matrices dy = ring(l.dy_ring, problem.hidden, common_.pulls_x ? 2 : 1),
                     grads = ring(l.dgate_ring, common_.ring_width, 3);
  r.dy_rows = map_by_rows("the rows ring", dy);
  r.routed.dy_columns = map_bounded("dY of the rows ring", dy);
  if (common_.pulls_x)
    r.routed.x_columns = map_bounded("x of the rows ring", ring(l.xb_ring, problem.hidden, 1));
  r.grad_rows = map_by_rows("the gradient ring", grads);
  r.grad_columns = map_bounded("the gradient ring", grads);
  r.grad_stores = map_by_rows("the gradient ring", grads, 16);
}

void BackwardPass::describe_weights(std::int64_t rank, const Weights& w) {
  std::optional<MapKey>& known = known_[static_cast<std::size_t>(rank)].weights;
  const MapKey key = {address(w.gate.data),      address(w.up.data),
                      address(w.down.data),      address(w.shared_gate.data),
                      address(w.shared_up.data), address(w.shared_down.data)};
  if (known == key) return;
  BackwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  const std::int64_t hidden = memory_.problem.hidden, shared = memory_.problem.shared.intermediate;
  const auto describe = [&](ExpertMaps& maps, std::int64_t intermediate, std::int64_t num_experts,
                            const ConstTensorView& gate, const ConstTensorView& up,
                            const ConstTensorView& down) {
    // A rank without experts has no tiles, but a map must point somewhere.
    const std::int64_t matrices = std::max<std::int64_t>(num_experts, 1);
    const auto data = [&](const ConstTensorView& view) {
      return num_experts > 0 ? view.data : static_cast<const void*>(r.workspace);
    };
    maps.gate = map_by_chunks("the gate weights", {data(gate), hidden, intermediate, matrices});
    maps.up = map_by_chunks("the up weights", {data(up), hidden, intermediate, matrices});
    maps.down_columns =
        map_by_columns("the down weights", {data(down), intermediate, hidden, matrices});
  };
  describe(r.routed, memory_.problem.intermediate, num_experts(rank), w.gate, w.up, w.down);
  if (shared > 0) describe(r.shared, shared, 1, w.shared_gate, w.shared_up, w.shared_down);
  known = key;
}

void BackwardPass::describe_grads(std::int64_t rank, const WeightGrads& g) {
  std::optional<MapKey>& known = known_[static_cast<std::size_t>(rank)].grads;
  const MapKey key = {address(g.gate.data),
                      address(g.up.data),
                      address(g.down.data),
                      address(g.shared_gate.data),
                      address(g.shared_up.data),
                      address(g.shared_down.data),
                      static_cast<std::int64_t>(g.gate.dtype)};
  if (known == key) return;
  BackwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  const std::int64_t hidden = memory_.problem.hidden, shared = memory_.problem.shared.intermediate;
  const auto describe = [&](ExpertMaps& maps, std::int64_t intermediate, std::int64_t num_experts,
                            const TensorView& gate, const TensorView& up, const TensorView& down) {
    const std::int64_t matrices = std::max<std::int64_t>(num_experts, 1);
    const auto data = [&](const TensorView& view) {
      return num_experts > 0 ? view.data : static_cast<const void*>(r.workspace);
    };
    maps.grads[0] = map_of_grad("d(gate)", gate, data(gate), matrices * intermediate, hidden);
    maps.grads[1] = map_of_grad("d(up)", up, data(up), matrices * intermediate, hidden);
    maps.grads[2] = map_of_grad("d(down)", down, data(down), matrices * hidden, intermediate);
  };
  describe(r.routed, memory_.problem.intermediate, num_experts(rank), g.gate, g.up, g.down);
  if (shared > 0) describe(r.shared, shared, 1, g.shared_gate, g.shared_up, g.shared_down);
  known = key;
}

// The shared expert's rows lie where the caller keeps them.
void BackwardPass::describe_tokens(std::int64_t rank, const BackwardInput& input) {
  if (memory_.problem.shared.intermediate == 0) return;
  std::optional<MapKey>& known = known_[static_cast<std::size_t>(rank)].tokens;
  const std::int64_t num_tokens = input.x.shape.dim[0];
  const MapKey key = {address(input.x.data), address(input.dy.data), num_tokens};
  if (known == key) return;
  BackwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  // A rank without tokens has no tiles, but a map must point somewhere.
  const auto tokens = [&](const ConstTensorView& view) {
    return Bf16Matrices{num_tokens > 0 ? view.data : r.workspace, memory_.problem.hidden,
                        std::max<std::int64_t>(num_tokens, 1), 1};
  };
  r.shared.dy_columns = map_bounded("dY of the tokens", tokens(input.dy));
  r.shared.x_columns = map_bounded("x of the tokens", tokens(input.x));
  r.shared_dy_rows = map_by_rows("dY of the tokens", tokens(input.dy));
  if (!common_.saves_z) r.shared_x_rows = map_by_rows("x of the tokens", tokens(input.x));
  known = key;
}

void BackwardPass::describe_context(std::int64_t rank, const CudaContext::Rank& c) {
  std::optional<MapKey>& known = known_[static_cast<std::size_t>(rank)].context;
  const MapKey key = {address(c.z.get()), address(c.x.get()), address(c.shared_z.get())};
  if (known == key) return;
  const Problem& problem = memory_.problem;
  BackwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  const std::int64_t saved_rows = common_.saved_blocks * kBlockRows;
  if (c.z.get() != nullptr) {
    r.routed.z = map_by_rows("saved z", {c.z.get(), 2 * problem.intermediate, saved_rows, 1});
  }
  if (c.shared_z.get() != nullptr) {
    r.shared.z =
        map_by_rows("saved z of the tokens",
                    {c.shared_z.get(), 2 * problem.shared.intermediate, problem.max_tokens, 1});
  }
  if (!common_.pulls_x)
    r.routed.x_columns = map_bounded("saved x", {c.x.get(), problem.hidden, saved_rows, 1});
  known = key;
}

// All ranks of a launch alike: one kernel stores them.
void BackwardPass::bind_grad_kind(std::span<const BackwardOutput> outputs) {
  const WeightGrads& first = outputs[0].grads;
  for (std::size_t r = 1; r < outputs.size(); ++r) {
    const WeightGrads& grads = outputs[r].grads;
    if (grads.gate.dtype != first.gate.dtype) {
      throw Error(
          ErrorCode::invalid_argument,
          sentence("grads.gate of rank {} is {}, must be {} as rank 0's in a CUDA world; "
                   "nearest legal value {}",
                   r, name(grads.gate.dtype), name(first.gate.dtype), name(first.gate.dtype)));
    }
    if (grads.accumulate != first.accumulate) {
      throw Error(
          ErrorCode::invalid_argument,
          sentence("grads.accumulate of rank {} is {}, must be {} as rank 0's in a CUDA "
                   "world; nearest legal value {}",
                   r, grads.accumulate ? "true" : "false", first.accumulate ? "true" : "false",
                   first.accumulate ? "true" : "false"));
    }
  }
  common_.grads_are_float = first.gate.dtype == DType::f32;
  common_.accumulate = first.accumulate;
}

void BackwardPass::bind_rank(std::int64_t rank, const CudaContext& context,
                             const BackwardInput& input, const BackwardOutput& output) {
  const Weights& w = input.weights;
  const WeightGrads& g = output.grads;
  for (const auto& [what, data] : {std::pair<const char*, const void*>{"x", input.x.data},
                                   {"dy", input.dy.data},
                                   {"dx", output.dx.data},
                                   {"weights.gate", w.gate.data},
                                   {"weights.up", w.up.data},
                                   {"weights.down", w.down.data},
                                   {"weights.gate_bias", w.gate_bias.data},
                                   {"weights.up_bias", w.up_bias.data},
                                   {"weights.down_bias", w.down_bias.data},
                                   {"weights.shared_gate", w.shared_gate.data},
                                   {"weights.shared_up", w.shared_up.data},
                                   {"weights.shared_down", w.shared_down.data},
                                   {"weights.shared_output_gate", w.shared_output_gate.data},
                                   {"grads.gate", g.gate.data},
                                   {"grads.up", g.up.data},
                                   {"grads.down", g.down.data},
                                   {"grads.gate_bias", g.gate_bias.data},
                                   {"grads.up_bias", g.up_bias.data},
                                   {"grads.down_bias", g.down_bias.data},
                                   {"grads.shared_gate", g.shared_gate.data},
                                   {"grads.shared_up", g.shared_up.data},
                                   {"grads.shared_down", g.shared_down.data},
                                   {"grads.shared_output_gate", g.shared_output_gate.data}}) {
    require_aligned(what, rank, data);
  }
  const CudaContext::Rank& saved = context.ranks[static_cast<std::size_t>(rank)];
  describe_weights(rank, w);
  describe_grads(rank, g);
  describe_tokens(rank, input);
  describe_context(rank, saved);
  BackwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  r.num_tokens = context.num_tokens[memory_.backend.idx_here(rank)];
  r.x = input.x.as<bf16>();
  r.dy = input.dy.as<bf16>();
  r.merged = output.dx.as<bf16>();
  r.expert_ids = saved.ids.get();
  r.route_weights = saved.weights.as<float>();
  r.saved_x = saved.x.as<bf16>();
  r.gate_bias = w.gate_bias.as<bf16>();
  r.up_bias = w.up_bias.as<bf16>();
  r.down_bias = w.down_bias.as<bf16>();
  r.shared_output_gate = w.shared_output_gate.as<bf16>();
  r.d_route_weights = output.d_route_weights.as<float>();
  r.d_gate_bias = g.gate_bias.as<float>();
  r.d_up_bias = g.up_bias.as<float>();
  r.d_down_bias = g.down_bias.as<float>();
  r.d_output_gate = g.shared_output_gate.as<float>();
}

// A tile and the wait before it, a quarter of a dispatch unit and of a merge unit are events.
std::int64_t BackwardPass::num_events() const {
  const Problem& p = memory_.problem;
  const pipeline::Extents& e = common_.extents;
  const pipeline::WgradTiles wgrad{p.hidden, e.wide_intermediate};
  const std::int64_t tiles =
      e.blocks * (2 * pipeline::num_fc1_tiles(e.wide_intermediate) +  // remade z, dgrad
                  pipeline::num_fc2_tiles(p.hidden)) +
      most_chunks(e, memory_.plan.chunk_blocks) * wgrad.size();
  const std::int64_t quarters = e.blocks * kBlockRows / pipeline::kDispatchUnitRows * 4,
                     parts = 4 * pipeline::num_merge_units(p.max_tokens, common_.num_slabs);
  return 2 * tiles + quarters + parts;
}

void BackwardPass::run(const CudaContext& context, std::span<const BackwardInput> inputs,
                       std::span<const BackwardOutput> outputs, trace::Trace* trace) {
  bind_common(common_);
  if (common_.faults.keep_schedule) {
    unavailable(
        "faults.keep_schedule is not available in backward, which makes tables of its own; use it "
        "with forward");
  }
  bind_grad_kind(outputs);
  const std::int64_t num_ranks = memory_.problem.num_ranks;
  bind_ranks(
      [&](std::int64_t rank, std::size_t i) { bind_rank(rank, context, inputs[i], outputs[i]); });
  bind_trace(trace != nullptr, num_events(), ranks_);
  on_every_gpu(
      [&](const DeviceGroup& group, cudaStream_t stream) {
        if (!common_.faults.poison_workspace) return;
        for (const std::int64_t r : group.ranks)
          poison(r, ranks_[static_cast<std::size_t>(r)].x, stream);
      },
      [&](const DeviceGroup& group, cudaStream_t stream) {
        launch<BackwardParams<kMaxLocalRanks>>(group, common_, ranks_, kAllPhases | kClosePhase,
                                               stream);
      });
  if (trace != nullptr)
    collect_trace(*trace, sentence("backward, {} ranks, one launch", num_ranks));
}

}  // namespace moxie::backend_cuda
