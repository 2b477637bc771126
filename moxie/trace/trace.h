// Trace: what each worker of each rank did and when. A pass appends events; `trace/writers.h` turns
// them into a Perfetto-loadable JSON or an SVG. The CUDA backend and the simulator fill the same
// structure.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "moxie/core/error.h"

namespace moxie::trace {

enum class Kind : std::int32_t {
  stage,     // copy inputs into the heap, sort the routes
  schedule,  // wait for the peers' counts, build the block table
  dispatch,  // pull rows (backward: rows of dY and x)
  fc1,       // FC1 tile with activation
  fc2,       // FC2 tile
  combine,   // push the tile's row pieces home
  merge,     // weighted merge of a token range
  dgrad,     // backward: dA' tile with the activation's backward
  dx,        // backward: dX tile
  wgrad,     // backward: weight-gradient tile
  wait,      // nothing to do until a signal arrives; `what` says which
};
inline constexpr std::int32_t kNumKinds = 11;
const char* name(Kind kind);

struct Event {
  std::int32_t rank = 0;
  Role role = Role::comm;
  std::int32_t worker = 0;  // index within (rank, role)
  Kind kind = Kind::wait;
  WaitFor what = WaitFor::inputs_ready;   // only for Kind::wait
  std::int32_t block = -1;                // block, token unit or chunk
  std::int32_t tile = -1;                 // column tile or slab
  bool shared = false;                    // a shared-expert task
  std::int64_t begin_ns = 0, end_ns = 0;  // since the pass began
};

struct Trace {
  std::string title;  // "forward, 4 ranks, slabs" ...
  std::int32_t num_ranks = 0, comm_workers = 0, compute_workers = 0;
  std::vector<Event> events;  // ordered by (rank, role, worker, begin)
};

}  // namespace moxie::trace
