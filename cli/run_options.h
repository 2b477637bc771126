// Everything `moxie run` can be asked for, as data, and what it amounts to: a Problem, tokens per
// rank, a Plan.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/routing.h"
#include "cli/tensors.h"
#include "moxie/moxie.h"

namespace moxie::cli {

// A count that is -1 unless given; 0 may be a legal value.
inline constexpr std::int64_t kNotGiven = -1;

enum class BackendKind { cpu, cuda };

struct RunOptions {
  BackendKind backend = BackendKind::cpu;
  // shape
  std::string preset;
  std::int64_t ranks = kNotGiven, hidden = kNotGiven, intermediate = kNotGiven, experts = kNotGiven;
  std::int64_t top_k = kNotGiven, shared_intermediate = kNotGiven, scale_down = 1;
  bool shared_output_gate = false, bias = false;
  std::optional<ActivationKind> activation;
  std::optional<double> limit, alpha;
  std::optional<DType> dtype;
  std::vector<std::int64_t> tokens;  // empty: not given; one: every rank; else one per rank
  // input
  std::string text, inputs;
  std::optional<Routing> routing;
  std::optional<RouterKind> router;
  DType ids = DType::i32;
  std::uint64_t seed = 1;
  // what to do
  bool backward = false, forward_only = false, check = false, validate = false;
  std::int64_t check_tokens = kNotGiven;  // not given: as many as take a second or two
  std::int64_t repeat = kNotGiven;
  DType grads = DType::f32;
  double timeout_s = 300;
  std::uint64_t shuffle = 0;
  std::int64_t kill_rank = kNotGiven;
  HostGemm gemm = HostGemm::automatic;
  Plan plan;
  bool plan_given = false;  // any of its options; else the layer chooses
  std::string plan_cache;
  CudaOptions cuda;
  // where results go
  std::string dump, trace, json;
};

// Registers the options; `options` must outlive `app`.
void add_run_options(CLI::App& app, RunOptions& options);
// Parts of it that other verbs have too. The group's name tells plan options from the others.
inline constexpr const char* kShapeGroup = "Shape";
inline constexpr const char* kPlanGroup = "Plan (changes the time and the memory, never the bits)";
inline constexpr const char* kCudaGroup = "CUDA (with --backend cuda)";
void add_shape_options(CLI::App& app, RunOptions& options);
CLI::Option* add_backend_option(CLI::App& app, BackendKind& backend);
void add_plan_options(CLI::App& app, Plan& plan);
void add_cuda_options(CLI::App& app, CudaOptions& cuda);
// Whether the command line has any option of that group.
bool any_given(const CLI::App& app, const char* group);
// Options that contradict each other. Throws Usage.
void check_consistency(const RunOptions& options);

struct Setup {
  BackendKind backend = BackendKind::cpu;
  Problem problem;
  std::vector<std::int64_t> tokens;  // per rank
  RunTypes types;
  Routing routing;
  RouterKind router = RouterKind::softmax;
  std::string shape_name;  // "kimi-k2.5 scaled down by 16", "default shape", ...
  bool backward = true;
  std::int64_t repeat = 1;
};
// Throws Usage or Error (invalid_argument).
Setup make_setup(const RunOptions& options);

// The same sentence with the option's name instead of the field's: "plan.num_slabs is 0" ->
// "--slabs is 0".
std::string in_option_words(std::string sentence);

}  // namespace moxie::cli
