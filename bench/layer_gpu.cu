// Contract: layer_gpu.h.
#include "bench/layer_gpu.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "moxie/backend_cuda/cuda_memory.h"

namespace moxie::bench {
namespace {

using backend_cuda::check_cuda;
using backend_cuda::DeviceBytes;
using backend_cuda::DeviceGuard;

__device__ std::uint64_t mix(std::uint64_t z) {  // the finaliser of splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Box-Muller: two values from the two halves of one hash.
__global__ void fill_kernel(__nv_bfloat16* out /* [count] */, std::int64_t count, float scale,
                            std::uint64_t key) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; 2 * i < count;
       i += stride) {
    const std::uint64_t bits = mix(key + static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull);
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1.0p-24f;
    const float angle = static_cast<float>(bits & 0xffffff) * 0x1.0p-23f;  // in units of pi
    const float radius = scale * sqrtf(-2 * __logf(u));
    float sine, cosine;
    sincospif(angle, &sine, &cosine);
    out[2 * i] = __float2bfloat16(radius * cosine);
    if (2 * i + 1 < count) out[2 * i + 1] = __float2bfloat16(radius * sine);
  }
}

// One row per SM: its cycle counter and the time, so that two probes give the clock in between.
__global__ void probe_kernel(unsigned long long* out /* [num_sms, 2] */) {
  if (threadIdx.x != 0) return;
  unsigned smid;
  unsigned long long now_ns;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(smid));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now_ns));
  out[2 * smid] = clock64();
  out[2 * smid + 1] = now_ns;
}
constexpr int kProbeSharedBytes = 160 * 1024;  // one CTA per SM, so that every SM is probed

int num_sms_of(int device) {
  int num_sms = 0;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "counting SMs");
  return num_sms;
}

}  // namespace

GpuMemory::GpuMemory(int device, std::size_t num_bytes) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, std::max<std::size_t>(num_bytes, 1)),
             "allocating " + std::to_string(num_bytes) + " bytes on GPU " + std::to_string(device));
  data_.reset(data);
}
void GpuMemory::Free::operator()(void* data) const { cudaFree(data); }

void copy(void* to, const void* from, std::size_t num_bytes) {
  check_cuda(cudaMemcpy(to, from, num_bytes, cudaMemcpyDefault), "copying");
}

void fill_normal(int device, void* bf16_values, std::int64_t count, float scale,
                 std::uint64_t seed) {
  const DeviceGuard guard(device);
  fill_kernel<<<8 * num_sms_of(device), 256>>>(static_cast<__nv_bfloat16*>(bf16_values), count,
                                               scale, seed * 0x2545f4914f6cdd1dull + 1);
  check_cuda(cudaGetLastError(), "filling with random values");
  check_cuda(cudaDeviceSynchronize(), "filling with random values");
}

struct GpuTimer::State {
  int device, num_sms;
  cudaStream_t stream = nullptr;
  std::array<cudaEvent_t, 2> events{};
  std::array<DeviceBytes, 2> probes;  // [num_sms, 2] u64

  std::size_t probe_bytes() const { return static_cast<std::size_t>(num_sms) * 16; }
  void probe(std::size_t i) {
    probe_kernel<<<num_sms, 32, kProbeSharedBytes, stream>>>(probes[i].as<unsigned long long>());
  }
  double clock_mhz() const {
    std::array<std::vector<unsigned long long>, 2> rows;
    for (std::size_t i = 0; i < 2; ++i) {
      rows[i].resize(static_cast<std::size_t>(num_sms) * 2);
      copy(rows[i].data(), probes[i].get(), probe_bytes());
    }
    std::vector<double> mhz;
    for (std::size_t at = 0; at < rows[0].size(); at += 2) {
      const auto cycles = static_cast<double>(rows[1][at] - rows[0][at]);
      const auto ns = static_cast<double>(rows[1][at + 1] - rows[0][at + 1]);
      if (rows[0][at + 1] != 0 && rows[1][at + 1] != 0 && ns > 0) mhz.push_back(1e3 * cycles / ns);
    }
    if (mhz.empty()) return 0;
    std::nth_element(mhz.begin(), mhz.begin() + static_cast<std::ptrdiff_t>(mhz.size() / 2),
                     mhz.end());
    return mhz[mhz.size() / 2];
  }
};

GpuTimer::GpuTimer(int device) : state_(std::make_unique<State>()) {
  const DeviceGuard guard(device);
  state_->device = device;
  state_->num_sms = num_sms_of(device);
  check_cuda(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking),
             "creating a stream");
  for (cudaEvent_t& event : state_->events)
    check_cuda(cudaEventCreate(&event), "creating an event");
  check_cuda(cudaFuncSetAttribute(probe_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kProbeSharedBytes),
             "sizing the probe's shared memory");
  for (DeviceBytes& probe : state_->probes)
    probe = DeviceBytes(device, static_cast<std::int64_t>(state_->probe_bytes()), "a clock probe");
}

GpuTimer::~GpuTimer() {
  for (cudaEvent_t event : state_->events) cudaEventDestroy(event);
  cudaStreamDestroy(state_->stream);
}

void* GpuTimer::stream() const { return state_->stream; }
void GpuTimer::synchronize() const {
  check_cuda(cudaStreamSynchronize(state_->stream), "waiting for the GPU");
}

GpuTiming GpuTimer::window(const std::function<void()>& enqueue, std::int64_t num_launches) {
  const DeviceGuard guard(state_->device);
  for (const DeviceBytes& probe : state_->probes) {
    check_cuda(cudaMemsetAsync(probe.get(), 0, state_->probe_bytes(), state_->stream),
               "clearing a clock probe");
  }
  state_->probe(0);
  check_cuda(cudaEventRecord(state_->events[0], state_->stream), "recording an event");
  for (std::int64_t i = 0; i < num_launches; ++i) enqueue();
  check_cuda(cudaEventRecord(state_->events[1], state_->stream), "recording an event");
  state_->probe(1);
  check_cuda(cudaGetLastError(), "probing the SM clock");
  synchronize();
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, state_->events[0], state_->events[1]), "reading a time");
  return {static_cast<double>(ms) / static_cast<double>(num_launches), state_->clock_mhz()};
}

std::optional<std::int64_t> GpuTimer::count_kernels(const std::function<void()>& enqueue) {
  const DeviceGuard guard(state_->device);
  synchronize();
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(state_->stream, cudaStreamCaptureModeThreadLocal),
             "beginning a capture");
  bool captured = true;
  try {
    enqueue();
  } catch (const Error&) {
    captured = false;
  }
  captured = cudaStreamEndCapture(state_->stream, &graph) == cudaSuccess && captured;
  cudaGetLastError();  // a failed capture is an answer, not an error
  std::optional<std::int64_t> num_kernels;
  size_t num_nodes = 0;
  if (captured && cudaGraphGetNodes(graph, nullptr, &num_nodes) == cudaSuccess) {
    std::vector<cudaGraphNode_t> nodes(num_nodes);
    cudaGraphGetNodes(graph, nodes.data(), &num_nodes);
    num_kernels = std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
      cudaGraphNodeType type{};
      return cudaGraphNodeGetType(node, &type) == cudaSuccess && type == cudaGraphNodeTypeKernel;
    });
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  return num_kernels;
}

}  // namespace moxie::bench
