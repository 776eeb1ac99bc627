#include "fault_rig.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "byte_codec.h"

namespace blink::testing {

// ---- link

FaultyTransport::FaultyTransport(Link& link) : link_(link) {
  connect();
  const std::lock_guard lock(link_.ring_mutex);
  const RingView ring(link_.ring);
  output_offset_ = ring.layout().output_offset;
  record_bytes_ = ring.sizes().output_record_bytes;
}

Status FaultyTransport::write(std::span<const WriteRequest> batch) {
  if (is_lost()) return Status::lost;
  return target_.load()->write(batch);
}

Status FaultyTransport::read(std::span<const ReadRequest> batch) {
  const uint32_t delay_us = link_.read_delay_us.load();
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  if (is_lost()) return Status::lost;
  if (batch.size() > 1) {
    count_output(batch);
  } else if (batch[0].target.size() % sizeof(blink_slot_status) == 0) {
    link_.output_reads_since_poll = 0;
    if (batch[0].target.size() > sizeof(blink_slot_status)) {
      ++link_.num_polls;
      link_.records_since_poll = 0;
    }
  }
  return target_.load()->read(batch);
}

// Records in any order, then statuses: the first of those must wait for all records, or a slot's
// status could be older than what was read of it.
void FaultyTransport::count_output(std::span<const ReadRequest> batch) {
  uint64_t num_slots = 0;
  bool has_status = false;
  for (const ReadRequest& request : batch) {
    const bool is_output = request.offset >= output_offset_;
    CHECK(is_output || has_status || request.is_ordered);
    CHECK(!is_output || !has_status);
    has_status |= !is_output;
    if (!is_output) continue;
    ++num_slots;
    link_.records_since_poll += request.target.size() / record_bytes_;
  }
  CHECK(has_status);
  if (num_slots > 0) ++link_.num_output_reads;
  link_.num_slots_read += num_slots;
  const uint64_t num_reads = ++link_.output_reads_since_poll;
  if (num_reads > link_.most_output_reads_a_pass) link_.most_output_reads_a_pass = num_reads;
  if (link_.records_since_poll > link_.most_records_a_pass) {
    link_.most_records_a_pass = link_.records_since_poll.load();
  }
}

Status FaultyTransport::reconnect() {
  if (link_.is_down) return Status::lost;
  connect();
  return Status::ok;
}

void FaultyTransport::connect() {
  const std::lock_guard lock(link_.ring_mutex);
  all_.push_back(connect_mapped(link_.ring, link_.ring_bytes));
  target_ = all_.back().get();
  has_lost_ = false;
}

bool FaultyTransport::is_lost() {
  if (link_.verbs_until_failure >= 0 && --link_.verbs_until_failure < 0) link_.is_down = true;
  if (link_.is_down) has_lost_ = true;
  return has_lost_;
}

// ---- rig

ZeroedRing::ZeroedRing(const RingSizes& sizes)
    : memory(nullptr, std::free), num_bytes(ring_layout_from_sizes(sizes).ring_bytes) {
  memory.reset(static_cast<std::byte*>(std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096)));
  std::memset(memory.get(), 0, num_bytes);
  create_ring({memory.get(), num_bytes}, sizes);
}

Rig::Options Rig::defaults() {
  Options options;
  options.sizes.num_slots = 16;
  options.sizes.max_prompt_tokens = 512;
  options.sizes.max_output_tokens = 1024;
  options.sizes.max_seqlen = 2048;
  options.sizes.max_batch = 16;
  options.sizes.vocab_size = 300;
  options.sizes.num_kv_pages = 1 << 16;
  options.config.port = 0;
  options.config.model_name = "fake";
  options.config.eos_token_ids = {FakeOwner::kEos};
  // No thread's pause on a busy machine is a client that is late, or an owner that is dead.
  options.config.header_timeout_ms = options.config.body_timeout_ms = 600'000;
  options.config.stall_timeout_ms = 600'000;
  return options;
}

Rig::Rig(Options options) : options_(std::move(options)) {
  start_owner();
  front_end_ = std::make_unique<FrontEnd>(options_.config, std::make_unique<FaultyTransport>(link_),
                                          std::make_shared<ByteCodec>(),
                                          [](const std::string&) { return std::string("chat"); });
  front_end_->start();
  wait_for([this] { return health() == Health::serving; }, "the front end to be healthy");
}

Rig::~Rig() {
  front_end_->stop(std::chrono::seconds(1));
  kill_owner();
}

void Rig::kill_owner() {
  is_owner_dying_ = true;
  if (owner_thread_.joinable()) owner_thread_.join();
}

void Rig::start_owner() {
  kill_owner();
  is_owner_dying_ = false;
  rings_.push_back(std::make_unique<ZeroedRing>(options_.sizes));
  std::byte* memory = rings_.back()->memory.get();
  {
    const std::lock_guard lock(link_.ring_mutex);
    link_.ring = memory;
    link_.ring_bytes = rings_.back()->num_bytes;
  }
  owner_ = std::make_unique<FakeOwner>(memory, options_.owner);
  owner_thread_ = std::thread([this, memory] {
    blink_ring_header& header = *RingView(memory).header();
    while (!is_owner_dying_) {
      std::atomic_ref<uint64_t>(header.heartbeat).fetch_add(1, std::memory_order_relaxed);
      if (!owner_->pass()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
}

void Rig::wait_until_at_rest() {
  const RingView view(rings_.back()->memory.get());
  wait_for(
      [&] {
        for (uint32_t slot = 0; slot < options_.sizes.num_slots; ++slot) {
          const uint64_t word =
              std::atomic_ref<uint64_t>(view.status(slot)->word).load(std::memory_order_acquire);
          if (unpack_status(word).state != BLINK_STATE_EMPTY) return false;
        }
        return true;
      },
      "slots to be empty");
  wait_for([this] { return metrics().requests_running == 0; }, "requests to end");
  wait_for([this] { return metrics().connections_open == 0; }, "connections to end");
}

// A round begins with a beat of the front end's heart; the fourth from here on says that three, all
// begun after this, are over.
void Rig::wait_until_settled() {
  const RingView view(rings_.back()->memory.get());
  const auto num_beats = [&] {
    return std::atomic_ref<uint64_t>(view.front_end(0)->heartbeat).load(std::memory_order_relaxed);
  };
  const uint64_t before = num_beats();
  wait_for([&] { return num_beats() >= before + 4; }, "slots to be settled");
}

uint64_t Rig::num_ended() {
  const Metrics& m = metrics();
  return m.requests_stopped.value() + m.requests_at_length.value() + m.requests_aborted.value() +
         m.requests_failed.value();
}

void wait_for(const std::function<bool()>& condition, const char* what) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      fail(__FILE__, __LINE__, std::string("waited 300 s for ") + what);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// ---- client

Socket::Socket(uint16_t port, int receive_buffer_bytes) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
  CHECK(fd_ >= 0);
  if (receive_buffer_bytes > 0) {
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof(int));
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
}

Socket::~Socket() { ::close(fd_); }

void Socket::send(std::string_view bytes) {
  CHECK_EQUAL(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
}

std::string Socket::receive(size_t num_bytes) {
  std::string bytes(num_bytes, '\0');
  size_t size = 0;
  while (size < num_bytes) {
    const ssize_t count = ::recv(fd_, bytes.data() + size, num_bytes - size, 0);
    if (count <= 0) break;
    size += static_cast<size_t>(count);
  }
  bytes.resize(size);
  return bytes;
}

std::string Socket::receive_response() {
  std::string bytes;
  char buffer[16384];
  size_t whole = std::string::npos;  // known once the head of a plain answer is here
  while (!bytes.ends_with("\r\n0\r\n\r\n") && bytes.size() < whole) {
    const ssize_t count = ::recv(fd_, buffer, sizeof(buffer), 0);
    if (count <= 0) break;
    bytes.append(buffer, static_cast<size_t>(count));
    const size_t head_end = bytes.find("\r\n\r\n");
    const size_t length = bytes.find("Content-Length: ");
    if (head_end != std::string::npos && length < head_end) {
      whole = head_end + 4 + std::strtoull(bytes.c_str() + length + 16, nullptr, 10);
    }
  }
  return bytes;
}

void Socket::reset_on_close() {
  const linger hard{1, 0};
  ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
}

std::string post(const std::string& body) {
  return "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
         "Content-Type: application/json\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

std::string completion(const std::string& prompt, uint32_t max_tokens, bool streams) {
  return post("{\"prompt\":\"" + prompt + "\",\"max_tokens\":" + std::to_string(max_tokens) +
              (streams ? ",\"stream\":true}" : "}"));
}

std::string exchange(uint16_t port, const std::string& request) {
  Socket socket(port);
  socket.send(request);
  return socket.receive_response();
}

std::string text_of(const std::string& response) {
  static constexpr std::string_view kKey = "\"text\":\"";
  std::string text;
  for (size_t at = response.find(kKey); at != std::string::npos; at = response.find(kKey, at)) {
    at += kKey.size();
    text.append(response, at, response.find('"', at) - at);
  }
  return text;
}

size_t num_open_files() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

}  // namespace blink::testing
