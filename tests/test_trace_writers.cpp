// The timeline writers: JSON that parses and carries every nanosecond, an SVG that is well formed,
// small for any number of events, and whose figures follow from the events.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "moxie/trace/writers.h"

namespace moxie::trace {
namespace {

Event event(std::int32_t rank, Role role, std::int32_t worker, Kind kind, std::int64_t begin_ns,
            std::int64_t end_ns) {
  Event e;
  e.rank = rank;
  e.role = role;
  e.worker = worker;
  e.kind = kind;
  e.begin_ns = begin_ns;
  e.end_ns = end_ns;
  return e;
}

// Two ranks, one communication and two compute workers each, every kind once or more.
Trace small_trace(const std::string& title) {
  Trace trace;
  trace.title = title;
  trace.num_ranks = 2;
  trace.comm_workers = 1;
  trace.compute_workers = 2;
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    std::int64_t now = 0;
    for (const Kind kind : {Kind::stage, Kind::schedule, Kind::dispatch, Kind::wait, Kind::merge}) {
      trace.events.push_back(event(rank, Role::comm, 0, kind, now, now + 200'001));
      now += 200'001;
    }
    for (const Kind kind : {Kind::wait, Kind::fc1, Kind::fc2, Kind::combine}) {
      trace.events.push_back(event(rank, Role::compute, 1, kind, now - 800'000, now - 600'000));
      trace.events.back().shared = kind == Kind::fc1;
      trace.events.back().block = 3;
      now += 200'000;
    }
  }
  return trace;
}

// Every tag is closed in order: what a parser insists on.
bool well_formed(const std::string& svg) {
  std::vector<std::string> open;
  for (std::size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at + 1)) {
    const std::size_t end = svg.find('>', at);
    if (end == std::string::npos) return false;
    const std::string tag = svg.substr(at + 1, end - at - 1);
    if (tag.back() == '/') continue;
    const std::string word = tag.substr(0, tag.find(' '));
    if (word.front() != '/') {
      open.push_back(word);
    } else if (open.empty() || open.back() != word.substr(1)) {
      return false;
    } else {
      open.pop_back();
    }
  }
  return open.empty();
}

TEST(TraceWriters, NamesAreDistinctAndInDataFlowOrder) {
  std::set<std::string> names;
  for (const Kind kind : kDataFlowOrder) names.insert(name(kind));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kNumKinds));
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST(TraceWriters, Sums) {
  const Trace trace = small_trace("forward");
  EXPECT_EQ(num_workers(trace), 6);
  EXPECT_EQ(span_ns(trace), 1'000'005);
  EXPECT_EQ(time_by_kind_ns(trace)[static_cast<std::size_t>(Kind::dispatch)], 2 * 200'001);
  EXPECT_EQ(time_by_kind_ns(trace)[static_cast<std::size_t>(Kind::wait)], 2 * 400'001);
  EXPECT_EQ(span_ns(Trace{}), 0);
}

TEST(TraceWriters, AMomentBelongsToTheInnermostEvent) {
  Trace trace;
  trace.num_ranks = trace.comm_workers = trace.compute_workers = 1;
  trace.events = {event(0, Role::comm, 0, Kind::wait, 10, 30),
                  event(0, Role::comm, 0, Kind::wait, 40, 50),
                  event(0, Role::comm, 0, Kind::schedule, 0, 60),
                  event(0, Role::comm, 0, Kind::dispatch, 60, 65),
                  event(0, Role::compute, 0, Kind::fc1, 5, 20)};
  const auto sums = time_by_kind_ns(trace);
  EXPECT_EQ(sums[static_cast<std::size_t>(Kind::schedule)], 30);
  EXPECT_EQ(sums[static_cast<std::size_t>(Kind::wait)], 30);
  EXPECT_EQ(sums[static_cast<std::size_t>(Kind::dispatch)], 5);
  EXPECT_EQ(sums[static_cast<std::size_t>(Kind::fc1)], 15);
  std::int64_t end_ns = 0;
  for (const Event& piece : without_nesting(trace)) {
    if (piece.role == Role::compute) continue;
    EXPECT_EQ(piece.begin_ns, end_ns);  // no gap, no overlap
    end_ns = piece.end_ns;
  }
  EXPECT_EQ(end_ns, 65);
}

TEST(TraceWriters, JsonCarriesEveryEventExactly) {
  const std::vector<Trace> passes = {small_trace("forward \"quoted\" \\ \n"),
                                     small_trace("backward")};
  const auto json = nlohmann::json::parse(to_perfetto_json(passes));
  ASSERT_EQ(json["moxie"]["passes"].size(), 2u);
  EXPECT_EQ(json["moxie"]["passes"][0]["title"], passes[0].title);
  std::size_t num_events = 0;
  std::set<std::string> threads;
  for (const auto& item : json["traceEvents"]) {
    if (item["name"] == "thread_name") threads.insert(item["args"]["name"]);
    if (item["ph"] != "X") continue;
    const auto pass = item["args"]["pass"].get<std::size_t>();
    const Event& want = passes[pass].events[num_events++ % passes[0].events.size()];
    const std::int64_t begin_ns =
        json["moxie"]["passes"][pass]["begin_ns"].get<std::int64_t>() + want.begin_ns;
    EXPECT_EQ(std::llround(item["ts"].get<double>() * 1000), begin_ns);
    EXPECT_EQ(std::llround(item["dur"].get<double>() * 1000), want.end_ns - want.begin_ns);
    EXPECT_EQ(item["name"], name(want.kind));
    EXPECT_EQ(item["pid"], want.rank);
    EXPECT_EQ(item["args"].contains("for"), want.kind == Kind::wait);
  }
  EXPECT_EQ(num_events, 2 * passes[0].events.size());
  EXPECT_EQ(threads, (std::set<std::string>{"comm 0", "compute 0", "compute 1"}));
  EXPECT_TRUE(nlohmann::json::parse(to_perfetto_json({})).contains("traceEvents"));
}

TEST(TraceWriters, SvgNamesEveryLaneAndEveryKindThatOccurs) {
  const std::vector<Trace> passes = {small_trace("forward <1 & 2>")};
  const std::string svg = to_svg(passes, {.title = "a & b", .subtitle = "c < d"});
  EXPECT_TRUE(well_formed(svg));
  for (const char* text : {"a &amp; b", "c &lt; d", "forward &lt;1 &amp; 2&gt;", "rank 0", "rank 1",
                           "comm 0", "compute 1", "dispatch (pull)", "combine (push)", "merge",
                           "wait", "idle or preempted", "striped: shared expert", "1 ms"}) {
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  }
  EXPECT_EQ(svg.find(">wgrad"), std::string::npos);  // did not occur
  EXPECT_EQ(svg.find("rank 2"), std::string::npos);
  EXPECT_NE(svg.find(">80 %<"),
            std::string::npos);  // rank 0 comm 0: four of its five events are work
}

TEST(TraceWriters, AMillionEventsStayAPicture) {
  Trace trace;
  trace.title = "many";
  trace.num_ranks = trace.comm_workers = trace.compute_workers = 1;
  for (std::int64_t i = 0; i < 1'000'000; ++i) {
    trace.events.push_back(
        event(0, Role::compute, 0, i % 10 < 7 ? Kind::fc1 : Kind::fc2, i * 1000, i * 1000 + 990));
  }
  const std::string svg = to_svg(std::vector<Trace>{trace}, {});
  EXPECT_TRUE(well_formed(svg));
  EXPECT_LT(svg.size(), 200'000u);
  EXPECT_NE(svg.find(">99 %<"), std::string::npos);
}

TEST(TraceWriters, EmptyPasses) {
  Trace trace;
  trace.title = "nothing";
  trace.num_ranks = 1;
  trace.comm_workers = 1;
  trace.compute_workers = 1;
  EXPECT_TRUE(well_formed(to_svg(std::vector<Trace>{trace, Trace{}}, {})));
  EXPECT_TRUE(well_formed(to_svg({}, {})));
}

}  // namespace
}  // namespace moxie::trace
