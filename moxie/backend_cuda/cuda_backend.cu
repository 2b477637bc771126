// Devices, heaps and failures of the CUDA backend. Contract: cuda_backend.h.
#include "moxie/backend_cuda/cuda_backend.h"

#include <algorithm>

#include "moxie/backend_cuda/cuda_layer.h"
#include "moxie/backend_cuda/sentence.h"

namespace moxie::backend_cuda {
namespace {

std::vector<int> choose_devices(const WorldOptions& options, const CudaOptions& cuda) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    unavailable(
        sentence("World::cuda found no GPU ({}); use World::cpu", cudaGetErrorString(error)));
  }
  std::vector<int> devices = cuda.devices;
  for (std::int64_t r = 0; cuda.devices.empty() && r < options.num_ranks; ++r)
    devices.push_back(static_cast<int>(r % count));
  if (static_cast<std::int64_t>(devices.size()) != options.num_ranks) {
    throw Error(
        ErrorCode::invalid_argument,
        sentence("cuda.devices has {} entries, must have one per rank; nearest legal value {}",
                 devices.size(), options.num_ranks));
  }
  for (const int device : devices) {
    if (device < 0 || device >= count) {
      throw Error(
          ErrorCode::invalid_argument,
          sentence("cuda.devices names GPU {}, must be between 0 and {}; nearest legal value {}",
                   device, count - 1, std::clamp(device, 0, count - 1)));
    }
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major != 9) {
      unavailable(
          sentence("GPU {} has compute capability {}.{}, must be 9.0 (Hopper); use World::cpu",
                   device, major, minor));
    }
  }
  return devices;
}

WaitRecord to_record(const device::ExpiredWait& e) {
  WaitRecord record;
  record.rank = static_cast<std::int32_t>(e.rank);
  record.worker = static_cast<std::int32_t>(e.cta);
  record.index = static_cast<std::int64_t>(e.index);
  record.wanted = e.wanted;
  record.seen = e.seen;
  record.epoch = e.epoch;
  record.told_by = static_cast<std::int32_t>(e.told_by) - 1;
  // A wait inside the GEMM loop (a stage, a ticket) is a task that does not come to its end.
  record.what =
      e.what >= kWaitForBase ? static_cast<WaitFor>(e.what - kWaitForBase) : WaitFor::tasks_done;
  switch (record.what) {
    case WaitFor::x_ready:
    case WaitFor::hidden_free:
    case WaitFor::fc1_done:
    case WaitFor::tasks_done: record.role = Role::compute; break;
    default: record.role = Role::comm;
  }
  return record;
}

}  // namespace

CudaBackend::CudaBackend(const WorldOptions& options, const CudaOptions& cuda)
    : options_(options),
      cuda_(cuda),
      devices_(choose_devices(options, cuda)),
      heaps_(static_cast<std::size_t>(options.num_ranks)),
      abort_flag_(devices_[0], (1 + options.num_ranks) * 4, "the abort flag"),
      expired_(static_cast<std::size_t>(options.num_ranks)),
      reports_(static_cast<std::size_t>(options.num_ranks)) {
  if (options.validate_finite) {
    unavailable(
        "validate_finite is not available in a CUDA world, whose tensors the host cannot read; use "
        "World::cpu");
  }
  find_groups();
  enable_peers();
  clear_abort_flag();
}

void CudaBackend::clear_abort_flag() {
  check_cuda(cudaMemset(abort_flag_.get(), 0, static_cast<std::size_t>(1 + num_ranks()) * 4),
             "clearing the abort flag");
}

bool CudaBackend::stopped() const {
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    if (expired_[static_cast<std::size_t>(r)].written != 0) return true;
  }
  return false;
}

CudaBackend::~CudaBackend() {
  for (const DeviceGroup& group : groups_) {
    if (group.stream != nullptr) cudaStreamDestroy(group.stream);
    if (group.event != nullptr) cudaEventDestroy(group.event);
  }
}

void CudaBackend::find_groups() {
  for (std::int64_t r = 0; r < options_.num_ranks; ++r) {
    auto group = std::find_if(groups_.begin(), groups_.end(),
                              [&](const DeviceGroup& g) { return g.device == device_of(r); });
    if (group == groups_.end()) {
      groups_.push_back({device_of(r)});
      group = std::prev(groups_.end());
      const DeviceGuard guard(group->device);
      check_cuda(cudaEventCreateWithFlags(&group->event, cudaEventDisableTiming),
                 "creating an event");
      if (groups_.size() > 1)
        check_cuda(cudaStreamCreateWithFlags(&group->stream, cudaStreamNonBlocking),
                   "creating a stream");
    }
    group->ranks.push_back(r);
    if (group->ranks.size() > kMaxLocalRanks) {
      unavailable(
          sentence("GPU {} would hold more than {} ranks, whose parameters do not fit one launch; "
                   "use World::cpu",
                   group->device, kMaxLocalRanks));
    }
  }
}

void CudaBackend::enable_peers() {
  for (const DeviceGroup& from : groups_) {
    for (const DeviceGroup& to : groups_) {
      if (from.device == to.device) continue;
      int can = 0;
      check_cuda(cudaDeviceCanAccessPeer(&can, from.device, to.device), "asking for peer access");
      if (can == 0)
        unavailable(
            sentence("GPU {} cannot access the memory of GPU {}; use GPUs of one NVLink domain",
                     from.device, to.device));
      const DeviceGuard guard(from.device);
      const cudaError_t error = cudaDeviceEnablePeerAccess(to.device, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled)
        cudaGetLastError();  // not sticky, but remembered
      else
        check_cuda(error, "enabling peer access");
    }
  }
}

void CudaBackend::synchronize_devices() const {
  for (const DeviceGroup& group : groups_) {
    const DeviceGuard guard(group.device);
    check_cuda(cudaDeviceSynchronize(), sentence("waiting for GPU {}", group.device));
  }
}

// Signals, counters and epochs from zero; legal between passes.
void CudaBackend::reset() {
  synchronize_devices();
  for (std::int64_t r = 0; heap_bytes_ > 0 && r < num_ranks(); ++r) {
    check_cuda(cudaMemset(heap(r), 0, static_cast<std::size_t>(signals_bytes_)),
               "clearing signals");
  }
  clear_abort_flag();
  for (CudaLayer* layer : layers_) layer->clear_counters();
  synchronize_devices();
  expired_.clear();
  reports_.clear();
}

// Heaps are shared by all layers. Growing them moves them: graphs captured before are stale then.
void CudaBackend::reserve(const pipeline::HeapLayout& layout) {
  signals_bytes_ = layout.signals_bytes;
  if (layout.num_bytes <= heap_bytes_) return;
  synchronize_devices();
  heap_bytes_ = layout.num_bytes;
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    DeviceBytes& mine = heaps_[static_cast<std::size_t>(r)];
    mine = DeviceBytes();  // first free, then allocate
    mine = DeviceBytes(device_of(r), heap_bytes_, sentence("the heap of rank {}", r));
  }
  for (CudaLayer* layer : layers_) layer->heaps_moved();
  reset();
}

std::string CudaBackend::describe_gemm() const {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, groups_[0].device), "reading GPU properties");
  return sentence("wgmma m64n256k16, {} x {}", groups_.size(), properties.name);
}

// Names of different GPUs are joined: such a machine is like no other.
MachineId CudaBackend::machine() const {
  MachineId id;
  id.backend = "cuda";
  for (const DeviceGroup& group : groups_) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, group.device), "reading GPU properties");
    if (id.device.empty())
      id.device = properties.name;
    else if (id.device != properties.name)
      id.device += std::string(" + ") + properties.name;
    id.num_sms = properties.multiProcessorCount;
    id.ranks_of_devices.push_back(static_cast<std::int64_t>(group.ranks.size()));
  }
  id.reserve_sms = cuda_.reserve_sms;
  id.cluster_size = cuda_.cluster_size;
  const auto words = [](int version) {
    return sentence("{}.{}", version / 1000, version % 1000 / 10);
  };
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "asking for the driver's version");
  id.driver = words(version);
  check_cuda(cudaRuntimeGetVersion(&version), "asking for the runtime's version");
  id.runtime = words(version);
  return id;
}

void CudaBackend::synchronize() {
  const DeviceGuard guard(groups_[0].device);
  check_cuda(cudaStreamSynchronize(stream_),
             "the pass");  // the other GPUs' launches are joined to this stream
  throw_if_failed();
}

void CudaBackend::throw_if_failed() {
  std::vector<WaitRecord> waits;
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    const device::ExpiredWait& expired = expired_[static_cast<std::size_t>(r)];
    if (expired.written != 0) waits.push_back(to_record(expired));
  }
  if (!waits.empty()) {
    // The sentence names the rank whose own time was up; the others were told by it.
    const auto first =
        std::find_if(waits.begin(), waits.end(), [](const WaitRecord& w) { return w.told_by < 0; });
    const std::string what =
        sentence("{} of {} ranks gave up after {} s: {}; call World::reset() before the next pass",
                 waits.size(), num_ranks(), options_.timeout_s,
                 to_string(first != waits.end() ? *first : waits.front()));
    throw Error(ErrorCode::timeout, what, std::move(waits));
  }
  for (std::int64_t r = 0; r < num_ranks(); ++r) {
    const PassReport report = reports_[static_cast<std::size_t>(r)];
    if (report.written == 0) continue;
    reports_.clear();
    if (report.written == static_cast<std::uint32_t>(pipeline::Verdict::invalid_route)) {
      throw Error(ErrorCode::invalid_route,
                  sentence("expert id of rank {} token {} slot {} is {}, must be between 0 and {} "
                           "or -1 for no route; "
                           "nearest legal value {}",
                           r, report.bad_route / problem_.top_k, report.bad_route % problem_.top_k,
                           report.bad_id, problem_.num_experts - 1,
                           report.bad_id < -1 ? -1 : problem_.num_experts - 1));
    }
    throw Error(ErrorCode::capacity_exceeded,
                sentence("rank {} would receive {} rows (padded to blocks of {}), must be at most "
                         "plan.capacity_rows {}; "
                         "nearest legal capacity_rows {}",
                         r, report.wanted_blocks * pipeline::kBlockRows, pipeline::kBlockRows,
                         plan_.capacity_rows, report.wanted_blocks * pipeline::kBlockRows));
  }
}

std::unique_ptr<BackendLayer> CudaBackend::make_layer(const Problem& problem, const Plan& plan) {
  return std::make_unique<CudaLayer>(*this, problem, plan);
}

}  // namespace moxie::backend_cuda

namespace moxie {

std::unique_ptr<Backend> make_cuda_backend(const WorldOptions& options, const CudaOptions& cuda) {
  return std::make_unique<backend_cuda::CudaBackend>(options, cuda);
}

}  // namespace moxie
