// The command `moxie`: finds the verb, runs it, turns what it throws into one sentence and an exit
// code (0 done, 1 failure, 2 wrong usage). Everything else is in the verbs, one file each.
#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <new>
#include <string_view>

#include "cli/errors.h"
#include "cli/options.h"
#include "cli/run_options.h"
#include "cli/verbs.h"
#include "moxie/moxie.h"

namespace moxie::cli {
namespace {

int fail(int code, const std::string& sentence) {
  std::fflush(stdout);
  fmt::print(stderr, "moxie: {}\n", sentence);
  return code;
}

void reject_unknown_verb(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining();
  if (words.empty()) return;
  static constexpr std::array<std::string_view, 8> kVerbs = {
      "run", "bench", "tune", "plan", "simulate", "presets", "doctor", "trace"};
  if (words.front().starts_with("-")) {
    throw Usage(fmt::format(
        "`moxie` has no option {} before a verb; `moxie --help` lists the verbs", words.front()));
  }
  throw Usage(
      fmt::format("'{}' is no verb of moxie; did you mean '{}'? (`moxie --help` lists them)",
                  words.front(), closest(words.front(), kVerbs)));
}

int parse_and_run(CLI::App& app, const std::vector<Verb>& verbs, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    throw Usage(
        fmt::format("{}; `moxie --help` and `moxie run --help` say what there is", error.what()));
  }
  for (const Verb& verb : verbs) {
    if (!verb.app->parsed()) continue;
    reject_extras(*verb.app, "moxie " + verb.app->get_name());
    return verb.run();
  }
  reject_unknown_verb(app);
  fmt::print("{}", app.help());
  return kExitOk;
}

int main_function(int argc, char** argv) {
  const std::vector<std::string> command(argv, argv + argc);
  CLI::App app("Moxie: a whole Mixture-of-Experts layer in one pass");
  app.name("moxie");
  app.set_version_flag("--version", "moxie " + version());
  app.require_subcommand(0, 1);
  app.allow_extras();
  std::vector<Verb> verbs = {add_run(app, command), add_bench(app, command), add_tune(app, command),
                             add_plan(app),         add_simulate(app),       add_presets(app),
                             add_doctor(app),       add_trace(app)};
  for (const Verb& verb : verbs) verb.app->allow_extras();
  try {
    return parse_and_run(app, verbs, argc, argv);
  } catch (const Usage& usage) {
    return fail(kExitUsage, usage.what());
  } catch (const Failure& failure) {
    return fail(kExitFailure, failure.what());
  } catch (const Error& error) {
    fail(exit_code(error), in_option_words(error.what()));
    for (const WaitRecord& record : error.waits()) fmt::print(stderr, "  {}\n", to_string(record));
    return exit_code(error);
  } catch (const std::bad_alloc&) {
    return fail(
        kExitFailure,
        "this machine has not enough memory for that run; give fewer --tokens or --scale-down");
  } catch (const std::exception& error) {
    return fail(kExitFailure, error.what());
  }
}

}  // namespace
}  // namespace moxie::cli

int main(int argc, char** argv) { return moxie::cli::main_function(argc, argv); }
