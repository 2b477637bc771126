// Making a device record out of measurements: what `moxie doctor --record` writes. Raw figures come
// in, constants go out with the sentence that says how; what was not measured is null.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "moxie/planner/device.h"
#include "moxie/planner/plan_json.h"

namespace moxie::planner {

struct Measurement {
  double value = 0;
  std::string source;
};
struct Measurements {
  std::string name, title;
  std::map<Field, Measurement> constants;
  std::vector<GemmPoint> gemm;
  OrderedJson also = OrderedJson::object();  // figures that no constant stands for
};

// Bytes that go with the payload of one packet, from the rate that the payload reaches on a link of
// `raw_gbps`: alone on its direction, or with `other_bytes` (headers of the way back) on it.
double packet_overhead_bytes(double raw_gbps, double payload_gbps, double payload_bytes,
                             double other_bytes = 0);

// `like`: the shipped record of this kind of GPU, or empty. It gives what no measurement can
// (tensor rates, domain), and says so. The text is judged by parse_device before it is returned:
// throws Error(invalid_argument) when a constant is missing that has no default.
std::string record_json(const Measurements& measured, const std::string& like);

}  // namespace moxie::planner
