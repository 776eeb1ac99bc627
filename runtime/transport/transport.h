// How a front end reaches a ring: one-sided verbs, the same over shared memory and over a network
// card.
//
//   connect   the factories below; they check the peer's header (ring_layout.h) and throw RingError
//   write     put bytes into the ring; a batch is applied in order
//   read      bring bytes out of the ring
//   flush     wait until every write has reached the ring; finds out whether its owner is there
//   info      what is at the other end
//   close     stop; verbs afterwards return Status::closed
//   reconnect after a loss: the ring may be another one, and what was under way is gone
//
// Memory order, the contract every implementation keeps (DESIGN.md says why):
//   - A write of exactly 8 bytes at an offset divisible by 8 is a *word*: it appears whole, and
//   only after
//     all writes before it on this transport (release). So: payload first, command word last.
//   - Other writes promise nothing between themselves until a word follows.
//   - Reads of a batch happen in order, but for those that ask for none (ReadRequest::is_ordered);
//     8-byte words inside them come whole, and what was released before a word that was read is
//     visible to every later read (acquire).
//   - The source of a write may be reused as soon as write returns.
#ifndef BLINK_TRANSPORT_TRANSPORT_H
#define BLINK_TRANSPORT_TRANSPORT_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/ring_layout.h"

namespace blink {

enum class [[nodiscard]] Status {
  ok,
  closed,        // close() was called
  out_of_range,  // an offset outside the ring: a bug of the caller, nothing was transferred
  lost,          // the peer is gone
};

const char* status_name(Status status);

struct WriteRequest {
  uint64_t offset;  // bytes from the ring's start
  std::span<const std::byte> source;
};

struct ReadRequest {
  uint64_t offset;  // bytes from the ring's start
  std::span<std::byte> target;
  // false: may be read beside those before it, back to the last ordered one.
  bool is_ordered = true;
};

struct TransportInfo {
  const char* kind;      // "shm", "mapped", "verbs"
  std::string peer;      // its name, for messages
  uint64_t ring_bytes;   // size of the ring
  uint64_t incarnation;  // of the ring: another one after its owner restarted
  std::string problem;   // why it is lost; empty while it is not
};

// Thread-safety: reads may run on several threads at once, so may writes; the order between writes
// holds within one thread only.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual Status write(std::span<const WriteRequest> batch) = 0;
  virtual Status read(std::span<const ReadRequest> batch) = 0;
  virtual Status flush() = 0;
  virtual TransportInfo info() const = 0;
  virtual void close() = 0;
  // May take seconds. ok: connected again, and the caller must attach again.
  virtual Status reconnect() { return Status::lost; }

  Status write(const WriteRequest& request) { return write(std::span(&request, 1)); }
  Status read(const ReadRequest& request) { return read(std::span(&request, 1)); }

  template <typename T>
  Status write_object(uint64_t offset, const T& object) {
    return write(WriteRequest{offset, std::as_bytes(std::span(&object, 1))});
  }
  template <typename T>
  Status read_object(uint64_t offset, T& object) {
    return read(ReadRequest{offset, std::as_writable_bytes(std::span(&object, 1))});
  }
};

// The ring lies in POSIX shared memory under `name` ("/something"). Throws RingError.
std::unique_ptr<Transport> connect_shm(const std::string& name);

// The same for a front end in a process of its own: it holds its slot range against others, and
// loses the ring when its owner's process ends.
struct ShmConnectConfig {
  std::string name;
  uint32_t front_end_index = 0;
  uint64_t bundle_id = 0;  // what the owner must serve; 0: anything
};
std::unique_ptr<Transport> connect_shm(const ShmConnectConfig& config);

// The ring lies in this process: ordinary memory, or pinned host memory that a GPU has mapped. The
// memory stays the caller's and must outlive the transport. Throws RingError.
std::unique_ptr<Transport> connect_mapped(void* ring, uint64_t ring_bytes);

}  // namespace blink

#endif  // BLINK_TRANSPORT_TRANSPORT_H
