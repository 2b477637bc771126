// Every moxie::Error becomes the Python class of its code (python/moxie/_errors.py) and keeps the
// code, the sentence and the wait records.
#include "python/bindings/module.h"

namespace moxie::python {
namespace {

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "InvalidArgumentError";
    case ErrorCode::invalid_plan: return "InvalidPlanError";
    case ErrorCode::invalid_route: return "InvalidRouteError";
    case ErrorCode::non_finite: return "NonFiniteError";
    case ErrorCode::capacity_exceeded: return "CapacityExceededError";
    case ErrorCode::timeout: return "WaitTimeoutError";
    case ErrorCode::world_stopped: return "WorldStoppedError";
    case ErrorCode::unavailable: return "UnavailableError";
  }
  return "Error";
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    try {
      const nb::object type = nb::module_::import_("moxie._errors").attr(class_name(error.code()));
      nb::list waits;
      for (const WaitRecord& record : error.waits()) waits.append(nb::cast(record));
      const nb::object value = type(std::string(error.what()), waits);
      PyErr_SetObject(type.ptr(), value.ptr());
    } catch (nb::python_error& failed) {
      failed.restore();
    }
  }
}

}  // namespace

void bind_errors(nb::module_& m) {
  nb::enum_<ErrorCode>(m, "ErrorCode", "What kind of rule was broken; every `Error` has one.")
      .value("invalid_argument", ErrorCode::invalid_argument,
             "a size, dtype or array breaks a rule")
      .value("invalid_plan", ErrorCode::invalid_plan, "a plan that could deadlock or does not fit")
      .value("invalid_route", ErrorCode::invalid_route, "an expert id outside -1 .. E-1")
      .value("non_finite", ErrorCode::non_finite, "validation found a NaN or an infinity")
      .value("capacity_exceeded", ErrorCode::capacity_exceeded,
             "more rows for a rank than the plan's capacity")
      .value("timeout", ErrorCode::timeout, "a bounded wait expired; see `Error.waits`")
      .value("world_stopped", ErrorCode::world_stopped,
             "a pass on a World that has timed out and was not reset")
      .value("unavailable", ErrorCode::unavailable, "a backend that this build does not have");
  nb::enum_<Role>(m, "Role", "The two kinds of workers of a rank.")
      .value("comm", Role::comm)
      .value("compute", Role::compute);
  nb::class_<WaitRecord>(m, "WaitRecord", "What a worker waited for when its wait gave up.")
      .def_ro("rank", &WaitRecord::rank)
      .def_ro("role", &WaitRecord::role)
      .def_ro("worker", &WaitRecord::worker)
      .def_prop_ro("what", [](const WaitRecord& r) { return std::string(name(r.what)); })
      .def_ro("index", &WaitRecord::index)
      .def_ro("wanted", &WaitRecord::wanted)
      .def_ro("seen", &WaitRecord::seen)
      .def_ro("epoch", &WaitRecord::epoch)
      .def_ro("told_by", &WaitRecord::told_by, "-1: its own clock ran out; else the first rank")
      .def("__repr__", [](const WaitRecord& r) { return "WaitRecord(" + to_string(r) + ")"; });
  nb::register_exception_translator(translate);
}

}  // namespace moxie::python
