// What a measured row is held against: the time that the simulator predicts, and the bytes that
// have to cross the links.
#pragma once
#include <map>
#include <optional>

#include "cli/bench_target.h"

namespace moxie::cli {

// Every rank has a GPU of its own: what crosses between ranks crosses a link.
bool has_links(const BenchTarget& target);

// ms of the slowest rank under the target's plan and routing, by mode. Empty where the GPU has no
// device record, and where ranks share one.
std::map<BenchMode, double> predicted_ms(const BenchTarget& target, const Scenario& scenario);

// Payload of the ranks that take most of it in, and that send most of it out, in one pass: a token
// once to every other rank that has an expert of it (backward: dY, and x unless it was kept), and a
// row back for each route. A plan that copies tokens once per route, or whose ring is smaller than
// the work, moves more.
struct LinkBytes {
  std::int64_t in = 0, out = 0;
};
LinkBytes link_bytes(const BenchTarget& target, const Scenario& scenario);

}  // namespace moxie::cli
