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
  if (front_end_index >= sizes_.num_front_ends) {
    throw RingError("ring: front end " + std::to_string(front_end_index) + " of " +
                    std::to_string(sizes_.num_front_ends) + ": indices start at 0");
  }
  first_slot_ = front_end_first_slot(front_end_index, sizes_.num_slots, sizes_.num_front_ends);
  num_slots_ = front_end_first_slot(front_end_index + 1, sizes_.num_slots, sizes_.num_front_ends) -
               first_slot_;
  attach();
}

void RingClient::attach() {
  blink_front_end line;
  require_ok(transport_->read_object(front_end_offset(), line), "cannot read the front end's line");
  epoch_ = line.epoch + 1 == 0 ? 1 : line.epoch + 1;
  std::vector<blink_slot_command> commands(num_slots_);
  require_ok(
      transport_->read(ReadRequest{command_offset(0), std::as_writable_bytes(std::span(commands))}),
      "cannot read the commands");
  std::vector<blink_slot_status> statuses(num_slots_);
  require_ok(read_statuses(0, statuses), "cannot read the statuses");
  sequences_.resize(num_slots_);
  for (uint32_t slot = 0; slot < num_slots_; ++slot) {
    const CommandWord command = unpack_command(commands[slot].word);
    const StatusWord status = unpack_status(statuses[slot].word);
    sequences_[slot] = std::max(command.sequence, status.sequence);
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
  // submit_count before epoch: a new epoch with the old count would look like lost commands.
  const uint64_t zero = 0;
  const uint64_t epoch_word = epoch_;
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
  request.epoch = epoch_;
  request.num_prompt_tokens = static_cast<uint32_t>(prompt_token_ids.size());
  const uint64_t global_slot = first_slot_ + slot;
  const uint64_t word = pack_command(sequence, BLINK_COMMAND_SUBMIT);

  const std::lock_guard lock(command_mutex_);
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
  return transport_->write(batch);
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

// Hot path: no allocation, no lock, no log.
Status RingClient::read_output(uint32_t slot, uint32_t first, std::span<uint32_t> token_ids,
                               blink_slot_status& status_after) {
  std::array<std::byte, kMaxRecords * sizeof(blink_output_record)> records;
  const uint64_t record_bytes = sizes_.output_record_bytes;
  const uint64_t index =
      static_cast<uint64_t>(first_slot_ + slot) * sizes_.max_output_tokens + first;
  const size_t count = std::min<size_t>(token_ids.size(), kMaxRecords);
  const std::array<ReadRequest, 2> batch = {
      ReadRequest{layout_.output_offset + index * record_bytes,
                  std::span(records).first(count * record_bytes)},
      ReadRequest{status_offset(slot), std::as_writable_bytes(std::span(&status_after, 1))}};
  const Status status = transport_->read(batch);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(&token_ids[i], records.data() + i * record_bytes, sizeof(uint32_t));
  }
  return status;
}

Status RingClient::write_heartbeat(uint64_t beats) {
  return transport_->write_object(front_end_offset() + offsetof(blink_front_end, heartbeat), beats);
}

}  // namespace blink
