// Studies of the mechanisms one at a time: signals, packets, skew, minibatches.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "moxie/pipeline/tiles.h"
#include "moxie/planner/studies.h"

namespace moxie::planner {

// Push: a rank that receives from n peers is told by n flags, and a sender that serves n peers
// raises them one after another, each release waiting for its acknowledgement. Pull: the peers' "my
// inputs are ready" words arrive together and are read one by one from own memory; the rows'
// arrival is known when the loads return.
Study study_signalling() {
  Study s{"signalling",
          "time for signals between a rank and n peers, microseconds",
          "Mixture-of-Kittens on GB300 NVL72, multi-node microbenchmark, up to 71 peers",
          {},
          {}};
  const Machine m = machine(find_device("gb300"));
  const double flag = m[Field::signal_us], local = m[Field::local_load_us],
               remote = m[Field::remote_load_us];
  for (const int peers : {1, 8, 16, 32, 48, 71}) {
    const bool last = peers == 71;
    const double push = peers * flag + flag, pull = flag + peers * local + remote + local;
    StudyRow row{fmt::format("push, {} peers", peers), {}, push, "us", RowKind::own, ""};
    if (last) {
      row.published = 103;
      row.kind = RowKind::prediction;
      row.note = "latency of H200 (1.35 us one way): GB300's is not published";
    }
    s.rows.push_back(row);
    row = {fmt::format("pull, {} peers", peers), {}, pull, "us", RowKind::own, ""};
    if (last) {
      row.published = 18;
      row.kind = RowKind::prediction;
      row.note =
          "misses: 0.15 us per local word is H200's; 18 us need 0.22 us per peer, or loads "
          "that one thread issues one after another (0.3 us a row on H200)";
    }
    s.rows.push_back(row);
  }
  return s;
}

Study study_packet_bytes() {
  Study s{"packet-bytes",
          "bytes on the wire for a 256 x 256 BF16 tile, both directions, KiB",
          "Mixture-of-Kittens on GB300 NVL72",
          {"pull_reverse_bytes 28: on both ranks of 2 x H200 pulling at once (335 GB/s)"},
          {}};
  const Machine m = machine(find_device("gb300"));
  const double payload = 256 * 256 * 2 / 1024.0;
  const WireBytes push = push_wire(m), pull = pull_wire(m);
  s.rows.push_back({"push", 159.6, payload * (push.forward + push.reverse), "KiB",
                    RowKind::prediction, "one header and one acknowledgement flit per 128 B"});
  s.rows.push_back({"pull", 172.0, payload * (pull.forward + pull.reverse), "KiB",
                    RowKind::prediction, "one header flit and a request of 28 B per 128 B"});
  return s;
}

// Rows of a width that leaves the link as the only limit. Link use = payload over time; pull over
// push is the ratio of the times.
Study study_imbalance() {
  Study s{"imbalance",
          "link use of pull dispatch over push dispatch under skew, link-bound layer",
          "Mixture-of-Kittens on GB300 NVL72: up to +29 % for pull",
          {},
          {}};
  const Machine m = machine(find_device("gb300"));
  double best = -1;
  for (const double exponent : {0.0, 0.5, 1.0, 1.5}) {
    for (const std::int32_t comm : {0, 16}) {
      Problem p = study_problem("kimi-k2.5", 16, 4096);
      p.intermediate = 64;
      p.shared = {};
      RoutingSpec spec;
      spec.skew = Skew::zipf;
      spec.exponent = exponent;
      const RoutingCounts routing = make_routing(p, std::vector<std::int64_t>(16, 4096), spec);
      Plan pull;
      pull.save = SavePolicy::none;
      pull.comm_workers = comm;
      Plan push = pull;
      push.dispatch = DispatchMode::push;
      SimOptions same_rows;  // both ways move every route
      same_rows.mechanisms.dedupe = false;
      const double gain = simulate(p, pipeline::resolve(p, push), routing, m, same_rows).ms /
                              simulate(p, pipeline::resolve(p, pull), routing, m, same_rows).ms -
                          1;
      best = std::max(best, gain);
      s.rows.push_back({fmt::format("zipf {:.1f}, {}", exponent,
                                    comm == 0 ? "spare warps" : "16 communication CTAs"),
                        {},
                        100 * gain,
                        "%",
                        RowKind::own,
                        ""});
    }
  }
  s.rows.push_back({"largest gain", 29.0, 100 * best, "%", RowKind::prediction,
                    "misses: in the simulator a busy port queues its own transfers only, so pushes "
                    "at a hot rank do not block pushes to others as they do in a switch"});
  return s;
}

// The published kernel hands over whole minibatches: all CTAs meet after FC1 and after FC2 of each.
Study study_minibatch() {
  constexpr std::int32_t kCommCtas = 4;
  Study s{"minibatch",
          "kimi-k2.5 forward on GB300 by rows of a minibatch, ms",
          "Mixture-of-Kittens on GB300 NVL72: 5.981 ms at 512, 3.425 ms at 2560, flat beyond; two "
          "waves from 2368 rows",
          {},
          {}};
  const Machine m = machine(find_device("gb300"));
  const Problem p = study_problem("kimi-k2.5", 64, 8192);
  const auto ms = [&](std::int64_t rows, bool barrier) {
    Plan plan;
    plan.order = TaskOrder::lag;
    plan.num_slabs = 1;
    plan.lag_bands = 1;
    plan.band_blocks = plan.minibatch_blocks = static_cast<std::int32_t>(rows / 128);
    plan.comm_workers = kCommCtas;
    plan.save = SavePolicy::none;
    Mechanisms mechanisms;
    mechanisms.wave_barrier = barrier;
    return forward_ms(p, plan, m, mechanisms);
  };
  const double at_2560 = ms(2560, true), scale = 3.425 / at_2560;
  s.constants.push_back(
      fmt::format("time scale {:.3f}: on the 2560 row ({:.3f} ms simulated for 8,192 "
                  "tokens per rank; tokens, precision and clock of the published "
                  "rows are not known)",
                  scale, at_2560));
  double flat = 0;
  std::vector<std::pair<std::int64_t, double>> curve;
  for (std::int64_t rows = 512; rows <= 5120; rows += 256) {
    const double t = scale * ms(rows, true);
    curve.emplace_back(rows, t);
    flat = std::max(flat, rows >= 2560 ? t : 0);
    if (rows % 512 != 0) continue;
    StudyRow row{fmt::format("{} rows", rows), {}, t, "ms", RowKind::own, ""};
    if (rows == 512) {
      row.published = 5.981;
      row.kind = RowKind::prediction;
      row.note = "2-CTA tiles of 256 rows and the hand-over of their kernel are not modelled";
    }
    if (rows == 2560) {
      row.published = 3.425;
      row.kind = RowKind::calibrated;
    }
    s.rows.push_back(row);
  }
  // From where on no minibatch is slower than the flat part.
  std::int64_t knee = 512;
  for (const auto& [rows, t] : curve) {
    if (t > flat * 1.02) knee = rows + 256;
  }
  // Published is a rule, not a measurement: the rows whose FC1 tiles fill all CTAs twice.
  const double ctas = m.num_sms() - kCommCtas,
               tiles_per_block = static_cast<double>(pipeline::num_fc1_tiles(p.intermediate));
  s.rows.push_back({"rows of two full waves", 2368,
                    2 * ctas / tiles_per_block * static_cast<double>(pipeline::kBlockRows), "rows",
                    RowKind::calibrated,
                    "2 * 148 * 128 * 256 / min(2 I, H); num_sms of the record is from it"});
  s.rows.push_back({"from here on the curve is flat",
                    {},
                    static_cast<double>(knee),
                    "rows",
                    RowKind::own,
                    "it only saws by how full its last wave is: no step of 256 rows is slower than "
                    "the slowest beyond 2560"});
  s.rows.push_back({"512 rows, no barrier (Moxie's lag order)",
                    {},
                    scale * ms(512, false),
                    "ms",
                    RowKind::own,
                    "counters per block instead of per minibatch"});
  return s;
}

}  // namespace moxie::planner
