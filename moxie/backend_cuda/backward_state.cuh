// What the backward's roles share beside pass_state.cuh.
#pragma once

#include "moxie/backend_cuda/backward_params.h"
#include "moxie/backend_cuda/pass_state.cuh"

namespace moxie::backend_cuda {

// Rows of dY, and of x where the context does not keep them, into one ring slot: dispatch/'s Pull
// is about dY.
struct PullBack : dispatch::Pull {
  const bf16* forward_x;  // [T, H] where the caller keeps it
  bf16* x_back;           // [ring rows, H], or null: not pulled
  const bf16* saved_x;    // [saved_blocks * 128, H] context, or null
  const bf16* down_bias;  // [E_local, H] or null
  float* dy_bias;         // [routed_blocks * 128] dY . bd of each row
};

// Vector gradients (biases, the shared expert's output gate): one warp sums 256 columns of a chunk.
// Units of a chunk follow each other, chunks in order, those of the shared expert first.
struct VectorUnits {
  int32_t shared_chunks, per_shared_chunk, per_chunk;
  int32_t gate_strips;  // of d(gate bias), as many of d(up bias)

  __device__ __forceinline__ int32_t of_chunk(int64_t chunk) const {
    return chunk < shared_chunks ? per_shared_chunk : per_chunk;
  }
  // Units of chunks [0, end).
  __device__ __forceinline__ int32_t before(int64_t end) const {
    const auto shared = static_cast<int32_t>(min(end, int64_t{shared_chunks}));
    return shared * per_shared_chunk + static_cast<int32_t>(end - shared) * per_chunk;
  }
};

struct BackwardState : PassState {
  pipeline::BackwardStream stream;
  PullBack pull;
  VectorUnits vectors;
  const int64_t* step_begin;  // [num_steps + 1] tickets, or pairs of them, before a step
  uint32_t num_units;         // of them in all
  int32_t ring_blocks;
  int32_t ready_chunk;  // the loading lane's: whose dgrad it has seen complete last
  bool skips_empty;     // gradients are added: experts without rows have nothing to write
  bool counts_trail;    // somebody waits for dX and weight gradients: slots or sums are used again

  __device__ __forceinline__ int32_t slot_of(int32_t block) const { return block % ring_blocks; }
  // trail_done of a chunk when its slots are free and its sums complete.
  __device__ __forceinline__ uint32_t trail_of(int64_t chunk) const {
    return static_cast<uint32_t>(stream.trail_tickets(chunk) + vectors.of_chunk(chunk));
  }
};

// ---- rowsum(dA' . A): one part per dgrad tile and row of the ring ----

__device__ __forceinline__ float* row_sums(const BackwardCommon& common, const BackwardRank& rank,
                                           int64_t ring_row) {
  return at<float>(rank, common.workspace.dw_partial) +
         ring_row * ceil_div(common.ring_width, int64_t{expert::kDgradTileCols});
}
// Its parts in column order: d(weight of the row), without the bias's.
__device__ __forceinline__ float row_sum(const BackwardCommon& common, const BackwardRank& rank,
                                         int64_t ring_row, int64_t num_tiles) {
  const float* parts = row_sums(common, rank, ring_row);
  float sum = 0.0f;
#pragma unroll 1
  for (int64_t t = 0; t < num_tiles; ++t) sum += __ldcg(parts + t);
  return sum;
}
// Of a token of the gated shared expert: gradient of its gate's logit.
__device__ __forceinline__ float logit_grad(const BackwardCommon& common, const BackwardRank& rank,
                                            const BackwardState& state, int32_t token) {
  const int32_t slot = state.slot_of(token / static_cast<int32_t>(pipeline::kBlockRows));
  const float dw = row_sum(common, rank, slot * pipeline::kBlockRows + token % pipeline::kBlockRows,
                           state.stream.shared_dgrad_tiles);
  const float s = at<float>(rank, common.workspace.shared_weight)[token];
  return dw * s * (1.0f - s);
}

}  // namespace moxie::backend_cuda
