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
#include <random>
#include <sstream>
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

// Before any row moves, and without waiting: the others hear why when they come, and no reset is
// needed.
TEST(ProcessWorld, ARefusedPassIsRefusedOnEveryRank) {
  const LayerCase c = some_case(3, 1);
  const PassOutputs want = run_alone(c);
  const auto words = run_ranks(3, [&](std::int64_t rank) -> std::string {
    World world = process_world(rank, 3, 20);
    Layer layer(world, c.problem());
    PassOutputs out(c);
    const auto i = static_cast<std::size_t>(rank);
    const ForwardInput in = c.forward_inputs()[i];
    const ForwardOutput y = out.forward()[i];
    BackwardInput grad_in = c.backward_inputs()[i];
    const BackwardOutput grad_out = out.backward()[i];
    std::string all;
    const auto record = [&](const std::function<void()>& pass) {
      try {
        pass();
        all += "passed";
      } catch (const Error& error) {
        all += std::string(name(error.code())) + ": " + error.what();
      }
      all += "\n";
    };
    Context context = layer.forward({&in, 1}, {&y, 1});
    ForwardInput bad = in;
    bad.route_weights = {};
    // Rank 1 twice in a row; the others come to the first a second later.
    const auto begin = std::chrono::steady_clock::now();
    if (rank != 1) std::this_thread::sleep_for(std::chrono::seconds(1));
    record([&] { layer.infer({rank == 1 ? &bad : &in, 1}, {&y, 1}); });
    const bool at_once = std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(900);
    record([&] { layer.infer({rank == 1 ? &bad : &in, 1}, {&y, 1}); });
    // Ranks 0 and 2 in a backward pass.
    const ConstTensorView dy = grad_in.dy;
    if (rank != 1) grad_in.dy = {};
    record([&] { layer.backward(context, {&grad_in, 1}, {&grad_out, 1}); });
    grad_in.dy = dy;
    context = layer.forward({&in, 1}, {&y, 1});
    layer.backward(context, {&grad_in, 1}, {&grad_out, 1});
    const bool same = result_bytes(out.ranks[i]) == result_bytes(want.ranks[i]);
    return all + (same ? "same bits" : "other bits") + (rank != 1 || at_once ? "" : ", late");
  });
  const std::string weights = "route_weights of rank 1 is absent",
                    told = "invalid_argument: the pass was called off: rank ";
  for (std::size_t r = 0; r < words.size(); ++r) {
    std::istringstream lines(words[r]);
    std::string line;
    for (int pass = 0; pass < 2; ++pass) {
      std::getline(lines, line);
      EXPECT_EQ(line.find(r == 1 ? "invalid_argument: " + weights : told + "1 refused: " + weights),
                0u)
          << line;
    }
    std::getline(lines, line);
    EXPECT_EQ(line.find(r == 1 ? told + "0 refused: dy of rank 0 is absent"
                               : "invalid_argument: dy of rank " + std::to_string(r)),
              0u)
        << line;
    std::getline(lines, line);
    EXPECT_EQ(line, "same bits");
  }
}

// Ranks refuse passes at random, several at once and several in a row, between passes that are
// good, have an invalid route, or exceed a capacity (which is told by words of agreement).
TEST(ProcessWorld, RefusedPassesBetweenAllOthers) {
  constexpr int kPasses = 200;
  const std::uint64_t seed = test_seed();
  const LayerCase c = some_case(3, 1);
  const PassOutputs want = run_alone(c);
  const auto dice = [&](int pass, std::int64_t rank, std::uint64_t sides) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(pass * 8 + rank));
    return random() % sides;
  };
  const auto refuses = [&](int pass, std::int64_t rank) { return dice(pass, rank, 4) == 0; };
  const auto words = run_ranks(3, [&](std::int64_t rank) -> std::string {
    World world = process_world(rank, 3, 20);
    Layer layer(world, c.problem());
    Layer small(world, c.problem(), {.capacity_rows = 128});
    PassOutputs out(c);
    const auto i = static_cast<std::size_t>(rank);
    const ForwardInput in = c.forward_inputs()[i];
    const ForwardOutput y = out.forward()[i];
    const std::vector<std::int32_t> bad_ids(
        static_cast<std::size_t>(in.expert_ids.shape.num_elements()), 99);
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint64_t kind = dice(pass, 7, 4);
      ForwardInput now = in;
      if (kind == 1 && rank == 2) now.expert_ids = {bad_ids.data(), in.expert_ids.shape};
      if (refuses(pass, rank)) now.x = {};
      std::string expected = "ok";
      for (std::int64_t r = 2; r >= 0; --r)
        if (refuses(pass, r)) expected = "rank " + std::to_string(r) + " refused: x of rank";
      if (kind == 0 && expected == "ok") expected = "capacity_rows";
      if (kind == 1 && !refuses(pass, 2)) expected = "expert id";
      if (refuses(pass, rank)) expected = "x of rank " + std::to_string(rank) + " is absent";
      std::string seen = "ok";
      try {
        (kind == 0 ? small : layer).infer({&now, 1}, {&y, 1});
        if (!same_bits("y", want.ranks[i].y, out.ranks[i].y)) seen = "other bits";
      } catch (const Error& error) {
        seen = error.what();
      }
      if (seen.find(expected) == std::string::npos)
        return "pass " + std::to_string(pass) + ": " + seen + ", not " + expected;
      if (dice(pass, rank + 3, 8) == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(dice(pass, rank + 3, 64) / 8));
    }
    return "good";
  });
  for (const std::string& w : words) EXPECT_EQ(w, "good");
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
