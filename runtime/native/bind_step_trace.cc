// Python: StepTrace, a reader of a ring's step records.
#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "native/bindings.h"
#include "native/ring_handle.h"
#include "transport/step_trace.h"

namespace blink {
namespace {

namespace nb = nanobind;

// Over its own connection; the ring's memory must outlive it.
class StepTrace {
 public:
  explicit StepTrace(const RingHandle& ring)
      : transport_(ring.connect()), reader_(*transport_, ring.view().sizes()) {}

  // The fields of blink_trace_record in their order, but for the reserved one.
  nb::list poll() {
    check(reader_.poll());
    nb::list out;
    for (const blink_trace_record& r : reader_.records()) {
      out.append(nb::make_tuple(r.step, r.start_ns, r.end_ns, r.kind, r.key_index, r.batch,
                                r.seqlen, r.num_lanes, r.num_tokens, r.requests_waiting,
                                r.pages_free));
    }
    return out;
  }

  void skip_to_newest() { check(reader_.skip_to_newest()); }
  uint64_t num_missed() const { return reader_.num_missed(); }

 private:
  static void check(Status status) {
    if (status != Status::ok) throw RingError(std::string("ring: ") + status_name(status));
  }

  std::unique_ptr<Transport> transport_;
  StepTraceReader reader_;
};

}  // namespace

void bind_step_trace(nb::module_& module) {
  nb::class_<StepTrace>(module, "StepTrace", "Reads a ring's step records, from the oldest kept.")
      .def(nb::init<const RingHandle&>(), nb::arg("ring"), nb::keep_alive<1, 2>())
      .def("poll", &StepTrace::poll,
           "Return what was finished since the last call, oldest first: (step, start_ns, end_ns, "
           "kind,\nkey_index, batch, seqlen, num_lanes, num_tokens, requests_waiting, pages_free).")
      .def("skip_to_newest", &StepTrace::skip_to_newest)
      .def_prop_ro("num_missed", &StepTrace::num_missed,
                   "Records that were overwritten before they were read.");
}

}  // namespace blink
