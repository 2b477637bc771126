// Roles of the warps beside the GEMM: tickets and publishing (warp 1), dispatch, merge. The twins
// are roles_comm.h and the combine half of roles_compute.h.
#pragma once

#include "moxie/backend_cuda/forward_epilogue.cuh"
#include "moxie/backend_cuda/forward_schedule.cuh"
#include "moxie/combine/carry_cuda.cuh"
#include "moxie/merge/merge_cuda.cuh"

namespace moxie::backend_cuda {

// `pieces` more of a slab are home: tiles, or combine units. One thread, which has seen their
// stores. System scope: what is handed on are stores into other GPUs' memory. The last one tells
// the peers.
__device__ __forceinline__ void count_home(const ForwardCommon& common, const RankParams& rank,
                                           const ForwardState& state, int32_t slab,
                                           uint32_t pieces) {
  const int64_t all = pipeline::num_slab_pieces(
      common.plan.combine, state.table,
      pipeline::slab_tiles(slab, state.stream.num_slabs, state.stream.fc2_tiles));
  uint32_t* done = state.counters + common.counters.slab_done + slab;
  if (device::add_acq_rel_sys(done, pieces) + pieces == all)
    announce_slab(common, rank.me, state.epoch, slab);
}

// Counts FC2 tiles of (slab, block), where communication warps carry them home.
__device__ __forceinline__ uint32_t* y_ready(const ForwardCommon& common, const ForwardState& state,
                                             int64_t slab, BlockId b) {
  return state.counters + common.counters.y_ready + slab * common.extents.routed_blocks +
         state.table.routed_idx(b);
}

// What the ticket warp tells others about this CTA's tiles. One lane.
//
// FC1 tiles are counted at once: FC2 waits for them. FC2 tiles only complete slabs, and telling
// that takes a fence of system scope that lasts as long as the link is behind (stores to other GPUs
// must have arrived), so they are counted here and handed over when the CTA goes on to the next
// slab.
struct Publisher {
  const ForwardCommon& common;
  const RankParams& rank;
  ForwardState& state;
  int32_t slab = 0;  // slabs order: which one is being counted
  uint64_t last_end_ns = 0;

  __device__ __forceinline__ void tile_stored(const Tile& tile, uint32_t slot_idx) {
    if (tile.num_rows == 0) return;  // no task: the partner of a last tile
    if (state.recorder.on()) record(tile, slot_idx);
    delay_of(common)();
    const BlockId b = block_of(tile);
    if (is_fc1(tile)) {
      // The tile's hidden rows (tensor copies of eight lanes, all complete), to FC2. Its reads of
      // the x slot, to whoever writes there next: a peer, if the plan pushes and the slot is needed
      // again.
      uint32_t* done = state.counters + common.counters.fc1_done + b.v;
      if (common.plan.dispatch == DispatchMode::push &&
          common.plan.x_ring_blocks < state.stream.routed_blocks)
        device::add_release_sys(done, 1);
      else
        device::add_release_gpu(done, 1);
    } else if (tile.product == kSharedFc2) {
      device::add_release_gpu(state.counters + common.counters.shared_done, 1);
    } else {
      const auto now = static_cast<int32_t>(
          pipeline::slab_of_tile(tile.n_tile, state.stream.num_slabs, state.stream.fc2_tiles));
      if (common.plan.combine == CombineMode::comm_workers) {
        // The tile's rows of y (tensor copies of eight lanes, all complete), to who carries them.
        device::add_release_gpu(y_ready(common, state, now, b), 1);
      } else {
        if (common.plan.order == TaskOrder::slabs && now != slab) hand_over(slab);
        slab = now;
        ++state.slab_tiles[now];
      }
      if (common.plan.hidden_ring_blocks < state.stream.routed_blocks) {
        // The tile's reads of the hidden slot, to FC1 tiles that will write there.
        device::add_release_gpu(state.counters + common.counters.fc2_done + b.v, 1);
      }
    }
  }

  // No more tiles.
  __device__ __forceinline__ void finish() {
    for (int32_t s = 0; s < state.stream.num_slabs; ++s) hand_over(s);
  }

 private:
  // The tensor cores' timeline. A tile begins when its first K block can be loaded and the one
  // before it is stored (a part of that happens beside this tile's first products).
  __device__ __forceinline__ void record(const Tile& tile, uint32_t slot_idx) {
    const uint64_t ready_ns = state.ready_ns[slot_idx], now = state.recorder.now();
    if (last_end_ns == 0) last_end_ns = min(state.begin_ns, ready_ns);
    const uint64_t begin_ns = max(ready_ns, last_end_ns);
    const BlockId b = block_of(tile);
    state.recorder.add_wait(is_fc1(tile) ? WaitFor::x_ready : WaitFor::fc1_done, last_end_ns,
                            begin_ns, trace::kComputeLane, b.v);
    state.recorder.put(is_fc1(tile) ? trace::Kind::fc1 : trace::Kind::fc2, WaitFor{}, begin_ns, now,
                       trace::kComputeLane, b.v, tile.n_tile, is_shared(tile));
    last_end_ns = now;
  }

  __device__ __forceinline__ void hand_over(int32_t s) {
    const uint32_t tiles = state.slab_tiles[s];
    if (tiles == 0) return;
    state.slab_tiles[s] = 0;
    count_home(common, rank, state, s, tiles);
  }
};

// Warp 1 of the first CTA of a cluster: takes tickets and posts their tiles one ahead of the loads;
// publishes the tiles that the consumer warps have stored, so that those never execute a fence for
// other SMs. Whichever comes first.
template <int kClusterSize, class Shared>
__device__ __forceinline__ void post_and_publish(const ForwardCommon& common,
                                                 const RankParams& rank, Shared& shared) {
  enum Next : int32_t { kGiveUp, kPost, kPublish };
  ForwardState& state = shared.schedule;
  const int32_t lane_idx = threadIdx.x % 32;
  expert::RingPosition<expert::kNumTicketSlots> posted, published;
  bool has_tickets = true;
  Publisher publisher{common, rank, state};
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
    const Tile tile = ForwardSchedule::tile_of_cta<kClusterSize>(state, __shfl_sync(~0u, unit, 0));
    if (lane_idx < kClusterSize)
      expert::post_tile<kClusterSize>(shared, posted.slot_idx(), tile, lane_idx);
    has_tickets = __shfl_sync(~0u, tile.kind, 0) != expert::kNoMoreTiles;
    if (has_tickets) posted.advance();
  }
  if (lane_idx == 0) publisher.finish();
}

// Warp 1 of the second CTA of a cluster: publishes what the first one posts.
template <class Shared>
__device__ __forceinline__ void publish_only(const ForwardCommon& common, const RankParams& rank,
                                             Shared& shared) {
  ForwardState& state = shared.schedule;
  const int32_t lane_idx = threadIdx.x % 32;
  Publisher publisher{common, rank, state};
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

// Who dispatches: the spare warps of every CTA, or all warps that can of a few CTAs, which join the
// multiplying ones when no rows are left.
struct DispatchTeam {
  int32_t first_cta, num_ctas, num_warps;  // per CTA, from kFirstDispatchWarp on
  __device__ __forceinline__ bool has(schedule::Cta cta) const { return cta.idx >= first_cta; }
  __device__ __forceinline__ bool is_dedicated() const { return num_warps == kMaxDispatchWarps; }
  __device__ __forceinline__ int32_t warp_idx(schedule::Cta cta) const {
    return (cta.idx - first_cta) * num_warps + static_cast<int32_t>(threadIdx.x / 32) -
           kFirstDispatchWarp;
  }
};
__device__ __forceinline__ DispatchTeam dispatch_team(const ForwardCommon& common,
                                                      schedule::Cta cta) {
  if ((common.phases & kDispatchPhase) == 0) return {cta.count, 0, 0};
  if (common.phases == kDispatchPhase) return {0, cta.count, kMaxDispatchWarps};
  const int32_t dedicated = common.plan.comm_workers;
  if (dedicated == 0) return {0, cta.count, 2};
  return {cta.count - dedicated, dedicated, kMaxDispatchWarps};
}

__device__ __forceinline__ bool overlaps(const ForwardCommon& common) {
  return (common.phases & kOverlapPhases) == kOverlapPhases;
}

// A dedicated CTA also combines, and never multiplies.
__device__ __forceinline__ bool stays_with_rows(const ForwardCommon& common) {
  return common.plan.combine == CombineMode::comm_workers && overlaps(common);
}

// Who combines, if communication warps do: who dispatches. In split mode the spare warps, beside
// FC2.
__device__ __forceinline__ DispatchTeam combine_team(const ForwardCommon& common,
                                                     schedule::Cta cta) {
  if (common.plan.combine != CombineMode::comm_workers || (common.phases & kFc2Phase) == 0)
    return {cta.count, 0, 0};
  if (overlaps(common)) return dispatch_team(common, cta);
  return {0, cta.count, 2};
}

// A warp of the team. The rows of the first blocks come before what is left of staging, which no
// row of this rank waits for.
__device__ __forceinline__ void dispatch_rows(const ForwardCommon& common, const RankParams& rank,
                                              ForwardState& state, const DispatchTeam& team) {
  const int32_t warp_idx = threadIdx.x / 32 - kFirstDispatchWarp;
  const auto delay = [&] { delay_of(common)(); };
  const auto limits = [&](WaitFor what_slot) {
    return dispatch::MoveLimits{state.signal_limits, state.counter_limits, code(WaitFor::x_staged),
                                code(what_slot)};
  };
  const int32_t first = team.warp_idx(state.cta), num_warps = team.num_ctas * team.num_warps;
  if (common.plan.dispatch == DispatchMode::push) {
    dispatch::push_rows(state.push, state.rows_slots[warp_idx], state.recorder, first, num_warps,
                        limits(WaitFor::peer_slot_free), delay);
  } else {
    dispatch::pull_rows(state.pull, state.rows_slots[warp_idx], state.recorder, first, num_warps,
                        limits(WaitFor::x_slot_free), delay,
                        [&] { stage_tokens(common, rank, state, StageUntil::done); });
  }
}

// Consumer warps of a dedicated CTA dispatch first. Its cluster takes no tickets before all of them
// are done: a tile of its own could be what their rows wait for.
template <int kClusterSize>
__device__ __forceinline__ void say_dispatched(ForwardState& state) {
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
template <int kClusterSize>
__device__ __noinline__ void work_before_tiles(const ForwardCommon& common, const RankParams& rank,
                                               ForwardState& state, DispatchTeam team) {
  if (common.phases & kStagePhase) stage_tokens(common, rank, state, StageUntil::done);
  if (!team.has(state.cta) || !team.is_dedicated()) return;
  dispatch_rows(common, rank, state, team);
  say_dispatched<kClusterSize>(state);
}
// A warp of the cluster's first CTA. False: gave up.
__device__ __forceinline__ bool wait_dispatched(ForwardState& state) {
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
__device__ __forceinline__ bool wait_slab(const ForwardCommon& common, const RankParams& rank,
                                          ForwardState& state, int64_t slab) {
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
  const int64_t shared_tiles = state.table.shared_blocks * state.stream.fc2_tiles;
  if (healthy && lane_idx == 0 && shared_tiles > 0) {
    // Signalled by this rank's shared FC2 tiles.
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

// A warp of the combining team: carries every W-th unit of a slab home (W warps of the rank), as
// FC2 stores them. False: gave up.
__device__ __forceinline__ bool carry_slab(const ForwardCommon& common, const RankParams& rank,
                                           ForwardState& state, int32_t slab) {
  const pipeline::BlockTable& table = state.table;
  const pipeline::Range tiles =
      pipeline::slab_tiles(slab, state.stream.num_slabs, state.stream.fc2_tiles);
  const pipeline::Range cols{tiles.begin * pipeline::kFc2TileCols,
                             min(tiles.end * pipeline::kFc2TileCols, common.problem.hidden)};
  const combine::Carry c{common.heaps, common.heap.returns.offset,
                         at<pipeline::RowOrigin>(rank, common.workspace.origins),
                         at<bf16>(rank, common.workspace.y), common.problem.hidden};
  const int32_t lane_idx = threadIdx.x % 32;
  const DispatchTeam team = combine_team(common, state.cta);
  const auto num_units = static_cast<int32_t>(pipeline::num_dispatch_units(table)),
             num_warps = team.num_ctas * team.num_warps;
  uint32_t carried = 0;
#pragma unroll 1
  for (int32_t unit = team.warp_idx(state.cta); unit < num_units; unit += num_warps, ++carried) {
    const BlockId b = pipeline::dispatch_block(table, unit);
    const LocalExpertId expert{device::warp_last_not_above(
        table.expert_block, static_cast<int32_t>(table.num_experts), b.v)};
    const pipeline::Range rows = pipeline::dispatch_unit(table, unit, table.rows(b, expert)).rows;
    if (rows.size() == 0) continue;
    const uint64_t begin_ns = state.recorder.now();
    // Signalled by FC2: all tiles of the slab's columns of this block are stored.
    const bool healthy =
        lane_idx != 0 ||
        device::wait_counter(y_ready(common, state, slab, b), static_cast<uint32_t>(tiles.size()),
                             state.counter_limits, code(WaitFor::y_ready), b.v);
    if (!__all_sync(~0u, healthy)) return false;
    __syncwarp();  // what lane 0 acquired, to all
    delay_of(common)();
    combine::carry_rows(c, table.routed_idx(b) * pipeline::kBlockRows + rows.begin,
                        static_cast<int32_t>(rows.size()), cols);
    if (lane_idx == 0 && is_drawn_comm_warp())
      state.recorder.add(trace::Kind::combine, begin_ns, static_cast<int32_t>(threadIdx.x / 32),
                         b.v, slab);
  }
  __syncwarp();  // all lanes' stores, to lane 0
  if (lane_idx == 0 && carried > 0) count_home(common, rank, state, slab, carried);
  return true;
}

// Any warp: merges the tokens of slabs [0, end_slab), slab by slab, until none are left. Nothing in
// a launch without merge.
__device__ __forceinline__ void merge_slabs(const ForwardCommon& common, const RankParams& rank,
                                            ForwardState& state, int32_t end_slab) {
  constexpr int64_t kParts = 4;  // of a unit of 16 tokens: the last slab must spread over all warps
  constexpr int64_t kPartTokens = pipeline::kTokenUnit / kParts;
  if ((common.phases & kMergePhase) == 0) return;
  const Problem& p = common.problem;
  const int64_t num_slabs = common.plan.num_slabs, num_tokens = rank.num_tokens;
  const auto num_parts =
      static_cast<uint32_t>(pipeline::num_merge_units(num_tokens, end_slab) * kParts);
  const merge::Merge m{
      at<int32_t>(rank, common.workspace.ids),
      heap_at<bf16>(common, rank.me, common.heap.returns),
      p.shared.intermediate > 0 ? at<bf16>(rank, common.workspace.shared_out) : nullptr,
      rank.y,
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
    const pipeline::Range tiles =
        pipeline::slab_tiles(unit.slab, num_slabs, state.stream.fc2_tiles);
    merge::merge_tokens(
        m, {begin, min(begin + kPartTokens, unit.tokens.end)},
        {tiles.begin * pipeline::kFc2TileCols, min(tiles.end * pipeline::kFc2TileCols, p.hidden)});
    if (threadIdx.x % 32 == 0) record_merge(state.recorder, begin_ns, begin, unit.slab);
  }
}

// Any warp, when its rows or tiles are out. A slab is carried home before the one before it is
// merged: the merge waits for peers, and they may wait for what this rank carries.
__device__ __forceinline__ void return_rows(const ForwardCommon& common, const RankParams& rank,
                                            ForwardState& state) {
  const DispatchTeam team = combine_team(common, state.cta);
  const auto warp_idx = static_cast<int32_t>(threadIdx.x / 32) - kFirstDispatchWarp;
  const bool carries = team.has(state.cta) && warp_idx >= 0 && warp_idx < team.num_warps;
#pragma unroll 1
  for (int32_t slab = carries ? 0 : common.plan.num_slabs; slab <= common.plan.num_slabs; ++slab) {
    if (slab < common.plan.num_slabs && !carry_slab(common, rank, state, slab)) return;
    merge_slabs(common, rank, state, slab);
  }
}

// All threads of a CTA, when its roles have ended, also in a pass that was called off. The rank's
// last CTA of the last launch closes the pass: the next one begins at the next epoch and bank.
__device__ __forceinline__ void close_pass(const ForwardCommon& common, const RankParams& rank,
                                           const ForwardState& state) {
  if (threadIdx.x == 0 && state.recorder.on())
    rank.num_events[state.cta.idx] = state.recorder.count;
  if ((common.phases & kClosePhase) == 0) return;
  bool healthy = true;
  if (state.cta.idx == 0 && state.verdict == pipeline::Verdict::go) {
    const int64_t num_words = common.problem.num_ranks * common.plan.num_slabs;
    for (int64_t i = threadIdx.x; healthy && i < num_words; i += blockDim.x) {
      const int64_t peer = i / common.plan.num_slabs, slab = i % common.plan.num_slabs;
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

}  // namespace moxie::backend_cuda
