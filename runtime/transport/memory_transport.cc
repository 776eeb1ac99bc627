// The two transports whose ring this process can address: shm and mapped. They differ in who owns
// the mapping; the copies are the same.
#include <atomic>
#include <cstring>
#include <optional>

#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace blink {
namespace {

bool is_word(uint64_t offset, size_t num_bytes) { return num_bytes == 8 && offset % 8 == 0; }

// Words in ascending order, each acquired, so that what a status word announces (its finish_reason,
// the records) is read after the word. Pairs with the releases of the ring's owner.
void copy_words_acquire(std::byte* target, const std::byte* source, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; i += 8) {
    auto* word = reinterpret_cast<uint64_t*>(const_cast<std::byte*>(source + i));
    const uint64_t value = std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
    std::memcpy(target + i, &value, 8);
  }
}

class MemoryTransport final : public Transport {
 public:
  MemoryTransport(const char* kind, std::string peer, std::byte* ring, uint64_t ring_bytes,
                  std::optional<SharedMemory> memory, bool watches_maker)
      : kind_(kind),
        peer_(std::move(peer)),
        ring_(ring),
        ring_bytes_(ring_bytes),
        memory_(std::move(memory)),
        watches_maker_(watches_maker) {}

  // Hot path: no allocation, no lock, no log.
  Status write(std::span<const WriteRequest> batch) override {
    if (closed_.load(std::memory_order_relaxed)) return Status::closed;
    for (const WriteRequest& request : batch) {
      if (!fits(request.offset, request.source.size())) return Status::out_of_range;
    }
    for (const WriteRequest& request : batch) {
      if (request.source.empty()) continue;
      std::byte* target = ring_ + request.offset;
      if (is_word(request.offset, request.source.size())) {
        uint64_t value;
        std::memcpy(&value, request.source.data(), 8);
        // Release: the batch's payload is visible with it. Pairs with the owner's acquire of that
        // word.
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(target))
            .store(value, std::memory_order_release);
      } else {
        std::memcpy(target, request.source.data(), request.source.size());
      }
    }
    return Status::ok;
  }

  // Hot path: no allocation, no lock, no log.
  Status read(std::span<const ReadRequest> batch) override {
    if (closed_.load(std::memory_order_relaxed)) return Status::closed;
    for (const ReadRequest& request : batch) {
      if (!fits(request.offset, request.target.size())) return Status::out_of_range;
    }
    for (const ReadRequest& request : batch) {
      const size_t words = request.offset % 8 == 0 ? request.target.size() / 8 * 8 : 0;
      copy_words_acquire(request.target.data(), ring_ + request.offset, words);
      if (request.target.size() == words) continue;
      std::memcpy(request.target.data() + words, ring_ + request.offset + words,
                  request.target.size() - words);
    }
    return Status::ok;
  }

  // Stores reach memory by themselves; nothing is queued here. A process of its own looks whether
  // the ring's still lives.
  Status flush() override {
    if (closed_.load(std::memory_order_relaxed)) return Status::closed;
    return memory_ && watches_maker_ && !memory_->has_living_maker() ? Status::lost : Status::ok;
  }

  TransportInfo info() const override {
    return {
        kind_, peer_, ring_bytes_, reinterpret_cast<blink_ring_header*>(ring_)->incarnation, {}};
  }

  // The mapping stays until destruction: another thread may be inside a copy.
  void close() override { closed_.store(true, std::memory_order_relaxed); }

 private:
  bool fits(uint64_t offset, size_t num_bytes) const {
    return offset <= ring_bytes_ && num_bytes <= ring_bytes_ - offset;
  }

  const char* kind_;
  std::string peer_;
  std::byte* ring_;
  uint64_t ring_bytes_;
  std::optional<SharedMemory> memory_;
  bool watches_maker_;
  std::atomic<bool> closed_{false};  // relaxed: it guards no data
};

std::unique_ptr<Transport> connect_memory(const char* kind, std::string peer, std::byte* ring,
                                          uint64_t available_bytes,
                                          std::optional<SharedMemory> memory,
                                          bool watches_maker = false) {
  if (available_bytes < sizeof(blink_ring_header)) {
    throw RingError("ring " + peer + ": " + std::to_string(available_bytes) +
                    " bytes are too few for a header");
  }
  auto* shared = reinterpret_cast<blink_ring_header*>(ring);
  // Acquire: the sizes are those its maker wrote before the magic. Pairs with create_ring's
  // release.
  std::atomic_ref<uint64_t>(shared->magic).load(std::memory_order_acquire);
  blink_ring_header header;
  std::memcpy(&header, ring, sizeof(header));
  check_ring_header(header, available_bytes);
  return std::make_unique<MemoryTransport>(kind, std::move(peer), ring, header.ring_bytes,
                                           std::move(memory), watches_maker);
}

}  // namespace

const char* status_name(Status status) {
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::closed:
      return "closed";
    case Status::out_of_range:
      return "out of range";
    case Status::lost:
      return "lost";
  }
  return "unknown";
}

std::unique_ptr<Transport> connect_shm(const std::string& name) {
  SharedMemory memory = SharedMemory::open(name);
  const std::span<std::byte> bytes = memory.bytes();
  return connect_memory("shm", name, bytes.data(), bytes.size(), std::move(memory));
}

std::unique_ptr<Transport> connect_shm(const ShmConnectConfig& config) {
  SharedMemory memory = SharedMemory::open(config.name);
  if (!memory.has_living_maker()) {
    throw RingAbsent("ring " + config.name + ": the process that owned it has ended");
  }
  const std::span<std::byte> bytes = memory.bytes();
  const auto& header = *reinterpret_cast<const blink_ring_header*>(bytes.data());
  check_ring_header(header, bytes.size());
  if (config.bundle_id != 0 && header.bundle_id != 0 && config.bundle_id != header.bundle_id) {
    throw RingError("ring " + config.name + ": its owner serves another bundle");
  }
  if (config.front_end_index < header.num_front_ends &&
      !memory.hold_range(config.front_end_index)) {
    throw RingError("ring " + config.name + ": front end " +
                    std::to_string(config.front_end_index) + " of " +
                    std::to_string(header.num_front_ends) +
                    " is another process; stop that one, or choose another --front-end");
  }
  return connect_memory("shm", config.name, bytes.data(), bytes.size(), std::move(memory), true);
}

std::unique_ptr<Transport> connect_mapped(void* ring, uint64_t ring_bytes) {
  return connect_memory("mapped", "this process", static_cast<std::byte*>(ring), ring_bytes,
                        std::nullopt);
}

}  // namespace blink
