// The baselines of `moxie bench layer`: bench/baselines.py as worker processes, one per baseline,
// asked over pipes (one JSON object per line, an answer to each). All of them live at once beside
// the layer, so that they are timed in turns. What is missing (Python, PyTorch, GPUs) is a note,
// not an error.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_target.h"
#include "cli/json.h"

namespace moxie::cli {

// One worker process. Move-only; asked to end, then killed, by its destructor.
class BaselineWorker {
 public:
  BaselineWorker(const std::filesystem::path& program, Baseline baseline);
  BaselineWorker(BaselineWorker&& other) noexcept;
  BaselineWorker& operator=(BaselineWorker&&) = delete;
  ~BaselineWorker();

  Baseline baseline() const { return baseline_; }
  // Throws Failure with the worker's own words when it answers with an error, ends or is too late.
  Json ask(const Json& command, double timeout_s);
  Json answer(double timeout_s);

 private:
  std::string last_words() const;

  Baseline baseline_;
  int pid_ = -1, to_ = -1, from_ = -1, errors_ = -1;
  std::string unread_;
};

class Baselines {
 public:
  // Starts the workers; they load while the first layer is built.
  Baselines(const Scenario& scenario, const std::filesystem::path& program);
  // The baselines that could set this layer up, ready to be timed.
  std::vector<TimedRun> timed_runs(const std::string& shape, const BenchTarget& target,
                                   const Scenario& scenario,
                                   const std::vector<std::string>& pci_bus_ids);
  const Json& versions() const { return versions_; }  // torch, nccl, cuda as the workers say
  const std::vector<std::string>& notes() const { return notes_; }  // what is missing, and why

 private:
  std::vector<BaselineWorker> workers_;
  bool greeted_ = false;
  Json versions_ = Json::object();
  std::vector<std::string> notes_;
};

// bench/baselines.py of the source tree this program was built in, or of the current folder; empty
// when there is none.
std::filesystem::path find_baselines();

}  // namespace moxie::cli
