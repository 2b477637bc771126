// The virtual clock: the events of all ranks, in windows of time. Within a window one rank comes
// after another, and each rank's events in order of time, equal times in order of scheduling. A
// window is no longer than anything takes from one rank to another, so no rank comes too late for
// what another one tells it; and a rank's tables, which every event asks for, come into the cache
// once per window and not once per event. Times are picoseconds, so that sums of tile times do not
// drift.
//
// A ring of windows, each a list that is appended to, and put in order when its turn comes. What is
// scheduled into the present window lies in a heap, and what lies beyond the ring in another: an
// event costs the same however many wait.
#pragma once
#include <algorithm>
#include <bit>
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
  std::uint32_t id = 0;
};

// Four children to a node. Equal keys: first in, first out.
template <class Entry>  // with a key and an order
class EventHeap {
 public:
  bool empty() const { return heap_.empty(); }
  const Entry& top() const { return heap_[0]; }
  void push(const Entry& entry) {
    heap_.push_back(entry);
    std::size_t at = heap_.size() - 1;
    while (at > 0) {
      const std::size_t up = (at - 1) / 4;
      if (!before(entry, heap_[up])) break;
      heap_[at] = heap_[up];
      at = up;
    }
    heap_[at] = entry;
  }
  Entry pop() {
    const Entry first_entry = heap_[0], last = heap_.back();
    heap_.pop_back();
    const std::size_t n = heap_.size();
    if (n == 0) return first_entry;
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
    return first_entry;
  }

 private:
  static bool before(const Entry& a, const Entry& b) {
    return a.key != b.key ? a.key < b.key : a.order < b.order;
  }
  std::vector<Entry> heap_;
};

class EventQueue {
 public:
  // `window`: nothing gets from one rank to another in less time. Rounded down to a power of two.
  EventQueue(Pool& pool, std::uint32_t num_ranks, Time window)
      : shift_(std::clamp(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(window))) - 1,
                          kMinShift, std::min(kMaxShift, std::countl_zero(num_ranks)))),
        due_(pool),
        windows_(static_cast<std::size_t>(kWindows), List(pool), pool),
        spare_(pool),
        first_of_(num_ranks + 1, 0, pool) {}

  bool empty() const { return size_ == 0; }
  void push(Time time, std::uint32_t rank, std::uint32_t id) {
    const std::int64_t window = time >> shift_;
    ++size_;
    if (window <= now_) {
      present_.push({key_of(time, rank), order_++, id});
    } else if (window < now_ + kWindows) {
      append(time, rank, id);
    } else {
      beyond_.push({time, order_++, rank, id});
    }
  }
  // The id of one of the events that are due next; 0 where none is known.
  std::uint32_t soon() const {
    constexpr std::size_t kAhead = 2;
    return next_ + kAhead < due_.size() ? due_[next_ + kAhead].id : 0;
  }
  QueuedEvent pop() {
    while (next_ == due_.size() && present_.empty()) advance();
    --size_;
    // What is in the heap was scheduled later than all that is due.
    if (next_ == due_.size() || (!present_.empty() && present_.top().key < due_[next_].key)) {
      const Present event = present_.pop();
      return {time_of(event.key), event.id};
    }
    const InWindow& event = due_[next_++];
    return {time_of(event.key), event.id};
  }

 private:
  static constexpr int kMinShift = 16, kMaxShift = 20;  // 2^20 ps: some five events of a GPU
  static constexpr std::int64_t kWindows = 1 << 9;      // 0.5 ms: longer than any tile
  static constexpr std::size_t kKept = 1 << 12;  // events; longer lists give their memory back
  struct InWindow {
    std::uint32_t key = 0;  // rank, then ps from the window's begin
    std::uint32_t id = 0;
  };
  struct Present {
    std::uint32_t key = 0, order = 0, id = 0;
  };
  struct Beyond {
    Time key = 0;
    std::uint32_t order = 0, rank = 0, id = 0;
  };
  using List = PoolVector<InWindow>;

  std::uint32_t key_of(Time time, std::uint32_t rank) const {
    return rank << shift_ | (static_cast<std::uint32_t>(time) & ((1u << shift_) - 1));
  }
  Time time_of(std::uint32_t key) const { return (now_ << shift_) + (key & ((1u << shift_) - 1)); }
  void advance() {
    now_ = in_windows_ > 0 ? now_ + 1 : beyond_.top().key >> shift_;
    while (!beyond_.empty() && beyond_.top().key >> shift_ < now_ + kWindows) {
      const Beyond event = beyond_.pop();
      append(event.key, event.rank, event.id);
    }
    next_ = 0;
    due_.clear();
    List& list = of(now_);
    if (list.empty()) return;
    in_windows_ -= list.size();
    put_in_order(list);
    list.clear();
    if (list.capacity() <= kKept) spare_.push_back(std::move(list));
    List(spare_.get_allocator()).swap(list);
  }
  // Counted by rank, then each rank's few by time.
  void put_in_order(const List& list) {
    std::fill(first_of_.begin(), first_of_.end(), 0);
    for (const InWindow& event : list) ++first_of_[(event.key >> shift_) + 1];
    for (std::size_t r = 1; r < first_of_.size(); ++r) first_of_[r] += first_of_[r - 1];
    due_.resize(list.size());
    for (const InWindow& event : list) due_[first_of_[event.key >> shift_]++] = event;
    for (std::size_t i = 1; i < due_.size(); ++i) {
      const InWindow event = due_[i];
      std::size_t at = i;
      for (; at > 0 && event.key < due_[at - 1].key; --at) due_[at] = due_[at - 1];
      due_[at] = event;
    }
  }
  void append(Time time, std::uint32_t rank, std::uint32_t id) {
    List& list = of(time >> shift_);
    if (list.capacity() == 0 && !spare_.empty()) {
      list.swap(spare_.back());
      spare_.pop_back();
    }
    list.push_back({key_of(time, rank), id});
    ++in_windows_;
  }
  List& of(std::int64_t window) {
    return windows_[static_cast<std::size_t>(window & (kWindows - 1))];
  }

  const int shift_;  // of a time to its window
  EventHeap<Present> present_;
  EventHeap<Beyond> beyond_;
  List due_;              // of the present window, in order
  std::size_t next_ = 0;  // of them
  PoolVector<List> windows_;
  PoolVector<List> spare_;  // memory of lists, the last one used still in cache
  PoolVector<std::uint32_t> first_of_;
  std::int64_t now_ = 0;
  std::size_t size_ = 0, in_windows_ = 0;
  std::uint32_t order_ = 0;
};

}  // namespace moxie::planner
