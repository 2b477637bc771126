// Contract: cuda_forward.h.
#include "moxie/backend_cuda/cuda_forward.h"

#include <algorithm>
#include <span>

#include "moxie/backend_cuda/sentence.h"
#include "moxie/expert/grouped_gemm_launch_cuda.cuh"

namespace moxie::backend_cuda {
namespace {

using expert::GroupedGemmArguments;
using expert::GroupedProduct;

// Pairs need even runs of tickets, which only slabs order gives.
std::int32_t choose_cluster_size(const LayerMemory& memory) {
  const Plan& plan = memory.plan;
  const std::int32_t wanted = memory.backend.cuda().cluster_size;
  if (plan.order != TaskOrder::slabs) {
    if (wanted == 2)
      unavailable(
          "cuda.cluster_size 2 is not available in lag order, must be 0 or 1; nearest legal value "
          "1");
    return 1;
  }
  if (plan.comm_workers % 2 != 0) {
    if (wanted == 2) {
      throw Error(ErrorCode::invalid_plan,
                  sentence("plan.comm_workers is {}, must be even with cuda.cluster_size 2: a "
                           "cluster's CTAs dispatch together; nearest legal value {}",
                           plan.comm_workers, plan.comm_workers + 1));
    }
    return 1;
  }
  return choose_by_rows_per_expert(memory.problem, wanted);
}

}  // namespace

ForwardPass::ForwardPass(const LayerMemory& memory)
    : CudaPass(memory, forward_kernel, choose_cluster_size(memory)) {
  const std::int64_t num_ranks = memory.problem.num_ranks;
  describe_common(common_);
  common_.num_slabs = memory.plan.num_slabs;
  common_.pulls_once = pipeline::pulls_once(memory.problem, memory.plan);
  common_.gathers = pipeline::gathers_rows(memory.problem, memory.plan);
  ranks_.resize(static_cast<std::size_t>(num_ranks));
  known_.resize(ranks_.size());
  for (std::int64_t r = 0; r < num_ranks; ++r) common_.workspaces[r] = memory.workspace(r);
  for (const std::int64_t r : memory.backend.ranks_here()) describe_rank(r);
}

// What depends on addresses of this layer's own memory: the A operands and the outputs.
void ForwardPass::describe_rank(std::int64_t rank) {
  const Problem& problem = memory_.problem;
  const Plan& plan = memory_.plan;
  ForwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  r.me = RankId{rank};
  r.workspace = memory_.workspace(rank);
  const auto at = [&](const pipeline::Region& region) {
    return reinterpret_cast<bf16*>(r.workspace + region.offset);
  };
  const auto output = [](bf16* data, std::int64_t rows, std::int64_t columns) {
    GroupedGemmArguments x;
    x.out = data;
    x.rows_capacity = rows;
    x.n = static_cast<std::int32_t>(columns);
    return expert::describe_output(x);
  };
  const std::int64_t hidden_rows = plan.hidden_ring_blocks * pipeline::kBlockRows,
                     shared = problem.shared.intermediate;
  r.outputs[kFc1] = output(at(common_.workspace.hidden_ring), hidden_rows, problem.intermediate);
  if (plan.combine == CombineMode::comm_workers)
    r.outputs[kFc2] = output(at(common_.workspace.y), plan.capacity_rows, problem.hidden);
  if (shared > 0) {
    r.outputs[kSharedFc1] = output(at(common_.workspace.shared_hidden), problem.max_tokens, shared);
    r.outputs[kSharedFc2] =
        output(at(common_.workspace.shared_out), problem.max_tokens, problem.hidden);
  }
}

void ForwardPass::describe_weights(std::int64_t rank, const Weights& w, const ConstTensorView& x) {
  const Problem& problem = memory_.problem;
  const Plan& plan = memory_.plan;
  std::optional<MapKey>& known = known_[static_cast<std::size_t>(rank)];
  const bool reads_x = problem.shared.intermediate > 0;
  const MapKey key = {address(w.gate.data),          address(w.up.data),
                      address(w.down.data),          address(w.shared_gate.data),
                      address(w.shared_up.data),     address(w.shared_down.data),
                      reads_x ? address(x.data) : 0, reads_x ? x.shape.dim[0] : 0};
  if (known == key) return;
  ForwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  const auto at = [&](const pipeline::Region& region) {
    return reinterpret_cast<const bf16*>(r.workspace + region.offset);
  };
  const auto product = [&](GroupedProduct kind, const bf16* a, std::int64_t rows,
                           const ConstTensorView& b, const ConstTensorView& b_up,
                           std::int64_t num_matrices, std::int64_t n, std::int64_t k) {
    GroupedGemmArguments x;
    x.product = kind;
    x.a = a;
    x.rows_capacity = rows;
    // A rank without experts has no tiles, but a map must point somewhere.
    x.num_experts = static_cast<std::int32_t>(std::max<std::int64_t>(num_matrices, 1));
    x.b = num_matrices > 0 ? b.as<bf16>() : a;
    x.b_up = num_matrices > 0 ? b_up.as<bf16>() : a;
    x.n = static_cast<std::int32_t>(n);
    x.k = static_cast<std::int32_t>(k);
    return expert::describe_operands(x);
  };
  const std::int64_t h = problem.hidden, i = problem.intermediate,
                     shared = problem.shared.intermediate;
  const std::int64_t experts =
      num_local_experts(problem.num_experts, problem.num_ranks, RankId{rank});
  const pipeline::WorkspaceLayout& l = common_.workspace;
  r.operands[kFc1] =
      product(GroupedProduct::swiglu, at(l.x_ring), plan.x_ring_blocks * pipeline::kBlockRows,
              w.gate, w.up, experts, i, h);
  r.operands[kFc2] =
      product(GroupedProduct::plain, at(l.hidden_ring),
              plan.hidden_ring_blocks * pipeline::kBlockRows, w.down, {}, experts, h, i);
  if (shared > 0) {
    // x where the caller keeps it; a rank without tokens has no tiles.
    const bool has_x = x.shape.dim[0] > 0;
    r.operands[kSharedFc1] =
        product(GroupedProduct::swiglu, has_x ? x.as<bf16>() : at(l.x_ring),
                has_x ? x.shape.dim[0] : 1, w.shared_gate, w.shared_up, 1, shared, h);
    r.operands[kSharedFc2] = product(GroupedProduct::plain, at(l.shared_hidden), problem.max_tokens,
                                     w.shared_down, {}, 1, h, shared);
  }
  known = key;
}

void ForwardPass::bind_rank(std::int64_t rank, const ForwardInput& input,
                            const ForwardOutput& output) {
  for (const auto& [what, view] : {std::pair{"x", input.x},
                                   {"weights.gate", input.weights.gate},
                                   {"weights.up", input.weights.up},
                                   {"weights.down", input.weights.down},
                                   {"weights.gate_bias", input.weights.gate_bias},
                                   {"weights.up_bias", input.weights.up_bias},
                                   {"weights.down_bias", input.weights.down_bias},
                                   {"weights.shared_gate", input.weights.shared_gate},
                                   {"weights.shared_up", input.weights.shared_up},
                                   {"weights.shared_down", input.weights.shared_down},
                                   {"y", ConstTensorView(output.y)}}) {
    require_aligned(what, rank, view.data);
  }
  describe_weights(rank, input.weights, input.x);
  ForwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  r.x = input.x.as<bf16>();
  r.expert_ids = input.expert_ids.data;
  r.id_dtype = input.expert_ids.dtype;
  r.route_weights = input.route_weights.as<float>();
  r.merged = output.y.as<bf16>();
  r.num_tokens = input.x.shape.dim[0];
  r.gate_bias = input.weights.gate_bias.as<bf16>();
  r.up_bias = input.weights.up_bias.as<bf16>();
  r.down_bias = input.weights.down_bias.as<bf16>();
  r.shared_output_gate = input.weights.shared_output_gate.as<bf16>();
}

void ForwardPass::bind_context(std::int64_t rank, const CudaContext* context) {
  ForwardRank& r = ranks_[static_cast<std::size_t>(rank)];
  r.z = {};
  r.shared_z = {};
  r.keep_ids = nullptr;
  r.keep_weights = nullptr;
  common_.keep_x[rank] = nullptr;
  if (context == nullptr) return;
  const CudaContext::Rank& c = context->ranks[static_cast<std::size_t>(rank)];
  r.keep_ids = c.ids.as<std::int32_t>();
  r.keep_weights = c.weights.as<float>();
  common_.keep_x[rank] = c.x.as<bf16>();
  const Problem& problem = memory_.problem;
  const auto saved = [](const DeviceBytes& data, std::int64_t rows, std::int64_t intermediate) {
    GroupedGemmArguments x;
    x.out = data.as<bf16>();
    x.rows_capacity = rows;
    x.n = static_cast<std::int32_t>(2 * intermediate);
    return expert::describe_output(x);
  };
  if (c.z.get() != nullptr)
    r.z = saved(c.z, common_.saved_blocks * pipeline::kBlockRows, problem.intermediate);
  if (c.shared_z.get() != nullptr)
    r.shared_z = saved(c.shared_z, problem.max_tokens, problem.shared.intermediate);
}

void ForwardPass::poison(std::int64_t rank, const CudaContext* context, cudaStream_t stream) const {
  CudaPass::poison(rank, ranks_[static_cast<std::size_t>(rank)].x, stream);
  if (context == nullptr) return;
  const CudaContext::Rank& c = context->ranks[static_cast<std::size_t>(rank)];
  const pipeline::ContextBytes saved = pipeline::context_bytes(memory_.problem, memory_.plan);
  spoil(c.z.get(), saved.z, stream);
  spoil(c.x.get(), saved.x, stream);
  spoil(c.shared_z.get(), saved.shared_z, stream);
}

// A tile and the wait before it, a quarter of a dispatch unit and of a merge unit are events.
std::int64_t ForwardPass::num_events() const {
  const Problem& problem = memory_.problem;
  const Plan& plan = memory_.plan;
  const std::int64_t blocks = common_.extents.blocks;
  const std::int64_t tiles = blocks * (pipeline::num_fc1_tiles(common_.extents.wide_intermediate) +
                                       pipeline::num_fc2_tiles(problem.hidden));
  const std::int64_t quarters = blocks * pipeline::kBlockRows / pipeline::kDispatchUnitRows * 4,
                     parts = 4 * pipeline::num_merge_units(problem.max_tokens, plan.num_slabs),
                     carried = plan.combine == CombineMode::comm_workers
                                   ? quarters / 4 * plan.num_slabs
                                   : 0;
  return 2 * tiles + quarters + parts + carried;
}

void ForwardPass::run(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                      const CudaContext* context, trace::Trace* trace) {
  const Problem& problem = memory_.problem;
  const Plan& plan = memory_.plan;
  bind_common(common_);
  common_.keep_schedule = common_.faults.keep_schedule;
  if (common_.keep_schedule && plan.dispatch == DispatchMode::push) {
    unavailable(
        "faults.keep_schedule is not available with plan.dispatch push, whose rows go only where "
        "inputs_ready was seen; use pull");
  }
  bind_ranks([&](std::int64_t rank, std::size_t i) {
    bind_rank(rank, inputs[i], outputs[i]);
    bind_context(rank, context);
  });
  bind_trace(trace != nullptr, num_events(), ranks_);
  const auto launch_phases = [&](const DeviceGroup& group, std::uint32_t phases,
                                 cudaStream_t stream) {
    launch<ForwardParams<kMaxLocalRanks>>(group, common_, ranks_, phases, stream);
  };
  on_every_gpu(
      [&](const DeviceGroup& group, cudaStream_t stream) {
        if (!common_.faults.poison_workspace) return;
        for (const std::int64_t r : group.ranks) poison(r, context, stream);
      },
      [&](const DeviceGroup& group, cudaStream_t stream) {
        if (plan.mode == ExecMode::fused) {
          const std::uint32_t skipped = common_.faults.skip_merge ? kMergePhase : 0u;
          launch_phases(group, (kAllPhases | kClosePhase) & ~skipped, stream);
          return;
        }
        // A phase of one GPU waits inside for other GPUs' earlier phases only.
        for (std::uint32_t phase = kStagePhase; phase <= kFc2Phase; phase *= 2)
          launch_phases(group, phase, stream);
        launch_phases(group, kMergePhase | kClosePhase, stream);
      });
  if (trace == nullptr) return;
  collect_trace(*trace, sentence("forward, {} ranks, {}, {}", problem.num_ranks, name(plan.mode),
                                 name(plan.order)));
}

}  // namespace moxie::backend_cuda
