// When to give up waiting.
#pragma once
#include <chrono>

namespace moxie::transport {

class Deadline {
 public:
  explicit Deadline(double timeout_s) : timeout_s_(timeout_s), begin_(Clock::now()) {}
  bool expired() const {
    return timeout_s_ > 0 &&
           std::chrono::duration<double>(Clock::now() - begin_).count() > timeout_s_;
  }
  double timeout_s() const { return timeout_s_; }

 private:
  using Clock = std::chrono::steady_clock;
  double timeout_s_;  // 0: never
  Clock::time_point begin_;
};

}  // namespace moxie::transport
