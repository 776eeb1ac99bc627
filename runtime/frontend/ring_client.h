// The front end's side of the ring's protocol over any transport: attach, submit, abort, release,
// read.
#ifndef BLINK_FRONTEND_RING_CLIENT_H
#define BLINK_FRONTEND_RING_CLIENT_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "blink/abi.hpp"
#include "transport/transport.h"

namespace blink {

// Slots are indices within this front end's range. Commands of several threads are serialized by a
// lock that is taken once or twice a request, never per token.
class RingClient {
 public:
  // Checks the ring and attaches with a new epoch: the owner aborts what an earlier front end of
  // this range left behind. Throws RingError.
  RingClient(std::unique_ptr<Transport> transport, uint32_t front_end_index);

  // After a loss: connects again and attaches with a new epoch. False: still lost. May take
  // seconds. Token reader's thread; unsettled_slots() is a new list afterwards.
  bool reconnect();

  const RingSizes& sizes() const { return sizes_; }
  uint32_t num_slots() const { return num_slots_; }
  uint32_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  // The epoch in which the slot was last submitted: not epoch(), then the request went with a link
  // that is lost.
  uint32_t submitted_epoch(uint32_t slot) const {
    return submitted_epochs_[slot].load(std::memory_order_relaxed);
  }
  TransportInfo info() const { return transport_->info(); }
  Transport& transport() { return *transport_; }

  // Slots that something older than this attach may still occupy.
  const std::vector<uint32_t>& unsettled_slots() const { return unsettled_; }

  // The number that marks the slot's next request. Network thread.
  uint32_t next_sequence(uint32_t slot) {
    return sequences_[slot].fetch_add(1, std::memory_order_relaxed) + 1;
  }

  // Completes `request` (sequence, epoch, submit number, checksum) and hands it over. ok also where
  // the link was lost, as it is for a request that dies on its way: the slot must be watched.
  Status submit(uint32_t slot, uint32_t sequence, blink_slot_request request,
                std::span<const uint32_t> prompt_token_ids);
  Status abort(uint32_t slot, uint32_t sequence) {
    return send_command(slot, pack_command(sequence, BLINK_COMMAND_ABORT));
  }
  struct Release {
    uint32_t slot;
    uint32_t sequence;
  };
  // One write for all, at most kMaxSlotsARead.
  Status release(std::span<const Release> releases);
  Status release(uint32_t slot, uint32_t sequence) {
    const Release one{slot, sequence};
    return release(std::span(&one, 1));
  }
  // Takes back a submit that the owner has not acted upon.
  Status withdraw(uint32_t slot, uint32_t sequence) {
    return send_command(slot, pack_command(sequence, BLINK_COMMAND_NONE));
  }

  // Bulk read of the slots [first, first + statuses.size()).
  Status read_statuses(uint32_t first, std::span<blink_slot_status> statuses);

  // Records of a slot from `first` on, and its status once more, by which the caller knows that
  // the records were its own.
  struct OutputRead {
    uint32_t slot;
    uint32_t first;
    std::span<std::byte> records;  // whole ones, sizes().output_record_bytes each; may be empty
    blink_slot_status* status_after;
  };
  static constexpr uint32_t kMaxRecords = 64;     // of a slot
  static constexpr uint32_t kMaxSlotsARead = 64;  // of one call
  // One read for all: the records of the slots in any order, then the statuses.
  Status read_outputs(std::span<const OutputRead> outputs);

  Status read_header(blink_ring_header& header) { return transport_->read_object(0, header); }
  Status write_heartbeat(uint64_t beats);
  void close() { transport_->close(); }

 private:
  void attach();
  void read_old_life();
  Status send_command(uint32_t slot, uint64_t word);
  uint64_t command_offset(uint32_t slot) const;
  uint64_t status_offset(uint32_t slot) const;
  uint64_t front_end_offset() const;

  std::unique_ptr<Transport> transport_;
  uint32_t front_end_index_;
  RingSizes sizes_;
  RingLayout layout_{};
  uint32_t first_slot_ = 0;
  uint32_t num_slots_ = 0;
  std::atomic<uint32_t> epoch_{0};  // relaxed: written under command_mutex_, compared only
  std::unique_ptr<std::atomic<uint32_t>[]> sequences_;         // relaxed: counters
  std::unique_ptr<std::atomic<uint32_t>[]> submitted_epochs_;  // relaxed: as epoch_
  std::vector<uint32_t> unsettled_;

  std::mutex command_mutex_;    // guards the two counters and the order of command writes
  uint64_t submit_number_ = 0;  // submissions since attach
  uint64_t num_commands_ = 0;   // submit_count
};

}  // namespace blink

#endif  // BLINK_FRONTEND_RING_CLIENT_H
