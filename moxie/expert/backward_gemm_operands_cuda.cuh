// What the backward's products read, and how a stage of it is loaded (policies of
// grouped_gemm_cuda.cuh).
//
// Weights [K, N] and rows [K, M] are read along their columns: MN-major operands, no transposed
// copies. A stage then holds chunks of 64 rows of K x 64 columns (device/wgmma.cuh): two for A,
// four for B, a half of B is two.
#pragma once

#include "moxie/device/tensor_map.h"
#include "moxie/expert/grouped_gemm_cuda.cuh"

namespace moxie::expert {

// ---- a stage, piece by piece ----

// B [64 rows of K, 256 columns]: both halves, or one half to both CTAs. coordinates(half) are the
// map's.
template <int kClusterSize, class Coordinates>
__device__ __forceinline__ void load_columns_of_b(bf16* b, uint64_t* full, const CUtensorMap& map,
                                                  const Tile& tile, Coordinates coordinates) {
  constexpr int kHalf = BLOCK_N / 2 * BLOCK_K;
  if (kClusterSize == 2 && tile.kind == kSharedB) {
    const int32_t half = ptx::get_sreg_cluster_ctarank();
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, b + half * kHalf, &map,
                              coordinates(half).at, full, uint16_t{3});
  } else {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, b + half * kHalf, &map,
                                coordinates(half).at, full);
    }
  }
}

template <int kRank>
struct MapCoordinates {
  int32_t at[kRank];
};

// ---- dgrad and dX: rows times weights [E, K, N] ----

// C = sum over parts of A_part B_part: dX has two, gate and up, one after the other along K.
template <int kParts>
struct RowOperands {
  static __device__ __forceinline__ Majors majors_of(const Tile&) { return Majors::k_mn; }
  static constexpr int kNumEpilogueStages = 0;
  static __device__ __forceinline__ bool has_epilogue_stages(const Tile&) { return false; }
  CUtensorMap a[kParts];  // [rows, K], box 128 x 64
  CUtensorMap b[kParts];  // [E, K, N], by columns
  int32_t part_k_blocks;  // ceil(K / BLOCK_K); what is past K reads as zero
  int32_t num_k_blocks;   // of all parts, at least kMinKBlocks
};

template <int kParts>
__device__ __forceinline__ int32_t k_blocks_of(const RowOperands<kParts>& operands, const Tile&) {
  return operands.num_k_blocks;
}

template <int kClusterSize, int kParts, class Shared>
__device__ __forceinline__ bool load_stage(Shared& shared, const RowOperands<kParts>& operands,
                                           const Tile& tile, int32_t k,
                                           const RingPosition<kNumStages>& stage,
                                           const device::WaitLimits& limits) {
  if (!open_stage(shared, stage, kStageBytes, limits)) return false;
  uint64_t* full = &shared.stage_full[stage.slot_idx()];
  const int32_t part = kParts == 2 && k >= operands.part_k_blocks * BLOCK_K;
  k -= part * operands.part_k_blocks * BLOCK_K;
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared.a[stage.slot_idx()],
                            &operands.a[part], {k, tile.row_begin, 0}, full);
  load_columns_of_b<kClusterSize>(
      shared.b[stage.slot_idx()], full, operands.b[part], tile, [&](int32_t half) {
        return MapCoordinates<4>{{0, k, tile.n_tile * (BLOCK_N / 64) + half * 2, tile.expert_idx}};
      });
  return true;
}

// dgrad: four stages follow the K blocks, each with 64 columns of gate and of up in the two halves
// of B's place.
struct DgradOperands : RowOperands<1> {
  static constexpr int kNumEpilogueStages = BLOCK_N / 64;
  static __device__ __forceinline__ bool has_epilogue_stages(const Tile&) { return true; }
  CUtensorMap gate, up;  // [rows, I] with the rows of z, box 128 x 64
};

template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_stage(Shared& shared, const DgradOperands& operands,
                                           const Tile& tile, int32_t k,
                                           const RingPosition<kNumStages>& stage,
                                           const device::WaitLimits& limits) {
  const int32_t in_epilogue = k - operands.num_k_blocks * BLOCK_K;
  if (in_epilogue < 0) {
    return load_stage<kClusterSize>(shared, static_cast<const RowOperands<1>&>(operands), tile, k,
                                    stage, limits);
  }
  constexpr int kHalf = BLOCK_N / 2 * BLOCK_K;
  constexpr uint32_t kPieceBytes = BLOCK_M * 64 * sizeof(bf16);
  if (!open_stage(shared, stage, 2 * kPieceBytes, limits)) return false;
  uint64_t* full = &shared.stage_full[stage.slot_idx()];
  bf16* b = shared.b[stage.slot_idx()];
  const int32_t column = tile.n_tile * BLOCK_N + in_epilogue;
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, b, &operands.gate,
                            {column, tile.row_begin, 0}, full);
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, b + kHalf, &operands.up,
                            {column, tile.row_begin, 0}, full);
  return true;
}

// ---- wgrad: an expert's rows are K ----

// A wgrad tile has fields of its own meaning: row_begin counts rows of [E * m, n], and the place of
// the expert's index holds its number of rows, that of the column tile its first block too.
__device__ __forceinline__ Tile wgrad_tile(int32_t row_begin, int32_t n_tile, int32_t first_block,
                                           int32_t num_k) {
  return {row_begin, n_tile | first_block << 16, num_k, 0, 0, kNoMoreTiles};
}
__device__ __forceinline__ int32_t n_tile_of_wgrad(const Tile& tile) {
  return tile.n_tile & 0xFFFF;
}
__device__ __forceinline__ int32_t k_begin_of_wgrad(const Tile& tile) {
  return static_cast<int32_t>(static_cast<uint32_t>(tile.n_tile) >> 16) * BLOCK_M;
}
__device__ __forceinline__ int32_t num_k_of_wgrad(const Tile& tile) { return tile.expert_idx; }

struct WgradOperands {
  static __device__ __forceinline__ Majors majors_of(const Tile&) { return Majors::mn_mn; }
  static constexpr int kNumEpilogueStages = 0;
  static __device__ __forceinline__ bool has_epilogue_stages(const Tile&) { return false; }
  CUtensorMap a;  // [rows, m], by columns, rows bounded by the expert's count
  CUtensorMap b;  // [rows, n], likewise
  int32_t m;
};

// An expert without rows has K blocks too, of zeros: its gradient is written like any other.
__device__ __forceinline__ int32_t k_blocks_of(const WgradOperands&, const Tile& tile) {
  return max((num_k_of_wgrad(tile) + BLOCK_K - 1) / BLOCK_K, kMinKBlocks);
}

template <int kClusterSize, class Shared>
__device__ __forceinline__ bool load_stage(Shared& shared, const WgradOperands& operands,
                                           const Tile& tile, int32_t k,
                                           const RingPosition<kNumStages>& stage,
                                           const device::WaitLimits& limits) {
  if (!open_stage(shared, stage, kStageBytes, limits)) return false;
  uint64_t* full = &shared.stage_full[stage.slot_idx()];
  const int32_t num_k = num_k_of_wgrad(tile), k_end = k_begin_of_wgrad(tile) + num_k;
  const auto coordinates = [&](int32_t chunk) {
    return MapCoordinates<5>{{0, device::kRowBound - num_k + k, chunk, k_end, device::kRowBound}};
  };
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared.a[stage.slot_idx()],
                            &operands.a, coordinates(tile.row_begin % operands.m / 64).at, full);
  load_columns_of_b<kClusterSize>(
      shared.b[stage.slot_idx()], full, operands.b, tile,
      [&](int32_t half) { return coordinates(n_tile_of_wgrad(tile) * (BLOCK_N / 64) + half * 2); });
  return true;
}

}  // namespace moxie::expert
