// Stage 4, combine: results go straight home.
//
//   FC2 (backward: dX) accumulators of (block, 256 columns)  ->  returns[token * K + slot, cols] on
//   the home rank
//
// Push, because the result's home is known: there is no y buffer and no second copy. Own rows take
// the same path. When a rank has pushed every piece of a column slab it raises returns_done[slab]
// at every peer, rows or no rows. Reference body: combine_ref.h.
//
// Plan option comm_workers (forward): FC2 stores its tile in y [capacity, H] of the own workspace,
// and communication workers carry 16 rows x one slab at a time home. A second copy, but compute
// workers never wait for the link.
#pragma once
#include <cstdint>

#include "moxie/core/problem.h"

namespace moxie::combine {

struct Cost {
  std::int64_t flops = 0, local_bytes = 0, link_bytes = 0;
};
constexpr Cost cost(const Problem& p, std::int64_t rows, std::int64_t remote_rows) {
  const std::int64_t row_bytes = p.hidden * size_bytes(p.dtype);
  return {0, (rows - remote_rows) * row_bytes, remote_rows * row_bytes};
}

}  // namespace moxie::combine
