// When to give up waiting for other ranks: on a socket, a board in GPU memory, a call of NCCL.
#pragma once
#include <chrono>
#include <limits>

namespace moxie::transport {

class Deadline {
 public:
  explicit Deadline(double timeout_s) : timeout_s_(timeout_s), begin_(Clock::now()) {}
  bool expired() const { return left_s() <= 0; }
  // Infinity: never.
  double left_s() const {
    if (!(timeout_s_ > 0)) return std::numeric_limits<double>::infinity();
    return timeout_s_ - std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  double timeout_s() const { return timeout_s_; }

 private:
  using Clock = std::chrono::steady_clock;
  double timeout_s_;  // 0: never
  Clock::time_point begin_;
};

}  // namespace moxie::transport
