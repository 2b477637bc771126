// `moxie doctor --record FILE`: measures a device record on this machine's GPUs and lays it beside
// the shipped one. GPU 0 is measured, and its link to GPU 1 where there is one.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <set>

#include "cli/device_tensors.h"
#include "cli/doctor.h"
#include "cli/errors.h"
#include "cli/files.h"
#include "cli/progress.h"
#include "moxie/planner/layer_plan.h"
#include "moxie/planner/record.h"
#if MOXIE_HAS_CUDA
#include "bench/device_gpu.h"
#endif

namespace moxie::cli {

#if MOXIE_HAS_CUDA
namespace {

using planner::Field;
using planner::Measurements;

std::string today() {
  char text[16] = {};
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

constexpr std::int64_t kFewRows = 8192, kManyRows = 32768;

class Recorder {
 public:
  explicit Recorder(const GpuMachineInfo& machine)
      : gpu_(machine.gpus.at(0)), like_(planner::record_of_device(gpu_.name)) {
    m_.name = "measured";
    m_.title = fmt::format("{}, measured by moxie doctor --record on {}", gpu_.name, today());
    where_ = fmt::format("measured on {}, {}, driver {}, CUDA {}", gpu_.name, today(),
                         machine.driver_version.empty() ? "unknown" : machine.driver_version,
                         machine.runtime_cuda.value_or("unknown"));
    if (gpu_.sm_clock_mhz) m_.also["clock_idle_mhz"] = *gpu_.sm_clock_mhz;
  }
  const std::string& like() const { return like_; }

  void set(Field field, double value, const std::string& how) {
    m_.constants[field] = {value, fmt::format("{}: {}", where_, how)};
  }

  void properties() {
    const bench::GpuProperties p = bench::gpu_properties(0);
    set(Field::num_sms, p.num_sms, "cudaDeviceProp");
    set(Field::clock_peak_mhz, p.clock_peak_mhz, "cudaDevAttrClockRate");
    set(Field::hbm_gb, p.memory_gb, "cudaDeviceProp");
    if (p.memory_peak_gbps > 10)
      set(Field::hbm_peak_gbps, p.memory_peak_gbps,
          "memory clock times bus width, twice per clock");
    set(Field::l2_mb, p.l2_mb, "cudaDeviceProp");
    if (gpu_.power_limit_w) set(Field::tdp_w, *gpu_.power_limit_w, "NVML, enforced power limit");
    if (gpu_.nvlinks.size() > 0) {
      raw_gbps_ = 25.0 * static_cast<double>(gpu_.nvlinks.size());
      set(Field::link_raw_gbps, *raw_gbps_,
          fmt::format("{} active NVLinks, 25 GB/s each and direction (NVLink 4)",
                      gpu_.nvlinks.size()));
    }
    num_sms_ = p.num_sms;
  }

  void memory_and_launches() {
    const bench::MemoryRates memory = bench::measure_memory(0);
    set(Field::hbm_gbps, memory.copy_gbps, "copy of 1 GiB by all SMs, bytes read and written");
    set(Field::sm_merge_gbps, memory.copy_gbps / num_sms_, "the same rate over all SMs");
    m_.also["l2_read_gbps"] = memory.l2_read_gbps;
    const bench::LaunchCosts costs = bench::measure_launches(0);
    set(Field::launch_us, costs.launch_us, "2000 empty kernels in one stream");
    set(Field::grid_sync_us, costs.grid_sync_us,
        "one CTA per SM, 2000 meetings at a counter in global memory");
    set(Field::local_load_us, costs.local_load_us, "2000 ld.acquire.sys of own memory in turn");
  }

  void products(Progress& progress) {
    const std::vector<bench::Product> products = all_products();
    const double rate = tensor_rate();
    const auto times = bench::measure_products(
        0, products, rate,
        [&](const std::string& what, double done) { progress.show(what, done); });
    std::vector<double> overheads;
    double burst_mhz = 0, most_flops = 0;
    for (std::size_t i = 0; i < products.size(); ++i) {
      const bench::Product& p = products[i];
      const bench::ProductTime& t = times[i];
      m_.gemm.push_back(
          {bench::kTileRows, bench::kTileCols, p.k, t.tflops, t.clock_mhz,
           fmt::format("{}: grouped {} of {} rows, n {}, burst", where_,
                       p.swiglu ? "gate and up with SwiGLU" : "product", p.rows, p.n)});
      if (p.rows == kManyRows) overheads.push_back(t.overhead_cycles);  // few: the last wave counts
      const double flops = t.tflops * t.ms;
      if (flops > most_flops) most_flops = flops, burst_mhz = t.clock_mhz, largest_ = p;
    }
    std::nth_element(overheads.begin(), overheads.begin() + overheads.size() / 2, overheads.end());
    set(Field::tile_overhead_cycles, std::max(0.0, overheads[overheads.size() / 2]),
        fmt::format("median over {} grouped products of cycles per tile less its products",
                    overheads.size()));
    set(Field::clock_burst_mhz, burst_mhz,
        fmt::format("{}, 24 ms after 120 ms idle", largest_.name));
    set(Field::clock_sustained_mhz, bench::sustained_clock_mhz(0, largest_),
        fmt::format("{}, after 500 ms of load", largest_.name));
  }

  // False: there is no second GPU within reach.
  bool link() {
    bench::LinkRates r;
    if (!bench::measure_link(0, 1, r)) return false;
    set(Field::sm_pull_gbps, r.pull_gbps.front(),
        "contiguous pull by one CTA, 12 x 16 KB in flight");
    set(Field::sm_push_gbps, r.push_gbps.front(),
        "contiguous push by one CTA, 12 x 16 KB in flight");
    set(Field::remote_load_us, r.remote_load_us,
        "2000 ld.acquire.sys of the peer's memory in turn");
    set(Field::signal_us, r.signal_us, "half of a flag ping-pong, 1990 rounds");
    if (raw_gbps_) packets(r);
    m_.also["copies"] = {{"ctas", r.ctas},
                         {"pull_gbps", r.pull_gbps},
                         {"push_gbps", r.push_gbps},
                         {"both_pull_gbps", r.pull_both_gbps},
                         {"both_push_gbps", r.push_both_gbps},
                         {"copy_engine_gbps", r.copy_engine_gbps}};
    return true;
  }

  // Of more than two GPUs. False: some do not reach each other.
  bool all_links(int num_gpus) {
    bench::AllLinkRates r;
    if (!bench::measure_all_links(num_gpus, r)) return false;
    m_.also["all_at_once"] = {{"pull_gbps", r.pull_gbps}, {"push_gbps", r.push_gbps}};
    return true;
  }

  std::string json() const { return planner::record_json(m_, like_); }
  const planner::OrderedJson& also() const { return m_.also; }

 private:
  // Headers and requests from what the payload reaches, one way and both ways at once.
  void packets(const bench::LinkRates& r) {
    constexpr double kPayload = 128;
    const double one_way =
        std::max(r.copy_engine_gbps, *std::max_element(r.push_gbps.begin(), r.push_gbps.end()));
    const double header = planner::packet_overhead_bytes(*raw_gbps_, one_way, kPayload);
    const auto say = [](const char* what, double gbps) {
      return fmt::format("{}: {:.0f} GB/s of payload in packets of 128 B", what, gbps);
    };
    set(Field::push_forward_bytes, header, say("fastest copy one way", one_way));
    set(Field::pull_forward_bytes, header,
        say("taken to be that of a push; fastest copy one way", one_way));
    set(Field::push_reverse_bytes,
        planner::packet_overhead_bytes(*raw_gbps_, r.push_both_gbps, kPayload, header),
        say("both GPUs pushing", r.push_both_gbps));
    set(Field::pull_reverse_bytes,
        planner::packet_overhead_bytes(*raw_gbps_, r.pull_both_gbps, kPayload, header),
        say("both GPUs pulling", r.pull_both_gbps));
  }

  double tensor_rate() const {
    const planner::Constant rate =
        planner::find_device(like_.empty() ? "h200" : like_)
            .constants[static_cast<std::size_t>(Field::bf16_flops_per_sm_clock)];
    return rate.value;
  }

  // Gate-up and down products of every preset, few and many rows; each shape once.
  static std::vector<bench::Product> all_products() {
    std::vector<bench::Product> products;
    std::set<std::pair<std::int64_t, std::int64_t>> seen;
    for (const Preset& preset : presets()) {
      const std::int64_t H = preset.hidden, I = preset.intermediate;
      if (!seen.insert({H, I}).second) continue;
      for (const std::int64_t rows : {kFewRows, kManyRows}) {
        products.push_back(
            {fmt::format("{} gate and up, {} rows", preset.name, rows), true, I, H, rows});
        products.push_back({fmt::format("{} down, {} rows", preset.name, rows), false, H, I, rows});
      }
    }
    return products;
  }

  const GpuInfo& gpu_;
  std::string like_, where_;
  Measurements m_;
  std::optional<double> raw_gbps_;
  double num_sms_ = 1;
  bench::Product largest_;
};

void print_beside(const planner::DeviceRecord& measured, const std::string& like) {
  std::optional<planner::DeviceRecord> shipped;
  if (!like.empty()) shipped = planner::find_device(like);
  fmt::print("{:<26}{:>8}{:>12}{:>12}{:>9}\n", "", "", "measured",
             shipped ? "record " + like : "no record", "ratio");
  for (std::size_t i = 0; i < planner::kNumFields; ++i) {
    const planner::FieldRule& rule = planner::rule(static_cast<Field>(i));
    const planner::Constant& mine = measured.constants[i];
    const bool taken = mine.source.starts_with("taken from");
    const auto number = [](bool known, double value) {
      return known ? fmt::format("{:.5g}", value) : std::string("-");
    };
    const bool theirs = shipped && shipped->constants[i].known;
    fmt::print("{:<26}{:>8}{:>12}{:>12}{:>9}\n", rule.name, rule.unit,
               taken ? "taken" : number(mine.known, mine.value),
               number(theirs, theirs ? shipped->constants[i].value : 0),
               mine.known && !taken && theirs && shipped->constants[i].value > 0
                   ? fmt::format("{:.3f}", mine.value / shipped->constants[i].value)
                   : "-");
  }
}

}  // namespace

int record_device(const std::string& file) {
  require_cuda();
  check_writable(file);
  const GpuMachineInfo machine = examine_gpus();  // before anything runs: the idle clock
  Recorder recorder(machine);
  Progress progress;
  progress.show("properties", 0);
  recorder.properties();
  progress.show("memory and launches", 0);
  recorder.memory_and_launches();
  recorder.products(progress);
  progress.show("link", 0.9);
  std::string no_link = "there is one GPU";
  try {
    if (machine.gpus.size() > 1)
      no_link = recorder.link() ? "" : "GPUs 0 and 1 do not reach each other's memory";
    const auto num_gpus = static_cast<int>(machine.gpus.size());
    if (num_gpus > 2 && !recorder.all_links(num_gpus))
      no_link = "some GPUs do not reach each other's memory: all at once";
  } catch (const Error& error) {  // what one GPU showed is still worth a record
    no_link = error.what();
  }
  progress.clear();
  const std::string text = recorder.json();
  write_file(file, text);
  const planner::DeviceRecord record = planner::parse_device(text, file);
  print_beside(record, recorder.like());
  fmt::print("\n{:<12}{:>8}{:>10}{:>10}\n", "tile", "K", "TFLOP/s", "MHz");
  for (const planner::GemmPoint& p : record.gemm)
    fmt::print("{:<12}{:>8}{:>10.1f}{:>10.0f}  {}\n",
               fmt::format("{}x{}", p.tile_rows, p.tile_cols), p.k, p.tflops, p.clock_mhz,
               p.source.substr(p.source.rfind(": ") + 2));
  fmt::print("\nalso        {}\n", recorder.also().dump());
  if (!no_link.empty()) fmt::print("note        what a link does was not measured: {}\n", no_link);
  fmt::print("written     {} (`moxie plan --device {}` uses it)\n", file, file);
  return kExitOk;
}

#else

int record_device(const std::string&) {
  throw Failure(
      "--record measures a GPU and needs a build with CUDA, which this is not; `make cuda` puts "
      "one "
      "at build/cuda/bin/moxie");
}

#endif

}  // namespace moxie::cli
