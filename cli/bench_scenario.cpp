// Strict reading: a key that is missing, unknown or of another type is an error; values go through
// the same conversions as command-line options.
#include "cli/bench_scenario.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "cli/errors.h"
#include "cli/json.h"
#include "cli/options.h"

namespace moxie::cli {
namespace {

constexpr std::array<std::string_view, 2> kModes = {"burst", "sustained"};
constexpr std::array<std::string_view, 2> kBaselines = {"gemm_only", "nccl_torch"};
constexpr std::array<std::string_view, 2> kDirections = {"forward", "backward"};
constexpr std::array<std::string_view, 2> kBackends = {"cpu", "cuda"};
constexpr std::array<std::string_view, 14> kKeys = {
    "description", "backend", "direction", "ranks", "devices", "reserve_sms", "cluster_size",
    "shapes",      "routing", "seed",      "plan",  "modes",   "rounds",      "baselines"};
constexpr std::array<std::string_view, 8> kShapeKeys = {
    "name",  "hidden",          "intermediate", "experts", "experts_per_rank",
    "top_k", "tokens_per_rank", "min_ranks"};
constexpr Range kPositive{1, kInt32.max};

// A JSON object, and how its values are called in errors.
class Reader {
 public:
  Reader(const Json& json, std::string where, std::span<const std::string_view> keys)
      : json_(json), where_(std::move(where)) {
    if (!json.is_object()) fail(fmt::format("{} is no JSON object", json.dump()));
    for (const auto& [key, value] : json.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        fail(fmt::format("key '{}' is not known; did you mean '{}'? (known: {})", key,
                         closest(key, keys), fmt::join(keys, ", ")));
      }
    }
  }
  [[noreturn]] void fail(const std::string& why) const { throw Failure(where_ + ": " + why); }

  // Errors of the command line are errors of this file here.
  template <class Convert>
  auto converted(Convert&& convert) const {
    try {
      return convert();
    } catch (const Usage& usage) {
      fail(usage.what());
    }
  }

  bool has(const char* key) const { return json_.contains(key); }
  const Json& at(const char* key) const {
    if (!has(key)) fail(fmt::format("'{}' is missing", key));
    return json_.at(key);
  }
  const Json& list(const char* key) const {
    if (!at(key).is_array()) fail(fmt::format("'{}' is {}, not a list", key, at(key).dump()));
    return at(key);
  }
  std::string word(const Json& value, const char* key) const {
    if (!value.is_string()) fail(fmt::format("'{}' is {}, not a word", key, value.dump()));
    return value.get<std::string>();
  }
  std::string word(const char* key) const { return word(at(key), key); }
  std::int64_t integer(const Json& value, const char* key, Range range) const {
    return converted([&] { return parse_integer(quoted(key), value.dump(), range); });
  }
  std::int64_t integer(const char* key, Range range) const { return integer(at(key), key, range); }
  template <class Enum>
  Enum choice(const Json& value, const char* key, std::span<const std::string_view> known) const {
    return converted(
        [&] { return static_cast<Enum>(parse_choice(quoted(key), word(value, key), known)); });
  }

 private:
  static std::string quoted(const char* key) { return fmt::format("'{}'", key); }
  const Json& json_;
  std::string where_;
};

BenchShape read_shape(const Json& json, const std::string& where) {
  const Reader reader(json, where, kShapeKeys);
  if (reader.has("experts") && reader.has("experts_per_rank")) {
    reader.fail(
        "'experts' and 'experts_per_rank' are both there; one says how many experts there are");
  }
  BenchShape shape{.name = reader.word("name"),
                   .hidden = reader.integer("hidden", kPositive),
                   .intermediate = reader.integer("intermediate", kPositive),
                   .top_k = reader.integer("top_k", kPositive),
                   .tokens_per_rank = reader.integer("tokens_per_rank", kPositive)};
  if (reader.has("experts")) {
    shape.experts = reader.integer("experts", kPositive);
  } else {
    shape.experts_per_rank = reader.integer("experts_per_rank", kPositive);
  }
  if (reader.has("min_ranks")) shape.min_ranks = reader.integer("min_ranks", kPositive);
  return shape;
}

// {"slabs": 4, "x_ring": 8}: the plan options of the command line, without their dashes.
Plan read_plan(const Json& json, const std::string& where) {
  Plan plan;
  CLI::App app;
  add_plan_options(app, plan);
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group() != kPlanGroup) continue;
    names.push_back(option->get_single_name());
    std::replace(names.back().begin(), names.back().end(), '-', '_');
  }
  const std::vector<std::string_view> known(names.begin(), names.end());
  const Reader reader(json, where, known);
  for (const auto& [key, value] : json.items()) {
    std::string option = "--" + key;
    std::replace(option.begin(), option.end(), '_', '-');
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    reader.converted([&] {
      app.get_option(option)->add_result(text)->run_callback();
      return true;
    });
  }
  return plan;
}

// "ranks": 2, or [1, 2, 4]; "devices": [0, 1], or [[0], [0, 1]].
void read_ranks(const Reader& reader, Scenario& scenario) {
  if (reader.has("devices")) {
    const Json& devices = reader.list("devices");
    const bool several = !devices.empty() && devices.front().is_array();
    for (const Json& set : several ? devices : Json::array({devices})) {
      if (!set.is_array() || set.empty()) {
        reader.fail(
            fmt::format("'devices' has {}; it must be a list of GPUs, or a list of such "
                        "lists, none of them empty",
                        set.dump()));
      }
      RankSet ranks{.num_ranks = static_cast<std::int64_t>(set.size())};
      for (const Json& device : set)
        ranks.devices.push_back(static_cast<int>(reader.integer(device, "devices", kInt32)));
      scenario.rank_sets.push_back(ranks);
    }
  }
  std::vector<std::int64_t> counts;
  if (reader.has("ranks")) {
    const Json& ranks = reader.at("ranks");
    for (const Json& count : ranks.is_array() ? ranks : Json::array({ranks}))
      counts.push_back(reader.integer(count, "ranks", kPositive));
    if (counts.empty()) reader.fail("'ranks' is empty; at least one number is needed");
  }
  if (scenario.rank_sets.empty()) {
    for (const std::int64_t count : counts) scenario.rank_sets.push_back({count, {}});
    if (counts.empty()) scenario.rank_sets.push_back({});
    return;
  }
  std::vector<std::int64_t> named;
  for (const RankSet& ranks : scenario.rank_sets) named.push_back(ranks.num_ranks);
  if (counts.empty() || counts == named) return;
  reader.fail(
      fmt::format("'ranks' is {}; 'devices' names a GPU for {} ranks, the nearest legal value",
                  fmt::join(counts, ", "), fmt::join(named, ", ")));
}

void read_cuda(const Reader& reader, Scenario& scenario) {
  if (reader.has("reserve_sms"))
    scenario.cuda.reserve_sms = static_cast<std::int32_t>(reader.integer("reserve_sms", kInt32));
  if (reader.has("cluster_size"))
    scenario.cuda.cluster_size =
        static_cast<std::int32_t>(reader.integer("cluster_size", Range{0, 2}));
}

}  // namespace

const char* name(BenchMode mode) { return kModes[static_cast<std::size_t>(mode)].data(); }
const char* name(Baseline baseline) {
  return kBaselines[static_cast<std::size_t>(baseline)].data();
}
const char* name(Direction direction) {
  return kDirections[static_cast<std::size_t>(direction)].data();
}

Scenario read_scenario(const std::string& path) {
  const Json json = parse_json_file(path);
  const Reader reader(json, path, kKeys);
  Scenario scenario;
  if (reader.has("description")) scenario.description = reader.word("description");
  scenario.backend = reader.choice<BackendKind>(reader.at("backend"), "backend", kBackends);
  if (reader.has("direction")) {
    scenario.direction = reader.choice<Direction>(reader.at("direction"), "direction", kDirections);
  }
  read_ranks(reader, scenario);
  read_cuda(reader, scenario);
  for (const Json& shape : reader.list("shapes")) {
    scenario.shapes.push_back(
        read_shape(shape, fmt::format("{}: shape {}", path, scenario.shapes.size())));
  }
  if (scenario.shapes.empty()) reader.fail("'shapes' is empty; at least one is needed");
  const Json& routings = reader.at("routing");
  for (const Json& routing : routings.is_array() ? routings : Json::array({routings})) {
    const std::string word = reader.word(routing, "routing");
    for (const Routing& one : reader.converted([&] { return parse_routings(word); }))
      scenario.routings.push_back(one);
  }
  if (scenario.routings.empty()) reader.fail("'routing' is empty; at least one is needed");
  const std::int64_t most_ranks =
      std::max_element(scenario.rank_sets.begin(), scenario.rank_sets.end(),
                       [](const RankSet& a, const RankSet& b) { return a.num_ranks < b.num_ranks; })
          ->num_ranks;
  for (const BenchShape& shape : scenario.shapes) {
    if (shape.min_ranks <= most_ranks) continue;
    reader.fail(fmt::format("'min_ranks' of '{}' is {}; at most {} ranks are asked for", shape.name,
                            shape.min_ranks, most_ranks));
  }
  if (reader.has("seed"))
    scenario.seed = static_cast<std::uint64_t>(reader.integer("seed", Range{}));
  if (reader.has("plan")) scenario.plan = read_plan(reader.at("plan"), path + ": plan");
  for (const Json& mode : reader.list("modes"))
    scenario.modes.push_back(reader.choice<BenchMode>(mode, "modes", kModes));
  if (scenario.modes.empty()) reader.fail("'modes' is empty; at least one is needed");
  scenario.rounds = reader.integer("rounds", kPositive);
  for (const Json& baseline : reader.list("baselines"))
    scenario.baselines.push_back(reader.choice<Baseline>(baseline, "baselines", kBaselines));
  return scenario;
}

std::vector<Scenario> variants(const Scenario& scenario) {
  std::vector<Scenario> all;
  for (const RankSet& ranks : scenario.rank_sets) {
    for (const Routing& routing : scenario.routings) {
      Scenario one = scenario;
      one.num_ranks = ranks.num_ranks;
      one.cuda.devices = ranks.devices;
      one.routing = routing;
      one.rank_sets = {ranks};
      one.routings = {routing};
      std::erase_if(one.shapes,
                    [&](const BenchShape& shape) { return shape.min_ranks > ranks.num_ranks; });
      all.push_back(std::move(one));
    }
  }
  return all;
}

std::vector<BenchMode> parse_modes(const std::string& text) {
  std::vector<BenchMode> modes;
  for (const std::string_view word : split(text, ','))
    modes.push_back(static_cast<BenchMode>(parse_choice("--modes", word, kModes)));
  return modes;
}

Direction parse_direction(const std::string& text) {
  return static_cast<Direction>(parse_choice("--direction", text, kDirections));
}

std::vector<Routing> parse_routings(const std::string& text) {
  std::vector<Routing> routings;
  for (const std::string_view word : split(text, ',')) {
    routings.push_back(parse_routing(std::string(word)));
    const RoutingKind kind = routings.back().kind;
    if (kind == RoutingKind::router || kind == RoutingKind::file) {
      throw Usage(
          fmt::format("'routing' is '{}'; it must be uniform, zipf[:EXPONENT] or "
                      "hot[:EXPERT]",
                      word));
    }
  }
  return routings;
}

void keep_shapes(const std::string& text, Scenario& scenario) {
  std::vector<std::string_view> known;
  for (const BenchShape& shape : scenario.shapes) known.push_back(shape.name);
  std::vector<bool> wanted(known.size());
  for (const std::string_view word : split(text, ','))
    wanted[parse_choice("--shapes", word, known)] = true;
  std::vector<BenchShape> kept;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i]) kept.push_back(scenario.shapes[i]);
  }
  scenario.shapes = std::move(kept);
}

BenchCase case_of(const Scenario& scenario, const BenchShape& shape) {
  Problem problem;
  problem.num_ranks = scenario.num_ranks;
  problem.max_tokens = shape.tokens_per_rank;
  problem.hidden = shape.hidden;
  problem.intermediate = shape.intermediate;
  problem.num_experts =
      shape.experts > 0 ? shape.experts : shape.experts_per_rank * scenario.num_ranks;
  problem.top_k = shape.top_k;
  problem.dtype = DType::bf16;
  try {
    check(problem);
  } catch (const Error& error) {
    throw Failure(fmt::format("shape '{}': {}", shape.name, error.what()));
  }
  if (problem.top_k > problem.num_experts) {
    throw Failure(
        fmt::format("shape '{}': top_k is {}; it must be at most the number of experts, {}",
                    shape.name, problem.top_k, problem.num_experts));
  }
  return {shape.name, problem,
          std::vector<std::int64_t>(static_cast<std::size_t>(scenario.num_ranks),
                                    shape.tokens_per_rank)};
}

}  // namespace moxie::cli
