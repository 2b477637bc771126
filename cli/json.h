// Problem, plan and machine as JSON: the same words in problem.json of a dump and in the report of
// a run.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "cli/tensors.h"
#include "moxie/planner/plan_json.h"

namespace moxie::cli {

using Json = nlohmann::ordered_json;

// Indented, with a newline at the end. A file name that is no UTF-8 does not stop a report.
std::string to_text(const Json& json);
using planner::to_json;  // of Problem and Plan
Json machine_json();     // cores, CPU, operating system

// `where` names the file in errors. Throws Failure for a missing key, a wrong type or an unknown
// word.
Problem problem_from_json(const Json& json, const std::string& where);
// json[key] as a whole number.
std::int64_t integer_at(const Json& json, const char* key, const std::string& where);
Json parse_json_file(const std::string& path);

}  // namespace moxie::cli
