// The beginning of a pass: sort, agreement, block table by all threads of a CTA together; staging
// by whatever warps have time.
// The twin is the first half of roles_comm.h; the arithmetic is schedule_cuda.cuh's.
#pragma once

#include "moxie/backend_cuda/pass_state.cuh"

namespace moxie::backend_cuda {

using pipeline::Verdict;
using schedule::Cta;

// Which pass this is, its counters, its limits. One thread; a barrier follows.
__device__ __forceinline__ void open_pass(const PassCommon& common, const PassRank& rank, Cta cta,
                                          PassState& state) {
  state.cta = cta;
  state.epoch = *heap_at<uint64_t>(common, rank.me, common.heap.epoch) + 1;
  state.pass_count = *at<uint64_t>(rank, common.workspace.pass_count);
  const int bank = pipeline::counter_bank(state.pass_count);
  state.counters =
      at<uint32_t>(rank, common.workspace.counters) + bank * common.workspace.counter_words;
  state.words = at<PassWords>(rank, common.cuda_workspace.words) + bank;
  const auto limits = [&](uint64_t grace_ns) {
    const uint64_t limit_ns = common.timeout_ns == 0 ? 0 : common.timeout_ns + grace_ns;
    return device::WaitLimits{common.abort_flag,
                              common.expired + rank.me.v,
                              limit_ns,
                              static_cast<uint32_t>(rank.me.v),
                              static_cast<uint32_t>(state.epoch),
                              common.abort_flag + 1 + rank.me.v};
  };
  for (uint32_t& tiles : state.slab_tiles) tiles = 0;
  state.recorder = {
      rank.events == nullptr ? nullptr : rank.events + int64_t{cta.idx} * rank.event_capacity,
      rank.event_capacity, 0};
  if (state.recorder.on() && (common.phases & kStagePhase) == 0)
    state.recorder.count = rank.num_events[cta.idx];  // split mode: of the launches before
  state.num_ready = 0;
  state.signal_limits = limits(0);
  state.counter_limits = limits(kCounterGrace_ns);
  state.barrier_limits = limits(kBarrierGrace_ns);
}

// The other bank, for the next pass. Nobody touches it during this one.
__device__ __forceinline__ void clear_other_bank(const PassCommon& common, const PassRank& rank,
                                                 const PassState& state, Cta cta) {
  const int bank = pipeline::counter_bank(state.pass_count + 1);
  uint32_t* counters =
      at<uint32_t>(rank, common.workspace.counters) + bank * common.workspace.counter_words;
  for (int64_t i = cta.idx * int64_t{blockDim.x} + threadIdx.x; i < common.workspace.counter_words;
       i += int64_t{cta.count} * blockDim.x) {
    counters[i] = 0;
  }
  if (cta.idx == 0 && threadIdx.x == 0) at<PassWords>(rank, common.cuda_workspace.words)[bank] = {};
}

__device__ __forceinline__ schedule::RouteSort route_sort(const PassCommon& common,
                                                          const PassRank& rank,
                                                          const PassState& state) {
  const Problem& p = common.problem;
  return {rank.expert_ids,
          rank.id_dtype,
          rank.route_weights,
          rank.num_tokens * p.top_k,
          p.num_experts,
          at<int32_t>(rank, common.workspace.ids),
          at<int32_t>(rank, common.cuda_workspace.sort_counts),
          heap_at<int32_t>(common, rank.me, common.heap.routes_sorted),
          heap_at<float>(common, rank.me, common.heap.weights_sorted),
          heap_at<int32_t>(common, rank.me, common.heap.route_begin),
          rank.keep_ids,
          rank.keep_weights,
          &state.words->num_counted,
          &state.words->bad_route};
}

// Sorts this rank's routes into its heap. False: gave up.
__device__ __forceinline__ bool sort_routes(const PassCommon& common, const PassRank& rank,
                                            PassState& state, Cta cta, int32_t* scratch) {
  const Problem& p = common.problem;
  trace::Recorder& recorder = state.recorder;
  const uint64_t begin_ns = recorder.now();
  const schedule::RouteSort sort = route_sort(common, rank, state);
  if (cta.idx == 0 && threadIdx.x == 0) {
    *heap_at<int32_t>(common, rank.me, common.heap.num_tokens) =
        static_cast<int32_t>(rank.num_tokens);
  }
  schedule::count_routes(sort, cta, scratch);
  if (p.shared.intermediate > 0) {
    schedule::weigh_shared_rows(rank.x, rank.shared_output_gate, rank.num_tokens, p.hidden,
                                at<float>(rank, common.workspace.shared_weight), cta);
  }
  if (!schedule::place_routes(sort, cta, scratch, state.counter_limits, code(WaitFor::stage_done)))
    return false;
  delay_of(common)();
  __syncthreads();
  // This CTA's part of the routes and weights, to the rank's first CTA.
  if (threadIdx.x == 0) {
    device::add_release_gpu(&state.words->num_placed, 1);
    recorder.add(trace::Kind::stage, begin_ns, trace::kFirstCommLane, -1, -1);
  }
  return true;
}

// One thread, which has acquired all copies: peers may pull from this rank's heap.
__device__ __forceinline__ void announce_staged(const PassCommon& common, RankId me,
                                                uint64_t epoch) {
  const int64_t num_ranks = common.problem.num_ranks;
#pragma unroll 1
  for (int64_t i = 1; i < num_ranks; ++i) {
    const RankId peer{remainder(me.v + i, num_ranks)};
    device::store_release_sys(heap_at<uint64_t>(common, peer, common.heap.x_staged) + me.v,
                              pipeline::make_signal(epoch));
  }
}

__device__ __forceinline__ bool schedule_is_there(const PassCommon& common,
                                                  const PassState& state) {
  return device::load_acquire_gpu(state.counters + common.counters.schedule_ready) != 0 ||
         *static_cast<volatile uint32_t*>(common.abort_flag) != 0;
}

// A warp: copies own tokens into the heap until none are left, or until the schedule is there.
enum class StageUntil { scheduled, done };
__device__ __forceinline__ void stage_tokens(const PassCommon& common, const PassRank& rank,
                                             PassState& state, StageUntil until) {
  if (state.num_staged == 0) return;
  const int64_t hidden = common.problem.hidden, size = schedule::stage_unit_tokens(hidden);
  const auto units_each = static_cast<uint32_t>(quotient(rank.num_tokens + size - 1, size));
  const uint32_t num_units = units_each * state.num_staged;
  const int32_t lane_idx = threadIdx.x % 32;
#pragma unroll 1
  for (;;) {
    uint32_t unit = num_units;
    if (lane_idx == 0 && (until == StageUntil::done || !schedule_is_there(common, state)))
      unit = device::add_relaxed_gpu(state.counters + common.counters.stage_unit, 1);
    unit = __shfl_sync(~0u, unit, 0);
    if (unit >= num_units) return;
    delay_of(common)();
    const uint64_t begin_ns = state.recorder.now();
    const StagedTokens tokens = state.staged[unit / units_each];
    const int64_t begin = unit % units_each * size, end = min(begin + size, rank.num_tokens);
    schedule::copy_elements(tokens.from, tokens.to, begin * hidden, end * hidden);
    __syncwarp();  // the tokens, to lane 0
    if (lane_idx != 0) continue;
    const auto copied = static_cast<uint32_t>(end - begin);
    const uint32_t done =
        device::add_acq_rel_gpu(state.counters + common.counters.stage_done, copied) + copied;
    if (done == rank.num_tokens * state.num_staged) announce_staged(common, rank.me, state.epoch);
    state.recorder.add_stage(begin_ns, begin);
  }
}

// First CTA of the rank: writes `verdict` as rank me's word of `region` in every heap. The barrier
// before it hands what any thread acquired to every thread; the stores release it to the peers.
__device__ __forceinline__ void raise_everywhere(const PassCommon& common, RankId me,
                                                 const pipeline::Region& region, uint64_t epoch,
                                                 Verdict verdict) {
  for (int64_t i = threadIdx.x; i < common.problem.num_ranks; i += blockDim.x) {
    const RankId peer{remainder(me.v + i, common.problem.num_ranks)};
    device::store_release_sys(heap_at<uint64_t>(common, peer, region) + me.v,
                              pipeline::make_signal(epoch, static_cast<uint32_t>(verdict)));
  }
}

// First CTA: waits for every peer's word in the own heap. `verdict` becomes an objection if there
// is one.
__device__ __forceinline__ bool collect(const PassCommon& common, const PassRank& rank,
                                        const PassState& state, const pipeline::Region& region,
                                        WaitFor what, Verdict& verdict) {
  bool healthy = true;
  uint32_t objection = 0;
  for (int64_t i = threadIdx.x; healthy && i < common.problem.num_ranks; i += blockDim.x) {
    uint64_t word = 0;
    // Signalled by the first CTA of rank i, when it has staged (or judged).
    healthy = device::wait_signal(heap_at<uint64_t>(common, rank.me, region) + i,
                                  pipeline::make_signal(state.epoch), state.signal_limits,
                                  code(what), i, word);
    if (healthy && pipeline::payload_of(word) != 0) objection = pipeline::payload_of(word);
  }
  healthy = __syncthreads_and(healthy);
  const bool invalid_route =
      __syncthreads_or(objection == static_cast<uint32_t>(Verdict::invalid_route));
  const bool exceeded =
      __syncthreads_or(objection == static_cast<uint32_t>(Verdict::capacity_exceeded));
  if (verdict == Verdict::go && invalid_route) verdict = Verdict::invalid_route;
  if (verdict == Verdict::go && exceeded) verdict = Verdict::capacity_exceeded;
  return healthy;
}

// For the host; one thread.
__device__ __forceinline__ void report_bad_route(const PassCommon& common, const PassRank& rank,
                                                 int64_t route) {
  volatile PassReport* report = common.reports + rank.me.v;
  report->bad_route = route;
  report->bad_id = rank.id_dtype == DType::i64
                       ? static_cast<const int64_t*>(rank.expert_ids)[route]
                       : static_cast<const int32_t*>(rank.expert_ids)[route];
  report->written = static_cast<uint32_t>(Verdict::invalid_route);
}
__device__ __forceinline__ void report_capacity(const PassCommon& common, const PassRank& rank,
                                                int64_t wanted_blocks) {
  volatile PassReport* report = common.reports + rank.me.v;
  report->wanted_blocks = wanted_blocks;
  report->written = static_cast<uint32_t>(Verdict::capacity_exceeded);
}

__device__ __forceinline__ pipeline::BlockTable empty_table(const PassCommon& common,
                                                            const PassRank& rank) {
  const Problem& p = common.problem;
  pipeline::BlockTable table;
  table.num_ranks = p.num_ranks;
  table.me = rank.me;
  table.num_experts = num_local_experts(p.num_experts, p.num_ranks, rank.me);
  table.shared_rows = p.shared.intermediate > 0 ? rank.num_tokens : 0;
  table.shared_blocks = pipeline::num_blocks(table.shared_rows);
  table.row_prefix = at<int64_t>(rank, common.workspace.row_prefix);
  table.source_begin = at<int32_t>(rank, common.workspace.source_begin);
  table.expert_block = at<int32_t>(rank, common.workspace.expert_block);
  return table;
}

// First CTA: tells the peers that the routes are sorted, builds the tables, agrees on the pass and
// opens it to the rank's other CTAs. Gives up in silence where a wait did: the others' waits end
// too. `tables` builds what only its direction needs: before_blocks(scratch) is called before this
// rank may say that it is done, blocks_known(table, scratch) when its blocks are counted and fit.
template <class Tables>
__device__ __forceinline__ void schedule_pass(const PassCommon& common, const PassRank& rank,
                                              PassState& state, Cta cta, int32_t* scratch,
                                              const Tables& tables) {
  const Problem& p = common.problem;
  trace::Recorder& recorder = state.recorder;
  uint64_t begin_ns = recorder.now();
  const auto record_wait = [&](WaitFor what) {
    const uint64_t end_ns = recorder.now();
    if (threadIdx.x == 0) recorder.add_wait(what, begin_ns, end_ns, trace::kFirstCommLane, -1);
    begin_ns = end_ns;
  };
  // Signalled by every CTA of the rank: its routes are placed, its shared weights written. All of
  // them count, also those that sort nothing, so less than all would not mean the sorting ones.
  const bool sorted =
      threadIdx.x != 0 || device::wait_counter(&state.words->num_placed, cta.count,
                                               state.counter_limits, code(WaitFor::stage_done), 0);
  if (__syncthreads_and(sorted) == 0) return;
  record_wait(WaitFor::stage_done);
  const uint32_t bad_route = __ldcg(&state.words->bad_route);
  Verdict verdict = bad_route != 0 ? Verdict::invalid_route : Verdict::go;
  if (bad_route != 0 && threadIdx.x == 0)
    report_bad_route(common, rank, rank.num_tokens * p.top_k - bad_route);
  raise_everywhere(common, rank.me, common.heap.inputs_ready, state.epoch, verdict);
  if (threadIdx.x == 0 && state.num_staged == 0) announce_staged(common, rank.me, state.epoch);
  if (!collect(common, rank, state, common.heap.inputs_ready, WaitFor::inputs_ready, verdict))
    return;
  record_wait(WaitFor::inputs_ready);

  pipeline::BlockTable table = empty_table(common, rank);
  int32_t num_blocks = 0, push_blocks = 0, num_chunks = 0;
  if (verdict == Verdict::go) {
    push_blocks = tables.before_blocks(scratch);
    num_blocks = schedule::build_blocks(
        {common.heaps, common.heap.route_begin.offset,
         expert_begin(p.num_experts, p.num_ranks, rank.me), const_cast<int64_t*>(table.row_prefix),
         const_cast<int32_t*>(table.source_begin), const_cast<int32_t*>(table.expert_block)},
        table, scratch);
    const int64_t wanted = num_blocks - table.shared_blocks;
    if (wanted > common.extents.routed_blocks) {
      verdict = Verdict::capacity_exceeded;
      if (threadIdx.x == 0) report_capacity(common, rank, wanted);
    } else {
      table.num_blocks = num_blocks;
      num_chunks = tables.blocks_known(table, scratch);
    }
    if (wanted == 0 && threadIdx.x == 0) {  // no piece will ever complete a slab: say so now
      for (int64_t s = 0; s < common.num_slabs; ++s) announce_slab(common, rank.me, state.epoch, s);
    }
  }
  const bool proven = common.extents.routed_blocks >= common.proven_blocks;
  if (verdict != Verdict::go || !proven) {  // every rank comes here or none: docs/protocol.md
    raise_everywhere(common, rank.me, common.heap.agreement, state.epoch, verdict);
    if (!collect(common, rank, state, common.heap.agreement, WaitFor::agreement, verdict)) return;
  }
  if (threadIdx.x == 0) {
    *at<ScheduleResult>(rank, common.cuda_workspace.result) = {num_blocks, push_blocks, num_chunks,
                                                               static_cast<uint32_t>(verdict)};
  }
  __syncthreads();
  // Tables, verdict, and with them what the peers have sorted, to all CTAs of the rank.
  if (threadIdx.x == 0) {
    device::add_release_gpu(state.counters + common.counters.schedule_ready, 1);
    recorder.add(trace::Kind::schedule, begin_ns, trace::kFirstCommLane, -1, -1);
  }
}

// Every CTA: reads the schedule; one thread calls fill(result) for what its direction adds to the
// state. False: gave up. A barrier before anybody uses `state` again is included.
template <class Fill>
__device__ __forceinline__ bool read_schedule(const PassCommon& common, const PassRank& rank,
                                              PassState& state, const Fill& fill) {
  bool healthy = true;
  if (threadIdx.x == 0) {
    // Signalled by the rank's first CTA: the tables are built, or the pass is called off.
    const uint64_t begin_ns = state.recorder.now();
    healthy = common.keep_schedule ||
              device::wait_counter(state.counters + common.counters.schedule_ready, 1,
                                   state.counter_limits, code(WaitFor::schedule_ready), 0);
    state.recorder.add_wait(WaitFor::schedule_ready, begin_ns, state.recorder.now(),
                            trace::kFirstCommLane, -1);
    state.begin_ns = state.recorder.now();
    const ScheduleResult result = *at<ScheduleResult>(rank, common.cuda_workspace.result);
    state.verdict = static_cast<Verdict>(result.verdict);
    state.table = empty_table(common, rank);
    state.table.num_blocks = result.num_blocks;
    state.shared_blocks = static_cast<uint32_t>(state.table.shared_blocks);
    fill(result);
  }
  return __syncthreads_and(healthy);
}

}  // namespace moxie::backend_cuda
