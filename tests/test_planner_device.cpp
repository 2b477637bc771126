// Device records: the shipped ones are whole and sourced, bad ones are refused with a way out, gaps
// are filled by rules that are told, and the link's packet model gives the rates that were
// measured.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "moxie/planner/device.h"
#include "tests/support/expect_error.h"

namespace moxie::planner {
namespace {

using test::expect_error;

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(PlannerDevice, ShippedRecordsAreWholeAndSourced) {
  const std::vector<std::string> names = device_names();
  ASSERT_EQ(names, (std::vector<std::string>{"b200", "gb300", "h100", "h200"}));
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const DeviceRecord record = find_device(name);
    EXPECT_EQ(record.name, name);
    for (std::size_t i = 0; i < kNumFields; ++i) {
      EXPECT_GT(record.constants[i].source.size(), 5u) << rule(static_cast<Field>(i)).name;
    }
    const Machine m = machine(record);
    std::size_t unknown = 0;
    for (const Constant& c : record.constants) unknown += c.known ? 0 : 1;
    EXPECT_EQ(m.assumed.size(), unknown);
    for (std::size_t i = 0; i < kNumFields; ++i) {
      const FieldRule& r = rule(static_cast<Field>(i));
      EXPECT_TRUE(m.values[i] >= r.min && m.values[i] <= r.max) << r.name << " " << m.values[i];
    }
    EXPECT_LT(machine(record, Load::sustained).clock_mhz, m.clock_mhz);
  }
  EXPECT_LT(machine(find_device("h200")).assumed.size(), 6u);
}

TEST(PlannerDevice, BadRecordsAreRefusedWithAWayOut) {
  const std::string good = device_json("h200");
  const auto refuse = [](const std::string& text, const std::vector<std::string>& parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { parse_device(text, "my.json"); });
  };
  refuse("[1, 2", {"my.json is no JSON object"});
  refuse(replaced(good, "\"title\"", "\"tilte\""), {"my.json", "'title' must be a text"});
  refuse(replaced(good, "\"num_sms\"", "\"num_sm\""),
         {"constant 'num_sm' is not known", "nearest known one is 'num_sms'"});
  refuse(replaced(good, "{\"value\": 132,", "{\"value\": null,"),
         {"num_sms is null", "nothing can be assumed"});
  refuse(replaced(good, "{\"value\": 132,", "{\"value\": -4,"),
         {"num_sms is -4 SMs, must be between 1 and 1024", "nearest legal value 1"});
  refuse(replaced(good, "{\"value\": 132,", "{\"value\": \"many\","),
         {"num_sms is \"many\"", "number of SMs or null"});
  refuse(replaced(good, "{\"value\": 4800,", "{\"value\": 4.8e12,"),
         {"hbm_peak_gbps is 4800000000000 GB/s", "nearest legal value 100000"});
  refuse(replaced(good, "\"source\": \"cudaDeviceProp\"", "\"source\": \"\""),
         {"l2_mb", "'source' must be a text"});
  const std::size_t begin = good.find("  \"l2_mb\""), end = good.find('\n', begin);
  refuse(std::string(good).erase(begin, end - begin + 1),
         {"constant 'l2_mb'", "is missing", "write null"});
  refuse(replaced(good, "\"tile_rows\": 128", "\"tile_rows\": 0"), {"'tile_rows' > 0"});
  expect_error(ErrorCode::invalid_argument,
               {"device 'h20' is not known", "'h200'", "ending in .json"},
               [] { find_device("h20"); });
  expect_error(ErrorCode::invalid_argument, {"no/such.json cannot be read"},
               [] { find_device("no/such.json"); });
}

// Both directions busy: a direction carries its own payload and headers, and the requests or
// acknowledgements of the other one. Measured: pull 332-338, push 346-363 GB/s; one way 394.
TEST(PlannerDevice, PacketsExplainTheMeasuredLinkRates) {
  const Machine m = machine(find_device("h200"));
  const WireBytes pull = pull_wire(m), push = push_wire(m);
  const double raw = m[Field::link_raw_gbps];
  EXPECT_NEAR(raw / (pull.forward + pull.reverse), 335, 3);
  EXPECT_NEAR(raw / (push.forward + push.reverse), 355, 10);
  EXPECT_NEAR(raw / push.forward, 394, 8);
}

// The products of every measured row, at their own clock, take at most what was measured, and the
// per-tile overhead explains the rest within 6 %.
TEST(PlannerDevice, TileOverheadExplainsTheMeasuredProducts) {
  const DeviceRecord record = find_device("h200");
  const Machine m = machine(record);
  ASSERT_GE(record.gemm.size(), 10u);
  for (const GemmPoint& p : record.gemm) {
    const double flops = 2.0 * static_cast<double>(p.tile_rows * p.tile_cols * p.k);
    const double products = flops / m[Field::bf16_flops_per_sm_clock];
    const double peak = m[Field::bf16_flops_per_sm_clock] * m[Field::num_sms] * p.clock_mhz * 1e-6;
    const double reached = p.tflops / peak;  // of the tensor rate, real rows only
    EXPECT_LT(reached, 1.0) << p.source;
    const double predicted = products / (products + m[Field::tile_overhead_cycles]);
    EXPECT_NEAR(reached / predicted, 1.0,
                p.source.find("gpt-oss") != std::string::npos ? 0.12 : 0.08)
        << p.source << " reached " << reached << " predicted " << predicted;
  }
}

}  // namespace
}  // namespace moxie::planner
