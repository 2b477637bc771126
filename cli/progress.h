// A progress bar on standard error, only when that is a terminal and the work has lasted a second
// already.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

namespace moxie::cli {

class Progress {
 public:
  Progress() : terminal_(::isatty(STDERR_FILENO) == 1), begin_(std::chrono::steady_clock::now()) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  // `done` from 0 to 1 within this step.
  void show(const std::string& step, double done) {
    const auto now = std::chrono::steady_clock::now();
    using std::chrono::milliseconds;
    if (!terminal_ || now - begin_ < milliseconds(1000) ||
        (shown_ && now - last_ < milliseconds(100)))
      return;
    constexpr int kWidth = 30;
    const int filled = static_cast<int>(kWidth * std::clamp(done, 0.0, 1.0));
    std::fprintf(stderr, "\r\033[K[%s%s] %s",
                 std::string(static_cast<std::size_t>(filled), '#').c_str(),
                 std::string(static_cast<std::size_t>(kWidth - filled), '.').c_str(), step.c_str());
    std::fflush(stderr);
    shown_ = true;
    last_ = now;
  }
  void clear() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
    shown_ = false;
  }

 private:
  bool terminal_, shown_ = false;
  std::chrono::steady_clock::time_point begin_, last_;
};

}  // namespace moxie::cli
