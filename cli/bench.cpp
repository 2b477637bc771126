// `moxie bench layer`: builds the layer of each shape of a scenario, checks it, then times the
// layer and its baselines in turns. The order of the turns alternates from round to round, because
// a GPU's clock depends on what ran before.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

#include "cli/bench_baselines.h"
#include "cli/bench_machine.h"
#include "cli/bench_report.h"
#include "cli/bench_scenario.h"
#include "cli/bench_turns.h"
#include "cli/device_tensors.h"
#include "cli/errors.h"
#include "cli/files.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/verbs.h"

namespace moxie::cli {
namespace {

struct BenchOptions {
  std::string what, scenario, shapes, modes, direction, routing, baselines, commit, json;
  std::int64_t rounds = kNotGiven;
  bool no_baselines = false;
  Plan plan;
  CudaOptions cuda;
};

// What the command line says of the scenario's parts. Throws Usage.
void apply_options(BenchOptions& options, CLI::App& verb, Scenario& scenario) {
  if (!options.shapes.empty()) keep_shapes(options.shapes, scenario);
  if (!options.modes.empty()) scenario.modes = parse_modes(options.modes);
  if (!options.direction.empty()) scenario.direction = parse_direction(options.direction);
  if (!options.routing.empty()) scenario.routings = parse_routings(options.routing);
  if (options.rounds != kNotGiven) scenario.rounds = options.rounds;
  if (options.no_baselines) scenario.baselines.clear();
  // The scenario's plan first; then each plan or CUDA option that was given is stored once more.
  options.plan = scenario.plan;
  options.cuda = scenario.cuda;
  for (CLI::Option* option : verb.get_options([](const CLI::Option*) { return true; })) {
    const bool stored = option->get_group() == kPlanGroup || option->get_group() == kCudaGroup;
    if (stored && option->count() > 0) option->run_callback();
  }
  scenario.plan = options.plan;
  scenario.cuda = options.cuda;
  if (!scenario.cuda.devices.empty()) {
    scenario.rank_sets = {
        {static_cast<std::int64_t>(scenario.cuda.devices.size()), scenario.cuda.devices}};
  }
  const bool on_gpus = std::any_of(scenario.rank_sets.begin(), scenario.rank_sets.end(),
                                   [](const RankSet& ranks) { return !ranks.devices.empty(); });
  if (scenario.backend == BackendKind::cpu &&
      (on_gpus || scenario.cuda.reserve_sms != 0 || scenario.cuda.cluster_size != 0)) {
    throw Usage(fmt::format(
        "--devices, --reserve-sms and --cluster-size are for GPUs; the backend of {} is cpu",
        options.scenario));
  }
  for (const Scenario& one : variants(scenario)) {
    for (const BenchShape& shape : one.shapes) {  // before any work
      const Problem problem = case_of(one, shape).problem;
      pipeline::check(problem, pipeline::resolve(problem, one.plan));
    }
  }
}

BenchRow bench_shape(const Scenario& scenario, const BenchShape& shape, Baselines& baselines,
                     const std::vector<std::string>& pci_bus_ids, std::vector<std::string>& notes,
                     Progress& progress) {
  progress.show(shape.name + ": weights", 0);
  const std::unique_ptr<BenchTarget> target = make_target(scenario, case_of(scenario, shape));
  target->run_once();
  progress.show(shape.name + ": check against FP64", 0);
  BenchRow row{.shape = shape.name,
               .direction = scenario.direction,
               .problem = target->problem,
               .plan = target->plan(),
               .tokens = case_of(scenario, shape).tokens,
               .rows_per_rank = routing_stats(target->problem, target->routes).rows_per_rank,
               .routing = to_string(scenario.routing),
               .predicted_ms = predicted_ms(*target, scenario),
               .link = link_bytes(*target, scenario),
               .has_links = has_links(*target),
               .max_rel_l2 = max_relative_l2(*target, kTokensToCheck),
               .launches = target->count_launches(),
               .modes = scenario.modes};
  if (!(row.max_rel_l2 <= kMostError)) {
    throw Failure(fmt::format(
        "{}: {} off by {:.1e} (relative L2 of one row), at most {:.0e} is right; "
        "nothing was timed",
        shape.name, scenario.direction == Direction::forward ? "y is" : "y or a gradient is",
        row.max_rel_l2, kMostError));
  }
  std::vector<TimedRun> runs = target->timed_runs();
  for (TimedRun& run : baselines.timed_runs(shape.name, *target, scenario, pci_bus_ids))
    runs.push_back(std::move(run));
  for (const TimedRun& run : runs) {
    if (run.memory_bytes) row.memory_bytes[run.name] = *run.memory_bytes;
  }
  measure_in_turns(runs, scenario, row, notes, progress);
  return row;
}

// Of several sets of GPUs those that this machine has; a note says what was left out. A scenario
// that names one set is not thinned out: World::cuda says what is missing.
std::vector<Scenario> possible_variants(const Scenario& scenario, std::size_t num_gpus,
                                        std::vector<std::string>& notes) {
  if (scenario.backend == BackendKind::cpu || scenario.rank_sets.size() == 1)
    return variants(scenario);
  Scenario possible = scenario;
  std::erase_if(possible.rank_sets, [&](const RankSet& ranks) {
    const int last =
        ranks.devices.empty() ? 0 : *std::max_element(ranks.devices.begin(), ranks.devices.end());
    if (static_cast<std::size_t>(last) < num_gpus) return false;
    notes.push_back(fmt::format("{} ranks were not measured: GPU {} is theirs, GPU {} the last one",
                                ranks.num_ranks, last, static_cast<std::int64_t>(num_gpus) - 1));
    return true;
  });
  if (possible.rank_sets.empty()) throw Failure(notes.back());
  return variants(possible);
}

int bench_layer(BenchOptions& options, CLI::App& verb, const std::vector<std::string>& command) {
  static constexpr std::array<std::string_view, 1> kWhat = {"layer"};
  if (options.what.empty()) throw Usage("`moxie bench` needs a word: layer");
  parse_choice("what `moxie bench` is to measure", options.what, kWhat);
  if (options.scenario.empty())
    throw Usage("`moxie bench layer` needs --scenario FILE; there are some in bench/scenarios");
  Scenario scenario = read_scenario(options.scenario);
  apply_options(options, verb, scenario);
  if (scenario.backend == BackendKind::cuda) require_cuda();
  if (!options.json.empty() && options.json != "-") check_writable(options.json);

  Baselines baselines(scenario, options.baselines.empty()
                                    ? find_baselines()
                                    : std::filesystem::path(options.baselines));
  const BenchMachine machine = bench_machine(scenario.backend);
  const bool table = options.json != "-";
  Json report = {{"commit", options.commit.empty() ? source_commit() : Json(options.commit)},
                 {"argv", command},
                 {"machine", machine.record},
                 {"scenario", parse_json_file(options.scenario)},
                 {"notes", Json::array()},
                 {"rows", Json::array()}};
  std::vector<std::string> notes;
  for (const Scenario& one : possible_variants(scenario, machine.pci_bus_ids.size(), notes)) {
    for (const BenchShape& shape : one.shapes) {
      Progress progress;
      const BenchRow row = bench_shape(one, shape, baselines, machine.pci_bus_ids, notes, progress);
      progress.clear();
      if (table) fmt::print("{}", bench_line(row));
      std::fflush(stdout);
      report["machine"].update(baselines.versions());
      report["rows"].push_back(to_json(row));
      std::vector<std::string> all = baselines.notes();
      all.insert(all.end(), notes.begin(), notes.end());
      report["notes"] = all;
      if (!options.json.empty() && table) write_file(options.json, to_text(report));
    }
  }
  for (const Json& note : report["notes"]) {
    if (table) fmt::print("{}\n", note.get<std::string>());
  }
  if (!table) fmt::print("{}", to_text(report));
  return kExitOk;
}

}  // namespace

Verb add_bench(CLI::App& app, const std::vector<std::string>& command) {
  CLI::App* verb =
      app.add_subcommand("bench", "time a layer and its baselines, as a scenario says");
  verb->footer(
      "`moxie bench layer --scenario bench/scenarios/cpu-smoke.json` runs anywhere in seconds.\n"
      "Exit codes: 0 done, 1 failure (file, wrong y, timeout), 2 wrong usage.");
  const auto options = std::make_shared<BenchOptions>();
  BenchOptions& o = *options;
  const auto text = [&](const char* option, const char* value, const char* help,
                        std::string& target) {
    add_text(*verb, option, value, help, [&target](const std::string& given) { target = given; });
  };
  verb->add_option("WHAT", o.what, "layer: a whole pass of one layer")->type_name("");
  text("--scenario", "FILE", "every input of the measurement, as JSON (bench/scenarios)",
       o.scenario);
  text("--shapes", "A,B,...", "only these shapes of the scenario", o.shapes);
  text("--modes", "M,M", "burst, sustained [the scenario's]", o.modes);
  text("--direction", "D", "forward, backward [the scenario's]", o.direction);
  text("--routing", "R,R", "uniform, zipf[:EXPONENT], hot[:EXPERT] [the scenario's]", o.routing);
  add_integer(*verb, "--rounds", o.rounds, Range{1, 1'000'000},
              "times each run has its turn [the scenario's]");
  text("--baselines", "PATH", "baselines.py [bench/baselines.py of the source tree]", o.baselines);
  verb->add_flag("--no-baselines", o.no_baselines, "time the layer alone");
  text("--commit", "NAME", "commit of the result file [git rev-parse HEAD]", o.commit);
  text("--json", "FILE",
       "write the result file, after each shape; - writes it to standard output, instead of the "
       "table",
       o.json);
  add_cuda_options(*verb, o.cuda);
  add_plan_options(*verb, o.plan);
  return {verb, [options, verb, &command] { return bench_layer(*options, *verb, command); }};
}

}  // namespace moxie::cli
