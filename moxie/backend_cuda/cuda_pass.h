// What the forward and the backward of a layer share on the host: its memory, the grid of a kernel
// on every GPU, the order of the launches, fault injection and traces.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "moxie/backend_cuda/cuda_backend.h"
#include "moxie/backend_cuda/trace_buffers.h"

namespace moxie::backend_cuda {

// Saved by forward for the backward; one entry per rank.
struct CudaContext final : ContextState {
  struct Rank {
    DeviceBytes ids;       // i32 [T_max * K]
    DeviceBytes weights;   // f32 [T_max * K]
    DeviceBytes z;         // bf16 [saved blocks * 128, 2 I]
    DeviceBytes x;         // bf16 [saved blocks * 128, H]
    DeviceBytes shared_z;  // bf16 [T_max, 2 I_s]
  };
  std::vector<Rank> ranks;
};

// A layer's own memory, and heaps large enough for it. It stays where it is as long as the layer
// lives; heaps can move.
struct LayerMemory {
  LayerMemory(CudaBackend& of, const Problem& for_problem, const Plan& by_plan,
              const CudaLayer* of_layer);

  // Of another process: null, unless the plan pushes into it.
  std::byte* workspace(std::int64_t rank) const { return workspaces->of(rank); }
  std::byte* input_buffer(std::int64_t rank) const {
    return backend.heap(rank) + pipeline::heap_layout(problem).x_in.offset;
  }

  CudaBackend& backend;
  Problem problem;
  Plan plan;
  const CudaLayer* layer;
  std::unique_ptr<transport::RankBlocks> workspaces;
};

// CTAs of a cluster: `wanted` (CudaOptions::cluster_size), or where that is 0, 2 if experts have
// many rows.
std::int32_t choose_by_rows_per_expert(const Problem& problem, std::int32_t wanted);

// What a group of tensor maps was made of, addresses and sizes: maps are made again only when one
// of them changes.
using MapKey = std::array<std::int64_t, 8>;
inline std::int64_t address(const void* data) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
}

// Throws invalid_argument unless `data` is a multiple of 16: the kernels move 16 bytes at a time.
void require_aligned(const char* what, std::int64_t rank, const void* data);

class CudaPass {
 public:
  CudaPass(const CudaPass&) = delete;
  CudaPass& operator=(const CudaPass&) = delete;

  std::int64_t trace_bytes() const { return traces_.num_bytes(); }  // of one rank

 protected:
  // forward_kernel() or backward_kernel().
  using KernelOf = FusedKernel (*)(bool general, bool several_ranks, int cluster_size);

  // Loads the kernel on every GPU, so that no first launch has to while a peer's kernel already
  // waits, and sizes its grid. Throws where the reserved SMs leave no CTA, or the communication
  // workers none that computes.
  CudaPass(const LayerMemory& memory, KernelOf kernel_of, std::int32_t cluster_size);
  ~CudaPass() = default;

  // What both directions' parameters have in common.
  void describe_common(PassCommon& common) const;
  // What the next launch takes from the world.
  void bind_common(PassCommon& common) const;

  std::int32_t ctas_of(const DeviceGroup& group) const {
    return ctas_per_rank_[static_cast<std::size_t>(&group - memory_.backend.groups().data())];
  }
  // Points the ranks at their trace buffers, or at none. `num_events`: about how many a rank has.
  template <class Rank>
  void bind_trace(bool traced, std::int64_t num_events, std::vector<Rank>& ranks) {
    for (const DeviceGroup& group : memory_.backend.groups()) {
      const std::int32_t ctas = ctas_of(group);
      for (const std::int64_t r : group.ranks)
        traces_.bind(traced, r, group.device, ctas, event_capacity(num_events, ctas),
                     ranks[static_cast<std::size_t>(r)]);
    }
  }
  // Waits for the pass, whose errors are thrown here, and reads what it recorded.
  void collect_trace(trace::Trace& trace, std::string title) const;

  // Every byte that a pass must write before it reads it becomes 0xFF, a NaN. x: the rank's input.
  void poison(std::int64_t rank, const void* x, cudaStream_t stream) const;
  static void spoil(std::byte* data, std::int64_t num_bytes, cudaStream_t stream);

  // Calls bind(rank, idx) for every rank of this process, idx its place in the caller's lists, with
  // the rank's GPU current: tensor maps are encoded there, and a thread that has not called CUDA
  // yet (PyTorch's of its backward) has no context of its own.
  template <class Bind>
  void bind_ranks(const Bind& bind) const {
    for (const DeviceGroup& group : memory_.backend.groups()) {
      const DeviceGuard guard(group.device);
      for (const std::int64_t r : group.ranks) bind(r, memory_.backend.idx_here(r));
    }
  }

  // Calls prepare(group, stream) for every GPU, then launch(group, stream) for every GPU, which
  // follow each other without waiting, so the kernels find each other running. Rank 0's GPU runs on
  // the caller's stream; the others join it before and after.
  template <class Prepare, class Launch>
  void on_every_gpu(const Prepare& prepare, const Launch& launch) const;

  // One launch on one GPU. Params: ForwardParams<kMaxLocalRanks> or its like, whose beginning is
  // that of one rank.
  template <class Params, class Common, class Rank>
  void launch(const DeviceGroup& group, const Common& common, const std::vector<Rank>& ranks,
              std::uint32_t phases, cudaStream_t stream) const {
    Params params{};
    params.common = common;
    params.common.ctas_per_rank = ctas_of(group);
    params.common.phases = phases;
    for (std::size_t i = 0; i < group.ranks.size(); ++i)
      params.ranks[i] = ranks[static_cast<std::size_t>(group.ranks[i])];
    launch_kernel(group, &params, stream);
  }

  const LayerMemory& memory_;

 private:
  FusedKernel kernel_on(const DeviceGroup& group) const;
  std::int32_t size_grid(const DeviceGroup& group) const;
  void launch_kernel(const DeviceGroup& group, void* params, cudaStream_t stream) const;
  static std::int32_t event_capacity(std::int64_t num_events, std::int32_t num_ctas);
  cudaStream_t stream_of(const DeviceGroup& group) const {
    return group.stream != nullptr ? group.stream : memory_.backend.stream();
  }
  void fork_streams() const;
  void join_streams() const;

  KernelOf kernel_of_;
  std::int32_t cluster_size_;
  bool is_cooperative_;                      // asked once: no launch reads the environment
  std::vector<std::int32_t> ctas_per_rank_;  // [groups]
  TraceBuffers traces_;
};

template <class Prepare, class Launch>
void CudaPass::on_every_gpu(const Prepare& prepare, const Launch& launch) const {
  fork_streams();
  for (const DeviceGroup& group : memory_.backend.groups()) {
    const DeviceGuard guard(group.device);
    prepare(group, stream_of(group));
  }
  for (const DeviceGroup& group : memory_.backend.groups()) {
    const DeviceGuard guard(group.device);
    launch(group, stream_of(group));
  }
  join_streams();
}

}  // namespace moxie::backend_cuda
