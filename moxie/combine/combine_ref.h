// Plain body of the combine stage; the contract is in combine.h.
#pragma once
#include <algorithm>
#include <cstdint>

#include "moxie/core/ids.h"
#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tiles.h"

namespace moxie::combine {

// Rounds row pieces to storage and writes them to their homes. PeerMemory is any type with
// at<T>(rank, offset).
template <class T, class PeerMemory>
void push_pieces(const PeerMemory& peers, std::int64_t returns_offset,
                 const pipeline::RowOrigin* origins,  // [rows]
                 std::int64_t rows, pipeline::Range cols, std::int64_t hidden,
                 const float* pieces) {  // [rows, cols.size()]
  const std::int64_t n = cols.size();
  for (std::int64_t i = 0; i < rows; ++i) {
    T* home = peers.template at<T>(RankId{origins[i].rank}, returns_offset) +
              std::int64_t{origins[i].route} * hidden + cols.begin;
    for (std::int64_t j = 0; j < n; ++j) home[j] = T(pieces[i * n + j]);
  }
}

// The same from rows that FC2 has stored: columns `cols` of `rows` of a block.
template <class T, class PeerMemory>
void push_stored(const PeerMemory& peers, std::int64_t returns_offset,
                 const pipeline::RowOrigin* origins,  // [128]
                 pipeline::Range rows, pipeline::Range cols, std::int64_t hidden,
                 const T* y) {  // [128, H]
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    T* home = peers.template at<T>(RankId{origins[i].rank}, returns_offset) +
              std::int64_t{origins[i].route} * hidden;
    std::copy(y + i * hidden + cols.begin, y + i * hidden + cols.end, home + cols.begin);
  }
}

}  // namespace moxie::combine
