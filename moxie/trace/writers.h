// Turns traces into files people open: a Chrome/Perfetto JSON (ui.perfetto.dev) and a
// self-contained SVG picture, and sums them up for tables. Depends on the standard library only;
// returns text, so that the caller decides where it goes. Several passes (forward, backward) go
// into one file: behind each other in the JSON, below each other in the SVG.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moxie/trace/trace.h"

namespace moxie::trace {

// The order in which a token meets the kinds, forward then backward; legends and tables follow it.
inline constexpr std::array<Kind, kNumKinds> kDataFlowOrder = {
    Kind::stage, Kind::schedule, Kind::dispatch, Kind::fc1,   Kind::fc2, Kind::dgrad,
    Kind::dx,    Kind::wgrad,    Kind::combine,  Kind::merge, Kind::wait};

// End of the last event: the time the pass took on its slowest worker.
std::int64_t span_ns(const Trace& trace);
// Events may lie inside each other (a wait inside schedule). Here each moment of a worker belongs
// to the innermost one: the outer event is cut into the pieces that are its own. Pictures and sums
// are made of these.
std::vector<Event> without_nesting(const Trace& trace);
// Worker time by kind, summed over all workers of all ranks, each moment counted once; index =
// Kind.
std::array<std::int64_t, kNumKinds> time_by_kind_ns(const Trace& trace);
std::int64_t num_workers(const Trace& trace);

// {"traceEvents": [...], "moxie": {"passes": [...]}}: process = rank, thread = worker, times in
// microseconds. The "moxie" part holds what a reader needs to get the passes back (`moxie trace`
// does).
std::string to_perfetto_json(std::span<const Trace> passes);

struct SvgOptions {
  std::string title;     // the picture's heading
  std::string subtitle;  // shape and plan, one line
  double width_px = 1200;
};
// One panel per pass, one group per rank, one lane per worker, a legend in data-flow order with
// each kind's share of the worker time, a time axis, and the busy share of each lane.
std::string to_svg(std::span<const Trace> passes, const SvgOptions& options);

}  // namespace moxie::trace
