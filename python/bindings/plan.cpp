// Plan: every tunable choice of a pass. Field by field as in moxie/pipeline/plan.h.
#include "moxie/pipeline/plan.h"

#include "python/bindings/module.h"

namespace moxie::python {
namespace {

constexpr std::initializer_list<const char*> kPlan = {"mode",
                                                      "order",
                                                      "dispatch",
                                                      "combine",
                                                      "num_slabs",
                                                      "band_blocks",
                                                      "lag_bands",
                                                      "minibatch_blocks",
                                                      "capacity_rows",
                                                      "x_ring_blocks",
                                                      "hidden_ring_blocks",
                                                      "chunk_blocks",
                                                      "lag_chunks",
                                                      "backward_ring_blocks",
                                                      "save",
                                                      "saved_rows",
                                                      "comm_workers",
                                                      "compute_workers"};

void bind_choices(nb::module_& m) {
  nb::enum_<ExecMode>(m, "ExecMode", "How a pass runs.")
      .value("fused", ExecMode::fused, "one persistent pass: every stage overlaps")
      .value("split", ExecMode::split, "the same bodies stage after stage");
  nb::enum_<TaskOrder>(m, "TaskOrder", "In which order tiles come.")
      .value("slabs", TaskOrder::slabs, "all FC1 tiles, then FC2 in column slabs")
      .value("lag", TaskOrder::lag, "FC2 of a band follows FC1 by lag_bands bands");
  nb::enum_<DispatchMode>(m, "DispatchMode", "Who moves rows to the experts.")
      .value("pull", DispatchMode::pull, "the expert's rank reads rows from their home ranks")
      .value("push", DispatchMode::push, "home ranks write rows into the expert's rank");
  nb::enum_<CombineMode>(m, "CombineMode", "Who moves results home.")
      .value("epilogue", CombineMode::epilogue, "FC2 tiles write their row pieces home")
      .value("comm_workers", CombineMode::comm_workers, "communication workers carry them home");
  nb::enum_<SavePolicy>(m, "SavePolicy", "What forward keeps for backward.")
      .value("none", SavePolicy::none, "backward recomputes FC1 for every block")
      .value("z", SavePolicy::z, "z = [gate, up] of the first saved_rows rows")
      .value("z_and_x", SavePolicy::z_and_x, "x rows too: backward does not pull them again");
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_choices(m);
  const Plan d;
  nb::class_<Plan>(m, "Plan",
                   "Every tunable choice of a pass.\n\n"
                   "A plan changes the time a pass takes and the memory it needs, never the bits. "
                   "0 in capacity_rows and the rings means all that can be needed; "
                   "moxie.planner.choose_plan searches one for a machine.")
      .def(
          "__init__",
          [](Plan* self, ExecMode mode, TaskOrder order, DispatchMode dispatch, CombineMode combine,
             std::int32_t num_slabs, std::int32_t band_blocks, std::int32_t lag_bands,
             std::int32_t minibatch_blocks, std::int64_t capacity_rows, std::int64_t x_ring_blocks,
             std::int64_t hidden_ring_blocks, std::int32_t chunk_blocks, std::int32_t lag_chunks,
             std::int64_t backward_ring_blocks, SavePolicy save, std::int64_t saved_rows,
             std::int32_t comm_workers, std::int32_t compute_workers) {
            new (self) Plan{mode,
                            order,
                            dispatch,
                            combine,
                            num_slabs,
                            band_blocks,
                            lag_bands,
                            minibatch_blocks,
                            capacity_rows,
                            x_ring_blocks,
                            hidden_ring_blocks,
                            chunk_blocks,
                            lag_chunks,
                            backward_ring_blocks,
                            save,
                            saved_rows,
                            comm_workers,
                            compute_workers};
          },
          nb::kw_only(), nb::arg("mode") = d.mode, nb::arg("order") = d.order,
          nb::arg("dispatch") = d.dispatch, nb::arg("combine") = d.combine,
          nb::arg("num_slabs") = d.num_slabs, nb::arg("band_blocks") = d.band_blocks,
          nb::arg("lag_bands") = d.lag_bands, nb::arg("minibatch_blocks") = d.minibatch_blocks,
          nb::arg("capacity_rows") = d.capacity_rows, nb::arg("x_ring_blocks") = d.x_ring_blocks,
          nb::arg("hidden_ring_blocks") = d.hidden_ring_blocks,
          nb::arg("chunk_blocks") = d.chunk_blocks, nb::arg("lag_chunks") = d.lag_chunks,
          nb::arg("backward_ring_blocks") = d.backward_ring_blocks, nb::arg("save") = d.save,
          nb::arg("saved_rows") = d.saved_rows, nb::arg("comm_workers") = d.comm_workers,
          nb::arg("compute_workers") = d.compute_workers)
      .def_rw("mode", &Plan::mode)
      .def_rw("order", &Plan::order)
      .def_rw("dispatch", &Plan::dispatch)
      .def_rw("combine", &Plan::combine)
      .def_rw("num_slabs", &Plan::num_slabs, "FC2 column slabs")
      .def_rw("band_blocks", &Plan::band_blocks, "blocks that share a raster band")
      .def_rw("lag_bands", &Plan::lag_bands, "lag order: bands between FC1 and FC2")
      .def_rw("minibatch_blocks", &Plan::minibatch_blocks,
              "blocks that share one readiness counter")
      .def_rw("capacity_rows", &Plan::capacity_rows,
              "rows one rank can take, padded to blocks; 0: the worst case, proven")
      .def_rw("x_ring_blocks", &Plan::x_ring_blocks, "slots for pulled rows; 0: all")
      .def_rw("hidden_ring_blocks", &Plan::hidden_ring_blocks, "slots for hidden rows; 0: all")
      .def_rw("chunk_blocks", &Plan::chunk_blocks, "backward: blocks handed to wgrad at a time")
      .def_rw("lag_chunks", &Plan::lag_chunks,
              "backward: chunks dgrad runs ahead of dX and wgrad; 0: enough")
      .def_rw("backward_ring_blocks", &Plan::backward_ring_blocks,
              "backward slots; 0: most of the expected rows")
      .def_rw("save", &Plan::save)
      .def_rw("saved_rows", &Plan::saved_rows,
              "whole blocks are saved; -1: somewhat more than expected, z_and_x: all")
      .def_rw("comm_workers", &Plan::comm_workers,
              "per rank. CPU: threads, 0 means one. CUDA: CTAs, 0: the spare warps of all")
      .def_rw("compute_workers", &Plan::compute_workers, "per rank, >= 1 (CPU)")
      .def(
          "resolve",
          [](const Plan& plan, const Problem& problem) {
            check(problem);
            const Plan resolved = pipeline::resolve(problem, plan);
            pipeline::check(problem, resolved);
            return resolved;
          },
          nb::arg("problem"),
          "The plan with every 0 replaced by its number. Raises InvalidPlanError if it could "
          "deadlock or does not fit.")
      .def(
          "__eq__", [](const Plan& a, const Plan& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](nb::handle self) { return repr(self, "Plan", kPlan); })
      .def("__str__", [](const Plan& p) { return to_string(p); });
  m.def(
      "default_plan",
      [](const Problem& problem) {
        check(problem);
        return pipeline::default_plan(problem);
      },
      nb::arg("problem"), "The plan of a Layer made without one.");
}

}  // namespace moxie::python
