// From a kernel's events to a Trace. Contract: device_trace.h.
#include "moxie/trace/device_trace.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace moxie::trace {
namespace {

// When the rank had seen the inputs of all: the end of its schedule event's wait.
std::uint64_t met_ns(const DeviceTrace& rank) {
  for (std::uint32_t i = 0;
       i < std::min<std::uint32_t>(rank.num_events[0], static_cast<std::uint32_t>(rank.capacity));
       ++i) {
    const DeviceEvent& event = rank.events[i];
    if (static_cast<Kind>(event.kind) == Kind::schedule) return event.begin_ns;
  }
  return 0;
}

}  // namespace

std::int64_t collect(std::span<const DeviceTrace> ranks, Trace& trace) {
  // What to add to a rank's clock to get that of rank 0.
  std::vector<std::int64_t> shift(ranks.size(), 0);
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const auto same = std::find_if(ranks.begin(), ranks.end(), [&](const DeviceTrace& other) {
      return other.device == ranks[r].device;
    });
    if (same->device != ranks[0].device)
      shift[r] = static_cast<std::int64_t>(met_ns(ranks[0]) - met_ns(*same));
  }
  std::int64_t lost = 0, first_ns = std::numeric_limits<std::int64_t>::max();
  trace.events.clear();
  std::vector<Event>& events = trace.events;
  std::int32_t num_ctas = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const DeviceTrace& rank = ranks[r];
    num_ctas = std::max(num_ctas, static_cast<std::int32_t>(rank.num_events.size()));
    for (std::size_t cta = 0; cta < rank.num_events.size(); ++cta) {
      const std::int64_t count = rank.num_events[cta];
      lost += std::max<std::int64_t>(count - rank.capacity, 0);
      for (const DeviceEvent& from : rank.events.subspan(
               cta * static_cast<std::size_t>(rank.capacity),
               static_cast<std::size_t>(std::min<std::int64_t>(count, rank.capacity)))) {
        Event event;
        event.rank = static_cast<std::int32_t>(r);
        event.role = from.lane == kComputeLane ? Role::compute : Role::comm;
        event.worker = static_cast<std::int32_t>(cta);
        if (event.role == Role::comm)
          event.worker = event.worker * kNumCommLanes + from.lane - kFirstCommLane;
        event.kind = static_cast<Kind>(from.kind);
        event.what = static_cast<WaitFor>(from.what);
        event.block = from.block;
        event.tile = from.tile;
        event.shared = from.shared != 0;
        event.begin_ns = static_cast<std::int64_t>(from.begin_ns) + shift[r];
        event.end_ns = static_cast<std::int64_t>(from.end_ns) + shift[r];
        first_ns = std::min(first_ns, event.begin_ns);
        events.push_back(event);
      }
    }
  }
  for (Event& event : events) {
    event.begin_ns -= first_ns;
    event.end_ns -= first_ns;
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::tie(a.rank, a.role, a.worker, a.begin_ns, a.end_ns) <
           std::tie(b.rank, b.role, b.worker, b.begin_ns, b.end_ns);
  });
  // A lane does one thing at a time: the merge of consumer warps begins a little before the last
  // tile is published.
  for (std::size_t i = 1; i < events.size(); ++i) {
    const Event& before = events[i - 1];
    Event& event = events[i];
    if (before.rank == event.rank && before.role == event.role && before.worker == event.worker) {
      event.begin_ns = std::max(event.begin_ns, std::min(before.end_ns, event.end_ns));
      event.end_ns = std::max(event.end_ns, event.begin_ns);
    }
  }
  trace.num_ranks = static_cast<std::int32_t>(ranks.size());
  trace.compute_workers = num_ctas;
  trace.comm_workers = num_ctas * kNumCommLanes;
  return lost;
}

}  // namespace moxie::trace
