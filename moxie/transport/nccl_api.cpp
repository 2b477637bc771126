#if MOXIE_HAS_NCCL
#include "moxie/transport/nccl_api.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <cstring>
#include <thread>

#include "moxie/core/error.h"
#include "moxie/transport/cuda_memory.h"
#include "moxie/transport/nccl_window.h"

namespace moxie::transport {
namespace {

static_assert(sizeof(ncclUniqueId) == kNcclIdBytes);

// NCCL asks for multicast memory where switches offer it; nothing here uses any.
void leave_multicast_off() { ::setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0); }

ncclConfig_t nonblocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

}  // namespace

NcclApi::NcclApi(const std::string& path) : library(NcclLibrary::load(path)) {
  const auto get = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library.symbol(name));
  };
  get(get_unique_id, "ncclGetUniqueId");
  get(get_error_string, "ncclGetErrorString");
  get(get_last_error, "ncclGetLastError");
  get(comm_init_rank_config, "ncclCommInitRankConfig");
  get(comm_split, "ncclCommSplit");
  get(comm_get_async_error, "ncclCommGetAsyncError");
  get(comm_abort, "ncclCommAbort");
  get(comm_count, "ncclCommCount");
  get(comm_user_rank, "ncclCommUserRank");
  get(comm_cu_device, "ncclCommCuDevice");
  get(mem_alloc, "ncclMemAlloc");
  get(mem_free, "ncclMemFree");
  get(team_lsa, "ncclTeamLsa");
  get(window_register, "ncclCommWindowRegister");
  get(window_deregister, "ncclCommWindowDeregister");
  get(get_lsa_device_pointer, "ncclGetLsaDevicePointer");
}

std::string NcclApi::words(ncclResult_t result, ncclComm_t comm) const {
  std::string text =
      fmt::format("NCCL {} says '{}'", nccl_words(library.version()), get_error_string(result));
  const char* last = get_last_error(comm);
  if (last != nullptr && *last != '\0') {
    std::string details = last;
    while (!details.empty() && (details.back() == '\n' || details.back() == ' '))
      details.pop_back();
    text += fmt::format(" ({})", details);
  }
  return text;
}

std::string make_nccl_id(const std::string& library) {
  leave_multicast_off();
  const NcclApi api(library);
  ncclUniqueId id;
  const ncclResult_t result = api.get_unique_id(&id);
  if (result != ncclSuccess) {
    throw Error(ErrorCode::unavailable,
                fmt::format("no NCCL id can be had: {}", api.words(result)));
  }
  return {id.internal, sizeof(id.internal)};
}

void NcclComm::abort() {
  if (comm_ != nullptr) api_.comm_abort(std::exchange(comm_, nullptr));
}

// Waits until a nonblocking call has done its work. `late`: what to say when its time is up.
void NcclComm::finish(ncclResult_t result, const std::string& call, const std::string& late,
                      const Deadline& deadline) {
  // Some calls say success while their work has only begun (ncclCommWindowRegister of 2.28).
  if (result == ncclSuccess) result = ncclInProgress;
  while (result == ncclInProgress && comm_ != nullptr) {
    if (deadline.expired()) {
      abort();
      throw Error(ErrorCode::timeout, late);
    }
    const ncclResult_t asked = api_.comm_get_async_error(comm_, &result);
    if (asked != ncclSuccess) result = asked;
    if (result == ncclInProgress) std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  if (result == ncclSuccess) return;
  const std::string words = api_.words(result, comm_);
  abort();
  throw Error(ErrorCode::unavailable, fmt::format("{} failed: {}; make a new World", call, words));
}

void NcclComm::join(const std::string& unique_id, std::int64_t rank, std::int64_t num_ranks,
                    const Deadline& deadline) {
  leave_multicast_off();
  const DeviceGuard guard(device_);
  ncclUniqueId id;
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  ncclConfig_t config = nonblocking();
  const ncclResult_t result = api_.comm_init_rank_config(&comm_, static_cast<int>(num_ranks), id,
                                                         static_cast<int>(rank), &config);
  finish(result, fmt::format("World::nccl of rank {}", rank),
         fmt::format("not all {} ranks came to World::nccl within {} s (rank {} waited): each rank "
                     "must come once, with the same fresh id and the same num_ranks",
                     num_ranks, deadline.timeout_s(), rank),
         deadline);
}

void NcclComm::split_off(void* parent, std::int64_t rank, std::int64_t num_ranks,
                         const Deadline& deadline) {
  leave_multicast_off();
  auto* comm = static_cast<ncclComm_t>(parent);
  int ranks = 0, own = 0, device = 0;
  api_.comm_count(comm, &ranks);
  api_.comm_user_rank(comm, &own);
  api_.comm_cu_device(comm, &device);
  if (ranks != num_ranks || own != rank || device != device_) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("the communicator given to World::nccl is rank {} of {} on GPU {}, must "
                    "be what the options say: rank {} of {} on GPU {}",
                    own, ranks, device, rank, num_ranks, device_));
  }
  const DeviceGuard guard(device_);
  ncclConfig_t config = nonblocking();
  ncclResult_t result = api_.comm_split(comm, 0, own, &comm_, &config);
  while (result == ncclInProgress && comm_ == nullptr && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    const ncclResult_t asked = api_.comm_get_async_error(comm, &result);
    if (asked != ncclSuccess) result = asked;
  }
  finish(result, "ncclCommSplit",
         fmt::format("not all {} ranks came to World::nccl within {} s (rank {} waited)", num_ranks,
                     deadline.timeout_s(), rank),
         deadline);
}

ncclWindow_t NcclComm::register_window(void* memory, std::size_t num_bytes,
                                       const Deadline& deadline) {
  const DeviceGuard guard(device_);
  ncclWindow_t window = nullptr;
  const ncclResult_t result =
      api_.window_register(comm_, memory, num_bytes, &window, NCCL_WIN_DEFAULT);
  finish(result, "ncclCommWindowRegister",
         fmt::format("a rank did not register its memory with NCCL within {} s; make a new World",
                     deadline.timeout_s()),
         deadline);
  return window;
}

void NcclComm::deregister_window(ncclWindow_t window) {
  if (comm_ != nullptr && window != nullptr) api_.window_deregister(comm_, window);
}

}  // namespace moxie::transport
#endif
