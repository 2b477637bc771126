#include "moxie/planner/studies.h"

#include <fmt/format.h>

#include <array>

#include "moxie/core/error.h"

namespace moxie::planner {
namespace {

struct Named {
  std::string_view name;
  Study (*run)();
};
constexpr std::array<Named, 11> kStudies = {{
    {"signalling", study_signalling},
    {"packet-bytes", study_packet_bytes},
    {"imbalance", study_imbalance},
    {"minibatch", study_minibatch},
    {"speedup", study_speedup},
    {"end-to-end", study_end_to_end},
    {"ablation", study_ablation},
    {"scale", study_scale},
    {"h200", study_h200},
    {"h200-forward", study_h200_forward},
    {"h200-backward", study_h200_backward},
}};

double pass_ms(const Problem& p, const Plan& plan, const Machine& m, Direction direction,
               const Mechanisms& mechanisms, bool symmetric) {
  const RoutingCounts routing = make_routing(
      p, std::vector<std::int64_t>(static_cast<std::size_t>(p.num_ranks), p.max_tokens));
  SimOptions o;
  o.direction = direction;
  o.symmetric = symmetric;
  o.mechanisms = mechanisms;
  return simulate(p, pipeline::resolve(p, plan), routing, m, o).ms;
}

}  // namespace

const char* name(RowKind kind) {
  switch (kind) {
    case RowKind::prediction: return "prediction";
    case RowKind::calibrated: return "calibrated";
    case RowKind::own: return "-";
  }
  return "?";
}

std::vector<std::string> study_names() {
  std::vector<std::string> names;
  for (const Named& s : kStudies) names.emplace_back(s.name);
  return names;
}

Study run_study(const std::string& name) {
  std::array<std::string_view, kStudies.size()> known;
  for (std::size_t i = 0; i < kStudies.size(); ++i) {
    if (kStudies[i].name == name) return kStudies[i].run();
    known[i] = kStudies[i].name;
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("study '{}' is not known; the nearest known one is '{}'", name,
                          closest(name, known)));
}

Problem study_problem(const std::string& preset_name, std::int64_t ranks, std::int64_t tokens) {
  Problem p = problem_of(find_preset(preset_name));
  p.num_ranks = ranks;
  p.max_tokens = tokens;
  return p;
}

double forward_ms(const Problem& p, const Plan& plan, const Machine& m,
                  const Mechanisms& mechanisms, bool symmetric) {
  return pass_ms(p, plan, m, Direction::forward, mechanisms, symmetric);
}
double backward_ms(const Problem& p, const Plan& plan, const Machine& m,
                   const Mechanisms& mechanisms, bool symmetric) {
  return pass_ms(p, plan, m, Direction::backward, mechanisms, symmetric);
}

}  // namespace moxie::planner
