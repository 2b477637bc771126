// What `moxie plan` and `moxie simulate` share: their common options, and the planner's answers as
// words and JSON.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/json.h"
#include "moxie/planner/choose.h"

namespace moxie::cli {

struct LayerOptions {
  std::string preset, device = "h200";
  std::int64_t ranks = 8;
  std::vector<std::int64_t> tokens = {8192};  // one: every rank; else one per rank
  planner::RoutingSpec routing;
  planner::Load load = planner::Load::burst;
  bool json = false;
};
// Registers them; `options` must outlive `app`.
void add_layer_options(CLI::App& app, LayerOptions& options);
// The preset as a problem of that many ranks. Throws Usage or Error.
Problem layer_problem(const LayerOptions& options);
std::vector<std::int64_t> layer_tokens(const LayerOptions& options);
planner::Machine layer_machine(const LayerOptions& options);
std::string to_string(const planner::RoutingSpec& routing);

std::string short_plan(const Plan& plan);
std::string shares(const planner::Uses& uses);  // "GEMM 93.1 %, start 4.4 %, ..."
Json to_json(const planner::SimResult& result);
Json to_json(const planner::Bounds& bounds);
// "a long paragraph" in lines of at most `width` columns, each begun by `indent` spaces but the
// first.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t width = 110);

}  // namespace moxie::cli
