// Predictions against measured and published rows: those measured on 2 x H200 within their bounds
// and as docs/planner.md shows them, published ones within theirs or known misses. No constant is
// fitted to a row except where the study says so.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <sstream>

#include "moxie/planner/studies.h"
#include "tests/support/expect_error.h"

namespace moxie::planner {
namespace {

std::string document() {
  std::ostringstream text;
  text << std::ifstream(MOXIE_SOURCE_DIR "/docs/planner.md").rdbuf();
  return text.str();
}

// One line of the tables in docs/planner.md.
std::string line_of(const StudyRow& r) {
  return fmt::format("| {} | {:.3f} | {:.3f} | {:.3f} | {} |", r.label, *r.published, r.simulated,
                     r.simulated / *r.published, name(r.kind));
}

const StudyRow& row(const Study& s, const std::string& label) {
  for (const StudyRow& r : s.rows) {
    if (r.label == label) return r;
  }
  ADD_FAILURE() << "no row " << label;
  return s.rows.front();
}

TEST(PlannerRows, MeasuredOnTwoH200) {
  const Study s = run_study("h200");
  const std::string doc = document();
  int checked = 0;
  for (const StudyRow& r : s.rows) {
    ASSERT_TRUE(r.published);
    const double bound = r.label.starts_with("Moxie forward") ? 0.10 : 0.15;
    EXPECT_NEAR(r.simulated / *r.published, 1.0, bound) << r.label;
    EXPECT_NE(doc.find(line_of(r)), std::string::npos) << "docs/planner.md needs the line\n"
                                                       << line_of(r);
    ++checked;
  }
  EXPECT_EQ(checked, 20);
}

TEST(PlannerRows, MeasuredOnOneH200) {
  const std::string doc = document();
  for (const auto& [study, num_rows] : {std::pair("h200-forward", 10u), {"h200-backward", 20u}}) {
    const Study s = run_study(study);
    for (const StudyRow& r : s.rows) {
      ASSERT_TRUE(r.published);
      EXPECT_NEAR(r.simulated / *r.published, 1.0, 0.10) << r.label;
      EXPECT_NE(doc.find(line_of(r)), std::string::npos) << "docs/planner.md needs the line\n"
                                                         << line_of(r);
    }
    EXPECT_EQ(s.rows.size(), num_rows);
  }
}

TEST(PlannerRows, PublishedWithinTheirBoundsOrKnownMisses) {
  struct Bound {
    const char* study;
    const char* label;
    double relative;  // 0: a known miss, the document says why
  };
  const std::vector<Bound> bounds = {
      {"signalling", "push, 71 peers", 0.10},
      {"signalling", "pull, 71 peers", 0},
      {"packet-bytes", "push", 0.10},
      {"packet-bytes", "pull", 0.10},
      {"minibatch", "512 rows", 0.15},
      {"minibatch", "2560 rows", 0.15},
      {"minibatch", "rows of two full waves", 0.10},
      {"speedup", "best BF16 forward", 0.20},
      {"speedup", "best BF16 backward", 0.20},
      {"speedup", "best MXFP8 forward", 0.20},
      {"speedup", "best MXFP8 backward", 0},
      {"end-to-end", "step speed-up if the step were nothing but this layer", 0.20},
  };
  const std::string doc = document();
  std::map<std::string, Study> studies;
  for (const Bound& b : bounds) {
    if (!studies.contains(b.study)) studies[b.study] = run_study(b.study);
    const StudyRow& r = row(studies[b.study], b.label);
    if (b.relative > 0)
      EXPECT_NEAR(r.simulated / *r.published, 1.0, b.relative) << b.study << ": " << b.label;
    else
      EXPECT_TRUE(r.note.starts_with("misses")) << b.study << ": " << b.label;
    EXPECT_NE(doc.find(line_of(r)), std::string::npos) << "docs/planner.md needs the line\n"
                                                       << line_of(r);
  }
  EXPECT_EQ(row(studies["minibatch"], "2560 rows").kind, RowKind::calibrated);
}

TEST(PlannerRows, UnknownStudyNamesTheNearest) {
  test::expect_error(ErrorCode::invalid_argument, {"study 'minibach'", "'minibatch'"},
                     [] { run_study("minibach"); });
  EXPECT_EQ(study_names().size(), 11u);
}

// Unless a study says otherwise, a token crosses a link once per rank where the plan has a slot for
// every row, as in the kernels: with a smaller ring, or pushed, every route crosses.
TEST(PlannerRows, TokensCrossLinksAsInTheKernels) {
  const Machine m = machine(find_device("h200"));
  const Problem p = study_problem("qwen3-30b-a3b", 4, 2048);
  const RoutingCounts routing = make_routing(p, {2048, 2048, 2048, 2048});
  const auto sent = [&](Plan plan, std::optional<bool> dedupe, Workers workers = Workers::gpu) {
    SimOptions o;
    o.workers = workers;
    o.mechanisms.dedupe = dedupe;
    return simulate(p, pipeline::resolve(p, plan), routing, m, o).link.sent_bytes;
  };
  Plan whole, small, push;
  whole.save = small.save = push.save = SavePolicy::none;
  small.x_ring_blocks = 48;
  push.dispatch = DispatchMode::push;
  EXPECT_LT(sent(whole, {}), 0.9 * sent(whole, false));
  EXPECT_NEAR(sent(whole, {}) / sent(whole, true), 1, 1e-6);  // own rows cross no link
  EXPECT_EQ(sent(small, {}), sent(small, false));
  EXPECT_EQ(sent(push, {}), sent(push, false));
  EXPECT_EQ(sent(whole, {}, Workers::as_plan), sent(whole, false, Workers::as_plan));  // the twin
}

// More ranks: the simulated rank stands for all of them up to the noise of routing.
TEST(PlannerRows, OneOfEqualRanksStandsForAll) {
  const Machine m = machine(find_device("gb300"));
  Plan plan;
  plan.save = SavePolicy::none;
  for (const DispatchMode dispatch : {DispatchMode::pull, DispatchMode::push}) {
    plan.dispatch = dispatch;
    const Problem p = study_problem("deepseek-v3", 16, 2048);
    const double all = forward_ms(p, plan, m, {}, false), one = forward_ms(p, plan, m, {}, true);
    EXPECT_NEAR(one / all, 1.0, 0.05) << name(dispatch);
  }
}

}  // namespace
}  // namespace moxie::planner
