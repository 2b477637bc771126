// The fused forward's policy for the expert GEMM loop, after the product: what becomes of the
// accumulators. Rounding points are those of expert/expert.h; the CPU twin is roles_compute.h.
#pragma once

#include "moxie/backend_cuda/forward_policies.cuh"
#include "moxie/backend_cuda/pass_epilogue.cuh"
#include "moxie/expert/bias_cuda.cuh"

namespace moxie::backend_cuda {

// sigmoid(x) by one tanh.
__device__ __forceinline__ float sigmoid_approx(float x) {
  return fmaf(0.5f, device::tanh_approx(0.5f * x), 0.5f);
}

// FC1: activation and route weight, hidden rows to their slot. FC2: row pieces to their homes, or
// to y where communication warps carry them.
// kGeneral: biases and the clamped activations too.
template <bool kGeneral>
struct ForwardEpilogue {
  // Pieces of 64 columns that wait for the next tile: both of FC1, the second half of FC2. All four
  // would need 216 registers for the GEMM alone.
  static constexpr int kNumDeferred = 2;
  static constexpr bool kPublishes = true;
  static constexpr bool kResumes = false;
  static constexpr int kLatePublishBlock = 0;
  static __device__ __forceinline__ bool publishes_late(const Tile&) { return false; }
  const ForwardCommon& common;
  const ForwardRank& rank;
  ForwardState& state;

  struct Prepared {
    float weight[2];      // of rows lane/4 and lane/4 + 8
    int32_t home, route;  // FC2: of row lane < 16
  };

  // Beside the main loop, which hides the latency: the origins were written before the rows were
  // ready.
  __device__ __forceinline__ Prepared prepare(const Tile& tile,
                                              const EpilogueWarp& known_warp) const {
    const EpilogueWarp warp = opaque(known_warp);
    Prepared prepared{};
    const pipeline::RowOrigin* origins =
        at<pipeline::RowOrigin>(rank, common.workspace.origins) + (tile.row_begin - shared_rows());
    if (kGeneral || is_fc1(tile)) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t row = warp.warp_row + warp.lane_idx / 4 + 8 * h;
        if (row >= tile.num_rows) continue;
        prepared.weight[h] =
            is_shared(tile) ? at<float>(rank, common.workspace.shared_weight)[tile.row_begin + row]
                            : __ldcg(&origins[row].weight);
      }
    }
    const int32_t row = warp.warp_row + warp.lane_idx;
    if (goes_home(tile) && warp.lane_idx < 16 && row < tile.num_rows) {
      prepared.home = __ldcg(&origins[row].rank);
      prepared.route = __ldcg(&origins[row].route);
    }
    if constexpr (kGeneral) {
      if (common.problem.expert_bias && !is_shared(tile)) prefetch_bias(tile, warp);
    }
    return prepared;
  }

  __device__ __forceinline__ void convert(float (&acc)[128], const Prepared& prepared,
                                          const Tile& tile, const EpilogueWarp& known_warp,
                                          uint32_t (&packed)[kNumDeferred][16]) const {
    const EpilogueWarp warp = opaque(known_warp);
    if constexpr (kGeneral) {
      if (common.problem.expert_bias && !is_shared(tile)) add_bias(acc, prepared, tile, warp);
    }
    if (is_fc1(tile)) {
      const expert::GemmOutput& z = is_shared(tile) ? rank.shared_z : rank.z;
      if (z.data != nullptr) store_z(acc, z, tile, warp);
#pragma unroll
      for (int32_t i = 0; i < 32; ++i) {
        packed[i / 16][i % 16] =
            expert::pack_bf16(hidden(acc[2 * i], acc[64 + 2 * i], prepared.weight[i % 2]),
                              hidden(acc[2 * i + 1], acc[64 + 2 * i + 1], prepared.weight[i % 2]));
      }
      return;
    }
    if (goes_home(tile) && warp.lane_idx < 16 && warp.warp_row + warp.lane_idx < tile.num_rows) {
      state.row_home[warp.warp_row / 16][warp.lane_idx] =
          heap_at<bf16>(common, RankId{prepared.home}, common.heap.returns) +
          prepared.route * common.problem.hidden;
    }
    // Rows that go home: the first two pieces wait in staging, the others in registers; all leave
    // beside the next tile's products.
#pragma unroll
    for (int32_t piece = 0; piece < 2; ++piece) {
      expert::pack_piece(acc, piece, packed[piece]);
      if (goes_home(tile))
        combine::stage_piece(packed[piece], expert::staging_of(warp, piece), warp.lane_idx);
      else
        store_piece(packed[piece], piece, tile, warp);
    }
#pragma unroll
    for (int32_t piece = 2; piece < 4; ++piece) expert::pack_piece(acc, piece, packed[piece - 2]);
  }

  // Stores what convert() left in packed[deferred].
  __device__ __forceinline__ void store(const uint32_t (&values)[16], int32_t deferred,
                                        const Tile& tile, const EpilogueWarp& known_warp) const {
    const EpilogueWarp warp = opaque(known_warp);
    if (!goes_home(tile)) {
      store_piece(values, is_fc1(tile) ? deferred : 2 + deferred, tile, warp);
      return;
    }
    if (tile.num_rows <= warp.warp_row) return;
    if (deferred == 0) push_home(common, state, 0, tile, warp);
    combine::stage_piece(values, expert::staging_of(warp, deferred), warp.lane_idx);
    if (deferred == 1) push_home(common, state, 1, tile, warp);
  }
  // The warp's part of the tile is stored: tells this CTA's ticket warp, which tells the others.
  __device__ __forceinline__ void publish(const Tile& tile, uint32_t tile_idx,
                                          const EpilogueWarp& warp) const {
    if (!goes_home(tile) && warp.lane_idx == 0) {
      // This lane's tensor copies have written global memory, and that becomes visible to the
      // generic proxy.
      ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
      ptx::fence_proxy_async(ptx::space_global);
    }
    __syncwarp();  // the other lanes' stores, to lane 0, whose arrival releases them
    if (warp.lane_idx == 0)
      ptx::mbarrier_arrive(&state.tile_stored[tile_idx % expert::kNumTicketSlots]);
  }

  __device__ __forceinline__ void drain(const EpilogueWarp& warp) const {
    expert::drain_stores(warp.lane_idx);
  }

 private:
  // One piece of the warp's rows to the matrix of the tile's product.
  __device__ __forceinline__ void store_piece(const uint32_t (&values)[16], int32_t piece,
                                              const Tile& tile, const EpilogueWarp& warp) const {
    const int32_t num_rows = tile.num_rows - warp.warp_row;
    if (num_rows <= 0) return;
    const int32_t first = tile.product == kFc1   ? hidden_row(tile)
                          : tile.product == kFc2 ? tile.row_begin - shared_rows()
                                                 : tile.row_begin;
    expert::store_piece(
        rank.outputs[tile.product], values, expert::staging_of(warp, piece), first + warp.warp_row,
        num_rows, tile.n_tile * (is_fc1(tile) ? BLOCK_N / 2 : BLOCK_N) + piece * 64, warp.lane_idx);
  }

  // FC2 rows of other ranks' tokens, unless they are only stored.
  __device__ __forceinline__ bool goes_home(const Tile& tile) const {
    return tile.product == kFc2 && common.plan.combine == CombineMode::epilogue;
  }
  __device__ __forceinline__ int32_t shared_rows() const {
    return static_cast<int32_t>(state.shared_blocks) * BLOCK_M;
  }
  __device__ __forceinline__ int32_t hidden_row(const Tile& tile) const {
    return static_cast<int32_t>(
               remainder(block_of(tile).v - state.shared_blocks, state.hidden_ring_blocks)) *
           BLOCK_M;
  }

  // A NaN fails the comparisons and stays a NaN.
  __device__ __forceinline__ float hidden(float gate, float up, float weight) const {
    if constexpr (kGeneral) {
      const Activation& a = common.problem.activation;
      float alpha = 1.0f, shift = 0.0f;
      if (a.kind != ActivationKind::swiglu) {
        gate = gate > a.limit ? a.limit : gate;
        up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
      }
      if (a.kind == ActivationKind::gpt_oss) alpha = a.alpha, shift = 1.0f;
      return gate * sigmoid_approx(alpha * gate) * (up + shift) * weight;
    } else {
      const float half_gate = 0.5f * gate;
      return fmaf(half_gate, device::tanh_approx(half_gate), half_gate) * up * weight;
    }
  }

  // z = [gate, up] for the backward, straight from the accumulators: there are no registers to
  // defer it.
  __device__ __forceinline__ void store_z(const float (&acc)[128], const expert::GemmOutput& z,
                                          const Tile& tile, const EpilogueWarp& warp) const {
    const int64_t intermediate = z.num_columns / 2,
                  block = is_shared(tile) ? 0 : state.table.routed_idx(block_of(tile));
    const int32_t num_rows = tile.num_rows - warp.warp_row;
    if (num_rows <= 0 || (!is_shared(tile) && block >= common.saved_blocks)) return;
    const int32_t row = is_shared(tile) ? tile.row_begin : static_cast<int32_t>(block) * BLOCK_M;
#pragma unroll
    for (int32_t piece = 0; piece < 4; ++piece) {
      const int32_t column = tile.n_tile * (BLOCK_N / 2) + piece % 2 * 64;
      // A piece past the last column is "stored" out of bounds: the staging buffers must alternate.
      const int32_t at = column < intermediate
                             ? column + piece / 2 * static_cast<int32_t>(intermediate)
                             : z.num_columns;
      uint32_t values[16];
      expert::pack_piece(acc, piece, values);
      expert::store_piece(z, values, expert::staging_of(warp, piece), row + warp.warp_row, num_rows,
                          at, warp.lane_idx);
    }
  }

  __device__ __forceinline__ void prefetch_bias(const Tile& tile, const EpilogueWarp& warp) const {
    const bool fc1 = is_fc1(tile);
    const int64_t width = fc1 ? common.problem.intermediate : common.problem.hidden,
                  column = tile.n_tile * (fc1 ? BLOCK_N / 2 : BLOCK_N),
                  first = tile.expert_idx * width + column;
    if (fc1)
      expert::prefetch_biases(rank.gate_bias + first, rank.up_bias + first, width - column,
                              width - column, warp);
    else
      expert::prefetch_biases(rank.down_bias + first, rank.down_bias + first + BLOCK_N / 2,
                              width - column, width - column - BLOCK_N / 2, warp);
  }

  // g += gate bias, u += up bias; y += w * down bias.
  __device__ __forceinline__ void add_bias(float (&acc)[128], const Prepared& prepared,
                                           const Tile& tile, const EpilogueWarp& warp) const {
    const bool fc1 = is_fc1(tile);
    expert::add_biases(acc, fc1 ? 1.0f : prepared.weight[0], fc1 ? 1.0f : prepared.weight[1], warp);
  }
};

}  // namespace moxie::backend_cuda
