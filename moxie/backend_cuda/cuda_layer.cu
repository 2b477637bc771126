// Workspaces, kernel parameters and the launch of one layer. Contract: cuda_layer.h.
#include "moxie/backend_cuda/cuda_layer.h"

#include <algorithm>

#include "moxie/backend_cuda/sentence.h"
#include "moxie/expert/grouped_gemm_launch_cuda.cuh"
#include "moxie/merge/merge_cuda.cuh"

namespace moxie::backend_cuda {
namespace {

using expert::GroupedGemmArguments;
using expert::GroupedProduct;

constexpr std::int64_t kManyRowsPerExpert = 1024;

void check_supported(const Problem& p) {
  if (p.dtype != DType::bf16)
    unavailable(sentence("dtype {} is not available in a CUDA world, must be bf16; use World::cpu",
                         name(p.dtype)));
  if (p.top_k > merge::kMaxSlots)
    unavailable(sentence("top_k is {}, must be at most {} in a CUDA world; nearest legal value {}",
                         p.top_k, merge::kMaxSlots, merge::kMaxSlots));
  if (p.num_experts > schedule::kMaxExperts) {
    unavailable(
        sentence("num_experts is {}, must be at most {} in a CUDA world; nearest legal value {}",
                 p.num_experts, schedule::kMaxExperts, schedule::kMaxExperts));
  }
}

// Pairs of row blocks of one expert share its weights: it pays where experts have many blocks.
std::int32_t choose_cluster_size(const Problem& p, const Plan& plan, std::int32_t wanted) {
  if (wanted < 0 || wanted > 2) {
    throw Error(ErrorCode::invalid_argument,
                sentence("cuda.cluster_size is {}, must be 0, 1 or 2; nearest legal value {}",
                         wanted, wanted < 0 ? 0 : 2));
  }
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
  const std::int64_t rows_per_expert = p.num_ranks * p.max_tokens * p.top_k / p.num_experts;
  return wanted != 0 ? wanted : rows_per_expert >= kManyRowsPerExpert ? 2 : 1;
}

bool same_pointers(const Weights& a, const Weights& b) {
  return a.gate.data == b.gate.data && a.up.data == b.up.data && a.down.data == b.down.data &&
         a.shared_gate.data == b.shared_gate.data && a.shared_up.data == b.shared_up.data &&
         a.shared_down.data == b.shared_down.data;
}

// The kernel moves 16 bytes at a time; torch and cudaMalloc give 256-byte alignment.
void require_aligned(const char* what, std::int64_t rank, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return;
  throw Error(
      ErrorCode::invalid_argument,
      sentence(
          "{} of rank {} is at address {}, must be a multiple of 16 bytes; nearest legal value {}",
          what, rank, data,
          reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(data) / 16 * 16)));
}

}  // namespace

CudaLayer::CudaLayer(CudaBackend& backend, const Problem& problem, const Plan& plan)
    : backend_(backend), problem_(problem), plan_(plan) {
  check_supported(problem);
  cluster_size_ = choose_cluster_size(problem, plan, backend.cuda().cluster_size);
  backend_.reserve(pipeline::heap_layout(problem));
  const auto num_ranks = static_cast<std::size_t>(problem.num_ranks);
  const std::int64_t bytes = cuda_workspace_layout(problem, plan).num_bytes;
  workspaces_ = backend_.make_workspaces(bytes, plan);
  ranks_.resize(num_ranks);
  weights_.resize(num_ranks);
  inputs_.resize(num_ranks);
  heaps_moved();
  clear_counters();
  for (const DeviceGroup& group : backend_.groups()) prepare_kernel(group);
  backend_.attach(this);
}

CudaLayer::~CudaLayer() { backend_.detach(this); }

void CudaLayer::heaps_moved() {
  fill_common();
  for (const std::int64_t r : backend_.ranks_here()) describe_rank(r);
}

void CudaLayer::fill_common() {
  common_.problem = problem_;
  common_.plan = plan_;
  common_.extents = pipeline::extents(problem_, plan_);
  common_.heap = pipeline::heap_layout(problem_);
  common_.workspace = pipeline::workspace_layout(problem_, plan_);
  common_.counters = pipeline::counter_layout(common_.extents);
  common_.cuda_workspace = cuda_workspace_layout(problem_, plan_);
  for (std::int64_t r = 0; r < problem_.num_ranks; ++r) {
    common_.heaps[r] = backend_.heap(r);
    common_.workspaces[r] = workspace(r);  // of another process: null, unless the plan pushes
  }
  common_.proven_blocks = pipeline::worst_case_blocks(problem_);
  common_.saved_blocks = pipeline::saved_blocks(plan_);
  common_.abort_flag = backend_.abort_flag();
  common_.expired = backend_.expired();
  common_.reports = backend_.report(0);
}

// What depends on addresses of this layer's own memory: the A operands and the outputs.
void CudaLayer::describe_rank(std::int64_t rank) {
  RankParams& r = ranks_[static_cast<std::size_t>(rank)];
  r.me = RankId{rank};
  r.workspace = workspace(rank);
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
  const std::int64_t hidden_rows = plan_.hidden_ring_blocks * pipeline::kBlockRows,
                     shared = problem_.shared.intermediate;
  r.outputs[kFc1] = output(at(common_.workspace.hidden_ring), hidden_rows, problem_.intermediate);
  if (plan_.combine == CombineMode::comm_workers)
    r.outputs[kFc2] = output(at(common_.workspace.y), plan_.capacity_rows, problem_.hidden);
  if (shared > 0) {
    r.outputs[kSharedFc1] =
        output(at(common_.workspace.shared_hidden), problem_.max_tokens, shared);
    r.outputs[kSharedFc2] =
        output(at(common_.workspace.shared_out), problem_.max_tokens, problem_.hidden);
  }
  weights_[static_cast<std::size_t>(rank)] = {};  // the operands hold A and B: make them anew
}

void CudaLayer::describe_weights(std::int64_t rank, const Weights& w, const ConstTensorView& x) {
  Weights& known = weights_[static_cast<std::size_t>(rank)];
  ConstTensorView& known_x = inputs_[static_cast<std::size_t>(rank)];
  const bool same_x = problem_.shared.intermediate == 0 ||
                      (known_x.data == x.data && known_x.shape.dim[0] == x.shape.dim[0]);
  if (same_x && same_pointers(known, w)) return;
  RankParams& r = ranks_[static_cast<std::size_t>(rank)];
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
  const std::int64_t h = problem_.hidden, i = problem_.intermediate,
                     shared = problem_.shared.intermediate;
  const std::int64_t experts =
      num_local_experts(problem_.num_experts, problem_.num_ranks, RankId{rank});
  const pipeline::WorkspaceLayout& l = common_.workspace;
  r.operands[kFc1] =
      product(GroupedProduct::swiglu, at(l.x_ring), plan_.x_ring_blocks * pipeline::kBlockRows,
              w.gate, w.up, experts, i, h);
  r.operands[kFc2] =
      product(GroupedProduct::plain, at(l.hidden_ring),
              plan_.hidden_ring_blocks * pipeline::kBlockRows, w.down, {}, experts, h, i);
  if (shared > 0) {
    // x where the caller keeps it; a rank without tokens has no tiles.
    const bool has_x = x.shape.dim[0] > 0;
    r.operands[kSharedFc1] =
        product(GroupedProduct::swiglu, has_x ? x.as<bf16>() : at(l.x_ring),
                has_x ? x.shape.dim[0] : 1, w.shared_gate, w.shared_up, 1, shared, h);
    r.operands[kSharedFc2] = product(GroupedProduct::plain, at(l.shared_hidden),
                                     problem_.max_tokens, w.shared_down, {}, 1, h, shared);
  }
  known = w;
  known_x = x;
}

void CudaLayer::bind_rank(std::int64_t rank, const ForwardInput& input,
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
  RankParams& r = ranks_[static_cast<std::size_t>(rank)];
  r.x = input.x.as<bf16>();
  r.expert_ids = input.expert_ids.data;
  r.id_dtype = input.expert_ids.dtype;
  r.route_weights = input.route_weights.as<float>();
  r.y = output.y.as<bf16>();
  r.num_tokens = input.x.shape.dim[0];
  r.gate_bias = input.weights.gate_bias.as<bf16>();
  r.up_bias = input.weights.up_bias.as<bf16>();
  r.down_bias = input.weights.down_bias.as<bf16>();
  r.shared_output_gate = input.weights.shared_output_gate.as<bf16>();
}

void CudaLayer::bind_context(std::int64_t rank, const CudaContext* context) {
  RankParams& r = ranks_[static_cast<std::size_t>(rank)];
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
  const auto saved = [](const DeviceBytes& data, std::int64_t rows, std::int64_t intermediate) {
    GroupedGemmArguments x;
    x.out = data.as<bf16>();
    x.rows_capacity = rows;
    x.n = static_cast<std::int32_t>(2 * intermediate);
    return expert::describe_output(x);
  };
  if (c.z.get() != nullptr)
    r.z = saved(c.z, common_.saved_blocks * pipeline::kBlockRows, problem_.intermediate);
  if (c.shared_z.get() != nullptr)
    r.shared_z = saved(c.shared_z, problem_.max_tokens, problem_.shared.intermediate);
}

std::unique_ptr<ContextState> CudaLayer::make_context() {
  auto context = std::make_unique<CudaContext>();
  const pipeline::ContextBytes bytes = pipeline::context_bytes(problem_, plan_);
  context->ranks.resize(static_cast<std::size_t>(problem_.num_ranks));
  for (const std::int64_t r : backend_.ranks_here()) {
    const int device = backend_.device_of(r);
    const std::string what = sentence("the context of rank {}", r);
    context->ranks[static_cast<std::size_t>(r)] = {{device, bytes.routes / 2, what},
                                                   {device, bytes.routes / 2, what},
                                                   {device, bytes.z, what},
                                                   {device, bytes.x, what},
                                                   {device, bytes.shared_z, what}};
    context->num_bytes += bytes.total();
  }
  return context;
}

void CudaLayer::clear_counters() {
  for (const std::int64_t r : backend_.ranks_here()) {
    const DeviceGuard guard(backend_.device_of(r));
    const auto clear = [&](const pipeline::Region& region) {
      check_cuda(
          cudaMemset(workspace(r) + region.offset, 0, static_cast<std::size_t>(region.num_bytes)),
          "clearing counters");
    };
    clear(common_.workspace.pass_count);
    clear(common_.workspace.counters);
    clear(common_.cuda_workspace.words);
    clear(common_.cuda_workspace.pulled);  // epochs begin anew
    check_cuda(
        cudaDeviceSynchronize(),
        "clearing counters");  // passes may come on a stream that does not wait for the default one
  }
}

// Fault injection: every byte that a pass must write before it reads becomes 0xFF, a NaN.
void CudaLayer::poison(const CudaContext* fill, std::int64_t rank, cudaStream_t stream) const {
  const auto spoil = [&](std::byte* data, std::int64_t num_bytes) {
    if (data == nullptr) return;
    check_cuda(cudaMemsetAsync(data, 0xFF, static_cast<std::size_t>(num_bytes), stream),
               "poisoning");
  };
  std::byte* own = workspace(rank);
  const bool x_in_place =
      ranks_[static_cast<std::size_t>(rank)].x == reinterpret_cast<const bf16*>(input_buffer(rank));
  for (const pipeline::Region& region : pipeline::poisoned_heap(common_.heap, x_in_place))
    spoil(backend_.heap(rank) + region.offset, region.num_bytes);
  for (const pipeline::Region& region : pipeline::poisoned_workspace(common_.workspace))
    spoil(own + region.offset, region.num_bytes);
  for (const pipeline::Region& region :
       {common_.cuda_workspace.sort_counts, common_.cuda_workspace.result})
    spoil(own + region.offset, region.num_bytes);
  if (fill == nullptr) return;
  const CudaContext::Rank& c = fill->ranks[static_cast<std::size_t>(rank)];
  const pipeline::ContextBytes saved = pipeline::context_bytes(problem_, plan_);
  spoil(c.z.get(), saved.z);
  spoil(c.x.get(), saved.x);
  spoil(c.shared_z.get(), saved.shared_z);
}

pipeline::Verdict CudaLayer::last_verdict(std::int64_t rank) const {
  ScheduleResult result{};
  const DeviceGuard guard(backend_.device_of(rank));
  check_cuda(cudaMemcpy(&result, workspace(rank) + common_.cuda_workspace.result.offset,
                        sizeof(result), cudaMemcpyDeviceToHost),
             "reading the verdict of a pass");
  return static_cast<pipeline::Verdict>(result.verdict);
}

std::byte* CudaLayer::input_buffer(std::int64_t rank) const {
  return backend_.heap(rank) + common_.heap.x_in.offset;
}

ForwardKernel CudaLayer::kernel_of(const DeviceGroup& group) const {
  const bool general = problem_.expert_bias || problem_.activation.kind != ActivationKind::swiglu;
  return forward_kernel(general, group.ranks.size() > 1, cluster_size_);
}

// A grid of whole clusters. The attributes must outlive the configuration.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  LaunchConfig(const ForwardKernel& kernel, std::int32_t num_ctas, std::int32_t cluster_size,
               cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(cluster_size);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;  // all CTAs resident at once, or an error:
                                                        // they wait for each other
    attributes[1].val.cooperative = 1;
    config.gridDim = static_cast<unsigned>(num_ctas);
    config.blockDim = expert::kNumThreads;
    config.dynamicSmemBytes = kernel.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
};

// Loads the kernel, so that no first launch has to while a peer's kernel already waits, and sizes
// the grid: as many CTAs as are resident at once, less the reserved SMs, the same number for every
// rank of the GPU.
void CudaLayer::prepare_kernel(const DeviceGroup& group) {
  const DeviceGuard guard(group.device);
  const ForwardKernel kernel = kernel_of(group);
  check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kernel.shared_bytes)),
             "sizing the kernel's shared memory");
  LaunchConfig launch(kernel, cluster_size_, cluster_size_, nullptr);
  launch.config.numAttrs = 1;  // the question is about clusters only
  int num_clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&num_clusters, kernel.function, &launch.config),
             "asking for the kernel's occupancy");
  const auto num_ranks = static_cast<std::int32_t>(group.ranks.size());
  const std::int32_t reserve = backend_.cuda().reserve_sms, resident = num_clusters * cluster_size_;
  const std::int32_t ctas = (resident - reserve) / num_ranks / cluster_size_ * cluster_size_;
  if (ctas >= 1 && plan_.comm_workers >= ctas) {
    const std::int32_t most = std::max(ctas - cluster_size_, 0);
    throw Error(ErrorCode::invalid_plan,
                sentence("plan.comm_workers is {}, must be at most {} with {} CTAs per rank on GPU "
                         "{}: somebody must compute; nearest legal value {}",
                         plan_.comm_workers, most, ctas, group.device, most));
  }
  if (reserve < 0 || ctas < 1) {
    const std::int32_t most = std::max(0, resident - num_ranks * cluster_size_);
    throw Error(ErrorCode::invalid_argument,
                sentence("cuda.reserve_sms is {}, must be between 0 and {} on GPU {} with {} "
                         "ranks; nearest legal value {}",
                         reserve, most, group.device, num_ranks, reserve < 0 ? 0 : most));
  }
  ctas_per_rank_.push_back(ctas);
}

void CudaLayer::launch(const DeviceGroup& group, std::uint32_t phases, cudaStream_t stream) {
  ForwardParams<kMaxLocalRanks> params{};  // its beginning is a ForwardParams<1>
  params.common = common_;
  params.common.ctas_per_rank = ctas_of(group);
  params.common.phases = phases;
  for (std::size_t i = 0; i < group.ranks.size(); ++i) {
    params.ranks[i] = ranks_[static_cast<std::size_t>(group.ranks[i])];
  }
  const ForwardKernel kernel = kernel_of(group);
  const std::int32_t num_ctas =
      params.common.ctas_per_rank * static_cast<std::int32_t>(group.ranks.size());
  const LaunchConfig launch(kernel, num_ctas, cluster_size_, stream);
  void* arguments[] = {&params};
  check_cuda(cudaLaunchKernelExC(&launch.config, kernel.function, arguments),
             "launching the forward pass");
}

void CudaLayer::forward(std::span<const ForwardInput> inputs,
                        std::span<const ForwardOutput> outputs, ContextState* context,
                        trace::Trace* trace) {
  const auto* fill = static_cast<const CudaContext*>(context);
  if (backend_.options().faults.keep_schedule && plan_.dispatch == DispatchMode::push) {
    unavailable(
        "faults.keep_schedule is not available with plan.dispatch push, whose rows go only where "
        "inputs_ready was seen; use pull");
  }
  for (const std::int64_t r : backend_.ranks_here()) {
    bind_rank(r, inputs[backend_.idx_here(r)], outputs[backend_.idx_here(r)]);
    bind_context(r, fill);
  }
  for (const DeviceGroup& group : backend_.groups()) {
    const std::int32_t ctas = ctas_of(group), capacity = trace ? event_capacity(ctas) : 0;
    for (const std::int64_t r : group.ranks)
      traces_.bind(trace != nullptr, r, group.device, ctas, capacity,
                   ranks_[static_cast<std::size_t>(r)]);
  }
  common_.faults = backend_.options().faults;
  common_.keep_schedule = common_.faults.keep_schedule;
  common_.timeout_ns = static_cast<std::uint64_t>(backend_.options().timeout_s * 1e9);
  backend_.remember(problem_, plan_, this);

  // Rank 0's GPU runs on the caller's stream; the others join it before and after. The launches
  // follow each other without waiting, so the kernels find each other running.
  const std::vector<DeviceGroup>& groups = backend_.groups();
  const DeviceGuard guard(groups[0].device);
  check_cuda(cudaEventRecord(groups[0].event, backend_.stream()), "ordering the GPUs");
  const auto stream_of = [&](const DeviceGroup& group) {
    return group.stream != nullptr ? group.stream : backend_.stream();
  };
  for (const DeviceGroup& group : groups) {
    const DeviceGuard on_device(group.device);
    if (group.stream != nullptr)
      check_cuda(cudaStreamWaitEvent(group.stream, groups[0].event), "ordering the GPUs");
    for (const std::int64_t r : group.ranks) {
      if (common_.faults.poison_workspace) poison(fill, r, stream_of(group));
    }
  }
  for (const DeviceGroup& group : groups) {
    const DeviceGuard on_device(group.device);
    // Split mode: a phase of one GPU waits inside for other GPUs' earlier phases only.
    if (plan_.mode == ExecMode::fused) {
      const std::uint32_t skipped = common_.faults.skip_merge ? kMergePhase : 0u;
      launch(group, (kAllPhases | kClosePhase) & ~skipped, stream_of(group));
    } else {
      for (std::uint32_t phase = kStagePhase; phase <= kFc2Phase; phase *= 2)
        launch(group, phase, stream_of(group));
      launch(group, kMergePhase | kClosePhase, stream_of(group));
    }
    if (group.stream != nullptr)
      check_cuda(cudaEventRecord(group.event, group.stream), "ordering the GPUs");
  }
  for (const DeviceGroup& group : groups) {
    if (group.stream != nullptr)
      check_cuda(cudaStreamWaitEvent(backend_.stream(), group.event), "ordering the GPUs");
  }
  if (trace == nullptr) return;
  backend_.synchronize();  // the pass's errors are thrown here
  const std::int64_t lost = traces_.collect(*trace);
  trace->title = sentence("forward, {} ranks, {}, {}", problem_.num_ranks, name(plan_.mode),
                          name(plan_.order));
  if (lost > 0) trace->title += sentence(", {} events lost", lost);
}

// Enough for a CTA that takes twice its share of tickets. A tile and the wait before it, a quarter
// of a dispatch unit and of a merge unit are events.
std::int32_t CudaLayer::event_capacity(std::int32_t num_ctas) const {
  const std::int64_t blocks = common_.extents.blocks;
  const std::int64_t tiles = blocks * (pipeline::num_fc1_tiles(common_.extents.wide_intermediate) +
                                       pipeline::num_fc2_tiles(problem_.hidden));
  const std::int64_t quarters = blocks * pipeline::kBlockRows / pipeline::kDispatchUnitRows * 4,
                     parts = 4 * pipeline::num_merge_units(problem_.max_tokens, plan_.num_slabs),
                     carried = plan_.combine == CombineMode::comm_workers
                                   ? quarters / 4 * plan_.num_slabs
                                   : 0;
  return static_cast<std::int32_t>(2 * ceil_div(2 * tiles + quarters + parts + carried, num_ctas) +
                                   512);
}

void CudaLayer::backward(const ContextState&, std::span<const BackwardInput>,
                         std::span<const BackwardOutput>, trace::Trace*) {
  unavailable("backward is not available in a CUDA world; use World::cpu");
}

}  // namespace moxie::backend_cuda
