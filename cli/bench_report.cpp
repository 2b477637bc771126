// Medians over the rounds. The first mode of the scenario gives the plain figures.
#include "cli/bench_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/passes.h"

namespace moxie::cli {
namespace {

template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

std::optional<double> ratio(const std::optional<double>& a, const std::optional<double>& b) {
  return a && b && *b > 0 ? std::optional(*a / *b) : std::nullopt;
}

// Useful work of the rank with the most rows.
double tflop(const BenchRow& row) {
  const std::int64_t rows = *std::max_element(row.rows_per_rank.begin(), row.rows_per_rank.end());
  return 6e-12 * static_cast<double>(rows) * static_cast<double>(row.problem.hidden) *
         static_cast<double>(row.problem.intermediate);
}

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  return Samples{std::move(values)}.median();
}

}  // namespace

std::optional<double> BenchRow::median_ms(const std::string& run, BenchMode mode) const {
  std::vector<double> values;
  if (const auto found = samples.find({run, mode}); found != samples.end()) {
    for (const Timing& timing : found->second) values.push_back(timing.ms);
  }
  return median(std::move(values));
}

std::optional<double> BenchRow::median_clock_mhz(const std::string& run, BenchMode mode) const {
  std::vector<double> values;
  if (const auto found = samples.find({run, mode}); found != samples.end()) {
    for (const Timing& timing : found->second) {
      if (timing.sm_clock_mhz) values.push_back(*timing.sm_clock_mhz);
    }
  }
  return median(std::move(values));
}

std::string bench_line(const BenchRow& row) {
  std::string text = fmt::format(
      "{:<15}{} rank{}, {} to {} rows, y off by {:.1e}\n", row.shape, row.problem.num_ranks,
      row.problem.num_ranks == 1 ? "" : "s",
      *std::min_element(row.rows_per_rank.begin(), row.rows_per_rank.end()),
      *std::max_element(row.rows_per_rank.begin(), row.rows_per_rank.end()), row.max_rel_l2);
  for (const BenchMode mode : row.modes) {
    for (const auto& [key, timings] : row.samples) {
      const auto& [run, of_mode] = key;
      const auto ms = row.median_ms(run, mode);
      if (of_mode != mode || !ms) continue;
      text += fmt::format("  {:<10}{:<20}{:>9.3f} ms{:>8.1f} TFLOP/s", name(mode), run, *ms,
                          1e3 * tflop(row) / *ms);
      if (const auto mhz = row.median_clock_mhz(run, mode))
        text += fmt::format("{:>6.0f} MHz", *mhz);
      if (run != "moxie") {
        if (const auto by = ratio(row.median_ms("moxie", mode), ms))
          text += fmt::format("   moxie takes {:.3f} of it", *by);
      }
      text += '\n';
    }
  }
  return text;
}

Json to_json(const BenchRow& row) {
  const BenchMode first = row.modes.front();
  std::vector<double> moxie;
  for (const Timing& timing : row.samples.at({"moxie", first})) moxie.push_back(timing.ms);
  const Samples of_moxie{moxie};
  const auto ms = [&](const char* run) { return row.median_ms(run, first); };
  const auto kept = ms("moxie kept_schedule"), zero_copy = ms("moxie zero_copy");
  Json samples = Json::object();
  for (const auto& [key, timings] : row.samples) {
    Json list = Json::array();
    for (const Timing& timing : timings)
      list.push_back(Json::array({timing.ms, or_null(timing.sm_clock_mhz)}));
    samples[fmt::format("{} {}", key.first, name(key.second))] = list;
  }
  return {{"shape", row.shape},
          {"direction", "forward"},
          {"ranks", row.problem.num_ranks},
          {"moxie_ms", of_moxie.median()},
          {"gemm_only_ms", or_null(ms("gemm_only"))},
          {"nccl_torch_ms", or_null(ms("nccl_torch"))},
          {"p10", of_moxie.percentile(10)},
          {"p90", of_moxie.percentile(90)},
          {"n", moxie.size()},
          {"ratio", or_null(ratio(ms("moxie"), ms("gemm_only")))},
          {"sustained_ratio", or_null(ratio(row.median_ms("moxie", BenchMode::sustained),
                                            row.median_ms("gemm_only", BenchMode::sustained)))},
          {"nccl_ratio", or_null(ratio(ms("nccl_torch"), ms("moxie")))},
          {"zero_copy_ms", or_null(zero_copy)},
          {"schedule_handshake_us", kept && zero_copy ? Json((*zero_copy - *kept) * 1e3) : Json()},
          {"mode", name(first)},
          {"sm_clock_mhz", or_null(row.median_clock_mhz("moxie", first))},
          {"gemm_only_clock_mhz", or_null(row.median_clock_mhz("gemm_only", first))},
          {"max_rel_l2", row.max_rel_l2},
          {"launches", or_null(row.launches)},
          {"rows_per_rank", row.rows_per_rank},
          {"problem", to_json(row.problem)},
          {"plan", to_string(row.plan)},
          {"samples", samples}};
}

}  // namespace moxie::cli
