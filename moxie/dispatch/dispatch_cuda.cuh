// Dispatch on the GPU: a warp pulls rows of x from their home ranks into ring slots; push_cuda.cuh
// uses the same loop.
// Contract: dispatch.h; plain body: dispatch_ref.h.
//
// Every warp takes every W-th quarter of a dispatch unit (W warps of the rank), so the first blocks
// are whole after one quarter each. Lane i looks up the origin of row i of the *next* quarter
// before the warp copies this one: three dependent loads, one of them across the link, hide behind
// the copy. Rows move as 16-byte loads and stores, twelve of them per lane: bytes in flight
// decide the speed (12 x 512 bytes per warp).
#pragma once

#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include "moxie/core/dtype.h"
#include "moxie/device/signal.cuh"
#include "moxie/device/warp_search.cuh"
#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tasks.h"

namespace moxie::dispatch {

inline constexpr int64_t kQuarters = 4;  // of a unit of 16 rows
inline constexpr int64_t kQuarterRows = pipeline::kDispatchUnitRows / kQuarters;
inline constexpr int kChunksPerRow = 3;  // in flight per lane and row: 12 together, 16 would spill

struct Pull {
  std::byte* const* heaps;  // [R]
  const pipeline::HeapLayout* heap;
  int64_t tokens_offset;  // in every heap: x_in; backward: dy_in
  const pipeline::BlockTable* table;
  pipeline::RowOrigin* origins;  // [routed_blocks * 128]
  bf16* x_ring;                  // [x_ring_blocks * 128, H]
  const bf16* own_x;             // [T, H] where the caller keeps it
  const uint64_t* x_staged;      // [R] when the heap of another rank can be read: this word or more
  uint64_t staged_word;
  // [R, T_max] (epoch, row of the ring) of a token of another rank that lies here already: it
  // crosses the link once, the rows for other experts are copied from there; only rows in slots
  // that nobody held before. An older pass's word says nothing. Null: each row is pulled.
  uint64_t* pulled;
  int64_t max_tokens;
  uint32_t epoch;
  bf16* keep_x;  // [saved_blocks * 128, H] context, or null
  int64_t saved_blocks, x_ring_blocks, minibatch_blocks, fc1_tiles, hidden, top_k;
  uint32_t* x_ready;         // [groups]
  const uint32_t* fc1_done;  // [blocks]
  // [routed_blocks * 128] or null. (epoch, place) of each row: in 16-byte chunks from own_x, or
  // with kInRing from x_ring. Then only rows that were not pulled yet are copied, no slot is used
  // again.
  uint64_t* places;
  static constexpr uint32_t kInRing = 1u << 31;

  __device__ __forceinline__ int32_t num_quarters() const {
    return static_cast<int32_t>(pipeline::num_dispatch_units(*table) * kQuarters);
  }
};

// How long the role waits, and what its records say.
struct MoveLimits {
  const device::WaitLimits &signal, &counter;
  uint32_t what_staged, what_slot;
};

// Rows [begin, begin + num_rows) of a block and their origins; in shared memory, one per warp. Push
// has one rank: the destination.
struct RowsSlot {
  int32_t stride;  // quarters from one of the warp's to the next: in a register it would be spilled
  int32_t block, begin, num_rows;
  int32_t rank[kQuarterRows], route[kQuarterRows];
  float weight[kQuarterRows];
};

// Starts the look-up of a quarter's origins into `next`: complete after __pipeline_wait_prior(0).
// The copies across the link go to shared memory by themselves, so that registers are left for
// rows.
__device__ __forceinline__ void look_up(const Pull& p, int32_t quarter, int32_t num_quarters,
                                        int32_t lane_idx, RowsSlot& next) {
  if (quarter >= num_quarters) return;
  const BlockId block = pipeline::dispatch_block(*p.table, quarter / kQuarters);
  const LocalExpertId expert{device::warp_last_not_above(
      p.table->expert_block, static_cast<int32_t>(p.table->num_experts), block.v)};
  const pipeline::Range rows =
      pipeline::dispatch_unit(*p.table, quarter / kQuarters, p.table->rows(block, expert)).rows;
  const int64_t begin = min(rows.begin + quarter % kQuarters * kQuarterRows, rows.end);
  const int32_t num_rows = static_cast<int32_t>(min(kQuarterRows, rows.end - begin));
  if (lane_idx == 0) {
    next.block = block.v;
    next.begin = static_cast<int32_t>(begin);
    next.num_rows = num_rows;
  }
  if (lane_idx >= num_rows) return;
  const int64_t first = (block.v - p.table->expert_block[expert.v]) * pipeline::kBlockRows;
  const pipeline::RowSource source = p.table->source(expert, first + begin + lane_idx);
  const std::byte* peer = p.heaps[source.rank.v];
  next.rank[lane_idx] = source.rank.v;
  __pipeline_memcpy_async(
      &next.route[lane_idx],
      reinterpret_cast<const int32_t*>(peer + p.heap->routes_sorted.offset) + source.sorted_idx, 4);
  __pipeline_memcpy_async(
      &next.weight[lane_idx],
      reinterpret_cast<const float*>(peer + p.heap->weights_sorted.offset) + source.sorted_idx, 4);
  __pipeline_commit();
}

// Where a row lies, in 16-byte chunks: in its home rank's heap, or in the caller's x.
__device__ __forceinline__ const uint4* source_of(const Pull& p, int32_t rank, int32_t route) {
  const int32_t token = route / static_cast<int32_t>(p.top_k);
  const auto* x = rank == p.table->me.v
                      ? reinterpret_cast<const uint4*>(p.own_x)
                      : reinterpret_cast<const uint4*>(p.heaps[rank] + p.tokens_offset);
  return x + token * (p.hidden / 8);
}

// A quarter's rows to neighbouring places by the whole warp, all rows at once: one of 4 KB has only
// eight chunks per lane. `source` of a row that is not there is null.
__device__ __forceinline__ void copy_quarter(const uint4* const (&source)[kQuarterRows], uint4* to,
                                             int32_t num_chunks, int32_t lane_idx) {
#pragma unroll 1
  for (int32_t base = lane_idx; base < num_chunks; base += 32 * kChunksPerRow) {
    uint4 chunk[kQuarterRows][kChunksPerRow];
#pragma unroll
    for (int r = 0; r < kQuarterRows; ++r) {
#pragma unroll
      for (int k = 0; k < kChunksPerRow; ++k) {
        chunk[r][k] =
            {};  // else a predicated load keeps the old value alive through the loop: spills
        if (base + k * 32 < num_chunks && source[r] != nullptr) {
          chunk[r][k] = __ldcg(source[r] + base + k * 32);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kQuarterRows; ++r) {
#pragma unroll
      for (int k = 0; k < kChunksPerRow; ++k) {
        if (base + k * 32 < num_chunks && source[r] != nullptr) {
          to[r * num_chunks + base + k * 32] = chunk[r][k];
        }
      }
    }
  }
}

// This lane's copy of what a quarter needs once its look-up slot is used for the next one.
struct Quarter {
  int32_t block, begin, num_rows;
  int32_t to;           // push: the destination
  bool is_remote;       // pull: row lane comes from another rank, across the link
  int32_t token;        // then: its place in Pull::pulled
  const uint4* source;  // of row lane, or null
};

// An earlier block of this pass lies where the quarter goes.
__device__ __forceinline__ bool is_used_slot(const Pull& p, const Quarter& q) {
  return p.places == nullptr && q.block - p.x_ring_blocks >= p.table->shared_blocks;
}

// Row lane, of another rank: from where it was pulled to for another expert, if it was.
__device__ __forceinline__ void find_pulled(const Pull& p, const RowsSlot& slot, int32_t lane_idx,
                                            Quarter& q) {
  q.token = static_cast<int32_t>(slot.rank[lane_idx] * p.max_tokens +
                                 slot.route[lane_idx] / static_cast<int32_t>(p.top_k));
  // Written by note_rows(): the row is whole.
  const uint64_t word =
      device::load_acquire<uint64_t, cuda::thread_scope_device>(p.pulled + q.token);
  if (word >> 32 != p.epoch) return;
  q.is_remote = false;
  q.source =
      reinterpret_cast<const uint4*>(p.x_ring) + static_cast<uint32_t>(word) * (p.hidden / 8);
}

// Takes the origins that look_up() has brought, writes them down and leaves the slot free.
__device__ __forceinline__ Quarter take(const Pull& p, const RowsSlot& slot, int32_t lane_idx) {
  __pipeline_wait_prior(0);
  __syncwarp();  // what the other lanes looked up
  Quarter q{slot.block, slot.begin, slot.num_rows, 0, false, 0, nullptr};
  if (lane_idx < q.num_rows) {
    q.is_remote = slot.rank[lane_idx] != p.table->me.v;
    const int64_t row =
        p.table->routed_idx(BlockId{q.block}) * pipeline::kBlockRows + q.begin + lane_idx;
    p.origins[row] = {slot.rank[lane_idx], slot.route[lane_idx], slot.weight[lane_idx]};
    q.source = source_of(p, slot.rank[lane_idx], slot.route[lane_idx]);
    if (q.is_remote && p.pulled != nullptr && !is_used_slot(p, q))
      find_pulled(p, slot, lane_idx, q);
    if (p.places != nullptr) {
      const bool is_own = slot.rank[lane_idx] == p.table->me.v;
      const auto* plane = reinterpret_cast<const uint4*>(is_own ? p.own_x : p.x_ring);
      const int64_t at = q.is_remote ? row * (p.hidden / 8) : q.source - plane;
      cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(p.places[row])
          .store(uint64_t{p.epoch} << 32 | static_cast<uint32_t>(at) | (is_own ? 0 : Pull::kInRing),
                 cuda::memory_order_relaxed);
      if (!q.is_remote) q.source = nullptr;  // it stays where it is
    }
  }
  __syncwarp();  // all have read the slot
  return q;
}

// A warp: waits until the tokens of every rank can be read. False: gave up.
__device__ __forceinline__ bool wait_staged(const Pull& p, int32_t lane_idx,
                                            const MoveLimits& limits) {
  bool healthy = true;
  for (int64_t r = lane_idx; healthy && r < p.table->num_ranks; r += 32) {
    uint64_t word = 0;
    // Signalled by rank r: its x lies in its heap. (Own rows are read elsewhere.)
    healthy = r == p.table->me.v || device::wait_signal(p.x_staged + r, p.staged_word,
                                                        limits.signal, limits.what_staged, r, word);
  }
  return __all_sync(~0u, healthy);  // and what these lanes acquired, to all
}

// One lane. False: gave up.
__device__ __forceinline__ bool wait_slot(const Pull& p, const Quarter& q,
                                          const MoveLimits& limits) {
  const int64_t holder = q.block - p.x_ring_blocks;
  // Signalled by FC1: all its tiles of the block that holds the slot have read their rows.
  return device::wait_counter(p.fc1_done + holder, static_cast<uint32_t>(p.fc1_tiles),
                              limits.counter, limits.what_slot, holder);
}

// Every row's source, to all lanes.
__device__ __forceinline__ void share_sources(const Quarter& q,
                                              const uint4* (&source)[kQuarterRows]) {
#pragma unroll
  for (int r = 0; r < kQuarterRows; ++r) {
    source[r] = reinterpret_cast<const uint4*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(q.source), r));
  }
}

__device__ __forceinline__ void copy_rows(const Pull& p, const Quarter& q, int32_t lane_idx) {
  const int64_t routed = p.table->routed_idx(BlockId{q.block}),
                slot = remainder(routed, p.x_ring_blocks);
  const int32_t num_chunks = static_cast<int32_t>(p.hidden / 8);
  const auto at = [&](bf16* rows, int64_t block) {
    return reinterpret_cast<uint4*>(rows) + (block * pipeline::kBlockRows + q.begin) * num_chunks;
  };
  uint4* to = at(p.x_ring, slot);
  if (p.places != nullptr && !__any_sync(~0u, q.source != nullptr)) return;
  const uint4* source[kQuarterRows];
  share_sources(q, source);
  copy_quarter(source, to, num_chunks, lane_idx);
  if (p.keep_x == nullptr || routed >= p.saved_blocks) return;
  uint4* keep = at(p.keep_x, routed);
  __syncwarp();  // the copied rows, to all lanes
#pragma unroll 1
  for (int32_t c = lane_idx; c < q.num_rows * num_chunks; c += 32) keep[c] = to[c];
}

// Every lane, after every lane's rows: where they can be copied from now.
__device__ __forceinline__ void note_rows(const Pull& p, const Quarter& q, int32_t lane_idx) {
  if (!q.is_remote || p.pulled == nullptr) return;
  const int64_t row =
      p.table->routed_idx(BlockId{q.block}) * pipeline::kBlockRows + q.begin + lane_idx;
  cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(p.pulled[q.token])
      .store(uint64_t{p.epoch} << 32 | static_cast<uint32_t>(row), cuda::memory_order_release);
}

// One lane, after every lane's rows and origins: to FC1 and combine of this rank.
__device__ __forceinline__ void count_rows(const Pull& p, const Quarter& q) {
  device::add_release_gpu(
      p.x_ready + pipeline::minibatch_of(*p.table, BlockId{q.block}, p.minibatch_blocks),
      static_cast<uint32_t>(q.num_rows));
}

// A warp. False: gave up.
template <class Way, class Rows>
__device__ __forceinline__ bool wait_for_slot(const Way& p, const Rows& q, int32_t lane_idx,
                                              const MoveLimits& limits) {
  const bool healthy = lane_idx != 0 || !is_used_slot(p, q) || wait_slot(p, q, limits);
  return __shfl_sync(~0u, healthy, 0);
}

// The next quarter waits for nobody: its rows are this rank's own and its slot was never used.
// Complete after the look-up.
__device__ __forceinline__ bool needs_no_wait(const Pull& p, const RowsSlot& slot,
                                              int32_t lane_idx) {
  __pipeline_wait_prior(0);
  __syncwarp();  // what the other lanes looked up
  const bool is_remote = lane_idx < slot.num_rows && slot.rank[lane_idx] != p.table->me.v;
  return slot.block - p.x_ring_blocks < p.table->shared_blocks && __any_sync(~0u, is_remote) == 0;
}

// Moves a warp's quarters, every slot.stride-th from `quarter` on; kOnlyFirst: one, if it need not
// wait. Its look-up is on the way, and that of the quarter returned too. kGaveUp: a wait did. Way
// is Pull or Push.
inline constexpr int32_t kGaveUp = -1;
template <bool kOnlyFirst, class Way, class Recorder, class Delay>
__device__ __forceinline__ int32_t move_quarters(const Way& p, RowsSlot& slot, Recorder& recorder,
                                                 int32_t quarter, int32_t num_quarters,
                                                 const MoveLimits& limits, const Delay& delay) {
  const int32_t lane_idx = threadIdx.x % 32;
  bool is_staged = false;
#pragma unroll 1
  for (; quarter < num_quarters; quarter += slot.stride) {
    if constexpr (kOnlyFirst) {
      if (!needs_no_wait(p, slot, lane_idx)) return quarter;
    }
    const auto q = take(p, slot, lane_idx);
    look_up(p, quarter + slot.stride, num_quarters, lane_idx, slot);
    if (q.num_rows > 0) {
      delay();
      if (!kOnlyFirst) {
        if (!is_staged && __any_sync(~0u, q.is_remote)) {
          is_staged = wait_staged(p, lane_idx, limits);
          if (!is_staged) return kGaveUp;
        }
        if (!wait_for_slot(p, q, lane_idx, limits)) return kGaveUp;
      }
      const uint64_t begin_ns = recorder.now();
      copy_rows(p, q, lane_idx);
      // This lane's stores, to tensor copies of any SM that follow the counter.
      cuda::ptx::fence_proxy_async(cuda::ptx::space_global);
      __syncwarp();
      note_rows(p, q, lane_idx);
      if (lane_idx == 0) {
        count_rows(p, q);
        recorder.add_dispatch(begin_ns, q.block, q.begin);
      }
    }
    if (kOnlyFirst) return quarter + slot.stride;
  }
  return quarter;
}

// Of num_warps warps that share the quarters, this one begins: with the one of its index.
template <class Way>
__device__ __forceinline__ void look_up_first(const Way& p, RowsSlot& slot, int32_t warp_idx,
                                              int32_t num_warps, int32_t num_quarters) {
  if (threadIdx.x % 32 == 0) slot.stride = num_warps;
  __syncwarp();  // to all lanes
  look_up(p, warp_idx, num_quarters, threadIdx.x % 32, slot);
}

// Role of one warp. `recorder` writes the timeline, `delay` injects faults, after_first() is called
// once, when the warp's part of the first blocks is out or has to wait. Returns when its rows are
// out, or when a wait gave up.
template <class Way, class Recorder, class Delay, class AfterFirst>
__device__ __forceinline__ void pull_rows(const Way& p, RowsSlot& slot, Recorder& recorder,
                                          int32_t warp_idx, int32_t num_warps,
                                          const MoveLimits& limits, const Delay& delay,
                                          const AfterFirst& after_first) {
  const int32_t num_quarters = p.num_quarters();
  look_up_first(p, slot, warp_idx, num_warps, num_quarters);
  const int32_t next =
      move_quarters<true>(p, slot, recorder, warp_idx, num_quarters, limits, delay);
  after_first();  // before any wait: peers may wait for what it does
  move_quarters<false>(p, slot, recorder, next, num_quarters, limits, delay);
}

}  // namespace moxie::dispatch
