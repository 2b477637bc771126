// `moxie trace`: draws the timeline of an earlier run from the JSON that run --trace wrote.
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <memory>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/json.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "moxie/trace/writers.h"

namespace moxie::cli {
namespace {

trace::Kind kind_from_name(const std::string& word, const std::string& path) {
  for (const trace::Kind kind : trace::kDataFlowOrder) {
    if (word == name(kind)) return kind;
  }
  throw Failure(fmt::format("{}: event '{}' is none that Moxie writes", path, word));
}

WaitFor wait_from_name(const std::string& word) {
  // Names are unknown only beyond the last one.
  for (std::int32_t i = 0; std::string_view(name(static_cast<WaitFor>(i))) != "unknown"; ++i) {
    if (word == name(static_cast<WaitFor>(i))) return static_cast<WaitFor>(i);
  }
  return WaitFor::inputs_ready;
}

std::vector<trace::Trace> read_passes(const std::string& path) {
  const Json json = parse_json_file(path);
  if (!json.is_object() || !json.contains("moxie") || !json.contains("traceEvents")) {
    throw Failure(fmt::format(
        "{} is not a timeline of Moxie; `moxie run --trace PREFIX` writes PREFIX.json", path));
  }
  std::vector<trace::Trace> passes;
  std::vector<std::int64_t> begin_ns;
  try {
    for (const Json& pass : json.at("moxie").at("passes")) {
      passes.push_back({pass.at("title").get<std::string>(),
                        pass.at("num_ranks").get<std::int32_t>(),
                        pass.at("comm_workers").get<std::int32_t>(),
                        pass.at("compute_workers").get<std::int32_t>(),
                        {}});
      begin_ns.push_back(pass.at("begin_ns").get<std::int64_t>());
    }
    for (const Json& item : json.at("traceEvents")) {
      if (item.at("ph") != "X") continue;
      const Json& args = item.at("args");
      const auto pass = args.at("pass").get<std::size_t>();
      const auto thread = item.at("tid").get<std::int32_t>();
      trace::Event event;
      event.rank = item.at("pid").get<std::int32_t>();
      event.role = thread < 2000 ? Role::comm : Role::compute;
      event.worker = thread % 1000;
      event.kind = kind_from_name(item.at("name").get<std::string>(), path);
      event.what = wait_from_name(args.value("for", std::string()));
      event.block = args.value("block", -1);
      event.tile = args.value("tile", -1);
      event.shared = args.value("shared", false);
      event.begin_ns = std::llround(item.at("ts").get<double>() * 1e3) - begin_ns.at(pass);
      event.end_ns = event.begin_ns + std::llround(item.at("dur").get<double>() * 1e3);
      passes.at(pass).events.push_back(event);
    }
  } catch (const nlohmann::json::exception& error) {
    throw Failure(fmt::format("{} is not a whole timeline of Moxie: {}", path, error.what()));
  } catch (const std::out_of_range&) {
    throw Failure(fmt::format("{}: an event names a pass that the file does not have", path));
  }
  if (passes.empty()) throw Failure(fmt::format("{} has no pass in it", path));
  return passes;
}

}  // namespace

Verb add_trace(CLI::App& app) {
  struct Options {
    std::string input, svg, title = "Moxie: one MoE layer in one pass";
  };
  CLI::App* verb = app.add_subcommand("trace", "draw the timeline of an earlier run");
  const auto options = std::make_shared<Options>();
  verb->add_option("FILE", options->input, "PREFIX.json of `moxie run --trace PREFIX`");
  verb->add_option("--svg", options->svg, "where the picture goes [FILE with .svg]")
      ->type_name("OUT.svg");
  verb->add_option("--title", options->title, "its heading")->type_name("TEXT");
  return {
      verb, [options] {
        if (options->input.empty())
          throw Usage("`moxie trace` needs a file; `moxie run --trace PREFIX` writes PREFIX.json");
        if (options->svg.empty())
          options->svg = std::filesystem::path(options->input).replace_extension(".svg").string();
        const std::vector<trace::Trace> passes = read_passes(options->input);
        const std::string subtitle = fmt::format("from {}", options->input);
        write_file(options->svg,
                   trace::to_svg(passes, {.title = options->title, .subtitle = subtitle}));
        fmt::print("{}: {} pass{}, {} ranks\n", options->svg, passes.size(),
                   passes.size() == 1 ? "" : "es", passes.front().num_ranks);
        return kExitOk;
      }};
}

}  // namespace moxie::cli
