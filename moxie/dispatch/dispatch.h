// Stage 2, dispatch: the expert's rank pulls the rows it needs and lays them down already sorted by
// expert.
//
//   peer heap: x_in [T, H] (backward: dy_in too), routes_sorted, weights_sorted
//           ->  ring slot of the block [128, H], RowOrigin [128]; then x_ready[minibatch] += rows
//
// Pull, because only the destination knows the order in which its experts will eat: no address
// travels, and the data is there when the load returns, so "ready" is a local counter. Own rows
// take the same path from local memory. A slot may be overwritten once all FC1 tiles of the block
// that held it are done. Reference body: dispatch_ref.h.
//
// Plan option push (forward): the home rank writes row and RowOrigin into the destination's slot
// and counts there. It finds the place in the counts of all ranks (PushTable) and waits for the
// slot by the destination's counter. For machines whose links write faster than they read, and to
// measure what pull is worth.
#pragma once
#include <cstdint>

#include "moxie/core/problem.h"

namespace moxie::dispatch {

struct Cost {
  std::int64_t flops = 0, local_bytes = 0, link_bytes = 0;
};

// Cost of pulling (or pushing) `rows` rows, `remote_rows` of them from other ranks, `tensors`
// tensors per row (1 forward: x; 2 backward: dY and x).
constexpr Cost cost(const Problem& p, std::int64_t rows, std::int64_t remote_rows,
                    std::int64_t tensors) {
  const std::int64_t row_bytes =
      p.hidden * size_bytes(p.dtype) * tensors + 8;  // + route and weight
  return {0, (rows - remote_rows) * row_bytes + rows * row_bytes, remote_rows * row_bytes};
}

}  // namespace moxie::dispatch
