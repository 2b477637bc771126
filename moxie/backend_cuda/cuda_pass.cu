// Contract: cuda_pass.h.
#include "moxie/backend_cuda/cuda_pass.h"

#include <utility>

#include "moxie/backend_cuda/sentence.h"
#include "moxie/core/environment.h"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::backend_cuda {
namespace {

constexpr std::int64_t kManyRowsPerExpert = 1024;

// A grid of whole clusters. The attributes must outlive the configuration.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  LaunchConfig(const FusedKernel& kernel, std::int32_t num_ctas, std::int32_t cluster_size,
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

}  // namespace

LayerMemory::LayerMemory(CudaBackend& of, const Problem& for_problem, const Plan& by_plan,
                         const CudaLayer* of_layer)
    : backend(of), problem(for_problem), plan(by_plan), layer(of_layer) {
  backend.reserve(pipeline::heap_layout(problem));
  const std::int64_t bytes = pipeline::cuda_workspace_layout(problem, plan).num_bytes;
  workspaces = backend.make_workspaces(bytes, plan);
}

// Pairs of row blocks of one expert share its weights: it pays where experts have many blocks.
std::int32_t choose_by_rows_per_expert(const Problem& p, std::int32_t wanted) {
  const std::int64_t rows_per_expert = p.num_ranks * p.max_tokens * p.top_k / p.num_experts;
  return wanted != 0 ? wanted : rows_per_expert >= kManyRowsPerExpert ? 2 : 1;
}

// torch and cudaMalloc give 256-byte alignment.
void require_aligned(const char* what, std::int64_t rank, const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (address % 16 == 0) return;
  throw Error(
      ErrorCode::invalid_argument,
      sentence(
          "{} of rank {} is at address {}, must be a multiple of 16 bytes; nearest legal value {}",
          what, rank, data, reinterpret_cast<const void*>(address / 16 * 16)));
}

CudaPass::CudaPass(const LayerMemory& memory, KernelOf kernel_of, std::int32_t cluster_size)
    : memory_(memory),
      kernel_of_(kernel_of),
      cluster_size_(cluster_size),
      is_cooperative_(!is_under_profiler()) {
  for (const DeviceGroup& group : memory.backend.groups())
    ctas_per_rank_.push_back(size_grid(group));
}

FusedKernel CudaPass::kernel_on(const DeviceGroup& group) const {
  const Problem& p = memory_.problem;
  const bool general = p.expert_bias || p.activation.kind != ActivationKind::swiglu;
  return kernel_of_(general, group.ranks.size() > 1, cluster_size_);
}

// CTAs per rank: as many as are resident at once, less the reserved SMs, the same number for every
// rank of the GPU.
std::int32_t CudaPass::size_grid(const DeviceGroup& group) const {
  const DeviceGuard guard(group.device);
  const FusedKernel kernel = kernel_on(group);
  check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kernel.shared_bytes)),
             "sizing the kernel's shared memory");
  LaunchConfig launch(kernel, cluster_size_, cluster_size_, nullptr);
  launch.config.numAttrs = 1;  // the question is about clusters only
  int num_clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&num_clusters, kernel.function, &launch.config),
             "asking for the kernel's occupancy");
  const auto num_ranks = static_cast<std::int32_t>(group.ranks.size());
  const std::int32_t reserve = memory_.backend.cuda().reserve_sms,
                     comm_workers = memory_.plan.comm_workers,
                     resident = num_clusters * cluster_size_;
  const std::int32_t ctas = (resident - reserve) / num_ranks / cluster_size_ * cluster_size_;
  if (ctas >= 1 && comm_workers >= ctas) {
    const std::int32_t most = std::max(ctas - cluster_size_, 0);
    throw Error(ErrorCode::invalid_plan,
                sentence("plan.comm_workers is {}, must be at most {} with {} CTAs per rank on GPU "
                         "{}: somebody must compute; nearest legal value {}",
                         comm_workers, most, ctas, group.device, most));
  }
  if (reserve < 0 || ctas < 1) {
    const std::int32_t most = std::max(0, resident - num_ranks * cluster_size_);
    throw Error(ErrorCode::invalid_argument,
                sentence("cuda.reserve_sms is {}, must be between 0 and {} on GPU {} with {} "
                         "ranks; nearest legal value {}",
                         reserve, most, group.device, num_ranks, reserve < 0 ? 0 : most));
  }
  return ctas;
}

void CudaPass::launch_kernel(const DeviceGroup& group, void* params, cudaStream_t stream) const {
  const FusedKernel kernel = kernel_on(group);
  const std::int32_t num_ctas = ctas_of(group) * static_cast<std::int32_t>(group.ranks.size());
  LaunchConfig launch(kernel, num_ctas, cluster_size_, stream);
  if (!is_cooperative_) launch.config.numAttrs = 1;
  void* arguments[] = {params};
  check_cuda(cudaLaunchKernelExC(&launch.config, kernel.function, arguments), "launching the pass");
}

void CudaPass::describe_common(PassCommon& common) const {
  const CudaBackend& backend = memory_.backend;
  common.problem = memory_.problem;
  common.plan = memory_.plan;
  common.extents = pipeline::extents(common.problem, common.plan);
  common.heap = pipeline::heap_layout(common.problem);
  common.workspace = pipeline::workspace_layout(common.problem, common.plan);
  common.counters = pipeline::counter_layout(common.extents);
  common.cuda_workspace = pipeline::cuda_workspace_layout(common.problem, common.plan);
  for (std::int64_t r = 0; r < common.problem.num_ranks; ++r) common.heaps[r] = backend.heap(r);
  common.proven_blocks = pipeline::worst_case_blocks(common.problem);
  common.saved_blocks = pipeline::saved_blocks(common.plan);
  common.abort_flag = backend.abort_flag();
  common.expired = backend.expired();
  common.reports = backend.report(0);
}

void CudaPass::bind_common(PassCommon& common) const {
  CudaBackend& backend = memory_.backend;
  common.faults = backend.options().faults;
  common.timeout_ns = static_cast<std::uint64_t>(backend.options().timeout_s * 1e9);
  backend.remember(memory_.problem, memory_.plan, memory_.layer);
}

void CudaPass::collect_trace(trace::Trace& trace, std::string title) const {
  memory_.backend.synchronize();
  const std::int64_t lost = traces_.collect(trace);
  trace.title = std::move(title);
  if (lost > 0) trace.title += sentence(", {} events lost", lost);
}

// Enough for a CTA that takes twice its share of tickets.
std::int32_t CudaPass::event_capacity(std::int64_t num_events, std::int32_t num_ctas) {
  return static_cast<std::int32_t>(2 * ceil_div(num_events, num_ctas) + 512);
}

void CudaPass::spoil(std::byte* data, std::int64_t num_bytes, cudaStream_t stream) {
  if (data == nullptr || num_bytes == 0) return;
  check_cuda(cudaMemsetAsync(data, 0xFF, static_cast<std::size_t>(num_bytes), stream), "poisoning");
}

void CudaPass::poison(std::int64_t rank, const void* x, cudaStream_t stream) const {
  const pipeline::HeapLayout heap = pipeline::heap_layout(memory_.problem);
  for (const pipeline::Region& region :
       pipeline::poisoned_heap(heap, x == memory_.input_buffer(rank)))
    spoil(memory_.backend.heap(rank) + region.offset, region.num_bytes, stream);
  const pipeline::WorkspaceLayout workspace =
      pipeline::workspace_layout(memory_.problem, memory_.plan);
  for (const pipeline::Region& region : pipeline::poisoned_workspace(workspace))
    spoil(memory_.workspace(rank) + region.offset, region.num_bytes, stream);
  const pipeline::CudaWorkspaceLayout cuda =
      pipeline::cuda_workspace_layout(memory_.problem, memory_.plan);
  for (const pipeline::Region& region :
       {cuda.sort_counts, cuda.result, cuda.step_pair, cuda.dy_bias})
    spoil(memory_.workspace(rank) + region.offset, region.num_bytes, stream);
}

void CudaPass::fork_streams() const {
  const std::vector<DeviceGroup>& groups = memory_.backend.groups();
  if (groups.size() == 1) return;  // the caller's stream is the only one
  const DeviceGuard guard(groups[0].device);
  check_cuda(cudaEventRecord(groups[0].event, memory_.backend.stream()), "ordering the GPUs");
  for (const DeviceGroup& group : groups) {
    if (group.stream == nullptr) continue;
    const DeviceGuard on_device(group.device);
    check_cuda(cudaStreamWaitEvent(group.stream, groups[0].event), "ordering the GPUs");
  }
}

void CudaPass::join_streams() const {
  const std::vector<DeviceGroup>& groups = memory_.backend.groups();
  if (groups.size() == 1) return;
  for (const DeviceGroup& group : groups) {
    if (group.stream == nullptr) continue;
    const DeviceGuard on_device(group.device);
    check_cuda(cudaEventRecord(group.event, group.stream), "ordering the GPUs");
  }
  const DeviceGuard guard(groups[0].device);
  for (const DeviceGroup& group : groups) {
    if (group.stream != nullptr)
      check_cuda(cudaStreamWaitEvent(memory_.backend.stream(), group.event), "ordering the GPUs");
  }
}

}  // namespace moxie::backend_cuda
