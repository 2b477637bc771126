// What the backward adds to the beginning of a pass (pass_schedule.cuh): what is staged, the chunks
// of its stream, its state. The chunks' twin is build_chunks() in pipeline/tables.h.
#pragma once

#include "moxie/backend_cuda/backward_state.cuh"
#include "moxie/backend_cuda/pass_schedule.cuh"
#include "moxie/pipeline/pairs.h"

namespace moxie::backend_cuda {

// One thread. Peers pull dY, and x where the context does not keep it.
__device__ __forceinline__ void choose_staged(const BackwardCommon& common,
                                              const BackwardRank& rank, BackwardState& state) {
  state.num_staged = 0;
  if (common.problem.num_ranks == 1 || rank.num_tokens == 0) return;
  state.staged[state.num_staged++] = {rank.dy, heap_at<bf16>(common, rank.me, common.heap.dy_in)};
  bf16* x_in = heap_at<bf16>(common, rank.me, common.heap.x_in);
  if (common.pulls_x && rank.x != x_in) state.staged[state.num_staged++] = {rank.x, x_in};
}

__device__ __forceinline__ pipeline::ChunkTable chunk_table(const BackwardCommon& common,
                                                            const BackwardRank& rank,
                                                            int64_t num_chunks) {
  return {num_chunks, at<int32_t>(rank, common.workspace.chunk_block),
          at<int32_t>(rank, common.workspace.chunk_expert),
          at<int32_t>(rank, common.workspace.chunk_after),
          at<int64_t>(rank, common.workspace.step_ticket)};
}

// One warp: begin[s] = sum of count(0 .. s - 1), for s up to num_steps.
template <class Count>
__device__ __forceinline__ void number_steps(int64_t* begin, int64_t num_steps,
                                             const Count& count) {
  const int32_t lane_idx = threadIdx.x % 32;
  int64_t total = 0;
#pragma unroll 1
  for (int64_t base = 0; base <= num_steps; base += 32) {
    const int64_t s = base + lane_idx;
    const int64_t own = s < num_steps ? count(s) : 0;
    int64_t sum = own;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int64_t lower = __shfl_up_sync(~0u, sum, step);
      if (lane_idx >= step) sum += lower;
    }
    if (s <= num_steps) begin[s] = total + sum - own;
    total += __shfl_sync(~0u, sum, 31);
  }
}

struct BackwardTables {
  const BackwardCommon& common;
  const BackwardRank& rank;

  __device__ __forceinline__ int32_t before_blocks(int32_t*) const { return 0; }

  // All threads of the CTA: cuts every expert (the shared one first) into chunks and numbers the
  // steps. `scratch` holds num_experts + 1 words. Returns the number of chunks.
  __device__ __forceinline__ int32_t blocks_known(const pipeline::BlockTable& table,
                                                  int32_t* scratch) const {
    __syncthreads();  // expert_block, to all threads
    const bool has_shared = common.problem.shared.intermediate > 0;
    const auto num_entries = static_cast<int32_t>(table.num_experts) + has_shared;
    const int64_t most = common.plan.chunk_blocks;
    // Entry j: the shared expert, or a local one.
    const auto expert_of = [&](int32_t j) { return j - has_shared; };
    const auto blocks_of = [&](int32_t j) {
      return expert_of(j) < 0 ? pipeline::Range{0, table.shared_blocks}
                              : pipeline::Range{table.expert_block[expert_of(j)],
                                                table.expert_block[expert_of(j) + 1]};
    };
    const auto chunks_of = [&](int32_t j) {
      return static_cast<int32_t>(max(int64_t{1}, ceil_div(blocks_of(j).size(), most)));
    };
    for (int32_t j = threadIdx.x; j < num_entries; j += blockDim.x) scratch[j] = chunks_of(j);
    __syncthreads();
    if (threadIdx.x < 32) {
      const int32_t total = schedule::exclusive_scan(scratch, num_entries);
      if (threadIdx.x == 0) scratch[num_entries] = total;
    }
    __syncthreads();
    const int32_t num_chunks = scratch[num_entries];
    const pipeline::ChunkTable chunks = chunk_table(common, rank, num_chunks);
    auto* chunk_block = const_cast<int32_t*>(chunks.chunk_block);
    auto* chunk_expert = const_cast<int32_t*>(chunks.chunk_expert);
    auto* chunk_after = const_cast<int32_t*>(chunks.chunk_after);
    for (int32_t j = threadIdx.x; j < num_entries; j += blockDim.x) {
      const int32_t first = scratch[j], end = scratch[j + 1];
      // Experts of several chunks share the partial sums: one after the other.
      int32_t before = -1;
      for (int32_t k = j - 1; end - first > 1 && before < 0 && k >= 0; --k) {
        if (scratch[k + 1] - scratch[k] > 1) before = scratch[k + 1] - 1;
      }
      for (int32_t c = first; c < end; ++c) {
        chunk_block[c] = static_cast<int32_t>(blocks_of(j).begin + (c - first) * most);
        chunk_expert[c] = expert_of(j) < 0 ? pipeline::kSharedExpert : expert_of(j);
        chunk_after[c] = end - first == 1 ? -1 : c == first ? before : c - 1;
      }
    }
    if (threadIdx.x == 0) chunk_block[num_chunks] = static_cast<int32_t>(table.num_blocks);
    __syncthreads();
    const pipeline::BackwardStream s =
        pipeline::backward_stream(common.problem, common.plan, chunks, table.shared_blocks,
                                  table.num_blocks, pipeline::kGpuBackwardTiling);
    if (threadIdx.x < 32) {
      number_steps(const_cast<int64_t*>(chunks.step_ticket), s.num_steps(),
                   [&](int64_t step) { return s.step_tickets(step); });
    } else if (threadIdx.x < 64) {
      const pipeline::BackwardPairs pairs{s, nullptr};
      number_steps(at<int64_t>(rank, common.cuda_workspace.step_pair), s.num_steps(),
                   [&](int64_t step) { return pairs.step_pairs(step); });
    }
    return num_chunks;
  }
};

__device__ __forceinline__ VectorUnits vector_units(const BackwardCommon& common,
                                                    const pipeline::BlockTable& table) {
  const Problem& p = common.problem;
  const auto strips = [](int64_t columns) { return static_cast<int32_t>(ceil_div(columns, 256)); };
  VectorUnits v{};
  if (p.shared.intermediate > 0) {
    v.shared_chunks = static_cast<int32_t>(
        max(int64_t{1}, ceil_div(table.shared_blocks, int64_t{common.plan.chunk_blocks})));
    v.per_shared_chunk = p.shared.output_gate ? strips(p.hidden) : 0;
  }
  v.gate_strips = strips(p.intermediate);
  v.per_chunk = p.expert_bias ? 2 * v.gate_strips + strips(p.hidden) : 0;
  return v;
}

// One thread.
template <int kClusterSize>
__device__ __forceinline__ void fill_state(const BackwardCommon& common, const BackwardRank& rank,
                                           BackwardState& state, const ScheduleResult& result) {
  const Problem& p = common.problem;
  state.stream = pipeline::backward_stream(
      p, common.plan, chunk_table(common, rank, result.num_chunks), state.table.shared_blocks,
      state.table.num_blocks, pipeline::kGpuBackwardTiling);
  state.step_begin = kClusterSize == 1 ? state.stream.chunks.step_ticket
                                       : at<int64_t>(rank, common.cuda_workspace.step_pair);
  state.num_units = state.verdict == pipeline::Verdict::go
                        ? static_cast<uint32_t>(state.step_begin[state.stream.num_steps()])
                        : 0;
  state.ticket_counter = state.counters + common.counters.ticket;
  state.num_home_tiles = static_cast<int32_t>(state.stream.dx_tiles);
  state.ring_blocks = static_cast<int32_t>(common.plan.backward_ring_blocks);
  state.ready_chunk = -1;
  state.skips_empty = common.accumulate;
  state.counts_trail = state.ring_blocks < state.table.num_blocks ||
                       common.cuda_workspace.partial_tiles.num_bytes > 0;
  state.vectors = vector_units(common, state.table);
  static_cast<dispatch::Pull&>(state.pull) = {
      common.heaps,
      &common.heap,
      common.heap.dy_in.offset,
      &state.table,
      at<pipeline::RowOrigin>(rank, common.workspace.origins),
      at<bf16>(rank, common.workspace.dy_ring),
      rank.dy,
      heap_at<uint64_t>(common, rank.me, common.heap.x_staged),
      pipeline::make_signal(state.epoch),
      common.pulls_once ? at<uint64_t>(rank, common.cuda_workspace.pulled) : nullptr,
      p.max_tokens,
      static_cast<uint32_t>(state.epoch),
      nullptr,
      common.saved_blocks,
      common.plan.backward_ring_blocks,
      common.plan.minibatch_blocks,
      0,
      p.hidden,
      p.top_k,
      state.counters + common.counters.x_ready,
      nullptr,
      nullptr};
  state.pull.forward_x = rank.x;
  state.pull.x_back = common.pulls_x ? at<bf16>(rank, common.workspace.xb_ring) : nullptr;
  state.pull.saved_x = rank.saved_x;
  state.pull.down_bias = rank.down_bias;
  state.pull.dy_bias = at<float>(rank, common.cuda_workspace.dy_bias);
}

}  // namespace moxie::backend_cuda
