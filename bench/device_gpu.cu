// One GPU: memory, launches, products. Contract: device_gpu.h.
#include "bench/device_gpu.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <thread>

#include "bench/layer_gpu.h"
#include "moxie/backend_cuda/cuda_memory.h"
#include "moxie/device/signal.cuh"
#include "moxie/expert/grouped_gemm.h"

namespace moxie::bench {
namespace {

using backend_cuda::check_cuda;
using backend_cuda::DeviceBytes;
using backend_cuda::DeviceGuard;

constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;  // twenty times the L2 cache
constexpr std::int64_t kL2Bytes = std::int64_t{16} << 20;   // a third of it
constexpr int kL2Rounds = 64, kSyncs = 2000, kLaunches = 2000, kLoads = 2000;
constexpr std::int64_t kExperts = 8;
constexpr double kIdleMs = 120, kWindowMs = 24, kSettleMs = 500;

// 16 bytes per thread and step, four steps in flight.
__global__ void copy_kernel(uint4* to /* [count] */, const uint4* from /* [count] */,
                            std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride],
                d = from[i + 3 * stride];
    to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
  }
  for (; i < count; i += stride) to[i] = from[i];
}

// Every CTA reads all of it, from its own place on; ld.global.cg goes past the L1 cache.
__global__ void read_l2_kernel(const uint4* from /* [count] */, std::int64_t count,
                               unsigned* never /* [1] */) {
  unsigned sum = 0;
  const std::int64_t first = count / gridDim.x * blockIdx.x;
  for (std::int64_t i = threadIdx.x; i + 3 * blockDim.x < count; i += 4 * blockDim.x) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::int64_t at = first + i + step * blockDim.x;
      const uint4 v = __ldcg(from + (at < count ? at : at - count));
      sum += v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  if (sum == 0x9e3779b9u) *never = sum;  // keeps the loads
}

__global__ void empty_kernel() {}

// All CTAs meet again and again: one release into a counter, then acquiring loads of it.
__global__ void meet_kernel(std::uint32_t* counter /* [1] */, int rounds,
                            device::WaitLimits limits) {
  for (int round = 1; round <= rounds; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) {
      device::add_release_gpu(counter, 1);
      const std::uint32_t wanted = gridDim.x * static_cast<std::uint32_t>(round);
      std::uint32_t seen = 0;
      // A CTA that gave up adds no more: the others' waits end by their own limit or the abort
      // flag.
      if (!device::bounded_wait(
              [&] { return (seen = device::load_acquire_gpu(counter)) >= wanted; },
              [&] { return std::uint64_t{seen}; }, limits,
              {0, static_cast<std::uint64_t>(round), wanted}))
        rounds = 0;
    }
    // All threads leave together.
    rounds = __shfl_sync(0xffffffffu, rounds, 0);
  }
}

// Nanoseconds of `count` acquiring loads, one after another.
__global__ void load_kernel(const std::uint64_t* words /* [32] */, int count,
                            unsigned long long* out /* [2]: ns, sum */) {
  std::uint64_t sum = 0;
  const std::uint64_t begin = cuda::ptx::get_sreg_globaltimer();
  for (int i = 0; i < count; ++i) sum += device::load_acquire_sys(words + i % 32);
  out[0] = cuda::ptx::get_sreg_globaltimer() - begin;
  out[1] = sum;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "asking for a GPU attribute");
  return value;
}

void sleep_ms(double ms) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

// Operands large enough for every product, random once: their values set the power a GPU draws.
class ProductBench {
 public:
  ProductBench(int device, const std::vector<Product>& products)
      : device_(device), timer_(device), counts_(device, kExperts * 4, "row counts") {
    const DeviceGuard guard(device);
    workspace_ = std::make_unique<expert::GroupedGemmWorkspace>();
    std::int64_t a = 0, b = 0, out = 0;
    for (const Product& p : products) {
      a = std::max(a, p.rows * p.k);
      b = std::max(b, kExperts * p.n * p.k);
      out = std::max(out, p.rows * p.n);
    }
    for (const std::int64_t count : {a, b, b, out}) {
      operands_.emplace_back(device, static_cast<std::size_t>(count) * 2);
      fill_normal(device, operands_.back().get(), count, 0.05f,
                  static_cast<std::uint64_t>(operands_.size()));
    }
  }

  // A window after `load_ms` of the same product.
  GpuTiming measure(const Product& p, double load_ms) {
    const DeviceGuard guard(device_);
    const std::array<std::int32_t, kExperts> rows = [&] {
      std::array<std::int32_t, kExperts> each{};
      each.fill(static_cast<std::int32_t>(p.rows / kExperts));
      return each;
    }();
    copy(counts_.get(), rows.data(), sizeof rows);
    expert::GroupedGemmArguments x;
    x.product = p.swiglu ? expert::GroupedProduct::swiglu : expert::GroupedProduct::plain;
    x.a = static_cast<const bf16*>(operands_[0].get());
    x.b = static_cast<const bf16*>(operands_[1].get());
    x.b_up = p.swiglu ? static_cast<const bf16*>(operands_[2].get()) : nullptr;
    x.out = static_cast<bf16*>(operands_[3].get());
    x.expert_rows = counts_.as<std::int32_t>();
    x.num_experts = static_cast<std::int32_t>(kExperts);
    x.rows_capacity = p.rows;
    x.n = static_cast<std::int32_t>(p.n);
    x.k = static_cast<std::int32_t>(p.k);
    const expert::GroupedGemmOptions options{.limit_ns = 5'000'000'000};
    const auto enqueue = [&] {
      expert::launch_grouped_gemm(x, options, *workspace_,
                                  static_cast<cudaStream_t>(timer_.stream()));
    };
    enqueue();
    const double estimate_ms = timer_.window(enqueue, 2).ms;
    const auto launches = [&](double ms) {
      return std::max<std::int64_t>(2, static_cast<std::int64_t>(ms / std::max(estimate_ms, 1e-3)));
    };
    sleep_ms(kIdleMs);
    if (load_ms > 0) timer_.window(enqueue, launches(load_ms));
    enqueue();
    const GpuTiming timing = timer_.window(enqueue, launches(kWindowMs));
    if (workspace_->record()->written != 0)
      throw Error(ErrorCode::timeout, "a product of " + p.name + " waited for 5 s and gave up");
    return timing;
  }

 private:
  int device_;
  GpuTimer timer_;
  DeviceBytes counts_;
  std::vector<GpuMemory> operands_;  // a, b, b_up, out
  std::unique_ptr<expert::GroupedGemmWorkspace> workspace_;
};

}  // namespace

GpuProperties gpu_properties(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "reading GPU properties");
  GpuProperties p;
  p.num_sms = properties.multiProcessorCount;
  p.clock_peak_mhz = attribute(cudaDevAttrClockRate, device) * 1e-3;
  p.memory_gb = static_cast<double>(properties.totalGlobalMem) * 1e-9;
  // Two transfers per clock on every pin.
  p.memory_peak_gbps = 2e-6 * attribute(cudaDevAttrMemoryClockRate, device) *
                       attribute(cudaDevAttrGlobalMemoryBusWidth, device) / 8;
  p.l2_mb = static_cast<double>(properties.l2CacheSize) / (1 << 20);
  return p;
}

MemoryRates measure_memory(int device) {
  const DeviceGuard guard(device);
  GpuTimer timer(device);
  const auto stream = static_cast<cudaStream_t>(timer.stream());
  const GpuMemory from(device, kCopyBytes), to(device, kCopyBytes), never(device, 4);
  check_cuda(cudaMemset(from.get(), 1, kCopyBytes), "filling a copy's source");
  const int ctas = 8 * attribute(cudaDevAttrMultiProcessorCount, device);
  const auto copy_once = [&] {
    copy_kernel<<<ctas, 512, 0, stream>>>(static_cast<uint4*>(to.get()),
                                          static_cast<const uint4*>(from.get()), kCopyBytes / 16);
  };
  const auto read_once = [&] {
    read_l2_kernel<<<ctas / 4, 512, 0, stream>>>(
        static_cast<const uint4*>(from.get()), kL2Bytes / 16, static_cast<unsigned*>(never.get()));
  };
  for (int i = 0; i < 3; ++i) copy_once(), read_once();
  MemoryRates rates;
  rates.copy_gbps = 2e-6 * static_cast<double>(kCopyBytes) / timer.window(copy_once, 20).ms;
  rates.l2_read_gbps =
      1e-6 * static_cast<double>(kL2Bytes) * (ctas / 4) / timer.window(read_once, kL2Rounds).ms;
  return rates;
}

LaunchCosts measure_launches(int device) {
  const DeviceGuard guard(device);
  GpuTimer timer(device);
  const auto stream = static_cast<cudaStream_t>(timer.stream());
  LaunchCosts costs;
  const auto launch = [&] { empty_kernel<<<1, 32, 0, stream>>>(); };
  for (int i = 0; i < 100; ++i) launch();
  costs.launch_us = 1e3 * timer.window(launch, kLaunches).ms;

  const DeviceBytes words(device, 4096, "counters");  // [0] counter, [1] abort flag, [2] claim
  const int ctas = attribute(cudaDevAttrMultiProcessorCount, device);
  std::uint32_t* counter = words.as<std::uint32_t>();
  device::WaitLimits limits{counter + 1, nullptr, 2'000'000'000, 0, 0, counter + 2};
  int rounds = kSyncs;
  const auto meet = [&] {
    check_cuda(cudaMemsetAsync(words.get(), 0, 4096, stream), "clearing counters");
    void* arguments[] = {&counter, &rounds, &limits};
    // Cooperative: all CTAs are resident, or the launch is refused.
    check_cuda(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(meet_kernel),
                                           dim3(static_cast<unsigned>(ctas)), dim3(32), arguments,
                                           0, stream),
               "launching a kernel whose CTAs meet");
  };
  meet();
  costs.grid_sync_us = 1e3 * timer.window(meet, 3).ms / kSyncs;
  std::uint32_t gave_up = 0;
  copy(&gave_up, limits.abort_flag, 4);
  if (gave_up != 0) throw Error(ErrorCode::timeout, "CTAs that meet waited for 2 s and gave up");

  check_cuda(cudaMemset(words.get(), 0, 4096), "clearing words");
  const DeviceBytes out(device, 16, "a time");
  std::array<unsigned long long, 2> times{};
  for (int i = 0; i < 2; ++i) {
    load_kernel<<<1, 1, 0, stream>>>(words.as<std::uint64_t>(), kLoads,
                                     out.as<unsigned long long>());
    timer.synchronize();
  }
  copy(times.data(), out.get(), sizeof times);
  costs.local_load_us = 1e-3 * static_cast<double>(times[0]) / kLoads;
  return costs;
}

std::vector<ProductTime> measure_products(
    int device, const std::vector<Product>& products, double flops_per_sm_clock,
    const std::function<void(const std::string&, double)>& progress) {
  ProductBench bench(device, products);
  const int num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
  std::vector<ProductTime> times;
  for (const Product& p : products) {
    progress(p.name, static_cast<double>(times.size()) / static_cast<double>(products.size()));
    const GpuTiming timing = bench.measure(p, 0);
    const std::int64_t cols = p.swiglu ? kTileCols / 2 : kTileCols;
    const auto tiles = static_cast<double>(p.rows / kTileRows * ((p.n + cols - 1) / cols));
    const double flops = 2.0 * static_cast<double>(p.rows) * static_cast<double>(p.k) *
                         static_cast<double>(p.n) * (p.swiglu ? 2 : 1);
    ProductTime time{timing.ms, timing.sm_clock_mhz, 1e-9 * flops / timing.ms, 0};
    const double cycles_per_tile = 1e3 * timing.ms * timing.sm_clock_mhz * num_sms / tiles;
    time.overhead_cycles = cycles_per_tile - 2.0 * kTileRows * kTileCols *
                                                 static_cast<double>(p.k) / flops_per_sm_clock;
    times.push_back(time);
  }
  return times;
}

double sustained_clock_mhz(int device, const Product& product) {
  ProductBench bench(device, {product});
  return bench.measure(product, kSettleMs).sm_clock_mhz;
}

}  // namespace moxie::bench
