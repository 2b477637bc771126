// What `moxie doctor --record` measures of a GPU and of the link between two: rates, latencies,
// costs of launches, products by K. device_gpu.cu has what one GPU shows, device_link_gpu.cu what
// two do. No CUDA header in here, so that the command's files stay free of them. Every kernel ends
// by itself: it spins nowhere, or in waits that give up after seconds.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moxie::bench {

struct GpuProperties {
  int num_sms = 0;
  double clock_peak_mhz = 0, memory_gb = 0, memory_peak_gbps = 0, l2_mb = 0;
};
GpuProperties gpu_properties(int device);

struct MemoryRates {
  double copy_gbps = 0;     // bytes read and written by a streaming copy
  double l2_read_gbps = 0;  // 16 MB read again and again by all SMs
};
MemoryRates measure_memory(int device);

struct LaunchCosts {
  double launch_us = 0;      // one empty kernel in a stream of them
  double grid_sync_us = 0;   // all CTAs meet at a counter, one CTA per SM
  double local_load_us = 0;  // one ld.acquire.sys of own memory after another
};
LaunchCosts measure_launches(int device);

// One grouped product of the expert stage, 8 experts with the same rows each.
struct Product {
  std::string name;
  bool swiglu = false;  // two operands b, n columns of each
  std::int64_t n = 0, k = 0, rows = 0;
};
struct ProductTime {
  double ms = 0, clock_mhz = 0;
  double tflops = 0;
  double overhead_cycles = 0;  // per 128 x 256 tile, beside its products at full rate
};
inline constexpr int kTileRows = 128, kTileCols = 256;  // the one tile that is built
// In burst (120 ms idle, then a window of 24 ms); `flops_per_sm_clock` prices the products.
std::vector<ProductTime> measure_products(
    int device, const std::vector<Product>& products, double flops_per_sm_clock,
    const std::function<void(const std::string&, double)>& progress);
// SM clock of a product after half a second of nothing else.
double sustained_clock_mhz(int device, const Product& product);

// Between two GPUs that reach each other's memory.
struct LinkRates {
  std::vector<int> ctas;                          // 1, 2, 4, 8, 16
  std::vector<double> pull_gbps, push_gbps;       // [ctas] one direction, bulk copies of 16 KB
  double pull_both_gbps = 0, push_both_gbps = 0;  // each direction, both GPUs at once, 8 CTAs
  double copy_engine_gbps = 0;                    // cudaMemcpyPeerAsync
  double remote_load_us = 0;                      // one ld.acquire.sys of the peer's memory
  double signal_us = 0;                           // half a ping-pong of flags
};
// False: they do not, and `rates` is untouched.
bool measure_link(int device, int peer, LinkRates& rates);

// Each GPU from, or to, all others at once.
struct AllLinkRates {
  std::vector<double> pull_gbps, push_gbps;  // [GPU] in, out
};
// GPUs 0 to num_gpus - 1, 17 at most. False as above.
bool measure_all_links(int num_gpus, AllLinkRates& rates);

}  // namespace moxie::bench
