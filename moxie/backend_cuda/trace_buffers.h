// Where a traced pass records: memory of its own on every GPU, made at the first traced pass of a
// layer.
#pragma once

#include <vector>

#include "moxie/backend_cuda/cuda_memory.h"
#include "moxie/backend_cuda/pass_params.h"

namespace moxie::backend_cuda {

class TraceBuffers {
 public:
  // Points the rank's parameters at its empty buffer, or at none. Traced: waits for the GPU.
  void bind(bool traced, std::int64_t rank, int device, std::int32_t num_ctas,
            std::int32_t capacity, PassRank& params);
  // After the pass: the events of all ranks. Returns how many were lost.
  std::int64_t collect(trace::Trace& trace) const;
  std::int64_t num_bytes() const;  // of one rank, the widest; 0 before the first traced pass

 private:
  struct Rank {
    DeviceBytes events, num_events;
    std::int32_t num_ctas = 0, capacity = 0;
    int device = 0;
  };
  std::vector<Rank> ranks_;
};

}  // namespace moxie::backend_cuda
