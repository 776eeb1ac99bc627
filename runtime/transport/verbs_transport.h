// One link's life: connected by its constructor, used until it is closed or lost, never revived.
#ifndef BLINK_TRANSPORT_VERBS_TRANSPORT_H
#define BLINK_TRANSPORT_VERBS_TRANSPORT_H

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "transport/send_window.h"
#include "transport/tcp_socket.h"
#include "transport/verbs.h"
#include "transport/verbs_device.h"

namespace blink {

class VerbsTransport final : public Transport {
 public:
  explicit VerbsTransport(const VerbsConnectConfig& config);
  ~VerbsTransport() override;

  using Transport::read;
  using Transport::write;
  Status write(std::span<const WriteRequest> batch) override;
  Status read(std::span<const ReadRequest> batch) override;
  Status flush() override;
  TransportInfo info() const override;
  void close() override;

 private:
  // Work requests that are posted with one call.
  struct Chain {
    static constexpr size_t kCapacity = 16;
    std::array<ibv_send_wr, kCapacity> requests;
    std::array<ibv_sge, kCapacity> pieces;
    size_t count = 0;
  };

  void bootstrap();
  void check_header();
  bool fits(uint64_t offset, size_t num_bytes) const;
  Status state() const;
  std::string problem() const;
  Status lose(const std::string& why);
  Status reap();
  Status wait_for(uint64_t index);
  Status wait_for_room(std::unique_lock<std::mutex>& lock, uint32_t num_bytes);
  Status post(Chain& chain);
  ibv_send_wr& add(Chain& chain, ibv_wr_opcode opcode, uint64_t ring_offset, const std::byte* local,
                   uint32_t num_bytes, const SendWindow::Place& place);
  Status post_reads(std::span<const ReadRequest> batch, size_t& next, size_t& next_byte,
                    uint64_t& last_index);
  void copy_out(std::span<const ReadRequest> batch, size_t first, size_t first_byte, size_t end,
                size_t end_byte);

  VerbsConnectConfig config_;
  std::string peer_;
  SteadyTime deadline_;  // of the bootstrap
  Fd socket_;            // stays open: its end tells that the owner is gone
  VerbsDevice device_;
  std::unique_ptr<std::byte, void (*)(void*)> local_;  // staging and landing memory
  VerbsHandle<ibv_mr> local_mr_;
  std::span<std::byte> staging_;
  std::span<std::byte> landing_;
  uint64_t ring_address_ = 0;
  uint64_t ring_bytes_ = 0;
  uint64_t incarnation_ = 0;
  uint32_t rkey_ = 0;
  QueuePair queue_pair_;  // destroyed before the memory that it may still read

  mutable std::mutex mutex_;  // guards posting, polling, window_ and problem_; never held in a wait
  SendWindow window_;
  std::string problem_;
  std::mutex read_mutex_;               // guards landing_
  std::atomic<bool> is_closed_{false};  // relaxed: they guard no data
  std::atomic<bool> is_lost_{false};
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_VERBS_TRANSPORT_H
