// NCCL's functions by name, with the types of the headers that this was built with (2.28), and the
// owner of a communicator whose every call ends within a time limit.
#pragma once
#include <nccl.h>
#include <nccl_device/core.h>

#include <cstdint>
#include <string>

#include "moxie/transport/deadline.h"
#include "moxie/transport/nccl_library.h"

namespace moxie::transport {

struct NcclApi {
  explicit NcclApi(const std::string& path);

  NcclLibrary library;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclGetErrorString) get_error_string;
  decltype(&::ncclGetLastError) get_last_error;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&::ncclCommSplit) comm_split;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclCommCount) comm_count;
  decltype(&::ncclCommUserRank) comm_user_rank;
  decltype(&::ncclCommCuDevice) comm_cu_device;
  decltype(&::ncclMemAlloc) mem_alloc;
  decltype(&::ncclMemFree) mem_free;
  ncclTeam_t (*team_lsa)(ncclComm_t);
  decltype(&::ncclCommWindowRegister) window_register;
  decltype(&::ncclCommWindowDeregister) window_deregister;
  // From 2.29 on, else null.
  ncclResult_t (*get_lsa_device_pointer)(ncclWindow_t, std::size_t, int, void**);

  // "NCCL 2.28.9 says 'unhandled system error' (...)".
  std::string words(ncclResult_t result, ncclComm_t comm = nullptr) const;
};

// A communicator of our own, nonblocking. Nothing is in flight on it when it is destroyed, and
// ending it waits for nobody.
class NcclComm {
 public:
  NcclComm(NcclApi api, int device) : api_(std::move(api)), device_(device) {}
  ~NcclComm() { abort(); }
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Each throws Error(timeout) when not all ranks come, Error(unavailable) when NCCL fails; the
  // communicator is gone then.
  void join(const std::string& unique_id, std::int64_t rank, std::int64_t num_ranks,
            const Deadline& deadline);
  void split_off(void* parent, std::int64_t rank, std::int64_t num_ranks, const Deadline& deadline);
  ncclWindow_t register_window(void* memory, std::size_t num_bytes, const Deadline& deadline);

  void deregister_window(ncclWindow_t window);  // waits for nobody; no error to report
  void abort();
  ncclTeam_t lsa_team() const { return api_.team_lsa(comm_); }
  const NcclApi& api() const { return api_; }
  int device() const { return device_; }

 private:
  void finish(ncclResult_t result, const std::string& call, const std::string& late,
              const Deadline& deadline);

  NcclApi api_;
  int device_;
  ncclComm_t comm_ = nullptr;
};

}  // namespace moxie::transport
