// Is the CPU twin's pipeline worth its GEMM library? One benchmark per storage type: a whole
// forward pass, and, in the same iteration, the same FLOPs as bare GEMM tiles of the same sizes
// through the same library on the same cores. Counters: layer_GFLOPs, gemm_GFLOPs (medians over
// iterations) and ratio = layer / gemm (median of the pairs). The pass's output is checked to be
// finite and non-zero before anything is timed.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "moxie/expert/host_gemm.h"
#include "moxie/moxie.h"
#include "moxie/pipeline/tiles.h"

namespace {

using moxie::Problem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// One rank's tensors, uniform random routing without duplicates.
template <class T>
struct RankData {
  std::vector<T> x, gate, up, down, y;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  RankData(const Problem& p, std::int64_t rank, std::mt19937_64& rng) {
    const std::int64_t e =
        moxie::num_local_experts(p.num_experts, p.num_ranks, moxie::RankId{rank});
    std::normal_distribution<float> normal;
    auto fill = [&](std::vector<T>& v, std::int64_t n, float scale) {
      v.resize(static_cast<std::size_t>(n));
      for (T& f : v) f = T(scale * normal(rng));
    };
    fill(x, p.max_tokens * p.hidden, 1.0f);
    fill(gate, e * p.hidden * p.intermediate, 0.03f);
    fill(up, e * p.hidden * p.intermediate, 0.03f);
    fill(down, e * p.hidden * p.intermediate, 0.03f);
    y.resize(x.size());
    std::vector<std::int32_t> all(static_cast<std::size_t>(p.num_experts));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
    for (std::int64_t t = 0; t < p.max_tokens; ++t) {
      std::shuffle(all.begin(), all.end(), rng);
      for (std::int64_t k = 0; k < p.top_k; ++k) {
        ids.push_back(all[static_cast<std::size_t>(k)]);
        weights.push_back(1.0f / static_cast<float>(p.top_k));
      }
    }
  }
};

// The FLOPs of `rows` rows as bare tiles, on `threads` threads. Operands cycle through buffers
// larger than L2.
class TileGemms {
 public:
  TileGemms(const Problem& p, std::int64_t rows)
      : p_(p),
        engine_(moxie::HostGemm::automatic),
        blocks_(rows / moxie::pipeline::kBlockRows),
        a_(kBuffers * 128 * 1024, 0.5f),
        b_(kBuffers * 256 * 1024, 0.25f) {}

  void run(std::int64_t threads) const {
    std::atomic<std::int64_t> next{0};
    std::vector<std::jthread> pool;
    for (std::int64_t t = 0; t < threads; ++t) {
      pool.emplace_back([&] {
        std::vector<float> c(128 * 256);
        while (true) {
          const std::int64_t block = next.fetch_add(1);
          if (block >= blocks_) return;
          for (std::int64_t n = 0; n < 2 * p_.intermediate; n += moxie::pipeline::kFc1TileCols) {
            tile(block + n, moxie::pipeline::kFc1TileCols, p_.hidden, c);
          }
          for (std::int64_t n = 0; n < p_.hidden; n += moxie::pipeline::kFc2TileCols) {
            tile(block + n, moxie::pipeline::kFc2TileCols, p_.intermediate, c);
          }
        }
      });
    }
  }
  double flops() const {
    return 6.0 * static_cast<double>(blocks_ * 128 * p_.hidden * p_.intermediate);
  }

 private:
  static constexpr std::int64_t kBuffers = 8;
  void tile(std::int64_t i, std::int64_t n, std::int64_t k, std::vector<float>& c) const {
    engine_(moxie::expert::Trans::no, moxie::expert::Trans::yes, 128, n, k,
            a_.data() + i % kBuffers * 128 * 1024, k, b_.data() + i % kBuffers * 256 * 1024, k,
            false, c.data(), n);
  }
  Problem p_;
  moxie::expert::HostGemmEngine engine_;
  std::int64_t blocks_;
  std::vector<float> a_, b_;
};

template <class T>
void BM_LayerForward(benchmark::State& state) {
  const Problem p{.num_ranks = 4,
                  .max_tokens = 512,
                  .hidden = 1024,
                  .intermediate = 1024,
                  .num_experts = 32,
                  .top_k = 4,
                  .dtype = moxie::dtype_of<T>()};
  const std::int64_t rows = p.num_ranks * p.max_tokens * p.top_k;
  moxie::World world = moxie::World::cpu({.num_ranks = p.num_ranks});
  moxie::Layer layer(world, p, {});
  std::mt19937_64 rng(std::random_device{}());
  std::vector<RankData<T>> data;
  for (std::int64_t r = 0; r < p.num_ranks; ++r) data.emplace_back(p, r, rng);
  std::vector<moxie::ForwardInput> in;
  std::vector<moxie::ForwardOutput> out;
  for (auto& d : data) {
    const std::int64_t e = static_cast<std::int64_t>(d.gate.size()) / (p.hidden * p.intermediate);
    moxie::ForwardInput i;
    i.x = {d.x.data(), {p.max_tokens, p.hidden}};
    i.expert_ids = {d.ids.data(), {p.max_tokens, p.top_k}};
    i.route_weights = {d.weights.data(), {p.max_tokens, p.top_k}};
    i.weights.gate = {d.gate.data(), {e, p.intermediate, p.hidden}};
    i.weights.up = {d.up.data(), {e, p.intermediate, p.hidden}};
    i.weights.down = {d.down.data(), {e, p.hidden, p.intermediate}};
    in.push_back(i);
    out.push_back({{d.y.data(), {p.max_tokens, p.hidden}}});
  }
  layer.infer(in, out);
  double norm = 0;
  for (const auto& d : data) {
    for (const T v : d.y) norm += std::abs(static_cast<double>(static_cast<float>(v)));
  }
  if (!std::isfinite(norm) || norm == 0)
    return state.SkipWithError("the pass's output is not finite, or zero");

  const TileGemms gemms(p, rows);
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const double layer_flops = 6.0 * static_cast<double>(rows * p.hidden * p.intermediate);
  std::vector<double> layer_rate, gemm_rate, ratio;
  for (auto _ : state) {
    auto begin = Clock::now();
    gemms.run(cores);
    gemm_rate.push_back(gemms.flops() / seconds_since(begin) * 1e-9);
    begin = Clock::now();
    layer.infer(in, out);
    const double s = seconds_since(begin);
    state.SetIterationTime(s);
    layer_rate.push_back(layer_flops / s * 1e-9);
    ratio.push_back(layer_rate.back() / gemm_rate.back());
  }
  state.counters["layer_GFLOPs"] = median(layer_rate);
  state.counters["gemm_GFLOPs"] = median(gemm_rate);
  state.counters["ratio"] = median(ratio);
}
BENCHMARK_TEMPLATE(BM_LayerForward, float)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(15);
BENCHMARK_TEMPLATE(BM_LayerForward, moxie::bf16)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(15);

}  // namespace

BENCHMARK_MAIN();
