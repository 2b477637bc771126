// Devices, heaps and failures of the CUDA backend. Contract: cuda_backend.h.
#include "moxie/backend_cuda/cuda_backend.h"

#include <algorithm>
#include <string_view>

#include "moxie/backend_cuda/cuda_layer.h"
#include "moxie/backend_cuda/sentence.h"
#include "moxie/transport/local_gpu_ranks.h"

namespace moxie::backend_cuda {
namespace {

void check_device(const char* what, int device, int count) {
  if (device < 0 || device >= count) {
    throw Error(ErrorCode::invalid_argument,
                sentence("{} names GPU {}, must be between 0 and {}; nearest legal value {}", what,
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

void check_options(const WorldOptions& options) {
  if (options.validate_finite) {
    unavailable(
        "validate_finite is not available in a CUDA world, whose tensors the host cannot read; use "
        "World::cpu");
  }
}

// World::cuda and World::nccl, `instead` works without a GPU.
int count_devices(const char* world, const char* instead) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0)
    unavailable(
        sentence("{} found no GPU ({}); use {}", world, cudaGetErrorString(error), instead));
  return count;
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

std::vector<int> choose_devices(const WorldOptions& options, const CudaOptions& cuda) {
  check_options(options);
  const int count = count_devices("World::cuda", "World::cpu");
  std::vector<int> devices = cuda.devices;
  for (std::int64_t r = 0; cuda.devices.empty() && r < options.num_ranks; ++r)
    devices.push_back(static_cast<int>(r % count));
  if (static_cast<std::int64_t>(devices.size()) != options.num_ranks) {
    throw Error(ErrorCode::invalid_argument,
                sentence("cuda.devices has {} entries, must have one per rank; nearest legal value "
                         "{}",
                         devices.size(), options.num_ranks));
  }
  for (const int device : devices) check_device("cuda.devices", device, count);
  return devices;
}

int choose_device(const WorldOptions& options, int device) {
  check_options(options);
  const int count = count_devices("World::nccl", "World::cpu_process");
  if (device < 0) check_cuda(cudaGetDevice(&device), "asking for the current GPU");
  check_device("device", device, count);
  return device;
}

CudaBackend::CudaBackend(const WorldOptions& options, const CudaOptions& cuda,
                         std::vector<int> devices, RankRange local,
                         std::unique_ptr<transport::GpuRanks> ranks)
    : options_(options),
      cuda_(cuda),
      local_(local),
      devices_(std::move(devices)),
      ranks_(std::move(ranks)),
      expired_(static_cast<std::size_t>(options.num_ranks)),
      reports_(static_cast<std::size_t>(options.num_ranks)) {
  for (std::int64_t i = 0; i < local.count; ++i) ranks_here_.push_back(local.begin + i);
  find_groups();
  enable_peers();
  abort_words_ = allocate((1 + num_ranks()) * 4, "the abort flag", transport::SeenBy::all_ranks);
}

void CudaBackend::clear_abort_flag() {
  if (local_.begin != 0) return;  // of another process, which does
  const DeviceGuard guard(device_of(0));
  check_cuda(cudaMemset(abort_flag(), 0, static_cast<std::size_t>(1 + num_ranks()) * 4),
             "clearing the abort flag");
}

// Of all ranks where they are processes; what one of them found wrong, all throw.
std::vector<std::string> CudaBackend::meet(const char* what, const std::string& text) {
  if (!of_processes()) return {};
  return ranks_->all_gather(what, text, options_.timeout_s);
}

// Where ranks are processes, they meet before memory that all see is there, and hear of what went
// wrong.
std::unique_ptr<transport::RankBlocks> CudaBackend::allocate(std::int64_t num_bytes,
                                                             const char* what,
                                                             transport::SeenBy seen_by) {
  try {
    return ranks_->allocate(num_bytes, what, seen_by, options_.timeout_s);
  } catch (const Error&) {
    called_off_ = seen_by == transport::SeenBy::all_ranks;
    throw;
  }
}

bool CudaBackend::stopped() const {
  if (ranks_->lost()) return true;
  for (const std::int64_t r : ranks_here_) {
    if (expired_[static_cast<std::size_t>(r)].written != 0) return true;
  }
  return false;
}

CudaBackend::~CudaBackend() {
  for (const DeviceGroup& group : groups_) {
    transport::on_device(group.device, [] { cudaDeviceSynchronize(); });  // the last pass
    if (group.stream != nullptr) cudaStreamDestroy(group.stream);
    if (group.event != nullptr) cudaEventDestroy(group.event);
  }
}

void CudaBackend::detach(CudaLayer* layer) {
  std::erase(layers_, layer);
  if (last_layer_ == layer) last_layer_ = nullptr;
}

void CudaBackend::find_groups() {
  for (const std::int64_t r : ranks_here_) {
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

// Signals, counters and epochs from zero; legal between passes. Peers write into this heap until
// they come here, and again as soon as they leave.
void CudaBackend::reset() {
  synchronize_devices();
  meet("World::reset()", "");
  clear_words();
  meet("World::reset()", "");
}

void CudaBackend::clear_words() {
  for (const std::int64_t r : ranks_here_) {
    if (heap_bytes_ == 0) break;
    const DeviceGuard guard(device_of(r));
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
// Ranks of other processes meet before anybody lets go of the old ones, and after that nobody is in
// a pass of before; they meet again when a layer is complete (make_layer), so nobody begins a pass
// while a peer still clears.
void CudaBackend::reserve(const pipeline::HeapLayout& layout) {
  signals_bytes_ = layout.signals_bytes;
  if (layout.num_bytes <= heap_bytes_) return;
  synchronize_devices();
  if (!of_processes()) heaps_.reset();  // first free, then allocate
  heaps_ = allocate(layout.num_bytes, "the heap", transport::SeenBy::all_ranks);
  heap_bytes_ = layout.num_bytes;
  for (CudaLayer* layer : layers_) layer->heaps_moved();
  clear_words();
}

std::unique_ptr<transport::RankBlocks> CudaBackend::make_workspaces(std::int64_t num_bytes,
                                                                    const Plan& plan) {
  const bool pushes = plan.dispatch == DispatchMode::push;
  return allocate(num_bytes, "the workspace",
                  pushes ? transport::SeenBy::all_ranks : transport::SeenBy::own_gpu);
}

std::string CudaBackend::describe_gemm() const {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, groups_[0].device), "reading GPU properties");
  return sentence("wgmma m64n256k16, {} x {}",
                  of_processes() ? static_cast<std::size_t>(num_ranks()) : groups_.size(),
                  properties.name);
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
  if (of_processes()) id.ranks_of_devices.assign(static_cast<std::size_t>(num_ranks()), 1);
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
  for (const std::int64_t r : ranks_here_) {
    const device::ExpiredWait& expired = expired_[static_cast<std::size_t>(r)];
    if (expired.written != 0) waits.push_back(to_record(expired));
  }
  if (!waits.empty()) {
    // The sentence names the rank whose own time was up; the others were told by it.
    const auto first =
        std::find_if(waits.begin(), waits.end(), [](const WaitRecord& w) { return w.told_by < 0; });
    const std::string who = of_processes()  // others tell in their own processes
                                ? sentence("rank {}", waits.front().rank)
                                : sentence("{} of {} ranks", waits.size(), num_ranks());
    const std::string what =
        sentence("{} gave up after {} s: {}; call World::reset() before the next pass", who,
                 options_.timeout_s, to_string(first != waits.end() ? *first : waits.front()));
    throw Error(ErrorCode::timeout, what, std::move(waits));
  }
  for (const std::int64_t r : ranks_here_) {
    const PassReport report = reports_[static_cast<std::size_t>(r)];
    if (report.written == 0) continue;
    reports_.clear();
    throw_if_called_off(report, r);
  }
  // Called off because of a rank of another process, which says why.
  if (!of_processes() || last_layer_ == nullptr) return;
  const pipeline::Verdict verdict = last_layer_->last_verdict(local_.begin);
  if (verdict == pipeline::Verdict::invalid_route) {
    throw Error(ErrorCode::invalid_route,
                sentence("the pass was called off: rank {} is told that another rank has an expert "
                         "id that is not between 0 and {} or -1",
                         local_.begin, problem_.num_experts - 1));
  }
  if (verdict == pipeline::Verdict::capacity_exceeded) {
    throw Error(ErrorCode::capacity_exceeded,
                sentence("the pass was called off: rank {} is told that another rank would receive "
                         "more rows than plan.capacity_rows {}",
                         local_.begin, plan_.capacity_rows));
  }
}

void CudaBackend::throw_if_called_off(const PassReport& report, std::int64_t r) {
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

constexpr std::string_view kRefused = "refused: ";

// Every rank makes the layer, or none: what one alone cannot do (memory, an option of its own), all
// hear of when they are done.
std::unique_ptr<BackendLayer> CudaBackend::make_layer(const Problem& problem, const Plan& plan) {
  if (!of_processes()) return std::make_unique<CudaLayer>(*this, problem, plan);
  check_same_layer(meet("Layer()", layer_words(problem, plan)), plan);
  std::unique_ptr<CudaLayer> layer;
  called_off_ = false;
  try {
    layer = std::make_unique<CudaLayer>(*this, problem, plan);
  } catch (const Error& error) {
    if (!called_off_) refuse_layer(error.what());
    throw;
  }
  const std::vector<std::string> all = meet("Layer()", "made");
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].starts_with(kRefused))
      unavailable(sentence("rank {} cannot make the layer: {}", r, all[r].substr(kRefused.size())));
  }
  return layer;
}

void CudaBackend::refuse_layer(const std::string& sentence) {
  if (!of_processes()) return;
  try {
    meet("Layer()", std::string(kRefused) + sentence);
  } catch (const Error&) {  // the caller throws what is wrong here
  }
}

}  // namespace moxie::backend_cuda

namespace moxie {

using backend_cuda::CudaBackend;

std::unique_ptr<Backend> make_cuda_backend(const WorldOptions& options, const CudaOptions& cuda) {
  std::vector<int> devices = backend_cuda::choose_devices(options, cuda);
  auto ranks = transport::make_local_gpu_ranks(devices);
  return std::make_unique<CudaBackend>(options, cuda, std::move(devices),
                                       RankRange{0, options.num_ranks}, std::move(ranks));
}

}  // namespace moxie
