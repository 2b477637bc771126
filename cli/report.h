// What a run found out, once: printed as a table for people, as JSON for machines.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/check.h"
#include "cli/json.h"
#include "cli/passes.h"
#include "cli/routing.h"
#include "cli/run_options.h"

namespace moxie::cli {

struct RunReport {
  std::vector<std::string> command;  // argv
  Setup setup;
  Plan plan;  // resolved
  PlanSource plan_source;
  std::string place = "the CPU";  // or "2 GPUs"
  std::string gemm, origin;
  std::int64_t memory_bytes = 0;  // heap and workspace of one rank; all are alike
  RoutingStats routing;
  PassTimes times;
  std::optional<CheckReport> check;
  std::optional<SameBits> same_bits;
  std::vector<std::string> files;  // written: picture, timeline, dump
};

// Useful work: padding, recomputation and idle slots do not count.
double forward_flops(const Problem& problem, const RoutingStats& routing);

std::string plan_words(const Plan& plan, BackendKind backend);
std::string shape_words(const Problem& problem);
std::string to_table(const RunReport& report);
Json to_json(const RunReport& report);

}  // namespace moxie::cli
