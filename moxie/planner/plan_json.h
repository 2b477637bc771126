// Problem and Plan as JSON: the same words in the plan cache, in problem.json of a dump and in
// every report of the command.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "moxie/pipeline/plan.h"

namespace moxie::planner {

using OrderedJson = nlohmann::ordered_json;

OrderedJson to_json(const Problem& problem);
OrderedJson to_json(const Plan& plan);
// Throws Error(invalid_plan) for a field that is missing, unknown, of another type or an unknown
// word; whether the plan is legal is pipeline::check's to say. `where` names it in sentences.
Plan plan_from_json(const nlohmann::json& json, const std::string& where);

}  // namespace moxie::planner
