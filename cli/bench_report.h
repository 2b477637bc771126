// What `moxie bench layer` found out about each shape: lines for people, rows for machines. A
// figure that was not measured is null, and absent from the lines.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_model.h"
#include "cli/bench_target.h"
#include "cli/json.h"

namespace moxie::cli {

struct BenchRow {
  std::string shape;
  Direction direction = Direction::forward;
  Problem problem;
  Plan plan;
  std::vector<std::int64_t> tokens;  // [R]
  std::vector<std::int64_t> rows_per_rank;
  std::string routing;
  std::map<BenchMode, double> predicted_ms = {};
  LinkBytes link = {};
  bool has_links = false;
  double max_rel_l2 = 0;
  std::optional<std::int64_t> launches;
  std::map<std::string, std::int64_t> memory_bytes = {};  // by run, TimedRun::memory_bytes
  std::vector<BenchMode> modes;
  std::map<std::pair<std::string, BenchMode>, std::vector<Timing>> samples;  // by run and mode

  std::optional<double> median_ms(const std::string& run, BenchMode mode) const;
  std::optional<double> median_clock_mhz(const std::string& run, BenchMode mode) const;
};

std::string bench_line(const BenchRow& row);
Json to_json(const BenchRow& row);

}  // namespace moxie::cli
