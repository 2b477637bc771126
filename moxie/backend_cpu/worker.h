// Worker: one thread's tools - claim a unit, wait for a signal within bounds, raise one, leave a
// trace. The roles in roles_*.h are written with nothing else. A wait that expires throws GaveUp up
// to the worker's top function.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "moxie/backend_cpu/rank_pass.h"
#include "moxie/trace/trace.h"

namespace moxie::backend_cpu {

struct GaveUp {};  // this rank stopped: its record is written, or a sibling's is
struct Killed {};  // fault injection: the worker vanishes without a word

template <class T>
class Worker {
 public:
  Worker(RankPass<T>& rank, Role role, std::int32_t idx, std::byte* scratch,
         std::vector<trace::Event>* events)
      : rank_(rank),
        role_(role),
        idx_(idx),
        scratch_(expert::carve_scratch(rank.problem(), reinterpret_cast<float*>(scratch))),
        events_(events),
        rng_(rank.faults.shuffle_seed * 0x9e3779b97f4a7c15ull + rank.epoch * 1000003ull +
             static_cast<std::uint64_t>(rank.me.v * 64 + idx * 2 + static_cast<int>(role))) {}

  RankPass<T>& rank() { return rank_; }
  const expert::TileScratch& scratch() const { return scratch_; }
  bool leader() const { return role_ == Role::comm && idx_ == 0; }

  // Claims the next unit of `counter` below `limit`. relaxed: what the unit needs is awaited by its
  // own signals.
  std::optional<std::int64_t> claim(std::int64_t counter, std::int64_t limit) {
    step();
    std::atomic_ref<std::uint32_t> next(rank_.counter(counter));
    std::uint32_t at = next.load(std::memory_order_relaxed);
    while (at < limit) {
      if (next.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) return at;
    }
    return std::nullopt;
  }

  // Adds to a counter of the own rank; returns the new count. acq_rel: releases this worker's
  // writes to whoever waits for the count, and lets the worker that completes it see everybody
  // else's.
  std::uint32_t add(std::int64_t counter, std::uint32_t amount) {
    return add_at(rank_.me, counter, amount);
  }
  void wait_counter(std::int64_t counter, std::int64_t wanted, WaitFor what, std::int64_t idx) {
    wait_counter_of(rank_.me, counter, wanted, what, idx);
  }

  // The same with counters of a peer's workspace: push dispatch.
  std::uint32_t add_at(RankId rank, std::int64_t counter, std::uint32_t amount) {
    step();
    return std::atomic_ref(rank_.counter_of(rank, counter))
               .fetch_add(amount, std::memory_order_acq_rel) +
           amount;
  }
  void wait_counter_of(RankId rank, std::int64_t counter, std::int64_t wanted, WaitFor what,
                       std::int64_t idx) {
    await(rank_.counter_of(rank, counter), static_cast<std::uint32_t>(wanted), what, idx);
  }

  // Writes a word into the heap of every rank, own included. release: what this rank wrote before -
  // its inputs, its pieces in that peer's heap - is visible to whoever acquires the word.
  void raise_everywhere(const pipeline::Region& region, std::int64_t idx, std::uint64_t word) {
    for (std::int64_t i = 0; i < rank_.problem().num_ranks; ++i) {
      step();
      const RankId peer{(rank_.me.v + i) % rank_.problem().num_ranks};
      std::atomic_ref(rank_.signal(peer, region, idx)).store(word, std::memory_order_release);
    }
  }
  // Waits until the word in the own heap reaches `wanted`; returns it.
  std::uint64_t wait_signal(const pipeline::Region& region, std::int64_t word_idx,
                            std::uint64_t wanted, WaitFor what, std::int64_t idx) {
    return await(rank_.signal(rank_.me, region, word_idx), wanted, what, idx);
  }

  // Runs f and records it as an event.
  template <class F>
  void traced(trace::Kind kind, std::int64_t block, std::int64_t tile, bool shared, F&& f) {
    if (events_ == nullptr) return f();
    const std::int64_t begin = now_ns();
    f();
    record(kind, WaitFor::inputs_ready, block, tile, shared, begin);
  }

 private:
  static constexpr std::int64_t kShownWaitNs = 2000;  // shorter waits are noise in a picture

  std::int64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - rank_.begin).count();
  }
  void record(trace::Kind kind, WaitFor what, std::int64_t block, std::int64_t tile, bool shared,
              std::int64_t begin) {
    events_->push_back({rank_.me.v, role_, idx_, kind, what, static_cast<std::int32_t>(block),
                        static_cast<std::int32_t>(tile), shared, begin, now_ns()});
  }

  // One protocol step: the place where faults are injected.
  void step() {
    const FaultInjection& f = rank_.faults;
    if (f.kill_rank == rank_.me.v && f.kill_role == role_ && f.kill_worker == idx_ &&
        steps_ >= f.kill_after_steps) {
      throw Killed{};
    }
    ++steps_;
    if (f.shuffle_seed == 0) return;
    const std::uint64_t dice = rng_();
    if (dice % 16 == 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(dice / 16 % static_cast<std::uint64_t>(f.max_delay_us + 1)));
    } else if (dice % 4 == 0) {
      std::this_thread::yield();
    }
  }

  // acquire: everything the raiser wrote before it raised the word is visible after return.
  template <class Word>
  Word await(Word& word, Word wanted, WaitFor what, std::int64_t idx) {
    step();
    std::atomic_ref<Word> ref(word);
    Word seen = ref.load(std::memory_order_acquire);
    if (seen >= wanted) return seen;
    const auto since = Clock::now();
    const std::int64_t begin = events_ != nullptr ? now_ns() : 0;
    for (int spins = 0;; ++spins) {
      seen = ref.load(std::memory_order_acquire);
      if (seen >= wanted) break;
      check_stopped(what, idx, wanted, seen);
      const auto waited = std::chrono::duration<double>(Clock::now() - since).count();
      if (rank_.watch.timeout_s > 0 && waited > rank_.watch.timeout_s)
        give_up(what, idx, wanted, seen, -1);
      if (spins < 200)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(spins < 2000 ? 20 : 200));
    }
    if (events_ != nullptr && now_ns() - begin > kShownWaitNs)
      record(trace::Kind::wait, what, idx, -1, false, begin);
    return seen;
  }

  void check_stopped(WaitFor what, std::int64_t idx, std::uint64_t wanted, std::uint64_t seen) {
    if (rank_.watch.stopped.load(std::memory_order_acquire)) throw GaveUp{};
    const std::uint64_t word = std::atomic_ref(rank_.signal(rank_.me, rank_.shape.heap.stopped, 0))
                                   .load(std::memory_order_acquire);
    if (pipeline::epoch_of(word) == rank_.epoch) {
      give_up(what, idx, wanted, seen, static_cast<std::int32_t>(pipeline::payload_of(word)) - 1);
    }
  }

  [[noreturn]] void give_up(WaitFor what, std::int64_t idx, std::uint64_t wanted,
                            std::uint64_t seen, std::int32_t told_by) {
    {
      const std::lock_guard lock(rank_.watch.mutex);
      if (!rank_.watch.record) {
        rank_.watch.record =
            WaitRecord{rank_.me.v, role_, idx_, what, idx, wanted, seen, rank_.epoch, told_by};
      }
    }
    rank_.watch.stopped.store(true, std::memory_order_release);
    if (told_by < 0) {
      // Not raise_everywhere: a stopping worker injects no faults.
      for (std::int64_t r = 0; r < rank_.problem().num_ranks; ++r) {
        if (r == rank_.me.v) continue;
        std::atomic_ref(rank_.signal(RankId{r}, rank_.shape.heap.stopped, 0))
            .store(pipeline::make_signal(rank_.epoch, static_cast<std::uint32_t>(rank_.me.v) + 1),
                   std::memory_order_release);
      }
    }
    throw GaveUp{};
  }

  RankPass<T>& rank_;
  Role role_;
  std::int32_t idx_;
  expert::TileScratch scratch_;
  std::vector<trace::Event>* events_;
  std::mt19937_64 rng_;
  std::int64_t steps_ = 0;
};

}  // namespace moxie::backend_cpu
