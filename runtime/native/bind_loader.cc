// Python: what a loader starts beside the scheduler, the watchdog and the `host` placement's loop.
#include <chrono>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "native/bindings.h"
#include "native/host_loop.h"
#include "native/ring_handle.h"
#include "native/watchdog.h"

namespace blink {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

void bind_loader(nb::module_& module) {
  nb::class_<Watchdog>(module, "Watchdog",
                       "Ends the process when the ring's owner shows no life; runs from the start.")
      .def(
          "__init__",
          [](Watchdog* self, const RingHandle& ring, double silence_s, double grace_s,
             int exit_status) {
            new (self) Watchdog(ring.view().header(),
                                WatchdogConfig{.shortest_silence = milliseconds(silence_s),
                                               .grace = milliseconds(grace_s),
                                               .exit_status = exit_status});
          },
          "ring"_a, "silence_s"_a = 2.0, "grace_s"_a = 2.0, "exit_status"_a = 70,
          nb::keep_alive<1, 2>())
      .def("disarm", &Watchdog::disarm, nb::call_guard<nb::gil_scoped_release>(),
           "Looks no more; call before the owner is told to stop.");
  nb::class_<HostLoop>(module, "HostLoop", "The `host` placement's thread.")
      .def(
          "__init__",
          [](HostLoop* self, uint64_t context, uint64_t stream, uint64_t step_function,
             uint64_t state_address, uint64_t mailbox_address, uint32_t num_threads,
             std::vector<uint64_t> execs, std::string library) {
            new (self) HostLoop(HostLoopConfig{.library = std::move(library),
                                               .context = context,
                                               .stream = stream,
                                               .step_function = step_function,
                                               .state_address = state_address,
                                               .mailbox_address = mailbox_address,
                                               .num_threads = num_threads,
                                               .execs = std::move(execs)});
          },
          nb::kw_only(), "context"_a, "stream"_a, "step_function"_a, "state_address"_a,
          "mailbox_address"_a, "num_threads"_a, "execs"_a, "library"_a = "libcuda.so.1")
      .def("start", &HostLoop::start)
      .def("join", &HostLoop::join, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("error", &HostLoop::error)
      .def_prop_ro("num_steps", &HostLoop::num_steps);
}

}  // namespace blink
