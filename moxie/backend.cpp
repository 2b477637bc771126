// What backends whose ranks are processes agree on when a layer is made.
#include "moxie/backend.h"

#include <fmt/format.h>

namespace moxie {

std::string layer_words(const Problem& p, const Plan& plan) {
  return fmt::format(
      "{} limit={} alpha={}; mode={} order={} dispatch={} combine={} slabs={} band={} lag={} "
      "minibatch={} capacity={} x_ring={} hidden_ring={} chunk={} lag_chunks={} backward_ring={} "
      "save={} saved_rows={}",
      to_string(p), p.activation.limit, p.activation.alpha, name(plan.mode), name(plan.order),
      name(plan.dispatch), name(plan.combine), plan.num_slabs, plan.band_blocks, plan.lag_bands,
      plan.minibatch_blocks, plan.capacity_rows, plan.x_ring_blocks, plan.hidden_ring_blocks,
      plan.chunk_blocks, plan.lag_chunks, plan.backward_ring_blocks, name(plan.save),
      plan.saved_rows);
}

void check_same_layer(const std::vector<std::string>& words, const Plan& plan) {
  for (std::size_t r = 1; r < words.size(); ++r) {
    if (words[r] == words[0]) continue;
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the layer of rank {} is ({}), that of rank 0 is ({}); must be the "
                            "same on every rank",
                            r, words[r], words[0]));
  }
  if (plan.dispatch == DispatchMode::push && plan.save == SavePolicy::z_and_x) {
    throw Error(ErrorCode::invalid_plan,
                "plan.save is z+x with plan.dispatch push, must be none or z where ranks are "
                "processes: a peer cannot write into this one's context; nearest legal value z");
  }
}

}  // namespace moxie
