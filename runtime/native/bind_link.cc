// Python: Link (a front end's way to a ring elsewhere) and LinkOwner (the ring's side of verbs).
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstring>
#include <random>
#include <utility>

#include "native/bindings.h"
#include "native/link_handle.h"
#include "native/ring_handle.h"
#include "transport/verbs.h"

namespace blink {

namespace nb = nanobind;
using nb::literals::operator""_a;

LinkHandle::LinkHandle(ReconnectingTransport::Connect connect) : log_(std::make_shared<Log>()) {
  connect_ = [connect = std::move(connect), log = log_] {
    std::string problem;
    try {
      auto transport = connect();
      const std::lock_guard lock(log->mutex);
      log->problem.clear();
      ++log->num_connects;
      return transport;
    } catch (const RingError& error) {
      const std::lock_guard lock(log->mutex);
      log->problem = error.what();
      throw;
    }
  };
}

std::unique_ptr<Transport> LinkHandle::connect() const {
  return std::make_unique<ReconnectingTransport>(connect_);
}

std::string LinkHandle::problem() const {
  const std::lock_guard lock(log_->mutex);
  return log_->problem;
}

uint64_t LinkHandle::num_connects() const {
  const std::lock_guard lock(log_->mutex);
  return log_->num_connects;
}

std::unique_ptr<Transport> transport_from_python(nb::handle ring) {
  if (nb::isinstance<RingHandle>(ring)) return nb::cast<RingHandle&>(ring).connect();
  const LinkHandle& link = nb::cast<LinkHandle&>(ring);
  const nb::gil_scoped_release release;  // seconds, when nobody answers
  return link.connect();
}

namespace {

LinkHandle link_over_shm(const std::string& name, uint32_t front_end_index, uint64_t bundle_id) {
  const ShmConnectConfig config{name, front_end_index, bundle_id};
  return LinkHandle([config] { return connect_shm(config); });
}

LinkHandle link_over_verbs(const std::string& host, uint16_t port, uint32_t front_end_index,
                           uint64_t bundle_id, const std::string& device, int gid_index,
                           double timeout_s) {
  VerbsConnectConfig config;
  config.host = host;
  config.port = port;
  config.front_end_index = front_end_index;
  config.bundle_id = bundle_id;
  config.device.device = device;
  config.device.gid_index = gid_index;
  config.connect_timeout = config.transfer_timeout =
      std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  std::random_device random;
  config.client_id = (static_cast<uint64_t>(random()) << 32 | random()) | 1;
  return LinkHandle([config] { return connect_verbs(config); });
}

blink_ring_header read_header(const LinkHandle& link) {
  const nb::gil_scoped_release release;  // seconds, when nobody answers
  blink_ring_header header;
  if (link.connect()->read_object(0, header) != Status::ok) throw RingError("ring: lost at once");
  return header;
}

// A place, until a LinkOwner takes it or it is closed.
class PlaceHandle {
 public:
  PlaceHandle(const std::string& host, uint16_t port, const std::string& device, int gid_index) {
    VerbsOwnerConfig config;
    config.host = host;
    config.port = port;
    config.device.device = device;
    config.device.gid_index = gid_index;
    place_ = hold_verbs_place(config);
  }

  std::unique_ptr<VerbsPlace> take() {
    if (place_ == nullptr) throw RingError("the place is closed, or a LinkOwner has it");
    return std::move(place_);
  }
  void close() { place_.reset(); }

 private:
  std::unique_ptr<VerbsPlace> place_;
};

// Keeps the Ring whose memory the card writes into.
class LinkOwnerHandle {
 public:
  LinkOwnerHandle(nb::object ring, PlaceHandle& place) : ring_(std::move(ring)) {
    const RingHandle& handle = nb::cast<RingHandle&>(ring_);
    VerbsRingMemory memory;
    memory.address = reinterpret_cast<void*>(handle.address());
    memory.num_bytes = handle.num_bytes();
    std::memcpy(&memory.header, memory.address, sizeof(memory.header));
    owner_ = serve_verbs(memory, place.take());
  }

  // GPU memory: `header` is a copy of the ring's first bytes.
  LinkOwnerHandle(uint64_t address, uint64_t num_bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                  const nb::bytes& header, PlaceHandle& place) {
    VerbsRingMemory memory;
    memory.address = reinterpret_cast<void*>(address);
    memory.num_bytes = num_bytes;
    memory.dmabuf_fd = dmabuf_fd;
    memory.dmabuf_offset = dmabuf_offset;
    if (header.size() < sizeof(memory.header)) throw RingError("ring: the header is too short");
    std::memcpy(&memory.header, header.c_str(), sizeof(memory.header));
    owner_ = serve_verbs(memory, place.take());
  }

  const VerbsOwner& get() const {
    if (owner_ == nullptr) throw RingError("the link is closed");
    return *owner_;
  }
  void close() { owner_.reset(); }

 private:
  nb::object ring_;
  std::unique_ptr<VerbsOwner> owner_;
};

std::vector<std::pair<uint32_t, std::string>> sessions_of(const LinkOwnerHandle& owner) {
  std::vector<std::pair<uint32_t, std::string>> out;
  for (const VerbsSessionInfo& session : owner.get().sessions()) {
    out.emplace_back(session.front_end_index, session.peer);
  }
  return out;
}

}  // namespace

void bind_link(nb::module_& module) {
  nb::class_<LinkHandle>(module, "Link", "A ring in another process or machine.")
      .def_static("shm", &link_over_shm, nb::kw_only(), "name"_a, "front_end_index"_a = 0,
                  "bundle_id"_a = 0)
      .def_static("verbs", &link_over_verbs, nb::kw_only(), "host"_a, "port"_a,
                  "front_end_index"_a = 0, "bundle_id"_a = 0, "device"_a = "", "gid_index"_a = -1,
                  "timeout_s"_a = 3.0)
      .def(
          "header", [](const LinkHandle& link) { return header_dict(read_header(link)); },
          "Connects, reads the ring's header and lets go. RingAbsent: nobody is there; RingError: "
          "another reason.")
      .def_prop_ro("problem", &LinkHandle::problem, "Why the last attempt failed, or \"\".")
      .def_prop_ro("num_connects", &LinkHandle::num_connects);
  nb::class_<PlaceHandle>(module, "LinkPlace",
                          "A LinkOwner's address and RDMA device, held before there is a ring.")
      .def(nb::init<const std::string&, uint16_t, const std::string&, int>(), nb::kw_only(),
           "host"_a, "port"_a = 0, "device"_a = "", "gid_index"_a = -1)
      .def("close", &PlaceHandle::close);
  nb::class_<LinkOwnerHandle>(module, "LinkOwner", "Answers front ends that come over verbs.")
      .def(nb::init<nb::object, PlaceHandle&>(), "ring"_a, nb::kw_only(), "place"_a)
      .def(nb::init<uint64_t, uint64_t, int, uint64_t, const nb::bytes&, PlaceHandle&>(),
           nb::kw_only(), "address"_a, "num_bytes"_a, "dmabuf_fd"_a, "dmabuf_offset"_a, "header"_a,
           "place"_a)
      .def_prop_ro("port", [](const LinkOwnerHandle& self) { return self.get().port(); })
      .def_prop_ro("device", [](const LinkOwnerHandle& self) { return self.get().device(); })
      .def_prop_ro("num_refused",
                   [](const LinkOwnerHandle& self) { return self.get().num_refused(); })
      .def("sessions", &sessions_of, "(front end, address) of each that is connected.")
      .def("close", &LinkOwnerHandle::close, nb::call_guard<nb::gil_scoped_release>());
  module.def("rdma_device", [] {
    std::string what;
    const bool has_device = has_verbs_device(what);
    return std::pair(has_device, what);
  });
}

}  // namespace blink
