#if MOXIE_HAS_NCCL
#include "moxie/transport/nccl_window.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>

#include "moxie/core/error.h"
#include "moxie/transport/cuda_memory.h"
#include "moxie/transport/nccl_api.h"
#include "moxie/transport/nccl_pointers.h"

namespace moxie::transport {
namespace {

// What peers write into a rank's memory to meet it. Copies do it, no kernel: a GPU that is full of
// somebody's kernel does not matter. A text is written before its word, so whoever sees the word
// reads the text. Two banks of texts: a rank writes into a bank again two meetings later, which
// begin only after every rank has come to the meeting between, and so has read the first.
constexpr std::int64_t kMaxNcclRanks = 64;
struct Board {
  std::uint64_t came[kMaxNcclRanks];  // by peer: how many meetings it has come to
  std::uint64_t left[kMaxNcclRanks];  // by peer: a Farewell
  char texts[2][kMaxNcclRanks][4096];
  char reasons[kMaxNcclRanks][4096];  // of those who gave up
};
enum Farewell : std::uint64_t { kStays = 0, kClosed = 1, kGaveUp = 2 };
struct Words {
  std::uint64_t came[kMaxNcclRanks], left[kMaxNcclRanks];
};
static_assert(offsetof(Board, texts) == sizeof(Words));

struct HostCopies {
  Words words;
  std::uint64_t word;
  char text[4096];
  char texts[kMaxNcclRanks][4096];
  void* addresses[kMaxNcclRanks];
};

// For destructors: an error has nobody to go to, and the caller's GPU stays current.
template <class Work>
void on_device(int device, const Work& work) noexcept {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return;
  work();
  cudaGetLastError();
  cudaSetDevice(before);
}

// Blocks that only this rank's GPU sees.
class PrivateBlocks final : public RankBlocks {
 public:
  PrivateBlocks(const NcclRankOptions& o, std::int64_t num_bytes, const std::string& what)
      : bytes_(o.device, num_bytes, what) {
    bases_.assign(static_cast<std::size_t>(o.num_ranks), nullptr);
    bases_[static_cast<std::size_t>(o.rank)] = bytes_.get();
  }

 private:
  DeviceBytes bytes_;
};

// A window: this rank's memory, mapped into every rank. Peers that have it mapped keep the memory
// alive, so freeing this end asks nobody.
class WindowBlocks final : public RankBlocks {
 public:
  WindowBlocks(std::shared_ptr<NcclComm> comm, const NcclRankOptions& o, std::int64_t num_bytes,
               const std::string& what)
      : comm_(std::move(comm)), options_(o), num_bytes_(static_cast<std::size_t>(num_bytes)) {
    const DeviceGuard guard(o.device);
    const ncclResult_t result = comm_->api().mem_alloc(&memory_, num_bytes_);
    if (result != ncclSuccess) {
      throw Error(ErrorCode::unavailable,
                  fmt::format("allocating {} bytes for {} on GPU {} failed: {}", num_bytes, what,
                              o.device, comm_->api().words(result)));
    }
  }
  ~WindowBlocks() override {
    on_device(options_.device, [&] {
      cudaDeviceSynchronize();  // unmapping does not wait for the passes, as cudaFree would
      comm_->deregister_window(window_);
      comm_->api().mem_free(memory_);
    });
  }

  void clear(cudaStream_t stream) const {
    check_cuda(cudaMemsetAsync(memory_, 0, num_bytes_, stream), "clearing a window");
    check_cuda(cudaStreamSynchronize(stream), "clearing a window");
  }
  // Every rank at once.
  void map(cudaStream_t stream, HostCopies& host, void** host_addresses, const Deadline& deadline) {
    window_ = comm_->register_window(memory_, num_bytes_, deadline);
    require_symmetric();
    const DeviceGuard guard(options_.device);
    const NcclApi& api = comm_->api();
    for (std::int64_t r = 0; r < options_.num_ranks; ++r) host.addresses[r] = nullptr;
    if (api.get_lsa_device_pointer != nullptr) {
      for (std::int64_t r = 0; r < options_.num_ranks; ++r) {
        const ncclResult_t result =
            api.get_lsa_device_pointer(window_, 0, static_cast<int>(r), &host.addresses[r]);
        if (result != ncclSuccess) refuse(api.words(result));
      }
    } else {
      check_cuda(read_window_addresses(window_, static_cast<int>(options_.num_ranks),
                                       host_addresses, stream),
                 "reading the addresses of a window");
      check_cuda(cudaStreamSynchronize(stream), "reading the addresses of a window");
    }
    host.addresses[options_.rank] = memory_;
    for (std::int64_t r = 0; r < options_.num_ranks; ++r) {
      if (host.addresses[r] == nullptr) refuse(fmt::format("rank {} has no address in it", r));
      bases_.push_back(static_cast<std::byte*>(host.addresses[r]));
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(ErrorCode::unavailable,
                fmt::format("NCCL {} gave rank {} (GPU {}) no symmetric window: {}; the ranks' GPUs "
                            "must reach each other's memory, and neither NCCL_CUMEM_ENABLE nor "
                            "NCCL_WIN_ENABLE may be 0",
                            nccl_words(comm_->api().library.version()), options_.rank,
                            options_.device, why));
  }
  // Where it cannot map memory, registration succeeds all the same: with no window, or with a
  // handle that is none.
  void require_symmetric() const {
    if (window_ == nullptr) refuse("registration succeeded without a window");
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, window_);
    if (error != cudaSuccess) cudaGetLastError();
    if (error != cudaSuccess || attributes.type != cudaMemoryTypeDevice)
      refuse("the registration is a local one");
  }

  std::shared_ptr<NcclComm> comm_;
  const NcclRankOptions options_;
  std::size_t num_bytes_;
  void* memory_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

// The ranks of one NVLink domain are neighbours; NCCL makes all domains equally large.
void require_one_domain(const NcclRankOptions& o, const NcclComm& comm) {
  const ncclTeam_t team = comm.lsa_team();
  if (team.nRanks == o.num_ranks) return;
  if (team.nRanks < 1) {
    throw Error(ErrorCode::unavailable, "NCCL does not say which ranks share memory; make a new "
                                        "World, with NCCL_DEBUG=WARN to see why");
  }
  std::string domains;
  for (std::int64_t first = 0; first < o.num_ranks; first += team.nRanks) {
    const std::int64_t last = first + team.nRanks - 1;
    domains += fmt::format("{}{}", domains.empty() ? "" : ", ",
                           first == last ? std::to_string(first) : fmt::format("{}-{}", first, last));
  }
  throw Error(ErrorCode::unavailable,
              fmt::format("the {} ranks of World::nccl do not share one NVLink domain, must: those "
                          "that do are ranks {}; make a World of each of these groups (expert "
                          "parallel inside a domain) and average gradients across them (data "
                          "parallel); nearest legal num_ranks {}",
                          o.num_ranks, domains, team.nRanks));
}

class NcclRanks final : public GpuRanks {
 public:
  explicit NcclRanks(const NcclRankOptions& options) : options_(options) {
    const Deadline deadline(options.timeout_s);
    comm_ = std::make_shared<NcclComm>(NcclApi(options.library), options.device);
    if (options.comm != nullptr)
      comm_->split_off(options.comm, options.rank, options.num_ranks, deadline);
    else
      comm_->join(options.unique_id, options.rank, options.num_ranks, deadline);
    require_one_domain(options, *comm_);
    const DeviceGuard guard(options.device);
    host_ = std::make_unique<MappedHost<HostCopies>>(1);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    try {
      auto board = std::make_unique<WindowBlocks>(
          comm_, options, static_cast<std::int64_t>(sizeof(Board)), "the board of a rank");
      board->clear(stream_);
      board->map(stream_, host(), device_addresses(), deadline);
      board_ = std::move(board);
      introduce();
    } catch (...) {
      end();
      throw;
    }
  }
  ~NcclRanks() override { end(); }

  bool of_processes() const override { return true; }
  bool lost() const override { return !ended_because_.empty(); }

  std::unique_ptr<RankBlocks> allocate(std::int64_t num_bytes, const char* what, SeenBy seen_by,
                                       double timeout_s) override {
    const DeviceGuard guard(options_.device);
    const std::string name = fmt::format("{} of rank {}", what, options_.rank);
    if (seen_by == SeenBy::own_gpu) {
      auto blocks = std::make_unique<PrivateBlocks>(options_, num_bytes, name);
      std::byte* own = blocks->of(options_.rank);
      if (num_bytes > 0) {
        check_cuda(cudaMemsetAsync(own, 0, static_cast<std::size_t>(num_bytes), stream_), "clearing");
        check_cuda(cudaStreamSynchronize(stream_), "clearing");
      }
      return blocks;
    }
    // All have their memory, or nobody registers any.
    std::unique_ptr<WindowBlocks> blocks;
    std::string failure;
    try {
      blocks = std::make_unique<WindowBlocks>(comm_, options_, num_bytes, name);
      blocks->clear(stream_);
    } catch (const Error& error) {
      failure = error.what();
    }
    const Deadline deadline(timeout_s);
    const std::vector<std::string> all =
        all_gather(fmt::format("the allocation of {}", what).c_str(), failure, timeout_s);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (!all[r].empty())
        throw Error(ErrorCode::unavailable, fmt::format("rank {}: {}", r, all[r]));
    }
    try {
      blocks->map(stream_, host(), device_addresses(), deadline);
    } catch (const Error& error) {
      give_up(error.what());
      throw;
    }
    return blocks;
  }

  std::vector<std::string> all_gather(const char* what, const std::string& text,
                                      double timeout_s) override {
    if (!ended_because_.empty()) {
      throw Error(ErrorCode::timeout, fmt::format("{} was called on a World whose ranks have lost "
                                                  "each other: {}; make a new World",
                                                  what, ended_because_));
    }
    const DeviceGuard guard(options_.device);
    const Deadline deadline(timeout_s);
    const std::uint64_t meeting = ++num_meetings_;
    const std::size_t bank = meeting % 2;
    const auto num_ranks = static_cast<std::size_t>(options_.num_ranks),
               own = static_cast<std::size_t>(options_.rank);
    const std::string message =
        std::string(what) + '\n' + text.substr(0, kMaxMeetingText - std::strlen(what));
    check_cuda(tell(offsetof(Board, texts) + (bank * kMaxNcclRanks + own) * 4096, message,
                    offsetof(Board, came) + own * 8, meeting),
               "writing to the other ranks");
    wait_for_all(what, meeting, deadline);
    read(host().texts, offsetof(Board, texts) + bank * kMaxNcclRanks * 4096, num_ranks * 4096);
    std::vector<std::string> texts;
    for (std::size_t r = 0; r < num_ranks; ++r) {
      const std::string said = r == own ? message : host().texts[r];
      const std::size_t end = said.find('\n');
      if (said.substr(0, end) != what) {
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("rank {} came to {} ({}) where rank {} came to {}, must be the same "
                                "on every rank, in the same order",
                                r, said.substr(0, end), said.substr(end + 1), own, what));
      }
      texts.push_back(said.substr(end + 1));
    }
    return texts;
  }

 private:
  HostCopies& host() { return (*host_)[0]; }
  void** device_addresses() { return host_->device_pointer()->addresses; }

  // A text and then a word into every peer's board. Errors are the caller's to judge.
  cudaError_t tell(std::size_t text_at, const std::string& text, std::size_t word_at,
                   std::uint64_t word) {
    std::memcpy(host().text, text.c_str(), text.size() + 1);
    host().word = word;
    const auto to_peers = [&](std::size_t at, const void* from, std::size_t num_bytes) {
      for (std::int64_t r = 0; r < options_.num_ranks; ++r) {
        if (r == options_.rank) continue;
        const cudaError_t error = cudaMemcpyAsync(board_->of(r) + at, from, num_bytes,
                                                  cudaMemcpyHostToDevice, stream_);
        if (error != cudaSuccess) return error;
      }
      return cudaStreamSynchronize(stream_);  // the text is there before the word
    };
    const cudaError_t error = to_peers(text_at, host().text, text.size() + 1);
    return error != cudaSuccess ? error : to_peers(word_at, &host().word, 8);
  }

  void read(void* into, std::size_t at, std::size_t num_bytes) {
    check_cuda(cudaMemcpyAsync(into, board_->of(options_.rank) + at, num_bytes,
                               cudaMemcpyDeviceToHost, stream_),
               "reading what the other ranks wrote");
    check_cuda(cudaStreamSynchronize(stream_), "reading what the other ranks wrote");
  }

  void wait_for_all(const char* what, std::uint64_t meeting, const Deadline& deadline) {
    for (std::int64_t polls = 0;; ++polls) {
      read(&host().words, 0, sizeof(Words));
      std::string missing;
      for (std::int64_t r = 0; r < options_.num_ranks; ++r) {
        if (r == options_.rank || host().words.came[r] >= meeting) continue;
        if (host().words.left[r] == kGaveUp) {
          read(host().text, offsetof(Board, reasons) + static_cast<std::size_t>(r) * 4096, 4096);
          lose(fmt::format("rank {} gave up: {}", r, host().text));
        }
        if (host().words.left[r] == kClosed)
          lose(fmt::format("rank {} did not come to {}: it has closed its World", r, what));
        missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
      if (missing.empty()) return;
      if (deadline.expired()) {
        const std::string reason =
            fmt::format("rank {} of {} did not come to {} within {} s", missing, options_.num_ranks,
                        what, deadline.timeout_s());
        give_up(reason);
        lose(reason);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(polls < 100 ? 20 : 1000));
    }
  }

  [[noreturn]] void lose(const std::string& reason) {
    ended_because_ = reason;
    throw Error(ErrorCode::timeout, reason + "; make a new World");
  }
  // Tells the peers, who may still come.
  void give_up(const std::string& reason) {
    const auto own = static_cast<std::size_t>(options_.rank);
    ended_because_ = reason;
    tell(offsetof(Board, reasons) + own * 4096, reason.substr(0, kMaxMeetingText),
         offsetof(Board, left) + own * 8, kGaveUp);
    cudaGetLastError();
  }

  // Who is there must be of the same make: layouts and signals are.
  void introduce() {
    const std::string own =
        fmt::format("{}, NCCL {}", options_.description, nccl_words(comm_->api().library.version()));
    const std::vector<std::string> all = all_gather("World::nccl", own, options_.timeout_s);
    for (std::size_t r = 1; r < all.size(); ++r) {
      if (all[r] == all[0]) continue;
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("rank {} is {}, rank 0 is {}; must be the same on every rank", r,
                              all[r], all[0]));
    }
  }

  void end() noexcept {
    on_device(options_.device, [&] {
      if (board_ && ended_because_.empty()) {
        const auto own = static_cast<std::size_t>(options_.rank);
        tell(offsetof(Board, reasons) + own * 4096, "", offsetof(Board, left) + own * 8, kClosed);
      }
      board_.reset();
      if (stream_ != nullptr) cudaStreamDestroy(std::exchange(stream_, nullptr));
    });
    comm_.reset();  // windows that still live keep it
  }

  const NcclRankOptions options_;
  std::shared_ptr<NcclComm> comm_;
  std::unique_ptr<MappedHost<HostCopies>> host_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<WindowBlocks> board_;
  std::uint64_t num_meetings_ = 0;
  std::string ended_because_;  // not empty: nobody can meet any more
};

}  // namespace

std::unique_ptr<GpuRanks> make_nccl_ranks(const NcclRankOptions& options) {
  return std::make_unique<NcclRanks>(options);
}

}  // namespace moxie::transport
#endif
