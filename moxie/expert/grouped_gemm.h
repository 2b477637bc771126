// Stand-alone grouped GEMM of the expert stage on the GPU: host interface.
//
// plain:  out[r, n] = sum_k a[r, k] * b[e, n, k]                       (down; gate or up alone)
// swiglu: out[r, n] = silu(a[r] . b[e, n]) * (a[r] . b_up[e, n]) * row_weight[r]
// Rows are sorted by expert. Expert e starts at row 128 * sum over e' < e of ceil(expert_rows[e'] /
// 128) and has expert_rows[e] real rows; rows past them are neither used nor written. The counts
// stay on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moxie/core/dtype.h"

namespace moxie::device {
struct ExpiredWait;
}

namespace moxie::expert {

enum class GroupedProduct { plain, swiglu };

struct GroupedGemmArguments {
  GroupedProduct product = GroupedProduct::plain;
  const bf16* a = nullptr;               // [rows_capacity, k]
  const bf16* b = nullptr;               // [num_experts, n, k]; swiglu: gate
  const bf16* b_up = nullptr;            // [num_experts, n, k]; swiglu only
  const float* row_weight = nullptr;     // [rows_capacity] or null (1); swiglu only
  bf16* out = nullptr;                   // [rows_capacity, n]
  const int32_t* expert_rows = nullptr;  // [num_experts], on the GPU
  int32_t num_experts = 0;               // 1..1024
  int64_t rows_capacity = 0;             // rows that may be addressed; covers the padded sum
  int32_t n = 0;                         // multiple of 8
  int32_t k = 0;                         // multiple of 8
};

struct GroupedGemmOptions {
  int32_t cluster_size = 2;             // 1, or 2: pairs of row blocks share B by multicast
  int32_t band_blocks = 0;              // row blocks per raster band, even; 0: chosen by the shape
  int32_t reserve_sms = 0;              // SMs left to other kernels
  uint64_t limit_ns = 300'000'000'000;  // per wait; 0: for ever
};

// Tickets, abort flag and the record of an expired wait. One per stream of launches. After an
// expired wait its counters are stale: make a new one.
class GroupedGemmWorkspace {
 public:
  GroupedGemmWorkspace();
  ~GroupedGemmWorkspace();
  GroupedGemmWorkspace(const GroupedGemmWorkspace&) = delete;
  GroupedGemmWorkspace& operator=(const GroupedGemmWorkspace&) = delete;

  uint32_t* words() const { return words_; }  // device: {next, num_done, abort flag, claim}
  device::ExpiredWait* record() const { return record_; }                // pinned host memory
  device::ExpiredWait* device_record() const { return device_record_; }  // the same, GPU address

 private:
  uint32_t* words_ = nullptr;
  device::ExpiredWait* record_ = nullptr;
  device::ExpiredWait* device_record_ = nullptr;
};

// Enqueues one product. Throws Error for arguments it cannot run.
void launch_grouped_gemm(const GroupedGemmArguments& arguments, const GroupedGemmOptions& options,
                         const GroupedGemmWorkspace& workspace, cudaStream_t stream);

}  // namespace moxie::expert
