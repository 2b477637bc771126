// What only the fused backward kernel gets from the host, beside pass_params.h.
//
// Rings: blocks of a pass, shared ones first, take slots in turn; slot s holds rows [128 s, 128 s +
// 128). The rings of one kind lie behind each other in one tensor, so that one map reaches all:
//   rows ring    [2, ring rows, H]   dY, then x (kDyPlane, kXPlane)
//   grad ring    [3, ring rows, W]   dgate, dup, w A (W = max(I, I_s)); gate and up of z lie in the
//                                    places of dgate and dup before them, where z is remade
// Tokens of the shared expert lie where the caller keeps them.
#pragma once

#include "moxie/backend_cuda/pass_params.h"
#include "moxie/expert/backward_gemm.h"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::backend_cuda {

// Planes of the rings.
inline constexpr int kDyPlane = 0, kXPlane = 1;
inline constexpr int kDgatePlane = 0, kDupPlane = 1, kWaPlane = 2;

// Tile::product: what a tile computes, and its twin of the shared expert.
enum BackwardProduct : std::uint8_t {
  kRemadeZ,  // FC1 without an activation
  kDgrad,
  kDx,
  kWgradGate,
  kWgradUp,
  kWgradDown,
  kNumBackwardKinds,
};

// What the products of one expert kind read and write. "By rows": box of 128 rows x 64 columns
// (device::encode_tensor_map). "By columns": box of 64 rows x 128 columns
// (device::encode_column_map), "bounded": the same, rows past a range's end read as zero
// (device::encode_bounded_column_map).
struct ExpertMaps {
  CUtensorMap dy_columns;    // routed: rows ring, dY plane; shared: dY. Bounded
  CUtensorMap x_columns;     // x, likewise; routed rows of the context where it keeps all of them
  CUtensorMap z;             // context [rows, 2 I], by rows; not set where nothing is saved
  CUtensorMap gate, up;      // [E, I, H], box 64 x 64 (device::encode_chunk_map): both ways
  CUtensorMap down_columns;  // [E, H, I], by columns
  // d(gate), d(up), d(down): [E * m, n]. BF16: box of 16 rows x 64 columns; FP32
  // (BackwardCommon::grads_are_float): of 16 x 32 (device::encode_float_map)
  CUtensorMap grads[3];
};

struct BackwardRank : PassRank {
  // where the maps point, and what is reached without one
  const bf16* dy;          // [T, H]
  const bf16* saved_x;     // [saved_blocks * 128, H] context or null
  float* d_route_weights;  // [T, K]
  float* d_gate_bias;      // [E_local, I] or null, as the next three
  float* d_up_bias;        // [E_local, I]
  float* d_down_bias;      // [E_local, H]
  float* d_output_gate;    // [H] of the shared expert
  ExpertMaps routed, shared;
  CUtensorMap dy_rows;         // rows ring, both planes, by rows
  CUtensorMap shared_dy_rows;  // [T, H]
  CUtensorMap shared_x_rows;   // [T, H] where z is remade
  CUtensorMap grad_rows;       // grad ring, all planes, by rows
  CUtensorMap grad_columns;    // the same, bounded
  CUtensorMap grad_stores;     // the same, box of 16 rows x 64 columns
};

struct BackwardCommon : PassCommon {
  static constexpr bool kOneLaunch = true;  // in every mode, and the schedule is always built
  std::int64_t ring_rows;                   // backward_ring_blocks * 128
  std::int64_t ring_width;                  // W
  bool grads_are_float;                     // of matrices; else BF16
  bool accumulate;                          // FP32: adds; experts without rows are left alone
  bool pulls_x;  // rows of x come with those of dY: the context does not keep all
  bool saves_z;  // the context keeps z of saved_blocks blocks and of all shared rows
};

template <int kNumLocalRanks>
struct BackwardParams {
  BackwardCommon common;
  BackwardRank ranks[kNumLocalRanks];
};
static_assert(sizeof(BackwardParams<kMaxLocalRanks>) <= kMaxParamBytes);

// As forward_kernel(). Takes BackwardParams<1 or kMaxLocalRanks>. Ring of BF16 rows; grid and
// launch attributes are those of the forward.
FusedKernel backward_kernel(bool general, bool several_ranks, int cluster_size);

}  // namespace moxie::backend_cuda
