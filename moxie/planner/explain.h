// Words and sums around a choice: what is kept in memory, what limits the layer, which knob
// matters.
#pragma once
#include <string>
#include <vector>

#include "moxie/planner/choose.h"

namespace moxie::planner {

struct NamedGb {
  std::string name;
  double gb = 0;
};
// What a forward keeps of one rank for the backward.
std::vector<NamedGb> context_gb(const Problem& problem, const Plan& plan);

// What changing one knob of the chosen plan does to its time: 0.03 = 3 % slower.
struct KnobEffect {
  std::string change;
  double slower = 0;
};
std::string explain(const PlanRequest& request, const PlanChoice& choice,
                    std::vector<KnobEffect> effects);
std::vector<std::string> plan_notes(const PlanRequest& request, const Machine& machine,
                                    const PlanChoice& choice);

}  // namespace moxie::planner
