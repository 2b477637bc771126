// A measured device record: it loads, keeps what was measured, says what was taken from elsewhere
// and leaves the rest null; link overheads come out as the shipped record has them.
#include <gtest/gtest.h>

#include "moxie/planner/choose.h"
#include "moxie/planner/record.h"
#include "moxie/planner/studies.h"
#include "tests/support/expect_error.h"

namespace moxie::planner {
namespace {

Measurements one_gpu() {
  Measurements m{.name = "measured", .title = "a GPU"};
  m.constants[Field::num_sms] = {132, "measured: cudaDeviceProp"};
  m.constants[Field::clock_peak_mhz] = {1980, "measured: attribute"};
  m.constants[Field::hbm_gb] = {150.1234567, "measured: cudaDeviceProp"};
  m.constants[Field::hbm_peak_gbps] = {4917.3, "measured: clock and width"};
  m.constants[Field::link_raw_gbps] = {450, "measured: 18 links"};
  m.constants[Field::hbm_gbps] = {4012.345, "measured: copy"};
  m.gemm.push_back({128, 256, 7168, 812.3456, 1551.2, "measured: kimi gate"});
  m.also["l2_read_gbps"] = 7000;
  return m;
}
const Constant& of(const DeviceRecord& r, Field f) {
  return r.constants[static_cast<std::size_t>(f)];
}

TEST(PlannerRecord, LoadsAndSaysWhereEachNumberIsFrom) {
  const std::string text = record_json(one_gpu(), "h200");
  const DeviceRecord r = parse_device(text, "it");
  EXPECT_EQ(of(r, Field::hbm_gbps).value, 4012);  // four digits
  EXPECT_EQ(of(r, Field::hbm_gb).value, 150.1);
  EXPECT_EQ(of(r, Field::hbm_gbps).source, "measured: copy");
  EXPECT_EQ(of(r, Field::bf16_flops_per_sm_clock).value, 4096);
  EXPECT_TRUE(of(r, Field::bf16_flops_per_sm_clock)
                  .source.starts_with("taken from the shipped record h200: "));
  // The shipped record knows these, but they were not measured here.
  for (const Field f : {Field::moved_ms_per_gb, Field::remote_load_us, Field::network_gbps,
                        Field::spare_warp_gbps}) {
    EXPECT_FALSE(of(r, f).known) << rule(f).name;
    EXPECT_EQ(of(r, f).source, "not measured");
  }
  ASSERT_EQ(r.gemm.size(), 1u);
  EXPECT_EQ(r.gemm[0].tflops, 812.3);
  EXPECT_NE(text.find("l2_read_gbps"), std::string::npos);
}

TEST(PlannerRecord, TheMeasuredOneOfTheResultsIsRead) {
  const DeviceRecord r = find_device(MOXIE_SOURCE_DIR "/bench/results/h200x2-record.json");
  EXPECT_TRUE(of(r, Field::hbm_gbps).known);
  EXPECT_FALSE(of(r, Field::fused_tile_cycles).known);  // younger than it
}

TEST(PlannerRecord, PlansCanBeMadeFromIt) {
  const Machine m = machine(parse_device(record_json(one_gpu(), "h200"), "it"));
  PlanRequest request;
  request.problem = study_problem("moonlight-16b", 2, 512);
  request.passes = Passes::forward;
  EXPECT_GT(choose_plan(request, m).chosen.forward_ms, 0);
}

TEST(PlannerRecord, AnUnknownGpuMustSayWhatNothingElseSays) {
  test::expect_error(ErrorCode::invalid_argument, {"bf16_flops_per_sm_clock is null"},
                     [] { record_json(one_gpu(), ""); });
  Measurements m = one_gpu();
  m.constants[Field::bf16_flops_per_sm_clock] = {4096, "by hand"};
  m.constants[Field::domain_ranks] = {1, "by hand"};
  EXPECT_NO_THROW(record_json(m, ""));
  m.constants[Field::num_sms] = {0, "measured"};
  test::expect_error(ErrorCode::invalid_argument, {"num_sms is 0", "nearest legal value 1"},
                     [&] { record_json(m, ""); });
}

// The rates that the shipped constants were calibrated on give these constants again.
TEST(PlannerRecord, PacketOverheadsFollowFromRates) {
  EXPECT_NEAR(packet_overhead_bytes(450, 400, 128), 16, 0.01);
  EXPECT_NEAR(packet_overhead_bytes(450, 335, 128, 16), 28, 0.1);
  EXPECT_NEAR(packet_overhead_bytes(450, 360, 128, 16), 16, 0.01);
  EXPECT_EQ(packet_overhead_bytes(450, 460, 128), 0);   // faster than the link: nothing is left
  EXPECT_EQ(packet_overhead_bytes(450, 10, 128), 256);  // no link: the most that is legal
}

}  // namespace
}  // namespace moxie::planner
