// Timing and the determinism check. A pass that was not checked is not timed first by accident: the
// warm-up pass already produces the results that run.cpp judges.
#include "cli/passes.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

namespace moxie::cli {
namespace {

template <class Work>
double milliseconds(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

struct Views {
  std::vector<ForwardInput> forward_in;
  std::vector<ForwardOutput> forward_out;
  std::vector<BackwardInput> backward_in;
  std::vector<BackwardOutput> backward_out;
};

Views views_of(const Setup& setup, std::span<const RankTensors> inputs,
               std::span<RankResults> results, const DeviceTensors* device) {
  Views views{forward_inputs(inputs, device), forward_outputs(results, device), {}, {}};
  if (setup.backward) {
    views.backward_in = backward_inputs(inputs, device);
    views.backward_out = backward_outputs(results, device);
  }
  return views;
}

// The smallest rings the lag order allows: every slot is used many times.
Plan small_rings(const Problem& problem, const Plan& plan, std::int32_t num_workers) {
  Plan other = plan;
  other.mode = ExecMode::fused;
  other.order = TaskOrder::lag;
  other.num_slabs = 1;
  other.band_blocks = 1;
  other.lag_bands = 1;
  other.minibatch_blocks = 2;
  other.chunk_blocks = 1;
  other.lag_chunks = 1;
  other.comm_workers = num_workers;
  other.compute_workers = std::max(num_workers, 1);
  other.save = SavePolicy::none;
  other.saved_rows = -1;
  other.x_ring_blocks = other.hidden_ring_blocks = other.backward_ring_blocks = 0;
  Plan largest = pipeline::resolve(problem, other);
  other.x_ring_blocks = std::min(largest.x_ring_blocks, pipeline::min_x_ring_blocks(1, 2));
  other.hidden_ring_blocks =
      pipeline::min_hidden_ring_blocks(TaskOrder::lag, 1, 1, largest.hidden_ring_blocks);
  other.backward_ring_blocks =
      std::min(largest.backward_ring_blocks, pipeline::min_backward_ring_blocks(1, 1, 2));
  return other;
}

Plan split_mode(const Plan& plan) {
  Plan other = plan;
  other.mode = ExecMode::split;
  other.x_ring_blocks = other.hidden_ring_blocks = other.backward_ring_blocks = 0;
  return other;
}

// Where two results differ first, or "".
std::string first_difference(std::span<const RankResults> a, std::span<const RankResults> b) {
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    for (const auto& [name, member, backward] : result_names()) {
      const HostTensor &left = a[rank].*member, &right = b[rank].*member;
      if (left.bytes == right.bytes) continue;
      const auto at =
          std::mismatch(left.bytes.begin(), left.bytes.end(), right.bytes.begin()).first -
          left.bytes.begin();
      return fmt::format("{} of rank {} element {}", name, rank, at / size_bytes(left.dtype));
    }
  }
  return "";
}

}  // namespace

double Samples::percentile(double p) const {
  std::vector<double> sorted = ms;
  std::sort(sorted.begin(), sorted.end());
  const double rank = std::ceil(p / 100 * static_cast<double>(sorted.size()));
  return sorted[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
}

PassTimes run_passes(World& world, Layer& layer, const Setup& setup,
                     std::span<const RankTensors> inputs, std::span<RankResults> results,
                     const DeviceTensors* device, Progress& progress) {
  PassTimes times;
  const Views views = views_of(setup, inputs, results, device);
  const std::int64_t num_passes = setup.repeat + 2;
  Context context = layer.make_context();
  for (std::int64_t pass = 0; pass < num_passes; ++pass) {
    progress.show(fmt::format("pass {} of {}", pass + 1, num_passes),
                  static_cast<double>(pass) / static_cast<double>(num_passes));
    const bool traced = pass == num_passes - 1, timed = pass > 0 && !traced;
    trace::Trace forward_trace, backward_trace;
    trace::Trace* to = traced ? &forward_trace : nullptr;
    const double forward_ms = milliseconds([&] {
      setup.backward ? layer.forward(views.forward_in, views.forward_out, context, to)
                     : layer.infer(views.forward_in, views.forward_out, to);
      world.synchronize();
    });
    if (timed) times.forward.ms.push_back(forward_ms);
    if (traced) times.traces.push_back(std::move(forward_trace));
    if (!setup.backward) continue;
    to = traced ? &backward_trace : nullptr;
    const double backward_ms = milliseconds([&] {
      layer.backward(context, views.backward_in, views.backward_out, to);
      world.synchronize();
    });
    if (timed) times.backward.ms.push_back(backward_ms);
    if (traced) times.traces.push_back(std::move(backward_trace));
  }
  if (device != nullptr) device->download(results);
  return times;
}

SameBits check_same_bits(World& world, const RunOptions& options, const Setup& setup,
                         std::span<const RankTensors> inputs, std::span<const RankResults> results,
                         Progress& progress) {
  SameBits report;
  struct Variant {
    Plan plan;
    const char* words;
    std::uint64_t shuffle_seed;
  };
  const bool on_cpu = setup.backend == BackendKind::cpu;
  std::vector<Variant> variants;
  if (on_cpu) {
    variants.push_back({small_rings(setup.problem, options.plan, 2),
                        "lag order with the smallest rings, 2+2 workers per rank, shuffled timing",
                        options.seed + 1});
  } else if (options.cuda.cluster_size < 2) {  // clusters know no lag order
    variants.push_back({small_rings(setup.problem, options.plan, 0),
                        "lag order with the smallest rings, shuffled timing", options.seed + 1});
  }
  variants.push_back({split_mode(options.plan), "split mode", 0});
  for (std::size_t i = 0; i < variants.size() && report.ok; ++i) {
    progress.show(std::string("same bits: ") + variants[i].words,
                  static_cast<double>(i) / static_cast<double>(variants.size()));
    world.set_faults({.shuffle_seed = variants[i].shuffle_seed});
    Layer layer(world, setup.problem, variants[i].plan);
    std::vector<RankResults> others;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      others.push_back(allocate_results(setup.problem, setup.types, static_cast<std::int64_t>(rank),
                                        setup.tokens[rank], setup.backward));
    }
    std::unique_ptr<DeviceTensors> device;
    if (!on_cpu) {
      device = std::make_unique<DeviceTensors>(rank_devices(options.cuda, setup.problem.num_ranks),
                                               inputs, others);
    }
    const Views views = views_of(setup, inputs, others, device.get());
    Context context = layer.forward(views.forward_in, views.forward_out);
    if (setup.backward) layer.backward(context, views.backward_in, views.backward_out);
    world.synchronize();
    if (device) device->download(others);
    report.plans.push_back(variants[i].words);
    report.difference = first_difference(results, others);
    report.ok = report.difference.empty();
  }
  world.set_faults({.shuffle_seed = options.shuffle});
  return report;
}

}  // namespace moxie::cli
