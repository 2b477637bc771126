// Push dispatch on the GPU: a warp writes rows of its own rank into ring slots of the destinations.
// Contract: dispatch.h; plain body: dispatch_ref.h; the loop and the copy are dispatch_cuda.cuh's.
//
// Against pull the roles of near and far are exchanged: origins are looked up in own memory, rows
// leave by stores across the link, and the count that says they are there must follow them, at
// system scope. The slot is awaited at the destination, by loads across the link.
#pragma once

#include "moxie/dispatch/dispatch_cuda.cuh"

namespace moxie::dispatch {

struct Push {
  std::byte* const* workspaces;  // [R]
  bf16* const* keep_x;           // [R] each [saved_blocks * 128, H] context, or null
  const pipeline::WorkspaceLayout* workspace;
  const pipeline::PushTable* table;
  const int32_t* routes_sorted;  // [T * K] own heap, as the next one
  const float* weights_sorted;   // [T * K]
  const bf16* x;                 // [T, H] where the caller keeps it: peers do not read it
  int64_t counters;              // this pass's bank in every workspace, in bytes
  int64_t x_ready, fc1_done;     // words of it
  int64_t saved_blocks, x_ring_blocks, minibatch_blocks, fc1_tiles, hidden, top_k;

  __device__ __forceinline__ int32_t num_quarters() const {
    return static_cast<int32_t>(table->num_units() * kQuarters);
  }
  template <class T>
  __device__ __forceinline__ T* at(int32_t rank, const pipeline::Region& region) const {
    return reinterpret_cast<T*>(workspaces[rank] + region.offset);
  }
  __device__ __forceinline__ uint32_t* counter(int32_t rank, int64_t word) const {
    return reinterpret_cast<uint32_t*>(workspaces[rank] + counters) + word;
  }
};

__device__ __forceinline__ void look_up(const Push& p, int32_t quarter, int32_t num_quarters,
                                        int32_t lane_idx, RowsSlot& next) {
  if (quarter >= num_quarters) return;
  const pipeline::PushTable& t = *p.table;
  const int32_t unit = quarter / static_cast<int32_t>(kQuarters);
  const pipeline::PushRows u = pipeline::push_unit(
      t, unit,
      device::warp_last_not_above_long(t.unit_begin,
                                       static_cast<int32_t>(t.num_blocks * t.num_ranks), unit));
  const int64_t skip = min(quarter % kQuarters * kQuarterRows, u.rows.size());
  const auto num_rows = static_cast<int32_t>(min(kQuarterRows, u.rows.size() - skip));
  if (lane_idx == 0) {
    next.block = static_cast<int32_t>(u.block);
    next.begin = static_cast<int32_t>(u.rows.begin + skip);
    next.num_rows = num_rows;
    next.rank[0] = u.to.v;
  }
  if (lane_idx >= num_rows) return;
  const int64_t at = u.sorted_idx + skip + lane_idx;
  __pipeline_memcpy_async(&next.route[lane_idx], p.routes_sorted + at, 4);
  __pipeline_memcpy_async(&next.weight[lane_idx], p.weights_sorted + at, 4);
  __pipeline_commit();
}

__device__ __forceinline__ Quarter take(const Push& p, const RowsSlot& slot, int32_t lane_idx) {
  __pipeline_wait_prior(0);
  __syncwarp();  // what the other lanes looked up
  Quarter q{slot.block, slot.begin, slot.num_rows, slot.rank[0], false, 0, nullptr};
  if (lane_idx < q.num_rows) {
    const int32_t route = slot.route[lane_idx];
    p.at<pipeline::RowOrigin>(
        q.to, p.workspace->origins)[q.block * pipeline::kBlockRows + q.begin + lane_idx] = {
        p.table->me.v, route, slot.weight[lane_idx]};
    q.source = reinterpret_cast<const uint4*>(p.x) +
               route / static_cast<int32_t>(p.top_k) * (p.hidden / 8);
  }
  __syncwarp();  // all have read the slot
  return q;
}

// Own rows lie where they are; only the destination's slot may have to be awaited.
__device__ __forceinline__ bool wait_staged(const Push&, int32_t, const MoveLimits&) {
  return true;
}
__device__ __forceinline__ bool is_used_slot(const Push& p, const Quarter& q) {
  return q.block >= p.x_ring_blocks;
}
// One lane. False: gave up.
__device__ __forceinline__ bool wait_slot(const Push& p, const Quarter& q,
                                          const MoveLimits& limits) {
  const int64_t holder = q.block - p.x_ring_blocks;
  // Signalled by FC1 of the destination: all its tiles of the block that holds the slot have read
  // their rows.
  return device::wait_counter_sys(
      p.counter(q.to, p.fc1_done + p.table->shared_blocks[q.to] + holder),
      static_cast<uint32_t>(p.fc1_tiles), limits.counter, limits.what_slot, q.to);
}

__device__ __forceinline__ void copy_rows(const Push& p, const Quarter& q, int32_t lane_idx) {
  const int32_t num_chunks = static_cast<int32_t>(p.hidden / 8);
  const auto at = [&](bf16* rows, int64_t block) {
    return reinterpret_cast<uint4*>(rows) + (block * pipeline::kBlockRows + q.begin) * num_chunks;
  };
  const uint4* source[kQuarterRows];
  share_sources(q, source);
  copy_quarter(source,
               at(p.at<bf16>(q.to, p.workspace->x_ring), remainder(q.block, p.x_ring_blocks)),
               num_chunks, lane_idx);
  bf16* keep = p.keep_x[q.to];
  if (keep == nullptr || q.block >= p.saved_blocks) return;
  copy_quarter(source, at(keep, q.block), num_chunks, lane_idx);
}

__device__ __forceinline__ void note_rows(const Push&, const Quarter&, int32_t) {}

// One lane, after every lane's rows: to FC1 and combine of the destination, maybe on another GPU.
__device__ __forceinline__ void count_rows(const Push& p, const Quarter& q) {
  device::add_release_sys(p.counter(q.to, p.x_ready + quotient(q.block, p.minibatch_blocks)),
                          static_cast<uint32_t>(q.num_rows));
}

// Role of one warp, as pull_rows; there is nothing to stage.
template <class Recorder, class Delay>
__device__ __forceinline__ void push_rows(const Push& p, RowsSlot& slot, Recorder& recorder,
                                          int32_t warp_idx, int32_t num_warps,
                                          const MoveLimits& limits, const Delay& delay) {
  const int32_t num_quarters = p.num_quarters();
  look_up_first(p, slot, warp_idx, num_warps, num_quarters);
  move_quarters<false>(p, slot, recorder, warp_idx, num_quarters, limits, delay);
}

}  // namespace moxie::dispatch
