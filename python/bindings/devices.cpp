// Device records: the numbers that the simulator and the planner stand on.
#include "moxie/planner/device.h"

#include "python/bindings/module.h"

namespace moxie::python {

void bind_devices(nb::module_& m) {
  using namespace planner;
  nb::enum_<Load>(m, "Load", "Which clock a GPU runs at.")
      .value("burst", Load::burst, "a cool one, in its first milliseconds")
      .value("sustained", Load::sustained, "thermally settled");
  nb::class_<DeviceRecord>(m, "DeviceRecord", "What one GPU and its fabric can do, with sources.")
      .def_ro("name", &DeviceRecord::name)
      .def_ro("title", &DeviceRecord::title)
      .def_prop_ro(
          "constants",
          [](const DeviceRecord& record) {
            nb::dict out;
            for (std::size_t i = 0; i < record.constants.size(); ++i) {
              const Constant& c = record.constants[i];
              nb::dict entry;
              entry["value"] = c.known ? nb::cast(c.value) : nb::object(nb::none());
              entry["unit"] = rule(static_cast<Field>(i)).unit;
              entry["source"] = c.source;
              out[rule(static_cast<Field>(i)).name] = entry;
            }
            return out;
          },
          nb::sig("def constants(self) -> dict[str, dict[str, typing.Any]]"),
          "value (None: not known), unit and source by name")
      .def(
          "machine", [](const DeviceRecord& record, Load load) { return machine(record, load); },
          nb::kw_only(), nb::arg("load") = Load::burst, "The record with its gaps filled.")
      .def("__repr__",
           [](const DeviceRecord& r) { return "<DeviceRecord " + r.name + ": " + r.title + ">"; });
  nb::class_<Machine>(m, "Machine", "A device record with its gaps filled by stated rules.")
      .def_ro("device", &Machine::device)
      .def_ro("clock_mhz", &Machine::clock_mhz)
      .def_ro("assumed", &Machine::assumed, "one sentence for each number that is not known")
      .def_prop_ro(
          "values",
          [](const Machine& machine) {
            nb::dict out;
            for (std::size_t i = 0; i < machine.values.size(); ++i)
              out[rule(static_cast<Field>(i)).name] = machine.values[i];
            return out;
          },
          nb::sig("def values(self) -> dict[str, float]"))
      .def("__repr__", [](const Machine& machine) {
        return fmt::format("<Machine {} at {:.0f} MHz>", machine.device, machine.clock_mhz);
      });
  m.def("device_names", &device_names, "Names of the device records that ship with Moxie.");
  m.def("find_device", &find_device, nb::arg("name"),
        "A shipped record by name, or the record in a file when `name` has a '/' or ends in "
        ".json. Raises InvalidArgumentError naming the field and the nearest legal value.");
  m.def(
      "parse_device", [](const std::string& json) { return parse_device(json, "parse_device"); },
      nb::arg("json"), "A record from its JSON text (docs/planner.md).");
}

}  // namespace moxie::python
