// Names and sentences of errors. Sentences are written once, here and where the rule is checked.
#include "moxie/core/error.h"

#include <fmt/format.h>

namespace moxie {

const char* name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "invalid_argument";
    case ErrorCode::invalid_plan: return "invalid_plan";
    case ErrorCode::invalid_route: return "invalid_route";
    case ErrorCode::non_finite: return "non_finite";
    case ErrorCode::capacity_exceeded: return "capacity_exceeded";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::world_stopped: return "world_stopped";
    case ErrorCode::unavailable: return "unavailable";
  }
  return "unknown";
}

const char* name(Role role) { return role == Role::comm ? "comm" : "compute"; }

const char* name(WaitFor what) {
  switch (what) {
    case WaitFor::inputs_ready: return "inputs_ready";
    case WaitFor::x_staged: return "x_staged";
    case WaitFor::schedule_ready: return "schedule_ready";
    case WaitFor::stage_done: return "stage_done";
    case WaitFor::agreement: return "agreement";
    case WaitFor::x_ready: return "x_ready";
    case WaitFor::x_slot_free: return "x_slot_free";
    case WaitFor::hidden_free: return "hidden_free";
    case WaitFor::fc1_done: return "fc1_done";
    case WaitFor::wgrad_order: return "wgrad_order";
    case WaitFor::returns_done: return "returns_done";
    case WaitFor::shared_done: return "shared_done";
    case WaitFor::merge_done: return "merge_done";
    case WaitFor::tasks_done: return "tasks_done";
    case WaitFor::pass_closed: return "pass_closed";
    case WaitFor::phase: return "phase";
    case WaitFor::peer_slot_free: return "peer_slot_free";
    case WaitFor::y_ready: return "y_ready";
  }
  return "unknown";
}

std::string to_string(const WaitRecord& r) {
  const std::string who =
      fmt::format("rank {} {} worker {} waited for {}[{}] of epoch {}: wanted {}, saw {}", r.rank,
                  name(r.role), r.worker, name(r.what), r.index, r.epoch, r.wanted, r.seen);
  return r.told_by < 0 ? who : who + fmt::format(" (gave up when rank {} did)", r.told_by);
}

}  // namespace moxie
