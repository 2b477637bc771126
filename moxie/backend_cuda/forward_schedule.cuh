// What the forward adds to the beginning of a pass (pass_schedule.cuh): what is staged, the tables
// of push dispatch, which tickets a launch takes.
#pragma once

#include "moxie/backend_cuda/forward_state.cuh"
#include "moxie/backend_cuda/pass_schedule.cuh"
#include "moxie/schedule/push_cuda.cuh"

namespace moxie::backend_cuda {

// One thread. Peers pull from the heap; own rows are read where the caller keeps them, also to push
// them.
__device__ __forceinline__ void choose_staged(const ForwardCommon& common, const ForwardRank& rank,
                                              ForwardState& state) {
  bf16* x_in = heap_at<bf16>(common, rank.me, common.heap.x_in);
  state.num_staged = !common.keep_schedule && common.plan.dispatch == DispatchMode::pull &&
                     common.problem.num_ranks > 1 && rank.num_tokens > 0 && rank.x != x_in;
  state.staged[0] = {rank.x, x_in};
}

__device__ __forceinline__ pipeline::PushTable empty_push_table(const ForwardCommon& common,
                                                                const ForwardRank& rank) {
  pipeline::PushTable table;
  table.num_ranks = common.problem.num_ranks;
  table.me = rank.me;
  table.num_experts = common.problem.num_experts;
  table.route_begin = heap_at<int32_t>(common, rank.me, common.heap.route_begin);
  table.first_row = at<int32_t>(rank, common.workspace.push_first_row);
  table.expert_block = at<int32_t>(rank, common.workspace.push_expert_block);
  table.shared_blocks = at<int32_t>(rank, common.workspace.push_shared_blocks);
  table.unit_begin = at<int32_t>(rank, common.workspace.push_unit_begin);
  return table;
}

// First CTA; to be read before this rank may announce that it is done: then peers may go on.
__device__ __forceinline__ int32_t build_push(const ForwardCommon& common, const ForwardRank& rank,
                                              int32_t* scratch) {
  if (common.plan.dispatch != DispatchMode::push) return 0;
  const pipeline::PushTable table = empty_push_table(common, rank);
  return schedule::build_push(
      {common.heaps, common.heap.route_begin.offset, common.heap.num_tokens.offset,
       common.problem.shared.intermediate > 0, common.extents.routed_blocks,
       const_cast<int32_t*>(table.first_row), const_cast<int32_t*>(table.expert_block),
       const_cast<int32_t*>(table.shared_blocks), const_cast<int32_t*>(table.unit_begin)},
      table, scratch);
}

struct ForwardTables {
  const ForwardCommon& common;
  const ForwardRank& rank;
  __device__ __forceinline__ int32_t before_blocks(int32_t* scratch) const {
    return build_push(common, rank, scratch);
  }
  __device__ __forceinline__ int32_t blocks_known(const pipeline::BlockTable&, int32_t*) const {
    return 0;
  }
};

// Which tickets this launch takes: all, or in split mode those of its phase.
__device__ __forceinline__ void choose_tickets(const ForwardCommon& common, ForwardState& state) {
  const pipeline::ForwardStream& s = state.stream;
  const bool fc1 = common.phases & kFc1Phase, fc2 = common.phases & kFc2Phase;
  state.first_ticket = fc1 ? 0 : s.fc1_end();
  state.num_tickets = fc2 ? s.num_tickets() : fc1 ? s.fc1_end() : state.first_ticket;
  // A launch leaves its counter behind its last ticket.
  state.ticket_counter =
      state.counters + (fc1 ? common.counters.ticket
                            : common.counters.phase + __ffs(static_cast<int>(common.phases)) - 1);
}

// One thread: what the pushing warps read.
__device__ __forceinline__ void prepare_push(const ForwardCommon& common, const ForwardRank& rank,
                                             ForwardState& state, const ScheduleResult& result) {
  state.push_table = empty_push_table(common, rank);
  state.push_table.num_blocks = result.push_blocks;
  // All ranks run the same passes of a layer: the peers' bank is the own one.
  const int64_t bank = reinterpret_cast<const std::byte*>(state.counters) - rank.workspace;
  state.push = {common.workspaces,
                common.keep_x,
                &common.workspace,
                &state.push_table,
                heap_at<int32_t>(common, rank.me, common.heap.routes_sorted),
                heap_at<float>(common, rank.me, common.heap.weights_sorted),
                rank.x,
                bank,
                common.counters.x_ready,
                common.counters.fc1_done,
                common.saved_blocks,
                common.plan.x_ring_blocks,
                common.plan.minibatch_blocks,
                state.stream.fc1_tiles,
                common.problem.hidden,
                common.problem.top_k};
}

// One thread.
__device__ __forceinline__ void fill_state(const ForwardCommon& common, const ForwardRank& rank,
                                           ForwardState& state, const ScheduleResult& result) {
  state.stream = pipeline::forward_stream(common.problem, common.plan, state.table);
  choose_tickets(common, state);
  state.pull = {common.heaps,
                &common.heap,
                common.heap.x_in.offset,
                &state.table,
                at<pipeline::RowOrigin>(rank, common.workspace.origins),
                at<bf16>(rank, common.workspace.x_ring),
                rank.x,
                heap_at<uint64_t>(common, rank.me, common.heap.x_staged),
                pipeline::make_signal(state.epoch),
                common.pulls_once ? at<uint64_t>(rank, common.cuda_workspace.pulled) : nullptr,
                common.problem.max_tokens,
                static_cast<uint32_t>(state.epoch),
                common.keep_x[rank.me.v],
                common.saved_blocks,
                common.plan.x_ring_blocks,
                common.plan.minibatch_blocks,
                state.stream.fc1_tiles,
                common.problem.hidden,
                common.problem.top_k,
                state.counters + common.counters.x_ready,
                state.counters + common.counters.fc1_done,
                common.gathers ? at<uint64_t>(rank, common.cuda_workspace.row_places) : nullptr};
  if (common.plan.dispatch == DispatchMode::push) prepare_push(common, rank, state, result);
  state.num_home_tiles = static_cast<int32_t>(state.stream.fc2_tiles);
  state.hidden_ring_blocks = static_cast<uint32_t>(common.plan.hidden_ring_blocks);
}

}  // namespace moxie::backend_cuda
