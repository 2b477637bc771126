// The one error type of the library. The library never prints, exits or aborts: it throws Error,
// the CLI prints it. `what()` is one sentence: what is wrong, the value seen, the rule, the nearest
// legal value.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace moxie {

enum class ErrorCode {
  invalid_argument,   // a size, dtype, pointer or file breaks a rule
  invalid_plan,       // a Plan that could deadlock or does not fit
  invalid_route,      // an expert id outside -1 .. E-1, found by the sort on its home rank
  non_finite,         // validation mode found a NaN or an infinity
  capacity_exceeded,  // more rows for a rank than the plan's capacity; found before data moves
  timeout,            // a bounded wait expired; see Error::waits
  world_stopped,      // a pass was asked of a World that has timed out and was not reset
  unavailable,        // a backend or library this build does not have
};
const char* name(ErrorCode code);

enum class Role : std::int32_t { comm, compute };
const char* name(Role role);

// What a worker was waiting for when its wait gave up (or a peer told it to).
enum class WaitFor : std::int32_t {
  inputs_ready,    // index = peer rank: it has not posted its inputs of this epoch
  schedule_ready,  // own rank's schedule
  stage_done,      // own rank's staging copies
  agreement,       // index = peer rank: its verdict on the capacity
  x_ready,         // index = first block of the minibatch: rows still missing
  x_slot_free,     // index = block (backward: chunk) that holds the ring slot
  hidden_free,     // index = block that holds the hidden slot
  fc1_done,        // index = block: FC1 (or dgrad) tiles still missing
  wgrad_order,     // index = chunk whose weight gradients come first
  returns_done,    // index = peer rank: it has not pushed everything yet
  shared_done,     // own shared-expert tiles
  merge_done,      // own rank's merge units still missing at the end of the pass
  tasks_done,      // own rank's compute tasks still missing at the end of the pass
  pass_closed,     // own rank's leader has not closed the pass
  phase,           // split mode: index = phase
  peer_slot_free,  // push dispatch: index = peer rank whose x ring has no free slot yet
  y_ready,         // combine by communication workers: index = block whose FC2 tiles are missing
  x_staged,        // index = peer rank: its tokens do not all lie in its heap yet
};
const char* name(WaitFor what);

struct WaitRecord {
  std::int32_t rank = -1;
  Role role = Role::comm;
  std::int32_t worker = -1;  // worker (CPU) or CTA (GPU) within the rank
  WaitFor what = WaitFor::inputs_ready;
  std::int64_t index = -1;
  std::uint64_t wanted = 0;
  std::uint64_t seen = 0;
  std::uint64_t epoch = 0;
  std::int32_t told_by = -1;  // -1: own clock ran out; else the rank that gave up first
  friend bool operator==(const WaitRecord&, const WaitRecord&) = default;
};
std::string to_string(const WaitRecord& record);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string sentence)
      : std::runtime_error(std::move(sentence)), code_(code) {}
  Error(ErrorCode code, std::string sentence, std::vector<WaitRecord> waits)
      : std::runtime_error(std::move(sentence)), code_(code), waits_(std::move(waits)) {}
  ErrorCode code() const { return code_; }
  const std::vector<WaitRecord>& waits() const { return waits_; }  // one per rank that gave up

 private:
  ErrorCode code_;
  std::vector<WaitRecord> waits_;
};

}  // namespace moxie
