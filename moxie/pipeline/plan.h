// Plan: every tunable choice of a pass, as data. A plan changes the time a pass takes and the
// memory it needs, never the bits it computes. `resolve` fills the zeros in (but for comm_workers,
// whose 0 is a choice), `check` proves that the result cannot deadlock (docs/protocol.md).
#pragma once
#include <cstdint>
#include <string>

#include "moxie/core/checked.h"
#include "moxie/core/problem.h"

namespace moxie {

enum class TaskOrder : std::int32_t {
  slabs,  // all FC1 tiles, then FC2 in column slabs; the merge of a slab overlaps the next one
  lag,    // FC2 of a band follows FC1 by lag_bands bands; works with rings smaller than the work
};
enum class ExecMode : std::int32_t {
  fused,  // one persistent pass: every stage overlaps
  split,  // the same bodies stage after stage
};
enum class SavePolicy : std::int32_t {
  none,     // backward recomputes FC1 for every block
  z,        // keep z = [gate, up] of the first saved_rows rows
  z_and_x,  // keep x rows too, so that backward does not pull them again
};
enum class DispatchMode : std::int32_t {
  pull,  // the expert's rank reads rows from their home ranks
  push,  // home ranks write rows into the expert's rank; it waits for all of them
};
enum class CombineMode : std::int32_t {
  epilogue,      // FC2 tiles write their row pieces home
  comm_workers,  // FC2 tiles are stored locally; communication workers carry them home
};
const char* name(TaskOrder order);
const char* name(ExecMode mode);
const char* name(SavePolicy save);
const char* name(DispatchMode dispatch);
const char* name(CombineMode combine);

struct Plan {
  ExecMode mode = ExecMode::fused;
  TaskOrder order = TaskOrder::slabs;
  DispatchMode dispatch = DispatchMode::pull;
  CombineMode combine = CombineMode::epilogue;
  std::int32_t num_slabs =
      4;  // FC2 column slabs (1 in lag order is fine too); clipped to the FC2 tiles
  std::int32_t band_blocks = 8;       // blocks that share a raster band
  std::int32_t lag_bands = 2;         // lag order: bands between FC1 and FC2
  std::int32_t minibatch_blocks = 1;  // blocks that share one readiness counter
  std::int64_t capacity_rows =
      0;  // rows one rank can take, padded to blocks; 0: the worst case, proven
  std::int64_t x_ring_blocks = 0;       // slots for pulled rows; 0: all the capacity
  std::int64_t hidden_ring_blocks = 0;  // slots for hidden rows; 0: all the capacity
  // Backward: blocks of one expert handed to wgrad at a time; 0: whole experts where the ring holds
  // every block, else what leaves half of the ring to chunks whose rows are still coming.
  std::int32_t chunk_blocks = 0;
  // Backward: chunks by which dgrad runs ahead of dX and wgrad; 0: enough of them.
  std::int32_t lag_chunks = 0;
  std::int64_t backward_ring_blocks = 0;  // backward slots; 0: chosen (chosen_backward_ring)
  SavePolicy save = SavePolicy::z;
  std::int64_t saved_rows = -1;  // whole blocks are saved; -1: chosen (chosen_saved_rows)
  // Per rank. CPU: communication threads, 0 means one. CUDA: CTAs that dispatch with all their
  // warps and then multiply with the others (if communication workers combine: never multiply); 0:
  // none, the spare warps of every CTA do it.
  std::int32_t comm_workers = 0;
  std::int32_t compute_workers = 1;  // per rank, >= 1
  friend bool operator==(const Plan&, const Plan&) = default;
};
std::string to_string(const Plan& plan);

// Where the plan of a layer is from, and why not from a better place.
enum class PlanOrigin : std::int32_t {
  caller,    // given
  cache,     // measured by `moxie tune`
  planner,   // predicted to be faster than the default by more than the model's error
  standard,  // pipeline::default_plan
};
const char* name(PlanOrigin origin);
struct PlanSource {
  PlanOrigin origin = PlanOrigin::caller;
  std::string words;  // one line for people
};

namespace pipeline {

inline constexpr std::int64_t kMaxPassBlocks = 1 << 24;  // shared and routed
inline constexpr std::int32_t kMaxChunkBlocks = 1 << 20;

// The plan of a Layer made without one where nothing better is known. On H200
// (docs/decisions/005-power-and-the-pass.md) one launch was faster than split mode at 16, 64 and
// 128 tokens per rank, and of the slabs, bands and rings tried none was faster on more than one
// shape, so nothing depends on the problem yet.
Plan default_plan(const Problem& problem);

// The most padded blocks of routed rows a rank can receive: every route of every rank to its
// experts, each expert ending in a block of its own. Worst case, hence "proven".
std::int64_t worst_case_blocks(const Problem& problem);

// Routed rows, and blocks of them, of the widest rank if all experts get equally many.
std::int64_t expected_rows(const Problem& problem);
std::int64_t expected_blocks(const Problem& problem);

// The capacity is proven, so it is a multiple of what a pass has; memory for all of it is not
// needed to be fast. Slots of the backward: seven eighths of the expected blocks - the first
// experts' are free again when the last ones' rows come - or as many as lie in what the forward
// needs anyway, or up to a quarter more than expected if chunks then hold whole experts. A pass
// with more rows than expected waits for slots. Expects a plan that is resolved but for this and
// chunk_blocks.
std::int64_t chosen_backward_ring(const Problem& problem, const Plan& plan);
// SavePolicy::z: the expected rows and a sixteenth more; z of rows beyond is made again. z_and_x:
// all of the capacity, because the ring for x is only left out then.
std::int64_t chosen_saved_rows(const Problem& problem, const Plan& plan);

// Replaces every "0: choose" or "0: all" by its number. Split mode gets full-size rings.
Plan resolve(const Problem& problem, const Plan& plan);

// Throws Error(invalid_plan) naming the option, its value, the rule and the nearest legal value.
// Expects a resolved plan.
void check(const Problem& problem, const Plan& plan);

// The validity conditions themselves (pure; `check` reports them, the property tests prove them).
//  x ring:  FC1 of the first block of a band may need the whole minibatch, whose last slot must
//  come from an
//           earlier band: its holder's FC1 tiles then have earlier tickets.
MOXIE_HD constexpr std::int64_t min_x_ring_blocks(std::int64_t band_blocks,
                                                  std::int64_t minibatch_blocks) {
  return band_blocks + minibatch_blocks - 1;
}
//  hidden ring, lag order: the slot of a block of band j + lag + 1 must come from band <= j, whose
//  FC2 tickets are
//           earlier. Slabs order: every FC2 ticket is later than every FC1 ticket, so all blocks
//           must fit.
MOXIE_HD constexpr std::int64_t min_hidden_ring_blocks(TaskOrder order, std::int64_t band_blocks,
                                                       std::int64_t lag_bands,
                                                       std::int64_t max_blocks) {
  return order == TaskOrder::slabs ? max_blocks : min64(max_blocks, (lag_bands + 1) * band_blocks);
}
//  backward ring: the same argument with chunks for bands.
MOXIE_HD constexpr std::int64_t min_backward_ring_blocks(std::int64_t chunk_blocks,
                                                         std::int64_t lag_chunks,
                                                         std::int64_t minibatch_blocks) {
  return (lag_chunks + 1) * chunk_blocks + minibatch_blocks - 1;
}

}  // namespace pipeline
}  // namespace moxie
