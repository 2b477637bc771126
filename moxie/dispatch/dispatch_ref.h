// Plain body of the dispatch stage; the contract is in dispatch.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "moxie/core/ids.h"
#include "moxie/pipeline/blocks.h"
#include "moxie/pipeline/layout.h"

namespace moxie::dispatch {

// One tensor that is pulled: row t of the home rank's [T, H] goes to row i of the block.
struct PulledTensor {
  std::int64_t heap_offset = 0;  // of the [T_max, H] tensor in every heap
  std::byte* block = nullptr;    // [128, H] destination slot
  std::byte* keep = nullptr;     // [128, H] second copy for the context, or null
};

// Looks up where rows [rows.begin, rows.end) of `block` come from. PeerMemory is any type with
// at<T>(rank, offset).
template <class PeerMemory>
void resolve_origins(const pipeline::BlockTable& table, const pipeline::HeapLayout& heap,
                     const PeerMemory& peers, BlockId block, pipeline::Range rows,
                     pipeline::RowOrigin* origins) {  // [128] of the block
  const LocalExpertId expert = table.expert(block);
  const std::int64_t first = (block.v - table.expert_block[expert.v]) * pipeline::kBlockRows;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const pipeline::RowSource s = table.source(expert, first + i);
    origins[i].rank = s.rank.v;
    origins[i].route =
        peers.template at<const std::int32_t>(s.rank, heap.routes_sorted.offset)[s.sorted_idx];
    origins[i].weight =
        peers.template at<const float>(s.rank, heap.weights_sorted.offset)[s.sorted_idx];
  }
}

template <class PeerMemory>
void pull_rows(const PeerMemory& peers, const pipeline::RowOrigin* origins, pipeline::Range rows,
               std::int64_t top_k, std::int64_t row_bytes, const PulledTensor& tensor) {
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const std::int64_t token = origins[i].route / top_k;
    const auto* row = peers.template at<const std::byte>(RankId{origins[i].rank},
                                                         tensor.heap_offset + token * row_bytes);
    std::memcpy(tensor.block + i * row_bytes, row, static_cast<std::size_t>(row_bytes));
    if (tensor.keep != nullptr)
      std::memcpy(tensor.keep + i * row_bytes, row, static_cast<std::size_t>(row_bytes));
  }
}

// What a rank's own sorted routes say, and where a push goes on the destination.
struct PushSource {
  const std::int32_t* routes_sorted = nullptr;  // [T * K]
  const float* weights_sorted = nullptr;        // [T * K]
  const std::byte* x = nullptr;                 // [T, H]
};
struct PushTarget {
  pipeline::RowOrigin* origins = nullptr;  // [128] of the block
  std::byte* block = nullptr;              // [128, H] slot
  std::byte* keep = nullptr;               // [128, H] second copy for the context, or null
};

inline void push_rows(const PushSource& source, RankId me, const pipeline::PushRows& unit,
                      std::int64_t top_k, std::int64_t row_bytes, const PushTarget& target) {
  for (std::int64_t i = unit.rows.begin; i < unit.rows.end; ++i) {
    const std::int64_t at = unit.sorted_idx + i - unit.rows.begin;
    const std::int32_t route = source.routes_sorted[at];
    target.origins[i] = {me.v, route, source.weights_sorted[at]};
    const std::byte* row = source.x + route / top_k * row_bytes;
    std::memcpy(target.block + i * row_bytes, row, static_cast<std::size_t>(row_bytes));
    if (target.keep != nullptr)
      std::memcpy(target.keep + i * row_bytes, row, static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace moxie::dispatch
