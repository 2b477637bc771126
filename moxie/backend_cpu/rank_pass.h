// RankPass: everything one rank's workers share during one pass. Pointers are resolved from
// pipeline/layout.h here and nowhere else; roles read like the design's prose because of it.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moxie/expert/expert_ref.h"
#include "moxie/expert/host_gemm.h"
#include "moxie/moxie.h"
#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tasks.h"
#include "moxie/schedule/schedule_ref.h"
#include "moxie/transport/peer_memory.h"

namespace moxie::backend_cpu {

using Clock = std::chrono::steady_clock;

enum class Direction : std::int32_t { forward, backward };

// Saved by forward for one rank; const during backward.
struct RankContext {
  std::vector<std::int32_t> ids;     // [T_max * K]
  std::vector<float> weights;        // [T_max * K]
  transport::AlignedBytes z;         // dtype [saved blocks * 128, 2 I]
  transport::AlignedBytes x;         // dtype [saved blocks * 128, H]  (SavePolicy::z_and_x)
  transport::AlignedBytes shared_z;  // dtype [T_max, 2 I_s]
};

// What a layer fixes once: shapes, plan, layouts.
struct LayerShape {
  Problem problem;
  Plan plan;
  pipeline::Extents extents;
  pipeline::HeapLayout heap;
  pipeline::WorkspaceLayout workspace;
  pipeline::CounterLayout counters;
  std::int64_t saved_blocks = 0;  // routed blocks whose z (and x) a context keeps
  bool saves_z = false, saves_x = false;
  std::int32_t comm_workers = 1;  // threads of a rank; plan.comm_workers 0 means one
};

// First wait that expired on this rank, and the flag that makes all its other waits give up.
struct Watch {
  double timeout_s = 0;
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::optional<WaitRecord> record;
};

template <class T>
struct RankPass {
  const LayerShape& shape;
  Direction direction;
  RankId me;
  transport::PeerMemory peers;       // heaps
  transport::PeerMemory workspaces;  // of all ranks: push dispatch writes into them
  const expert::HostGemmEngine& gemm;
  const FaultInjection& faults;
  std::uint64_t epoch = 0;       // of the heap: tags signals
  std::uint64_t pass_count = 0;  // of the workspace: picks the counter bank
  Clock::time_point begin;

  // caller's tensors
  std::int64_t num_tokens = 0;
  const T* x = nullptr;                  // [T, H]
  const T* dy = nullptr;                 // [T, H]  backward
  ConstTensorView expert_ids;            // [T, K]  forward
  const float* route_weights = nullptr;  // [T, K]
  const Weights* weights = nullptr;
  const WeightGrads* grads = nullptr;  // backward
  T* out = nullptr;                    // [T, H]  y or dx
  float* d_route_weights = nullptr;    // [T, K]  backward
  RankContext* fill = nullptr;         // forward: context to fill, or null
  std::span<RankContext> all_fill;     // forward: of all ranks, or empty
  const RankContext* saved = nullptr;  // backward

  // ranks as processes
  const std::string* refusal = nullptr;  // why this rank only tells its peers that it will not run
  std::uint64_t refused_epoch = 0;       // of its last such pass: peers may still be in it

  // results of the schedule, valid after schedule_ready
  pipeline::Verdict verdict = pipeline::Verdict::go;
  schedule::BadRoute bad_route;
  std::int64_t wanted_blocks = 0;  // routed blocks this pass needs
  std::string objection;           // "rank 1 refused: ..."
  pipeline::BlockTable table;
  pipeline::PushTable push;  // push dispatch
  pipeline::ForwardStream forward;
  pipeline::BackwardStream backward;
  std::int64_t num_tickets = 0;

  Watch watch;

  const Problem& problem() const { return shape.problem; }
  const Plan& plan() const { return shape.plan; }
  std::int64_t num_slabs() const {
    return direction == Direction::forward ? shape.plan.num_slabs : 1;
  }
  // The options are about the forward pass; backward always pulls and pushes from the epilogue.
  DispatchMode dispatch() const {
    return direction == Direction::forward ? shape.plan.dispatch : DispatchMode::pull;
  }
  CombineMode combine() const {
    return direction == Direction::forward ? shape.plan.combine : CombineMode::epilogue;
  }
  bool x_in_place() const { return x == heap<T>(shape.heap.x_in); }

  template <class U>
  U* ws(const pipeline::Region& region) const {
    return workspaces.at<U>(me, region.offset);
  }
  template <class U>
  U* heap(const pipeline::Region& region) const {
    return peers.at<U>(me, region.offset);
  }
  std::uint64_t& signal(RankId at, const pipeline::Region& region, std::int64_t idx) const {
    return peers.at<std::uint64_t>(at, region.offset)[idx];
  }
  // All ranks run the same passes of a layer, so a peer's bank is the own one.
  std::uint32_t& counter_of(RankId rank, std::int64_t word) const {
    return workspaces.at<std::uint32_t>(
        rank,
        shape.workspace.counters
            .offset)[pipeline::counter_bank(pass_count) * shape.workspace.counter_words + word];
  }
  std::uint32_t& counter(std::int64_t word) const { return counter_of(me, word); }

  // expert of a block
  bool shared(BlockId b) const { return table.is_shared(b); }
  std::int64_t intermediate(bool is_shared) const {
    return is_shared ? problem().shared.intermediate : problem().intermediate;
  }
  expert::ExpertMatrices<T> matrices(bool is_shared, std::int64_t e) const;

  // rows of a block: where each tensor's [128, ...] slot is
  pipeline::RowOrigin* origins(BlockId b) const {
    return ws<pipeline::RowOrigin>(shape.workspace.origins) +
           table.routed_idx(b) * pipeline::kBlockRows;
  }
  float row_weight(BlockId b, std::int64_t i) const {
    return shared(b) ? ws<float>(shape.workspace.shared_weight)[b.v * pipeline::kBlockRows + i]
                     : origins(b)[i].weight;
  }
  T* slot(const pipeline::Region& ring, std::int64_t slot_idx, std::int64_t row_elems) const {
    return ws<T>(ring) + slot_idx * pipeline::kBlockRows * row_elems;
  }
  T* local_rows(const pipeline::Region& tensor, BlockId b) const {  // shared blocks lie in place
    return heap<T>(tensor) + b.v * pipeline::kBlockRows * problem().hidden;
  }
  std::int64_t backward_slot(BlockId b) const { return b.v % plan().backward_ring_blocks; }

  bool x_saved(BlockId b) const {
    return shape.saves_x && table.routed_idx(b) < shape.saved_blocks;
  }
  T* y_rows(BlockId b) const {  // [128, H]  combine by communication workers
    return slot(shape.workspace.y, table.routed_idx(b), problem().hidden);
  }
  std::int64_t y_ready_word(std::int64_t slab, BlockId b) const {
    return shape.counters.y_ready + slab * shape.extents.routed_blocks + table.routed_idx(b);
  }
  T* x_rows(BlockId b) const;       // [128, H]
  T* hidden_rows(BlockId b) const;  // [128, I]  forward
  const T* dy_rows(BlockId b) const;
  T* z_rows(const RankContext* context, BlockId b) const;  // [128, 2 I] or null when not saved
  expert::DgradRows<T> dgrad_rows(BlockId b) const;
  float* dw_partial(BlockId b) const {
    return ws<float>(shape.workspace.dw_partial) +
           backward_slot(b) * pipeline::kBlockRows * dw_ld();
  }
  std::int64_t dw_ld() const { return pipeline::num_fc1_tiles(shape.extents.wide_intermediate); }
};

template <class T>
expert::ExpertMatrices<T> RankPass<T>::matrices(bool is_shared, std::int64_t e) const {
  const std::int64_t h = problem().hidden, i = intermediate(is_shared);
  expert::ExpertMatrices<T> m;
  m.hidden = h;
  m.intermediate = i;
  if (is_shared) {
    m.gate = weights->shared_gate.as<T>();
    m.up = weights->shared_up.as<T>();
    m.down = weights->shared_down.as<T>();
    return m;
  }
  m.gate = weights->gate.as<T>() + e * h * i;
  m.up = weights->up.as<T>() + e * h * i;
  m.down = weights->down.as<T>() + e * h * i;
  if (problem().expert_bias) {
    m.gate_bias = weights->gate_bias.as<T>() + e * i;
    m.up_bias = weights->up_bias.as<T>() + e * i;
    m.down_bias = weights->down_bias.as<T>() + e * h;
  }
  return m;
}

template <class T>
T* RankPass<T>::x_rows(BlockId b) const {
  const std::int64_t h = problem().hidden;
  if (shared(b)) return local_rows(shape.heap.x_in, b);
  if (direction == Direction::forward) {
    return slot(shape.workspace.x_ring, table.routed_idx(b) % plan().x_ring_blocks, h);
  }
  if (x_saved(b))
    return reinterpret_cast<T*>(saved->x.get()) + table.routed_idx(b) * pipeline::kBlockRows * h;
  return slot(shape.workspace.xb_ring, backward_slot(b), h);
}

template <class T>
T* RankPass<T>::hidden_rows(BlockId b) const {
  const std::int64_t i = intermediate(shared(b));
  return shared(b) ? slot(shape.workspace.shared_hidden, b.v, i)
                   : slot(shape.workspace.hidden_ring,
                          table.routed_idx(b) % plan().hidden_ring_blocks, i);
}

template <class T>
const T* RankPass<T>::dy_rows(BlockId b) const {
  return shared(b) ? local_rows(shape.heap.dy_in, b)
                   : slot(shape.workspace.dy_ring, backward_slot(b), problem().hidden);
}

template <class T>
T* RankPass<T>::z_rows(const RankContext* context, BlockId b) const {
  if (context == nullptr || !shape.saves_z) return nullptr;
  const std::int64_t row = 2 * intermediate(shared(b)) * pipeline::kBlockRows;
  if (shared(b)) return reinterpret_cast<T*>(context->shared_z.get()) + b.v * row;
  if (table.routed_idx(b) >= shape.saved_blocks) return nullptr;
  return reinterpret_cast<T*>(context->z.get()) + table.routed_idx(b) * row;
}

template <class T>
expert::DgradRows<T> RankPass<T>::dgrad_rows(BlockId b) const {
  const std::int64_t ld = shape.extents.wide_intermediate, s = backward_slot(b);
  return {slot(shape.workspace.dgate_ring, s, ld), slot(shape.workspace.dup_ring, s, ld),
          slot(shape.workspace.wa_ring, s, ld), ld};
}

}  // namespace moxie::backend_cpu
