// What crosses links, and signals: rows, row pieces, words from all ranks to all.
#include <algorithm>

#include "moxie/planner/sim_state.h"

namespace moxie::planner {

using pipeline::Range;

void Simulation::note_wait(Worker& w, WaitFor what, std::int64_t idx) {
  w.begin = now_;
  w.waits_for = static_cast<std::uint8_t>(what);
  if (options_.trace) rest(w).wait_idx = idx;
}

void Simulation::wait_for(Worker& w, Counter& counter, std::uint32_t wanted, Step step) {
  w.step = step;
  std::uint32_t at = free_waiter_;
  if (at == kNobody) {
    at = static_cast<std::uint32_t>(waiters_.size());
    waiters_.emplace_back();
  } else {
    free_waiter_ = waiters_[at].next;
  }
  waiters_[at] = {id_of(w), index_of(*w.rank), wanted, kNobody};
  append_waiter(counter, at);
}

void Simulation::append_waiter(Counter& counter, std::uint32_t at) {
  Waiter& waiter = waiters_[at];
  counter.least_wanted = std::min(counter.least_wanted, waiter.wanted);
  if (counter.last == kNobody) {
    waiter.next = at;
  } else {
    waiter.next = waiters_[counter.last].next;
    waiters_[counter.last].next = at;
  }
  counter.last = at;
}

// The wait that began at w.begin is over.
void Simulation::waited(Worker& w) {
  now_ = std::max(now_, w.begin);  // raised by a rank that has its turn later in the window
  if (now_ == w.begin) return;
  const auto what = static_cast<WaitFor>(w.waits_for);
  Use use = Use::wait_order;
  switch (what) {
    case WaitFor::x_ready: use = Use::wait_rows; break;
    case WaitFor::x_slot_free:
    case WaitFor::peer_slot_free:
    case WaitFor::hidden_free: use = Use::wait_slots; break;
    case WaitFor::inputs_ready:
    case WaitFor::schedule_ready:
    case WaitFor::stage_done:
    case WaitFor::agreement: use = Use::start; break;
    case WaitFor::returns_done:
    case WaitFor::shared_done:
    case WaitFor::merge_done:
    case WaitFor::tasks_done:
    case WaitFor::pass_closed:
    case WaitFor::phase: use = Use::tail; break;
    default: break;
  }
  used(w, use, w.begin);
  constexpr Time kShownWait = 200'000;  // 0.2 us; shorter waits are noise in a picture
  if (options_.trace && now_ - w.begin > kShownWait)
    record(w, trace::Kind::wait, rest(w).wait_idx, -1, false, w.begin, now_, what);
}

void Simulation::add(Counter& counter, std::uint32_t amount) {
  counter.value += amount;
  if (counter.value < counter.least_wanted) return;
  const std::uint32_t last = counter.last;
  counter.last = kNobody;
  counter.least_wanted = UINT32_MAX;
  std::uint32_t at = last, next = waiters_[last].next;
  do {
    at = next;
    Waiter& waiter = waiters_[at];
    next = waiter.next;
    if (counter.value < waiter.wanted) {
      append_waiter(counter, at);
      continue;
    }
    __builtin_prefetch(&workers_[waiter.worker]);
    queue_.push(now_, waiter.rank, waiter.worker);
    waiter.next = free_waiter_;
    free_waiter_ = at;
  } while (at != last);
}

// The counter grows at a later time. Deliveries share the queue with the workers, after their ids.
void Simulation::later(Time time, const RankState& r, Counter& counter, std::uint32_t amount) {
  std::uint32_t at = 0;
  if (free_deliveries_.empty()) {
    at = static_cast<std::uint32_t>(deliveries_.size());
    deliveries_.emplace_back();
  } else {
    at = free_deliveries_.back();
    free_deliveries_.pop_back();
  }
  deliveries_[at] = {&counter, amount};
  queue_.push(time, index_of(r), static_cast<std::uint32_t>(workers_.size()) + at);
}

// `bytes` of payload from one rank's memory to another's. Returns when the last byte is there.
Time Simulation::transfer(RankId source, RankId dest, double bytes, WireBytes wire,
                          bool lands_in_memory) {
  RankState& from = at(source);
  RankState& to = at(dest);
  const auto in_memory = static_cast<Time>(bytes * memory_ps_);
  Time end = from.memory.serve(now_, bytes, in_memory);
  if (lands_in_memory) end = std::max(end, to.memory.serve(now_, bytes, in_memory));
  if (source == dest) return end;
  if (same_domain(source, dest)) {
    const double forth = bytes * wire.forward, back = bytes * wire.reverse;
    const auto forth_takes = static_cast<Time>(forth * link_ps_),
               back_takes = static_cast<Time>(back * link_ps_);
    end = std::max({end, from.link.out.serve(now_, forth, forth_takes),
                    to.link.in.serve(now_, forth, forth_takes)});
    to.link.out.serve(now_, back, back_takes);
    from.link.in.serve(now_, back, back_takes);
    return end;
  }
  return std::max({end, from.network.out.serve(now_, bytes, network_ps_),
                   to.network.in.serve(now_, bytes, network_ps_)}) +
         from_us(machine_[Field::network_us]);
}

Time Simulation::signal_time(RankId from, RankId to) const {
  if (from == to) return from_us(machine_[Field::local_load_us]);
  return from_us(machine_[same_domain(from, to) ? Field::signal_us : Field::network_us]);
}

void Simulation::gather(const RankState& r, Gathered& g, Time arrival) {
  g.last = std::max(g.last, arrival);
  if (++g.arrived == problem_.num_ranks) later(g.last, r, g.counter, 1);
}

// One word from a rank to every rank. In a symmetric simulation the peers' words come like this.
void Simulation::raise(const RankState& from, Gathered RankState::*word, Time time) {
  for (std::int64_t i = 0; i < problem_.num_ranks; ++i) {
    const RankId to{i};
    RankState& r = at(to);
    gather(r, r.*word, time + signal_time(from.me, to));
  }
}

void Simulation::announce_slab(const RankState& from, std::int64_t slab, Time time) {
  for (std::int64_t i = 0; i < problem_.num_ranks; ++i) {
    const RankId to{i};
    RankState& r = at(to);
    gather(r, r.returns_done[static_cast<std::size_t>(slab)], time + signal_time(from.me, to));
  }
}

// Counts a pushed piece; the last one of a slab tells every peer when all of them have arrived.
void Simulation::piece_pushed(RankState& r, std::int64_t slab, Time time) {
  Slab& pushed = r.slabs[static_cast<std::size_t>(slab)];
  pushed.last = std::max(pushed.last, time);
  if (--pushed.pieces_left == 0) announce_slab(r, slab, pushed.last);
}

// Pieces of `cols` columns of some rows of a block, home. Returns when all have arrived.
Time Simulation::push_pieces(RankState& r, BlockId b, Range rows, double cols) {
  const auto i = static_cast<std::size_t>(r.table.routed_idx(b));
  Time end = now_;
  std::int64_t first = 0;
  for (std::int32_t s = r.source_of[i]; s < r.source_of[i + 1]; ++s) {
    const BlockSource& home = r.sources[static_cast<std::size_t>(s)];
    const std::int64_t n = std::min(rows.end, first + home.rows) - std::max(rows.begin, first);
    first += home.rows;
    if (n <= 0) continue;
    const double bytes = static_cast<double>(n) * cols * cost_.elem;
    end = std::max(end, transfer(r.me, RankId{home.rank}, bytes, push_, true));
  }
  return end;
}

Range Simulation::slab_columns(std::int64_t slab) const {
  const Range tiles =
      pipeline::slab_tiles(slab, num_slabs(), pipeline::num_fc2_tiles(problem_.hidden));
  return {tiles.begin * pipeline::kFc2TileCols,
          std::min(tiles.end * pipeline::kFc2TileCols, problem_.hidden)};
}

void Simulation::record(const Worker& w, trace::Kind kind, std::int64_t block, std::int64_t tile,
                        bool shared, Time begin, Time end, WaitFor what) {
  if (!options_.trace) return;
  events_.push_back({w.rank->me.v, rest(w).role, rest(w).idx, kind, what,
                     static_cast<std::int32_t>(block), static_cast<std::int32_t>(tile), shared,
                     begin / 1000, end / 1000});
}

}  // namespace moxie::planner
