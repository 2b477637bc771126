// What `moxie bench layer` needs of a GPU beside the library: memory with random values, time and
// SM clock of a window of launches, the number of kernels of a pass. No CUDA header in here, so
// that the command's files stay free of them. Built with MOXIE_CUDA only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace moxie::bench {

// Device memory that is freed with its owner.
class GpuMemory {
 public:
  GpuMemory(int device, std::size_t num_bytes);
  GpuMemory(GpuMemory&&) noexcept = default;
  GpuMemory& operator=(GpuMemory&&) noexcept = default;
  void* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
};

// Between any two of host and GPUs; waits.
void copy(void* to, const void* from, std::size_t num_bytes);
// BF16 values of a normal distribution with mean 0: the same for a seed on every GPU. Normal, since
// the power a GPU draws depends on its operands, and so does its clock.
void fill_normal(int device, void* bf16_values, std::int64_t count, float scale,
                 std::uint64_t seed);

struct GpuTiming {
  double ms = 0;  // per launch
  double sm_clock_mhz = 0;
};
// A stream of one GPU, with events and a probe of its SM clock.
class GpuTimer {
 public:
  explicit GpuTimer(int device);
  ~GpuTimer();
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;

  void* stream() const;  // cudaStream_t
  void synchronize() const;
  // Time between events around `num_launches` calls of `enqueue`, and the mean SM clock meanwhile.
  GpuTiming window(const std::function<void()>& enqueue, std::int64_t num_launches);
  // Kernels of one call, by capturing it into a CUDA graph; nullopt when it cannot be captured.
  std::optional<std::int64_t> count_kernels(const std::function<void()>& enqueue);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moxie::bench
