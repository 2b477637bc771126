// Judging and telling: ratios of turns, the table, the sentence of what was kept.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cli/passes.h"
#include "cli/planner_words.h"
#include "cli/tune.h"

namespace moxie::cli {
namespace {

Samples milliseconds(const std::vector<Timing>& times) {
  Samples samples;
  for (const Timing& timing : times) samples.ms.push_back(timing.ms);
  return samples;
}

Ratios ratios(const BenchRow& row, const std::string& run, BenchMode mode) {
  return ratios_of(row.samples.at({run, mode}), row.samples.at({kDefaultRun, mode}));
}

const char* passes_name(Direction direction) {
  return direction == Direction::forward ? "forward" : "forward and backward";
}

Json to_json(const Ratios& r) { return {{"median", r.median}, {"p10", r.p10}, {"p90", r.p90}}; }

std::string percent_faster(double ratio) { return fmt::format("{:.1f} %", 100 * (1 - ratio)); }

std::string table_line(const BenchRow& row, const std::string& what, const std::string& run,
                       const std::optional<double>& predicted_ms, BenchMode mode) {
  const Samples ms = milliseconds(row.samples.at({run, mode}));
  std::string text = fmt::format("  {:<10}{:>7.2f}{:>10}{:>11.3f}{:>10.3f}{:>10.3f}", name(mode),
                                 static_cast<double>(row.memory_bytes.at(run)) * 1e-9,
                                 predicted_ms ? fmt::format("{:.3f}", *predicted_ms) : "-",
                                 ms.median(), ms.percentile(10), ms.percentile(90));
  if (run == kDefaultRun) return text + fmt::format("{:>25}  {}\n", "1", what);
  const Ratios r = ratios(row, run, mode);
  return text + fmt::format("{:>9.3f} ({:.3f} .. {:.3f})  {}\n", r.median, r.p10, r.p90, what);
}

// How good the planner's first choice was: its time over that of the fastest plan, by medians.
// Absent when it was not measured.
std::optional<double> first_choice_over_best(const TuneResult& t) {
  const BenchMode mode = t.row.modes.front();
  std::optional<double> first, best;
  for (std::size_t i = 0; i < t.runs.size(); ++i) {
    const double ms = *t.row.median_ms(t.runs[i], mode);
    if (t.candidates[i].first_choice) first = ms;
    best = std::min(best.value_or(ms), ms);
  }
  return first ? std::optional(*first / *best) : std::nullopt;
}

std::string verdict(const TuneResult& t) {
  const std::string where =
      t.stored.empty() ? "; stored nowhere" : fmt::format("; stored in {}", t.stored);
  if (t.kept != 0) {
    return fmt::format(
        "{}: {} faster than the default plan, and {} when measured again against it alone{}",
        t.candidates[t.kept].what,
        percent_faster(ratios(t.row, t.runs[t.kept], t.row.modes.front()).median),
        percent_faster(t.confirmed->median), where);
  }
  if (t.tried) {
    return fmt::format(
        "the default plan: {} was {} faster, but not when measured again (ratio {:.3f}, p90 "
        "{:.3f}){}",
        t.candidates[*t.tried].what,
        percent_faster(ratios(t.row, t.runs[*t.tried], t.row.modes.front()).median),
        t.confirmed->median, t.confirmed->p90, where);
  }
  return fmt::format("the default plan: no other one is faster beyond the noise{}", where);
}

}  // namespace

Ratios ratios_of(const std::vector<Timing>& times, const std::vector<Timing>& of_default) {
  Samples quotients;
  for (std::size_t i = 0; i < std::min(times.size(), of_default.size()); ++i)
    quotients.ms.push_back(times[i].ms / of_default[i].ms);
  return {quotients.median(), quotients.percentile(10), quotients.percentile(90)};
}

bool clearly_faster(const BenchRow& row, const std::string& run) {
  for (const BenchMode mode : row.modes) {
    const Ratios r = ratios(row, run, mode), noise = ratios(row, kNoiseRun, mode);
    if (mode == row.modes.front() ? r.p90 >= 1 || r.median >= noise.p10
                                  : r.median > std::max(1.0, noise.p90))
      return false;
  }
  return true;
}

std::string tune_table(const TuneResult& t) {
  const Problem& p = t.row.problem;
  std::string text = fmt::format(
      "{}, {}: {} rank{}, at most {} tokens each; off by {:.1e}, {} plans, all the same bits\n"
      "  {:<10}{:>7}{:>10}{:>11}{:>10}{:>10}{:>25}  {}\n",
      t.row.shape, passes_name(t.row.direction), p.num_ranks, p.num_ranks == 1 ? "" : "s",
      p.max_tokens, t.row.max_rel_l2, t.runs.size(), "ms, load", "GB", "predicted", "median", "p10",
      "p90", "ratio (p10 .. p90)", "differs from the default plan by");
  for (const BenchMode mode : t.row.modes) {
    for (std::size_t i = 0; i < t.runs.size(); ++i) {
      text +=
          table_line(t.row, t.candidates[i].what, t.runs[i], t.candidates[i].predicted_ms, mode);
      if (i == 0) text += table_line(t.row, "nothing: the noise", kNoiseRun, {}, mode);
    }
  }
  for (const std::string& note : t.notes) text += fmt::format("  note  {}\n", note);
  if (const auto over_best = first_choice_over_best(t))
    text += fmt::format("  the planner's first choice takes {:.3f} of the fastest plan's time\n",
                        *over_best);
  return text + fmt::format("  kept  {}\n", wrapped(verdict(t), 8));
}

Json measured_json(const TuneResult& t, const Scenario& scenario) {
  const BenchMode mode = t.row.modes.front();
  return {{"default_ms", *t.row.median_ms(kDefaultRun, mode)},
          {"plan_ms", *t.row.median_ms(t.runs[t.kept], mode)},
          {"ratio", to_json(t.kept == 0 ? Ratios{} : ratios(t.row, t.runs[t.kept], mode))},
          {"noise", to_json(ratios(t.row, kNoiseRun, mode))},
          {"mode", name(mode)},
          {"rounds", t.row.samples.at({kDefaultRun, mode}).size()},
          {"plans", t.runs.size()},
          {"routing", to_string(scenario.routing)},
          {"tokens_per_rank", t.row.tokens}};
}

Json to_json(const TuneResult& t) {
  Json plans = Json::array();
  for (std::size_t i = 0; i < t.runs.size(); ++i) {
    const Candidate& c = t.candidates[i];
    Json plan = {{"what", c.what},
                 {"first_choice", c.first_choice},
                 {"predicted_ms", c.predicted_ms ? Json(*c.predicted_ms) : Json()},
                 {"memory_bytes", t.row.memory_bytes.at(t.runs[i])},
                 {"plan", planner::to_json(c.plan)}};
    for (const BenchMode mode : t.row.modes) {
      const auto& times = t.row.samples.at({t.runs[i], mode});
      const Samples ms = milliseconds(times);
      Json samples = Json::array();
      for (const Timing& timing : times)
        samples.push_back(
            Json::array({timing.ms, timing.sm_clock_mhz ? Json(*timing.sm_clock_mhz) : Json()}));
      plan[name(mode)] = {{"median_ms", ms.median()},
                          {"p10", ms.percentile(10)},
                          {"p90", ms.percentile(90)},
                          {"ratio", to_json(ratios(t.row, t.runs[i], mode))},
                          {"samples", samples}};
    }
    plans.push_back(plan);
  }
  const std::optional<double> over_best = first_choice_over_best(t);
  Json noise;
  for (const BenchMode mode : t.row.modes)
    noise[name(mode)] = to_json(ratios(t.row, kNoiseRun, mode));
  return {{"shape", t.row.shape},
          {"direction", name(t.row.direction)},
          {"passes", name(passes_of(t.row.direction))},
          {"problem", planner::to_json(t.row.problem)},
          {"tokens_per_rank", t.row.tokens},
          {"max_rel_l2", t.row.max_rel_l2},
          {"same_bits", true},
          {"plans", plans},
          {"noise", noise},
          {"kept", t.candidates[t.kept].what},
          {"confirmed", t.confirmed ? to_json(*t.confirmed) : Json()},
          {"first_choice_over_best", over_best ? Json(*over_best) : Json()},
          {"stored", t.stored.empty() ? Json() : Json(t.stored)},
          {"notes", t.notes}};
}

}  // namespace moxie::cli
