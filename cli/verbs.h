// The verbs of the command. Each add_<verb> registers its options and returns what runs it after
// parsing; that function returns the exit code, or throws Usage, Failure or Error (cli/errors.h).
#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace moxie::cli {

struct Verb {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

Verb add_run(CLI::App& app, const std::vector<std::string>& command);
Verb add_bench(CLI::App& app, const std::vector<std::string>& command);
Verb add_presets(CLI::App& app);
Verb add_doctor(CLI::App& app);
Verb add_trace(CLI::App& app);
Verb add_plan(CLI::App& app);
Verb add_simulate(CLI::App& app);
Verb add_tune(CLI::App& app, const std::vector<std::string>& command);

}  // namespace moxie::cli
