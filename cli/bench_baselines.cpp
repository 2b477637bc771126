// Pipes and processes by posix_spawn. A worker leads its own process group, so that the processes
// it starts (one per rank) end with it; it ends by itself when its standard input closes.
#include "cli/bench_baselines.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include "cli/errors.h"
#include "cli/files.h"

extern char** environ;

namespace moxie::cli {
namespace {

constexpr double kStartSeconds = 180;   // importing PyTorch from a cold disk takes a minute
constexpr double kSetupSeconds = 120;   // weights, the first collective, the check
constexpr double kMeasureSeconds = 60;  // half a second of work

constexpr std::string_view kBase64 =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string base64(std::span<const std::byte> bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    const std::size_t n = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t b = 0; b < 3; ++b)
      group = group << 8 | (b < n ? std::to_integer<std::uint32_t>(bytes[i + b]) : 0);
    for (std::size_t c = 0; c < 4; ++c) text += c <= n ? kBase64[group >> (18 - 6 * c) & 63] : '=';
  }
  return text;
}

Json setup_command(const BenchTarget& target, const Scenario& scenario,
                   const std::vector<std::string>& pci_bus_ids) {
  const Problem& p = target.problem;
  const RoutingStats stats = routing_stats(p, target.routes);
  Json tokens = Json::array(), ids = Json::array(), devices = Json::array(), buses = Json::array();
  for (std::size_t rank = 0; rank < target.routes.size(); ++rank) {
    const HostTensor& expert_ids = target.routes[rank].expert_ids;
    tokens.push_back(expert_ids.shape.dim[0]);
    ids.push_back(base64(expert_ids.bytes));  // [T, K]
    const std::size_t device = scenario.cuda.devices.empty()
                                   ? rank % std::max<std::size_t>(1, pci_bus_ids.size())
                                   : static_cast<std::size_t>(scenario.cuda.devices[rank]);
    devices.push_back(device);
    buses.push_back(device < pci_bus_ids.size() ? pci_bus_ids[device] : "");
  }
  return {{"cmd", "setup"},
          {"direction", name(scenario.direction)},
          {"hidden", p.hidden},
          {"intermediate", p.intermediate},
          {"num_experts", p.num_experts},
          {"top_k", p.top_k},
          {"seed", scenario.seed},
          {"tokens", tokens},
          {"devices", devices},
          {"pci_bus_ids", buses},
          {"rows_per_expert", stats.rows_per_expert},
          {"ids", name(target.routes.front().expert_ids.dtype)},
          {"expert_ids", ids}};
}

}  // namespace

BaselineWorker::BaselineWorker(const std::filesystem::path& program, Baseline baseline)
    : baseline_(baseline) {
  signal(SIGPIPE, SIG_IGN);  // a worker that has ended is an error of ask()
  std::array<int, 2> to{}, from{};
  if (pipe2(to.data(), O_CLOEXEC) != 0 || pipe2(from.data(), O_CLOEXEC) != 0)
    throw Failure(fmt::format("a pipe cannot be made: {}", std::strerror(errno)));
  errors_ = memfd_create("stderr", MFD_CLOEXEC);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to[0], 0);
  posix_spawn_file_actions_adddup2(&actions, from[1], 1);
  posix_spawn_file_actions_adddup2(&actions, errors_, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  std::string python = "python3", file = program.string(), word = name(baseline);
  const std::array<char*, 4> argv = {python.data(), file.data(), word.data(), nullptr};
  const int error =
      posix_spawnp(&pid_, python.c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(to[0]);
  close(from[1]);
  to_ = to[1];
  from_ = from[0];
  if (error != 0) pid_ = -1;  // answer() says that it ended
}

BaselineWorker::BaselineWorker(BaselineWorker&& other) noexcept
    : baseline_(other.baseline_),
      pid_(std::exchange(other.pid_, -1)),
      to_(std::exchange(other.to_, -1)),
      from_(std::exchange(other.from_, -1)),
      errors_(std::exchange(other.errors_, -1)),
      unread_(std::move(other.unread_)) {}

BaselineWorker::~BaselineWorker() {
  for (const int fd : {to_, from_, errors_}) {
    if (fd >= 0) close(fd);
  }
  if (pid_ < 0) return;
  for (int i = 0; i < 30; ++i) {  // its input has ended: it goes by itself
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      kill(-pid_, SIGKILL);  // what it may have left behind
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  kill(-pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

// The last line of its standard error, for the reason.
std::string BaselineWorker::last_words() const {
  std::string text(4096, '\0');
  const off_t size = lseek(errors_, 0, SEEK_END);
  const off_t begin = std::max<off_t>(0, size - static_cast<off_t>(text.size()));
  const ssize_t got = pread(errors_, text.data(), text.size(), begin);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(0, got)));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  const std::string line = text.substr(text.rfind('\n') + 1);
  return line.empty() ? "it said nothing" : line;
}

Json BaselineWorker::answer(double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (;;) {
    if (const std::size_t end = unread_.find('\n'); end != std::string::npos) {
      const std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      const Json json = Json::parse(line, nullptr, false);
      if (!json.is_object()) throw Failure(fmt::format("it answered '{}'", line));
      if (json.contains("error")) throw Failure(json.at("error").get<std::string>());
      return json;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd wanted{.fd = from_, .events = POLLIN, .revents = 0};
    if (left.count() <= 0 || poll(&wanted, 1, static_cast<int>(left.count())) == 0) {
      if (pid_ > 0) kill(-pid_, SIGKILL);  // a late answer must not be taken for a later one
      throw Failure(fmt::format("no answer within {:.0f} s", timeout_s));
    }
    std::array<char, 65536> buffer{};
    const ssize_t got = read(from_, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      throw Failure(pid_ < 0 ? "python3 cannot be started" : "it ended: " + last_words());
    unread_.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

Json BaselineWorker::ask(const Json& command, double timeout_s) {
  const std::string line = command.dump() + "\n";
  for (std::size_t sent = 0; sent < line.size();) {
    const ssize_t n = write(to_, line.data() + sent, line.size() - sent);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;  // it has ended: answer() says why
    sent += static_cast<std::size_t>(n);
  }
  return answer(timeout_s);
}

Baselines::Baselines(const Scenario& scenario, const std::filesystem::path& program) {
  for (const Baseline baseline : scenario.baselines) {
    if (program.empty()) {
      notes_.push_back(
          fmt::format("{} was not measured: bench/baselines.py was not found; --baselines PATH "
                      "says where it is",
                      name(baseline)));
    } else {
      workers_.emplace_back(program, baseline);
    }
  }
}

std::vector<TimedRun> Baselines::timed_runs(const std::string& shape, const BenchTarget& target,
                                            const Scenario& scenario,
                                            const std::vector<std::string>& pci_bus_ids) {
  std::vector<BaselineWorker> alive;
  if (!greeted_) {
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      try {
        versions_.update(workers_[i].answer(kStartSeconds));
        alive.push_back(std::move(workers_[i]));
      } catch (const Failure& failure) {
        notes_.push_back(
            fmt::format("{} was not measured: {}", name(workers_[i].baseline()), failure.what()));
      }
    }
    greeted_ = true;
    std::swap(workers_, alive);
  }
  const Json command = setup_command(target, scenario, pci_bus_ids);
  std::vector<TimedRun> runs;
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    BaselineWorker* worker = &workers_[i];
    std::optional<std::int64_t> memory_bytes;
    try {
      const Json ready = worker->ask(command, kSetupSeconds);
      if (ready.contains("memory_bytes"))
        memory_bytes = ready.at("memory_bytes").get<std::int64_t>();
    } catch (const Failure& failure) {
      notes_.push_back(fmt::format("{} was not measured on {}: {}", name(worker->baseline()), shape,
                                   failure.what()));
      continue;
    }
    runs.push_back({name(worker->baseline()),
                    [worker](BenchMode mode) {
                      const Json got =
                          worker->ask({{"cmd", "measure"}, {"mode", name(mode)}}, kMeasureSeconds);
                      Timing timing{got.at("ms").get<double>(), std::nullopt};
                      if (got.contains("sm_clock_mhz") && got.at("sm_clock_mhz").is_number())
                        timing.sm_clock_mhz = got.at("sm_clock_mhz").get<double>();
                      return timing;
                    },
                    memory_bytes});
  }
  return runs;
}

std::filesystem::path find_baselines() {
  std::error_code error;
  for (const std::filesystem::path& root : {source_tree(), std::filesystem::current_path(error)}) {
    const std::filesystem::path path = root / "bench" / "baselines.py";
    if (!root.empty() && std::filesystem::is_regular_file(path, error)) return path;
  }
  return {};
}

}  // namespace moxie::cli
