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

// Useful work of the rank with the most rows: 6 H I per row, backward twice that.
double tflop(const BenchRow& row) {
  const std::int64_t rows = *std::max_element(row.rows_per_rank.begin(), row.rows_per_rank.end());
  const double per_weight = row.direction == Direction::forward ? 6e-12 : 12e-12;
  return per_weight * static_cast<double>(rows) * static_cast<double>(row.problem.hidden) *
         static_cast<double>(row.problem.intermediate);
}

std::optional<double> tflops(const BenchRow& row) {
  const auto ms = row.median_ms("moxie", row.modes.front());
  if (!ms || *ms <= 0) return std::nullopt;
  return 1e3 * tflop(row) / *ms;
}

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  return Samples{std::move(values)}.median();
}

double gigabytes(std::int64_t num_bytes) { return 1e-9 * static_cast<double>(num_bytes); }

// Of the way that has more to carry, over the whole pass of the first mode.
std::optional<double> link_gbps(const BenchRow& row) {
  const auto ms = row.median_ms("moxie", row.modes.front());
  if (!row.has_links || row.problem.num_ranks == 1 || !ms || *ms <= 0) return std::nullopt;
  return 1e3 * gigabytes(std::max(row.link.in, row.link.out)) / *ms;
}

// What the schedule adds: the median of the differences between turns that follow each other, so
// that a card that warms up does not count.
Json schedule_handshake_us(const BenchRow& row, BenchMode mode) {
  const auto whole = row.samples.find({"moxie zero_copy", mode}),
             kept = row.samples.find({"moxie kept_schedule", mode});
  if (whole == row.samples.end() || kept == row.samples.end()) return Json();
  std::vector<double> difference_us;
  for (std::size_t i = 0; i < std::min(whole->second.size(), kept->second.size()); ++i)
    difference_us.push_back((whole->second[i].ms - kept->second[i].ms) * 1e3);
  return Samples(difference_us).median();
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
      "{:<15} {}, {} rank{}, {}, {} to {} rows, off by {:.1e}\n", row.shape, name(row.direction),
      row.problem.num_ranks, row.problem.num_ranks == 1 ? "" : "s", row.routing,
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
  for (const auto& [mode, ms] : row.predicted_ms) {
    text += fmt::format("  {:<10}{:<20}{:>9.3f} ms", name(mode), "predicted", ms);
    if (const auto by = ratio(ms, row.median_ms("moxie", mode)))
      text += fmt::format("   {:.3f} of what moxie takes", *by);
    text += '\n';
  }
  if (const auto gbps = link_gbps(row)) {
    text += fmt::format("  {:<10}{:<20}{:>9.3f} GB in, {:.3f} GB out: {:.0f} GB/s\n", "link",
                        "busiest rank", gigabytes(row.link.in), gigabytes(row.link.out), *gbps);
  }
  for (const auto& [run, num_bytes] : row.memory_bytes) {
    text += fmt::format("  {:<10}{:<20}{:>9.3f} GB\n", "memory", run, gigabytes(num_bytes));
  }
  return text;
}

Json to_json(const BenchRow& row) {
  const BenchMode first = row.modes.front();
  std::vector<double> moxie;
  for (const Timing& timing : row.samples.at({"moxie", first})) moxie.push_back(timing.ms);
  const Samples of_moxie{moxie};
  const auto ms = [&](const char* run) { return row.median_ms(run, first); };
  const auto zero_copy = ms("moxie zero_copy");
  const auto predicted = [&](BenchMode mode) {
    const auto found = row.predicted_ms.find(mode);
    return found == row.predicted_ms.end() ? std::nullopt : std::optional(found->second);
  };
  Json samples = Json::object();
  for (const auto& [key, timings] : row.samples) {
    Json list = Json::array();
    for (const Timing& timing : timings)
      list.push_back(Json::array({timing.ms, or_null(timing.sm_clock_mhz)}));
    samples[fmt::format("{} {}", key.first, name(key.second))] = list;
  }
  return {
      {"shape", row.shape},
      {"direction", name(row.direction)},
      {"ranks", row.problem.num_ranks},
      {"routing", row.routing},
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
      {"predicted_ms", or_null(predicted(first))},
      {"predicted_ratio", or_null(ratio(predicted(first), ms("moxie")))},
      {"predicted_sustained_ratio", or_null(ratio(predicted(BenchMode::sustained),
                                                  row.median_ms("moxie", BenchMode::sustained)))},
      {"link_gb_in", gigabytes(row.link.in)},
      {"link_gb_out", gigabytes(row.link.out)},
      {"link_gbps", or_null(link_gbps(row))},
      {"tflops", or_null(tflops(row))},
      {"zero_copy_ms", or_null(zero_copy)},
      {"schedule_handshake_us", schedule_handshake_us(row, first)},
      {"without_merge_ms", or_null(ms("moxie without_merge"))},
      {"main_grad_ms", or_null(ms("moxie main_grad"))},
      {"save_none_ms", or_null(ms("moxie save_none"))},
      {"save_z_and_x_ms", or_null(ms("moxie save_z_and_x"))},
      {"memory_bytes", row.memory_bytes},
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
