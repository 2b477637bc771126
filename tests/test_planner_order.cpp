// The simulator against the CPU backend: where the protocol fixes an order, both traces show it.
// With one worker of each role every sequence is fixed and must be equal, event for event. With
// more workers, and in split mode, what the protocol fixes is who must end before who may begin;
// one checker holds both traces to that. Random small problems; the seed and the command are
// printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "moxie/pipeline/layout.h"
#include "moxie/pipeline/tables.h"
#include "moxie/planner/simulate.h"
#include "tests/support/env.h"
#include "tests/support/pass_outputs.h"

namespace moxie::planner {
namespace {

using trace::Event;
using trace::Kind;
using trace::Trace;

struct Scene {
  test::CaseSpec spec;
  Plan plan;
};

std::int64_t pick(std::mt19937_64& rng, std::int64_t lo, std::int64_t hi) {
  return lo + static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(hi - lo + 1));
}

// Several blocks per rank, ragged ranks, any routing, rings from their minimum to all.
Scene random_scene(std::mt19937_64& rng) {
  Scene s;
  const std::int64_t R = pick(rng, 1, 4), E = pick(rng, 1, 10);
  Problem p = test::small_problem(R, E, pick(rng, 1, std::min<std::int64_t>(3, E)), 64, 64);
  p.hidden = 64 * pick(rng, 1, 9);  // up to 3 FC2 tiles
  p.intermediate = 64 * pick(rng, 1, 4);
  if (rng() % 2) p.shared.intermediate = 64 * pick(rng, 1, 3);
  for (std::int64_t r = 0; r < R; ++r) s.spec.tokens.push_back(rng() % 5 ? pick(rng, 1, 300) : 0);
  p.max_tokens =
      std::max<std::int64_t>(1, *std::max_element(s.spec.tokens.begin(), s.spec.tokens.end()));
  constexpr test::Routing kRoutings[] = {test::Routing::uniform, test::Routing::zipf,
                                         test::Routing::one_expert, test::Routing::masked,
                                         test::Routing::duplicates};
  s.spec.routing = kRoutings[rng() % 5];
  s.spec.problem = p;
  Plan plan;
  plan.order = rng() % 2 ? TaskOrder::lag : TaskOrder::slabs;
  plan.num_slabs = static_cast<std::int32_t>(pick(rng, 1, 3));
  plan.band_blocks = static_cast<std::int32_t>(pick(rng, 1, 4));
  plan.lag_bands = static_cast<std::int32_t>(pick(rng, 1, 3));
  plan.minibatch_blocks = static_cast<std::int32_t>(pick(rng, 1, 3));
  plan.chunk_blocks = static_cast<std::int32_t>(pick(rng, 1, 4));
  plan.lag_chunks = static_cast<std::int32_t>(pick(rng, 1, 3));
  plan.save = static_cast<SavePolicy>(rng() % 3);
  plan.dispatch = static_cast<DispatchMode>(rng() % 2);
  plan.combine = static_cast<CombineMode>(rng() % 2);
  plan = pipeline::resolve(p, plan);
  const std::int64_t routed = plan.capacity_rows / pipeline::kBlockRows,
                     all = plan.backward_ring_blocks;
  if (rng() % 3) {
    plan.x_ring_blocks =
        std::min(routed, pick(rng, 0, 2) +
                             pipeline::min_x_ring_blocks(plan.band_blocks, plan.minibatch_blocks));
    plan.hidden_ring_blocks = std::min(
        routed, pick(rng, 0, 2) + pipeline::min_hidden_ring_blocks(plan.order, plan.band_blocks,
                                                                   plan.lag_bands, routed));
    plan.backward_ring_blocks = std::min(
        all, pick(rng, 0, 2) + pipeline::min_backward_ring_blocks(
                                   plan.chunk_blocks, plan.lag_chunks, plan.minibatch_blocks));
  }
  s.plan = plan;
  return s;
}

struct Traces {
  Trace cpu, sim;
};

RoutingCounts counts_of(const test::LayerCase& layer_case) {
  std::vector<std::vector<std::int32_t>> ids;
  for (const test::RankInputs& rank : layer_case.ranks) {
    ids.emplace_back();
    for (std::size_t i = 0; i < rank.expert_ids.size(); ++i)
      ids.back().push_back(static_cast<std::int32_t>(rank.expert_ids.get(i)));
  }
  return count_routes(layer_case.problem(), layer_case.spec.tokens, ids);
}

std::array<Traces, 2> run_both(const test::LayerCase& layer_case, const Plan& plan) {
  World world = test::make_world(test::world_options(layer_case.num_ranks()));
  Layer layer(world, layer_case.problem(), plan);
  test::PassOutputs outputs(layer_case);
  std::array<Traces, 2> both;
  const auto in = layer_case.forward_inputs();
  const auto out = outputs.forward();
  const Context context = layer.forward(in, out, &both[0].cpu);
  const auto grad_in = layer_case.backward_inputs();
  const auto grad_out = outputs.backward();
  layer.backward(context, grad_in, grad_out, &both[1].cpu);
  const RoutingCounts routing = counts_of(layer_case);
  const Machine m = machine(find_device("h200"));
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    both[static_cast<std::size_t>(direction)].sim =
        simulate(layer_case.problem(), layer.plan(), routing, m,
                 {.direction = direction, .workers = Workers::as_plan, .trace = true})
            .trace;
  }
  return both;
}

// What a worker did, in order, waits and times left out. Units that workers of both roles claim are
// listed without their worker: which of them merges a unit, or carries a piece home, is decided by
// chance; that each of them is done once, is not.
using Step = std::tuple<int, std::int32_t, std::int32_t, bool>;  // kind, block, tile, shared
bool claimed_by_both(const Event& e, const Plan& plan, const Trace& t) {
  const bool forward = t.title.starts_with("forward");
  return e.kind == Kind::merge ||
         (e.kind == Kind::combine && forward && plan.combine == CombineMode::comm_workers);
}
std::vector<Step> steps(const Trace& t, std::int32_t rank, Role role, const Plan& plan) {
  std::vector<Step> list;
  for (const Event& e : t.events) {
    if (e.rank == rank && e.kind != Kind::wait && e.role == role && !claimed_by_both(e, plan, t))
      list.emplace_back(static_cast<int>(e.kind), e.block, e.tile, e.shared);
  }
  return list;
}
std::vector<Step> shared_steps(const Trace& t, std::int32_t rank, const Plan& plan) {
  std::vector<Step> list;
  for (const Event& e : t.events) {
    if (e.rank == rank && claimed_by_both(e, plan, t))
      list.emplace_back(static_cast<int>(e.kind), e.block, e.tile, e.shared);
  }
  std::sort(list.begin(), list.end());
  return list;
}

TEST(PlannerOrder, OneWorkerOfEachRoleDoesTheSameInTheSameOrder) {
  std::mt19937_64 rng(test::test_seed());
  std::size_t num_steps = 0;
  for (int scene = 0; scene < 14; ++scene) {
    const Scene s = random_scene(rng);
    SCOPED_TRACE(to_string(s.spec.problem) + "; " + to_string(s.plan));
    const test::LayerCase layer_case(s.spec, rng());
    for (const Traces& both : run_both(layer_case, s.plan)) {
      for (std::int32_t r = 0; r < both.cpu.num_ranks; ++r) {
        for (const Role role : {Role::comm, Role::compute}) {
          const auto want = steps(both.cpu, r, role, s.plan),
                     got = steps(both.sim, r, role, s.plan);
          ASSERT_EQ(want, got) << both.cpu.title << " rank " << r << " " << name(role);
          num_steps += want.size();
        }
        ASSERT_EQ(shared_steps(both.cpu, r, s.plan), shared_steps(both.sim, r, s.plan));
      }
    }
  }
  EXPECT_GT(num_steps, 1000u);
}

// Everything a trace must respect, from the protocol page: a task begins after what it waits for
// has ended, on its own rank or, for merge, on all.
class Checker {
 public:
  Checker(const Problem& problem, const Plan& plan, const RoutingCounts& routing,
          Direction direction, const Trace& trace)
      : problem_(problem),
        plan_(plan),
        routing_(routing),
        forward_(direction == Direction::forward),
        pushed_(forward_ && plan.dispatch == DispatchMode::push),
        carried_(forward_ && plan.combine == CombineMode::comm_workers),
        trace_(trace) {}

  std::int64_t check() {
    for (std::int32_t r = 0; r < problem_.num_ranks; ++r) check_rank(r);
    return checked_;
  }

 private:
  using Key = std::tuple<Kind, std::int64_t, bool>;
  struct Ends {
    std::int64_t last_end = 0, first_begin = INT64_MAX, count = 0;
  };

  void after(const char* what, std::int64_t begin, const Ends& needed) {
    ++checked_;
    EXPECT_GE(begin, needed.last_end) << what;
  }

  void check_rank(std::int32_t r) {
    tables(r);
    std::map<Key, Ends> ends;                                       // by block (wgrad: chunk)
    std::map<std::int64_t, Ends> minibatch, slab_all_ranks, trail;  // trail: dX and wgrad by chunk
    const std::int64_t tiles = pipeline::num_fc2_tiles(problem_.hidden),
                       slabs = forward_ ? plan_.num_slabs : 1;
    std::map<std::pair<std::int64_t, std::int64_t>, Ends> y;  // FC2 tiles of (block, slab)
    const auto note = [](Ends& x, const Event& e) {
      x.last_end = std::max(x.last_end, e.end_ns);
      x.first_begin = std::min(x.first_begin, e.begin_ns);
      ++x.count;
    };
    for (const Event& e : trace_.events) {
      if (e.kind == Kind::combine)
        note(slab_all_ranks[carried_ ? e.tile : pipeline::slab_of_tile(e.tile, slabs, tiles)], e);
      if (e.rank != r) continue;
      note(ends[{e.kind, e.block, false}], e);
      if (e.kind == Kind::fc2) note(y[{e.block, pipeline::slab_of_tile(e.tile, slabs, tiles)}], e);
      // Pushed rows are recorded where they come from, by the number of a block elsewhere.
      if (e.kind == Kind::dispatch && !pushed_)
        note(minibatch[pipeline::minibatch_of(table_, BlockId{e.block}, plan_.minibatch_blocks)],
             e);
      if (e.kind == Kind::dx || e.kind == Kind::wgrad)
        note(trail[e.kind == Kind::dx ? stream_.chunks.chunk_of(BlockId{e.block}) : e.block], e);
    }
    std::map<std::tuple<Role, std::int32_t>, std::int64_t> last_ticket;
    for (const Event& e : trace_.events) {
      if (e.rank != r) continue;
      const std::int64_t b = e.block;
      const bool shared = e.kind != Kind::wgrad && b >= 0 && table_.is_shared(BlockId{b});
      switch (e.kind) {
        case Kind::combine:
          if (carried_) after("pieces stored", e.begin_ns, y[{b, e.tile}]);
          break;
        case Kind::dispatch: {
          if (pushed_) break;
          const std::int64_t holder =
              b - (forward_ ? plan_.x_ring_blocks : plan_.backward_ring_blocks);
          if (forward_ && holder >= table_.shared_blocks)
            after("x slot free", e.begin_ns, ends[{Kind::fc1, holder, false}]);
          if (!forward_ && holder >= 0)
            after("backward slot free", e.begin_ns,
                  trail[stream_.chunks.chunk_of(BlockId{holder})]);
          break;
        }
        case Kind::fc1:
          if (shared) break;
          after("rows ready", e.begin_ns,
                minibatch[pipeline::minibatch_of(table_, BlockId{b}, plan_.minibatch_blocks)]);
          if (b - plan_.hidden_ring_blocks >= table_.shared_blocks)
            after("hidden slot free", e.begin_ns,
                  ends[{Kind::fc2, b - plan_.hidden_ring_blocks, false}]);
          break;
        case Kind::dgrad:
          if (!shared)
            after("rows ready", e.begin_ns,
                  minibatch[pipeline::minibatch_of(table_, BlockId{b}, plan_.minibatch_blocks)]);
          break;
        case Kind::fc2: after("FC1 done", e.begin_ns, ends[{Kind::fc1, b, false}]); break;
        case Kind::dx: after("dgrad done", e.begin_ns, ends[{Kind::dgrad, b, false}]); break;
        case Kind::wgrad: {
          const pipeline::Range blocks = stream_.chunks.blocks(b);
          for (std::int64_t i = blocks.begin; i < blocks.end; ++i)
            after("dgrad of the chunk done", e.begin_ns, ends[{Kind::dgrad, i, false}]);
          if (stream_.chunks.chunk_after[b] >= 0)
            after("chunk before done", e.begin_ns, trail[stream_.chunks.chunk_after[b]]);
          break;
        }
        case Kind::merge: after("returns of all ranks", e.begin_ns, slab_all_ranks[e.tile]); break;
        default: break;
      }
      const auto ticket = ticket_.find({e.kind, e.block, e.tile});
      if (ticket == ticket_.end()) continue;
      auto [at, first] = last_ticket.try_emplace({e.role, e.worker}, -1);
      EXPECT_GT(ticket->second, at->second) << "a worker takes tickets in order";
      at->second = ticket->second;
      ++checked_;
    }
  }

  void tables(std::int32_t r) {
    const std::int64_t R = problem_.num_ranks;
    const auto local =
        static_cast<std::size_t>(num_local_experts(problem_.num_experts, R, RankId{r}));
    row_prefix_.assign(local * static_cast<std::size_t>(R + 1), 0);
    source_begin_.assign(local * static_cast<std::size_t>(R), 0);
    expert_block_.assign(local + 1, 0);
    std::vector<const std::int32_t*> begins;
    for (std::int64_t p = 0; p < R; ++p) begins.push_back(routing_.of_rank(p));
    table_ = pipeline::build_blocks(problem_, RankId{r},
                                    routing_.tokens[static_cast<std::size_t>(r)], begins,
                                    row_prefix_.data(), source_begin_.data(), expert_block_.data());
    const std::size_t n = static_cast<std::size_t>(table_.num_blocks) + local + 4;
    for (auto* v : {&chunk_block_, &chunk_expert_, &chunk_after_}) v->assign(n, 0);
    step_ticket_.assign(n + static_cast<std::size_t>(plan_.lag_chunks) + 2, 0);
    ticket_.clear();
    if (forward_) {
      const auto stream = pipeline::forward_stream(problem_, plan_, table_);
      for (std::int64_t t = 0; t < stream.num_tickets(); ++t) {
        const pipeline::Task task = stream.task(t);
        ticket_[{task.kind == pipeline::TaskKind::fc1 ? Kind::fc1 : Kind::fc2, task.block.v,
                 task.tile}] = t;
      }
      return;
    }
    stream_ =
        pipeline::build_chunks(problem_, plan_, table_, chunk_block_.data(), chunk_expert_.data(),
                               chunk_after_.data(), step_ticket_.data());
    for (std::int64_t t = 0; t < stream_.num_tickets(); ++t) {
      const pipeline::Task task = stream_.task(t);
      const bool wgrad = task.kind == pipeline::TaskKind::wgrad;
      const Kind kind = wgrad                                 ? Kind::wgrad
                        : task.kind == pipeline::TaskKind::dx ? Kind::dx
                                                              : Kind::dgrad;
      ticket_[{kind, wgrad ? task.chunk : task.block.v, task.tile}] = t;
    }
  }

  const Problem& problem_;
  const Plan& plan_;
  const RoutingCounts& routing_;
  const bool forward_, pushed_, carried_;
  const Trace& trace_;
  std::vector<std::int64_t> row_prefix_, step_ticket_;
  std::vector<std::int32_t> source_begin_, expert_block_, chunk_block_, chunk_expert_, chunk_after_;
  pipeline::BlockTable table_;
  pipeline::BackwardStream stream_;
  std::map<std::tuple<Kind, std::int64_t, std::int64_t>, std::int64_t> ticket_;
  std::int64_t checked_ = 0;
};

TEST(PlannerOrder, ManyWorkersKeepWhatTheProtocolFixes) {
  std::mt19937_64 rng(test::test_seed() + 1);
  std::int64_t checked = 0;
  for (int scene = 0; scene < 8; ++scene) {
    Scene s = random_scene(rng);
    s.plan.comm_workers = static_cast<std::int32_t>(pick(rng, 1, 3));
    s.plan.compute_workers = static_cast<std::int32_t>(pick(rng, 1, 4));
    if (scene % 4 == 0)
      s.plan = [&] {
        Plan split = s.plan;
        split.mode = ExecMode::split;
        split.x_ring_blocks = split.hidden_ring_blocks = split.backward_ring_blocks = 0;
        return pipeline::resolve(s.spec.problem, split);
      }();
    SCOPED_TRACE(to_string(s.spec.problem) + "; " + to_string(s.plan));
    const test::LayerCase layer_case(s.spec, rng());
    const RoutingCounts routing = counts_of(layer_case);
    const auto both = run_both(layer_case, s.plan);
    for (const Direction direction : {Direction::forward, Direction::backward}) {
      const Traces& t = both[static_cast<std::size_t>(direction)];
      for (const Trace* trace : {&t.cpu, &t.sim}) {
        checked += Checker(s.spec.problem, s.plan, routing, direction, *trace).check();
      }
      // The same work: every event of one is in the other.
      std::map<Step, int> count;
      for (const Event& e : t.cpu.events)
        ++count[{static_cast<int>(e.kind), e.block, e.tile, e.shared}];
      for (const Event& e : t.sim.events)
        --count[{static_cast<int>(e.kind), e.block, e.tile, e.shared}];
      for (const auto& [step, n] : count) {
        const auto kind = static_cast<Kind>(std::get<0>(step));
        if (kind == Kind::wait || kind == Kind::stage) continue;
        EXPECT_EQ(n, 0) << trace::name(kind) << " block " << std::get<1>(step) << " tile "
                        << std::get<2>(step);
      }
    }
  }
  EXPECT_GT(checked, 1000);
}

// The order of tasks is pipeline's alone: another order there is another order on both sides.
TEST(PlannerOrder, AnotherTaskOrderChangesBoth) {
  test::CaseSpec spec;
  spec.problem = test::small_problem(2, 4, 2, 512, 256);
  spec.problem.max_tokens = 256;
  spec.tokens = {256, 200};
  const test::LayerCase layer_case(spec, 5);
  Plan slabs, lag, bands;
  slabs.num_slabs = 2;
  lag.order = TaskOrder::lag;
  lag.band_blocks = 2;
  bands.band_blocks = 3;
  std::vector<std::vector<Step>> seen;
  for (const Plan& plan : {slabs, lag, bands}) {
    const Traces forward = run_both(layer_case, pipeline::resolve(spec.problem, plan))[0];
    const auto cpu = steps(forward.cpu, 0, Role::compute, plan);
    EXPECT_EQ(cpu, steps(forward.sim, 0, Role::compute, plan));
    for (const auto& other : seen) EXPECT_NE(cpu, other);
    seen.push_back(cpu);
  }
}

}  // namespace
}  // namespace moxie::planner
