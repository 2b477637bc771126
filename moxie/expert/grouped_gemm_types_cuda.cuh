// The words of the grouped GEMM kernel: block sizes, tile, operands, shared memory, parameters.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include "moxie/core/dtype.h"
#include "moxie/device/bounded_wait.cuh"
#include "moxie/device/wgmma.cuh"

namespace moxie::expert {

namespace ptx = cuda::ptx;

inline constexpr int BLOCK_M = 128;
inline constexpr int BLOCK_N = 256;  // two halves of 128 columns, each with its own tensor map
inline constexpr int BLOCK_K = 64;   // one 128-byte swizzle row
inline constexpr int kNumStages = 4;
inline constexpr int kNumThreads = 384;
inline constexpr int kNumConsumerWarps = 8;
// The pieces of a tile are stored beside the next tile's first K blocks: there must be enough.
inline constexpr int kMinKBlocks = 4;
// A tile has at least as many K blocks as there are stages, so a producer is at most one tile ahead
// of the slowest consumer, and posts one more: three slots are in use, none is overwritten before
// it was read.
inline constexpr int kNumTicketSlots = 4;
static_assert(kMinKBlocks >= kNumStages);
inline constexpr uint32_t kStageBytes = (BLOCK_M + BLOCK_N) * BLOCK_K * sizeof(bf16);

// What is fixed when a kernel is built. Registers: 128 * producer + 256 * consumer <= 384 * 168.
// A type, not a value: nvcc 13.0 cannot launch kernels with a class-type template value.
template <int kCtas, int kProducer = 40, int kConsumer = 232>
struct GemmConfig {
  static constexpr int kClusterSize = kCtas;
  static constexpr int kProducerRegisters = kProducer;
  static constexpr int kConsumerRegisters = kConsumer;
  static_assert(128 * kProducer + 256 * kConsumer <= kNumThreads * 168);
};

// One output tile of one CTA, as the ticket warp hands it to the other roles (16 bytes, one
// st.async).
struct alignas(16) Tile {
  int32_t row_begin;   // first row of A and C, a multiple of 64
  int32_t n_tile;      // which group of columns of C
  int32_t expert_idx;  // which matrix of B
  uint16_t num_rows;   // real rows; 0 (partner of an odd last block): nothing is written
  uint8_t product;     // which of the kernel's operand sets
  uint8_t kind;        // TileKind
};
// Majors of A and of B: a branch of the loop each.
enum class Majors : uint8_t { k_k, k_mn, mn_mn };
enum TileKind : uint8_t { kNoMoreTiles = 0, kOwnB = 1, kSharedB = 2 };

// What one product reads. The two halves of a tile's B are separate matrices for gate/up,
// neighbouring column groups of one matrix otherwise.
//
// A type of operands is a policy: how they lie in a stage (majors), how many K blocks a tile has,
// how a stage is loaded (an overload of load_stage), and how many more stages follow the K blocks
// of some tiles (has_epilogue_stages), whose contents only the epilogue reads. The backward's:
// backward_gemm_operands_cuda.cuh.
struct GemmOperands {
  static __device__ __forceinline__ Majors majors_of(const Tile&) { return Majors::k_k; }
  static constexpr int kNumEpilogueStages = 0;
  static __device__ __forceinline__ bool has_epilogue_stages(const Tile&) { return false; }
  CUtensorMap a;         // [rows, K], box 128 x 64
  CUtensorMap b[2];      // [E, N, K], box 128 x 64, for each half
  int32_t num_k_blocks;  // ceil(K / BLOCK_K), at least kMinKBlocks; what is past K reads as zero
  int32_t n_step;        // columns of B from one n_tile to the next
  int32_t half_offset;   // columns of B from half 0 to half 1 of a tile
};

__device__ __forceinline__ int32_t k_blocks_of(const GemmOperands& operands, const Tile&) {
  return operands.num_k_blocks;
}

struct TicketCounter {
  uint32_t next;  // next ticket; both are 0 between launches: the last CTA to leave resets them
  uint32_t num_done;
};

enum WaitSite : uint32_t {
  kWaitStageFull = 1,
  kWaitStageEmpty,
  kWaitTicket,
  kWaitTileBegun,
  kWaitReadiness,
  kWaitTicketRead,
  kWaitGathered
};

// A tile whose rows of A a warp of their own fetches: from stage stage_count on. Two slots: a tile
// is posted when at least kMinKBlocks stages of the one before are, so those of the one before that
// were read.
inline constexpr int kNumGatherSlots = 2;
inline constexpr uint32_t kGatherArrivals = 32;  // per stage, one a lane
struct GatheredTile {
  Tile tile;  // as its ticket says it
  uint32_t ticket_count, stage_count;
  int32_t num_k_blocks;  // 0: no tile, the last word
};

template <class Schedule>
struct alignas(1024) GemmShared {
  bf16 a[kNumStages][BLOCK_M * BLOCK_K];
  bf16 b[kNumStages][BLOCK_N * BLOCK_K];
  bf16 staging[kNumConsumerWarps][2][16 * 64];  // epilogue: two 16 x 64 pieces per warp
  uint64_t stage_full[kNumStages];
  uint64_t stage_empty[kNumStages];
  uint64_t ticket_full[kNumTicketSlots];
  uint64_t ticket_read[kNumTicketSlots];  // of CTA 0, where the ticket warp only posts
  uint64_t tile_begun;
  uint64_t gather_posted[kNumGatherSlots], gather_ready[kNumGatherSlots];
  GatheredTile gathered[kNumGatherSlots];
  uint32_t places[BLOCK_M];  // of the gathering warp
  Tile tickets[kNumTicketSlots];
  typename Schedule::Shared schedule;
};

template <class Schedule, class Readiness, class Epilogue, int kNumProducts,
          class Operands = GemmOperands>
struct GemmParams {
  Operands operands[kNumProducts];
  Epilogue epilogue;
  Schedule schedule;
  Readiness readiness;
  TicketCounter* tickets;
  device::WaitLimits limits;
};

// A place in a ring of slots that is walked round and round (one register).
template <int kNumSlots>
struct RingPosition {
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t slot_idx() const { return count % kNumSlots; }
  __device__ __forceinline__ uint32_t previous_slot_idx() const {
    return (count + kNumSlots - 1) % kNumSlots;
  }
  __device__ __forceinline__ uint32_t parity() const { return count / kNumSlots & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

// What an epilogue needs to know of the warp it runs in.
struct EpilogueWarp {
  bf16* staging;     // [2][16 * 64], this warp's own
  int32_t warp_row;  // first of the warp's 16 rows within the tile
  int32_t lane_idx;
};

// A thread's own part of its warp's staging, as its sums of one piece: 32 of them, four in a row,
// fours 32 apart.
__device__ __forceinline__ float4* own_sums(const EpilogueWarp& warp) {
  return reinterpret_cast<float4*>(warp.staging) + warp.lane_idx;
}
template <int kNumPieces>
__device__ __forceinline__ void put_aside(const float (&acc)[128], int32_t piece,
                                          const EpilogueWarp& warp) {
  constexpr int kNumSums = 128 / kNumPieces;
  static_assert(kNumSums * 32 * sizeof(float) <= sizeof(bf16[2][16 * 64]));
  float4* own = own_sums(warp);
#pragma unroll
  for (int p = 0; p < kNumPieces; ++p) {
    if (p != piece) continue;
#pragma unroll
    for (int i = 0; i < kNumSums; i += 4) {
      const float* from = acc + p * kNumSums + i;
      own[i / 4 * 32] = make_float4(from[0], from[1], from[2], from[3]);
    }
  }
}

}  // namespace moxie::expert
