// What the files of the bindings share: one function per part of the module, called in the order of
// NB_MODULE (a type must be known before a signature names it), and helpers for plain data. The
// bindings decide nothing: they turn Python objects into the structs of moxie/moxie.h and back.
#pragma once
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string>

#include "moxie/moxie.h"

namespace moxie::python {
namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_problem(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_trace(nb::module_& m);
void bind_world(nb::module_& m);
void bind_layer(nb::module_& m);
void bind_tensor_passes(nb::module_& m);
void bind_devices(nb::module_& m);
void bind_simulator(nb::module_& m);
void bind_planner(nb::module_& m);

// `Name(field=value, ...)`, which Python reads back for plain data.
inline std::string repr(nb::handle self, const char* type,
                        std::initializer_list<const char*> fields) {
  std::string text = std::string(type) + "(";
  for (const char* field : fields) {
    if (text.back() != '(') text += ", ";
    const nb::object value = nb::getattr(self, field);
    const bool is_enum = nb::hasattr(value, "__objclass__") || nb::hasattr(value, "_value_");
    text += std::string(field) + "=" +
            nb::cast<std::string>(is_enum ? nb::str(value) : nb::repr(value));
  }
  return text + ")";
}

// Name of an object's type, for sentences.
inline std::string python_type(nb::handle object) {
  return nb::cast<std::string>(nb::str(nb::getattr(object.type(), "__name__")));
}

}  // namespace moxie::python
