// A of the GEMM loop, row by row from where each row lies: a warp copies 16 bytes per lane and
// instruction into a stage as a tensor copy would swizzle them. Whoever has rows in several places
// need not bring them together first. The loading lane names the tile, waits for its rows and loads
// B.
//
// cp.async writes through the generic proxy, the tensor cores read through the async one: each lane
// arrives at the stage's barrier when its copies have (kGatherArrivals, beside the bytes of B), and
// the consumers fence when they have waited for it.
#pragma once

#include <cuda/ptx>

#include "moxie/device/bounded_wait.cuh"
#include "moxie/device/cp_async.cuh"
#include "moxie/device/signal.cuh"
#include "moxie/expert/grouped_gemm_types_cuda.cuh"

namespace moxie::expert {

namespace ptx = cuda::ptx;

// Where rows lie: row i at the base that bit 31 of place[i] names, plus its lower bits, in chunks
// of 16 bytes. Its upper 32 bits say which pass wrote it, so that it can be asked for before the
// rows are waited for.
struct RowPlaces {
  static constexpr uint32_t kSecond = 1u << 31;
  const uint4 *first, *second;
  const uint64_t* place;
  uint32_t epoch;
  int32_t num_columns;
};

// The whole warp: the places of a tile's rows, to shared memory; kUnknown of those that dispatch
// has not written yet. (No row lies there: a row has more than one chunk.)
inline constexpr uint32_t kUnknownPlace = ~0u;
__device__ __forceinline__ void ask_places(const RowPlaces& rows, int64_t first_row,
                                           int32_t num_rows, uint32_t (&places)[BLOCK_M]) {
  uint64_t place[BLOCK_M / 32];
#pragma unroll
  for (int i = 0; i < BLOCK_M / 32; ++i) {
    const int32_t row = 32 * i + threadIdx.x % 32;
    // Rows past the real ones are not used, whatever is loaded for them.
    place[i] = row < num_rows ? device::load_relaxed_gpu(rows.place + first_row + row)
                              : uint64_t{rows.epoch} << 32 | RowPlaces::kSecond;
  }
  __syncwarp();  // all have read the places of the tile before
#pragma unroll
  for (int i = 0; i < BLOCK_M / 32; ++i) {
    places[32 * i + threadIdx.x % 32] =
        place[i] >> 32 == rows.epoch ? static_cast<uint32_t>(place[i]) : kUnknownPlace;
  }
  __syncwarp();
}

// The rows of a tile, 8 lanes a row. Pointers, not offsets: an address's registers must not be
// written again before its copy has left the warp, and to wait for that at each copy takes longer
// than to multiply the stage.
class GatheredRows {
  static constexpr int kRowsPerCopy = 4, kCopies = BLOCK_M / kRowsPerCopy,
                       kStepBytes = BLOCK_K * sizeof(bf16);
  const uint4* source_[kCopies];
  uint32_t even_, odd_;  // bytes from the stage to this lane's first two chunks
  int32_t num_columns_;

 public:
  // The whole warp. False: some place was unknown.
  __device__ __forceinline__ bool find(const RowPlaces& rows, const uint32_t (&places)[BLOCK_M]) {
    const int32_t lane_idx = threadIdx.x % 32, first = lane_idx / 8, chunk = lane_idx % 8;
    bool all_known = true;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t place = places[first + kRowsPerCopy * i];
      all_known &= place != kUnknownPlace;
      source_[i] = ((place & RowPlaces::kSecond) != 0 ? rows.second : rows.first) +
                   (place & ~RowPlaces::kSecond) + chunk;
      asm volatile("" : "+l"(source_[i]));  // not a base and an index, in twice the registers
    }
    // 16-byte chunk c of row r lies at chunk c ^ (r % 8)
    even_ = first * 128 + (chunk ^ first) * 16;
    odd_ = first * 128 + (chunk ^ (first + kRowsPerCopy)) * 16;
    num_columns_ = rows.num_columns;
    return __all_sync(~0u, all_known);
  }

  // The whole warp: the (kStep + 1)-th 64 columns from here on, which begin at column k. Past the
  // last one: zeros.
  template <int kStep>
  __device__ __forceinline__ void copy(const bf16* stage, int32_t k, uint64_t* full) const {
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
    const uint32_t num_bytes =
        k + static_cast<int32_t>(threadIdx.x) % 8 * 8 < num_columns_ ? 16 : 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      device::cp_async_16<kStep * kStepBytes>(
          to + i * (kRowsPerCopy * 128) + (i % 2 == 0 ? even_ : odd_), source_[i], num_bytes);
    ptx::cp_async_mbarrier_arrive_noinc(full);
  }
  template <int kSteps>
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) source_[i] += kSteps * kStepBytes / sizeof(uint4);
  }
};

// The whole warp: the tile after the one with this ticket, if it is known already.
template <int kClusterSize, class Shared>
__device__ __forceinline__ bool peek_tile(Shared& shared,
                                          const RingPosition<kNumTicketSlots>& ticket, Tile& tile) {
  uint64_t* full = &shared.ticket_full[ticket.slot_idx()];
  // Signalled as in read_tile(). The slot is not written again before this warp is done with the
  // tile before: the loading warp would have to be three tiles further.
  const bool is_posted = kClusterSize == 1
                             ? ptx::mbarrier_test_wait_parity(full, ticket.parity())
                             : ptx::mbarrier_test_wait_parity(ptx::sem_acquire, ptx::scope_cluster,
                                                              full, ticket.parity());
  if (!__all_sync(~0u, is_posted)) return false;
  tile = shared.tickets[ticket.slot_idx()];
  return tile.kind != kNoMoreTiles;
}

// The gathering warp: A of all tiles that the loading lane names, until its last word. The places
// of the next tile's rows are asked for before the end of a tile.
template <int kClusterSize, class Params, class Shared>
__device__ __forceinline__ void gather_tiles(const Params& params, Shared& shared) {
  constexpr int kGroup = 4;  // stages between two moves of the pointers: as long as two copies
  constexpr int kStagesAhead = 3 * kGroup;
  RingPosition<kNumGatherSlots> slot;
  int64_t asked = -1;  // the first row whose places are known, as far as they are
  bool healthy = true;
  const auto wait = [&](uint64_t& mbarrier, uint32_t parity, const device::WaitTarget& target) {
    healthy = __all_sync(~0u, device::mbarrier_wait(&mbarrier, parity, params.limits, target));
  };
  const auto ask = [&](const Tile& tile) {
    asked = params.gather.first_row(tile);
    ask_places(params.gather.rows(), asked, tile.num_rows, shared.places);
  };
  for (; healthy; slot.advance()) {
    const uint32_t at = slot.slot_idx(), parity = slot.parity();
    // Signalled by the loading lane: a tile that it begins.
    wait(shared.gather_posted[at], parity, {kWaitGathered, at, parity});
    const GatheredTile& gathered = shared.gathered[at];
    if (!healthy || gathered.num_k_blocks == 0) return;
    GatheredRows rows;
#pragma unroll 1
    for (bool is_ready = false;;) {
      if (is_ready || asked != params.gather.first_row(gathered.tile)) ask(gathered.tile);
      const bool found = rows.find(params.gather.rows(), shared.places);
      if (is_ready) break;
      // Signalled by the loading lane, with what it acquired: the tile's rows are ready.
      wait(shared.gather_ready[at], parity, {kWaitGathered, at, parity});
      is_ready = true;
      if (found || !healthy) break;
    }
    RingPosition<kNumStages> stage{gathered.stage_count};
    const int32_t end_k = gathered.num_k_blocks * BLOCK_K;
    const int32_t ask_k = max(gathered.num_k_blocks - kStagesAhead, 0) / kGroup * kGroup * BLOCK_K;
    const auto gather_stage = [&]<int kStep>(int32_t k) __attribute__((always_inline)) {
      k += kStep * BLOCK_K;
      if (!healthy || k >= end_k) return;
      const uint32_t stage_idx = stage.slot_idx(), empty_parity = stage.parity() ^ 1;
      // Signalled by the consumer warps of every CTA that reads the stage: all have read its
      // previous contents.
      wait(shared.stage_empty[stage_idx], empty_parity, {kWaitStageEmpty, stage_idx, empty_parity});
      if (healthy) rows.template copy<kStep>(shared.a[stage_idx], k, &shared.stage_full[stage_idx]);
      stage.advance();
    };
#pragma unroll 1
    for (int32_t k = 0; healthy && k < end_k; k += kGroup * BLOCK_K) {
      gather_stage.template operator()<0>(k);
      gather_stage.template operator()<1>(k);
      gather_stage.template operator()<2>(k);
      gather_stage.template operator()<3>(k);
      rows.template advance<kGroup>();
      if (k == ask_k) {
        Tile next;
        if (peek_tile<kClusterSize>(shared, {gathered.ticket_count + 1}, next) &&
            params.gather.gathers(next))
          ask(next);
      }
    }
  }
}

}  // namespace moxie::expert
