// Ranks of a test as processes: each is this program again, started anew (a process that has used
// CUDA cannot be forked into ranks), with one test case that runs the rank's program and sends what
// it returns through a pipe.
#pragma once

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "moxie/core/error.h"

extern char** environ;

namespace moxie::test {

// The machine's clock, the same in every process.
inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct ChildRank {
  std::int64_t rank = 0, num_ranks = 1;
  std::string id;  // of the world, as bytes
  std::uint64_t seed = 0;
  int pipe = -1;
  // A line that the parent waits for (RankProcess::wait_for).
  void say(const std::string& line) const {
    const std::string text = line + '\n';
    if (::write(pipe, text.data(), text.size()) < 0) std::_Exit(1);
  }
};
using RankProgram = std::function<std::string(const ChildRank&)>;
std::map<std::string, RankProgram>& rank_programs();  // by name; defined by the test

inline std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte));
    text += two;
  }
  return text;
}
inline std::string from_hex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16));
  return bytes;
}

class RankProcess {
 public:
  RankProcess(const std::string& program, std::int64_t rank, std::int64_t num_ranks,
              const std::string& id, std::uint64_t seed) {
    int ends[2] = {-1, -1};
    if (::pipe(ends) != 0) return;
    const std::string what = program + " " + std::to_string(rank) + " " +
                             std::to_string(num_ranks) + " " + to_hex(id) + " " +
                             std::to_string(seed) + " " + std::to_string(ends[1]);
    std::vector<std::string> texts;
    for (char** variable = environ; *variable != nullptr; ++variable) texts.push_back(*variable);
    texts.push_back("MOXIE_TEST_RANK=" + what);
    std::vector<char*> variables;
    for (std::string& text : texts) variables.push_back(text.data());
    variables.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      if (std::freopen("/dev/null", "w", stdout) == nullptr) ::_exit(127);
      const char* arguments[] = {"moxie_gpu_tests", "--gtest_filter=RankProcess.DISABLED_program",
                                 "--gtest_also_run_disabled_tests", nullptr};
      ::execve("/proc/self/exe", const_cast<char* const*>(arguments), variables.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    pipe_ = ends[0];
  }
  RankProcess(RankProcess&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)),
        pipe_(std::exchange(other.pipe_, -1)),
        heard_(std::move(other.heard_)) {}
  ~RankProcess() {
    kill();
    if (pipe_ >= 0) ::close(pipe_);
  }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }
  // False: it ended, or said nothing of the kind in time.
  bool wait_for(const std::string& line, double timeout_s) {
    const double end = now_s() + timeout_s;
    while (heard_.find(line + '\n') == std::string::npos)
      if (!read_more(end)) return false;
    heard_.erase(0, heard_.find(line + '\n') + line.size() + 1);
    return true;
  }
  // All it has said, when it has ended; a process that does not end is killed.
  std::string finish(double timeout_s) {
    const double end = now_s() + timeout_s;
    while (read_more(end)) {
    }
    if (now_s() >= end) heard_ += "[killed by the test after " + std::to_string(timeout_s) + " s]";
    if (now_s() >= end) kill();
    if (pid_ > 0) {
      int status = 0;
      ::waitpid(std::exchange(pid_, -1), &status, 0);
      if (WIFSIGNALED(status)) heard_ += "[signal " + std::to_string(WTERMSIG(status)) + "]";
    }
    return heard_;
  }

 private:
  bool read_more(double end) {
    for (;;) {
      const double left = end - now_s();
      if (left <= 0) return false;
      pollfd wait{pipe_, POLLIN, 0};
      const int ready = ::poll(&wait, 1, static_cast<int>(left * 1e3) + 1);
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) return false;
      char buffer[65536];
      const ssize_t count = ::read(pipe_, buffer, sizeof buffer);
      if (count <= 0) return false;
      heard_.append(buffer, static_cast<std::size_t>(count));
      return true;
    }
  }

  pid_t pid_ = -1;
  int pipe_ = -1;
  std::string heard_;
};

// In the child: what RankProcess started it for. Sends the program's words, or the error it threw.
inline void run_rank_program() {
  const char* text = std::getenv("MOXIE_TEST_RANK");
  if (text == nullptr) return;
  char program[64] = {}, id[300] = {};
  ChildRank child;
  unsigned long long seed = 0;
  long rank = 0, num_ranks = 0;
  if (std::sscanf(text, "%63s %ld %ld %299s %llu %d", program, &rank, &num_ranks, id, &seed,
                  &child.pipe) != 6)
    return;
  child.rank = rank, child.num_ranks = num_ranks, child.seed = seed;
  child.id = from_hex(id);
  std::string words;
  try {
    words = rank_programs().at(program)(child);
  } catch (const Error& error) {
    words = std::string(name(error.code())) + ": " + error.what();
  }
  for (std::size_t at = 0; at < words.size();) {
    const ssize_t sent = ::write(child.pipe, words.data() + at, words.size() - at);
    if (sent <= 0) std::_Exit(1);
    at += static_cast<std::size_t>(sent);
  }
  ::close(child.pipe);
}

}  // namespace moxie::test
