#if MOXIE_HAS_NCCL
#include "moxie/transport/nccl_window.h"

#include <fmt/format.h>

#include "moxie/core/error.h"
#include "moxie/transport/cuda_memory.h"
#include "moxie/transport/meeting_board.h"
#include "moxie/transport/window_blocks.h"

namespace moxie::transport {
namespace {

// Blocks that only this rank's GPU sees.
class PrivateBlocks final : public RankBlocks {
 public:
  PrivateBlocks(const NcclRankOptions& o, std::int64_t num_bytes, const std::string& what)
      : RankBlocks(num_bytes), bytes_(o.device, num_bytes, what) {
    bases_.assign(static_cast<std::size_t>(o.num_ranks), nullptr);
    bases_[static_cast<std::size_t>(o.rank)] = bytes_.get();
    if (num_bytes == 0) return;
    const DeviceGuard guard(o.device);
    const CudaStream stream;
    check_cuda(cudaMemsetAsync(bytes_.get(), 0, static_cast<std::size_t>(num_bytes), stream.get()),
               "clearing " + what);
    stream.synchronize("clearing " + what);
  }

 private:
  DeviceBytes bytes_;
};

// The ranks of one NVLink domain are neighbours; NCCL makes all domains equally large.
void require_one_domain(const NcclRankOptions& o, const NcclComm& comm) {
  const ncclTeam_t team = comm.lsa_team();
  if (team.nRanks == o.num_ranks) return;
  if (team.nRanks < 1) {
    throw Error(ErrorCode::unavailable,
                "NCCL does not say which ranks share memory; make a new World, with "
                "NCCL_DEBUG=WARN to see why");
  }
  std::string domains;
  for (std::int64_t first = 0; first < o.num_ranks; first += team.nRanks) {
    const std::int64_t last = first + team.nRanks - 1;
    domains += domains.empty() ? "" : ", ";
    domains += first == last ? std::to_string(first) : fmt::format("{}-{}", first, last);
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
  explicit NcclRanks(const NcclRankOptions& options)
      : options_(options),
        comm_(std::make_shared<NcclComm>(NcclApi(options.library), options.device)) {
    const Deadline deadline(options.timeout_s);
    if (options.comm != nullptr)
      comm_->split_off(options.comm, options.rank, options.num_ranks, deadline);
    else
      comm_->join(options.unique_id, options.rank, options.num_ranks, deadline);
    require_one_domain(options, *comm_);
    auto blocks = std::make_unique<WindowBlocks>(comm_, MeetingBoard::kNumBytes,
                                                 fmt::format("the board of rank {}", options.rank));
    blocks->map(options.rank, options.num_ranks, deadline);
    board_ = std::make_unique<MeetingBoard>(std::move(blocks), options.rank, options.num_ranks,
                                            options.device);
    introduce();
  }

  bool of_processes() const override { return true; }
  bool lost() const override { return board_->lost(); }
  std::int64_t meeting_bytes() const override { return MeetingBoard::kNumBytes; }

  std::vector<std::string> all_gather(const char* what, const std::string& text,
                                      double timeout_s) override {
    return board_->all_gather(what, text, timeout_s);
  }

  std::unique_ptr<RankBlocks> allocate(std::int64_t num_bytes, const char* what, SeenBy seen_by,
                                       double timeout_s) override {
    const std::string name = fmt::format("{} of rank {}", what, options_.rank);
    if (seen_by == SeenBy::own_gpu)
      return std::make_unique<PrivateBlocks>(options_, num_bytes, name);
    // All have their memory, or nobody maps any.
    std::unique_ptr<WindowBlocks> blocks;
    std::string failure;
    try {
      blocks = std::make_unique<WindowBlocks>(comm_, num_bytes, name);
    } catch (const Error& error) {
      failure = error.what();
    }
    const std::vector<std::string> failures =
        board_->all_gather(fmt::format("the allocation of {}", what), failure, timeout_s);
    for (std::size_t r = 0; r < failures.size(); ++r) {
      if (!failures[r].empty())
        throw Error(ErrorCode::unavailable, fmt::format("rank {}: {}", r, failures[r]));
    }
    try {
      blocks->map(options_.rank, options_.num_ranks, Deadline(timeout_s));
    } catch (const Error& error) {
      board_->give_up(error.what());
      throw;
    }
    return blocks;
  }

 private:
  // Who is there must be of the same make: layouts and signals are.
  void introduce() {
    const std::string own = fmt::format("{} with NCCL {}", options_.description,
                                        nccl_words(comm_->api().library.version()));
    const std::vector<std::string> all = board_->all_gather("World::nccl", own, options_.timeout_s);
    for (std::size_t r = 1; r < all.size(); ++r) {
      if (all[r] == all[0]) continue;
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("rank {} is {}, rank 0 is {}; must be the same on every rank", r,
                              all[r], all[0]));
    }
  }

  const NcclRankOptions options_;
  std::shared_ptr<NcclComm> comm_;  // windows that still live keep it
  std::unique_ptr<MeetingBoard> board_;
};

}  // namespace

std::unique_ptr<GpuRanks> make_nccl_ranks(const NcclRankOptions& options) {
  return std::make_unique<NcclRanks>(options);
}

}  // namespace moxie::transport
#endif
