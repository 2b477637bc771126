// What the GPU tests share: skipping honestly without a GPU, device buffers, poison.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

namespace moxie::testing {

inline bool has_hopper_gpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return false;
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major == 9;
}

#define MOXIE_NEEDS_GPU()                  \
  if (!::moxie::testing::has_hopper_gpu()) \
  GTEST_SKIP() << "no GPU of compute capability 9.0: nothing was tested"

inline int num_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

#define MOXIE_NEEDS_TWO_GPUS() \
  MOXIE_NEEDS_GPU();           \
  if (::moxie::testing::num_gpus() < 2) GTEST_SKIP() << "one GPU: nothing was tested"

// Numbers of ranks with a GPU each: 2, and 4 and 8 where the machine has as many.
inline std::vector<int> rank_counts() {
  std::vector<int> counts{2};
  for (const int count : {4, 8}) {
    if (count <= num_gpus()) counts.push_back(count);
  }
  return counts;
}

// Which GPU each rank is on: one each, the other way round, and more ranks than GPUs.
inline std::vector<std::vector<int>> rank_places() {
  std::vector<std::vector<int>> places{{1, 0}, {0, 1, 1, 0, 1}};
  for (const int count : rank_counts()) {
    places.emplace_back();
    for (int gpu = 0; gpu < count; ++gpu) places.back().push_back(gpu);
  }
  if (num_gpus() > 2) places.push_back({2, 0, 1, 1, 2});
  return places;
}

#define MOXIE_CUDA(call) \
  ASSERT_EQ(cudaSuccess, (call)) << #call << ": " << cudaGetErrorString(cudaGetLastError())

// Device memory of a test; every byte is 0xFF (a NaN in every type) until it is written.
template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count) : count_(count) {
    if (cudaMalloc(&data_, bytes() + 16) != cudaSuccess) data_ = nullptr;
    poison();
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) {
    cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice);
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void poison() { cudaMemset(data_, 0xFF, bytes() + 16); }
  T* get() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  std::vector<T> to_host() const {
    std::vector<T> values(count_);
    cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace moxie::testing
