// What only the fused forward kernel gets from the host, beside pass_params.h.
#pragma once

#include "moxie/backend_cuda/pass_params.h"
#include "moxie/expert/grouped_gemm_epilogues_cuda.cuh"

namespace moxie::backend_cuda {

// The operand sets of the expert GEMM; Tile::product.
enum Product : std::uint8_t { kFc1, kFc2, kSharedFc1, kSharedFc2, kNumProducts };

struct ForwardRank : PassRank {
  expert::GemmOperands operands[kNumProducts];
  expert::GemmOutput outputs[kNumProducts];  // hidden ring, y or unused, shared_hidden, shared_out
  expert::GemmOutput z, shared_z;            // [rows, 2 I] context, data = null: not saved
};

struct ForwardCommon : PassCommon {
  static constexpr bool kOneLaunch = false;        // split mode takes one per phase
  std::byte* workspaces[transport::kMaxGpuRanks];  // push dispatch writes there
  bf16* keep_x[transport::kMaxGpuRanks];  // [saved_blocks * 128, H] context or null, likewise
};

template <int kNumLocalRanks>
struct ForwardParams {
  ForwardCommon common;
  ForwardRank ranks[kNumLocalRanks];
};
static_assert(sizeof(ForwardParams<kMaxLocalRanks>) <= kMaxParamBytes);

// `general`: biases and clamped activations; else plain SwiGLU. Takes ForwardParams<1 or
// kMaxLocalRanks>.
// cluster_size 2: pairs of CTAs share B by multicast (slabs order).
FusedKernel forward_kernel(bool general, bool several_ranks, int cluster_size);

}  // namespace moxie::backend_cuda
