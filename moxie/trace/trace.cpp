// Names of the trace kinds as people read them in tables, timelines and JSON. The one place that
// spells them.
#include "moxie/trace/trace.h"

namespace moxie::trace {

const char* name(Kind kind) {
  switch (kind) {
    case Kind::stage: return "stage";
    case Kind::schedule: return "schedule";
    case Kind::dispatch: return "dispatch";
    case Kind::fc1: return "FC1";
    case Kind::fc2: return "FC2";
    case Kind::combine: return "combine";
    case Kind::merge: return "merge";
    case Kind::dgrad: return "dgrad";
    case Kind::dx: return "dX";
    case Kind::wgrad: return "wgrad";
    case Kind::wait: return "wait";
  }
  return "unknown";
}

}  // namespace moxie::trace
