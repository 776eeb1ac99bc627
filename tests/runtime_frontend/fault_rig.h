// A front end in this process whose link to the ring can be cut, slowed and counted, and whose
// ring's owner can die and be replaced.
#ifndef BLINK_TESTS_FAULT_RIG_H
#define BLINK_TESTS_FAULT_RIG_H

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_owner.h"
#include "frontend/front_end.h"

namespace blink::testing {

// What a test does to the link, and what it counts on it.
struct Link {
  std::atomic<bool> is_down{false};
  std::atomic<uint32_t> read_delay_us{0};
  std::atomic<int64_t> verbs_until_failure{-1};  // at 0 the verb fails and the link is down
  std::atomic<uint64_t> num_polls{0};            // bulk reads of the status table
  std::atomic<uint64_t> records_since_poll{0};
  std::atomic<uint64_t> most_records_a_pass{0};
  std::atomic<uint64_t> num_output_reads{0};  // that bring records, of one slot or of many
  std::atomic<uint64_t> num_slots_read{0};    // by those
  std::atomic<uint64_t> output_reads_since_poll{0};
  std::atomic<uint64_t> most_output_reads_a_pass{0};
  std::mutex ring_mutex;
  std::byte* ring = nullptr;  // under ring_mutex: what the next connection reaches
  uint64_t ring_bytes = 0;
};

class FaultyTransport final : public Transport {
 public:
  explicit FaultyTransport(Link& link);

  using Transport::read;
  using Transport::write;
  Status write(std::span<const WriteRequest> batch) override;
  Status read(std::span<const ReadRequest> batch) override;
  Status flush() override { return is_lost() ? Status::lost : Status::ok; }
  TransportInfo info() const override { return target_.load()->info(); }
  void close() override { target_.load()->close(); }
  Status reconnect() override;

 private:
  void connect();
  bool is_lost();
  void count_output(std::span<const ReadRequest> batch);

  Link& link_;
  uint64_t output_offset_ = 0;  // the same in every ring of a rig, as is the next
  uint64_t record_bytes_ = 0;
  std::atomic<bool> has_lost_{false};            // until reconnect, as a broken queue pair
  std::vector<std::shared_ptr<Transport>> all_;  // old ones stay: verbs may be inside them
  std::atomic<Transport*> target_{nullptr};
};

struct ZeroedRing {
  explicit ZeroedRing(const RingSizes& sizes);
  std::unique_ptr<std::byte, void (*)(void*)> memory;
  uint64_t num_bytes;
};

class Rig {
 public:
  struct Options {
    RingSizes sizes;
    FakeOwner::Options owner;
    FrontEndConfig config;
  };
  static Options defaults();

  explicit Rig(Options options);
  ~Rig();

  uint16_t port() const { return front_end_->port(); }
  Link& link() { return link_; }
  Metrics& metrics() { return front_end_->pipeline().metrics(); }
  Health health() const { return front_end_->health(); }

  // The owner's process is gone in the middle of whatever it did.
  void kill_owner();
  // Another owner with a ring of its own.
  void start_owner();

  // Waits until every slot is empty, no request is counted as running and no connection is open:
  // the bug it guards is anything that leaked.
  void wait_until_at_rest();
  // Waits until slots that were in doubt and are empty by now may be used again: the token reader
  // looks at them in some rounds of its housekeeping first.
  void wait_until_settled();
  uint64_t num_ended();  // requests, however they ended

 private:
  Options options_;
  Link link_;
  std::vector<std::unique_ptr<ZeroedRing>> rings_;  // old ones stay mapped, as they would
  std::unique_ptr<FakeOwner> owner_;
  std::atomic<bool> is_owner_dying_{false};
  std::thread owner_thread_;
  std::unique_ptr<FrontEnd> front_end_;
};

void wait_for(const std::function<bool()>& condition, const char* what);

// A client's socket.
class Socket {
 public:
  explicit Socket(uint16_t port, int receive_buffer_bytes = 0);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void send(std::string_view bytes);
  // Up to `num_bytes`, less only at the end of the stream.
  std::string receive(size_t num_bytes);
  std::string receive_response();  // to the end of the response, or of the stream
  void reset_on_close();           // RST instead of FIN

 private:
  int fd_;
};

std::string post(const std::string& body);
std::string completion(const std::string& prompt, uint32_t max_tokens, bool streams);
// One request of its own connection; the whole response.
std::string exchange(uint16_t port, const std::string& request);
// The text of a streamed or plain answer's events.
std::string text_of(const std::string& response);
size_t num_open_files();

}  // namespace blink::testing

#endif  // BLINK_TESTS_FAULT_RIG_H
