// A ring as Python holds it: in shared memory that it made or opened, or in memory of someone else.
#ifndef BLINK_NATIVE_RING_HANDLE_H
#define BLINK_NATIVE_RING_HANDLE_H

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>

#include "transport/ring_layout.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace blink {

class RingHandle {
 public:
  // In new shared memory `name`.
  static RingHandle create(const std::string& name, const RingSizes& sizes);
  // In zeroed memory that the caller owns, such as pinned host memory.
  static RingHandle create_at(uint64_t address, uint64_t num_bytes, const RingSizes& sizes);
  // An existing ring.
  static RingHandle open(const std::string& name);

  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes_.data()); }
  uint64_t num_bytes() const { return bytes_.size(); }
  std::string name() const { return memory_ ? memory_->name() : std::string(); }
  RingView view() const { return RingView(bytes_.data()); }
  void request_stop() const;
  // Whose tokens these are; told before any front end attaches.
  void set_bundle_id(uint64_t bundle_id) const { view().header()->bundle_id = bundle_id; }
  // Gives a ring in shared memory the name that front ends know; what a dead process left under it
  // is removed. Throws RingError: a living one has it.
  void publish(const std::string& name);
  // Throws RingError: publish() could not give this name now.
  static void check_name(const std::string& name);
  // Keeps other processes' front ends out of a slot range of a ring in shared memory, for this
  // object's life. Throws RingError: one has it.
  void hold_range(uint32_t front_end_index) const;
  std::unique_ptr<Transport> connect() const;

 private:
  RingHandle(std::optional<SharedMemory> memory, std::span<std::byte> bytes)
      : memory_(std::move(memory)), bytes_(bytes) {}

  std::optional<SharedMemory> memory_;
  std::span<std::byte> bytes_;
};

// A header's fields by their names, for Python.
nanobind::dict header_dict(const blink_ring_header& header);

}  // namespace blink

#endif  // BLINK_NATIVE_RING_HANDLE_H
