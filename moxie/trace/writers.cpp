// The Perfetto JSON and the sums. The JSON is written by hand: all strings are ours, except the
// titles, which are escaped. Times are microseconds with three decimals, so the nanoseconds of the
// trace survive a round trip.
#include "moxie/trace/writers.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <string_view>
#include <tuple>

namespace moxie::trace {
namespace {

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
      out += buffer;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string microseconds(std::int64_t ns) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%lld.%03lld", static_cast<long long>(ns / 1000),
                static_cast<long long>(ns % 1000));
  return buffer;
}

// Threads of one process are sorted by this number: communication workers above compute workers.
std::int32_t thread_id(Role role, std::int32_t worker) {
  return (role == Role::comm ? 1000 : 2000) + worker;
}

void append_metadata(std::string& out, const char* what, std::int32_t rank, std::int32_t thread,
                     const std::string& args) {
  out += "{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\",\"pid\":" + std::to_string(rank) +
         ",\"tid\":" + std::to_string(thread) + ",\"args\":{" + args + "}},\n";
}

void append_lane_names(std::string& out, std::int32_t rank, Role role, std::int32_t num_lanes) {
  for (std::int32_t worker = 0; worker < num_lanes; ++worker) {
    const std::int32_t thread = thread_id(role, worker);
    const std::string label = (role == Role::comm ? "comm " : "compute ") + std::to_string(worker);
    append_metadata(out, "thread_name", rank, thread, "\"name\":" + json_string(label));
    append_metadata(out, "thread_sort_index", rank, thread,
                    "\"sort_index\":" + std::to_string(thread));
  }
}

void append_event(std::string& out, const Event& event, std::size_t pass_idx,
                  std::int64_t shift_ns) {
  out += "{\"ph\":\"X\",\"name\":\"" + std::string(name(event.kind)) +
         "\",\"pid\":" + std::to_string(event.rank) +
         ",\"tid\":" + std::to_string(thread_id(event.role, event.worker)) +
         ",\"ts\":" + microseconds(shift_ns + event.begin_ns) +
         ",\"dur\":" + microseconds(event.end_ns - event.begin_ns) +
         ",\"args\":{\"pass\":" + std::to_string(pass_idx);
  if (event.kind == Kind::wait) out += ",\"for\":\"" + std::string(name(event.what)) + "\"";
  if (event.block >= 0) out += ",\"block\":" + std::to_string(event.block);
  if (event.tile >= 0) out += ",\"tile\":" + std::to_string(event.tile);
  if (event.shared) out += ",\"shared\":true";
  out += "}},\n";
}

}  // namespace

std::int64_t span_ns(const Trace& trace) {
  std::int64_t end = 0;
  for (const Event& event : trace.events) end = std::max(end, event.end_ns);
  return end;
}

std::vector<Event> without_nesting(const Trace& trace) {
  std::vector<Event> sorted = trace.events, pieces, open;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Event& a, const Event& b) {
    return std::tuple(a.rank, a.role, a.worker, a.begin_ns, b.end_ns) <
           std::tuple(b.rank, b.role, b.worker, b.begin_ns, a.end_ns);
  });
  // `open` are the events around the present moment, outermost first; begin_ns of each is what is
  // not yet cut off.
  const auto cut = [&](Event& event, std::int64_t end_ns) {
    if (end_ns > event.begin_ns) {
      pieces.push_back(event);
      pieces.back().end_ns = end_ns;
    }
    event.begin_ns = std::max(event.begin_ns, end_ns);
  };
  const auto close_until = [&](std::int64_t now_ns) {
    while (!open.empty() && open.back().end_ns <= now_ns) {
      const Event inner = open.back();
      cut(open.back(), inner.end_ns);
      open.pop_back();
      if (!open.empty()) open.back().begin_ns = std::max(open.back().begin_ns, inner.end_ns);
    }
  };
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const Event& event = sorted[i];
    const bool same_lane = !open.empty() && open.back().rank == event.rank &&
                           open.back().role == event.role && open.back().worker == event.worker;
    close_until(same_lane ? event.begin_ns : std::numeric_limits<std::int64_t>::max());
    if (!open.empty()) cut(open.back(), event.begin_ns);
    open.push_back(event);
  }
  close_until(std::numeric_limits<std::int64_t>::max());
  return pieces;
}

std::array<std::int64_t, kNumKinds> time_by_kind_ns(const Trace& trace) {
  std::array<std::int64_t, kNumKinds> sums{};
  for (const Event& event : without_nesting(trace)) {
    sums[static_cast<std::size_t>(event.kind)] += event.end_ns - event.begin_ns;
  }
  return sums;
}

std::int64_t num_workers(const Trace& trace) {
  return std::int64_t{trace.num_ranks} * (trace.comm_workers + trace.compute_workers);
}

std::string to_perfetto_json(std::span<const Trace> passes) {
  std::int32_t num_ranks = 0, comm_workers = 0, compute_workers = 0;
  for (const Trace& pass : passes) {
    num_ranks = std::max(num_ranks, pass.num_ranks);
    comm_workers = std::max(comm_workers, pass.comm_workers);
    compute_workers = std::max(compute_workers, pass.compute_workers);
  }
  std::string out = "{\"displayTimeUnit\":\"ns\",\n\"traceEvents\":[\n";
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    append_metadata(out, "process_name", rank, 0, "\"name\":\"rank " + std::to_string(rank) + "\"");
    append_metadata(out, "process_sort_index", rank, 0, "\"sort_index\":" + std::to_string(rank));
    append_lane_names(out, rank, Role::comm, comm_workers);
    append_lane_names(out, rank, Role::compute, compute_workers);
  }
  std::string pass_list;
  std::int64_t shift_ns = 0;
  for (std::size_t pass_idx = 0; pass_idx < passes.size(); ++pass_idx) {
    const Trace& pass = passes[pass_idx];
    for (const Event& event : pass.events) append_event(out, event, pass_idx, shift_ns);
    if (pass_idx > 0) pass_list += ",\n";
    pass_list += "{\"title\":" + json_string(pass.title) +
                 ",\"num_ranks\":" + std::to_string(pass.num_ranks) +
                 ",\"comm_workers\":" + std::to_string(pass.comm_workers) +
                 ",\"compute_workers\":" + std::to_string(pass.compute_workers) +
                 ",\"begin_ns\":" + std::to_string(shift_ns) + "}";
    shift_ns += span_ns(pass) + span_ns(pass) / 20;  // a visible gap between passes
  }
  if (out.ends_with(",\n")) out.erase(out.size() - 2, 1);  // JSON has no trailing commas
  return out + "],\n\"moxie\":{\"passes\":[\n" + pass_list + "]}}\n";
}

}  // namespace moxie::trace
