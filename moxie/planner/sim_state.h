// State of a simulation: ranks with their tables, counters and servers; workers with their
// programs. The roles are in sim_comm.cpp and sim_compute.cpp, named as in backend_cpu.
#pragma once
#include <coroutine>
#include <cstddef>
#include <vector>

#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tables.h"
#include "moxie/planner/cost.h"
#include "moxie/planner/event_queue.h"
#include "moxie/planner/links.h"
#include "moxie/planner/process.h"
#include "moxie/planner/simulate.h"

namespace moxie::planner {

struct RankState;

// Where a worker goes on when its time has come.
enum class Step : std::uint8_t {
  program,     // its coroutine
  tile_waits,  // for what w.task needs; then it begins
  tile,        // w.task's product has ended, and the push of the tile before has left
  pushed,      // its own has left, too
  rows_wait,   // for a slot
  rows,        // of w.unit are there
  merge_waits,
  merged,  // the tokens of w.unit
  end_waits,
};

// What a turn of a worker reads and writes, in one line of the cache: tens of thousands of workers
// take their turns, and no two next to each other.
struct alignas(64) Worker {
  RankState* rank = nullptr;
  pipeline::Task task;    // claimed last
  Time begin = 0;         // of what it does now, or of its wait
  Time push_free = 0;     // its last push has left then
  Time product_end = 0;   // of the tile that it began last
  std::int32_t unit = 0;  // of rows or tokens, claimed last
  Step step = Step::program;
  bool is_cta = false;       // which of RankState::uses it adds to
  std::uint8_t waits_for{};  // a WaitFor
};
static_assert(sizeof(Worker) == 64);

// The rest of it.
struct WorkerProgram {
  Process program;
  std::coroutine_handle<> goes_on;  // where it resumes
  std::int64_t merge_end = 0;       // units that it may claim
  std::int64_t wait_idx = 0;        // for the trace
  std::uint32_t wave_begin = 0;     // tiles that must have ended before its own
  std::int32_t idx = 0;
  Role role = Role::comm;
  Time done = -1;
};

inline constexpr std::uint32_t kNobody = UINT32_MAX;

// A count that workers wait for, and those that do: a ring of Simulation::waiters_, the last one's
// next is the first.
struct Counter {
  std::uint32_t value = 0;
  std::uint32_t least_wanted = UINT32_MAX;  // of those who wait
  std::uint32_t last = kNobody;
};
// Apart from its worker: whoever raises a counter does not have to fetch the workers one by one.
struct Waiter {
  std::uint32_t worker = 0, rank = 0, wanted = 0, next = kNobody;
};
// What somebody waits for; no counter: nothing.
struct Need {
  Counter* counter = nullptr;
  std::uint32_t wanted = 0;
  WaitFor what = WaitFor::phase;
  std::int64_t idx = 0;
  Need() = default;
  Need(Counter& c, std::int64_t value, WaitFor reason, std::int64_t index)
      : counter(&c), wanted(static_cast<std::uint32_t>(value)), what(reason), idx(index) {}
  bool met() const { return counter == nullptr || counter->value >= wanted; }
};

struct BlockSource {
  std::int32_t rank = 0, rows = 0;
};
struct PushUnit {
  std::int32_t dest = 0, block = 0, rows = 0;  // block: routed block of the destination
};
// Signals from all ranks that a rank waits for together: only the last one matters.
struct Gathered {
  Counter counter;  // 1 when all have arrived
  std::int64_t arrived = 0;
  Time last = 0;
};

// What this rank pushes home of a column slab.
struct Slab {
  std::int64_t pieces_left = 0;
  Time last = 0;  // of those pushed
};

// What a tile asks of its block, in one line of the cache.
struct alignas(64) BlockState {
  TileCost lead, trail;  // FC1 (dgrad), FC2 (dX)
  Counter lead_done, fc2_done;
  std::int32_t rows = 0, expert = -1;  // -1: the shared one
};
static_assert(sizeof(BlockState) == 64);
struct MinibatchState {
  Counter ready;
  std::int32_t rows = 0;
};
struct ChunkState {
  Counter trail_done;  // dX and wgrad tiles
  std::int32_t rows = 0;
};

struct alignas(64) RankState {
  explicit RankState(Pool& pool)
      : blocks(pool), minibatches(pool), chunks(pool), source_of(pool), sources(pool) {}

  // What every event asks for, side by side: with tens of ranks each event is another rank's, and
  // finds in the cache what the rank has few lines of. The first line is the one that peers touch.
  Server memory;
  Port link, network;
  double cycle_ps = 0;
  std::int64_t ticket = 0, tickets_end = 0;  // next one, and the end of this phase's
  std::int64_t step = 0;                     // of that ticket, backward
  std::int64_t ready_chunk = -1;             // wgrad tiles of this chunk have nothing to wait for
  std::int64_t dispatch_unit = 0, combine_unit = 0, merge_unit = 0;
  Counter tasks_done, shared_done, merge_done;
  PoolVector<BlockState> blocks;
  PoolVector<MinibatchState> minibatches;
  PoolVector<ChunkState> chunks;
  PoolVector<std::int32_t> source_of;  // [routed_blocks + 1] into sources
  PoolVector<BlockSource> sources;
  pipeline::BlockTable table;
  BlockState& block(std::int64_t b) { return blocks[static_cast<std::size_t>(b)]; }
  const BlockState& block(std::int64_t b) const { return blocks[static_cast<std::size_t>(b)]; }
  ChunkState& chunk(std::int64_t c) { return chunks[static_cast<std::size_t>(c)]; }
  struct {
    std::int64_t workers = 0;
    std::array<Time, kNumUses> use{};  // summed over them
  } uses[2];                           // CTAs (as_plan: compute workers), all others
  pipeline::ForwardStream forward;
  pipeline::BackwardStream backward;

  RankId me;
  std::int64_t num_tokens = 0, num_tickets = 0, routed_blocks = 0;
  std::int64_t wave_kind = -1, wave_band = -1;
  std::uint32_t wave_begin = 0;
  // tables
  std::vector<std::int64_t> row_prefix, step_ticket;
  std::vector<std::int32_t> source_begin, expert_block, chunk_block, chunk_expert, chunk_after;
  pipeline::PushTable push;
  std::vector<std::int32_t> push_first_row, push_expert_block, push_shared_blocks, push_unit_begin;
  std::vector<PushUnit> push_units;  // symmetric simulation: what peers push here, mirrored
  std::vector<float> fresh;          // [R, E_local] share of rows that dispatch moves; empty: all
  // counters
  std::vector<Counter> y_ready;
  Counter stage_done, schedule_ready, closed;
  std::array<Counter, pipeline::kMaxPhases> phase;
  Gathered inputs_ready, agreement;
  std::array<Gathered, pipeline::kMaxSlabs> returns_done;
  std::array<Slab, pipeline::kMaxSlabs> slabs;
  double stretch = 1;
  Time end = 0;
};

class Simulation {
 public:
  Simulation(const Problem& problem, const Plan& plan, const RoutingCounts& routing,
             const Machine& machine, const SimOptions& options);
  SimResult run();
  Pool& frames() const { return pool_; }

 private:
  // sim_setup.cpp, sim_prices.cpp
  void build_rank(std::int64_t r);
  void build_sources(RankState& r);
  void build_push(RankState& r);
  void mirror_pushes(RankState& r);
  void price_tasks(RankState& r);
  void judge_power(RankState& r);
  struct Crew {
    std::int64_t comm = 0, compute = 0;
    bool spare = false;  // the communication workers are spare warps
  };
  Crew crew() const;  // of every rank
  void add_workers(RankState& r, const Crew& crew);
  TileCost all_tiles(const RankState& r) const;
  double moved_bytes(const RankState& r) const;
  std::int64_t sharers(const RankState& r, BlockId b) const;
  TileCost task_cost(const RankState& r, const pipeline::Task& task) const;
  TileCost known_cost(const RankState& r, const pipeline::Task& task) const;
  std::int64_t lead_tiles(const RankState& r, BlockId b) const {  // FC1 (dgrad)
    return pipeline::num_fc1_tiles(r.table.is_shared(b) ? problem_.shared.intermediate
                                                        : problem_.intermediate);
  }

  Time shortest_way() const;

  // simulate.cpp, sim_comm.cpp, sim_compute.cpp: one program per worker
  Process program(Worker& w);
  Process run_split(Worker& w);
  Process end_phase(Worker& w, std::int64_t phase);
  Process memory_kernel(Worker& w, double bytes);
  std::int64_t routed_rows(const RankState& r) const;
  double activation_bytes(const RankState& r) const;
  Process stage(Worker& w);
  Process schedule_pass(Worker& w);
  Process push_rows(Worker& w);
  PushUnit push_unit(const RankState& r, std::int64_t unit) const;
  std::int64_t num_push_units(const RankState& r) const;
  Process combine_slab(Worker& w, std::int64_t slab);
  Process close_pass(Worker& w);

  // What there is most of follows each other without the program, which costs ten cache lines to
  // resume: next_* claims a unit and begins it or waits for what it needs, or says that none is
  // left; finish_* ends it and claims the next one.
  bool next_tile(Worker& w);
  bool claim_tile(Worker& w);
  void begin_tile(Worker& w);
  bool finish_tile(Worker& w);
  bool next_rows(Worker& w);
  void begin_rows(Worker& w);
  bool finish_rows(Worker& w);
  bool next_merge(Worker& w);
  void begin_merge(Worker& w);
  bool finish_merge(Worker& w);
  bool next_end(Worker& w);
  bool take_turn(Worker& w);
  bool leads(const Worker& w) const { return rest(w).idx == 0 && rest(w).role == Role::comm; }
  bool spare(const Worker& w) const { return gpu() && !w.is_cta; }  // warps of another's CTA
  WorkerProgram& rest(const Worker& w) { return programs_[id_of(w)]; }
  const WorkerProgram& rest(const Worker& w) const { return programs_[id_of(w)]; }
  bool leaves(const Worker& w) const;
  void combine_tile(Worker& w, const pipeline::Task& task);
  pipeline::DispatchUnit rows_of(const Worker& w) const;
  Need needed_by_tile(const Worker& w);
  Need needed_by_slot(RankState& r, BlockId b);
  std::int64_t wave_band(const RankState& r, const pipeline::Task& task) const;

  // what programs await
  struct Sleep {
    Simulation& sim;
    Worker& w;
    Time until;
    bool await_ready() const noexcept { return until <= sim.now_; }
    void await_suspend(std::coroutine_handle<> h) const {
      sim.rest(w).goes_on = h;
      sim.wake(w, until, Step::program);
    }
    void await_resume() const noexcept {}
  };
  struct Await {
    Simulation& sim;
    Worker& w;
    Counter& counter;
    std::uint32_t wanted;
    bool await_ready() const noexcept { return counter.value >= wanted; }
    void await_suspend(std::coroutine_handle<> h) const {
      sim.rest(w).goes_on = h;
      sim.wait_for(w, counter, wanted, Step::program);
    }
    void await_resume() const { sim.waited(w); }
  };
  struct Units {  // until none is left
    Simulation& sim;
    Worker& w;
    bool (Simulation::*next)(Worker&);
    bool await_ready() const { return !(sim.*next)(w); }
    void await_suspend(std::coroutine_handle<> h) const { sim.rest(w).goes_on = h; }
    void await_resume() const noexcept {}
  };
  Sleep sleep(Worker& w, Time until) { return {*this, w, until}; }
  Await wait(Worker& w, Counter& counter, std::int64_t wanted, WaitFor what, std::int64_t idx) {
    note_wait(w, what, idx);
    return {*this, w, counter, static_cast<std::uint32_t>(wanted)};
  }
  Units pull_rows(Worker& w) { return {*this, w, &Simulation::next_rows}; }
  Units compute_tiles(Worker& w, std::int64_t end);
  Units merge_slabs(Worker& w, std::int64_t end);
  void wake(Worker& w, Time at, Step step) {
    w.step = step;
    queue_.push(at, index_of(*w.rank), id_of(w));
  }
  std::uint32_t index_of(const RankState& r) const {
    return static_cast<std::uint32_t>(&r - ranks_.data());
  }
  std::uint32_t id_of(const Worker& w) const {
    return static_cast<std::uint32_t>(&w - workers_.data());
  }
  void wait_for(Worker& w, const Need& need, Step step) {
    note_wait(w, need.what, need.idx);
    wait_for(w, *need.counter, need.wanted, step);
  }
  void note_wait(Worker& w, WaitFor what, std::int64_t idx);
  void wait_for(Worker& w, Counter& counter, std::uint32_t wanted, Step step);
  void append_waiter(Counter& counter, std::uint32_t waiter);
  void waited(Worker& w);
  void add(Counter& counter, std::uint32_t amount);
  void later(Time time, const RankState& r, Counter& counter, std::uint32_t amount);
  void used(Worker& w, Use use, Time since) { used(w, use, since, now_); }
  void used(Worker& w, Use use, Time since, Time until) {
    w.rank->uses[w.is_cta ? 0 : 1].use[static_cast<std::size_t>(use)] += until - since;
  }
  void record(const Worker& w, trace::Kind kind, std::int64_t block, std::int64_t tile, bool shared,
              Time begin, Time end, WaitFor what = WaitFor::inputs_ready);

  // sim_transfer.cpp
  Time transfer(RankId source, RankId dest, double bytes, WireBytes wire, bool lands_in_memory);
  void raise(const RankState& from, Gathered RankState::*word, Time time);
  void gather(const RankState& r, Gathered& g, Time arrival);
  void announce_slab(const RankState& from, std::int64_t slab, Time time);
  void piece_pushed(RankState& r, std::int64_t slab, Time time);
  Time push_pieces(RankState& r, BlockId b, pipeline::Range rows, double cols);
  Time signal_time(RankId from, RankId to) const;
  RankState& at(RankId r) { return ranks_[static_cast<std::size_t>(simulated(r))]; }
  std::int64_t simulated(RankId r) const { return options_.symmetric ? 0 : r.v; }
  double dispatch_gbps(const Worker& w) const {
    return machine_[spare(w)            ? Field::spare_warp_gbps
                    : !split() && gpu() ? Field::sm_beside_gbps
                                        : Field::sm_pull_gbps];
  }
  double merge_gbps(const Worker& w) const {
    return machine_[spare(w) ? Field::spare_merge_gbps : Field::sm_merge_gbps];
  }
  bool same_domain(RankId a, RankId b) const {
    return domain_of_[static_cast<std::size_t>(a.v)] == domain_of_[static_cast<std::size_t>(b.v)];
  }

  bool forward() const { return options_.direction == Direction::forward; }
  bool split() const { return plan_.mode == ExecMode::split; }
  bool gpu() const { return options_.workers == Workers::gpu; }
  std::int64_t num_slabs() const { return forward() ? plan_.num_slabs : 1; }
  // The options are about the forward pass, as in the drivers.
  bool dispatch_by_push() const { return forward() && plan_.dispatch == DispatchMode::push; }
  bool combine_by_comm() const {
    return (forward() || options_.mechanisms.separate_kernels) &&
           plan_.combine == CombineMode::comm_workers;
  }
  double row_bytes() const { return row_bytes_; }
  double dispatch_row_bytes(const RankState& r, BlockId b) const;
  struct RowsMoved {
    double from_peer = 0, within = 0;  // within: from one place of the rank's memory to another
  };
  RowsMoved rows_moved(const RankState& dest, RankId source, BlockId b, double rows) const;
  bool dedupes() const;  // as the constructor keeps it
  bool gathers() const;
  bool z_saved(const RankState& r, BlockId b) const;
  pipeline::Range slab_columns(std::int64_t slab) const;

  const Problem problem_;
  const Plan plan_;
  const RoutingCounts& routing_;
  const Machine machine_;
  const SimOptions options_;
  const CostModel cost_;
  const WireBytes pull_, push_;
  const double row_bytes_;
  const bool dedupes_, gathers_;
  const double memory_ps_, link_ps_, network_ps_;  // per byte
  std::vector<std::int32_t> domain_of_;            // [R]
  mutable Pool pool_;                              // outlives what lies in it
  PoolVector<RankState> ranks_{pool_};             // neither moves: programs hold references
  PoolVector<Worker> workers_{pool_};
  std::vector<WorkerProgram> programs_;  // of workers_
  EventQueue queue_;
  struct Delivery {
    Counter* counter = nullptr;
    std::uint32_t amount = 0;
  };
  PoolVector<Waiter> waiters_{pool_};
  std::uint32_t free_waiter_ = kNobody;  // the first of a chain
  std::vector<Delivery> deliveries_;
  std::vector<std::uint32_t> free_deliveries_;
  Time now_ = 0;
  std::int64_t num_units_ = 0;  // claimed, with rows or tokens
  std::vector<trace::Event> events_;
};

}  // namespace moxie::planner
