// The table of push dispatch on the GPU. Plain body: push_ref.h.
//
// One CTA builds it for its rank, after it has seen every peer's inputs_ready: it reads all ranks'
// counts of all experts (2 R E words across the link), which a pull never needs. That is the price
// of push before the first row moves.
#pragma once

#include <cuda_runtime.h>

#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/tasks.h"
#include "moxie/schedule/schedule_cuda.cuh"

namespace moxie::schedule {

struct PushBuild {
  std::byte* const* heaps;                        // [R]
  int64_t route_begin_offset, num_tokens_offset;  // in every heap
  bool has_shared;                                // a shared expert, whose blocks come first
  int64_t max_blocks;                             // capacity of a rank
  int32_t* first_row;                             // [E]
  int32_t* expert_block;                          // [E + R]
  int32_t* shared_blocks;                         // [R]
  int32_t* unit_begin;                            // [max_blocks * R + 1]
};

// Exclusive prefix sum over values[0 .. n), in place, by all threads of a CTA; scratch
// [kSortWarps].
__device__ __forceinline__ void exclusive_scan_cta(int32_t* values, int32_t n, int32_t* scratch) {
  const int32_t warp_idx = threadIdx.x / 32, length = (n + kSortWarps - 1) / kSortWarps;
  const int32_t begin = min(warp_idx * length, n), end = min(begin + length, n);
  const int32_t total = exclusive_scan(values + begin, end - begin);
  if (threadIdx.x % 32 == 0) scratch[warp_idx] = total;
  __syncthreads();  // also the warp's own sums, to its other lanes
  int32_t before = 0;
  for (int32_t w = 0; w < warp_idx; ++w) before += scratch[w];
  for (int32_t i = begin + static_cast<int32_t>(threadIdx.x % 32); i < end; i += 32)
    values[i] += before;
  __syncthreads();
}

// `table` comes with its counts of ranks and experts and its pointers; returns num_blocks to every
// thread: 0 where a destination lacks the capacity, which it objects to itself.
__device__ __forceinline__ int32_t build_push(const PushBuild& b, pipeline::PushTable table,
                                              int32_t* scratch) {
  const int64_t num_ranks = table.num_ranks, num_experts = table.num_experts;
#pragma unroll 1
  for (int64_t e = threadIdx.x; e < num_experts; e += kSortThreads) {
    const int64_t to = expert_home(num_experts, num_ranks, ExpertId{e}).v;
    int32_t rows = 0;
#pragma unroll 4
    for (int64_t i = 0; i < num_ranks; ++i) {  // the destination's rotated order
      const int64_t source = (to + i) % num_ranks;
      const auto* begin =
          reinterpret_cast<const int32_t*>(b.heaps[source] + b.route_begin_offset) + e;
      if (source == table.me.v) b.first_row[e] = rows;
      rows += __ldcg(begin + 1) - __ldcg(begin);
    }
    b.expert_block[e + to] = static_cast<int32_t>(pipeline::num_blocks(rows));
  }
  int32_t* most = scratch + kSortWarps;
  if (threadIdx.x == 0) *most = 0;
  __syncthreads();
#pragma unroll 1
  for (int64_t to = threadIdx.x / 32; to < num_ranks; to += kSortWarps) {
    int32_t* blocks = b.expert_block + expert_begin(num_experts, num_ranks, RankId{to}) + to;
    const int64_t n = num_local_experts(num_experts, num_ranks, RankId{to});
    const int32_t total = exclusive_scan(blocks, n);
    if (threadIdx.x % 32 == 0) {
      blocks[n] = total;
      atomicMax(most, total);
      const int32_t tokens =
          __ldcg(reinterpret_cast<const int32_t*>(b.heaps[to] + b.num_tokens_offset));
      b.shared_blocks[to] = b.has_shared ? static_cast<int32_t>(pipeline::num_blocks(tokens)) : 0;
    }
  }
  __syncthreads();
  table.num_blocks = *most <= b.max_blocks ? *most : 0;
  const int32_t n = static_cast<int32_t>(table.num_blocks * num_ranks);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < n; i += kSortThreads) {
    const auto rows = table.rows(i / num_ranks, table.rotated_destination(i % num_ranks)).rows;
    b.unit_begin[i] = static_cast<int32_t>(pipeline::num_push_units(rows));
  }
  if (threadIdx.x == 0) b.unit_begin[n] = 0;
  __syncthreads();
  exclusive_scan_cta(b.unit_begin, n + 1, scratch);
  return static_cast<int32_t>(table.num_blocks);
}

}  // namespace moxie::schedule
