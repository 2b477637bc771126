// Studies: published figures against the simulator, and tables nobody published. Each row says what
// it stands on: a prediction, a row that a constant was calibrated on, or a figure without a
// published counterpart. Rows that do not fit are kept, with the reason.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "moxie/planner/simulate.h"

namespace moxie::planner {

enum class RowKind : std::int32_t {
  prediction,  // nothing was fitted to it
  calibrated,  // a constant was set by this row
  own,         // no published figure
};
const char* name(RowKind kind);

struct StudyRow {
  std::string label;
  std::optional<double> published;
  double simulated = 0;
  std::string unit;
  RowKind kind = RowKind::prediction;
  std::string note;  // source, or why it does not fit
};

struct Study {
  std::string name, title, source;
  std::vector<std::string> constants;  // calibrated ones, and on which rows
  std::vector<StudyRow> rows;
};

std::vector<std::string> study_names();
// Throws Error(invalid_argument) naming the closest study.
Study run_study(const std::string& name);

// studies_link.cpp
Study study_signalling();
Study study_packet_bytes();
Study study_imbalance();
Study study_minibatch();
// studies_layer.cpp
Study study_speedup();
Study study_end_to_end();
Study study_ablation();
Study study_scale();
// studies_h200.cpp: rows measured on two H200, and on one
Study study_h200();
Study study_h200_forward();
Study study_h200_backward();

// A preset's layer on R ranks of T tokens, bf16.
Problem study_problem(const std::string& preset, std::int64_t ranks, std::int64_t tokens);
double forward_ms(const Problem& problem, const Plan& plan, const Machine& machine,
                  const Mechanisms& mechanisms = {}, bool symmetric = true);
double backward_ms(const Problem& problem, const Plan& plan, const Machine& machine,
                   const Mechanisms& mechanisms = {}, bool symmetric = true);

}  // namespace moxie::planner
