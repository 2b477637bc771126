// Schedule on the GPU: staging, the stable counting sort over all CTAs of a rank, and the block
// table. Contract: schedule.h; plain bodies: schedule_ref.h.
//
// The sort cuts the routes into one run per CTA and each run into one per warp. Every warp counts
// its run by expert, the CTAs exchange their counts through global memory, and every warp places
// its run where the counts of all runs before it end: stable, one exchange, no atomics on data. All
// threads of a CTA call each function together. `scratch` is shared memory that nobody uses yet:
// the stages of the GEMM loop.
#pragma once

#include <cuda_runtime.h>

#include "moxie/core/dtype.h"
#include "moxie/core/problem.h"
#include "moxie/device/signal.cuh"
#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/cuda_layout.h"

namespace moxie::schedule {

inline constexpr int32_t kSortWarps = 12;
inline constexpr int32_t kSortThreads = kSortWarps * 32;
using pipeline::kMaxSortCtas;
inline constexpr int64_t kMaxExperts = 4096;  // (12 + 1) counts of each in scratch: 208 of 224 KiB

struct Cta {
  int32_t idx, count;  // among the CTAs of its rank
  __device__ __forceinline__ int32_t num_sorting() const {
    return count < kMaxSortCtas ? count : kMaxSortCtas;
  }
};

// x is staged in units of whole tokens, about so many bytes: coarse enough for their counter, fine
// enough to end together.
inline constexpr int64_t kStageUnitBytes = 16 * 1024;

__device__ __forceinline__ int64_t stage_unit_tokens(int64_t hidden) {
  return max(kStageUnitBytes / (2 * hidden), int64_t{1});
}

// Elements [begin, end), multiples of 64, of x -> the rank's heap, by one warp.
__device__ __forceinline__ void copy_elements(const bf16* x, bf16* x_in, int64_t begin,
                                              int64_t end) {
  constexpr int kInFlight = 8;
  const uint4* from = reinterpret_cast<const uint4*>(x);
  uint4* to = reinterpret_cast<uint4*>(x_in);
#pragma unroll 1
  for (int64_t i = begin / 8 + threadIdx.x % 32; i < end / 8; i += kInFlight * 32) {
    uint4 chunk[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      chunk[k] = {};  // else a predicated load keeps the old value alive through the loop: spills
      if (i + k * 32 < end / 8) chunk[k] = __ldcs(from + i + k * 32);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * 32 < end / 8) to[i + k * 32] = chunk[k];
    }
  }
}

// Weight of the shared expert's rows: 1, or sigmoid(x . gate), one warp per token, in a fixed
// order.
__device__ __forceinline__ void weigh_shared_rows(const bf16* x, const bf16* gate /* [H] or null */,
                                                  int64_t num_tokens, int64_t hidden, float* weight,
                                                  Cta cta) {
  const int32_t lane_idx = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t t = cta.idx * int64_t{kSortWarps} + threadIdx.x / 32; t < num_tokens;
       t += int64_t{cta.count} * kSortWarps) {
    float sum = 0;
    for (int64_t j = lane_idx; gate != nullptr && j < hidden; j += 32) {
      sum += __uint_as_float(uint32_t{x[t * hidden + j].bits} << 16) *
             __uint_as_float(uint32_t{gate[j].bits} << 16);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane_idx == 0) weight[t] = gate == nullptr ? 1.0f : 1.0f / (1.0f + __expf(-sum));
  }
}

// One rank's routes and where they go.
struct RouteSort {
  const void* ids;  // [T * K] as the router wrote them
  DType id_dtype;
  const float* weights;  // [T * K], not read where the id is -1
  int64_t num_routes, num_experts;
  int32_t* ids32;          // [T * K] workspace
  int32_t* counts;         // [kMaxSortCtas, E] workspace
  int32_t* routes_sorted;  // [T * K] heap
  float* weights_sorted;   // [T * K] heap
  int32_t* route_begin;    // [E + 1] heap
  int32_t* keep_ids;       // [T * K] context, or null
  float* keep_weights;     // [T * K] context, or null
  uint32_t* num_counted;   // CTAs whose counts are written
  uint32_t* bad_route;     // num_routes - r of the first route r with an invalid id; 0: none
};

// The run of one warp.
struct Run {
  int64_t begin, end;
};
__device__ __forceinline__ Run run_of_warp(const RouteSort& s, Cta cta) {
  const int64_t num_runs = int64_t{cta.num_sorting()} * kSortWarps;
  const int64_t length = ((s.num_routes + num_runs - 1) / num_runs + 31) / 32 * 32;
  const int64_t begin = (cta.idx * int64_t{kSortWarps} + threadIdx.x / 32) * length;
  return {begin, min(begin + length, s.num_routes)};
}

// Exclusive prefix sum over values[0 .. n), in place, by one warp; returns the total to all its
// lanes.
__device__ __forceinline__ int32_t exclusive_scan(int32_t* values, int64_t n) {
  const int32_t lane_idx = threadIdx.x % 32;
  int32_t total = 0;
#pragma unroll 1
  for (int64_t base = 0; base < n; base += 32) {
    const int64_t i = base + lane_idx;
    const int32_t own = i < n ? values[i] : 0;
    int32_t sum = own;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t lower = __shfl_up_sync(~0u, sum, step);
      if (lane_idx >= step) sum += lower;
    }
    if (i < n) values[i] = total + sum - own;
    total += __shfl_sync(~0u, sum, 31);
  }
  return total;
}

// Counts this CTA's routes by expert: scratch[warp][E] stays, the CTA's sums go to s.counts.
__device__ __forceinline__ void count_routes(const RouteSort& s, Cta cta, int32_t* scratch) {
  if (cta.idx >= cta.num_sorting()) return;
  const int32_t lane_idx = threadIdx.x % 32;
  int32_t* own = scratch + threadIdx.x / 32 * s.num_experts;
  for (int64_t i = threadIdx.x; i < kSortWarps * s.num_experts; i += kSortThreads) scratch[i] = 0;
  __syncthreads();
  const Run run = run_of_warp(s, cta);
#pragma unroll 1
  for (int64_t base = run.begin; base < run.end; base += 32) {
    const int64_t r = base + lane_idx;
    int64_t id = -1;
    if (r < run.end) {
      id = s.id_dtype == DType::i64 ? static_cast<const int64_t*>(s.ids)[r]
                                    : static_cast<const int32_t*>(s.ids)[r];
      if (id < -1 || id >= s.num_experts) {
        atomicMax(s.bad_route, static_cast<uint32_t>(s.num_routes - r));
        id = -1;
      }
      s.ids32[r] = static_cast<int32_t>(id);
      if (s.keep_ids != nullptr) s.keep_ids[r] = static_cast<int32_t>(id);
    }
    const uint32_t same = __match_any_sync(~0u, static_cast<int32_t>(id));
    if (id >= 0 && lane_idx == __ffs(same) - 1) own[id] += __popc(same);
    __syncwarp();  // the counts, to the next round's lanes
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < s.num_experts; e += kSortThreads) {
    int32_t sum = 0;
    for (int32_t w = 0; w < kSortWarps; ++w) sum += scratch[w * s.num_experts + e];
    s.counts[cta.idx * s.num_experts + e] = sum;
  }
  __syncthreads();
  // The CTA's counts, to all sorting CTAs of the rank.
  if (threadIdx.x == 0) device::add_release_gpu(s.num_counted, 1);
}

// After count_routes(): writes this CTA's routes to their places. False: gave up.
__device__ __forceinline__ bool place_routes(const RouteSort& s, Cta cta, int32_t* scratch,
                                             const device::WaitLimits& limits, uint32_t what) {
  if (cta.idx >= cta.num_sorting()) return true;
  const int32_t lane_idx = threadIdx.x % 32, num_sorting = cta.num_sorting();
  int32_t* begin = scratch + kSortWarps * s.num_experts;  // [E + 1]
  // Signalled by every sorting CTA: its counts are written.
  const bool healthy =
      threadIdx.x != 0 || device::wait_counter(s.num_counted, num_sorting, limits, what, 0);
  if (__syncthreads_and(healthy) == 0) return false;
  for (int64_t e = threadIdx.x; e < s.num_experts; e += kSortThreads) {
    int32_t before = 0, total = 0;
#pragma unroll 8
    for (int32_t c = 0; c < num_sorting; ++c) {
      const int32_t count = __ldcg(s.counts + c * s.num_experts + e);
      before += c < cta.idx ? count : 0;
      total += count;
    }
    begin[e] = total;
    for (int32_t w = 0; w < kSortWarps; ++w) {  // counts become places within the expert
      int32_t& place = scratch[w * s.num_experts + e];
      const int32_t count = place;
      place = before;
      before += count;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int32_t total = exclusive_scan(begin, s.num_experts);
    if (lane_idx == 0) begin[s.num_experts] = total;
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; cta.idx == 0 && e <= s.num_experts; e += kSortThreads)
    s.route_begin[e] = begin[e];
  int32_t* next = scratch + threadIdx.x / 32 * s.num_experts;
  const Run run = run_of_warp(s, cta);
#pragma unroll 1
  for (int64_t base = run.begin; base < run.end; base += 32) {
    const int64_t r = base + lane_idx;
    const int32_t id = r < run.end ? s.ids32[r] : -1;
    const uint32_t same = __match_any_sync(~0u, id);
    if (id >= 0) {
      const int32_t at = begin[id] + next[id] + __popc(same & ((1u << lane_idx) - 1));
      const float weight = s.weights[r];
      s.routes_sorted[at] = static_cast<int32_t>(r);
      s.weights_sorted[at] = weight;
      if (s.keep_weights != nullptr) s.keep_weights[r] = weight;
    }
    __syncwarp();  // all have read next[] before it moves on
    if (id >= 0 && lane_idx == __ffs(same) - 1) next[id] += __popc(same);
    __syncwarp();
  }
  return true;
}

// Where the table of a rank is built, and what it is built from.
struct TableBuild {
  std::byte* const* heaps;     // [R]
  int64_t route_begin_offset;  // in every heap
  int64_t first_expert;        // of this rank
  int64_t* row_prefix;         // [E_local, R + 1]
  int32_t* source_begin;       // [E_local, R]
  int32_t* expert_block;       // [E_local + 1]
};

// One CTA, after it has seen every peer's inputs_ready. `table` comes with its counts of ranks,
// experts and shared blocks; returns the number of all blocks to every thread.
__device__ __forceinline__ int32_t build_blocks(const TableBuild& b,
                                                const pipeline::BlockTable& table,
                                                int32_t* scratch) {
  const int64_t num_ranks = table.num_ranks, num_experts = table.num_experts;
  int32_t* counts = scratch;                            // [E_local, R]
  int32_t* blocks = scratch + num_experts * num_ranks;  // [E_local + 1]
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < num_experts * num_ranks; i += kSortThreads) {
    const int64_t e = i / num_ranks;
    const auto* begin = reinterpret_cast<const int32_t*>(
                            b.heaps[table.rotated_source(i % num_ranks).v] + b.route_begin_offset) +
                        b.first_expert + e;
    const int32_t first = __ldcg(begin), end = __ldcg(begin + 1);
    b.source_begin[i] = first;
    counts[i] = end - first;
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < num_experts; e += kSortThreads) {
    int64_t* prefix = b.row_prefix + e * (num_ranks + 1);
    int64_t rows = 0;
    prefix[0] = 0;
    for (int64_t i = 0; i < num_ranks; ++i) prefix[i + 1] = rows += counts[e * num_ranks + i];
    blocks[e] = static_cast<int32_t>(pipeline::num_blocks(rows));
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int32_t total = exclusive_scan(blocks, num_experts);
    if (threadIdx.x == 0) blocks[num_experts] = total;
  }
  __syncthreads();
  const int32_t shared_blocks = static_cast<int32_t>(table.shared_blocks);
  for (int64_t e = threadIdx.x; e <= num_experts; e += kSortThreads)
    b.expert_block[e] = shared_blocks + blocks[e];
  return shared_blocks + blocks[num_experts];
}

}  // namespace moxie::schedule
