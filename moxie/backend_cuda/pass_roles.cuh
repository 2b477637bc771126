// Roles of the warps beside the GEMM that both directions have: tickets and publishing (warp 1),
// who dispatches, merge, the end of a pass. The twins are roles_comm.h and roles_return.h.
#pragma once

#include "moxie/backend_cuda/pass_schedule.cuh"
#include "moxie/expert/grouped_gemm_cuda.cuh"
#include "moxie/merge/merge_cuda.cuh"

namespace moxie::backend_cuda {

using expert::Tile;

template <int kClusterSize>
__device__ __forceinline__ void initialise_pass_barriers(PassState& state) {
  if (threadIdx.x != 0) return;
  for (uint64_t& stored : state.tile_stored) ptx::mbarrier_init(&stored, expert::kNumConsumerWarps);
  for (uint64_t& read : state.partner_read) ptx::mbarrier_init(&read, 1);
  ptx::mbarrier_init(&state.dispatched, kMaxDispatchWarps * kClusterSize);
}

// `pieces` more of a slab are home: tiles, or combine units. One thread, which has seen their
// stores. System scope: what is handed on are stores into other GPUs' memory. The last one tells
// the peers.
__device__ __forceinline__ void count_home(const PassCommon& common, const PassRank& rank,
                                           const PassState& state, CombineMode combine,
                                           int32_t slab, uint32_t pieces) {
  const int64_t all = pipeline::num_slab_pieces(
      combine, state.table, pipeline::slab_tiles(slab, common.num_slabs, state.num_home_tiles));
  uint32_t* done = state.counters + common.counters.slab_done + slab;
  if (device::add_acq_rel_sys(done, pieces) + pieces == all)
    announce_slab(common, rank.me, state.epoch, slab);
}

// Warp 1 of the first CTA of a cluster: takes tickets and posts their tiles one ahead of the loads;
// publishes the tiles that the consumer warps have stored, so that those never execute a fence for
// other SMs. Whichever comes first.
template <int kClusterSize, class Schedule, class Publisher, class Shared>
__device__ __forceinline__ void post_and_publish(Publisher publisher, Shared& shared) {
  enum Next : int32_t { kGiveUp, kPost, kPublish };
  auto& state = shared.schedule;
  const int32_t lane_idx = threadIdx.x % 32;
  expert::RingPosition<expert::kNumTicketSlots> posted, published;
  bool has_tickets = true;
  const auto may_publish = [&] {
    // Signalled by the eight consumer warps: the oldest tile not yet published is stored.
    return published.count < posted.count &&
           ptx::mbarrier_test_wait_parity(&state.tile_stored[published.slot_idx()],
                                          published.parity());
  };
  const auto may_post = [&] {
    if (!has_tickets) return false;
    if (posted.count == 0) return true;
    // A slot is posted again only after its tile was read from it: here for publishing, and in the
    // partner.
    if (posted.count - published.count >= expert::kNumTicketSlots) return false;
    if (kClusterSize > 1 && posted.count >= expert::kNumTicketSlots &&
        !ptx::mbarrier_test_wait_parity(&state.partner_read[posted.slot_idx()],
                                        posted.parity() ^ 1)) {
      return false;
    }
    // Signalled by the loading warp: it has begun the tile posted last.
    return ptx::mbarrier_test_wait_parity(&shared.tile_begun, (posted.count - 1) & 1);
  };
  while (has_tickets || published.count < posted.count) {
    Next next = kGiveUp;
    if (lane_idx == 0) {
      device::bounded_wait(
          [&] {
            if (may_post())  // first: the loads wait for it, and publishing may take long
              next = kPost;
            else if (may_publish())
              next = kPublish;
            else
              __nanosleep(device::kPollPause_ns);
            return next != kGiveUp;
          },
          [&] { return uint64_t{posted.count}; }, state.barrier_limits,
          {expert::kWaitTileBegun, published.count, published.count + 1});
    }
    next = static_cast<Next>(__shfl_sync(~0u, static_cast<int32_t>(next), 0));
    if (next == kGiveUp) return;
    if (next == kPublish) {
      if (lane_idx == 0)
        publisher.tile_stored(shared.tickets[published.slot_idx()], published.slot_idx());
      published.advance();
      continue;
    }
    uint32_t unit = 0;
    if (lane_idx == 0) unit = device::add_relaxed_gpu(state.ticket_counter, 1);
    const Tile tile =
        Schedule::template tile_of_cta<kClusterSize>(state, __shfl_sync(~0u, unit, 0));
    if (lane_idx < kClusterSize)
      expert::post_tile<kClusterSize>(shared, posted.slot_idx(), tile, lane_idx);
    has_tickets = __shfl_sync(~0u, tile.kind, 0) != expert::kNoMoreTiles;
    if (has_tickets) posted.advance();
  }
  if (lane_idx == 0) publisher.finish();
}

// Warp 1 of the second CTA of a cluster: publishes what the first one posts.
template <class Publisher, class Shared>
__device__ __forceinline__ void publish_only(Publisher publisher, Shared& shared) {
  auto& state = shared.schedule;
  const int32_t lane_idx = threadIdx.x % 32;
  expert::RingPosition<expert::kNumTicketSlots> slot;
  Tile tile;
  while (expert::read_tile<2>(shared, slot, state.barrier_limits, tile)) {
    __syncwarp();
    bool healthy = true;
    if (lane_idx == 0) {
      device::mbarrier_arrive_cluster(device::mapa(&state.partner_read[slot.slot_idx()], 0));
      // Signalled by the eight consumer warps: the tile is stored.
      healthy = device::mbarrier_wait(&state.tile_stored[slot.slot_idx()], slot.parity(),
                                      state.barrier_limits,
                                      {expert::kWaitTicket, slot.count, slot.count + 1});
      if (healthy) publisher.tile_stored(tile, slot.slot_idx());
    }
    if (!__shfl_sync(~0u, healthy, 0)) return;
    slot.advance();
  }
  if (lane_idx == 0) publisher.finish();
}

// Fault injection: this rank comes late_ms late.
__device__ __forceinline__ void come_late(const FaultInjection& faults, RankId me) {
  if (faults.late_rank != me.v) return;
  const uint64_t begin_ns = ptx::get_sreg_globaltimer();
  while (ptx::get_sreg_globaltimer() - begin_ns < static_cast<uint64_t>(faults.late_ms) * 1000000)
    __nanosleep(1000);
}

// Who dispatches: the spare warps of every CTA, or all warps that can of a few CTAs, which join the
// multiplying ones when no rows are left. Where rows are gathered only one warp is spare.
struct DispatchTeam {
  int32_t first_cta, num_ctas, num_warps;  // per CTA, from first_warp on
  int32_t first_warp = kFirstDispatchWarp;
  __device__ __forceinline__ bool has(schedule::Cta cta) const { return cta.idx >= first_cta; }
  __device__ __forceinline__ bool has_this_warp(schedule::Cta cta) const {
    const auto warp_idx = static_cast<int32_t>(threadIdx.x / 32) - first_warp;
    return has(cta) && warp_idx >= 0 && warp_idx < num_warps;
  }
  __device__ __forceinline__ bool is_dedicated() const { return num_warps == kMaxDispatchWarps; }
  __device__ __forceinline__ int32_t warp_idx(schedule::Cta cta) const {
    return (cta.idx - first_cta) * num_warps + static_cast<int32_t>(threadIdx.x / 32) - first_warp;
  }
};
__device__ __forceinline__ DispatchTeam dispatch_team(const PassCommon& common, schedule::Cta cta) {
  if ((common.phases & kDispatchPhase) == 0) return {cta.count, 0, 0};
  if (common.phases == kDispatchPhase) return {0, cta.count, kMaxDispatchWarps};
  const int32_t dedicated = common.plan.comm_workers;
  if (dedicated == 0) {
    if (common.gathers) return {0, cta.count, 1, kFirstDispatchWarp + 1};
    return {0, cta.count, 2};
  }
  return {cta.count - dedicated, dedicated, kMaxDispatchWarps};
}

// This warp's slot of dispatch. A consumer warp dispatches before its first tile, and has its
// staging until then.
template <class Shared>
__device__ __forceinline__ dispatch::RowsSlot& rows_slot(Shared& shared) {
  const uint32_t warp_idx = threadIdx.x / 32;
  static_assert(sizeof(dispatch::RowsSlot) <= sizeof(shared.staging[0]));
  return warp_idx < 4 ? shared.schedule.rows_slots[warp_idx - kFirstDispatchWarp]
                      : *reinterpret_cast<dispatch::RowsSlot*>(shared.staging[warp_idx - 4]);
}

__device__ __forceinline__ bool overlaps(const PassCommon& common) {
  return (common.phases & kOverlapPhases) == kOverlapPhases;
}

// Consumer warps of a dedicated CTA dispatch first. Its cluster takes no tickets before all of them
// are done: a tile of its own could be what their rows wait for.
template <int kClusterSize>
__device__ __forceinline__ void say_dispatched(PassState& state) {
  if (threadIdx.x % 32 != 0) return;
  if constexpr (kClusterSize == 1) {
    ptx::mbarrier_arrive(&state.dispatched);
  } else {
    device::mbarrier_arrive_cluster(device::mapa(&state.dispatched, 0));
  }
}
// A consumer warp before its first tile, whose rows are on the way: what is left of staging, and in
// a dedicated CTA dispatch. A function of its own: inlined before the GEMM loop it costs that loop
// a register, which it does not have.
template <int kClusterSize, class Common, class Rank, class State>
__device__ __noinline__ void work_before_tiles(const Common& common, const Rank& rank, State& state,
                                               DispatchTeam team, dispatch::RowsSlot& slot) {
  if (common.phases & kStagePhase) stage_tokens(common, rank, state, StageUntil::done);
  if (!team.has(state.cta) || !team.is_dedicated()) return;
  dispatch_rows(common, rank, state, team, slot);
  say_dispatched<kClusterSize>(state);
}
// A warp of the cluster's first CTA. False: gave up.
__device__ __forceinline__ bool wait_dispatched(PassState& state) {
  // Signalled by every dispatching warp of the cluster, when it has no rows left.
  const bool healthy =
      threadIdx.x % 32 != 0 || device::mbarrier_wait(&state.dispatched, 0, state.barrier_limits,
                                                     {code(WaitFor::tasks_done), 0, 1});
  return __all_sync(~0u, healthy);
}

// Of the warps that merge the two communication warps are drawn, and one of the eight consumer
// warps for all of them.
__device__ __forceinline__ bool is_drawn_comm_warp() {
  return threadIdx.x / 32 - trace::kFirstCommLane < trace::kNumCommLanes;
}
__device__ __forceinline__ void record_merge(trace::Recorder& recorder, uint64_t begin_ns,
                                             int64_t token, int64_t slab) {
  const auto warp_idx = static_cast<int32_t>(threadIdx.x / 32);
  const bool is_comm = is_drawn_comm_warp();
  if (is_comm || warp_idx == 4) {
    recorder.add(trace::Kind::merge, begin_ns, is_comm ? warp_idx : trace::kComputeLane, token,
                 slab);
  }
}

// A warp: waits until every rank has pushed the slab, and the shared expert's output is there.
__device__ __forceinline__ bool wait_slab(const PassCommon& common, const PassRank& rank,
                                          PassState& state, int64_t slab) {
  const int32_t lane_idx = threadIdx.x % 32;
  const uint64_t begin_ns = state.recorder.now();
  bool healthy = true;
  for (int64_t i = lane_idx; healthy && i < common.problem.num_ranks; i += 32) {
    uint64_t word = 0;
    // Signalled by rank i: all its pieces of the slab lie in this heap.
    healthy = device::wait_signal(heap_at<uint64_t>(common, rank.me, common.heap.returns_done) +
                                      i * pipeline::kMaxSlabs + slab,
                                  pipeline::make_signal(state.epoch), state.signal_limits,
                                  code(WaitFor::returns_done), i, word);
  }
  const int64_t shared_tiles = state.table.shared_blocks * state.num_home_tiles;
  if (healthy && lane_idx == 0 && shared_tiles > 0) {
    // Signalled by this rank's shared FC2 (backward: dX) tiles.
    healthy = device::wait_counter(state.counters + common.counters.shared_done,
                                   static_cast<uint32_t>(shared_tiles), state.counter_limits,
                                   code(WaitFor::shared_done), 0);
  }
  if (lane_idx == 0 && is_drawn_comm_warp()) {
    state.recorder.add_wait(WaitFor::returns_done, begin_ns, state.recorder.now(),
                            static_cast<int32_t>(threadIdx.x / 32), slab);
  }
  return __all_sync(~0u, healthy);  // and what any lane acquired, to all
}

// Any warp: merges the tokens of slabs [0, end_slab), slab by slab, until none are left, and calls
// and_then(slab, tokens) after each part of a unit. Nothing in a launch without merge.
template <class AndThen>
__device__ __forceinline__ void merge_slabs(const PassCommon& common, const PassRank& rank,
                                            PassState& state, int32_t end_slab,
                                            const AndThen& and_then) {
  constexpr int64_t kParts = 4;  // of a unit of 16 tokens: the last slab must spread over all warps
  constexpr int64_t kPartTokens = pipeline::kTokenUnit / kParts;
  if ((common.phases & kMergePhase) == 0) return;
  const Problem& p = common.problem;
  const int64_t num_slabs = common.num_slabs, num_tokens = rank.num_tokens;
  const auto num_parts =
      static_cast<uint32_t>(pipeline::num_merge_units(num_tokens, end_slab) * kParts);
  const merge::Merge m{
      at<int32_t>(rank, common.workspace.ids),
      heap_at<bf16>(common, rank.me, common.heap.returns),
      p.shared.intermediate > 0 ? at<bf16>(rank, common.workspace.shared_out) : nullptr,
      rank.merged,
      p.hidden,
      static_cast<int32_t>(p.top_k)};
  int64_t slab_seen = -1;
  for (;;) {
    uint32_t part = 0;
    if (threadIdx.x % 32 == 0) {
      uint32_t* next = state.counters + common.counters.merge_unit;
      part = end_slab == num_slabs ? device::add_relaxed_gpu(next, 1)
                                   : device::claim_below(next, num_parts);
    }
    part = __shfl_sync(~0u, part, 0);
    if (part >= num_parts) return;
    const pipeline::MergeUnit unit = pipeline::merge_unit(part / kParts, num_tokens);
    if (unit.slab != slab_seen && !wait_slab(common, rank, state, unit.slab)) return;
    slab_seen = unit.slab;
    delay_of(common)();
    const uint64_t begin_ns = state.recorder.now();
    const int64_t begin = min(unit.tokens.begin + part % kParts * kPartTokens, unit.tokens.end);
    const pipeline::Range tokens{begin, min(begin + kPartTokens, unit.tokens.end)};
    const pipeline::Range tiles = pipeline::slab_tiles(unit.slab, num_slabs, state.num_home_tiles);
    merge::merge_tokens(
        m, tokens,
        {tiles.begin * pipeline::kFc2TileCols, min(tiles.end * pipeline::kFc2TileCols, p.hidden)});
    and_then(unit.slab, tokens);
    if (threadIdx.x % 32 == 0) record_merge(state.recorder, begin_ns, begin, unit.slab);
  }
}

// All threads of a CTA, when its roles have ended, also in a pass that was called off. The rank's
// last CTA of the last launch closes the pass: the next one begins at the next epoch and bank.
__device__ __forceinline__ void close_pass(const PassCommon& common, const PassRank& rank,
                                           const PassState& state) {
  if (threadIdx.x == 0 && state.recorder.on())
    rank.num_events[state.cta.idx] = state.recorder.count;
  if ((common.phases & kClosePhase) == 0) return;
  bool healthy = true;
  if (state.cta.idx == 0 && state.verdict == pipeline::Verdict::go) {
    const int64_t num_words = common.problem.num_ranks * common.num_slabs;
    for (int64_t i = threadIdx.x; healthy && i < num_words; i += blockDim.x) {
      const int64_t peer = quotient(i, common.num_slabs), slab = i - peer * common.num_slabs;
      uint64_t word = 0;
      // Signalled by every rank: it has pushed all, so it has pulled all, and reads this heap no
      // more. Until then the next pass must not stage.
      healthy = device::wait_signal(heap_at<uint64_t>(common, rank.me, common.heap.returns_done) +
                                        peer * pipeline::kMaxSlabs + slab,
                                    pipeline::make_signal(state.epoch), state.signal_limits,
                                    code(WaitFor::returns_done), peer, word);
    }
  }
  if (__syncthreads_and(healthy) == 0 || threadIdx.x != 0) return;
  const uint32_t closed = device::add_acq_rel_gpu(state.counters + common.counters.closed, 1) + 1;
  if (closed < static_cast<uint32_t>(state.cta.count)) return;
  *heap_at<uint64_t>(common, rank.me, common.heap.epoch) = state.epoch;
  *at<uint64_t>(rank, common.workspace.pass_count) = state.pass_count + 1;
}

// All threads of a CTA, before they take their roles: everything up to the schedule. `fill` is
// read_schedule()'s, `tables` schedule_pass()'s; choose_staged() is the direction's own. False: the
// pass is over for this CTA.
template <int kClusterSize, class Common, class Rank, class Shared, class Tables, class Fill>
__device__ __forceinline__ bool begin_pass(const Common& common, const Rank& rank, Shared& shared,
                                           schedule::Cta cta, const Tables& tables,
                                           const Fill& fill) {
  auto& state = shared.schedule;
  if (common.faults.kill_rank == rank.me.v)
    return false;  // fault injection: peers must find out by themselves
  come_late(common.faults, rank.me);

  initialise_pass_barriers<kClusterSize>(state);
  // And hands all of them to the cluster.
  expert::initialise_barriers<kClusterSize>(shared, common.gathers);
  if (threadIdx.x == 0) {
    open_pass(common, rank, cta, state);
    choose_staged(common, rank, state);
  }
  __syncthreads();
  int32_t* scratch = reinterpret_cast<int32_t*>(&shared);  // the stages, before anything is loaded
  if (Common::kOneLaunch || common.phases & kStagePhase) {
    clear_other_bank(common, rank, state, cta);
    if (Common::kOneLaunch || !common.keep_schedule) {
      if (!sort_routes(common, rank, state, cta, scratch)) return false;
      if (cta.idx == 0) {
        schedule_pass(common, rank, state, cta, scratch, tables);
      } else {
        stage_tokens(common, rank, state, StageUntil::scheduled);  // useful while it waits
      }
    } else if (cta.idx == 0 && threadIdx.x == 0) {
      announce_staged(common, rank.me, state.epoch);
    }
  }
  if (!read_schedule(common, rank, state, fill)) return false;
  if (state.verdict != Verdict::go) {
    close_pass(common, rank, state);
    return false;
  }
  // The scratch was written by plain stores; tensor copies write there next.
  ptx::fence_proxy_async(ptx::space_shared);
  expert::sync_cluster<kClusterSize>();  // the partner's barriers are ready, its scratch is free
  return true;
}

}  // namespace moxie::backend_cuda
