// The backward of a CUDA world as a caller meets it: contexts, main gradients, captured graphs and
// timelines. Lost ranks, and what is refused: test_cuda_backward_faults.cpp.
#include <deque>
#include <future>
#include <set>

#include "moxie/pipeline/tasks.h"
#include "tests/gpu/backward_case.h"

namespace moxie::test {
namespace {

Problem three_ranks() {
  Problem p = with_all_parts(bf16_problem(3, 7, 2, 192, 128), ActivationKind::swiglu_clamped);
  p.shared.intermediate = 64;
  return p;
}

// Microbatches of one model: other tokens, the same weights.
class CudaBackwardUse : public ::testing::Test {
 protected:
  void SetUp() override {
    MOXIE_NEEDS_GPU();
    for (std::uint64_t i = 0; i < 4; ++i) {
      hosts.push_back(bf16_case(three_ranks(), {140, 0, 64}, Routing::zipf));
      const LayerCase fresh(hosts.back().spec, test_seed() + i);
      hosts.back().tokens = fresh.tokens;
      hosts.back().dy = fresh.dy;
      hosts.back().upload();
      cases.emplace_back(hosts.back());
    }
  }
  const Problem& problem() const { return hosts.front().problem(); }

  std::deque<LayerCase> hosts;
  std::deque<BackwardCase> cases;
};

TEST_F(CudaBackwardUse, live_contexts_backward_in_reverse) {
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer layer(world, problem());
  std::vector<Context> contexts;
  for (BackwardCase& c : cases) {
    c.poison_outputs();
    contexts.push_back(layer.forward(c.forward_inputs(), c.forward_outputs()));
  }
  for (std::size_t i = cases.size(); i-- > 0;)
    layer.backward(contexts[i], cases[i].inputs(), cases[i].outputs());
  world.synchronize();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const PassOutputs got = cases[i].download();
    EXPECT_TRUE(same_bits(cases[i].run_alone(), got)) << "microbatch " << i;
  }
}

TEST_F(CudaBackwardUse, backward_twice_gives_the_same_bits) {
  for (const SavePolicy save : {SavePolicy::none, SavePolicy::z, SavePolicy::z_and_x}) {
    World world = World::cuda(cuda_options(3), on_gpu_0(3));
    Layer layer(world, problem(), {.save = save});
    cases[0].poison_outputs();
    const Context context = layer.forward(cases[0].forward_inputs(), cases[0].forward_outputs());
    layer.backward(context, cases[0].inputs(), cases[0].outputs());
    world.synchronize();
    const PassOutputs first = cases[0].download();
    expect_close(hosts[0], reference_of(hosts[0]), first);
    cases[0].poison_outputs();
    // Another forward in between, so that nothing is left of the first in the workspace.
    layer.infer(cases[1].forward_inputs(), cases[1].forward_outputs());
    layer.infer(cases[0].forward_inputs(), cases[0].forward_outputs());
    layer.backward(context, cases[0].inputs(), cases[0].outputs());
    world.synchronize();
    EXPECT_TRUE(same_bits(first, cases[0].download())) << name(save);
  }
}

// As PyTorch calls backward: in a thread that has not called CUDA yet.
TEST_F(CudaBackwardUse, passes_of_new_threads) {
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer layer(world, problem());
  Context context = layer.make_context();
  cases[0].poison_outputs();
  const auto in_new_thread = [](const auto& pass) { std::async(std::launch::async, pass).get(); };
  in_new_thread(
      [&] { layer.forward(cases[0].forward_inputs(), cases[0].forward_outputs(), context); });
  in_new_thread([&] { layer.backward(context, cases[0].inputs(), cases[0].outputs()); });
  world.synchronize();
  const PassOutputs got = cases[0].download();
  EXPECT_TRUE(same_bits(cases[0].run_alone(), got));
}

TEST_F(CudaBackwardUse, a_context_is_reusable) {
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer layer(world, problem());
  Context context = layer.make_context();
  for (const std::size_t i : {0u, 1u, 2u, 0u, 3u}) {
    const PassOutputs got = cases[i].run(world, layer, context);
    EXPECT_TRUE(same_bits(cases[i].run_alone(), got)) << "microbatch " << i;
  }
}

TEST_F(CudaBackwardUse, two_layers_share_one_world) {
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer a(world, problem());
  const LayerCase c = bf16_case(bf16_problem(3, 5, 3, 512, 64), {300, 1, 20});
  BackwardCase other(c);
  const Context context_a = a.forward(cases[0].forward_inputs(), cases[0].forward_outputs());
  Layer b(world, c.problem());  // moves the heaps
  const Context context_b = b.forward(other.forward_inputs(), other.forward_outputs());
  a.backward(context_a, cases[0].inputs(), cases[0].outputs());
  b.backward(context_b, other.inputs(), other.outputs());
  world.synchronize();
  const PassOutputs got_a = cases[0].download(), got_b = other.download();
  EXPECT_TRUE(same_bits(cases[0].run_alone(), got_a));
  EXPECT_TRUE(same_bits(other.run_alone(), got_b));
}

TEST_F(CudaBackwardUse, x_in_place_gives_the_bits_of_a_copy) {
  const PassOutputs want = cases[0].run_alone();
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer layer(world, problem());
  std::vector<ForwardInput> forward = cases[0].forward_inputs();
  std::vector<BackwardInput> backward = cases[0].inputs();
  for (const std::size_t r : {0u, 2u}) {
    const TensorView buffer = layer.input_buffer(static_cast<std::int64_t>(r));
    cudaMemcpy(buffer.data, forward[r].x.data,
               static_cast<std::size_t>(forward[r].x.shape.num_elements() * 2),
               cudaMemcpyDeviceToDevice);
    forward[r].x = backward[r].x = {buffer.data, buffer.dtype, forward[r].x.shape};
  }
  for (int i = 0; i < 3; ++i) {
    cases[0].poison_outputs();
    const Context context = layer.forward(forward, cases[0].forward_outputs());
    layer.backward(context, backward, cases[0].outputs());
    world.synchronize();
    EXPECT_TRUE(same_bits(want, cases[0].download())) << "pass " << i;
  }
}

TEST_F(CudaBackwardUse, accumulates_four_microbatches_into_main_grad) {
  Reference total = reference_of(hosts[0]);
  for (std::size_t i = 1; i < cases.size(); ++i) {
    const Reference more = reference_of(hosts[i]);
    add_weight_grads(total, more);
    total.y = more.y, total.grads.dx = more.grads.dx;
    total.grads.d_route_weights = more.grads.d_route_weights;
    total.grads.d_route_squares = more.grads.d_route_squares;
  }
  Plan small_ring;
  small_ring.chunk_blocks = 1, small_ring.backward_ring_blocks = 2;
  std::optional<PassOutputs> first;
  for (const Plan& plan : {Plan{}, small_ring, Plan{.save = SavePolicy::none, .comm_workers = 2}}) {
    SCOPED_TRACE(to_string(plan));
    World world = World::cuda(cuda_options(3), on_gpu_0(3));
    Layer layer(world, problem(), plan);
    PassOutputs sum(hosts[0]);
    sum.prefill_grads();
    cases[0].upload_grads(sum);
    Context context = layer.make_context();
    for (BackwardCase& c : cases) {
      std::vector<BackwardOutput> outputs = c.outputs();
      for (std::size_t r = 0; r < outputs.size(); ++r)
        outputs[r].grads = cases[0].outputs(/*accumulate=*/true)[r].grads;
      layer.forward(c.forward_inputs(), c.forward_outputs(), context);
      layer.backward(context, c.inputs(), outputs);
    }
    world.synchronize();
    PassOutputs got = cases.back().download();
    const PassOutputs grads = cases[0].download();
    for (std::size_t r = 0; r < got.ranks.size(); ++r) got.ranks[r].grads = grads.ranks[r].grads;
    expect_close(hosts.back(), total, got, /*with_backward=*/true, /*prefilled=*/true);
    if (!first) first = got;
    EXPECT_TRUE(same_bits(*first, got));
  }
}

TEST_F(CudaBackwardUse, idle_experts_get_zeros_or_are_left_alone) {
  LayerCase& c = hosts[0];
  for (std::int64_t& e : c.tokens.expert_ids) e = e == 4 ? 5 : e;  // expert 4: rank 1's second
  c.upload();
  for (const DType grad_dtype : {DType::f32, DType::bf16}) {
    BackwardCase on_device(c, {}, grad_dtype);
    const PassOutputs out = on_device.run_alone();
    for (std::size_t part = 0; part < 6; ++part) {
      const OwnedTensor& grad = out.ranks[1].grads[part];
      for (std::size_t i = grad.size() / 2; i < grad.size(); ++i)
        ASSERT_EQ(grad.get(i), 0.0) << kParts[part].name << " element " << i;
    }
  }
  BackwardCase on_device(c);
  PassOutputs before(c);
  before.prefill_grads();
  on_device.upload_grads(before);
  World world = World::cuda(cuda_options(3), on_gpu_0(3));
  Layer layer(world, problem());
  const Context context = layer.forward(on_device.forward_inputs(), on_device.forward_outputs());
  layer.backward(context, on_device.inputs(), on_device.outputs(/*accumulate=*/true));
  world.synchronize();
  const PassOutputs after = on_device.download();
  for (std::size_t part = 0; part < 6; ++part) {
    const OwnedTensor &was = before.ranks[1].grads[part], &is = after.ranks[1].grads[part];
    for (std::size_t i = was.size() / 2; i < was.size(); ++i)
      ASSERT_EQ(was.get(i), is.get(i)) << kParts[part].name << " element " << i;
  }
}

// ---- graphs ----

class CapturedPass {
 public:
  // What `enqueue` puts on the stream.
  CapturedPass(cudaStream_t stream, const std::function<void()>& enqueue) : stream_(stream) {
    EXPECT_EQ(cudaSuccess, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    EXPECT_EQ(cudaSuccess, cudaStreamEndCapture(stream, &graph_));
    EXPECT_EQ(cudaSuccess, cudaGraphInstantiate(&replay_, graph_, 0));
  }
  ~CapturedPass() {
    cudaGraphExecDestroy(replay_);
    cudaGraphDestroy(graph_);
  }
  CapturedPass(const CapturedPass&) = delete;
  CapturedPass& operator=(const CapturedPass&) = delete;

  std::size_t num_nodes() const {
    std::size_t count = 0;
    cudaGraphGetNodes(graph_, nullptr, &count);
    return count;
  }
  void replay() const { EXPECT_EQ(cudaSuccess, cudaGraphLaunch(replay_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

TEST(CudaBackwardGraph, replay_with_changed_inputs) {
  MOXIE_NEEDS_GPU();
  LayerCase c = bf16_case(with_all_parts(bf16_problem(2, 8, 3), ActivationKind::swiglu), {64, 64});
  BackwardCase on_device(c);
  WorldOptions options = cuda_options(2);
  options.faults.poison_workspace = false;
  Plan small_ring;
  small_ring.chunk_blocks = 1, small_ring.backward_ring_blocks = 2;
  for (const Plan& plan : {Plan{}, small_ring, Plan{.mode = ExecMode::split}}) {
    World world = World::cuda(options, on_gpu_0(2));
    Layer layer(world, c.problem(), plan);
    Context context = layer.make_context();
    cudaStream_t stream;
    ASSERT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    world.set_stream(stream);
    {
      const CapturedPass forward(stream, [&] {
        layer.forward(on_device.forward_inputs(), on_device.forward_outputs(), context);
      });
      const CapturedPass backward(
          stream, [&] { layer.backward(context, on_device.inputs(), on_device.outputs()); });
      EXPECT_EQ(1u, backward.num_nodes());  // the whole pass is one kernel, in every mode
      for (int i = 0; i < 12; ++i) {
        // Of rank 1's 64 tokens 64, then 8, then none keep their routes.
        const std::int64_t kept = i % 3 == 0 ? 64 : i % 3 == 1 ? 8 : 0;
        const LayerCase fresh(c.spec, test_seed() + static_cast<std::uint64_t>(i));
        c.tokens = fresh.tokens;
        c.dy = fresh.dy;
        for (std::int64_t t = 64 + kept; t < 128; ++t) {
          for (std::int64_t k = 0; k < 3; ++k) c.expert_id(t, k) = -1;
        }
        // No route at all, once in a while.
        if (i == 5) std::fill(c.tokens.expert_ids.begin(), c.tokens.expert_ids.end(), -1);
        c.upload();
        on_device.upload();
        const PassOutputs want = on_device.run_alone();
        on_device.poison_outputs();
        cudaDeviceSynchronize();  // the stream does not wait for the default one
        forward.replay();
        backward.replay();
        world.synchronize();
        ASSERT_TRUE(same_bits(want, on_device.download())) << to_string(plan) << " replay " << i;
      }
    }
    world.set_stream(nullptr);
    cudaStreamDestroy(stream);
  }
}

// ---- timelines ----

void expect_whole_timeline(const std::vector<int>& devices, const Plan& plan,
                           std::int32_t cluster_size) {
  const auto num_ranks = static_cast<std::int64_t>(devices.size());
  const Problem p = bf16_problem(num_ranks, 9, 3, 512, 320);
  const LayerCase c =
      bf16_case(p, std::vector<std::int64_t>(devices.size(), 150), Routing::uniform);
  BackwardCase on_device(c, devices);
  World world = World::cuda(cuda_options(num_ranks), {devices, 0, cluster_size});
  Layer layer(world, c.problem(), plan);
  const PassOutputs want = on_device.run(world, layer);
  const Context context = layer.forward(on_device.forward_inputs(), on_device.forward_outputs());
  for (int pass = 0; pass < 2; ++pass) {
    trace::Trace trace;
    layer.backward(context, on_device.inputs(), on_device.outputs(), &trace);
    EXPECT_TRUE(same_bits(want, on_device.download()));  // tracing changes nothing
    EXPECT_EQ(trace.num_ranks, num_ranks);
    EXPECT_EQ(trace.title.find("backward"), 0u) << trace.title;
    EXPECT_EQ(trace.title.find("lost"), std::string::npos) << trace.title;
    std::set<std::tuple<std::int32_t, trace::Kind, std::int32_t, std::int32_t>> tasks;
    std::vector<std::int64_t> dgrad(devices.size()), dx(dgrad), wgrad(dgrad);
    for (const trace::Event& event : trace.events) {
      ASSERT_LE(event.begin_ns, event.end_ns);
      ASSERT_GE(event.begin_ns, 0);
      const auto rank = static_cast<std::size_t>(event.rank);
      if (event.kind == trace::Kind::wgrad) ++wgrad[rank];
      if (event.kind != trace::Kind::dgrad && event.kind != trace::Kind::dx) continue;
      EXPECT_TRUE(tasks.emplace(event.rank, event.kind, event.block, event.tile).second)
          << "twice: " << name(event.kind) << " block " << event.block << " tile " << event.tile;
      ++(event.kind == trace::Kind::dgrad ? dgrad : dx)[rank];
    }
    const pipeline::WgradTiles tiles{p.hidden, p.intermediate};
    for (std::size_t r = 0; r < devices.size(); ++r) {
      // As many blocks by dgrad as by dX; whole experts, so every gradient tile once.
      EXPECT_GT(dx[r], 0);
      EXPECT_EQ(dgrad[r] * pipeline::num_fc2_tiles(p.hidden),
                dx[r] * ceil_div(p.intermediate, pipeline::kWideDgradTileCols));
      EXPECT_EQ(wgrad[r], tiles.size() * num_local_experts(p.num_experts, num_ranks,
                                                           RankId{static_cast<std::int64_t>(r)}));
    }
  }
}

TEST(CudaBackwardTrace, every_task_once) {
  MOXIE_NEEDS_GPU();
  expect_whole_timeline({0, 0, 0}, {}, 1);
  expect_whole_timeline({0, 0, 0}, {}, 2);
  expect_whole_timeline({0, 0, 0}, {.save = SavePolicy::none, .comm_workers = 2}, 2);
}

TEST(CudaBackwardTrace, two_gpus) {
  MOXIE_NEEDS_TWO_GPUS();
  expect_whole_timeline({0, 1}, {}, 2);
}

}  // namespace
}  // namespace moxie::test
