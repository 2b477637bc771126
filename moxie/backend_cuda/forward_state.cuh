// What the forward's roles share beside pass_state.cuh.
#pragma once

#include "moxie/backend_cuda/forward_params.h"
#include "moxie/backend_cuda/pass_state.cuh"
#include "moxie/dispatch/push_cuda.cuh"

namespace moxie::backend_cuda {

struct ForwardState : PassState {
  pipeline::ForwardStream stream;
  dispatch::Pull pull;  // here, not in registers: those are for rows in flight
  dispatch::Push push;  // one of the two is used
  pipeline::PushTable push_table;
  int64_t first_ticket, num_tickets;  // of this launch: [first, num)
  uint32_t hidden_ring_blocks;        // 32 bits, for epilogues
};

}  // namespace moxie::backend_cuda
