#include "tests/gpu/nccl_programs.h"

#include <thread>

#include "moxie/transport/nccl_library.h"

#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace moxie::test {

CaseSpec nccl_case(std::int64_t num_ranks, std::int64_t hidden) {
  CaseSpec spec;
  spec.problem = with_all_parts(small_problem(num_ranks, 9, 3, hidden, 256, DType::bf16),
                                ActivationKind::swiglu);
  spec.problem.max_tokens = 300;
  spec.tokens.assign(static_cast<std::size_t>(num_ranks), 80);
  spec.tokens[0] = 300;
  spec.routing = Routing::zipf;
  return spec;
}

std::string bytes_of(const PassOutputs& out, std::size_t rank) {
  const auto bytes = out.ranks[rank].y.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string bytes_of_pass(const RankOutputs& rank) {
  std::string all;
  const auto append = [&](const OwnedTensor& tensor) {
    const auto bytes = tensor.bytes();
    all.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  append(rank.y);
  append(rank.dx);
  append(rank.d_route_weights);
  for (const OwnedTensor& grad : rank.grads) append(grad);
  return all;
}

namespace {

std::vector<Plan> some_plans() {
  std::vector<Plan> plans(6);
  plans[1].order = TaskOrder::lag;
  plans[1].band_blocks = 2, plans[1].lag_bands = 1;
  plans[1].x_ring_blocks = 2, plans[1].hidden_ring_blocks = 4;
  plans[2].mode = ExecMode::split;
  plans[3].comm_workers = 2;
  plans[4].dispatch = DispatchMode::push;
  plans[5] = plans[1];
  plans[5].dispatch = DispatchMode::push;
  return plans;
}

// SMs are not scarce in most tests: 0 reserved, as in a world of one process.
World make_world(const ChildRank& me, double timeout_s = 30, std::int32_t reserve_sms = 0) {
  WorldOptions options = cuda_options(me.num_ranks);
  options.timeout_s = timeout_s;
  NcclOptions nccl;
  nccl.rank = me.rank;
  nccl.unique_id = me.id;
  nccl.device = static_cast<int>(me.rank);
  nccl.reserve_sms = reserve_sms;
  return World::nccl(options, nccl);
}

// One rank's tensors of a case, on its GPU.
class RankCase {
 public:
  RankCase(const LayerCase& c, std::int64_t rank)
      : rank_(static_cast<std::size_t>(rank)),
        device_case_(
            c, std::vector<int>(static_cast<std::size_t>(c.num_ranks()), static_cast<int>(rank))) {}
  std::span<const ForwardInput> inputs() const { return {&device_case_.inputs()[rank_], 1}; }
  std::span<const ForwardOutput> outputs() const { return {&device_case_.outputs()[rank_], 1}; }
  // The library is called with another GPU current than the rank's. Everything else is done with
  // the rank's: where ranks are threads, a copy in GPU 0's default stream would wait for rank 0's
  // pass.
  std::string run(World& world, Layer& layer, Context* context = nullptr) {
    EXPECT_EQ(cudaSetDevice(static_cast<int>(rank_)), cudaSuccess);
    device_case_.poison_outputs();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    if (context != nullptr)
      layer.forward(inputs(), outputs(), *context);
    else
      layer.infer(inputs(), outputs());
    world.synchronize();
    EXPECT_EQ(cudaSetDevice(static_cast<int>(rank_)), cudaSuccess);
    return bytes_of(device_case_.download(), rank_);
  }

 private:
  std::size_t rank_;
  DeviceCase device_case_;
};

}  // namespace

std::string passes(const ChildRank& me) {
  const LayerCase c(nccl_case(me.num_ranks), me.seed);
  World world = make_world(me);
  RankCase mine(c, me.rank);
  std::string first;
  WorldOptions options = cuda_options(me.num_ranks);
  for (const Plan& plan : some_plans()) {
    Layer layer(world, c.problem(), plan);
    Context context = layer.make_context();
    for (std::uint64_t i = 0; i < 12; ++i) {
      options.faults.shuffle_seed = i % 2 == 0 ? 0 : me.seed + i;
      world.set_faults(options.faults);
      const std::string y = mine.run(world, layer, i % 3 == 2 ? &context : nullptr);
      if (first.empty()) first = y;
      if (y != first) return "other bits with " + to_string(plan) + ", pass " + std::to_string(i);
    }
  }
  const LayerCase big(nccl_case(me.num_ranks, 1024), me.seed);
  RankCase my_big(big, me.rank);
  Layer small_layer(world, c.problem()), big_layer(world, big.problem());
  const std::string first_big = my_big.run(world, big_layer);
  for (int i = 0; i < 4; ++i) {
    if (mine.run(world, small_layer) != first) return "other bits beside a larger layer";
    if (my_big.run(world, big_layer) != first_big) return "other bits of the larger layer";
    if (i == 1) world.reset();
  }
  return first;
}

namespace {

// Forward and backward, in plans whose backward differs, with shuffled timing: all alike.
std::string gradients(const ChildRank& me) {
  const LayerCase c(nccl_case(me.num_ranks), me.seed);
  World world = make_world(me);
  const auto own = static_cast<std::size_t>(me.rank);
  const auto device = static_cast<int>(me.rank);
  BackwardCase mine(c, std::vector<int>(static_cast<std::size_t>(me.num_ranks), device));
  std::vector<Plan> plans(4);
  plans[1].chunk_blocks = 1, plans[1].backward_ring_blocks = 2;
  plans[2].save = SavePolicy::z_and_x;
  plans[3].dispatch = DispatchMode::push;
  std::string first;
  WorldOptions options = cuda_options(me.num_ranks);
  for (const Plan& plan : plans) {
    Layer layer(world, c.problem(), plan);
    Context context = layer.make_context();
    for (std::uint64_t i = 0; i < 6; ++i) {
      options.faults.shuffle_seed = i % 2 == 0 ? 0 : me.seed + i;
      world.set_faults(options.faults);
      cudaSetDevice(device);
      mine.poison_outputs();
      cudaDeviceSynchronize();
      cudaSetDevice(0);
      const std::vector<BackwardOutput> outputs = mine.outputs();
      layer.forward({&mine.forward_inputs()[own], 1}, {&mine.forward_outputs()[own], 1}, context);
      layer.backward(context, {&mine.inputs()[own], 1}, {&outputs[own], 1});
      world.synchronize();
      cudaSetDevice(device);
      const std::string got = bytes_of_pass(mine.download().ranks[own]);
      if (first.empty()) first = got;
      if (got != first) return "other bits with " + to_string(plan) + ", pass " + std::to_string(i);
    }
  }
  return first;
}

std::string mismatched(const ChildRank& me) {
  World world = make_world(me, 20);
  Problem p = nccl_case(me.num_ranks).problem;
  std::string words;
  const auto attempt = [&](const char* what, const std::function<void()>& make) {
    try {
      make();
      words += std::string(what) + " made; ";
    } catch (const Error& error) {
      words += std::string(what) + " " + name(error.code()) + ": " + error.what() + "; ";
    }
  };
  attempt("same", [&] { Layer(world, p, Plan{}); });
  attempt("top_k", [&] {
    Problem other = p;
    if (me.rank == 1) other.top_k = 2;
    Layer(world, other, Plan{});
  });
  attempt("hidden", [&] {
    Problem other = p;
    if (me.rank == 1) other.hidden = 100;
    Layer(world, other, Plan{});
  });
  attempt("plan", [&] {
    Plan plan;
    if (me.rank == 1) plan.order = TaskOrder::lag;
    Layer(world, p, plan);
  });
  attempt("push saves x", [&] {
    Plan plan;
    plan.dispatch = DispatchMode::push;
    plan.save = SavePolicy::z_and_x;
    Layer(world, p, plan);
  });
  attempt("order", [&] {
    if (me.rank == 1)
      world.reset();
    else
      Layer(world, p, Plan{});
  });
  attempt("again", [&] { Layer(world, p, Plan{}); });
  return words;
}

std::string one_cannot(const ChildRank& me) {
  WorldOptions options = cuda_options(me.num_ranks);
  NcclOptions nccl;
  nccl.rank = me.rank;
  nccl.unique_id = me.id;
  nccl.device = static_cast<int>(me.rank);
  nccl.reserve_sms = me.rank == 1 ? 4096 : 0;
  World world = World::nccl(options, nccl);
  Layer layer(world, nccl_case(me.num_ranks).problem, Plan{});
  return "made";
}

std::string bad_route(const ChildRank& me) {
  LayerCase c(nccl_case(me.num_ranks), me.seed);
  World world = make_world(me, 20);
  Layer layer(world, c.problem(), Plan{});
  RankCase good(c, me.rank);
  const std::string want = good.run(world, layer);
  c.expert_id(300 + 7, 1) = 99;  // rank 1's token 7
  c.upload();
  RankCase bad(c, me.rank);
  std::string words;
  try {
    bad.run(world, layer);
    words = "no error";
  } catch (const Error& error) {
    words = std::string(name(error.code())) + ": " + error.what();
  }
  return words + (good.run(world, layer) == want ? "; goes on" : "; other bits after it");
}

// A GPU that a pass gave up on must do everything afterwards: here a world of its own.
std::string gpu_works(const ChildRank& me) {
  const LayerCase c(nccl_case(1), me.seed);
  const std::vector<int> device = {static_cast<int>(me.rank)};
  DeviceCase on_device(c, device);
  WorldOptions options = cuda_options(1);
  World world = World::cuda(options, {device});
  Layer layer(world, c.problem(), Plan{});
  const PassOutputs first = on_device.run(world, layer);
  return same_bits(first, on_device.run(world, layer)) ? "GPU works" : "GPU computes other bits";
}

std::string until_lost(const ChildRank& me) {
  const LayerCase c(nccl_case(me.num_ranks), me.seed);
  RankCase mine(c, me.rank);
  std::string words;
  {
    World world = make_world(me, 20);
    Layer layer(world, c.problem(), Plan{});
    mine.run(world, layer);
    world.set_timeout(2);
    me.say("started");
    try {
      for (;;) {
        layer.infer(mine.inputs(), mine.outputs());
        world.synchronize();
      }
    } catch (const Error& error) {
      words = std::to_string(now_s()) + " " + name(error.code()) + ": " + error.what();
      if (error.waits().empty()) words += "; no record";
    }
    try {
      world.reset();
      words += "; reset went well";
    } catch (const Error& error) {
      words += std::string("; reset ") + name(error.code()) + ": " + error.what();
    }
    try {
      layer.infer(mine.inputs(), mine.outputs());
      words += "; a pass was taken";
    } catch (const Error& error) {
      words += std::string("; then ") + name(error.code());
    }
  }
  return words + "; " + gpu_works(me);
}

// Rank 1 comes late to everything, then not at all to a pass.
std::string late(const ChildRank& me) {
  const LayerCase c(nccl_case(me.num_ranks), me.seed);
  const auto come_late = [&] {
    if (me.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms(2000)));
  };
  come_late();
  World world = make_world(me, 60);
  come_late();
  Layer layer(world, c.problem(), Plan{});
  RankCase mine(c, me.rank);
  come_late();
  const std::string y = mine.run(world, layer);
  if (me.rank == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4500));
  } else {
    world.set_timeout(1.5);
    const double begin = now_s();
    try {
      layer.infer(mine.inputs(), mine.outputs());
      world.synchronize();
      return "no error";
    } catch (const Error& error) {
      const std::string words = error.what();
      if (error.code() != ErrorCode::timeout || words.find("inputs_ready") == std::string::npos)
        return words;
      if (now_s() - begin > 1.5 + 2) return "reported after " + std::to_string(now_s() - begin);
    }
    world.set_timeout(60);
  }
  world.reset();
  return mine.run(world, layer) == y ? y : "other bits after the reset";
}

std::string comes_alone(const ChildRank& me) {
  const double begin = now_s();
  try {
    make_world(me, 2);
    return "no error";
  } catch (const Error& error) {
    return std::string(name(error.code())) + ": " + error.what() +
           (now_s() - begin < 4 ? "; soon" : "; late");
  }
}

// A group inside the job: a World of this rank alone beside the World of all, with another id.
std::string group_inside(const ChildRank& me) {
  const LayerCase all(nccl_case(me.num_ranks), me.seed), alone(nccl_case(1), me.seed);
  World world = make_world(me);
  NcclOptions nccl;
  nccl.unique_id = nccl_unique_id();
  nccl.device = static_cast<int>(me.rank);
  World group = World::nccl(cuda_options(1), nccl);
  Layer layer(world, all.problem(), Plan{}), group_layer(group, alone.problem(), Plan{});
  RankCase mine(all, me.rank);
  DeviceCase group_case(alone, {static_cast<int>(me.rank)});
  const std::string y = mine.run(world, layer);
  const PassOutputs first = group_case.run(group, group_layer);
  for (int i = 0; i < 3; ++i) {
    if (mine.run(world, layer) != y) return "other bits of all ranks";
    if (!same_bits(first, group_case.run(group, group_layer))) return "other bits of the group";
  }
  return y;
}

// Two processes say that they are the same rank.
std::string same_rank(const ChildRank& me) {
  const double begin = now_s();
  WorldOptions options = cuda_options(2);
  options.timeout_s = 3;
  NcclOptions nccl;
  nccl.rank = 0;
  nccl.unique_id = me.id;
  nccl.device = static_cast<int>(me.rank);
  try {
    World::nccl(options, nccl);
    return "no error";
  } catch (const Error& error) {
    return std::string(name(error.code())) + ": " + error.what() +
           (now_s() - begin < 5 ? "; soon" : "; late");
  }
}

// Both ranks on one GPU, which NCCL refuses.
std::string same_gpu(const ChildRank& me) {
  WorldOptions options = cuda_options(2);
  options.timeout_s = 10;
  NcclOptions nccl;
  nccl.rank = me.rank;
  nccl.unique_id = me.id;
  nccl.device = 0;
  World::nccl(options, nccl);
  return "no error";
}

std::string closes(const ChildRank& me) {
  World world = make_world(me, 20);
  if (me.rank == 1) return "closed";  // and never makes a layer
  const double begin = now_s();
  try {
    Layer layer(world, nccl_case(me.num_ranks).problem, Plan{});
    return "no error";
  } catch (const Error& error) {
    return std::string(name(error.code())) + ": " + error.what() +
           (now_s() - begin < 10 ? "; soon" : "; late");
  }
}

#if __has_include(<nccl.h>)
// Another library's kernels that wait for their peers beside our passes: all-reduces without end on
// a side stream, and a World with the default reserve, made from their communicator.
std::string beside_all_reduce(const ChildRank& me) {
  const auto library = transport::NcclLibrary::load();
  const auto init =
      reinterpret_cast<decltype(&ncclCommInitRank)>(library.symbol("ncclCommInitRank"));
  const auto reduce = reinterpret_cast<decltype(&ncclAllReduce)>(library.symbol("ncclAllReduce"));
  const auto destroy =
      reinterpret_cast<decltype(&ncclCommDestroy)>(library.symbol("ncclCommDestroy"));
  const LayerCase c(nccl_case(me.num_ranks), me.seed);
  RankCase mine(c, me.rank);
  cudaSetDevice(static_cast<int>(me.rank));
  ncclUniqueId id;
  std::memcpy(id.internal, me.id.data(), sizeof id.internal);
  ncclComm_t comm = nullptr;
  if (init(&comm, static_cast<int>(me.num_ranks), id, static_cast<int>(me.rank)) != ncclSuccess)
    return "no communicator";
  WorldOptions options = cuda_options(me.num_ranks);
  options.timeout_s = 20;
  NcclOptions nccl;
  nccl.rank = me.rank;
  nccl.comm = comm;
  nccl.device = static_cast<int>(me.rank);
  World world = World::nccl(options, nccl);
  Layer layer(world, c.problem(), Plan{});
  const std::string want = mine.run(world, layer);
  cudaSetDevice(static_cast<int>(me.rank));
  constexpr std::size_t kCount = 16 << 20;  // 64 MiB: every channel that NCCL has
  float* data = nullptr;
  cudaStream_t side = nullptr, stream = nullptr;
  cudaMalloc(&data, kCount * sizeof(float));
  cudaMemset(data, 0, kCount * sizeof(float));
  cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaDeviceSynchronize();
  options.faults.poison_workspace = false;
  world.set_faults(options.faults);
  world.set_stream(stream);
  // The ranks enqueue in opposite orders, so that one GPU begins with the pass and the other with
  // the all-reduce.
  for (int round = 0; round < 500; ++round) {
    const auto all_reduce = [&] {
      return reduce(data, data, kCount, ncclFloat, ncclSum, comm, side) == ncclSuccess;
    };
    if (me.rank == 0 && !all_reduce()) return "no all-reduce";
    layer.infer(mine.inputs(), mine.outputs());
    if (me.rank != 0 && !all_reduce()) return "no all-reduce";
  }
  world.synchronize();
  cudaStreamSynchronize(side);
  world.set_stream(nullptr);
  const std::string y = mine.run(world, layer);
  cudaStreamDestroy(side);
  cudaStreamDestroy(stream);
  cudaFree(data);
  const bool same = y == want;
  destroy(comm);
  return same ? y : "other bits beside all-reduces";
}
#endif

}  // namespace

std::map<std::string, RankProgram>& rank_programs() {
  static std::map<std::string, RankProgram> programs = {
    {"passes", passes},
    {"mismatched", mismatched},
    {"one_cannot", one_cannot},
    {"bad_route", bad_route},
    {"until_lost", until_lost},
    {"late", late},
    {"comes_alone", comes_alone},
    {"same_rank", same_rank},
    {"same_gpu", same_gpu},
    {"closes", closes},
    {"group_inside", group_inside},
    {"gradients", gradients},
#if __has_include(<nccl.h>)
    {"beside_all_reduce", beside_all_reduce},
#endif
  };
  return programs;
}

}  // namespace moxie::test
