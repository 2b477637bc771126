// The CPU twin: every rank is a group of threads, running the real protocol over heaps that all
// ranks see: those of one process, or of one process per rank over shared memory. A worker's top
// function only gives roles; the roles are in roles_comm.h and roles_compute.h.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "moxie/backend.h"
#include "moxie/backend_cpu/roles_compute.h"
#include "moxie/transport/rendezvous.h"
#include "moxie/transport/shared_memory.h"

namespace moxie::backend_cpu {
namespace {

struct CpuContext final : ContextState {
  std::vector<RankContext> ranks;
};

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

class CpuBackend;

class CpuLayer final : public BackendLayer {
 public:
  CpuLayer(CpuBackend& backend, const Problem& problem, const Plan& plan);
  std::unique_ptr<ContextState> make_context() override;
  void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
               ContextState* context, trace::Trace* trace) override;
  void backward(const ContextState& context, std::span<const BackwardInput> inputs,
                std::span<const BackwardOutput> outputs, trace::Trace* trace) override;
  std::byte* input_buffer(std::int64_t rank) const override;

 private:
  std::int64_t workers_per_rank() const {
    return shape_.comm_workers + shape_.plan.compute_workers;
  }
  std::byte* scratch(std::int64_t rank, std::int64_t worker) const {
    // rank: of this process, from 0
    return scratch_.get() + (rank * workers_per_rank() + worker) * scratch_bytes_;
  }
  template <class T>
  void run(Direction direction, const std::function<void(RankPass<T>&)>& bind, trace::Trace* trace);
  template <class T>
  void throw_if_failed(const std::vector<RankRun<T>>& runs);
  void poison(CpuContext* fill, const std::function<const void*(std::size_t)>& x);
  void clear_counters();

  CpuBackend& backend_;
  LayerShape shape_;
  std::vector<transport::AlignedBytes> workspaces_;        // [R]  ranks of one process
  std::vector<transport::SharedBytes> shared_workspaces_;  // [R]  ranks as processes
  std::vector<std::byte*> workspace_bases_;                // [R]
  transport::AlignedBytes scratch_;
  std::int64_t scratch_bytes_ = 0;  // per worker
  std::uint64_t generation_ = 0;    // of the world when the counters last started from zero
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const WorldOptions& options)
      : options_(options), gemm_(options.gemm), heaps_(options.num_ranks) {}
  CpuBackend(const WorldOptions& options, const ProcessOptions& process) : CpuBackend(options) {
    rendezvous_ = std::make_unique<transport::Rendezvous>(process.name, process.rank,
                                                          options.num_ranks, options.timeout_s);
    local_ = {process.rank, 1};
  }

  std::int64_t num_ranks() const override { return options_.num_ranks; }
  RankRange local_ranks() const override { return local_; }
  bool of_processes() const { return rendezvous_ != nullptr; }
  const WorldOptions& options() const override { return options_; }
  std::unique_ptr<BackendLayer> make_layer(const Problem& problem, const Plan& plan) override {
    return std::make_unique<CpuLayer>(*this, problem, plan);
  }
  bool stopped() const override { return stopped_; }
  void reset() override {
    // Peers write into this heap until they come here, and again as soon as they leave.
    meet("World::reset()");
    clear_signals();
    meet("World::reset()");
  }
  void set_timeout(double seconds) override { options_.timeout_s = seconds; }
  void set_faults(const FaultInjection& faults) override { options_.faults = faults; }
  std::string describe_gemm() const override { return gemm_.description(); }
  MachineId machine() const override {
    return {.backend = "cpu",
            .device = cpu_model(),
            .num_sms = std::thread::hardware_concurrency(),
            .ranks_of_devices = {options_.num_ranks},
            .runtime = gemm_.description()};
  }

  // Heaps are shared by all layers; growing one starts its signals from zero again, which is legal
  // between passes.
  void reserve(const pipeline::HeapLayout& heap) {
    signals_bytes_ = heap.signals_bytes;  // depends on the number of ranks only
    if (!of_processes()) {
      if (heaps_.reserve(heap.num_bytes)) clear_signals();
    } else if (heap.num_bytes > shared_heap_bytes_) {
      shared_heaps_ = share(heap.num_bytes, heap_bases_);  // zeroes
      shared_heap_bytes_ = heap.num_bytes;
      ++generation_;
    }
  }
  // Every rank's memory of that size, all mapped here.
  std::vector<transport::SharedBytes> share(std::int64_t num_bytes,
                                            std::vector<std::byte*>& bases) {
    auto own = transport::SharedBytes::create(num_bytes);
    const auto all =
        rendezvous_->all_gather("Layer()", "memory", {own.descriptor()}, options_.timeout_s);
    own.close_descriptor();
    std::vector<transport::SharedBytes> memory;
    bases.clear();
    for (std::size_t r = 0; r < all.size(); ++r) {
      auto mapped = transport::SharedBytes::map(all[r].descriptors.at(0), num_bytes);
      const bool mine = static_cast<std::int64_t>(r) == local_.begin;
      memory.push_back(mine ? std::move(own) : std::move(mapped));
      bases.push_back(memory.back().get());
    }
    return memory;
  }
  void refuse_layer(const std::string& sentence) override {
    if (!of_processes()) return;
    try {
      rendezvous_->all_gather("Layer()", "refused: " + sentence, {}, options_.timeout_s);
    } catch (const Error&) {  // the caller throws what is wrong here
    }
  }
  // Ranks as processes must make the same layers. Throws on every rank.
  void check_same_layer(const Problem& problem, const Plan& plan);

  const expert::HostGemmEngine& gemm() const { return gemm_; }
  transport::PeerMemory peers() const {
    return of_processes() ? transport::PeerMemory{heap_bases_} : heaps_.memory();
  }
  std::uint64_t generation() const {
    return generation_;
  }  // changes whenever signals and counters start from zero
  void stop() { stopped_ = true; }

 private:
  void meet(const char* what) {
    if (of_processes()) rendezvous_->all_gather(what, "here", {}, options_.timeout_s);
  }
  void clear_signals() {
    const bool has_heaps = of_processes() ? shared_heap_bytes_ > 0 : heaps_.num_bytes() > 0;
    for (std::int64_t i = 0; has_heaps && i < local_.count; ++i) {
      std::memset(peers().at<std::byte>(RankId{local_.begin + i}, 0), 0,
                  static_cast<std::size_t>(signals_bytes_));
    }
    ++generation_;
    stopped_ = false;
  }

  WorldOptions options_;
  RankRange local_{0, options_.num_ranks};
  expert::HostGemmEngine gemm_;
  transport::InProcessHeaps heaps_;
  std::unique_ptr<transport::Rendezvous> rendezvous_;  // ranks as processes only, as these:
  std::vector<transport::SharedBytes> shared_heaps_;   // [R]
  std::vector<std::byte*> heap_bases_;                 // [R]
  std::int64_t shared_heap_bytes_ = 0;
  std::int64_t signals_bytes_ = 0;
  std::uint64_t generation_ = 1;
  bool stopped_ = false;
};

// Everything that the ranks of a layer must agree on, as words that a sentence can show.
std::string layer_words(const Problem& p, const Plan& plan) {
  return fmt::format(
      "{} limit={} alpha={}; mode={} order={} dispatch={} combine={} slabs={} band={} lag={} "
      "minibatch={} capacity={} x_ring={} hidden_ring={} chunk={} lag_chunks={} backward_ring={} "
      "save={} saved_rows={}",
      to_string(p), p.activation.limit, p.activation.alpha, name(plan.mode), name(plan.order),
      name(plan.dispatch), name(plan.combine), plan.num_slabs, plan.band_blocks, plan.lag_bands,
      plan.minibatch_blocks, plan.capacity_rows, plan.x_ring_blocks, plan.hidden_ring_blocks,
      plan.chunk_blocks, plan.lag_chunks, plan.backward_ring_blocks, name(plan.save),
      plan.saved_rows);
}

void CpuBackend::check_same_layer(const Problem& problem, const Plan& plan) {
  const std::string own = layer_words(problem, plan);
  const auto all = rendezvous_->all_gather("Layer()", own, {}, options_.timeout_s);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].text == all[0].text) continue;
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the layer of rank {} is ({}), that of rank 0 is ({}); must be the "
                            "same on every rank",
                            r, all[r].text, all[0].text));
  }
  if (plan.dispatch == DispatchMode::push && plan.save == SavePolicy::z_and_x) {
    throw Error(ErrorCode::invalid_plan,
                "plan.save is z+x with plan.dispatch push, must be none or z where ranks are "
                "processes: a peer cannot write into this one's context; nearest legal value z");
  }
}

LayerShape make_shape(const Problem& problem, const Plan& plan) {
  LayerShape s;
  s.problem = problem;
  s.plan = plan;
  s.extents = pipeline::extents(problem, plan);
  s.heap = pipeline::heap_layout(problem);
  s.workspace = pipeline::workspace_layout(problem, plan);
  s.counters = pipeline::counter_layout(s.extents);
  s.saves_z = plan.save != SavePolicy::none;
  s.saves_x = plan.save == SavePolicy::z_and_x;
  s.saved_blocks = pipeline::saved_blocks(plan);
  s.comm_workers = std::max(plan.comm_workers, 1);
  return s;
}

CpuLayer::CpuLayer(CpuBackend& backend, const Problem& problem, const Plan& plan)
    : backend_(backend), shape_(make_shape(problem, plan)) {
  if (backend_.of_processes()) backend_.check_same_layer(problem, plan);
  backend_.reserve(shape_.heap);
  scratch_bytes_ = align_up(expert::scratch_floats(problem) * 4, pipeline::kRegionAlign);
  scratch_ =
      transport::allocate_bytes(backend_.local_ranks().count * workers_per_rank() * scratch_bytes_);
  if (backend_.of_processes()) {
    shared_workspaces_ = backend_.share(shape_.workspace.num_bytes, workspace_bases_);
    return;
  }
  for (std::int64_t r = 0; r < problem.num_ranks; ++r) {
    workspaces_.push_back(transport::allocate_bytes(shape_.workspace.num_bytes));
    workspace_bases_.push_back(workspaces_.back().get());
  }
}

std::byte* CpuLayer::input_buffer(std::int64_t rank) const {
  return backend_.peers().at<std::byte>(RankId{rank}, shape_.heap.x_in.offset);
}

std::unique_ptr<ContextState> CpuLayer::make_context() {
  auto context = std::make_unique<CpuContext>();
  const Problem& p = shape_.problem;
  const pipeline::ContextBytes bytes = pipeline::context_bytes(p, shape_.plan);
  for (std::int64_t i = 0; i < backend_.local_ranks().count; ++i) {
    RankContext rank;
    rank.ids.resize(static_cast<std::size_t>(p.max_tokens * p.top_k));
    rank.weights.resize(rank.ids.size());
    rank.z = transport::allocate_bytes(bytes.z);
    rank.x = transport::allocate_bytes(bytes.x);
    rank.shared_z = transport::allocate_bytes(bytes.shared_z);
    context->num_bytes += bytes.total();
    context->ranks.push_back(std::move(rank));
  }
  return context;
}

// New workspaces and those of a world that was reset start from clean banks.
void CpuLayer::clear_counters() {
  const RankRange local = backend_.local_ranks();
  for (std::int64_t i = 0; i < local.count; ++i) {
    std::byte* workspace = workspace_bases_[static_cast<std::size_t>(local.begin + i)];
    std::memset(workspace + shape_.workspace.pass_count.offset, 0, 8);
    std::memset(workspace + shape_.workspace.counters.offset, 0,
                static_cast<std::size_t>(shape_.workspace.counters.num_bytes));
  }
  generation_ = backend_.generation();
}

// Fault injection: every byte that a pass must write before it reads becomes 0xFF, a NaN in either
// storage type. x[r] is rank r's input.
void CpuLayer::poison(CpuContext* fill, const std::function<const void*(std::size_t)>& x) {
  const auto spoil = [](std::byte* data, std::int64_t num_bytes) {
    std::memset(data, 0xFF, static_cast<std::size_t>(num_bytes));
  };
  const pipeline::ContextBytes saved = pipeline::context_bytes(shape_.problem, shape_.plan);
  const RankRange local = backend_.local_ranks();
  for (std::size_t i = 0; i < static_cast<std::size_t>(local.count); ++i) {
    const RankId rank{local.begin + static_cast<std::int64_t>(i)};
    std::byte* workspace = workspace_bases_[static_cast<std::size_t>(rank.v)];
    const bool x_in_place = x(i) == input_buffer(rank.v);
    for (const pipeline::Region& region : pipeline::poisoned_heap(shape_.heap, x_in_place))
      spoil(backend_.peers().at<std::byte>(rank, region.offset), region.num_bytes);
    for (const pipeline::Region& region : pipeline::poisoned_workspace(shape_.workspace))
      spoil(workspace + region.offset, region.num_bytes);
    if (fill == nullptr) continue;
    const RankContext& c = fill->ranks[i];
    spoil(c.z.get(), saved.z);
    spoil(c.x.get(), saved.x);
    spoil(c.shared_z.get(), saved.shared_z);
  }
  spoil(scratch_.get(), local.count * workers_per_rank() * scratch_bytes_);
}

template <class T>
void CpuLayer::throw_if_failed(const std::vector<RankRun<T>>& runs) {
  std::vector<const RankPass<T>*> ranks;  // each rank's pass that failed, else its last
  for (const RankRun<T>& run : runs) {
    const auto failed = std::find_if(run.passes.begin(), run.passes.end(), [](const auto& pass) {
      return pass->watch.stopped || pass->verdict != Verdict::go;
    });
    ranks.push_back(failed != run.passes.end() ? failed->get() : run.passes.back().get());
  }
  std::vector<WaitRecord> waits;
  for (const auto& r : ranks) {
    if (r->watch.record) waits.push_back(*r->watch.record);
  }
  if (!waits.empty()) {
    backend_.stop();
    // The rank whose own clock ran out first tells the story; the others were told by it.
    const auto first =
        std::find_if(waits.begin(), waits.end(), [](const WaitRecord& w) { return w.told_by < 0; });
    const std::string who =
        backend_.of_processes()
            ? fmt::format("rank {}", waits.front().rank)  // others tell in their own processes
            : fmt::format("{} of {} ranks", waits.size(), ranks.size());
    throw Error(ErrorCode::timeout,
                fmt::format("{} gave up after {} s: {}; call World::reset() before the next pass",
                            who, backend_.options().timeout_s,
                            to_string(first != waits.end() ? *first : waits.front())),
                waits);
  }
  const Problem& p = shape_.problem;
  for (const auto& r : ranks) {
    if (r->bad_route.route < 0) continue;
    throw Error(ErrorCode::invalid_route,
                fmt::format("expert id of rank {} token {} slot {} is {}, must be between 0 and {} "
                            "or -1 for no route; "
                            "nearest legal value {}",
                            r->me.v, r->bad_route.route / p.top_k, r->bad_route.route % p.top_k,
                            r->bad_route.id, p.num_experts - 1,
                            r->bad_route.id < -1 ? -1 : p.num_experts - 1));
  }
  for (const auto& r : ranks) {
    if (r->verdict != Verdict::capacity_exceeded ||
        r->wanted_blocks <= shape_.extents.routed_blocks)
      continue;
    throw Error(ErrorCode::capacity_exceeded,
                fmt::format("rank {} would receive {} rows (padded to blocks of {}), must be at "
                            "most plan.capacity_rows {}; "
                            "nearest legal capacity_rows {}",
                            r->me.v, r->wanted_blocks * pipeline::kBlockRows, pipeline::kBlockRows,
                            shape_.plan.capacity_rows, r->wanted_blocks * pipeline::kBlockRows));
  }
  // Called off because of a rank of another process, which says why.
  for (const auto& r : ranks) {
    if (r->verdict == Verdict::invalid_route) {
      throw Error(ErrorCode::invalid_route,
                  fmt::format("the pass was called off: rank {} is told that another rank has an "
                              "expert id that is not between 0 and {} or -1",
                              r->me.v, p.num_experts - 1));
    }
    if (r->verdict == Verdict::capacity_exceeded) {
      throw Error(ErrorCode::capacity_exceeded,
                  fmt::format("the pass was called off: rank {} is told that another rank would "
                              "receive more rows than plan.capacity_rows {}",
                              r->me.v, shape_.plan.capacity_rows));
    }
  }
}

template <class T>
void CpuLayer::run(Direction direction, const std::function<void(RankPass<T>&)>& bind,
                   trace::Trace* trace) {
  const Problem& p = shape_.problem;
  const Plan& plan = shape_.plan;
  if (generation_ != backend_.generation()) clear_counters();
  const auto begin = Clock::now();
  const auto workers = static_cast<std::size_t>(workers_per_rank());
  const int num_passes = std::max(1, backend_.options().faults.back_to_back);
  const RankRange local = backend_.local_ranks();
  std::vector<RankRun<T>> runs(static_cast<std::size_t>(local.count));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RankId me{local.begin + static_cast<std::int64_t>(i)};
    runs[i].between = std::make_unique<std::barrier<>>(static_cast<std::ptrdiff_t>(workers));
    for (int k = 0; k < num_passes; ++k) {
      auto r = std::unique_ptr<RankPass<T>>(new RankPass<T>{
          shape_, direction, me, backend_.peers(), transport::PeerMemory{workspace_bases_},
          backend_.gemm(), backend_.options().faults, 0, 0, begin});
      r->watch.timeout_s = backend_.options().timeout_s;
      r->epoch =
          *r->template heap<std::uint64_t>(shape_.heap.epoch) + 1 + static_cast<std::uint64_t>(k);
      r->pass_count = *r->template ws<std::uint64_t>(shape_.workspace.pass_count) +
                      static_cast<std::uint64_t>(k);
      bind(*r);
      runs[i].passes.push_back(std::move(r));
    }
  }
  std::vector<std::vector<trace::Event>> events(runs.size() * workers);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      for (std::size_t k = 0; k < workers; ++k) {
        const auto comm_workers = static_cast<std::size_t>(shape_.comm_workers);
        const bool comm = k < comm_workers;
        const auto idx = static_cast<std::int32_t>(comm ? k : k - comm_workers);
        threads.emplace_back(run_passes<T>, std::cref(runs[i]), comm ? Role::comm : Role::compute,
                             idx,
                             scratch(static_cast<std::int64_t>(i), static_cast<std::int64_t>(k)),
                             trace != nullptr ? &events[i * workers + k] : nullptr);
      }
    }
  }
  if (trace != nullptr) {
    trace->num_ranks = static_cast<std::int32_t>(p.num_ranks);
    trace->comm_workers = shape_.comm_workers;
    trace->compute_workers = plan.compute_workers;
    trace->title =
        fmt::format("{}, {} ranks, {} {}", direction == Direction::forward ? "forward" : "backward",
                    p.num_ranks, name(plan.mode), name(plan.order));
    trace->events.clear();
    for (const auto& e : events) trace->events.insert(trace->events.end(), e.begin(), e.end());
  }
  throw_if_failed(runs);
}

template <class T>
struct ForwardBind {
  std::int64_t first_rank;  // of this process
  std::span<const ForwardInput> inputs;
  std::span<const ForwardOutput> outputs;
  CpuContext* fill;
  void operator()(RankPass<T>& r) const {
    const auto i = static_cast<std::size_t>(r.me.v - first_rank);
    const ForwardInput& in = inputs[i];
    r.num_tokens = in.x.shape.dim[0];
    r.x = in.x.as<T>();
    r.expert_ids = in.expert_ids;
    r.route_weights = in.route_weights.as<float>();
    r.weights = &in.weights;
    r.out = outputs[i].y.as<T>();
    r.fill = fill != nullptr ? &fill->ranks[i] : nullptr;
    // Of all ranks where push dispatch uses them: check_same_layer.
    if (fill != nullptr) r.all_fill = fill->ranks;
  }
};

template <class T>
struct BackwardBind {
  std::int64_t first_rank;
  std::span<const BackwardInput> inputs;
  std::span<const BackwardOutput> outputs;
  const CpuContext* saved;
  void operator()(RankPass<T>& r) const {
    const auto i = static_cast<std::size_t>(r.me.v - first_rank);
    r.num_tokens = saved->num_tokens[i];
    r.x = inputs[i].x.as<T>();
    r.dy = inputs[i].dy.as<T>();
    r.weights = &inputs[i].weights;
    r.grads = &outputs[i].grads;
    r.out = outputs[i].dx.as<T>();
    r.d_route_weights = outputs[i].d_route_weights.as<float>();
    r.saved = &saved->ranks[i];
  }
};

void CpuLayer::forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                       ContextState* context, trace::Trace* trace) {
  auto* fill = static_cast<CpuContext*>(context);
  if (backend_.options().faults.poison_workspace)
    poison(fill, [&](std::size_t r) { return inputs[r].x.data; });
  const std::int64_t first = backend_.local_ranks().begin;
  if (shape_.problem.dtype == DType::f32)
    run<float>(Direction::forward, ForwardBind<float>{first, inputs, outputs, fill}, trace);
  else
    run<bf16>(Direction::forward, ForwardBind<bf16>{first, inputs, outputs, fill}, trace);
}

void CpuLayer::backward(const ContextState& context, std::span<const BackwardInput> inputs,
                        std::span<const BackwardOutput> outputs, trace::Trace* trace) {
  const auto* saved = static_cast<const CpuContext*>(&context);
  if (backend_.options().faults.poison_workspace)
    poison(nullptr, [&](std::size_t r) { return inputs[r].x.data; });
  const std::int64_t first = backend_.local_ranks().begin;
  if (shape_.problem.dtype == DType::f32)
    run<float>(Direction::backward, BackwardBind<float>{first, inputs, outputs, saved}, trace);
  else
    run<bf16>(Direction::backward, BackwardBind<bf16>{first, inputs, outputs, saved}, trace);
}

}  // namespace
}  // namespace moxie::backend_cpu

namespace moxie {

std::unique_ptr<Backend> make_cpu_backend(const WorldOptions& options) {
  return std::make_unique<backend_cpu::CpuBackend>(options);
}
std::unique_ptr<Backend> make_cpu_process_backend(const WorldOptions& options,
                                                  const ProcessOptions& process) {
  return std::make_unique<backend_cpu::CpuBackend>(options, process);
}

}  // namespace moxie
