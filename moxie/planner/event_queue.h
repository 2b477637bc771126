// The virtual clock: events in order of time, equal times in order of scheduling; times are
// picoseconds, so that sums of tile times do not drift.
//
// A ring of short time spans, each a list that is appended to; only the events of the present span
// lie in a heap. With one heap for all, its levels and its cache misses grew with the ranks; here
// an event costs the same however many wait. What lies beyond the ring waits in a heap of its own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace moxie::planner {

using Time = std::int64_t;  // ps since the launch
inline constexpr double kPsPerSecond = 1e12;
inline Time from_us(double us) { return static_cast<Time>(us * 1e6 + 0.5); }
inline double to_ms(Time t) { return static_cast<double>(t) * 1e-9; }

struct QueuedEvent {
  Time time = 0;
  std::uint32_t order = 0;  // ties: first scheduled, first served
  std::uint32_t id = 0;
};

// Four children to a node: one or two cache lines per level.
class EventHeap {
 public:
  bool empty() const { return heap_.empty(); }
  const QueuedEvent& top() const { return heap_[0]; }
  std::span<const QueuedEvent> top_level() const {  // the next event, and among them the second
    return std::span(heap_).first(std::min<std::size_t>(heap_.size(), 5));
  }
  void push(const QueuedEvent& event) {
    heap_.push_back(event);
    std::size_t at = heap_.size() - 1;
    while (at > 0) {
      const std::size_t up = (at - 1) / 4;
      if (!before(event, heap_[up])) break;
      heap_[at] = heap_[up];
      at = up;
    }
    heap_[at] = event;
  }
  QueuedEvent pop() {
    const QueuedEvent first_event = heap_[0], last = heap_.back();
    heap_.pop_back();
    const std::size_t n = heap_.size();
    if (n == 0) return first_event;
    std::size_t at = 0;
    for (;;) {
      const std::size_t first = 4 * at + 1;
      if (first >= n) break;
      std::size_t least = first;
      for (std::size_t i = first + 1; i < first + 4 && i < n; ++i) {
        if (before(heap_[i], heap_[least])) least = i;
      }
      if (!before(heap_[least], last)) break;
      heap_[at] = heap_[least];
      at = least;
    }
    heap_[at] = last;
    return first_event;
  }

 private:
  static bool before(const QueuedEvent& a, const QueuedEvent& b) {
    return a.time != b.time ? a.time < b.time : a.order < b.order;
  }
  std::vector<QueuedEvent> heap_;
};

class EventQueue {
 public:
  bool empty() const { return size_ == 0; }
  // The next event first, and some of those after it.
  std::span<const QueuedEvent> upcoming() const { return present_.top_level(); }
  void push(Time time, std::uint32_t id) {
    const QueuedEvent event{time, order_++, id};
    const std::int64_t span = time >> kSpanShift;
    if (size_++ == 0) now_span_ = span;
    if (span <= now_span_) {
      present_.push(event);
    } else if (span < now_span_ + kSpans) {
      append(span, event);
    } else {
      beyond_.push(event);
    }
  }
  QueuedEvent pop() {
    const QueuedEvent event = present_.pop();
    --size_;
    while (present_.empty() && size_ > 0) advance();
    return event;
  }

 private:
  static constexpr int kSpanShift = 16;            // 2^16 ps: tens of events at 128 ranks
  static constexpr std::int64_t kSpans = 1 << 12;  // 268 us: longer than any tile

  void advance() {
    now_span_ = in_spans_ > 0 ? now_span_ + 1 : beyond_.top().time >> kSpanShift;
    while (!beyond_.empty() && beyond_.top().time >> kSpanShift < now_span_ + kSpans) {
      const QueuedEvent event = beyond_.pop();
      const std::int64_t span = event.time >> kSpanShift;
      append(span, event);
    }
    std::vector<QueuedEvent>& due = spans_[static_cast<std::size_t>(now_span_ & (kSpans - 1))];
    if (due.empty()) return;
    for (const QueuedEvent& event : due) present_.push(event);
    in_spans_ -= due.size();
    due.clear();
    spare_.push_back(std::move(due));
  }
  void append(std::int64_t span, const QueuedEvent& event) {
    std::vector<QueuedEvent>& list = spans_[static_cast<std::size_t>(span & (kSpans - 1))];
    if (list.capacity() == 0 && !spare_.empty()) {
      list.swap(spare_.back());
      spare_.pop_back();
    }
    list.push_back(event);
    ++in_spans_;
  }

  EventHeap present_, beyond_;
  std::vector<std::vector<QueuedEvent>> spans_ =
      std::vector<std::vector<QueuedEvent>>(static_cast<std::size_t>(kSpans));
  std::vector<std::vector<QueuedEvent>>
      spare_;  // memory of lists, the last one used still in cache
  std::int64_t now_span_ = 0;
  std::size_t size_ = 0, in_spans_ = 0;
  std::uint32_t order_ = 0;
};

}  // namespace moxie::planner
