// Contract: cuda_layer.h.
#include "moxie/backend_cuda/cuda_layer.h"

#include "moxie/backend_cuda/sentence.h"
#include "moxie/merge/merge_cuda.cuh"

namespace moxie::backend_cuda {
namespace {

// Before anything is allocated.
const Problem& supported(const CudaBackend& backend, const Problem& p) {
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
  const std::int32_t cluster_size = backend.cuda().cluster_size;
  if (cluster_size < 0 || cluster_size > 2) {
    throw Error(ErrorCode::invalid_argument,
                sentence("cuda.cluster_size is {}, must be 0, 1 or 2; nearest legal value {}",
                         cluster_size, cluster_size < 0 ? 0 : 2));
  }
  return p;
}

}  // namespace

CudaLayer::CudaLayer(CudaBackend& backend, const Problem& problem, const Plan& plan)
    : memory_(backend, supported(backend, problem), plan, this), forward_(memory_) {
  prepare_backward();
  clear_counters();
  backend.attach(this);
}

CudaLayer::~CudaLayer() { memory_.backend.detach(this); }

void CudaLayer::prepare_backward() {
  try {
    backward_.emplace(memory_);
  } catch (const Error& error) {
    no_backward_ = error;
  }
}

void CudaLayer::heaps_moved() {
  forward_.heaps_moved();
  if (backward_) backward_->heaps_moved();
}

std::unique_ptr<ContextState> CudaLayer::make_context() {
  if (no_backward_) throw *no_backward_;
  auto context = std::make_unique<CudaContext>();
  const Problem& problem = memory_.problem;
  const pipeline::ContextBytes bytes = pipeline::context_bytes(problem, memory_.plan);
  context->ranks.resize(static_cast<std::size_t>(problem.num_ranks));
  for (const std::int64_t r : memory_.backend.ranks_here()) {
    const int device = memory_.backend.device_of(r);
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

std::vector<pipeline::NamedBytes> CudaLayer::memory() const {
  std::vector<pipeline::NamedBytes> table =
      pipeline::cuda_buffer_bytes(memory_.problem, memory_.plan);
  pipeline::NamedBytes total = table.back();
  table.pop_back();
  std::vector<pipeline::NamedBytes> more = memory_.backend.world_bytes();
  more.push_back({"trace.forward", forward_.trace_bytes()});
  if (backward_) more.push_back({"trace.backward", backward_->trace_bytes()});
  for (const pipeline::NamedBytes& b : more) {
    if (b.num_bytes == 0) continue;
    table.push_back(b);
    total.num_bytes += b.num_bytes;
  }
  table.push_back(total);
  return table;
}

void CudaLayer::clear_counters() {
  const pipeline::WorkspaceLayout workspace =
      pipeline::workspace_layout(memory_.problem, memory_.plan);
  const pipeline::CudaWorkspaceLayout cuda =
      pipeline::cuda_workspace_layout(memory_.problem, memory_.plan);
  for (const std::int64_t r : memory_.backend.ranks_here()) {
    const DeviceGuard guard(memory_.backend.device_of(r));
    const auto clear = [&](const pipeline::Region& region) {
      check_cuda(cudaMemset(memory_.workspace(r) + region.offset, 0,
                            static_cast<std::size_t>(region.num_bytes)),
                 "clearing counters");
    };
    clear(workspace.pass_count);
    clear(workspace.counters);
    clear(cuda.words);
    clear(cuda.pulled);  // epochs begin anew
    clear(cuda.row_places);
    check_cuda(
        cudaDeviceSynchronize(),
        "clearing counters");  // passes may come on a stream that does not wait for the default one
  }
}

pipeline::Verdict CudaLayer::last_verdict(std::int64_t rank) const {
  const pipeline::CudaWorkspaceLayout cuda =
      pipeline::cuda_workspace_layout(memory_.problem, memory_.plan);
  ScheduleResult result{};
  const DeviceGuard guard(memory_.backend.device_of(rank));
  check_cuda(cudaMemcpy(&result, memory_.workspace(rank) + cuda.result.offset, sizeof(result),
                        cudaMemcpyDeviceToHost),
             "reading the verdict of a pass");
  return static_cast<pipeline::Verdict>(result.verdict);
}

void CudaLayer::forward(std::span<const ForwardInput> inputs,
                        std::span<const ForwardOutput> outputs, ContextState* context,
                        trace::Trace* trace) {
  forward_.run(inputs, outputs, static_cast<const CudaContext*>(context), trace);
}

// Whoever has a context of this layer was told by make_context() if there were no backward.
void CudaLayer::backward(const ContextState& context, std::span<const BackwardInput> inputs,
                         std::span<const BackwardOutput> outputs, trace::Trace* trace) {
  backward_->run(static_cast<const CudaContext&>(context), inputs, outputs, trace);
}

}  // namespace moxie::backend_cuda
