// `moxie run`: make the inputs, run and time the layer, judge the results, write what was asked
// for. Order matters: what can be refused is refused before any work, and nothing is written before
// everything has succeeded.
#include <fmt/format.h>

#include <memory>
#include <thread>

#include "cli/bench_target.h"
#include "cli/device_tensors.h"
#include "cli/dump.h"
#include "cli/errors.h"
#include "cli/files.h"
#include "cli/inputs.h"
#include "cli/report.h"
#include "cli/verbs.h"
#include "moxie/trace/writers.h"

namespace moxie::cli {
namespace {

constexpr const char* kDefaultTrace = "moxie-run";

WorldOptions world_options(const RunOptions& options, const Setup& setup) {
  WorldOptions world;
  world.num_ranks = setup.problem.num_ranks;
  world.timeout_s = options.timeout_s;
  world.validate_finite = options.validate;
  world.gemm = options.gemm;
  world.faults.shuffle_seed = options.shuffle;
  world.plan_cache = options.plan_cache;
  if (options.kill_rank != kNotGiven) {
    if (options.kill_rank >= world.num_ranks) {
      throw Usage(
          fmt::format("--kill-rank is {}; there are {} ranks, the nearest legal value is {}",
                      options.kill_rank, world.num_ranks, world.num_ranks - 1));
    }
    world.faults.kill_rank = static_cast<std::int32_t>(options.kill_rank);
    world.faults.kill_after_steps = 3;
  }
  return world;
}

Setup setup_of(const RunOptions& options) {
  check_consistency(options);
  Setup setup;
  if (options.inputs.empty()) return make_setup(options);
  RunOptions rest = options;  // the folder says the shape; the rest comes from the options
  setup = make_setup(rest);
  read_dump_setup(options.inputs, setup);
  return setup;
}

void write_results(const RunOptions& options, RunReport& report) {
  if (!options.trace.empty()) {
    const trace::SvgOptions svg{
        .title = fmt::format("Moxie: one MoE layer over {} ranks, in one pass",
                             report.setup.problem.num_ranks),
        .subtitle =
            fmt::format("{} · {} tokens, {} rows · {} workers on {}",
                        shape_words(report.setup.problem), report.routing.num_tokens,
                        report.routing.num_rows, trace::num_workers(report.times.traces.front()),
                        report.setup.backend == BackendKind::cuda
                            ? report.place
                            : fmt::format("{} cores", std::thread::hardware_concurrency()))};
    write_file(options.trace + ".svg", trace::to_svg(report.times.traces, svg));
    write_file(options.trace + ".json", trace::to_perfetto_json(report.times.traces));
    report.files.push_back(options.trace + ".svg (picture of the timeline)");
    report.files.push_back(options.trace + ".json (the same for ui.perfetto.dev)");
  }
  if (options.json.empty()) return;
  if (options.json != "-") report.files.push_back(options.json);
  const std::string json = to_text(to_json(report));
  options.json == "-" ? static_cast<void>(fmt::print("{}", json)) : write_file(options.json, json);
}

int run(RunOptions options, const std::vector<std::string>& command) {
  if (command.size() == 2) {  // `moxie run` alone: the whole story
    options.check = true;
    options.trace = kDefaultTrace;
  }
  const bool on_cuda = options.backend == BackendKind::cuda;
  if (on_cuda) require_cuda();
  RunReport report;
  report.command = command;
  report.setup = setup_of(options);
  const Setup& setup = report.setup;
  pipeline::check(setup.problem, pipeline::resolve(setup.problem, options.plan));
  check_memory(options, setup);
  if (!options.trace.empty()) check_writable(options.trace + ".svg");
  if (!options.json.empty() && options.json != "-") check_writable(options.json);
  if (!options.dump.empty()) check_new_folder(options.dump);

  Progress progress;
  const Inputs inputs = make_inputs(options, setup, progress);
  report.origin = inputs.origin;
  report.routing = routing_stats(setup.problem, inputs.ranks);
  World world = on_cuda ? World::cuda(world_options(options, setup), options.cuda)
                        : World::cpu(world_options(options, setup));
  report.place = on_cuda ? gpus_words(options.cuda, setup.problem.num_ranks) : "the CPU";
  report.gemm = world.describe_gemm();
  std::vector<RankResults> results;
  {
    Layer layer = options.plan_given ? Layer(world, setup.problem, options.plan)
                                     : Layer(world, setup.problem);
    report.plan = layer.plan();
    report.plan_source = layer.plan_source();
    report.memory_bytes = memory_bytes(layer);
    for (std::size_t rank = 0; rank < setup.tokens.size(); ++rank) {
      results.push_back(allocate_results(setup.problem, setup.types,
                                         static_cast<std::int64_t>(rank), setup.tokens[rank],
                                         setup.backward));
    }
    std::unique_ptr<DeviceTensors> device;
    if (on_cuda) {
      device = std::make_unique<DeviceTensors>(rank_devices(options.cuda, setup.problem.num_ranks),
                                               inputs.ranks, results);
    }
    report.times = run_passes(world, layer, setup, inputs.ranks, results, device.get(), progress);
  }
  if (options.check) {
    report.check = check_results(
        setup.problem, inputs.ranks, results,
        {.tokens = options.check_tokens,
         .backward = setup.backward,
         .seed = options.seed,
         .progress = [&](double done) { progress.show("check against FP64", done); }});
    report.same_bits = check_same_bits(world, options, setup, inputs.ranks, results, progress);
  }
  if (!options.dump.empty()) {
    progress.show("dump", 0.5);
    StagedDir dump(options.dump);
    write_dump(dump.path(), setup, report.plan, inputs.origin, inputs.ranks, results);
    dump.commit();
    report.files.push_back(options.dump + " (inputs and results as .npy)");
  }
  progress.clear();
  write_results(options, report);
  if (options.json != "-") fmt::print("{}", to_table(report));
  if (report.check && !report.check->ok())
    throw Failure("check failed: " + report.check->worst_element);
  if (report.same_bits && !report.same_bits->ok) {
    throw Failure("not the same bits under another plan: " + report.same_bits->difference);
  }
  return kExitOk;
}

}  // namespace

Verb add_run(CLI::App& app, const std::vector<std::string>& command) {
  CLI::App* verb = app.add_subcommand("run", "run, time, check and draw a whole MoE layer");
  verb->footer(
      "Without options: 4 ranks, 256 bytes of README.md on each, forward and backward, --check "
      "--trace moxie-run.\n"
      "Exit codes: 0 done, 1 failure (file, check, timeout), 2 wrong usage.");
  const auto options = std::make_shared<RunOptions>();
  add_run_options(*verb, *options);
  return {verb, [options, verb, &command] {
            options->plan_given = any_given(*verb, kPlanGroup);
            return run(*options, command);
          }};
}

}  // namespace moxie::cli
