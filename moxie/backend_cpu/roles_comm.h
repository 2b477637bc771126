// How a pass of the CPU twin begins and ends, the same in both directions: stage and schedule,
// finish and close. What lies between is in roles_dispatch.h, roles_compute.h and roles_return.h.
// Who waits for whom: docs/protocol.md.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "moxie/backend_cpu/worker.h"
#include "moxie/schedule/push_ref.h"
#include "moxie/schedule/schedule_ref.h"

namespace moxie::backend_cpu {

using pipeline::Range;
using pipeline::Verdict;

// Leader: sorts this rank's routes into its heap, or finds the first bad id.
template <class T>
void sort_own_routes(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  const Problem& p = r.problem();
  const std::int64_t num_routes = r.num_tokens * p.top_k;
  auto* ids = r.template ws<std::int32_t>(r.shape.workspace.ids);
  const float* weights = r.route_weights;
  if (r.direction == Direction::forward) {
    r.bad_route = r.expert_ids.dtype == DType::i64
                      ? schedule::narrow_ids(r.expert_ids.template as<std::int64_t>(), num_routes,
                                             p.num_experts, ids)
                      : schedule::narrow_ids(r.expert_ids.template as<std::int32_t>(), num_routes,
                                             p.num_experts, ids);
    if (r.bad_route.route >= 0) return;
    if (r.fill != nullptr) {
      std::copy_n(ids, num_routes, r.fill->ids.data());
      for (std::int64_t i = 0; i < num_routes; ++i) {
        if (ids[i] >= 0) r.fill->weights[static_cast<std::size_t>(i)] = weights[i];
      }
    }
  } else {
    std::copy_n(r.saved->ids.data(), num_routes, ids);
    weights = r.saved->weights.data();
  }
  schedule::sort_routes(ids, weights, num_routes, p.num_experts,
                        r.template heap<std::int32_t>(r.shape.heap.routes_sorted),
                        r.template heap<float>(r.shape.heap.weights_sorted),
                        r.template heap<std::int32_t>(r.shape.heap.route_begin));
  *r.template heap<std::int32_t>(r.shape.heap.num_tokens) = static_cast<std::int32_t>(r.num_tokens);
}

// Weight of the shared expert's rows: 1, or the sigmoid of a dot product in column order.
template <class T>
void stage_shared_weights(RankPass<T>& r, Range tokens) {
  auto* weight = r.template ws<float>(r.shape.workspace.shared_weight);
  const std::int64_t h = r.problem().hidden;
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    weight[t] = 1.0f;
    if (!r.problem().shared.output_gate) continue;
    const T* gate = r.weights->shared_output_gate.template as<T>();
    float dot = 0.0f;
    for (std::int64_t j = 0; j < h; ++j)
      dot += expert::widen(r.x[t * h + j]) * expert::widen(gate[j]);
    weight[t] = expert::sigmoid(dot);
  }
}

// Leader: a rank that refuses a pass leaves it before its peers have come, and raises inputs_ready
// again when they have read that: they say so by their agreement, unless they refused it as well.
template <class T>
void await_refused_pass(Worker<T>& w) {
  const RankPass<T>& r = w.rank();
  const std::uint64_t wanted = pipeline::make_signal(r.refused_epoch);
  const std::uint64_t refused =
      pipeline::make_signal(r.refused_epoch, static_cast<std::uint32_t>(Verdict::refused));
  for (std::int64_t i = 0; r.refused_epoch > 0 && i < r.problem().num_ranks; ++i) {
    const std::uint64_t word =
        w.wait_signal(r.shape.heap.inputs_ready, i, wanted, WaitFor::inputs_ready, i);
    if (word == refused || pipeline::epoch_of(word) > r.refused_epoch) continue;
    w.wait_signal(r.shape.heap.agreement, i, wanted, WaitFor::agreement, i);
  }
}

// Leader: why this rank will not run the pass, where its peers read it.
template <class T>
Verdict write_refusal(RankPass<T>& r) {
  auto* text = r.template heap<char>(pipeline::refusal_of(r.shape.heap));
  text[r.refusal->copy(text, pipeline::kRefusalBytes - 1)] = 0;
  return Verdict::refused;
}

// Copies this rank's inputs into its heap. The leader sorts first and tells every peer, so that
// they can schedule; when all is copied it tells them again, so that they can pull.
template <class T>
void stage(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  const auto& c = r.shape.counters;
  w.traced(trace::Kind::stage, -1, -1, false, [&] {
    if (w.leader()) {
      // Nobody touches the other bank during this pass; the next pass starts from zeros.
      std::memset(r.template ws<std::uint32_t>(r.shape.workspace.counters) +
                      pipeline::counter_bank(r.pass_count + 1) * r.shape.workspace.counter_words,
                  0, static_cast<std::size_t>(r.shape.workspace.counter_words) * 4);
      await_refused_pass(w);
      Verdict own = Verdict::go;
      if (r.refusal != nullptr)
        own = write_refusal(r);
      else if (sort_own_routes(w); r.bad_route.route >= 0)
        own = Verdict::invalid_route;
      w.raise_everywhere(r.shape.heap.inputs_ready, r.me.v,
                         pipeline::make_signal(r.epoch, static_cast<std::uint32_t>(own)));
    }
    const std::int64_t h = r.problem().hidden;
    while (const auto unit = w.claim(c.stage_unit, ceil_div(r.num_tokens, pipeline::kTokenUnit))) {
      const Range tokens = pipeline::tile_range(*unit, pipeline::kTokenUnit, r.num_tokens);
      const std::int64_t at = tokens.begin * h, count = tokens.size() * h;
      if (!r.x_in_place()) std::copy_n(r.x + at, count, r.template heap<T>(r.shape.heap.x_in) + at);
      if (r.direction == Direction::backward)
        std::copy_n(r.dy + at, count, r.template heap<T>(r.shape.heap.dy_in) + at);
      if (r.problem().shared.intermediate > 0) stage_shared_weights(r, tokens);
      w.add(c.stage_done, static_cast<std::uint32_t>(tokens.size()));
    }
  });
  if (!w.leader()) return;
  w.wait_counter(c.stage_done, r.num_tokens, WaitFor::stage_done, 0);
  w.raise_everywhere(r.shape.heap.x_staged, r.me.v, pipeline::make_signal(r.epoch));
}

template <class T>
void build_push_table(RankPass<T>& r, std::span<const std::int32_t* const> peer_route_begin) {
  std::vector<std::int32_t> peer_tokens;
  for (std::int64_t i = 0; i < r.problem().num_ranks; ++i)
    peer_tokens.push_back(
        *r.peers.template at<const std::int32_t>(RankId{i}, r.shape.heap.num_tokens.offset));
  const pipeline::WorkspaceLayout& l = r.shape.workspace;
  r.push = schedule::build_push(r.problem(), r.me, peer_route_begin, peer_tokens,
                                r.shape.extents.routed_blocks,
                                r.template ws<std::int32_t>(l.push_first_row),
                                r.template ws<std::int32_t>(l.push_expert_block),
                                r.template ws<std::int32_t>(l.push_shared_blocks),
                                r.template ws<std::int32_t>(l.push_unit_begin));
}

// Leader: waits for every peer's inputs, and if somebody objects, or the capacity is not proven,
// for their verdicts too.
template <class T>
Verdict agree(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  const Problem& p = r.problem();
  const std::uint64_t wanted = pipeline::make_signal(r.epoch);
  if (r.refusal != nullptr) return Verdict::refused;  // waits for nobody: await_refused_pass
  Verdict verdict = Verdict::go;
  std::vector<const std::int32_t*> peer_route_begin;
  std::vector<bool> refused(static_cast<std::size_t>(p.num_ranks));  // and left the pass
  for (std::int64_t i = 0; i < p.num_ranks; ++i) {
    const std::uint64_t word =
        w.wait_signal(r.shape.heap.inputs_ready, i, wanted, WaitFor::inputs_ready, i);
    if (pipeline::payload_of(word) != 0) verdict = static_cast<Verdict>(pipeline::payload_of(word));
    if (pipeline::payload_of(word) == static_cast<std::uint32_t>(Verdict::refused)) {
      refused[static_cast<std::size_t>(i)] = true;
      if (r.objection.empty())
        r.objection =
            "rank " + std::to_string(i) + " refused: " +
            r.peers.template at<const char>(RankId{i}, pipeline::refusal_of(r.shape.heap).offset);
    }
    peer_route_begin.push_back(
        r.peers.template at<const std::int32_t>(RankId{i}, r.shape.heap.route_begin.offset));
  }
  if (verdict == Verdict::go) {
    r.table = schedule::build_blocks(p, r.me, r.num_tokens, peer_route_begin,
                                     r.template ws<std::int64_t>(r.shape.workspace.row_prefix),
                                     r.template ws<std::int32_t>(r.shape.workspace.source_begin),
                                     r.template ws<std::int32_t>(r.shape.workspace.expert_block));
    r.wanted_blocks = r.table.num_blocks - r.table.shared_blocks;
    if (r.wanted_blocks > r.shape.extents.routed_blocks) verdict = Verdict::capacity_exceeded;
    if (r.dispatch() == DispatchMode::push) build_push_table(r, peer_route_begin);
  }
  const bool proven = r.shape.extents.routed_blocks >= pipeline::worst_case_blocks(p);
  if (verdict == Verdict::go && proven) return verdict;
  // Every rank enters here or none: objections are seen by all, and `proven` is the same
  // everywhere. Nobody leaves, and so nobody overwrites an inputs_ready word, before all have
  // judged.
  w.raise_everywhere(r.shape.heap.agreement, r.me.v,
                     pipeline::make_signal(r.epoch, static_cast<std::uint32_t>(verdict)));
  for (std::int64_t i = 0; i < p.num_ranks; ++i) {
    if (refused[static_cast<std::size_t>(i)]) continue;
    const std::uint64_t word =
        w.wait_signal(r.shape.heap.agreement, i, wanted, WaitFor::agreement, i);
    if (verdict == Verdict::go) verdict = static_cast<Verdict>(pipeline::payload_of(word));
  }
  return verdict;
}

// Builds the rank's tables and opens the pass to its other workers.
template <class T>
void schedule_pass(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  if (w.leader()) {
    w.traced(trace::Kind::schedule, -1, -1, false, [&] {
      r.verdict = agree(w);
      if (r.verdict == Verdict::go) {
        if (r.direction == Direction::forward) {
          r.forward = pipeline::forward_stream(r.problem(), r.plan(), r.table);
          r.num_tickets = r.forward.num_tickets();
        } else {
          r.backward =
              schedule::build_chunks(r.problem(), r.plan(), r.table,
                                     r.template ws<std::int32_t>(r.shape.workspace.chunk_block),
                                     r.template ws<std::int32_t>(r.shape.workspace.chunk_expert),
                                     r.template ws<std::int32_t>(r.shape.workspace.chunk_after),
                                     r.template ws<std::int64_t>(r.shape.workspace.step_ticket));
          r.num_tickets = r.backward.num_tickets();
        }
        if (r.wanted_blocks == 0) {  // no piece will ever complete a slab: say so now
          for (std::int64_t s = 0; s < r.num_slabs(); ++s) announce_slab(w, s);
        }
      }
    });
    w.add(r.shape.counters.schedule_ready, 1);
  }
  w.wait_counter(r.shape.counters.schedule_ready, 1, WaitFor::schedule_ready, 0);
}

template <class T>
void announce_slab(Worker<T>& w, std::int64_t slab) {
  RankPass<T>& r = w.rank();
  w.raise_everywhere(r.shape.heap.returns_done, r.me.v * pipeline::kMaxSlabs + slab,
                     pipeline::make_signal(r.epoch));
}

// The last act of the leader, also of a pass that was called off: the next one begins at the next
// epoch and bank.
template <class T>
void close_pass(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  if (w.leader()) {
    *r.template heap<std::uint64_t>(r.shape.heap.epoch) = r.epoch;
    *r.template ws<std::uint64_t>(r.shape.workspace.pass_count) = r.pass_count + 1;
    w.add(r.shape.counters.closed, 1);
  }
  w.wait_counter(r.shape.counters.closed, 1, WaitFor::pass_closed, 0);
}

// The rank may leave when its own output is whole and every peer has pushed everything: then nobody
// reads its heap any more, and its next pass may overwrite it.
template <class T>
void finish_pass(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  w.wait_counter(r.shape.counters.merge_done,
                 pipeline::num_merge_units(r.num_tokens, r.num_slabs()), WaitFor::merge_done, 0);
  w.wait_counter(r.shape.counters.tasks_done, r.num_tickets, WaitFor::tasks_done, 0);
  if (!w.leader()) return;
  for (std::int64_t i = 0; i < r.problem().num_ranks; ++i) {
    for (std::int64_t s = 0; s < r.num_slabs(); ++s) {
      w.wait_signal(r.shape.heap.returns_done, i * pipeline::kMaxSlabs + s,
                    pipeline::make_signal(r.epoch), WaitFor::returns_done, i);
    }
  }
}

}  // namespace moxie::backend_cpu
