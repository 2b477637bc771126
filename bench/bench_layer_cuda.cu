// C entry points of the whole layer for bench/bench_layer_cuda.py (loaded through ctypes).
#include <cstdio>
#include <memory>
#include <string>

#include "moxie/moxie.h"

namespace {

struct BenchLayer {
  moxie::World world;
  moxie::Layer layer;
  std::string plan;
};

// 0, or 1 with a sentence in message[512].
template <class Call>
int guarded(char* message, Call&& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, 512, "%s", error.what());
    return 1;
  }
}

}  // namespace

extern "C" {

struct MoxieBenchLayer {
  int num_ranks, reserve_sms, cluster_size, lag_order, num_slabs, band_blocks, lag_bands;
  long long max_tokens, hidden, intermediate, num_experts, top_k, x_ring_blocks, hidden_ring_blocks;
  int devices[64];
};
struct MoxieBenchRank {
  long long num_tokens, num_experts;
  const void *x, *expert_ids, *route_weights, *gate, *up, *down;
  void* y;
};

int moxie_bench_layer_create(const MoxieBenchLayer* b, void** handle, char* message) {
  return guarded(message, [&] {
    moxie::Problem p;
    p.num_ranks = b->num_ranks;
    p.max_tokens = b->max_tokens;
    p.hidden = b->hidden;
    p.intermediate = b->intermediate;
    p.num_experts = b->num_experts;
    p.top_k = b->top_k;
    moxie::Plan plan;
    plan.save = moxie::SavePolicy::none;
    plan.order = b->lag_order ? moxie::TaskOrder::lag : moxie::TaskOrder::slabs;
    if (b->num_slabs > 0) plan.num_slabs = b->num_slabs;
    if (b->band_blocks > 0) plan.band_blocks = b->band_blocks;
    if (b->lag_bands > 0) plan.lag_bands = b->lag_bands;
    plan.x_ring_blocks = b->x_ring_blocks;
    plan.hidden_ring_blocks = b->hidden_ring_blocks;
    moxie::WorldOptions options;
    options.num_ranks = b->num_ranks;
    options.timeout_s = 5;
    moxie::CudaOptions cuda;
    cuda.devices.assign(b->devices, b->devices + b->num_ranks);
    cuda.reserve_sms = b->reserve_sms;
    cuda.cluster_size = b->cluster_size;
    moxie::World world = moxie::World::cuda(options, cuda);
    moxie::Layer layer(world, p, plan);
    std::string text = to_string(layer.plan());
    *handle = new BenchLayer{std::move(world), std::move(layer), std::move(text)};
  });
}
void moxie_bench_layer_destroy(void* handle) { delete static_cast<BenchLayer*>(handle); }
const char* moxie_bench_layer_plan(void* handle) {
  return static_cast<BenchLayer*>(handle)->plan.c_str();
}

// Enqueues one pass on `stream`, a cudaStream_t of the first rank's GPU.
int moxie_bench_layer_forward(void* handle, const MoxieBenchRank* ranks, void* stream,
                              char* message) {
  return guarded(message, [&] {
    BenchLayer& b = *static_cast<BenchLayer*>(handle);
    const moxie::Problem& p = b.layer.problem();
    std::vector<moxie::ForwardInput> inputs;
    std::vector<moxie::ForwardOutput> outputs;
    for (std::int64_t r = 0; r < p.num_ranks; ++r) {
      const MoxieBenchRank& from = ranks[r];
      const std::int64_t t = from.num_tokens, e = from.num_experts, h = p.hidden,
                         i = p.intermediate;
      moxie::ForwardInput in;
      in.x = {from.x, moxie::DType::bf16, {t, h}};
      in.expert_ids = {from.expert_ids, moxie::DType::i64, {t, p.top_k}};
      in.route_weights = {from.route_weights, moxie::DType::f32, {t, p.top_k}};
      in.weights.gate = {from.gate, moxie::DType::bf16, {e, i, h}};
      in.weights.up = {from.up, moxie::DType::bf16, {e, i, h}};
      in.weights.down = {from.down, moxie::DType::bf16, {e, h, i}};
      inputs.push_back(in);
      outputs.push_back({moxie::TensorView(from.y, moxie::DType::bf16, {t, h})});
    }
    b.world.set_stream(stream);
    b.layer.infer(inputs, outputs);
  });
}

// Waits, and says what went wrong in the last pass.
int moxie_bench_layer_synchronize(void* handle, char* message) {
  return guarded(message, [&] { static_cast<BenchLayer*>(handle)->world.synchronize(); });
}

}  // extern "C"
