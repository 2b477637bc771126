// C entry points of the grouped GEMM and of the backward's products for bench/bench_grouped_gemm.py
// (loaded through ctypes).
#include <cstdio>
#include <cstring>

#include "moxie/core/error.h"
#include "moxie/expert/backward_gemm.h"

namespace {

// One row per SM: its cycle counter and the time, so that two probes give the SM clock in between.
__global__ void probe_kernel(unsigned long long* out /* [num_sms, 2] */) {
  if (threadIdx.x != 0) return;
  unsigned smid;
  unsigned long long now_ns;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(smid));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now_ns));
  out[2 * smid] = clock64();
  out[2 * smid + 1] = now_ns;
}

}  // namespace

extern "C" {

struct MoxieBenchProduct {
  int swiglu, cluster_size, band_blocks, num_experts;
  long long rows_capacity;
  int n, k;
  const void *a, *b, *b_up, *row_weight;
  void* out;
  const void* expert_rows;
};

// 0, or 1 with a sentence in message[256].
int moxie_bench_launch(const MoxieBenchProduct* p, void* stream, char* message) {
  using namespace moxie;
  try {
    static const expert::GroupedGemmWorkspace workspace;
    expert::GroupedGemmArguments x;
    x.product = p->swiglu ? expert::GroupedProduct::swiglu : expert::GroupedProduct::plain;
    x.a = static_cast<const bf16*>(p->a);
    x.b = static_cast<const bf16*>(p->b);
    x.b_up = static_cast<const bf16*>(p->b_up);
    x.row_weight = static_cast<const float*>(p->row_weight);
    x.out = static_cast<bf16*>(p->out);
    x.expert_rows = static_cast<const int32_t*>(p->expert_rows);
    x.num_experts = p->num_experts;
    x.rows_capacity = p->rows_capacity;
    x.n = p->n;
    x.k = p->k;
    expert::GroupedGemmOptions options;
    options.cluster_size = p->cluster_size;
    options.band_blocks = p->band_blocks;
    launch_grouped_gemm(x, options, workspace, static_cast<cudaStream_t>(stream));
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, 256, "%s", error.what());
    return 1;
  }
}

struct MoxieBenchBackward {
  int product;  // 0: dgrad, 1: dX, 2: wgrad [m, n], 3: the wgrads of gate, up and down
  int output;   // wgrad: WgradOutput
  int cluster_size, band_blocks, num_experts;
  long long rows_capacity;
  int hidden, intermediate, m, n;
  const void* expert_rows;
  const void* in[5];  // in the order of the argument structs
  void* out[4];
};

int moxie_bench_launch_backward(const MoxieBenchBackward* p, void* stream, char* message) {
  using namespace moxie;
  const auto in = [&](int i) { return static_cast<const bf16*>(p->in[i]); };
  const auto out = [&](int i) { return static_cast<bf16*>(p->out[i]); };
  try {
    static const expert::GroupedGemmWorkspace workspace;
    const expert::BackwardRows rows{static_cast<const int32_t*>(p->expert_rows), p->num_experts,
                                    p->rows_capacity, p->hidden, p->intermediate};
    expert::GroupedGemmOptions options;
    options.cluster_size = p->cluster_size;
    options.band_blocks = p->band_blocks;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p->product == 0) {
      launch_dgrad(rows,
                   {in(0), in(1), in(2), static_cast<const float*>(p->in[3]), out(0), out(1),
                    out(2), static_cast<float*>(p->out[3]), Activation{}},
                   options, workspace, s);
    } else if (p->product == 1) {
      launch_dx(rows, {in(0), in(1), in(2), in(3), out(0)}, options, workspace, s);
    } else {
      const auto output = static_cast<expert::WgradOutput>(p->output);
      const expert::WgradArguments one{in(0), in(1), p->out[0], output, p->m, p->n};
      const int h = p->hidden, i = p->intermediate;  // inputs: dgate, dup, dY, x, wA
      const expert::WgradArguments all[3] = {{in(0), in(3), p->out[0], output, i, h},
                                             {in(1), in(3), p->out[1], output, i, h},
                                             {in(2), in(4), p->out[2], output, h, i}};
      const std::span<const expert::WgradArguments> wgrads =
          p->product == 2 ? std::span(&one, 1) : std::span(all);
      launch_wgrads(rows, wgrads, options, workspace, s);
    }
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, 256, "%s", error.what());
    return 1;
  }
}

// out: device memory, [number of SMs, 2]. One CTA per SM, forced by its shared memory.
int moxie_bench_probe_clock(void* out, void* stream) {
  int num_sms = 0;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0);
  constexpr int kSharedBytes = 160 * 1024;
  cudaFuncSetAttribute(probe_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  probe_kernel<<<num_sms, 32, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<unsigned long long*>(out));
  return static_cast<int>(cudaGetLastError());
}

}  // extern "C"
