// Links and memory as servers: each direction of a port works off what is asked of it in order of
// asking, at its rate. A transfer occupies the source's way out and the destination's way in, each
// for its own bytes, and is through when both are: senders that aim at one rank queue there, and
// hold up nobody else's port. Costs O(1) per transfer, whatever is in flight.
#pragma once
#include <algorithm>
#include <cstdint>

#include "moxie/planner/event_queue.h"

namespace moxie::planner {

struct Server {
  Time free = 0;  // everything asked so far is done then
  double bytes = 0;

  Time serve(Time now, double n, double ps_per_byte) {
    return serve(now, n, static_cast<Time>(n * ps_per_byte));
  }
  Time serve(Time now, double n, Time takes) {
    bytes += n;
    free = std::max(free, now) + takes;
    return free;
  }
};

struct Port {
  Server out, in;
};

}  // namespace moxie::planner
