#include "tests/support/judge.h"

#include <algorithm>
#include <cmath>

namespace moxie::test {
namespace {

void accumulate(std::vector<double>& sum, const std::vector<double>& part) {
  sum.resize(std::max(sum.size(), part.size()), 0.0);
  for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
}

template <class T>
std::vector<T> rows(const std::vector<T>& values, Span range, std::int64_t row) {
  return {values.begin() + range.begin * row, values.begin() + range.end * row};
}

}  // namespace

Tolerance tolerance_of(DType storage) {
  // f32: sums of a few hundred terms, 2^-24 each. bf16: three roundings of 2^-9 on the way.
  return storage == DType::bf16 ? Tolerance{5e-3, 2e-2} : Tolerance{1e-5, 5e-5};
}

::testing::AssertionResult close_to(const std::string& what, std::span<const double> ref,
                                    std::span<const double> got, std::int64_t group_in,
                                    Tolerance tol, std::span<const double> squares,
                                    std::span<const std::int64_t> terms) {
  const auto size2 = [&](std::size_t i) {
    return squares.empty() ? ref[i] * ref[i] : std::max(ref[i] * ref[i], squares[i]);
  };
  if (ref.size() != got.size()) {
    return ::testing::AssertionFailure()
           << what << ": " << got.size() << " elements, expected " << ref.size();
  }
  const std::size_t group = group_in > 0 ? static_cast<std::size_t>(group_in) : ref.size();
  double error2 = 0, norm2 = 0;
  std::size_t num_bad = 0, first_bad = 0;
  for (std::size_t begin = 0; begin < ref.size(); begin += group) {
    const std::size_t end = std::min(begin + group, ref.size());
    double sum2 = 0;
    for (std::size_t i = begin; i < end; ++i) sum2 += size2(i);
    const double rms = std::sqrt(sum2 / static_cast<double>(end - begin));
    const bool is_one_term = !terms.empty() && terms[begin / group] == 1;
    const double elementwise = tol.elementwise * (is_one_term ? 2 : 1);
    for (std::size_t i = begin; i < end; ++i) {
      const double d = got[i] - ref[i];
      error2 += d * d;
      if (!(std::abs(d) <= elementwise * (rms + std::sqrt(size2(i))))) {  // catches NaN
        if (num_bad++ == 0) first_bad = i;
      }
    }
    norm2 += sum2;
  }
  const bool l2_ok = std::sqrt(error2) <= tol.rel_l2 * std::sqrt(norm2);
  if (num_bad == 0 && l2_ok) return ::testing::AssertionSuccess();
  auto failure = ::testing::AssertionFailure() << what << ": ";
  if (num_bad > 0) {
    failure << num_bad << " of " << ref.size() << " elements are off, the first is "
            << first_bad / group << ":" << first_bad % group << " (group:element), "
            << got[first_bad] << " against " << ref[first_bad] << "; ";
  }
  return failure << "relative L2 error " << std::sqrt(error2 / norm2) << ", allowed " << tol.rel_l2;
}

Reference reference_of(const LayerCase& c, bool with_backward) {
  const Problem& p = c.problem();
  Reference ref;
  for (std::int64_t r = 0; r < p.num_ranks; ++r) {
    const Span range = c.tokens_of(r);
    const oracle::Tokens own{range.size(), rows(c.tokens.x, range, p.hidden),
                             rows(c.tokens.expert_ids, range, p.top_k),
                             rows(c.tokens.route_weights, range, p.top_k)};
    const std::vector<double> y = oracle::forward(p, c.params, own);
    ref.y.insert(ref.y.end(), y.begin(), y.end());
    if (!with_backward) continue;
    oracle::Gradients g = oracle::backward(p, c.params, own, rows(c.dy, range, p.hidden));
    ref.grads.dx.insert(ref.grads.dx.end(), g.dx.begin(), g.dx.end());
    ref.grads.d_route_weights.insert(ref.grads.d_route_weights.end(), g.d_route_weights.begin(),
                                     g.d_route_weights.end());
    ref.grads.d_route_squares.insert(ref.grads.d_route_squares.end(), g.d_route_squares.begin(),
                                     g.d_route_squares.end());
    for (const Part& part : kParts) {
      if (!part.per_expert) continue;
      accumulate(ref.grads.params.*part.values, g.params.*part.values);
      accumulate(ref.grads.squares.*part.values, g.squares.*part.values);
    }
    ref.per_rank.push_back(std::move(g));
  }
  return ref;
}

void add_weight_grads(Reference& sum, const Reference& more) {
  for (const Part& part : kParts) {
    accumulate(sum.grads.params.*part.values, more.grads.params.*part.values);
    accumulate(sum.grads.squares.*part.values, more.grads.squares.*part.values);
    for (std::size_t r = 0; r < sum.per_rank.size(); ++r) {
      accumulate(sum.per_rank[r].params.*part.values, more.per_rank[r].params.*part.values);
      accumulate(sum.per_rank[r].squares.*part.values, more.per_rank[r].squares.*part.values);
    }
  }
}

void expect_close(const LayerCase& c, const Reference& ref, const PassOutputs& got,
                  bool with_backward, bool prefilled) {
  const Problem& p = c.problem();
  const Tolerance tol = tolerance_of(p.dtype);
  // The errors of one token are no mean of many: gradients that it alone adds to are allowed twice
  // as much.
  const auto tol_of_sums = [&](std::int64_t num_tokens) {
    Tolerance wide = tol;
    if (num_tokens == 1) wide.rel_l2 *= 2;
    return wide;
  };
  std::vector<std::int64_t> rows_of_experts(static_cast<std::size_t>(p.num_experts), 0);
  for (const std::int64_t e : c.tokens.expert_ids) {
    if (e >= 0) ++rows_of_experts[static_cast<std::size_t>(e)];
  }
  std::vector<double> y, dx, d_route_weights;
  for (const RankOutputs& rank : got.ranks) {
    rank.y.append_to(y);
    rank.dx.append_to(dx);
    rank.d_route_weights.append_to(d_route_weights);
  }
  EXPECT_TRUE(close_to("y", ref.y, y, p.hidden, tol));
  if (!with_backward) return;
  EXPECT_TRUE(close_to("dx", ref.grads.dx, dx, p.hidden, tol));
  EXPECT_TRUE(close_to("d_route_weights", ref.grads.d_route_weights, d_route_weights, p.top_k, tol,
                       ref.grads.d_route_squares));
  for (std::size_t part = 0; part < kNumParts; ++part) {
    if (part_shape(p, part, p.num_experts).rank == 0) continue;
    const std::string what = std::string("d_") + kParts[part].name;
    std::vector<double> all;
    for (std::int64_t r = 0; r < p.num_ranks; ++r) {
      const OwnedTensor& grad = got.ranks[static_cast<std::size_t>(r)].grads[part];
      std::vector<double> values = grad.values();
      for (std::size_t i = 0; prefilled && i < values.size(); ++i) {
        values[i] -= PassOutputs::prefilled(part, i);
      }
      if (kParts[part].per_expert) {
        all.insert(all.end(), values.begin(), values.end());
        continue;
      }
      const oracle::Gradients& want = ref.per_rank[static_cast<std::size_t>(r)];
      // The output gate's gradient has one error for each token, shared by all its elements, so its
      // sum is judged like an element.
      Tolerance own_tol = tol_of_sums(c.tokens_of(r).size());
      if (kParts[part].values == &oracle::Params::shared_output_gate)
        own_tol.rel_l2 = tol.elementwise;
      EXPECT_TRUE(close_to(what + " of rank " + std::to_string(r), want.params.*kParts[part].values,
                           values, 0, own_tol, want.squares.*kParts[part].values));
    }
    if (!kParts[part].per_expert) continue;
    const auto group = static_cast<std::int64_t>(all.size()) / p.num_experts;
    EXPECT_TRUE(close_to(what, ref.grads.params.*kParts[part].values, all, group,
                         tol_of_sums(c.tokens.num_tokens), ref.grads.squares.*kParts[part].values,
                         rows_of_experts));
  }
}

void expect_right(const LayerCase& c, const Plan& plan, DType grad_dtype) {
  expect_close(c, reference_of(c), run_alone(c, plan, grad_dtype));
}

}  // namespace moxie::test
