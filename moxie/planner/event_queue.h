// The virtual clock: events in order of time, equal times in order of scheduling; times are
// picoseconds, so that sums of tile times do not drift.
//
// A ring of short time spans, each a list that is appended to and sorted when its turn comes. What
// is scheduled into the present span lies in a heap, and what lies beyond the ring in another: an
// event costs the same however many wait. Who works them off is told the next spans' events, to ask
// for their memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "moxie/planner/pool.h"

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
  explicit EventQueue(Pool& pool)
      : due_(pool), spans_(static_cast<std::size_t>(kSpans), List(pool), pool), spare_(pool) {}
  bool empty() const { return size_ == 0; }
  void push(Time time, std::uint32_t id) {
    const std::int64_t span = time >> kSpanShift;
    if (size_++ == 0) now_span_ = span;
    if (span <= now_span_) {
      present_.push({time, order_++, id});
    } else if (span < now_span_ + kSpans) {
      append(span, time, id);
    } else {
      beyond_.push({time, order_++, id});
    }
  }
  QueuedEvent pop() {
    while (next_ == due_.size() && present_.empty()) advance();
    --size_;
    if (next_ == due_.size()) return present_.pop();
    const InSpan& first = due_[next_];
    const Time time = (now_span_ << kSpanShift) + first.offset;
    // What is in the heap was scheduled later than all that is due.
    if (!present_.empty() && present_.top().time < time) return present_.pop();
    ++next_;
    return {time, 0, first.id};
  }

  // One after another the events of the next spans, in no order; null: all have been told.
  const std::uint32_t* later() {
    if (later_span_ <= now_span_) begin_later(now_span_ + 1);
    while (later_ == of(later_span_).size()) {
      if (later_span_ == now_span_ + kLater) return nullptr;
      begin_later(later_span_ + 1);
    }
    return &of(later_span_)[later_++].id;
  }

 private:
  static constexpr int kSpanShift = 16;            // 2^16 ps: tens of events at 128 ranks
  static constexpr std::int64_t kSpans = 1 << 12;  // 268 us: longer than any tile
  static constexpr std::int64_t kLater = 3;        // spans
  static constexpr std::size_t kKept = 128;        // events; longer lists give their memory back
  static constexpr std::size_t kFew = 64;          // sorted where they lie
  struct InSpan {
    std::uint32_t offset = 0;  // ps from the span's begin; equal ones in order of scheduling
    std::uint32_t id = 0;
  };

  using List = PoolVector<InSpan>;

  void advance() {
    now_span_ = in_spans_ > 0 ? now_span_ + 1 : beyond_.top().time >> kSpanShift;
    while (!beyond_.empty() && beyond_.top().time >> kSpanShift < now_span_ + kSpans) {
      const QueuedEvent event = beyond_.pop();
      append(event.time >> kSpanShift, event.time, event.id);
    }
    next_ = 0;
    due_.clear();
    List& list = of(now_span_);
    if (list.empty()) return;
    in_spans_ -= list.size();
    due_.swap(list);
    if (list.capacity() <= kKept)
      spare_.push_back(std::move(list));
    else
      List(list.get_allocator()).swap(list);
    sort_due();
  }
  void begin_later(std::int64_t span) {
    later_span_ = span;
    later_ = 0;
    const List& next = of(span + 1);
    for (std::size_t i = 0; i < std::min<std::size_t>(next.size(), 32); i += 8)
      __builtin_prefetch(&next[i]);
  }
  void sort_due() {
    const auto earlier = [](const InSpan& a, const InSpan& b) { return a.offset < b.offset; };
    if (due_.size() > kFew) return std::stable_sort(due_.begin(), due_.end(), earlier);
    for (std::size_t i = 1; i < due_.size(); ++i) {
      const InSpan event = due_[i];
      std::size_t at = i;
      for (; at > 0 && earlier(event, due_[at - 1]); --at) due_[at] = due_[at - 1];
      due_[at] = event;
    }
  }
  void append(std::int64_t span, Time time, std::uint32_t id) {
    List& list = of(span);
    if (list.capacity() == 0 && !spare_.empty()) {
      list.swap(spare_.back());
      spare_.pop_back();
    }
    list.push_back({static_cast<std::uint32_t>(time & ((Time{1} << kSpanShift) - 1)), id});
    ++in_spans_;
  }
  List& of(std::int64_t span) { return spans_[static_cast<std::size_t>(span & (kSpans - 1))]; }

  EventHeap present_, beyond_;
  List due_;              // of the present span, sorted
  std::size_t next_ = 0;  // of them
  PoolVector<List> spans_;
  PoolVector<List> spare_;  // memory of lists, the last one used still in cache
  std::int64_t now_span_ = 0, later_span_ = 0;
  std::size_t later_ = 0;  // of that span: told
  std::size_t size_ = 0, in_spans_ = 0;
  std::uint32_t order_ = 0;
};

}  // namespace moxie::planner
