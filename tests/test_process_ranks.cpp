// Ranks as processes over shared memory: the bits of ranks as threads, errors on every rank, and a
// process that ends in the middle. Each rank is a fork of this program, made before it has threads;
// what a rank has to say comes back through a pipe.
#include <gtest/gtest.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "tests/support/env.h"
#include "tests/support/pass_outputs.h"

namespace moxie::test {
namespace {

std::vector<std::string> run_ranks(std::int64_t num_ranks,
                                   const std::function<std::string(std::int64_t)>& program) {
  std::vector<int> pipes;
  std::vector<pid_t> processes;
  for (std::int64_t r = 0; r < num_ranks; ++r) {
    int ends[2] = {};
    EXPECT_EQ(::pipe(ends), 0);
    const pid_t process = ::fork();
    if (process == 0) {
      std::string words;
      try {
        words = program(r);
      } catch (const Error& error) {
        words = std::string(name(error.code())) + ": " + error.what();
      }
      for (std::size_t at = 0; at < words.size();) {
        const ssize_t sent = ::write(ends[1], words.data() + at, words.size() - at);
        if (sent <= 0) ::_exit(1);
        at += static_cast<std::size_t>(sent);
      }
      ::_exit(0);
    }
    ::close(ends[1]);
    pipes.push_back(ends[0]);
    processes.push_back(process);
  }
  std::vector<std::string> words(pipes.size());
  for (std::size_t r = 0; r < pipes.size(); ++r) {
    char buffer[4096];
    for (ssize_t n = 0; (n = ::read(pipes[r], buffer, sizeof(buffer))) > 0;)
      words[r].append(buffer, static_cast<std::size_t>(n));
    ::close(pipes[r]);
    ::waitpid(processes[r], nullptr, 0);
  }
  return words;
}

World process_world(std::int64_t rank, std::int64_t num_ranks, double timeout_s = 30) {
  WorldOptions options = world_options(num_ranks);
  options.timeout_s = timeout_s;
  const std::string name = "test_process_ranks." + std::to_string(::getppid());
  return World::cpu_process(options, {.rank = rank, .name = name});
}

void append(std::string& bytes, const OwnedTensor& tensor) {
  const auto data = tensor.bytes();
  bytes.append(reinterpret_cast<const char*>(data.data()), data.size());
}
std::string result_bytes(const RankOutputs& rank) {
  std::string bytes;
  append(bytes, rank.y);
  append(bytes, rank.dx);
  append(bytes, rank.d_route_weights);
  for (const OwnedTensor& grad : rank.grads) append(bytes, grad);
  return bytes;
}

// This rank's pass, forward and backward, three times.
std::string pass_bytes(World& world, const LayerCase& c, const Plan& plan, std::int64_t rank) {
  Layer layer(world, c.problem(), plan);
  PassOutputs out(c);
  const auto i = static_cast<std::size_t>(rank);
  const ForwardInput in = c.forward_inputs()[i];
  const ForwardOutput y = out.forward()[i];
  const BackwardInput grad_in = c.backward_inputs()[i];
  const BackwardOutput grad_out = out.backward()[i];
  for (int pass = 0; pass < 3; ++pass) {
    const Context context = layer.forward({&in, 1}, {&y, 1});
    layer.backward(context, {&grad_in, 1}, {&grad_out, 1});
  }
  return result_bytes(out.ranks[i]);
}

LayerCase some_case(std::int64_t num_ranks, std::uint64_t seed) {
  Problem p =
      with_all_parts(small_problem(num_ranks, 5, 3, 128, 64, DType::bf16), ActivationKind::gpt_oss);
  p.max_tokens = 150;
  std::vector<std::int64_t> tokens = {150, 0, 31, 1};
  tokens.resize(static_cast<std::size_t>(num_ranks));
  return LayerCase({p, tokens, Routing::masked}, seed);
}

class ProcessRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ProcessRanks, ::testing::Values(1, 2, 3, 4));

TEST_P(ProcessRanks, GiveTheBitsOfThreads) {
  const LayerCase c = some_case(GetParam(), test_seed());
  Plan lag;
  lag.order = TaskOrder::lag;
  lag.band_blocks = 1, lag.lag_bands = 1, lag.minibatch_blocks = 2, lag.x_ring_blocks = 2;
  lag.hidden_ring_blocks = 2, lag.chunk_blocks = 1, lag.backward_ring_blocks = 3;
  const std::vector<Plan> plans = {
      {}, lag, {.mode = ExecMode::split}, {.dispatch = DispatchMode::push, .comm_workers = 2}};
  const auto words = run_ranks(GetParam(), [&](std::int64_t rank) {
    World world = process_world(rank, GetParam());
    std::string all;
    for (const Plan& plan : plans) all += pass_bytes(world, c, plan, rank);
    world.reset();
    return all + pass_bytes(world, c, {}, rank);
  });
  const PassOutputs want = run_alone(c);
  for (std::size_t r = 0; r < words.size(); ++r) {
    const std::string one = result_bytes(want.ranks[r]);
    ASSERT_EQ(words[r].size(), (plans.size() + 1) * one.size()) << words[r].substr(0, 500);
    for (std::size_t i = 0; i <= plans.size(); ++i)
      EXPECT_TRUE(words[r].compare(i * one.size(), one.size(), one) == 0)
          << "rank " << r << ", plan " << i;
  }
}

TEST(ProcessWorld, RanksMustMakeTheSameLayer) {
  const auto words = run_ranks(3, [](std::int64_t rank) -> std::string {
    World world = process_world(rank, 3, 10);
    Problem p = small_problem(3, 5, 3);
    if (rank == 2) p.top_k = 2;
    Layer layer(world, p);
    return "made";
  });
  for (const std::string& w : words) {
    EXPECT_NE(w.find("invalid_argument: the layer of rank 2 is"), std::string::npos) << w;
    EXPECT_NE(w.find("must be the same on every rank"), std::string::npos) << w;
  }
}

// A timer of the program, or a child of it that ends, interrupts system calls. (Not while a World
// is made: that tries oneDNN out, whose kernels did not bear signals, 2.6.3.)
TEST(ProcessWorld, SignalsDoNotEndTheWaitForARank) {
  const auto words = run_ranks(2, [](std::int64_t rank) -> std::string {
    World world = process_world(rank, 2, 30);
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(150));
    } else {
      struct sigaction action = {};
      action.sa_handler = [](int) {};  // and no SA_RESTART
      ::sigaction(SIGALRM, &action, nullptr);
      const itimerval often = {{0, 5000}, {0, 5000}};
      ::setitimer(ITIMER_REAL, &often, nullptr);
    }
    Layer layer(world, small_problem(2, 5, 3));
    return "made";
  });
  for (const std::string& w : words) EXPECT_EQ(w, "made");
}

TEST(ProcessWorld, ARankThatEndsIsReportedByTheOthers) {
  const LayerCase c = some_case(3, 1);
  const auto words = run_ranks(3, [&](std::int64_t rank) -> std::string {
    World world = process_world(rank, 3, 1.0);
    Layer layer(world, c.problem());
    PassOutputs out(c);
    const auto i = static_cast<std::size_t>(rank);
    const ForwardInput in = c.forward_inputs()[i];
    const ForwardOutput y = out.forward()[i];
    for (int pass = 0;; ++pass) {
      if (rank == 1 && pass == 2) ::_exit(0);
      layer.infer({&in, 1}, {&y, 1});
    }
  });
  EXPECT_EQ(words[1], "");
  for (const std::size_t r : {0u, 2u}) {
    const std::string want = "timeout: rank " + std::to_string(r) + " gave up after 1 s";
    EXPECT_NE(words[r].find(want), std::string::npos) << words[r];
  }
}

}  // namespace
}  // namespace moxie::test
