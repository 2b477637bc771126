// World: where the ranks live.
#include <filesystem>

#include "moxie/core/environment.h"
#include "moxie/transport/nccl_library.h"
#include "python/bindings/arrays.h"
#include "python/bindings/handles.h"

namespace moxie::python {
namespace {

using WorldPtr = std::shared_ptr<WorldHandle>;

WorldPtr make_cpu(std::int64_t num_ranks, double timeout_s, bool validate_finite, HostGemm gemm,
                  const FaultInjection& faults) {
  return std::make_shared<WorldHandle>(World::cpu({.num_ranks = num_ranks,
                                                   .timeout_s = timeout_s,
                                                   .validate_finite = validate_finite,
                                                   .gemm = gemm,
                                                   .faults = faults}),
                                       false);
}

WorldPtr make_cpu_process(std::int64_t rank, std::int64_t num_ranks, const std::string& name,
                          double timeout_s, bool validate_finite, HostGemm gemm,
                          const FaultInjection& faults) {
  const nb::gil_scoped_release release;
  return std::make_shared<WorldHandle>(World::cpu_process({.num_ranks = num_ranks,
                                                           .timeout_s = timeout_s,
                                                           .validate_finite = validate_finite,
                                                           .gemm = gemm,
                                                           .faults = faults},
                                                          {.rank = rank, .name = name}),
                                       false);
}

WorldPtr make_cuda(std::int64_t num_ranks, double timeout_s, bool validate_finite,
                   const std::vector<int>& devices, std::int32_t reserve_sms,
                   std::int32_t cluster_size) {
  return std::make_shared<WorldHandle>(
      World::cuda(
          {.num_ranks = num_ranks, .timeout_s = timeout_s, .validate_finite = validate_finite},
          {.devices = devices, .reserve_sms = reserve_sms, .cluster_size = cluster_size}),
      true);
}

// NCCL's file where nobody says which: that of the package nvidia.nccl, which PyTorch brings along
// and loads, too. Empty: what is loaded already, or what the loader finds.
std::string nccl_file(const std::string& library) {
  if (!nccl_library_file(library).empty() || !transport::loaded_nccl_files().empty())
    return library;
  try {
    const nb::object spec = nb::module_::import_("importlib.util").attr("find_spec")("nvidia.nccl");
    if (spec.is_none()) return library;
    for (const nb::handle folder : spec.attr("submodule_search_locations")) {
      const std::string file = nb::cast<std::string>(nb::str(folder)) + "/lib/libnccl.so.2";
      if (std::filesystem::exists(file)) return file;
    }
  } catch (const nb::python_error&) {  // no such package
  }
  return library;
}

WorldPtr make_nccl(std::int64_t rank, std::int64_t num_ranks, const std::optional<nb::bytes>& id,
                   std::uintptr_t comm, int device, double timeout_s, std::int32_t reserve_sms,
                   std::int32_t cluster_size, const FaultInjection& faults,
                   const std::string& library) {
  NcclOptions nccl;
  nccl.rank = rank;
  if (id) nccl.unique_id.assign(id->c_str(), id->size());
  nccl.comm = reinterpret_cast<void*>(comm);
  nccl.device = device;
  nccl.reserve_sms = reserve_sms;
  nccl.cluster_size = cluster_size;
  nccl.library = nccl_file(library);
  const nb::gil_scoped_release release;
  return std::make_shared<WorldHandle>(
      World::nccl({.num_ranks = num_ranks, .timeout_s = timeout_s, .faults = faults}, nccl), true);
}

nb::bytes make_nccl_id(const std::string& library) {
  const std::string id = nccl_unique_id(nccl_file(library));
  return nb::bytes(id.data(), id.size());
}

void bind_faults(nb::module_& m) {
  nb::enum_<HostGemm>(m, "HostGemm", "Which GEMM the CPU twin's tiles call.")
      .value("automatic", HostGemm::automatic, "oneDNN where it passes its self-check")
      .value("onednn", HostGemm::onednn)
      .value("plain", HostGemm::plain, "plain loops");
  const FaultInjection d;
  nb::class_<FaultInjection>(m, "FaultInjection",
                             "Faults that a test injects. The defaults inject nothing.")
      .def(
          "__init__",
          [](FaultInjection* self, std::uint64_t shuffle_seed, std::int32_t max_delay_us,
             bool poison_workspace, std::int32_t late_rank, std::int32_t late_ms,
             std::int32_t kill_rank, std::int32_t kill_after_steps) {
            new (self) FaultInjection{.shuffle_seed = shuffle_seed,
                                      .max_delay_us = max_delay_us,
                                      .poison_workspace = poison_workspace,
                                      .late_rank = late_rank,
                                      .late_ms = late_ms,
                                      .kill_rank = kill_rank,
                                      .kill_after_steps = kill_after_steps};
          },
          nb::kw_only(), nb::arg("shuffle_seed") = d.shuffle_seed,
          nb::arg("max_delay_us") = d.max_delay_us,
          nb::arg("poison_workspace") = d.poison_workspace, nb::arg("late_rank") = d.late_rank,
          nb::arg("late_ms") = d.late_ms, nb::arg("kill_rank") = d.kill_rank,
          nb::arg("kill_after_steps") = d.kill_after_steps)
      .def_rw("shuffle_seed", &FaultInjection::shuffle_seed,
              "not 0: random delays before every protocol step")
      .def_rw("max_delay_us", &FaultInjection::max_delay_us)
      .def_rw("poison_workspace", &FaultInjection::poison_workspace,
              "fill every buffer with 0xFF before each pass")
      .def_rw("late_rank", &FaultInjection::late_rank)
      .def_rw("late_ms", &FaultInjection::late_ms)
      .def_rw("kill_rank", &FaultInjection::kill_rank, "a worker of this rank ends silently ...")
      .def_rw("kill_after_steps", &FaultInjection::kill_after_steps,
              "... after so many protocol steps")
      .def("__repr__", [](nb::handle self) {
        return repr(self, "FaultInjection",
                    {"shuffle_seed", "max_delay_us", "poison_workspace", "late_rank", "late_ms",
                     "kill_rank", "kill_after_steps"});
      });
}

}  // namespace

void bind_world(nb::module_& m) {
  bind_faults(m);
  m.def("nccl_unique_id", &make_nccl_id, nb::kw_only(), nb::arg("library") = "",
        "128 bytes by which the ranks of one World.nccl find each other.\n\n"
        "Called on one rank, which brings them to all others. Needs NCCL, but no GPU; the process "
        "must live until the World is made. Raises UnavailableError.");
  nb::class_<WorldHandle>(m, "World",
                          "The ranks that see each other's memory. One pass at a time.\n\n"
                          "Made by one of its static methods. A context manager; layers keep it "
                          "alive until close().")
      .def_static("cpu", &make_cpu, nb::kw_only(), nb::arg("num_ranks") = 1,
                  nb::arg("timeout_s") = 300.0, nb::arg("validate_finite") = false,
                  nb::arg("gemm") = HostGemm::automatic, nb::arg("faults") = FaultInjection{},
                  "Ranks as groups of threads of this process.\n\n"
                  "timeout_s bounds every wait (0: unbounded). validate_finite looks for NaN and "
                  "infinity in inputs before each pass. Raises InvalidArgumentError.")
      .def_static("cpu_process", &make_cpu_process, nb::kw_only(), nb::arg("rank"),
                  nb::arg("num_ranks"), nb::arg("name"), nb::arg("timeout_s") = 300.0,
                  nb::arg("validate_finite") = false, nb::arg("gemm") = HostGemm::automatic,
                  nb::arg("faults") = FaultInjection{},
                  "One process per rank, on this machine, over shared memory.\n\n"
                  "Every process calls it with its rank and the same name. It, Layer() and reset() "
                  "wait until all ranks have called them; the lists of a pass have one entry, this "
                  "rank's. Raises WaitTimeoutError when a rank does not come within timeout_s, "
                  "InvalidArgumentError when ranks disagree, on every rank.")
      .def_static("cuda", &make_cuda, nb::kw_only(), nb::arg("num_ranks") = 1,
                  nb::arg("timeout_s") = 300.0, nb::arg("validate_finite") = false,
                  nb::arg("devices") = std::vector<int>{}, nb::arg("reserve_sms") = 0,
                  nb::arg("cluster_size") = 0,
                  "Ranks on the GPUs of this process; passes are enqueued and return at once.\n\n"
                  "devices: one per rank, a device named twice holds virtual ranks; empty: rank r "
                  "on device r mod count. Raises UnavailableError in a build without CUDA "
                  "(`has_cuda`).")
      .def_static(
          "nccl", &make_nccl, nb::kw_only(), nb::arg("rank"), nb::arg("num_ranks"),
          nb::arg("unique_id") = nb::none(), nb::arg("comm") = 0, nb::arg("device") = -1,
          nb::arg("timeout_s") = 300.0, nb::arg("reserve_sms") = kReserveBesidePeers,
          nb::arg("cluster_size") = 0, nb::arg("faults") = FaultInjection{},
          nb::arg("library") = "",
          "One GPU and one process (or thread) per rank, over NCCL.\n\n"
          "unique_id: bytes of nccl_unique_id() of one rank, brought to all, for one World; "
          "or comm: an ncclComm_t, as an integer, of exactly these ranks. device: -1 is the "
          "current GPU. reserve_sms: SMs left to kernels of other libraries that wait for "
          "their peers; 0 where none run beside a pass. library: NCCL's file; empty: "
          "MOXIE_NCCL_LIBRARY, else the one that is loaded, else that of the package "
          "nvidia.nccl, else libnccl.so.2.\n\n"
          "It, Layer() and reset() wait until all ranks "
          "have called them; the lists of a pass have one entry, this rank's. Raises "
          "WaitTimeoutError when a rank does not come within timeout_s, "
          "InvalidArgumentError when ranks disagree, UnavailableError without CUDA, GPU or "
          "NCCL 2.28, or when the ranks do not share one NVLink domain.")
      .def_prop_ro("num_ranks",
                   [](WorldHandle& w) { return w.open("World.num_ranks").num_ranks(); })
      .def_prop_ro(
          "local_ranks",
          [](WorldHandle& w) {
            const nb::object range = nb::module_::import_("builtins").attr("range");
            return range(w.local.begin, w.local.begin + w.local.count);
          },
          nb::sig("def local_ranks(self) -> range"),
          "the ranks whose arrays a pass of this process takes")
      .def_prop_ro(
          "backend", [](WorldHandle& w) { return w.on_cuda ? "cuda" : "cpu"; }, "'cpu' or 'cuda'")
      .def_prop_ro("closed", [](WorldHandle& w) { return w.closed; })
      .def_prop_ro(
          "stopped", [](WorldHandle& w) { return w.open("World.stopped").stopped(); },
          "a pass timed out; further passes raise WorldStoppedError")
      .def(
          "reset",
          [](WorldHandle& w) {
            World& world = w.open("World.reset");
            const RunningPass running(w);
            const nb::gil_scoped_release release;
            world.reset();
          },
          "Clears signals and counters; legal whenever no pass runs.")
      .def(
          "set_timeout",
          [](WorldHandle& w, double seconds) { w.open("World.set_timeout").set_timeout(seconds); },
          nb::arg("seconds"))
      .def(
          "set_faults",
          [](WorldHandle& w, const FaultInjection& f) { w.open("World.set_faults").set_faults(f); },
          nb::arg("faults"))
      .def(
          "set_stream",
          [](WorldHandle& w, std::uintptr_t stream) {
            w.open("World.set_stream").set_stream(reinterpret_cast<void*>(stream));
          },
          nb::arg("stream"),
          "CUDA: the cudaStream_t, as an integer, of rank 0's GPU that passes are ordered on. "
          "CPU: no effect.")
      .def(
          "synchronize",
          [](WorldHandle& w) {
            World& world = w.open("World.synchronize");
            const RunningPass running(w);
            const nb::gil_scoped_release release;
            world.synchronize();
          },
          "Waits for the passes enqueued and raises the error of the last one.")
      .def("describe_gemm",
           [](WorldHandle& w) { return w.open("World.describe_gemm").describe_gemm(); })
      .def("close", &WorldHandle::close,
           "Frees the memory of the world, its layers and contexts. Closing twice is legal; every "
           "later use raises ClosedError.")
      .def("__enter__", [](nb::object self) { return self; })
      .def(
          "__exit__", [](WorldHandle& w, nb::handle, nb::handle, nb::handle) { w.close(); },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none())
      .def("__repr__", [](WorldHandle& w) {
        return w.closed ? std::string("<World closed>")
                        : fmt::format("<World {}, {} ranks>", w.on_cuda ? "cuda" : "cpu",
                                      w.world->num_ranks());
      });
}

}  // namespace moxie::python
