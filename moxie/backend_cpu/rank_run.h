// What one rank's workers run: a worker's top function only gives roles, which are in roles_comm.h,
// roles_dispatch.h, roles_compute.h and roles_return.h; and the passes of a rank, one after
// another.
#pragma once
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "moxie/backend_cpu/roles_compute.h"

namespace moxie::backend_cpu {

// Split mode: stage after stage, all workers in every stage, a barrier between.
template <class T>
void end_phase(Worker<T>& w, std::int64_t phase) {
  RankPass<T>& r = w.rank();
  const std::int64_t word = r.shape.counters.phase + phase;
  w.add(word, 1);
  w.wait_counter(word, r.shape.comm_workers + r.plan().compute_workers, WaitFor::phase, phase);
}

template <class T>
void run_split(Worker<T>& w) {
  RankPass<T>& r = w.rank();
  stage(w);
  schedule_pass(w);
  if (r.verdict != Verdict::go) return close_pass(w);
  std::int64_t phase = 0;
  dispatch_rows(w);
  end_phase(w, phase++);
  const std::vector<std::int64_t> ends = r.direction == Direction::forward
                                             ? pipeline::phase_ends(r.forward)
                                             : pipeline::phase_ends(r.backward);
  for (const std::int64_t end : ends) {
    compute_tiles(w, end);
    end_phase(w, phase++);
  }
  if (r.combine() == CombineMode::comm_workers) {
    for (std::int64_t s = 0; s < r.num_slabs(); ++s) combine_slab(w, s);
    end_phase(w, phase++);
  }
  merge_slabs(w, r.num_slabs());
  finish_pass(w);
  close_pass(w);
}

template <class T>
void run_fused(Worker<T>& w, Role role) {
  RankPass<T>& r = w.rank();
  if (role == Role::comm) stage(w);
  schedule_pass(w);
  if (r.verdict != Verdict::go) return close_pass(w);
  if (role == Role::comm)
    dispatch_rows(w);
  else
    compute_tiles(w, r.num_tickets);
  return_rows(w);  // compute workers join when their tickets are out
  finish_pass(w);
  close_pass(w);
}

template <class T>
void worker_main(RankPass<T>& rank, Role role, std::int32_t idx, std::byte* scratch,
                 std::vector<trace::Event>* events) {
  if (rank.faults.late_rank == rank.me.v)
    std::this_thread::sleep_for(std::chrono::milliseconds(rank.faults.late_ms));
  Worker<T> worker(rank, role, idx, scratch, events);
  try {
    if (rank.plan().mode == ExecMode::split)
      run_split(worker);
    else
      run_fused(worker, role);
  } catch (const GaveUp&) {  // the rank's record tells
  } catch (const Killed&) {  // fault injection: peers must find out by themselves
  }
}

// The passes of one rank: one, or several back to back. Only the rank's own workers meet between
// two of them, as the CTAs of one GPU meet at the end of a launch; other ranks may be a pass ahead
// or behind.
template <class T>
struct RankRun {
  std::vector<std::unique_ptr<RankPass<T>>> passes;
  std::unique_ptr<std::barrier<>> between;
};

// Fault injection: what the rank will stage next becomes 0xFF as soon as it has left a pass. A peer
// that still read it would show.
template <class T>
void poison_inputs(const RankPass<T>& r) {
  const pipeline::HeapLayout& h = r.shape.heap;
  for (const pipeline::Region& region : {h.x_in, h.dy_in, h.routes_sorted, h.weights_sorted}) {
    if (region.offset == h.x_in.offset && r.x_in_place()) continue;  // the caller's, not staged
    std::memset(r.template heap<std::byte>(region), 0xFF,
                static_cast<std::size_t>(region.num_bytes));
  }
}

template <class T>
void run_passes(const RankRun<T>& run, Role role, std::int32_t idx, std::byte* scratch,
                std::vector<trace::Event>* events) {
  for (const auto& pass : run.passes) {
    worker_main(*pass, role, idx, scratch, events);
    run.between->arrive_and_wait();
    if (pass->watch.stopped || pass->verdict != Verdict::go) return;
    if (role == Role::comm && idx == 0 && pass->faults.poison_workspace) poison_inputs(*pass);
    run.between->arrive_and_wait();
  }
}

}  // namespace moxie::backend_cpu
