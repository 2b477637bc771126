// The simulator's clock and memory: events come window by window, rank by rank, in order of time
// and of scheduling whatever their distance, and coroutine frames are reused, aligned and never
// shared.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <queue>
#include <random>
#include <tuple>
#include <vector>

#include "moxie/planner/event_queue.h"
#include "moxie/planner/pool.h"
#include "tests/support/env.h"

namespace moxie::planner {
namespace {

// Against the library's heap: bursts at one time, near and far events, and events scheduled into
// the window that is being worked off, also for ranks that had their turn.
TEST(PlannerQueue, GivesTheOrderOfAPlainHeap) {
  using Entry = std::tuple<std::int64_t, std::uint32_t, Time, std::uint32_t,
                           std::uint32_t>;  // window, rank, time, order, id
  std::mt19937_64 random(test::test_seed());
  for (const std::uint32_t ranks : {1u, 7u, 512u}) {
    for (const auto& [window, shift] :
         {std::pair{Time{300'000}, 18}, {Time{0}, 16}, {Time{1} << 30, 20}}) {
      for (const Time reach : {Time{1}, Time{50'000}, Time{10'000'000}, Time{3'000'000'000}}) {
        Pool pool;
        EventQueue queue(pool, ranks, window);
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> reference;
        std::uint32_t order = 0;
        Time now = 0;
        for (int step = 0; step < 20'000; ++step) {
          const bool grow = reference.size() < 500 && random() % 8 != 0;
          for (std::uint64_t i = 0; i < (grow ? random() % 4 : 0); ++i) {
            // Mostly within reach, sometimes at once, sometimes a thousand times as far.
            const std::uint64_t kind = random() % 10;
            const Time ahead =
                kind == 0   ? 0
                : kind == 1 ? static_cast<Time>(random() % static_cast<std::uint64_t>(1000 * reach))
                            : static_cast<Time>(random() % static_cast<std::uint64_t>(reach));
            const auto rank = static_cast<std::uint32_t>(random() % ranks),
                       id = static_cast<std::uint32_t>(random());
            queue.push(now + ahead, rank, id);
            reference.push({(now + ahead) >> shift, rank, now + ahead, order++, id});
          }
          ASSERT_EQ(queue.empty(), reference.empty());
          if (reference.empty()) continue;
          const auto [in_window, of_rank, time, place, id] = reference.top();
          reference.pop();
          const QueuedEvent event = queue.pop();
          ASSERT_EQ(event.time, time) << ranks << " ranks, reach " << reach << " step " << step;
          ASSERT_EQ(event.id, id);
          now = time;
        }
      }
    }
  }
}

TEST(PlannerQueue, FramesAreReusedAlignedAndTheirOwn) {
  Pool pool;
  std::vector<std::pair<unsigned char*, std::size_t>> frames;
  for (const std::size_t size : {1, 40, 48, 49, 500, 1900, 2100, 100'000}) {
    for (int i = 0; i < 3000 && (size < 2000 || i < 3); ++i) {
      auto* frame = static_cast<unsigned char*>(pool.allocate(size));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(frame) % alignof(std::max_align_t), 0u);
      std::memset(frame, static_cast<int>(frames.size() % 251), size);
      frames.emplace_back(frame, size);
    }
  }
  for (std::size_t i = 0; i < frames.size(); ++i) {
    ASSERT_EQ(frames[i].first[0], i % 251);
    ASSERT_EQ(frames[i].first[frames[i].second - 1], i % 251);
  }
  for (const auto& [frame, size] : frames) Pool::release(frame);
  // The last one released of a size is the next one given.
  void* again = pool.allocate(500);
  Pool::release(again);
  EXPECT_EQ(pool.allocate(550), again);  // the same multiple of 64
  Pool::release(again);
}

}  // namespace
}  // namespace moxie::planner
