// A Mixture-of-Experts layer over two ranks on the CPU, forward and backward, public API only. The
// output is linear in the route weights, so the passes must agree: sum(dy * y) = sum(w * dw).
#include <moxie/moxie.h>

#include <cmath>
#include <cstdio>
#include <deque>
#include <random>
#include <vector>

// A tensor of random numbers; it lives until the program ends.
moxie::TensorView tensor(moxie::Shape shape, float scale = 0.0f) {
  static std::deque<std::vector<float>> storage;
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  auto& values = storage.emplace_back(static_cast<std::size_t>(shape.num_elements()));
  for (float& v : values) v = scale * normal(generator);
  return {values.data(), shape};
}

double dot(moxie::ConstTensorView a, moxie::ConstTensorView b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.shape.num_elements(); ++i) {
    sum += double{a.as<float>()[i]} * double{b.as<float>()[i]};
  }
  return sum;
}

int main() {
  const std::int64_t R = 2, H = 128, I = 64, E = 5, K = 2;  // 5 experts on 2 ranks: 3 and 2
  const std::int64_t num_tokens[R] = {7, 4};                // every rank brings its own number

  moxie::World world = moxie::World::cpu({.num_ranks = R});
  moxie::Problem problem;
  problem.num_ranks = R;
  problem.max_tokens = 8;
  problem.hidden = H;
  problem.intermediate = I;
  problem.num_experts = E;
  problem.top_k = K;
  problem.dtype = moxie::DType::f32;
  moxie::Layer layer(world, problem);  // plan chosen, memory allocated, all of it checked

  std::vector<moxie::ForwardInput> in(R);
  std::vector<moxie::ForwardOutput> out(R);
  std::vector<moxie::BackwardInput> grad_in(R);
  std::vector<moxie::BackwardOutput> grad_out(R);
  std::vector<std::int32_t> expert_ids[R];  // [T, K], -1 would mean: no route
  for (int r = 0; r < R; ++r) {
    const std::int64_t T = num_tokens[r], L = num_local_experts(E, R, moxie::RankId{r});
    for (std::int64_t route = 0; route < T * K; ++route) {
      expert_ids[r].push_back(static_cast<std::int32_t>((3 * route + r) % E));
    }
    in[r].x = tensor({T, H}, 1.0f);
    in[r].expert_ids = {expert_ids[r].data(), {T, K}};
    in[r].route_weights = tensor({T, K}, 0.5f);
    in[r].weights.gate = tensor({L, I, H}, 0.1f);
    in[r].weights.up = tensor({L, I, H}, 0.1f);
    in[r].weights.down = tensor({L, H, I}, 0.1f);
    out[r].y = tensor({T, H});
    grad_in[r] = {.x = in[r].x, .dy = tensor({T, H}, 1.0f), .weights = in[r].weights};
    grad_out[r].dx = tensor({T, H});
    grad_out[r].d_route_weights = tensor({T, K});
    grad_out[r].grads.gate = tensor({L, I, H});
    grad_out[r].grads.up = tensor({L, I, H});
    grad_out[r].grads.down = tensor({L, H, I});
  }
  const moxie::Context context = layer.forward(in, out);
  layer.backward(context, grad_in, grad_out);

  bool agree = true;
  for (int r = 0; r < R; ++r) {
    const double forward = dot(grad_in[r].dy, out[r].y);
    const double backward = dot(in[r].route_weights, grad_out[r].d_route_weights);
    agree = agree && forward != 0 && std::abs(forward - backward) <= 1e-4 * std::abs(forward);
    std::printf("rank %d: sum(dy * y) = %.5f, sum(w * dw) = %.5f\n", r, forward, backward);
  }
  std::printf("moxie %s: %s\n", moxie::version().c_str(), agree ? "the passes agree" : "MISMATCH");
  return agree ? 0 : 1;
}
