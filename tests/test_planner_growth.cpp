// What a simulation costs grows with what is simulated, not faster: events of the virtual clock per
// task and unit that a worker claims, from 8 ranks to two domains. Counts, not times, so that a
// busy machine changes nothing; times are bench/bench_planner.cpp's.
#include <gtest/gtest.h>

#include "moxie/planner/choose.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {
namespace {

struct Cost {
  double events = 0, claims = 0, workers = 0;
};

Cost cost_of(std::int64_t ranks, Direction direction) {
  const Problem p = study_problem("kimi-k2.5", ranks, 2048);
  const Machine m = machine(find_device("gb300"));
  const RoutingCounts routing =
      make_routing(p, std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 2048));
  const SimResult r = simulate(p, pipeline::resolve(p, {}), routing, m, {.direction = direction});
  // A CTA and its spare warps are a worker each.
  return {static_cast<double>(r.num_events), static_cast<double>(r.num_tasks + r.num_units),
          2.0 * static_cast<double>(m.num_sms() * ranks)};
}

// An end for each claim; one in seven waits; and each worker begins, stages and leaves.
TEST(PlannerGrowth, EventsPerClaimStayBounded) {
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    for (const std::int64_t ranks : {8, 32, 72, 128}) {
      const Cost c = cost_of(ranks, direction);
      EXPECT_GE(c.events, c.claims) << ranks << " ranks, " << name(direction);
      EXPECT_LE(c.events, 1.15 * c.claims + 6 * c.workers)
          << ranks << " ranks, " << name(direction) << ": " << c.claims << " claims, " << c.workers
          << " workers";
    }
  }
}

}  // namespace
}  // namespace moxie::planner
