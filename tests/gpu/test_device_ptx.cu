// Each wrapper of moxie/device against a plain loop on the host.
#include <cuda_bf16.h>

#include <cmath>
#include <random>

#include "gpu_test.h"
#include "moxie/device/bounded_wait.cuh"
#include "moxie/device/cluster.cuh"
#include "moxie/device/cp_async.cuh"
#include "moxie/device/ldmatrix.cuh"
#include "moxie/device/setmaxnreg.cuh"
#include "moxie/device/stmatrix.cuh"
#include "moxie/device/tanh.cuh"
#include "moxie/device/wgmma.cuh"

namespace moxie {
namespace {

namespace ptx = cuda::ptx;
using testing::DeviceBuffer;

// ---- wgmma: one 64 x N x 64 product, operands placed by hand in the swizzled layout ----

using device::Major;

template <int N, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(128, 1)
    wgmma_kernel(const __nv_bfloat16* a /* [64, 64] */, const __nv_bfloat16* b /* [N, 64] */,
                 float* c /* [64, N] */) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  __nv_bfloat16* shared_a = reinterpret_cast<__nv_bfloat16*>(bytes);
  __nv_bfloat16* shared_b = shared_a + 64 * 64;
  const auto at = [](int row, int column) {
    return row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8;
  };
  // MN-major: chunks of 64 rows of K x 64 columns.
  const auto place = [&](Major major, int row, int k) {
    return major == Major::k ? at(row, k) : row / 64 * (64 * 64) + at(k, row % 64);
  };
  for (int i = threadIdx.x; i < 64 * 64; i += 128) shared_a[place(kMajorA, i / 64, i % 64)] = a[i];
  for (int i = threadIdx.x; i < N * 64; i += 128) shared_b[place(kMajorB, i / 64, i % 64)] = b[i];
  ptx::fence_proxy_async(ptx::space_shared);  // the operands, to the tensor cores
  __syncthreads();

  float d[N / 2];
  device::wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    const uint64_t desc_a =
        device::wgmma_descriptor<kMajorA>(shared_a) + k * device::kDescriptorStep<kMajorA>;
    const uint64_t desc_b =
        device::wgmma_descriptor<kMajorB>(shared_b) + k * device::kDescriptorStep<kMajorB>;
    device::wgmma_m64n256k16_bf16<kMajorA, kMajorB>(d, desc_a, desc_b, k > 0);
  }
  device::wgmma_commit_group();
  device::wgmma_wait_group<0>();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    c[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
}

template <int N, Major kMajorA, Major kMajorB>
void check_wgmma() {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> small(-8, 8);  // integers: FP32 sums are exact
  std::vector<__nv_bfloat16> a(64 * 64), b(N * 64);
  for (auto& x : a) x = __float2bfloat16(small(random));
  for (auto& x : b) x = __float2bfloat16(small(random));
  DeviceBuffer<__nv_bfloat16> device_a(a), device_b(b);
  DeviceBuffer<float> device_c(64 * N);
  const int shared_bytes = (64 + N) * 64 * 2;
  MOXIE_CUDA(cudaFuncSetAttribute(wgmma_kernel<N, kMajorA, kMajorB>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  wgmma_kernel<N, kMajorA, kMajorB>
      <<<1, 128, shared_bytes>>>(device_a.get(), device_b.get(), device_c.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  const std::vector<float> c = device_c.to_host();
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < N; ++n) {
      float sum = 0;
      for (int k = 0; k < 64; ++k)
        sum += __bfloat162float(a[m * 64 + k]) * __bfloat162float(b[n * 64 + k]);
      ASSERT_EQ(sum, c[m * N + n]) << "row " << m << " column " << n;
    }
  }
}

TEST(DevicePtx, wgmma_m64n256k16) {
  MOXIE_NEEDS_GPU();
  check_wgmma<256, Major::k, Major::k>();
}
TEST(DevicePtx, wgmma_m64n256k16_mn_major) {
  MOXIE_NEEDS_GPU();
  check_wgmma<256, Major::k, Major::mn>();
  check_wgmma<256, Major::mn, Major::mn>();
}

// ---- stmatrix ----

__global__ void stmatrix_kernel(uint16_t* out /* [4, 8, 8] */) {
  __shared__ __align__(16) uint16_t tile[4 * 8 * 8];
  const int lane = threadIdx.x;
  uint32_t m[4];
  for (int i = 0; i < 4; ++i) {
    const uint32_t first =
        i * 64 + lane / 4 * 8 + lane % 4 * 2;  // matrix, row, column as one number
    m[i] = first | (first + 1) << 16;
  }
  device::stmatrix_x4(tile + lane * 8, m[0], m[1], m[2], m[3]);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) out[i] = tile[i];
}

TEST(DevicePtx, stmatrix_x4) {
  MOXIE_NEEDS_GPU();
  DeviceBuffer<uint16_t> out(256);
  stmatrix_kernel<<<1, 32>>>(out.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  const auto values = out.to_host();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(i, values[i]);
}

// ---- ldmatrix ----

__global__ void ldmatrix_kernel(uint32_t* out /* [32, 4] */) {
  __shared__ __align__(16) uint16_t tile[4 * 8 * 8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) tile[i] = i;
  __syncwarp();
  uint32_t m[4];
  device::ldmatrix_x4(m, tile + lane * 8);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = m[i];
}

TEST(DevicePtx, ldmatrix_x4) {
  MOXIE_NEEDS_GPU();
  DeviceBuffer<uint32_t> out(128);
  ldmatrix_kernel<<<1, 32>>>(out.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  const auto values = out.to_host();
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t first = i * 64 + lane / 4 * 8 + lane % 4 * 2;
      ASSERT_EQ(first | (first + 1) << 16, values[lane * 4 + i]);
    }
  }
}

// ---- cp.async ----

constexpr int kCopied = 32 * 16;
__global__ void cp_async_kernel(const uint8_t* in /* [64 + kCopied] */,
                                uint8_t* out /* [kCopied] */, int* gave_up) {
  __shared__ __align__(16) uint8_t copied[kCopied];
  __shared__ uint64_t arrived;
  if (threadIdx.x == 0) ptx::mbarrier_init(&arrived, 32);
  for (int i = 0; i < 16; ++i) copied[16 * threadIdx.x + i] = 0xFF;
  __syncthreads();
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(copied + 16 * threadIdx.x));
  device::cp_async_16<64>(to, in + 16 * threadIdx.x, threadIdx.x % 17);
  ptx::cp_async_mbarrier_arrive_noinc(&arrived);
  int tries = 0;
  while (!ptx::mbarrier_test_wait_parity(&arrived, 0) && tries < 1'000'000) ++tries;
  if (tries == 1'000'000) *gave_up = 1;
  for (int i = 0; i < 16; ++i) out[16 * threadIdx.x + i] = copied[16 * threadIdx.x + i];
}

// Lane n copies n % 17 bytes from an offset, zeros after them, and all are there when the barrier
// says so.
TEST(DevicePtx, cp_async_16) {
  MOXIE_NEEDS_GPU();
  std::vector<uint8_t> in(64 + kCopied);
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  for (auto& x : in) x = static_cast<uint8_t>(1 + random() % 255);
  DeviceBuffer<uint8_t> device_in(in), device_out(kCopied);
  DeviceBuffer<int> gave_up(std::vector<int>{0});
  cp_async_kernel<<<1, 32>>>(device_in.get(), device_out.get(), gave_up.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(gave_up.to_host()[0], 0);
  const std::vector<uint8_t> out = device_out.to_host();
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 16; ++i) {
      EXPECT_EQ(out[16 * lane + i], i < lane % 17 ? in[64 + 16 * lane + i] : 0)
          << "lane " << lane << ", byte " << i;
    }
  }
}

// ---- tanh.approx ----

__global__ void tanh_kernel(float* out, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    out[i] = device::tanh_approx((i - count / 2) * 0.01f);
}

TEST(DevicePtx, tanh_approx) {
  MOXIE_NEEDS_GPU();
  const int count = 4001;
  DeviceBuffer<float> out(count);
  tanh_kernel<<<1, 128>>>(out.get(), count);
  MOXIE_CUDA(cudaDeviceSynchronize());
  const auto values = out.to_host();
  for (int i = 0; i < count; ++i) {
    const double wanted = std::tanh((i - count / 2) * 0.01);
    ASSERT_NEAR(wanted, values[i], std::abs(wanted) * 1e-3 + 1e-7);
  }
}

// ---- setmaxnreg ----

__global__ void __launch_bounds__(384, 1) setmaxnreg_kernel(int* out) {
  if (threadIdx.x < 128) {
    device::setmaxnreg_dec<40>();
    out[threadIdx.x] = threadIdx.x;
  } else {
    device::setmaxnreg_inc<232>();
    out[threadIdx.x] = threadIdx.x * 2;
  }
}

TEST(DevicePtx, setmaxnreg) {
  MOXIE_NEEDS_GPU();
  DeviceBuffer<int> out(384);
  setmaxnreg_kernel<<<1, 384>>>(out.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  const auto values = out.to_host();
  for (int i = 0; i < 384; ++i) ASSERT_EQ(i < 128 ? i : 2 * i, values[i]);
}

// ---- mapa, arrive on the partner's mbarrier, st.async, bounded waits ----

__global__ void __cluster_dims__(2, 1, 1)
    cluster_kernel(device::WaitLimits limits, int32_t* out /* [2] */) {
  __shared__ uint64_t barrier[2];
  __shared__ int32_t word;
  const uint32_t rank = ptx::get_sreg_cluster_ctarank();
  if (threadIdx.x == 0) {
    word = -1;
    ptx::mbarrier_init(&barrier[0], 1);
    ptx::mbarrier_init(&barrier[1], 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);  // the barriers, to the partner
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier[1],
                                   uint32_t{4});
  }
  ptx::barrier_cluster_arrive(ptx::sem_release);
  ptx::barrier_cluster_wait(ptx::sem_acquire);
  if (threadIdx.x == 0) {
    device::mbarrier_arrive_cluster(device::mapa(&barrier[0], rank ^ 1));
    bool healthy = device::mbarrier_wait(&barrier[0], 0, limits, {1, 0, 0});
    ptx::st_async(device::mapa_generic(&word, rank ^ 1), int32_t(100 + rank),
                  device::mapa_generic(&barrier[1], rank ^ 1));
    healthy &= device::mbarrier_wait_cluster(&barrier[1], 0, limits, {2, 1, 0});
    out[rank] = healthy ? word : -2;
  }
  ptx::barrier_cluster_arrive(ptx::sem_release);
  ptx::barrier_cluster_wait(ptx::sem_acquire);
}

TEST(DevicePtx, cluster_arrive_and_store) {
  MOXIE_NEEDS_GPU();
  DeviceBuffer<uint32_t> words(std::vector<uint32_t>{0, 0});  // abort flag, claim
  DeviceBuffer<int32_t> out(2);
  cluster_kernel<<<2, 32>>>({words.get(), nullptr, 1'000'000'000, 0, 0, words.get() + 1},
                            out.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ((std::vector<int32_t>{101, 100}), out.to_host());
}

__global__ void expiring_kernel(device::WaitLimits limits, int32_t* gave_up /* [2] */) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) ptx::mbarrier_init(&barrier, 1);
  __syncthreads();
  if (threadIdx.x % 32 != 0) return;
  // Warp 0 waits with the limit; warp 1 without, and ends because warp 0 gave up.
  if (threadIdx.x / 32 == 1) limits.limit_ns = 0;
  const bool arrived = device::mbarrier_wait(&barrier, 0, limits, {7, 13, 1});
  gave_up[threadIdx.x / 32] = !arrived;
}

TEST(DevicePtx, bounded_wait_expires_with_a_record) {
  MOXIE_NEEDS_GPU();
  DeviceBuffer<uint32_t> words(std::vector<uint32_t>{0, 0});  // abort flag, claim
  DeviceBuffer<int32_t> gave_up(2);
  device::ExpiredWait* record = nullptr;
  MOXIE_CUDA(cudaHostAlloc(&record, sizeof(*record), cudaHostAllocMapped));
  *record = {};
  expiring_kernel<<<1, 64>>>({words.get(), record, 20'000'000, 3, 5, words.get() + 1},
                             gave_up.get());
  MOXIE_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ((std::vector<int32_t>{1, 1}), gave_up.to_host());
  EXPECT_EQ(1u, record->written);
  EXPECT_EQ(3u, record->rank);
  EXPECT_EQ(0u, record->cta);
  EXPECT_EQ(0u, record->warp);
  EXPECT_EQ(7u, record->what);
  EXPECT_EQ(13u, record->index);
  EXPECT_EQ(5u, record->epoch);
  EXPECT_GE(record->waited_ns, 20'000'000u);
  EXPECT_LE(record->waited_ns, 2'000'000'000u);
  cudaFreeHost(record);
}

}  // namespace
}  // namespace moxie
