// World: it checks what the user says about the ranks and how long they wait, has the backend made,
// and passes every call on to it. Layer: layer.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "moxie/backend.h"
#include "moxie/moxie.h"
#include "moxie/transport/gpu_ranks.h"
#include "moxie/transport/nccl_window.h"

namespace moxie {
namespace {

constexpr std::int64_t kMaxCpuRanks = 1024;

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_argument, sentence);
}

void check_range(const char* what, const char* kind, std::int64_t value, std::int64_t lowest,
                 std::int64_t highest) {
  if (value < lowest || value > highest) {
    fail(fmt::format("{} of a {} world is {}, must be between {} and {}; nearest legal value {}",
                     what, kind, value, lowest, highest, std::clamp(value, lowest, highest)));
  }
}

void check_timeout(double seconds) {
  if (!(seconds >= 0)) {
    fail(fmt::format("timeout_s is {}, must be 0 (unbounded) or positive; nearest legal value 0",
                     seconds));
  }
}

// How many ranks a world of this kind can have, and how long it waits.
void check_world(const char* kind, const WorldOptions& options, std::int64_t max_ranks) {
  check_range("num_ranks", kind, options.num_ranks, 1, max_ranks);
  check_timeout(options.timeout_s);
}

// The same, and which of the ranks this process is.
void check_world_of_processes(const char* kind, const WorldOptions& options, std::int64_t rank,
                              std::int64_t max_ranks) {
  check_world(kind, options, max_ranks);
  check_range("rank", kind, rank, 0, options.num_ranks - 1);
}

#if !MOXIE_HAS_NCCL
[[noreturn]] void refuse_nccl(const char* what) {
#if MOXIE_HAS_CUDA
  constexpr const char* kMissing = "NCCL's headers";
#else
  constexpr const char* kMissing = "CUDA";
#endif
  throw Error(ErrorCode::unavailable,
              fmt::format("{} was called on a build without {}; configure with -DMOXIE_CUDA=ON "
                          "(preset cuda) where the headers of NCCL 2.28 or newer are, or use "
                          "World::cpu_process",
                          what, kMissing));
}
#endif

}  // namespace

World::World(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;
World::~World() = default;

World World::cpu(const WorldOptions& options) {
  check_world("CPU", options, kMaxCpuRanks);
  return World(make_cpu_backend(options));
}

World World::cpu_process(const WorldOptions& options, const ProcessOptions& process) {
  check_world_of_processes("CPU process", options, process.rank, kMaxCpuRanks);
  return World(make_cpu_process_backend(options, process));
}

World World::cuda(const WorldOptions& options, [[maybe_unused]] const CudaOptions& cuda) {
  check_world("CUDA", options, transport::kMaxGpuRanks);
#if MOXIE_HAS_CUDA
  return World(make_cuda_backend(options, cuda));
#else
  throw Error(ErrorCode::unavailable,
              "World::cuda was called on a build without CUDA; configure with -DMOXIE_CUDA=ON "
              "(preset cuda) or use World::cpu");
#endif
}

World World::nccl(const WorldOptions& options, const NcclOptions& nccl) {
  check_world_of_processes("NCCL", options, nccl.rank, transport::kMaxGpuRanks);
  if (nccl.comm == nullptr && nccl.unique_id.size() != transport::kNcclIdBytes) {
    fail(
        fmt::format("unique_id of a NCCL world has {} bytes, must have {}: those of "
                    "nccl_unique_id(), from one rank to all",
                    nccl.unique_id.size(), transport::kNcclIdBytes));
  }
  if (nccl.comm != nullptr && !nccl.unique_id.empty())
    fail("a NCCL world was given unique_id and comm, must be one of them");
#if MOXIE_HAS_NCCL
  return World(make_nccl_backend(options, nccl));
#else
  refuse_nccl("World::nccl");
#endif
}

std::string nccl_unique_id([[maybe_unused]] const std::string& library) {
#if MOXIE_HAS_NCCL
  return make_nccl_unique_id(library);
#else
  refuse_nccl("nccl_unique_id");
#endif
}

std::int64_t World::num_ranks() const { return backend_->num_ranks(); }
RankRange World::local_ranks() const { return backend_->local_ranks(); }
bool World::stopped() const { return backend_->stopped(); }
void World::reset() { backend_->reset(); }
void World::set_timeout(double seconds) {
  check_timeout(seconds);
  backend_->set_timeout(seconds);
}
void World::set_faults(const FaultInjection& faults) { backend_->set_faults(faults); }
void World::set_stream(void* stream) { backend_->set_stream(stream); }
void World::synchronize() { backend_->synchronize(); }
std::string World::describe_gemm() const { return backend_->describe_gemm(); }
MachineId World::machine() const { return backend_->machine(); }

}  // namespace moxie
