// Ranks with a GPU and a process (or thread) each, over NCCL: the bits of ranks that share a
// process, one error on every rank, and ranks that come late, never, or die in the middle. Skips
// without two GPUs (the first test: without one), and where NCCL is not to be found.
#include <filesystem>
#include <set>
#include <thread>

#include "moxie/transport/nccl_library.h"
#include "tests/gpu/nccl_programs.h"
#include "tests/support/expect_error.h"

namespace moxie::test {
namespace {

#define MOXIE_NEEDS_NCCL()                                                         \
  if (const auto nccl = ::moxie::transport::examine_nccl(); !nccl.problem.empty()) \
  GTEST_SKIP() << nccl.problem << ": nothing was tested"
#define MOXIE_NEEDS_TWO_NCCL_RANKS() \
  MOXIE_NEEDS_TWO_GPUS();            \
  MOXIE_NEEDS_NCCL()

constexpr double kPatience_s = 120;  // of this test for a rank

std::vector<RankProcess> start(const std::string& program, std::int64_t num_ranks,
                               std::uint64_t seed, const std::string& id = nccl_unique_id()) {
  std::vector<RankProcess> ranks;
  for (std::int64_t r = 0; r < num_ranks; ++r) ranks.emplace_back(program, r, num_ranks, id, seed);
  return ranks;
}
std::vector<std::string> finish(std::vector<RankProcess>& ranks) {
  std::vector<std::string> words;
  for (RankProcess& rank : ranks) words.push_back(rank.finish(kPatience_s));
  return words;
}
std::vector<std::string> run_ranks(const std::string& program, std::int64_t num_ranks,
                                   std::uint64_t seed) {
  std::vector<RankProcess> ranks = start(program, num_ranks, seed);
  return finish(ranks);
}
void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos)
        << "'" << word << "' is not in: " << text.substr(0, 2000);
}
void expect_bits(const std::string& got, const std::string& want, std::size_t rank) {
  EXPECT_TRUE(got == want) << "rank " << rank << ": "
                           << (got.size() == want.size() ? "other bits" : got.substr(0, 2000));
}

TEST(RankProcess, DISABLED_program) { run_rank_program(); }

TEST(NcclWorld, one_rank) {
  MOXIE_NEEDS_GPU();
  MOXIE_NEEDS_NCCL();
  const LayerCase c(nccl_case(1), test_seed());
  const auto words = run_ranks("passes", 1, test_seed());
  expect_bits(words[0], bytes_of(DeviceCase(c).run_alone(), 0), 0);
}

TEST(NcclWorld, processes_give_the_bits_of_one_process) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  for (const int num_ranks : testing::rank_counts()) {
    const LayerCase c(nccl_case(num_ranks), test_seed());
    const PassOutputs want = DeviceCase(c).run_alone();
    expect_close(c, reference_of(c, false), want, false, false);
    const auto words = run_ranks("passes", num_ranks, test_seed());
    for (std::size_t r = 0; r < words.size(); ++r) expect_bits(words[r], bytes_of(want, r), r);
  }
}

TEST(NcclWorld, threads_give_the_bits_of_one_process) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  for (const int num_ranks : testing::rank_counts()) {
    const LayerCase c(nccl_case(num_ranks), test_seed());
    const PassOutputs want = DeviceCase(c).run_alone();
    const std::string id = nccl_unique_id();
    std::vector<std::string> words(static_cast<std::size_t>(num_ranks));
    std::vector<std::thread> threads;
    for (std::int64_t r = 0; r < num_ranks; ++r) {
      threads.emplace_back([&, r] {
        std::string& own = words[static_cast<std::size_t>(r)];
        try {
          own = passes({r, num_ranks, id, test_seed()});
        } catch (const Error& error) {
          own = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t r = 0; r < words.size(); ++r) expect_bits(words[r], bytes_of(want, r), r);
  }
}

TEST(NcclWorld, gradients_are_those_of_one_process) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  for (const int num_ranks : testing::rank_counts()) {
    const LayerCase c(nccl_case(num_ranks), test_seed());
    const PassOutputs want = BackwardCase(c).run_alone();
    expect_close(c, reference_of(c), want);
    const auto words = run_ranks("gradients", num_ranks, test_seed());
    for (std::size_t r = 0; r < words.size(); ++r)
      expect_bits(words[r], bytes_of_pass(want.ranks[r]), r);
  }
}

TEST(NcclWorld, a_group_inside_a_larger_job) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  const LayerCase c(nccl_case(2), test_seed());
  const PassOutputs want = DeviceCase(c).run_alone();
  const auto words = run_ranks("group_inside", 2, test_seed());
  for (std::size_t r = 0; r < 2; ++r) expect_bits(words[r], bytes_of(want, r), r);
}

TEST(NcclWorld, ranks_must_make_the_same_layers) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  for (const std::string& words : run_ranks("mismatched", 2, test_seed())) {
    expect_words(words,
                 {"same made", "top_k invalid_argument: the layer of rank 1 is",
                  "must be the same on every rank", "hidden is 100", "plan invalid_argument",
                  "push saves x invalid_plan", "order invalid_argument: rank", "again made"});
  }
  const auto words = run_ranks("one_cannot", 2, test_seed());
  expect_words(words[0], {"unavailable: rank 1 cannot make the layer", "reserve_sms is 4096"});
  expect_words(words[1], {"invalid_argument: cuda.reserve_sms is 4096"});
}

TEST(NcclWorld, an_invalid_route_reaches_every_rank) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  const auto words = run_ranks("bad_route", 2, test_seed());
  expect_words(words[0], {"invalid_route: the pass was called off", "another rank", "goes on"});
  expect_words(words[1], {"invalid_route: expert id of rank 1 token 7 slot 1 is 99", "goes on"});
}

TEST(NcclWorld, a_late_rank_works_and_a_missing_one_is_reported) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  const LayerCase c(nccl_case(2), test_seed());
  const PassOutputs want = DeviceCase(c).run_alone();
  const auto words = run_ranks("late", 2, test_seed());
  for (std::size_t r = 0; r < 2; ++r) expect_bits(words[r], bytes_of(want, r), r);
}

std::set<std::string> shared_memory_files() {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    if (entry.path().filename().string().rfind("sem.", 0) != 0)
      files.insert(entry.path().filename().string());
  return files;
}

class KilledRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Victim, KilledRank, ::testing::Values(0, 1));

TEST_P(KilledRank, is_reported_and_leaves_nothing) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  const auto victim = static_cast<std::size_t>(GetParam()), other = 1 - victim;
  const std::set<std::string> before = shared_memory_files();
  std::vector<RankProcess> ranks = start("until_lost", 2, test_seed());
  for (RankProcess& rank : ranks) ASSERT_TRUE(rank.wait_for("started", kPatience_s));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  ranks[victim].kill();
  const double killed = now_s();
  const std::string words = ranks[other].finish(kPatience_s);
  EXPECT_LT(std::strtod(words.c_str(), nullptr) - killed, 2 + 2.0) << words;
  expect_words(words, {"timeout: rank " + std::to_string(other) + " gave up after 2 s",
                       "reset timeout: rank " + std::to_string(victim) + " of 2 did not come",
                       "make a new World", "then world_stopped", "GPU works"});
  EXPECT_EQ(words.find("no record"), std::string::npos) << words;
  EXPECT_EQ(before, shared_memory_files());
  // At once again.
  const LayerCase c(nccl_case(2), test_seed());
  const PassOutputs want = DeviceCase(c).run_alone();
  const auto again = run_ranks("passes", 2, test_seed());
  for (std::size_t r = 0; r < 2; ++r) expect_bits(again[r], bytes_of(want, r), r);
}

TEST(NcclWorld, ranks_that_do_not_come_together) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  RankProcess alone("comes_alone", 0, 2, nccl_unique_id(), test_seed());
  expect_words(
      alone.finish(kPatience_s),
      {"timeout: not all 2 ranks came to World::nccl within 2 s (rank 0 waited)", "; soon"});
  for (const std::string& words : run_ranks("same_rank", 2, test_seed())) {
    expect_words(words, {"; soon"});
    EXPECT_EQ(words.find("no error"), std::string::npos) << words;
  }
  for (const std::string& words : run_ranks("same_gpu", 2, test_seed()))
    expect_words(words, {"unavailable: World::nccl of rank", "failed: NCCL 2."});
}

TEST(NcclWorld, a_rank_that_closes_is_missed_at_once) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  const auto words = run_ranks("closes", 2, test_seed());
  expect_words(words[0],
               {"timeout: rank 1 did not come to Layer(): it has closed its World", "; soon"});
  EXPECT_EQ(words[1], "closed");
}

#if __has_include(<nccl.h>)
TEST(NcclWorld, passes_beside_all_reduces) {
  MOXIE_NEEDS_TWO_NCCL_RANKS();
  const LayerCase c(nccl_case(2), test_seed());
  const PassOutputs want = DeviceCase(c).run_alone();
  const auto words = run_ranks("beside_all_reduce", 2, test_seed());
  for (std::size_t r = 0; r < 2; ++r) expect_bits(words[r], bytes_of(want, r), r);
}
#endif

}  // namespace
}  // namespace moxie::test
