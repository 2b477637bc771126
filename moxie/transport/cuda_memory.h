// Owners of CUDA memory, and the one place that turns CUDA error codes into Error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "moxie/core/error.h"

namespace moxie::transport {

inline void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // the runtime remembers it, and the next launch's check would see it again
  throw Error(ErrorCode::unavailable, what + " failed: " + cudaGetErrorString(error));
}

// Makes `device` current and restores the caller's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "asking for the current GPU");
    check_cuda(cudaSetDevice(device), "choosing GPU " + std::to_string(device));
  }
  ~DeviceGuard() { cudaSetDevice(before_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

// A stream of the current device that waits for no other.
class CudaStream {
 public:
  CudaStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }
  void synchronize(const std::string& what) const {
    check_cuda(cudaStreamSynchronize(stream_), what);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// For destructors: runs `work` with `device` current; an error has nobody to go to.
template <class Work>
void on_device(int device, const Work& work) noexcept {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return;
  work();
  cudaGetLastError();
  cudaSetDevice(before);
}

// Plain device memory.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(int device, std::int64_t num_bytes, const std::string& what)
      : device_(device), num_bytes_(num_bytes) {
    if (num_bytes == 0) return;
    const DeviceGuard guard(device);
    check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(num_bytes)),
               "allocating " + std::to_string(num_bytes) + " bytes for " + what + " on GPU " +
                   std::to_string(device));
  }
  DeviceBytes(DeviceBytes&& other) noexcept
      : device_(other.device_),
        num_bytes_(std::exchange(other.num_bytes_, 0)),
        data_(std::exchange(other.data_, nullptr)) {}
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(num_bytes_, other.num_bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBytes() { cudaFree(data_); }

  std::byte* get() const { return static_cast<std::byte*>(data_); }
  std::int64_t num_bytes() const { return num_bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  int device_ = 0;
  std::int64_t num_bytes_ = 0;
  void* data_ = nullptr;
};

// Host memory that kernels of every GPU can write; zeroed.
template <class T>
class MappedHost {
 public:
  explicit MappedHost(std::size_t count) : count_(count) {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&data_), count * sizeof(T),
                             cudaHostAllocMapped | cudaHostAllocPortable),
               "pinning host memory");
    clear();
  }
  ~MappedHost() { cudaFreeHost(data_); }
  MappedHost(const MappedHost&) = delete;
  MappedHost& operator=(const MappedHost&) = delete;

  T& operator[](std::size_t i) const { return data_[i]; }
  T* device_pointer() const {  // the same for all GPUs: unified addressing
    void* pointer = nullptr;
    check_cuda(cudaHostGetDevicePointer(&pointer, data_, 0), "mapping host memory");
    return static_cast<T*>(pointer);
  }
  void clear() {
    for (std::size_t i = 0; i < count_; ++i) data_[i] = T{};
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

}  // namespace moxie::transport
