// Plain body that builds the table of push dispatch. The contract: every rank's counts in, and out
// where this rank's rows lie on each destination; the same arithmetic as build_blocks, from the
// other side. Shared with the simulator.
#pragma once
#include "moxie/pipeline/tables.h"

namespace moxie::schedule {

using pipeline::build_push;

}  // namespace moxie::schedule
