// Two GPUs, or all of a machine: copies by a few CTAs, latencies of loads and flags. Contract:
// device_gpu.h.
//
// The copy is the one of the design's communication CTAs: one thread keeps bulk copies of 16 KB in
// flight, from global memory into a ring of shared memory and out of it again; source or
// destination lies on the peer.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <memory>

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
constexpr int kMostCtas = 16, kMostPeers = kMostCtas;
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

// Streams, events and words of one GPU. Half of its buffer is copied from, the other half to.
struct Side {
  explicit Side(int device_in)
      : device(device_in),
        words(device, 8192, "flags"),
        memory(device, 2 * kMostCtas * kBytesPerCta, "a link's buffer") {
    const DeviceGuard guard(device);
    for (cudaStream_t& one : streams)
      check_cuda(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), "creating a stream");
    for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event), "creating an event");
    for (cudaEvent_t& event : joins) check_cuda(cudaEventCreate(&event), "creating an event");
    check_cuda(cudaFuncSetAttribute(bulk_copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(CopyShared))),
               "shared memory of a copy");
    check_cuda(cudaMemset(memory.get(), 1, 2 * kMostCtas * kBytesPerCta), "filling a buffer");
    clear();
  }
  ~Side() {
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    for (cudaEvent_t event : joins) cudaEventDestroy(event);
    for (cudaStream_t one : streams) cudaStreamDestroy(one);
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
  const std::byte* source() const { return memory.get(); }
  std::byte* dest(int cta) const { return memory.get() + (kMostCtas + cta) * kBytesPerCta; }
  struct Copy {
    std::byte* to;
    const std::byte* from;
  };
  // All at once, each by `ctas` CTAs and on a stream of its own.
  void launch(const std::vector<Copy>& copies, int ctas) const {
    const DeviceGuard guard(device);
    check_cuda(cudaEventRecord(events[0], stream()), "recording an event");
    for (std::size_t i = 0; i < copies.size(); ++i) {
      check_cuda(cudaStreamWaitEvent(streams[i], events[0]), "waiting for an event");
      bulk_copy_kernel<<<ctas, 32, sizeof(CopyShared), streams[i]>>>(copies[i].to, copies[i].from,
                                                                     kBytesPerCta, limits());
      check_cuda(cudaGetLastError(), "launching a copy");
      check_cuda(cudaEventRecord(joins[i], streams[i]), "recording an event");
      check_cuda(cudaStreamWaitEvent(stream(), joins[i]), "waiting for an event");
    }
    check_cuda(cudaEventRecord(events[1], stream()), "recording an event");
  }
  double elapsed_ms() const {
    const DeviceGuard guard(device);
    check_cuda(cudaStreamSynchronize(stream()), "waiting for a copy");
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
  cudaStream_t stream() const { return streams[0]; }
  std::array<cudaStream_t, kMostPeers> streams{};
  std::array<cudaEvent_t, 2> events{};
  std::array<cudaEvent_t, kMostPeers> joins{};
};

void enable_peer(int from, int to) {
  const DeviceGuard guard(from);
  const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else
    check_cuda(error, "enabling peer access");
}

// False: some two do not reach each other's memory.
bool reach_each_other(const std::vector<int>& devices) {
  for (const int from : devices) {
    for (const int to : devices) {
      int can = from == to ? 1 : 0;
      if (from != to) check_cuda(cudaDeviceCanAccessPeer(&can, from, to), "asking for peer access");
      if (can == 0) return false;
    }
  }
  for (const int from : devices) {
    for (const int to : devices) {
      if (from != to) enable_peer(from, to);
    }
  }
  return true;
}

// Best of three: a rate is a ceiling.
double one_way_gbps(const Side& a, const Side& b, bool pull, int ctas) {
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    a.launch({pull ? Side::Copy{a.dest(0), b.source()} : Side::Copy{b.dest(0), a.source()}}, ctas);
    best = std::max(best, 1e-6 * static_cast<double>(kBytesPerCta) * ctas / a.elapsed_ms());
  }
  return best;
}

double slowest(const std::vector<double>& gbps) {
  return *std::min_element(gbps.begin(), gbps.end());
}

// Every GPU from, or to, all others at once; [GPU] of the GPU itself, in or out. Of three turns the
// one whose slowest GPU is fastest.
std::vector<double> all_at_once_gbps(const std::vector<const Side*>& sides, bool pull) {
  const int num_peers = static_cast<int>(sides.size()) - 1,
            ctas = kMostCtas / std::max(2, num_peers);
  std::vector<double> best(sides.size(), 0.0);
  for (int turn = 0; turn < 3; ++turn) {
    for (int me = 0; me <= num_peers; ++me) {
      std::vector<Side::Copy> copies;
      for (int distance = 1; distance <= num_peers; ++distance) {
        // In that order nobody is everybody's first.
        const Side& own = *sides[me];
        const Side& peer = *sides[(me + distance) % (num_peers + 1)];
        const int slot = (distance - 1) * ctas;
        copies.push_back(pull ? Side::Copy{own.dest(slot), peer.source()}
                              : Side::Copy{peer.dest(slot), own.source()});
      }
      sides[me]->launch(copies, ctas);
    }
    std::vector<double> gbps;
    for (const Side* side : sides) {
      const double bytes = static_cast<double>(kBytesPerCta) * ctas * num_peers;
      gbps.push_back(1e-6 * bytes / side->elapsed_ms());
    }
    if (slowest(gbps) > slowest(best)) best = gbps;
  }
  return best;
}

double copy_engine_gbps(const Side& a, const Side& b) {
  const DeviceGuard guard(a.device);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    check_cuda(cudaEventRecord(a.events[0], a.stream()), "recording an event");
    check_cuda(cudaMemcpyPeerAsync(b.dest(0), b.device, a.source(), a.device,
                                   kMostCtas * kBytesPerCta, a.stream()),
               "copying to the peer");
    check_cuda(cudaEventRecord(a.events[1], a.stream()), "recording an event");
    best = std::max(best, 1e-6 * static_cast<double>(kMostCtas * kBytesPerCta) / a.elapsed_ms());
  }
  return best;
}

double remote_load_us(const Side& a, const Side& b) {
  const DeviceGuard guard(a.device);
  for (int i = 0; i < 2; ++i) {
    remote_load_kernel<<<1, 1, 0, a.stream()>>>(b.word(2), kLoads,
                                                reinterpret_cast<unsigned long long*>(a.word(1)));
    check_cuda(cudaStreamSynchronize(a.stream()), "loading from the peer");
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
    ping_pong_kernel<<<1, 1, 0, side->stream()>>>(
        side->word(0), peer->word(0), side == &a, kPings,
        reinterpret_cast<unsigned long long*>(side->word(1)), side->limits());
    check_cuda(cudaGetLastError(), "launching a ping-pong");
  }
  for (const Side* side : {&a, &b}) {
    const DeviceGuard guard(side->device);
    check_cuda(cudaStreamSynchronize(side->stream()), "a ping-pong of flags");
  }
  const double ns = a.first_word(1);
  if (ns <= 0) throw Error(ErrorCode::timeout, "a ping-pong of flags between two GPUs gave up");
  return 1e-3 * ns / (kPings - 10) / 2;
}

}  // namespace

bool measure_link(int device, int peer, LinkRates& rates) {
  if (!reach_each_other({device, peer})) return false;
  const Side a(device), b(peer);
  for (const int ctas : {1, 2, 4, 8, kMostCtas}) {
    rates.ctas.push_back(ctas);
    rates.pull_gbps.push_back(one_way_gbps(a, b, true, ctas));
    rates.push_gbps.push_back(one_way_gbps(a, b, false, ctas));
  }
  rates.pull_both_gbps = slowest(all_at_once_gbps({&a, &b}, true));
  rates.push_both_gbps = slowest(all_at_once_gbps({&a, &b}, false));
  rates.copy_engine_gbps = copy_engine_gbps(a, b);
  rates.remote_load_us = remote_load_us(a, b);
  rates.signal_us = signal_us(a, b);
  return true;
}

bool measure_all_links(int num_gpus, AllLinkRates& rates) {
  std::vector<int> devices;
  for (int i = 0; i < std::min(num_gpus, kMostPeers + 1); ++i) devices.push_back(i);
  if (!reach_each_other(devices)) return false;
  std::vector<std::unique_ptr<Side>> sides;
  std::vector<const Side*> all;
  for (const int device : devices) {
    sides.push_back(std::make_unique<Side>(device));
    all.push_back(sides.back().get());
  }
  rates.pull_gbps = all_at_once_gbps(all, true);
  rates.push_gbps = all_at_once_gbps(all, false);
  return true;
}

}  // namespace moxie::bench
