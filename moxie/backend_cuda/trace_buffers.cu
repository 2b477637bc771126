// Contract: trace_buffers.h.
#include "moxie/backend_cuda/trace_buffers.h"

#include <algorithm>

#include "moxie/backend_cuda/sentence.h"

namespace moxie::backend_cuda {

using trace::DeviceEvent;

void TraceBuffers::bind(bool traced, std::int64_t rank, int device, std::int32_t num_ctas,
                        std::int32_t capacity, PassRank& params) {
  params.events = nullptr;
  if (!traced) return;
  const auto idx = static_cast<std::size_t>(rank);
  if (ranks_.size() <= idx) ranks_.resize(idx + 1);
  Rank& r = ranks_[idx];
  if (r.capacity == 0) {
    const std::string what = sentence("the trace of rank {}", rank);
    const std::int64_t num_bytes =
        std::int64_t{num_ctas} * capacity * std::int64_t{sizeof(DeviceEvent)};
    r.events = DeviceBytes(device, num_bytes, what);
    r.num_events = DeviceBytes(device, std::int64_t{num_ctas} * 4, what);
    r.num_ctas = num_ctas;
    r.capacity = capacity;
    r.device = device;
  }
  const DeviceGuard guard(device);
  check_cuda(cudaMemset(r.num_events.get(), 0, static_cast<std::size_t>(num_ctas) * 4),
             "clearing a trace");
  check_cuda(cudaDeviceSynchronize(), "clearing a trace");
  params.events = r.events.as<DeviceEvent>();
  params.num_events = r.num_events.as<std::uint32_t>();
  params.event_capacity = static_cast<std::uint32_t>(capacity);
}

std::int64_t TraceBuffers::num_bytes() const {
  std::int64_t most = 0;
  for (const Rank& r : ranks_)
    most = std::max(most, r.events.num_bytes() + r.num_events.num_bytes());
  return most;
}

std::int64_t TraceBuffers::collect(trace::Trace& trace) const {
  struct HostRank {
    std::vector<DeviceEvent> events;
    std::vector<std::uint32_t> num_events;
  };
  std::vector<HostRank> host(ranks_.size());
  std::vector<trace::DeviceTrace> views;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& r = ranks_[i];
    if (r.capacity == 0) {  // of another process: no events, and no clock of its own
      views.push_back({{}, {}, 0, ranks_.back().device});
      continue;
    }
    const auto num_ctas = static_cast<std::size_t>(r.num_ctas);
    HostRank& h = host[i];
    h.events.resize(num_ctas * static_cast<std::size_t>(r.capacity));
    h.num_events.resize(num_ctas);
    check_cuda(cudaMemcpy(h.events.data(), r.events.get(), h.events.size() * sizeof(DeviceEvent),
                          cudaMemcpyDeviceToHost),
               "reading a trace");
    check_cuda(
        cudaMemcpy(h.num_events.data(), r.num_events.get(), num_ctas * 4, cudaMemcpyDeviceToHost),
        "reading a trace");
    views.push_back({h.events, h.num_events, r.capacity, r.device});
  }
  return trace::collect(views, trace);
}

}  // namespace moxie::backend_cuda
