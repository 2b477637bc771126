// A benchmark scenario: one JSON file names every input of a measurement (bench/scenarios), so that
// a figure can be made again. Command-line options of `moxie bench layer` override its parts.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cli/run_options.h"

namespace moxie::cli {

struct BenchShape {
  std::string name;
  std::int64_t hidden = 0, intermediate = 0, top_k = 0, tokens_per_rank = 0;
  std::int64_t experts = 0, experts_per_rank = 0;  // one of both; the other is 0
  std::int64_t min_ranks = 1;                      // left out where there are fewer
};

// burst: 120 ms idle, one warm-up, about 24 ms of passes. sustained: at least 160 ms of the same
// load before the same window. GPUs are limited by power: the two differ by 10 to 20 %.
enum class BenchMode { burst, sustained };
enum class Baseline { gemm_only, nccl_torch };
enum class Direction { forward, backward };
const char* name(BenchMode mode);
const char* name(Baseline baseline);
const char* name(Direction direction);

// Where a layer runs.
struct RankSet {
  std::int64_t num_ranks = 1;
  std::vector<int> devices;  // [R] a GPU for each; empty: the CPU, or as World::cuda chooses
};

struct Scenario {
  std::string description;
  BackendKind backend = BackendKind::cpu;
  Direction direction = Direction::forward;
  std::int64_t num_ranks = 1;
  CudaOptions cuda;
  std::vector<BenchShape> shapes;
  Routing routing;
  // What num_ranks, cuda.devices and routing stand for one after another (variants()).
  std::vector<RankSet> rank_sets = {};
  std::vector<Routing> routings = {};
  std::uint64_t seed = 1;
  Plan plan;
  std::vector<BenchMode> modes;  // the first one gives moxie_ms and the other plain figures
  std::int64_t rounds = 5;
  std::vector<Baseline> baselines;
};

// Throws Failure that names the file, the key, the value and the nearest legal one.
Scenario read_scenario(const std::string& path);

// One scenario for each set of ranks and routing, in that order.
std::vector<Scenario> variants(const Scenario& scenario);

// The same words on the command line. Throw Usage.
std::vector<BenchMode> parse_modes(const std::string& text);
Direction parse_direction(const std::string& text);
std::vector<Routing> parse_routings(const std::string& text);
// Keeps the shapes that `text` names ("a,b"), in the scenario's order.
void keep_shapes(const std::string& text, Scenario& scenario);

// A layer and how many tokens each rank brings.
struct BenchCase {
  std::string name;
  Problem problem;
  std::vector<std::int64_t> tokens;  // [R]
};
// Throws Failure when the shape is not legal.
BenchCase case_of(const Scenario& scenario, const BenchShape& shape);

}  // namespace moxie::cli
