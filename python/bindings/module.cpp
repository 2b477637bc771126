// The module moxie._moxie. Users see it through python/moxie/__init__.py and its neighbours, which
// name what is public; signatures are in python/moxie/_moxie.pyi.
#include "python/bindings/module.h"

NB_MODULE(_moxie, m) {
  m.doc() = "Bindings of Moxie's C++ library; use the package moxie.";
  moxie::python::bind_errors(m);
  moxie::python::bind_problem(m);
  moxie::python::bind_plan(m);
  moxie::python::bind_trace(m);
  moxie::python::bind_world(m);
  moxie::python::bind_layer(m);
  moxie::python::bind_tensor_passes(m);
  moxie::python::bind_devices(m);
  moxie::python::bind_simulator(m);
  moxie::python::bind_planner(m);
  m.def(
      "_set_leak_warnings", [](bool on) { nanobind::set_leak_warnings(on); }, nanobind::arg("on"),
      "Whether objects that are still alive when Python ends are reported.");
  m.attr("__version__") = moxie::version();
#if MOXIE_HAS_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}
