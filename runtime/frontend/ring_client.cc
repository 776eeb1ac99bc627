#include "frontend/ring_client.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

namespace blink {
namespace {

void require_ok(Status status, const char* what) {
  if (status != Status::ok) {
    throw RingError(std::string("ring: ") + what + ": " + status_name(status));
  }
}

template <typename T>
std::span<const std::byte> bytes_of(const T& object) {
  return std::as_bytes(std::span(&object, 1));
}

}  // namespace

RingClient::RingClient(std::unique_ptr<Transport> transport, uint32_t front_end_index)
    : transport_(std::move(transport)), front_end_index_(front_end_index) {
  blink_ring_header header;
  require_ok(read_header(header), "cannot read the header");
  check_ring_header(header, transport_->info().ring_bytes);
  sizes_ = ring_sizes_from_header(header);
  layout_ = ring_layout_from_sizes(sizes_);
  if ((sizes_.sampler_features & BLINK_SAMPLER_LOGPROBS) != 0 &&
      sizes_.output_record_bytes != sizeof(blink_output_record)) {
    throw RingError("ring: its sampler gives logprobs, its records of " +
                    std::to_string(sizes_.output_record_bytes) + " bytes have no room for them");
  }
  if (front_end_index >= sizes_.num_front_ends) {
    throw RingError("ring: front end " + std::to_string(front_end_index) + " of " +
                    std::to_string(sizes_.num_front_ends) + ": indices start at 0");
  }
  first_slot_ = front_end_first_slot(front_end_index, sizes_.num_slots, sizes_.num_front_ends);
  num_slots_ = front_end_first_slot(front_end_index + 1, sizes_.num_slots, sizes_.num_front_ends) -
               first_slot_;
  sequences_ = std::make_unique<std::atomic<uint32_t>[]>(num_slots_);
  submitted_epochs_ = std::make_unique<std::atomic<uint32_t>[]>(num_slots_);
  attach();
}

bool RingClient::reconnect() {
  if (transport_->reconnect() != Status::ok) return false;
  try {
    blink_ring_header header;
    require_ok(read_header(header), "cannot read the header");
    check_ring_header(header, transport_->info().ring_bytes);
    const RingSizes sizes = ring_sizes_from_header(header);
    // Limits that clients were told must still hold: another ring needs another front end.
    if (std::memcmp(&sizes, &sizes_, sizeof(sizes)) != 0) return false;
    attach();
  } catch (const RingError&) {
    return false;  // lost again meanwhile
  }
  return true;
}

// What an earlier life, or an earlier link of this one, left in the slots.
void RingClient::read_old_life() {
  unsettled_.clear();
  std::vector<blink_slot_command> commands(num_slots_);
  require_ok(
      transport_->read(ReadRequest{command_offset(0), std::as_writable_bytes(std::span(commands))}),
      "cannot read the commands");
  std::vector<blink_slot_status> statuses(num_slots_);
  require_ok(read_statuses(0, statuses), "cannot read the statuses");
  for (uint32_t slot = 0; slot < num_slots_; ++slot) {
    const CommandWord command = unpack_command(commands[slot].word);
    const StatusWord status = unpack_status(statuses[slot].word);
    // Never back: after a reconnect the network thread may hold a number of its own.
    const uint32_t newest = std::max(command.sequence, status.sequence);
    uint32_t known = sequences_[slot].load(std::memory_order_relaxed);
    while (known < newest &&
           !sequences_[slot].compare_exchange_weak(known, newest, std::memory_order_relaxed)) {
    }
    const bool has_unseen_command =
        command.command == BLINK_COMMAND_SUBMIT && command.sequence != status.sequence;
    if (status.state != BLINK_STATE_EMPTY || has_unseen_command) unsettled_.push_back(slot);
    if (has_unseen_command) {
      // Withdraw it: its front end is gone. If the owner takes it all the same, the epoch fails it.
      require_ok(transport_->write_object(command_offset(slot),
                                          pack_command(command.sequence, BLINK_COMMAND_NONE)),
                 "cannot withdraw a command");
    }
  }
}

void RingClient::attach() {
  read_old_life();
  blink_front_end line;
  require_ok(transport_->read_object(front_end_offset(), line), "cannot read the front end's line");
  // New to the ring, which may be a new one, and new to this process.
  const uint32_t epoch = std::max(line.epoch, this->epoch()) + 1;
  const std::lock_guard lock(command_mutex_);
  epoch_.store(epoch == 0 ? 1 : epoch, std::memory_order_relaxed);
  num_commands_ = 0;
  submit_number_ = 0;
  // submit_count before epoch: a new epoch with the old count would look like lost commands.
  const uint64_t zero = 0;
  const uint64_t epoch_word = this->epoch();
  const std::array<WriteRequest, 2> batch = {
      WriteRequest{front_end_offset() + offsetof(blink_front_end, submit_count), bytes_of(zero)},
      WriteRequest{front_end_offset() + offsetof(blink_front_end, epoch), bytes_of(epoch_word)}};
  require_ok(transport_->write(batch), "cannot attach");
  require_ok(transport_->flush(), "cannot attach");
}

uint64_t RingClient::front_end_offset() const {
  return layout_.front_end_offset + front_end_index_ * sizeof(blink_front_end);
}

uint64_t RingClient::command_offset(uint32_t slot) const {
  return layout_.command_offset +
         static_cast<uint64_t>(first_slot_ + slot) * sizeof(blink_slot_command);
}

uint64_t RingClient::status_offset(uint32_t slot) const {
  return layout_.status_offset +
         static_cast<uint64_t>(first_slot_ + slot) * sizeof(blink_slot_status);
}

// Hot path (once a request): no allocation, no log.
Status RingClient::submit(uint32_t slot, uint32_t sequence, blink_slot_request request,
                          std::span<const uint32_t> prompt_token_ids) {
  request.sequence = sequence;
  request.num_prompt_tokens = static_cast<uint32_t>(prompt_token_ids.size());
  const uint64_t global_slot = first_slot_ + slot;
  const uint64_t word = pack_command(sequence, BLINK_COMMAND_SUBMIT);

  const std::lock_guard lock(command_mutex_);
  request.epoch = epoch();
  submitted_epochs_[slot].store(request.epoch, std::memory_order_relaxed);
  request.submit_number = ++submit_number_;
  request.checksum = request_checksum(&request, prompt_token_ids.data(), request.num_prompt_tokens);
  ++num_commands_;
  // Order matters: the payload, then the word that announces it, then the count that rings the
  // bell.
  const std::array<WriteRequest, 5> batch = {
      WriteRequest{
          layout_.prompt_offset + global_slot * sizes_.max_prompt_tokens * sizeof(uint32_t),
          std::as_bytes(prompt_token_ids)},
      WriteRequest{layout_.request_offset + global_slot * sizeof(blink_slot_request),
                   bytes_of(request)},
      WriteRequest{command_offset(slot) + offsetof(blink_slot_command, submit_number),
                   bytes_of(request.submit_number)},
      WriteRequest{command_offset(slot) + offsetof(blink_slot_command, word), bytes_of(word)},
      WriteRequest{front_end_offset() + offsetof(blink_front_end, submit_count),
                   bytes_of(num_commands_)}};
  const Status status = transport_->write(batch);
  return status == Status::lost ? Status::ok : status;
}

// Hot path: no allocation, no log.
Status RingClient::release(std::span<const Release> releases) {
  releases = releases.first(std::min<size_t>(releases.size(), kMaxSlotsARead));
  std::array<uint64_t, kMaxSlotsARead> words;
  std::array<WriteRequest, kMaxSlotsARead + 1> batch;
  for (size_t i = 0; i < releases.size(); ++i) {
    words[i] = pack_command(releases[i].sequence, BLINK_COMMAND_RELEASE);
    batch[i] = {command_offset(releases[i].slot) + offsetof(blink_slot_command, word),
                bytes_of(words[i])};
  }
  const std::lock_guard lock(command_mutex_);
  num_commands_ += releases.size();
  batch[releases.size()] = {front_end_offset() + offsetof(blink_front_end, submit_count),
                            bytes_of(num_commands_)};
  return transport_->write(std::span(batch).first(releases.size() + 1));
}

Status RingClient::send_command(uint32_t slot, uint64_t word) {
  const std::lock_guard lock(command_mutex_);
  ++num_commands_;
  const std::array<WriteRequest, 2> batch = {
      WriteRequest{command_offset(slot) + offsetof(blink_slot_command, word), bytes_of(word)},
      WriteRequest{front_end_offset() + offsetof(blink_front_end, submit_count),
                   bytes_of(num_commands_)}};
  return transport_->write(batch);
}

// Hot path: no allocation, no lock, no log.
Status RingClient::read_statuses(uint32_t first, std::span<blink_slot_status> statuses) {
  return transport_->read(ReadRequest{status_offset(first), std::as_writable_bytes(statuses)});
}

// Hot path: no allocation, no lock, no log. No two slots' records depend on each other; each
// status must come after its own slot's, so the first one waits for all.
Status RingClient::read_outputs(std::span<const OutputRead> outputs) {
  std::array<ReadRequest, size_t{2} * kMaxSlotsARead> batch;
  size_t count = 0;
  outputs = outputs.first(std::min<size_t>(outputs.size(), kMaxSlotsARead));
  for (const OutputRead& output : outputs) {
    if (output.records.empty()) continue;
    const uint64_t index =
        static_cast<uint64_t>(first_slot_ + output.slot) * sizes_.max_output_tokens + output.first;
    batch[count++] = {layout_.output_offset + index * sizes_.output_record_bytes, output.records,
                      false};
  }
  bool is_first = true;
  for (const OutputRead& output : outputs) {
    batch[count++] = {status_offset(output.slot),
                      std::as_writable_bytes(std::span(output.status_after, 1)), is_first};
    is_first = false;
  }
  return transport_->read(std::span(batch).first(count));
}

Status RingClient::write_heartbeat(uint64_t beats) {
  const Status status =
      transport_->write_object(front_end_offset() + offsetof(blink_front_end, heartbeat), beats);
  return status == Status::ok ? transport_->flush() : status;
}

}  // namespace blink
