// A layer of the CPU twin: its memory, and a pass from the caller's tensors to threads and errors.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "moxie/backend_cpu/cpu_backend.h"

namespace moxie::backend_cpu {
namespace {

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

}  // namespace

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
    if (r->verdict == Verdict::refused) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("the pass was called off: {}", r->objection));
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
      r->refused_epoch = backend_.refused_epoch();
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

namespace {

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

}  // namespace

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

// The pass's words and no more of it, so that the peers, when they come, leave it as they leave one
// with an invalid route. This rank has the time for that, but does not wait for them.
void CpuLayer::refuse_pass(const std::string& why) {
  if (!backend_.of_processes() || backend_.num_ranks() == 1) return;
  const auto bind = [&](auto& rank) { rank.refusal = &why; };
  try {
    if (shape_.problem.dtype == DType::f32)
      run<float>(Direction::forward, bind, nullptr);
    else
      run<bf16>(Direction::forward, bind, nullptr);
  } catch (const Error&) {  // the caller throws what is wrong here
  }
  const RankId me{backend_.local_ranks().begin};
  backend_.remember_refused(*backend_.peers().at<std::uint64_t>(me, shape_.heap.epoch.offset));
}

}  // namespace moxie::backend_cpu
