// Two GPUs: copies by a few CTAs, latencies of loads and flags. Contract: device_gpu.h.
//
// The copy is the one of the design's communication CTAs: one thread keeps bulk copies of 16 KB in
// flight, from global memory into a ring of shared memory and out of it again; source or
// destination lies on the peer.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "bench/device_gpu.h"
#include "moxie/backend_cuda/cuda_memory.h"
#include "moxie/device/signal.cuh"

namespace moxie::bench {
namespace {

using backend_cuda::check_cuda;
using backend_cuda::DeviceBytes;
using backend_cuda::DeviceGuard;

constexpr int kStages = 12;              // 12 x 16 KB: what fits beside the barriers
constexpr std::uint32_t kPiece = 16384;  // bytes
constexpr int kMostCtas = 16;
constexpr std::int64_t kBytesPerCta = std::int64_t{128} << 20;  // 2.7 ms at 50 GB/s
constexpr int kLoads = 2000, kPings = 2000;
constexpr std::uint64_t kLimit_ns = 2'000'000'000;

struct CopyShared {
  alignas(128) std::byte ring[kStages][kPiece];
  std::uint64_t arrived[kStages];  // mbarriers
};

// CTA c copies [c * bytes, (c + 1) * bytes); `bytes` is a multiple of kPiece.
__global__ void bulk_copy_kernel(std::byte* to, const std::byte* from, std::int64_t bytes,
                                 device::WaitLimits limits) {
  namespace ptx = cuda::ptx;
  extern __shared__ __align__(128) unsigned char raw[];
  CopyShared& shared = *reinterpret_cast<CopyShared*>(raw);
  if (threadIdx.x != 0) return;
  to += std::int64_t{blockIdx.x} * bytes;
  from += std::int64_t{blockIdx.x} * bytes;
  const int pieces = static_cast<int>(bytes / kPiece);
  for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(&shared.arrived[s], 1u);
  // The barriers before the copies that will complete them.
  ptx::fence_proxy_async(ptx::space_shared);
  const std::uint32_t piece_bytes = kPiece;  // the instructions take it by reference
  const auto load = [&](int piece) {
    std::uint64_t* barrier = &shared.arrived[piece % kStages];
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier,
                                   piece_bytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, shared.ring[piece % kStages],
                       from + std::int64_t{piece} * kPiece, piece_bytes, barrier);
  };
  for (int piece = 0; piece < min(kStages, pieces); ++piece) load(piece);
  for (int piece = 0; piece < pieces; ++piece) {
    // Source: the bulk load of this piece, which completes the barrier's phase.
    if (!device::mbarrier_wait(&shared.arrived[piece % kStages],
                               static_cast<std::uint32_t>(piece / kStages & 1), limits,
                               {1, static_cast<std::uint64_t>(piece), 1}))
      break;
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, to + std::int64_t{piece} * kPiece,
                       shared.ring[piece % kStages], piece_bytes);
    ptx::cp_async_bulk_commit_group();
    // The store before this one has read its stage: that stage may be filled again.
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
    if (piece >= 1 && piece - 1 + kStages < pieces) load(piece - 1 + kStages);
  }
  ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}

// Nanoseconds of `count` acquiring loads of the peer's memory, one after another.
__global__ void remote_load_kernel(const std::uint64_t* words /* [32], peer */, int count,
                                   unsigned long long* out /* [2]: ns, sum */) {
  std::uint64_t sum = 0;
  const std::uint64_t begin = cuda::ptx::get_sreg_globaltimer();
  for (int i = 0; i < count; ++i) sum += device::load_acquire_sys(words + i % 32);
  out[0] = cuda::ptx::get_sreg_globaltimer() - begin;
  out[1] = sum;
}

// Two GPUs hand a number to and fro: `mine` lies here and the peer writes it, `theirs` likewise.
// The first one begins. ns of all rounds but the first ten in out[0].
__global__ void ping_pong_kernel(const std::uint64_t* mine, std::uint64_t* theirs, bool first,
                                 int rounds, unsigned long long* out /* [1] */,
                                 device::WaitLimits limits) {
  std::uint64_t begin = 0;
  for (int round = 1; round <= rounds; ++round) {
    const auto value = static_cast<std::uint64_t>(round);
    if (round == 11) begin = cuda::ptx::get_sreg_globaltimer();
    if (first) device::store_release_sys(theirs, value);
    std::uint64_t seen = 0;
    if (!device::bounded_wait([&] { return (seen = device::load_acquire_sys(mine)) >= value; },
                              [&] { return seen; }, limits, {2, value, value}))
      return;
    if (!first) device::store_release_sys(theirs, value);
  }
  out[0] = cuda::ptx::get_sreg_globaltimer() - begin;
}

// Streams, events and words of one of the two.
struct Side {
  explicit Side(int device_in)
      : device(device_in),
        words(device, 8192, "flags"),
        memory(device, kMostCtas * kBytesPerCta, "a link's buffer") {
    const DeviceGuard guard(device);
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event), "creating an event");
    check_cuda(cudaFuncSetAttribute(bulk_copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(CopyShared))),
               "shared memory of a copy");
    check_cuda(cudaMemset(memory.get(), 1, kMostCtas * kBytesPerCta), "filling a buffer");
    clear();
  }
  ~Side() {
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    cudaStreamDestroy(stream);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void clear() const {
    check_cuda(cudaMemset(words.get(), 0, 8192), "clearing flags");
    check_cuda(cudaDeviceSynchronize(), "clearing flags");
  }
  std::uint64_t* word(int i) const { return words.as<std::uint64_t>() + 16 * i; }
  device::WaitLimits limits() const {
    auto* flags = reinterpret_cast<std::uint32_t*>(word(4));
    return {flags, nullptr, kLimit_ns, 0, 0, flags + 32};
  }
  void launch_copy(std::byte* to, const std::byte* from, int ctas) const {
    const DeviceGuard guard(device);
    check_cuda(cudaEventRecord(events[0], stream), "recording an event");
    bulk_copy_kernel<<<ctas, 32, sizeof(CopyShared), stream>>>(to, from, kBytesPerCta, limits());
    check_cuda(cudaGetLastError(), "launching a copy");
    check_cuda(cudaEventRecord(events[1], stream), "recording an event");
  }
  double elapsed_ms() const {
    const DeviceGuard guard(device);
    check_cuda(cudaStreamSynchronize(stream), "waiting for a copy");
    std::uint32_t gave_up = 0;
    check_cuda(cudaMemcpy(&gave_up, limits().abort_flag, 4, cudaMemcpyDefault), "reading a flag");
    if (gave_up != 0)
      throw Error(ErrorCode::timeout, "a measuring kernel on GPU " + std::to_string(device) +
                                          " waited for more than 2 s and gave up");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, events[0], events[1]), "reading a time");
    return static_cast<double>(ms);
  }
  double first_word(int i) const {
    unsigned long long value = 0;
    check_cuda(cudaMemcpy(&value, word(i), 8, cudaMemcpyDefault), "reading a time");
    return static_cast<double>(value);
  }

  int device;
  DeviceBytes
      words;  // 128 bytes apart: [0] flag, [1] times, [2, 3] loaded by the peer, [4, 5] waits
  DeviceBytes memory;
  cudaStream_t stream = nullptr;
  std::array<cudaEvent_t, 2> events{};
};

void enable_peer(int from, int to) {
  const DeviceGuard guard(from);
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    check_cuda(error, "enabling peer access");
}

// Best of three: a rate is a ceiling.
double one_way_gbps(const Side& a, const Side& b, bool pull, int ctas) {
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    pull ? a.launch_copy(a.memory.get(), b.memory.get(), ctas)
         : a.launch_copy(b.memory.get(), a.memory.get(), ctas);
    best = std::max(best, 1e-6 * static_cast<double>(kBytesPerCta) * ctas / a.elapsed_ms());
  }
  return best;
}

// Both at once, each with half of its buffer as source and the other half as destination.
double both_ways_gbps(const Side& a, const Side& b, bool pull) {
  constexpr int kCtas = kMostCtas / 2;
  const std::int64_t half = kCtas * kBytesPerCta;
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    for (const Side* side : {&a, &b}) {
      const Side* peer = side == &a ? &b : &a;
      const Side* source = pull ? peer : side;
      const Side* dest = pull ? side : peer;
      side->launch_copy(dest->memory.get() + half, source->memory.get(), kCtas);
    }
    const double ms = std::max(a.elapsed_ms(), b.elapsed_ms());
    best = std::max(best, 1e-6 * static_cast<double>(half) / ms);
  }
  return best;
}

double copy_engine_gbps(const Side& a, const Side& b) {
  const DeviceGuard guard(a.device);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    check_cuda(cudaEventRecord(a.events[0], a.stream), "recording an event");
    check_cuda(cudaMemcpyPeerAsync(b.memory.get(), b.device, a.memory.get(), a.device,
                                   kMostCtas * kBytesPerCta, a.stream),
               "copying to the peer");
    check_cuda(cudaEventRecord(a.events[1], a.stream), "recording an event");
    best = std::max(best, 1e-6 * static_cast<double>(kMostCtas * kBytesPerCta) / a.elapsed_ms());
  }
  return best;
}

double remote_load_us(const Side& a, const Side& b) {
  const DeviceGuard guard(a.device);
  for (int i = 0; i < 2; ++i) {
    remote_load_kernel<<<1, 1, 0, a.stream>>>(b.word(2), kLoads,
                                              reinterpret_cast<unsigned long long*>(a.word(1)));
    check_cuda(cudaStreamSynchronize(a.stream), "loading from the peer");
  }
  return 1e-3 * a.first_word(1) / kLoads;
}

double signal_us(const Side& a, const Side& b) {
  for (const Side* side : {&a, &b}) {
    const DeviceGuard guard(side->device);
    side->clear();
  }
  for (const Side* side : {&b, &a}) {
    const DeviceGuard guard(side->device);
    const Side* peer = side == &a ? &b : &a;
    ping_pong_kernel<<<1, 1, 0, side->stream>>>(
        side->word(0), peer->word(0), side == &a, kPings,
        reinterpret_cast<unsigned long long*>(side->word(1)), side->limits());
    check_cuda(cudaGetLastError(), "launching a ping-pong");
  }
  for (const Side* side : {&a, &b}) {
    const DeviceGuard guard(side->device);
    check_cuda(cudaStreamSynchronize(side->stream), "a ping-pong of flags");
  }
  const double ns = a.first_word(1);
  if (ns <= 0) throw Error(ErrorCode::timeout, "a ping-pong of flags between two GPUs gave up");
  return 1e-3 * ns / (kPings - 10) / 2;
}

}  // namespace

bool measure_link(int device, int peer, LinkRates& rates) {
  for (const auto& [from, to] : {std::pair{device, peer}, std::pair{peer, device}}) {
    int can = 0;
    check_cuda(cudaDeviceCanAccessPeer(&can, from, to), "asking for peer access");
    if (can == 0) return false;
  }
  enable_peer(device, peer);
  enable_peer(peer, device);
  const Side a(device), b(peer);
  for (const int ctas : {1, 2, 4, 8, kMostCtas}) {
    rates.ctas.push_back(ctas);
    rates.pull_gbps.push_back(one_way_gbps(a, b, true, ctas));
    rates.push_gbps.push_back(one_way_gbps(a, b, false, ctas));
  }
  rates.pull_both_gbps = both_ways_gbps(a, b, true);
  rates.push_both_gbps = both_ways_gbps(a, b, false);
  rates.copy_engine_gbps = copy_engine_gbps(a, b);
  rates.remote_load_us = remote_load_us(a, b);
  rates.signal_us = signal_us(a, b);
  return true;
}

}  // namespace moxie::bench
