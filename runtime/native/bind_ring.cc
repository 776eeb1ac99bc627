// Python: Ring (make, open, look into) and the sizes it is made from.
#include <algorithm>
#include <atomic>
#include <cstring>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "native/bindings.h"
#include "native/ring_handle.h"

namespace blink {

namespace nb = nanobind;
using nb::literals::operator""_a;

RingHandle RingHandle::create(const std::string& name, const RingSizes& sizes) {
  check_ring_sizes(sizes);
  // Of the same family: "/blink-123" clears what is left of "/blink-122".
  SharedMemory::remove_stale(name.substr(0, name.rfind('-') + 1));
  SharedMemory memory = SharedMemory::create(name, ring_layout_from_sizes(sizes).ring_bytes);
  const auto bytes = memory.bytes();
  create_ring(bytes, sizes);
  return RingHandle(std::move(memory), bytes);
}

RingHandle RingHandle::create_at(uint64_t address, uint64_t num_bytes, const RingSizes& sizes) {
  const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(address), num_bytes);
  create_ring(bytes, sizes);
  return RingHandle(std::nullopt, bytes);
}

RingHandle RingHandle::open(const std::string& name) {
  connect_shm(name);  // checks the header
  SharedMemory memory = SharedMemory::open(name);
  const auto bytes = memory.bytes();
  return RingHandle(std::move(memory), bytes);
}

void RingHandle::publish(const std::string& name) {
  if (!memory_) throw RingError("ring: it does not lie in shared memory, so it has no name");
  SharedMemory::remove_stale(name);
  memory_->rename(name);
}

void RingHandle::check_name(const std::string& name) {
  SharedMemory::remove_stale(name);
  if (SharedMemory::is_taken(name)) {
    throw RingError("shared memory " + name + ": cannot be named so: another process has it");
  }
}

void RingHandle::hold_range(uint32_t front_end_index) const {
  if (memory_ && !memory_->hold_range(front_end_index)) {
    throw RingError("ring " + memory_->name() + ": front end " + std::to_string(front_end_index) +
                    " is another process");
  }
}

// Release: pairs with the scheduler's acquire each step and idle poll.
void RingHandle::request_stop() const {
  std::atomic_ref<uint32_t>(view().header()->stop).store(1, std::memory_order_release);
}

std::unique_ptr<Transport> RingHandle::connect() const {
  return connect_mapped(bytes_.data(), bytes_.size());
}

namespace {

blink_ring_header copy_header(const RingHandle& ring) {
  blink_ring_header header;
  if (ring.connect()->read_object(0, header) != Status::ok) throw RingError("ring: cannot be read");
  return header;
}

}  // namespace

nb::dict header_dict(const blink_ring_header& h) {
  nb::dict out;
  out["num_slots"] = h.num_slots;
  out["num_front_ends"] = h.num_front_ends;
  out["max_prompt_tokens"] = h.max_prompt_tokens;
  out["max_output_tokens"] = h.max_output_tokens;
  out["max_seqlen"] = h.max_seqlen;
  out["max_batch"] = h.max_batch;
  out["vocab_size"] = h.vocab_size;
  out["page_size_tokens"] = h.page_size_tokens;
  out["num_kv_pages"] = h.num_kv_pages;
  out["ring_bytes"] = h.ring_bytes;
  out["sampler_features"] = h.sampler_features;
  out["stop"] = h.stop != 0;
  out["heartbeat"] = h.heartbeat;
  out["step"] = h.step;
  out["launch_error"] = h.launch_error;
  out["launch_error_key"] = h.launch_error_key;
  out["stopped"] = h.stopped != 0;
  out["scheduler_state"] = h.scheduler_state;
  out["trace_count"] = h.trace_count;
  out["longest_step_ns"] = h.longest_step_ns;
  return out;
}

namespace {

nb::dict counters_dict(const RingHandle& ring) {
  const blink_counters c = copy_header(ring).counters;
  nb::dict out;
  out["steps"] = c.steps;
  out["prefill_steps"] = c.prefill_steps;
  out["decode_steps"] = c.decode_steps;
  out["off_cache_steps"] = c.off_cache_steps;
  out["prompt_tokens"] = c.prompt_tokens;
  out["output_tokens"] = c.output_tokens;
  out["admitted"] = c.admitted;
  out["finished"] = c.finished;
  out["aborted"] = c.aborted;
  out["failed"] = c.failed;
  out["paused"] = c.paused;
  out["resumed"] = c.resumed;
  out["checksum_retries"] = c.checksum_retries;
  out["late_commands"] = c.late_commands;
  out["rescans"] = c.rescans;
  out["idle_polls"] = c.idle_polls;
  out["lanes_running"] = c.lanes_running;
  out["requests_waiting"] = c.requests_waiting;
  out["pages_free"] = c.pages_free;
  out["pages_total"] = c.pages_total;
  out["max_wait_steps"] = c.max_wait_steps;
  return out;
}

// (slot, sequence, state, num_generated, finish_reason, error) of every slot that is not empty.
nb::list slots_list(const RingHandle& ring) {
  const RingView view = ring.view();
  nb::list out;
  for (uint32_t slot = 0; slot < view.sizes().num_slots; ++slot) {
    blink_slot_status* raw = view.status(slot);
    // Acquire: pairs with the scheduler's release; finish_reason and error were written before.
    const StatusWord status =
        unpack_status(std::atomic_ref<uint64_t>(raw->word).load(std::memory_order_acquire));
    if (status.state == BLINK_STATE_EMPTY) continue;
    out.append(nb::make_tuple(slot, status.sequence, status.state, status.num_generated,
                              raw->finish_reason, raw->error));
  }
  return out;
}

// The newest `count` steps, oldest first. A record being overwritten meanwhile may be torn: a live
// view only.
nb::list trace_list(const RingHandle& ring, uint64_t count) {
  const RingView view = ring.view();
  const uint64_t end =
      std::atomic_ref<uint64_t>(view.header()->trace_count).load(std::memory_order_acquire);
  const uint64_t kept = std::min<uint64_t>({count, end, view.sizes().trace_capacity});
  nb::list out;
  for (uint64_t i = end - kept; i < end; ++i) {
    blink_trace_record record;
    std::memcpy(&record, view.trace(i), sizeof(record));
    nb::dict row;
    row["step"] = record.step;
    row["start_ns"] = record.start_ns;
    row["end_ns"] = record.end_ns;
    row["kind"] = record.kind;
    row["key_index"] = record.key_index;
    row["batch"] = record.batch;
    row["seqlen"] = record.seqlen;
    row["num_lanes"] = record.num_lanes;
    row["num_tokens"] = record.num_tokens;
    row["requests_waiting"] = record.requests_waiting;
    row["pages_free"] = record.pages_free;
    out.append(row);
  }
  return out;
}

}  // namespace

void bind_ring(nb::module_& module) {
  const nb::exception<RingError> ring_error(module, "RingError");
  nb::exception<RingAbsent>(module, "RingAbsent", ring_error.ptr());
  nb::class_<RingSizes>(module, "RingSizes", "What the maker of a ring chooses.")
      .def(
          "__init__",
          [](RingSizes* self, uint32_t num_slots, uint32_t max_prompt_tokens,
             uint32_t max_output_tokens, uint32_t max_seqlen, uint32_t max_batch,
             uint32_t vocab_size, uint32_t page_size_tokens, uint32_t num_kv_pages,
             uint32_t num_front_ends, uint32_t output_record_bytes, uint32_t trace_capacity,
             uint32_t sampler_features) {
            new (self)
                RingSizes{num_slots,           num_front_ends, max_prompt_tokens, max_output_tokens,
                          output_record_bytes, max_seqlen,     max_batch,         vocab_size,
                          page_size_tokens,    num_kv_pages,   trace_capacity,    sampler_features};
          },
          nb::kw_only(), "num_slots"_a, "max_prompt_tokens"_a, "max_output_tokens"_a,
          "max_seqlen"_a, "max_batch"_a, "vocab_size"_a, "page_size_tokens"_a, "num_kv_pages"_a,
          "num_front_ends"_a = 1, "output_record_bytes"_a = 8, "trace_capacity"_a = 4096,
          "sampler_features"_a = 0)
      .def_prop_ro("ring_bytes", [](const RingSizes& sizes) {
        check_ring_sizes(sizes);
        return ring_layout_from_sizes(sizes).ring_bytes;
      });
  nb::class_<RingHandle>(module, "Ring", "A ring in memory of this process.")
      .def_static("create", &RingHandle::create, "name"_a, "sizes"_a,
                  "Makes a ring in new POSIX shared memory; the name goes with this object. "
                  "Removes rings that\n"
                  "dead processes left behind under names equal up to the last '-'.")
      .def_static("create_at", &RingHandle::create_at, "address"_a, "num_bytes"_a, "sizes"_a,
                  "Makes a ring in zeroed memory that the caller owns and keeps.")
      .def_static("open", &RingHandle::open, "name"_a, "Opens a ring in shared memory.")
      .def_prop_ro("address", &RingHandle::address)
      .def_prop_ro("num_bytes", &RingHandle::num_bytes)
      .def_prop_ro("name", &RingHandle::name)
      .def("publish", &RingHandle::publish, "name"_a)
      .def_static("check_name", &RingHandle::check_name, "name"_a,
                  "RingError: publish() cannot give this name now.")
      .def("hold_range", &RingHandle::hold_range, "front_end_index"_a)
      .def_prop_rw(
          "bundle_id", [](const RingHandle& ring) { return copy_header(ring).bundle_id; },
          &RingHandle::set_bundle_id)
      .def("request_stop", &RingHandle::request_stop, "Tells the scheduler to finish and return.")
      .def("header", [](const RingHandle& ring) { return header_dict(copy_header(ring)); })
      .def("counters", &counters_dict)
      .def("slots", &slots_list)
      .def("trace", &trace_list, "count"_a);
  module.attr("SAMPLER_TOP_K") = BLINK_SAMPLER_TOP_K;
  module.attr("SAMPLER_TOP_P") = BLINK_SAMPLER_TOP_P;
  module.attr("SAMPLER_MIN_P") = BLINK_SAMPLER_MIN_P;
  module.attr("SAMPLER_PENALTIES") = BLINK_SAMPLER_PENALTIES;
  module.attr("SAMPLER_LOGIT_BIAS") = BLINK_SAMPLER_LOGIT_BIAS;
  module.attr("SAMPLER_LOGPROBS") = BLINK_SAMPLER_LOGPROBS;
  module.attr("SAMPLER_MIN_TOKENS") = BLINK_SAMPLER_MIN_TOKENS;
}

}  // namespace blink
