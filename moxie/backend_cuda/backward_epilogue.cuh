// The fused backward's policy for the expert GEMM loop, after the product: what becomes of the
// accumulators. Rounding points are those of expert/expert.h; the CPU twin is roles_compute.h.
#pragma once

#include "moxie/backend_cuda/backward_policies.cuh"
#include "moxie/backend_cuda/pass_epilogue.cuh"
#include "moxie/expert/backward_gemm_epilogues_cuda.cuh"
#include "moxie/expert/bias_cuda.cuh"

namespace moxie::backend_cuda {

// kGeneral: biases and the clamped activations too.
template <bool kGeneral>
struct BackwardEpilogue {
  static constexpr int kNumDeferred = 2;  // second halves of dX and of BF16 weight gradients
  static constexpr bool kPublishes = true;
  static constexpr bool kResumes = true;
  // dgrad's 192 KB of results are on the way for longer than two K blocks last.
  static constexpr int kLatePublishBlock = 10;
  static __device__ __forceinline__ bool publishes_late(const Tile& tile) {
    return kind_of(tile) < kDx;
  }
  using Backward = expert::ActivationBackward<kGeneral>;
  struct Sums : Backward::Sums {
    int32_t ring_row;  // of the warp's first row
  };
  const BackwardCommon& common;
  const BackwardRank& rank;
  BackwardState& state;

  struct Prepared {
    float weight[2];      // of rows lane/4 and lane/4 + 8; shared dX: gradients of the gate's logit
    int32_t home, route;  // dX: of row lane < 16
  };

  // ---- weight gradients that go on from an earlier chunk ----

  __device__ __forceinline__ bool resumes(const Tile& tile) const {
    return is_wgrad(tile) && continues(tile);
  }
  __device__ __forceinline__ void resume(float (&acc)[128], const Tile& tile,
                                         const EpilogueWarp& warp) const {
    const float4* from = partial_sums(tile, warp);
#pragma unroll
    for (int32_t i = 0; i < 32; ++i) {
      const float4 v = __ldcg(from + i * (kNumSumThreads));
      acc[4 * i] = v.x, acc[4 * i + 1] = v.y, acc[4 * i + 2] = v.z, acc[4 * i + 3] = v.w;
    }
  }

  // ---- beside the main loop, which hides the latency ----

  static constexpr bool prepares(Majors majors) { return majors != Majors::mn_mn; }

  __device__ __forceinline__ Prepared prepare(const Tile& tile,
                                              const EpilogueWarp& known_warp) const {
    const EpilogueWarp warp = opaque(known_warp);
    Prepared prepared{};
    const int32_t kind = kind_of(tile);
    if (kind == kDgrad) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t row = warp.warp_row + warp.lane_idx / 4 + 8 * h;
        if (row >= tile.num_rows) continue;
        prepared.weight[h] = is_shared(tile) ? shared_weights()[tile.row_begin + row]
                                             : __ldcg(&origins(tile)[row].weight);
      }
    } else if (kind == kDx) {
      if (is_shared(tile)) {
        if (rank.shared_output_gate != nullptr) prepare_logits(prepared, tile, warp);
      } else {
        prepare_homes(prepared, tile, warp);
      }
    }
    if constexpr (kGeneral) {
      if (kind == kRemadeZ && has_bias(tile)) {
        const int64_t width = common.problem.intermediate, column = tile.n_tile * (BLOCK_N / 2);
        const int64_t first = expert_of(tile) * width + column;
        expert::prefetch_biases(rank.gate_bias + first, rank.up_bias + first, width - column,
                                width - column, warp);
      }
    }
    return prepared;
  }

  // ---- dgrad: in the stages that hold z ----

  __device__ __forceinline__ Sums begin(const Prepared&, const Tile& tile,
                                        const EpilogueWarp& warp) const {
    free_staging(warp);
    return {{{0.0f, 0.0f}}, ring_row(tile, 0) + warp.warp_row};
  }

  // Columns 64 * piece .. + 63 of the tile.
  __device__ __forceinline__ void convert_stage(const float4* own, const Prepared& prepared,
                                                Sums& sums, const Tile& tile, int32_t piece,
                                                const EpilogueWarp& known_warp, bf16* stage_a,
                                                bf16* stage_b) const {
    const EpilogueWarp warp = opaque(known_warp);
    const int32_t num_rows = tile.num_rows - warp.warp_row,
                  column = tile.n_tile * BLOCK_N + piece * 64;
    if (num_rows > 0 && column < intermediate(tile)) {
      uint8_t* gate_piece = reinterpret_cast<uint8_t*>(stage_b + warp.warp_row * 64);
      uint8_t* up_piece = gate_piece + BLOCK_M * 128;
      uint8_t* wa_piece = reinterpret_cast<uint8_t*>(stage_a + warp.warp_row * 64);
      Backward::convert_piece(common.problem.activation, own, prepared.weight, sums, gate_piece,
                              up_piece, wa_piece, warp.lane_idx);
      const auto piece_of = [&](int32_t plane, const uint8_t* from) {
        const int32_t row = sums.ring_row + plane * static_cast<int32_t>(common.ring_rows);
        return expert::StagePiece{rank.grad_stores, row,
                                  grad_ring() + row * common.ring_width + column, from};
      };
      const expert::StagePiece pieces[3] = {piece_of(kDgatePlane, gate_piece),
                                            piece_of(kDupPlane, up_piece),
                                            piece_of(kWaPlane, wa_piece)};
      expert::store_from_stage(pieces, column, common.ring_width, num_rows, warp.lane_idx);
    }
    // One group per stage: its release waits for it.
    if (warp.lane_idx == 0) ptx::cp_async_bulk_commit_group();
  }

  __device__ __forceinline__ void finish(const Sums& sums, const Tile& tile,
                                         const EpilogueWarp& known_warp) const {
    const EpilogueWarp warp = opaque(known_warp);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float sum = Backward::row_sum(sums, h);
      const int32_t row = warp.lane_idx / 4 + 8 * h;
      if (warp.lane_idx % 4 == 0 && warp.warp_row + row < tile.num_rows)
        row_sums(common, rank, sums.ring_row + row)[tile.n_tile] = sum;
    }
  }

  // ---- all others ----

  __device__ __forceinline__ void convert(float (&acc)[128], const Prepared& prepared,
                                          const Tile& tile, const EpilogueWarp& known_warp,
                                          uint32_t (&packed)[kNumDeferred][16]) const {
    const EpilogueWarp warp = opaque(known_warp);
    const int32_t kind = kind_of(tile);
    if (stores_at_once(tile, warp)) [[unlikely]] {
      store_at_once(acc, tile, warp);
      expert::defer_nothing(packed);
      return;
    }
    free_staging(warp);
    if (kind == kDx) {
      if (is_shared(tile) && rank.shared_output_gate != nullptr)
        add_gate(acc, prepared, tile, warp);
      if (warp.lane_idx < 16 && warp.warp_row + warp.lane_idx < tile.num_rows) {
        state.row_home[warp.warp_row / 16][warp.lane_idx] =
            is_shared(tile)
                ? at<bf16>(rank, common.workspace.shared_out) +
                      (tile.row_begin + warp.warp_row + warp.lane_idx) * common.problem.hidden
                : heap_at<bf16>(common, RankId{prepared.home}, common.heap.returns) +
                      prepared.route * common.problem.hidden;
      }
    }
    // The first two pieces wait in staging (dX) or leave at once, the others wait in registers; all
    // that waits leaves beside the next tile's products.
#pragma unroll
    for (int32_t piece = 0; piece < 2; ++piece) {
      expert::pack_piece(acc, piece, packed[piece]);
      combine::stage_piece(packed[piece], expert::staging_of(warp, piece), warp.lane_idx);
    }
    if (kind != kDx) {
      ptx::fence_proxy_async(ptx::space_shared);  // this lane's part of both, to the copy engine
      __syncwarp();
      send_grads<2>(0, tile, warp);
    }
#pragma unroll
    for (int32_t piece = 2; piece < 4; ++piece) expert::pack_piece(acc, piece, packed[piece - 2]);
  }

  // Stores what convert() left in packed[deferred].
  __device__ __forceinline__ void store(const uint32_t (&values)[16], int32_t deferred,
                                        const Tile& tile, const EpilogueWarp& known_warp) const {
    const int32_t kind = kind_of(tile);
    if (kind < kDx || tile.num_rows <= known_warp.warp_row) return;
    const EpilogueWarp warp = opaque(known_warp);
    if (kind == kDx) {
      if (deferred == 0) push_home(common, state, 0, tile, warp);
      combine::stage_piece(values, expert::staging_of(warp, deferred), warp.lane_idx);
      if (deferred == 1) push_home(common, state, 1, tile, warp);
    } else if (ends(tile) && !common.grads_are_float) {
      store_grad(values, deferred, tile, warp);
    }
  }

  // The warp's part of the tile is stored: tells this CTA's ticket warp, which tells the others.
  __device__ __forceinline__ void publish(const Tile& tile, uint32_t tile_idx,
                                          const EpilogueWarp& warp) const {
    if (warp.lane_idx == 0 && kind_of(tile) < kDx) {
      // This lane's tensor copies have written global memory, and that becomes visible to the
      // generic proxy. (Nobody reads weight gradients in this pass.)
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
  static constexpr int32_t kNumSumThreads = expert::kNumConsumerWarps * 32;

  // Waits until no copy of an earlier tile reads the warp's staging.
  static __device__ __forceinline__ void free_staging(const EpilogueWarp& warp) {
    if (warp.lane_idx == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
    __syncwarp();
  }

  // ---- where things are ----

  __device__ __forceinline__ int32_t intermediate(const Tile& tile) const {
    return BackwardOperand{common, rank}.intermediate(tile);
  }
  __device__ __forceinline__ bool has_bias(const Tile& tile) const {
    return common.problem.expert_bias && !is_shared(tile);
  }
  __device__ __forceinline__ const pipeline::RowOrigin* origins(const Tile& tile) const {
    return at<pipeline::RowOrigin>(rank, common.workspace.origins) +
           (tile.row_begin - static_cast<int32_t>(state.shared_blocks) * BLOCK_M);
  }
  __device__ __forceinline__ const float* shared_weights() const {
    return at<float>(rank, common.workspace.shared_weight);
  }
  // First row of the tile's block in a plane of the grad ring.
  __device__ __forceinline__ int32_t ring_row(const Tile& tile, int32_t plane) const {
    return state.slot_of(block_of(tile).v) * BLOCK_M +
           plane * static_cast<int32_t>(common.ring_rows);
  }
  __device__ __forceinline__ bf16* grad_ring() const {
    return at<bf16>(rank, common.workspace.dgate_ring);
  }
  __device__ __forceinline__ const ExpertMaps& maps(const Tile& tile) const {
    return is_shared(tile) ? rank.shared : rank.routed;
  }
  __device__ __forceinline__ const CUtensorMap& grad_map(const Tile& tile) const {
    return maps(tile).grads[kind_of(tile) - kWgradGate];
  }
  __device__ __forceinline__ int32_t grad_columns(const Tile& tile) const {
    return kind_of(tile) == kWgradDown ? intermediate(tile)
                                       : static_cast<int32_t>(common.problem.hidden);
  }

  // Remade z, and weight gradients other than the last sums of an expert in BF16.
  __device__ __forceinline__ bool stores_at_once(const Tile& tile, const EpilogueWarp& warp) const {
    const int32_t kind = kind_of(tile);
    return kind == kRemadeZ || (kind >= kWgradGate && (common.grads_are_float || !ends(tile) ||
                                                       tile.num_rows <= warp.warp_row));
  }
  __device__ __forceinline__ void store_at_once(float (&acc)[128], const Tile& tile,
                                                const EpilogueWarp& warp) const {
    if (kind_of(tile) == kRemadeZ) {
      store_z(acc, tile, warp);
    } else if (tile.num_rows <= warp.warp_row) {  // all 16 rows are real, or none
    } else if (!ends(tile)) {
      put_sums_aside(acc, tile, warp);
    } else {
      expert::store_float_rows(acc, grad_map(tile), tile.row_begin + warp.warp_row,
                               column_tile_of(tile) * BLOCK_N, grad_columns(tile),
                               common.accumulate, warp);
    }
  }

  // ---- z ----

  __device__ __forceinline__ void store_z(float (&acc)[128], const Tile& tile,
                                          const EpilogueWarp& warp) const {
    if constexpr (kGeneral) {
      if (has_bias(tile)) expert::add_biases(acc, 1.0f, 1.0f, warp);
    }
    const int32_t num_rows = tile.num_rows - warp.warp_row;
    if (num_rows <= 0) return;
#pragma unroll
    for (int32_t piece = 0; piece < 4; ++piece) {
      uint32_t values[16];
      expert::pack_piece(acc, piece, values);
      // A piece past the last column is "stored" out of bounds: the staging buffers must alternate.
      const int32_t column = tile.n_tile * (BLOCK_N / 2) + piece % 2 * 64;
      expert::store_piece(
          expert::PieceTarget{rank.grad_stores, grad_ring(), common.ring_width, intermediate(tile)},
          values, expert::staging_of(warp, piece),
          ring_row(tile, piece < 2 ? kDgatePlane : kDupPlane) + warp.warp_row, num_rows, column,
          warp.lane_idx);
    }
  }

  // ---- dX ----

  // Homes of the rows; with the first columns also d(route weight) to its home.
  __device__ __forceinline__ void prepare_homes(Prepared& prepared, const Tile& tile,
                                                const EpilogueWarp& warp) const {
    const int32_t row = warp.warp_row + warp.lane_idx;
    if (warp.lane_idx >= 16 || row >= tile.num_rows) return;
    prepared.home = __ldcg(&origins(tile)[row].rank);
    prepared.route = __ldcg(&origins(tile)[row].route);
    if (tile.n_tile != 0) return;
    float sum = row_sum(common, rank, ring_row(tile, 0) + row, state.stream.dgrad_tiles);
    if constexpr (kGeneral) {
      if (has_bias(tile)) {
        sum += __ldcg(at<float>(rank, common.cuda_workspace.dy_bias) +
                      (tile.row_begin - static_cast<int32_t>(state.shared_blocks) * BLOCK_M) + row);
      }
    }
    heap_at<float>(common, RankId{prepared.home}, common.heap.d_weights)[prepared.route] = sum;
  }

  // Shared rows: gradients of the output gate's logit.
  __device__ __forceinline__ void prepare_logits(Prepared& prepared, const Tile& tile,
                                                 const EpilogueWarp& warp) const {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = warp.warp_row + warp.lane_idx / 4 + 8 * h;
      if (row >= tile.num_rows) continue;
      prepared.weight[h] = logit_grad(common, rank, state, tile.row_begin + row);
    }
  }
  __device__ __forceinline__ void add_gate(float (&acc)[128], const Prepared& prepared,
                                           const Tile& tile, const EpilogueWarp& warp) const {
    const int32_t first = tile.n_tile * BLOCK_N + warp.lane_idx % 4 * 2;
    const auto* gate = reinterpret_cast<const uint32_t*>(rank.shared_output_gate + first);
#pragma unroll  // all of it: acc has no addresses
    for (int32_t j = 0; j < 32; ++j) {
      const uint32_t pair = first + 8 * j < common.problem.hidden ? __ldg(gate + 4 * j) : 0;
      const float columns[2] = {expert::low_bf16(pair), expert::high_bf16(pair)};
#pragma unroll
      for (int32_t i = 0; i < 4; ++i)
        acc[4 * j + i] = fmaf(prepared.weight[i / 2], columns[i % 2], acc[4 * j + i]);
    }
  }

  // ---- weight gradients ----

  // Piece 2 or 3, by tensor copy: rows come in 64s, so all 16 are real.
  __device__ __forceinline__ void store_grad(const uint32_t (&values)[16], int32_t deferred,
                                             const Tile& tile, const EpilogueWarp& warp) const {
    // Pieces 0 and 1 left together, from both buffers; piece 2 may still leave from the other one.
    if (deferred == 0)
      free_staging(warp);
    else if (warp.lane_idx == 0)
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
    combine::stage_piece(values, expert::staging_of(warp, deferred), warp.lane_idx);
    ptx::fence_proxy_async(ptx::space_shared);  // this lane's part, to the copy engine
    __syncwarp();
    send_grads<1>(2 + deferred, tile, warp);
  }
  // Staged pieces, as one group of copies.
  template <int kNum>
  __device__ __forceinline__ void send_grads(int32_t first, const Tile& tile,
                                             const EpilogueWarp& warp) const {
    if (warp.lane_idx != 0) return;
    const int32_t column = column_tile_of(tile) * BLOCK_N + first * 64,
                  num_columns = grad_columns(tile), row = tile.row_begin + warp.warp_row;
    const CUtensorMap& map = grad_map(tile);
#pragma unroll
    for (int32_t i = 0; i < kNum; ++i) {
      if (column + 64 * i < num_columns)
        ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map,
                                  {column + 64 * i, row, 0}, expert::staging_of(warp, first + i));
    }
    ptx::cp_async_bulk_commit_group();  // an empty one too: waits count groups
  }

  // This thread's sums of a tile: 16 bytes every kNumSumThreads.
  __device__ __forceinline__ float4* partial_sums(const Tile& tile,
                                                  const EpilogueWarp& warp) const {
    const int32_t width = intermediate(tile), kind = kind_of(tile) - kWgradGate,
                  hidden = static_cast<int32_t>(common.problem.hidden);
    const auto row_tiles = [](int32_t rows) { return (rows + BLOCK_M - 1) / BLOCK_M; };
    const int32_t m = kind == 2 ? hidden : width,
                  tiles_before = kind * row_tiles(width) * ((hidden + BLOCK_N - 1) / BLOCK_N);
    const int32_t tile_idx =
        tiles_before + column_tile_of(tile) * row_tiles(m) + tile.row_begin % m / BLOCK_M;
    return at<float4>(rank, common.cuda_workspace.partial_tiles) +
           int64_t{tile_idx} * (32 * kNumSumThreads) + (warp.warp_row / 16 * 32 + warp.lane_idx);
  }
  __device__ __forceinline__ void put_sums_aside(const float (&acc)[128], const Tile& tile,
                                                 const EpilogueWarp& warp) const {
    float4* to = partial_sums(tile, warp);
#pragma unroll
    for (int32_t i = 0; i < 32; ++i) {
      __stcg(to + i * kNumSumThreads,
             make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    }
  }
};

}  // namespace moxie::backend_cuda
