// The virtual clock: events in order of time, equal times in order of scheduling. A four-ary heap
// of 16-byte entries; times are picoseconds, so that sums of tile times do not drift.
#pragma once
#include <cstdint>
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

class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  std::uint32_t next() const { return heap_[0].id; }
  void push(Time time, std::uint32_t id) {
    heap_.push_back({time, order_++, id});
    std::size_t at = heap_.size() - 1;
    const QueuedEvent event = heap_[at];
    while (at > 0) {
      const std::size_t up = (at - 1) / 4;
      if (!before(event, heap_[up])) break;
      heap_[at] = heap_[up];
      at = up;
    }
    heap_[at] = event;
  }
  QueuedEvent pop() {
    const QueuedEvent top = heap_[0], last = heap_.back();
    heap_.pop_back();
    const std::size_t n = heap_.size();
    if (n == 0) return top;
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
    return top;
  }

 private:
  static bool before(const QueuedEvent& a, const QueuedEvent& b) {
    return a.time != b.time ? a.time < b.time : a.order < b.order;
  }
  std::vector<QueuedEvent> heap_;
  std::uint32_t order_ = 0;
};

}  // namespace moxie::planner
