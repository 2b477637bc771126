// Timelines: what a pass or a simulation recorded, and the two files that the command writes too.
#include "moxie/trace/writers.h"
#include "python/bindings/module.h"

namespace moxie::python {

void bind_trace(nb::module_& m) {
  using trace::Event;
  using trace::Trace;
  nb::class_<Event>(m, "TraceEvent", "What one worker did, in nanoseconds since the pass began.")
      .def_ro("rank", &Event::rank)
      .def_ro("role", &Event::role)
      .def_ro("worker", &Event::worker, "index within (rank, role)")
      .def_prop_ro("kind", [](const Event& e) { return std::string(name(e.kind)); })
      .def_prop_ro(
          "waits_for",
          [](const Event& e) -> std::optional<std::string> {
            if (e.kind != trace::Kind::wait) return std::nullopt;
            return name(e.what);
          },
          "of a wait: which signal")
      .def_ro("block", &Event::block, "block, token unit or chunk; -1: none")
      .def_ro("tile", &Event::tile, "column tile or slab; -1: none")
      .def_ro("shared", &Event::shared, "a task of the shared expert")
      .def_ro("begin_ns", &Event::begin_ns)
      .def_ro("end_ns", &Event::end_ns)
      .def("__repr__", [](const Event& e) {
        return fmt::format("<TraceEvent {} rank {} {} {}: {}..{} ns>", name(e.kind), e.rank,
                           name(e.role), e.worker, e.begin_ns, e.end_ns);
      });
  nb::class_<Trace>(m, "Trace",
                    "The timeline of one pass. Give an empty one to forward, infer or backward.")
      .def(nb::init<>())
      .def_rw("title", &Trace::title)
      .def_ro("num_ranks", &Trace::num_ranks)
      .def_ro("comm_workers", &Trace::comm_workers, "per rank")
      .def_ro("compute_workers", &Trace::compute_workers, "per rank")
      .def_prop_ro(
          "events", [](const Trace& t) { return t.events; }, "a copy, ordered by worker")
      .def_prop_ro(
          "span_ns", [](const Trace& t) { return trace::span_ns(t); }, "time of the slowest worker")
      .def(
          "time_by_kind_ns",
          [](const Trace& t) {
            const auto times = trace::time_by_kind_ns(t);
            nb::dict out;
            for (const trace::Kind kind : trace::kDataFlowOrder)
              out[name(kind)] = times[static_cast<std::size_t>(kind)];
            return out;
          },
          nb::sig("def time_by_kind_ns(self) -> dict[str, int]"),
          "Time of all workers by kind, each moment counted once.")
      .def("__repr__", [](const Trace& t) {
        return fmt::format("<Trace {}: {} events>", t.title, t.events.size());
      });
  m.def(
      "trace_json",
      [](const std::vector<Trace>& passes) { return trace::to_perfetto_json(passes); },
      nb::arg("passes"), "JSON for ui.perfetto.dev, one pass behind the other.");
  m.def(
      "trace_svg",
      [](const std::vector<Trace>& passes, const std::string& title, const std::string& subtitle,
         double width_px) {
        return trace::to_svg(passes, {.title = title, .subtitle = subtitle, .width_px = width_px});
      },
      nb::arg("passes"), nb::kw_only(), nb::arg("title"), nb::arg("subtitle") = "",
      nb::arg("width_px") = 1200.0, "A picture, one pass below the other.");
}

}  // namespace moxie::python
