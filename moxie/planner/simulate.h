// The simulator: runs moxie/pipeline - the same task streams, waits, rings, units and signals as
// the CPU and CUDA drivers - on a virtual clock, for every rank. What a task or a transfer costs
// comes from a device record; what happens in which order comes from pipeline/. Deterministic.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "moxie/core/problem.h"
#include "moxie/pipeline/plan.h"
#include "moxie/planner/device.h"
#include "moxie/planner/routing.h"
#include "moxie/trace/trace.h"

namespace moxie::planner {

enum class Direction : std::int32_t { forward, backward };
const char* name(Direction direction);

// Who does the work of a rank.
enum class Workers : std::int32_t {
  gpu,      // the SMs of the device; plan.comm_workers of them only communicate, 0: the spare
            // warps of all do
  as_plan,  // plan.comm_workers and plan.compute_workers, each strictly one thing after another:
            // the CPU twin's threads
};

// What the pipeline has no plan option for, to be switched on or off in studies.
struct Mechanisms {
  // Dispatch moves a token once per (token, rank), not once per route. Unless said: as the kernels
  // do, over links only, where the plan has a slot for every row (pipeline::pulls_once).
  std::optional<bool> dedupe = {};
  bool fused_activation = true;  // false: gate and up make a round trip through memory
  bool mxfp8 = false;  // products at the FP8 rate, weights and dispatched rows in one byte (and a
                       // scale per 32) an element
  bool separate_kernels = false;  // split mode as chains of library kernels do it: rows into expert
                                  // order and back by kernels of their own, without fused
                                  // activation also quantised by some, dX carried home by a stage
  bool wave_barrier = false;      // all CTAs of a rank meet after each band's FC1 and FC2, as in
                                  // kernels that hand over whole minibatches
  friend bool operator==(const Mechanisms&, const Mechanisms&) = default;
};

struct SimOptions {
  Direction direction = Direction::forward;
  Workers workers = Workers::gpu;
  std::int32_t reserve_sms = 0;
  // Simulate rank 0 only; its peers do to it what it does to them. Exact for equal ranks up to the
  // noise of routing, R times cheaper.
  bool symmetric = false;
  bool trace = false;
  Mechanisms mechanisms = {};
};

// Where each second of a worker goes.
enum class Use : std::int32_t {
  start,        // launch, staging, sort, handshake, tables
  gemm,         // products and their epilogues
  wait_rows,    // rows of the block are not there yet
  wait_slots,   // a ring slot is not free yet
  wait_order,   // an earlier task of the same rows is not done yet
  communicate,  // dispatch, pushes that the link has not taken yet
  merge,
  tail,  // nothing left to do but wait for others
};
inline constexpr std::size_t kNumUses = 8;
const char* name(Use use);
using Uses = std::array<double, kNumUses>;  // seconds, summed over workers

struct LinkUse {
  double out = 0, in = 0;  // share of capacity in use over the pass, mean over ranks
  double max_out = 0, max_in = 0;
  double sent_bytes = 0;  // on the wire, all ranks, one direction
};

struct SimResult {
  double ms = 0;  // slowest rank
  std::vector<double> rank_ms;
  Uses ctas{};         // of all CTAs (as_plan: compute workers)
  Uses spare_warps{};  // of communication workers that have no CTA of their own
  LinkUse link, network;
  double gemm_stretch = 1;  // by power: moving bytes beside products lowers the clock
  // What workers claimed and carried out: tiles of products (tickets), and units of rows and tokens
  // (dispatch, combine, merge). What it costs to simulate a pass is counted per one of both.
  std::int64_t num_tasks = 0, num_units = 0;
  std::int64_t num_events = 0;  // the virtual clock's: ends of these, and waits that had to wait
  std::int64_t routed_rows = 0;
  trace::Trace trace;
};

// `plan` must be resolved and pass pipeline::check. Throws Error(invalid_argument or invalid_plan)
// for what cannot be simulated: no tokens at all, more communication CTAs than SMs, a capacity that
// the routing exceeds.
SimResult simulate(const Problem& problem, const Plan& plan, const RoutingCounts& routing,
                   const Machine& machine, const SimOptions& options = {});

}  // namespace moxie::planner
