// The front end's end of a verbs link. See DESIGN.md for order, signalling and loss.
#include "transport/verbs_transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "transport/tcp_socket.h"

namespace blink {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMaxInlineBytes = 64;
constexpr int kPollBatch = 16;
constexpr auto kSpin = std::chrono::microseconds(50);

std::span<std::byte> page_aligned(std::unique_ptr<std::byte, void (*)(void*)>& owner,
                                  size_t num_bytes) {
  owner.reset(static_cast<std::byte*>(std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096)));
  if (owner == nullptr) throw std::bad_alloc();
  std::memset(owner.get(), 0, num_bytes);
  return {owner.get(), num_bytes};
}

// A bounded wait: first spinning, then giving the core away.
class Backoff {
 public:
  explicit Backoff(std::chrono::milliseconds limit)
      : start_(Clock::now()), deadline_(start_ + limit) {}
  // False: the deadline has passed.
  bool pause() {
    const auto now = Clock::now();
    if (now >= deadline_) return false;
    if (now - start_ > std::chrono::milliseconds(1)) {
      std::this_thread::sleep_for(kSpin);
    } else if (now - start_ > kSpin) {
      std::this_thread::yield();
    }
    return true;
  }

 private:
  Clock::time_point start_;
  Clock::time_point deadline_;
};

}  // namespace

VerbsTransport::VerbsTransport(const VerbsConnectConfig& config)
    : config_(config),
      peer_(config.host + ":" + std::to_string(config.port)),
      deadline_(Clock::now() + config.connect_timeout),
      socket_(tcp_connect(config.host, config.port, deadline_)),
      device_(config.device, tcp_local_ipv4(socket_)),
      local_(nullptr, std::free),
      local_mr_(nullptr, device_.library().dereg_mr),
      queue_pair_(device_, config.send_queue_depth, kMaxInlineBytes, 0),
      window_(config.send_queue_depth, config.signal_interval, config.staging_bytes) {
  if (config.read_bytes < 4096 || config.read_bytes % 64 != 0) {
    throw RingError("verbs: read_bytes is " + std::to_string(config.read_bytes) +
                    ", must be 4096 or more and a multiple of 64");
  }
  const auto local = page_aligned(local_, size_t{config.staging_bytes} + config.read_bytes);
  local_mr_ = device_.register_memory(local.data(), local.size(), IBV_ACCESS_LOCAL_WRITE);
  staging_ = local.first(config.staging_bytes);
  landing_ = local.subspan(config.staging_bytes);
  bootstrap();
  check_header();
}

VerbsTransport::~VerbsTransport() { close(); }

void VerbsTransport::bootstrap() {
  BootstrapHello hello{};
  hello.prefix = bootstrap_prefix<BootstrapHello>();
  hello.abi_version = BLINK_ABI_VERSION;
  hello.front_end_index = config_.front_end_index;
  hello.bundle_id = config_.bundle_id;
  hello.client_id = config_.client_id;
  hello.queue_pair = queue_pair_.address();
  tcp_send(socket_, std::as_bytes(std::span(&hello, 1)), deadline_, peer_);
  BootstrapWelcome welcome{};
  tcp_receive(socket_, std::as_writable_bytes(std::span(&welcome, 1)), deadline_, peer_);
  check_welcome(welcome, hello, peer_);
  ring_address_ = welcome.ring_address;
  ring_bytes_ = welcome.ring_bytes;
  rkey_ = welcome.rkey;
  incarnation_ = welcome.incarnation;
  queue_pair_.connect(welcome.queue_pair);
  const BootstrapReady ready{bootstrap_prefix<BootstrapReady>(), config_.client_id};
  tcp_send(socket_, std::as_bytes(std::span(&ready, 1)), deadline_, peer_);
  tcp_watch_peer(socket_);
}

// The first READ over the card: what the bootstrap said must be what lies there.
void VerbsTransport::check_header() {
  blink_ring_header header{};
  if (const Status status = read_object(0, header); status != Status::ok) {
    throw RingError("link to " + peer_ + ": the ring's header cannot be read over " +
                    device_.name() + ": " + problem());
  }
  check_ring_header(header, ring_bytes_);
  if (header.ring_bytes != ring_bytes_ || header.incarnation != incarnation_) {
    throw RingError("link to " + peer_ + ": the ring is not the one that was announced");
  }
}

bool VerbsTransport::fits(uint64_t offset, size_t num_bytes) const {
  return offset <= ring_bytes_ && num_bytes <= ring_bytes_ - offset;
}

Status VerbsTransport::state() const {
  if (is_closed_.load(std::memory_order_relaxed)) return Status::closed;
  return is_lost_.load(std::memory_order_relaxed) ? Status::lost : Status::ok;
}

std::string VerbsTransport::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

// Keeps the first reason: what follows an error is only its echo (flushed work requests).
Status VerbsTransport::lose(const std::string& why) {
  if (problem_.empty()) problem_ = why;
  is_lost_.store(true, std::memory_order_relaxed);
  return state();
}

// Under mutex_. Takes what the card has finished.
Status VerbsTransport::reap() {
  std::array<ibv_wc, kPollBatch> completions;
  const int count = ibv_poll_cq(queue_pair_.cq(), kPollBatch, completions.data());
  if (count < 0) return lose("the completion queue cannot be polled");
  for (int i = 0; i < count; ++i) {
    const ibv_wc& done = completions[static_cast<size_t>(i)];
    if (done.status != IBV_WC_SUCCESS) {
      return lose(std::string("work request ") + std::to_string(done.wr_id) +
                  " failed: " + device_.library().wc_status_str(done.status));
    }
    window_.complete(done.wr_id);
  }
  return state();
}

// Waits, without holding the lock, until the work request `index` and all before it are done.
Status VerbsTransport::wait_for(uint64_t index) {
  Backoff backoff(config_.transfer_timeout);
  for (bool has_time = true;; has_time = backoff.pause()) {
    const std::lock_guard lock(mutex_);
    if (const Status status = reap(); status != Status::ok) return status;
    if (window_.num_completed() >= index) return Status::ok;
    if (has_time) continue;  // or else this was the look after the deadline
    return lose("no completion within " + std::to_string(config_.transfer_timeout.count()) + " ms");
  }
}

// Under `lock`, let go while waiting: the queue takes one more request with `num_bytes` staged.
Status VerbsTransport::wait_for_room(std::unique_lock<std::mutex>& lock, uint32_t num_bytes) {
  if (window_.has_room(num_bytes)) return Status::ok;
  Backoff backoff(config_.transfer_timeout);
  for (bool has_time = true;;) {
    if (const Status status = reap(); status != Status::ok) return status;
    if (window_.has_room(num_bytes)) return Status::ok;
    if (!has_time) {
      return lose("the send queue stays full for " +
                  std::to_string(config_.transfer_timeout.count()) + " ms");
    }
    lock.unlock();
    has_time = backoff.pause();
    lock.lock();
  }
}

Status VerbsTransport::post(Chain& chain) {
  if (chain.count == 0) return Status::ok;
  for (size_t i = 0; i + 1 < chain.count; ++i) chain.requests[i].next = &chain.requests[i + 1];
  chain.requests[chain.count - 1].next = nullptr;
  chain.count = 0;
  ibv_send_wr* refused = nullptr;
  const int error = ibv_post_send(queue_pair_.qp(), chain.requests.data(), &refused);
  if (error != 0) return lose(std::string("a post was refused: ") + std::strerror(error));
  return Status::ok;
}

ibv_send_wr& VerbsTransport::add(Chain& chain, ibv_wr_opcode opcode, uint64_t ring_offset,
                                 const std::byte* local, uint32_t num_bytes,
                                 const SendWindow::Place& place) {
  ibv_sge& piece = chain.pieces[chain.count];
  piece = {reinterpret_cast<uint64_t>(local), num_bytes, local_mr_->lkey};
  ibv_send_wr& request = chain.requests[chain.count++];
  request = {};
  request.wr_id = place.index;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = opcode;
  if (place.is_signalled) request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = ring_address_ + ring_offset;
  request.wr.rdma.rkey = rkey_;
  return request;
}

// Hot path: no allocation, no log; the lock is held for the posts, not for their completions.
Status VerbsTransport::write(std::span<const WriteRequest> batch) {
  if (const Status status = state(); status != Status::ok) return status;
  for (const WriteRequest& request : batch) {
    if (!fits(request.offset, request.source.size())) return Status::out_of_range;
  }
  Chain chain;
  std::unique_lock lock(mutex_);
  for (const WriteRequest& request : batch) {
    for (size_t done = 0; done < request.source.size();) {
      const auto num_bytes = static_cast<uint32_t>(
          std::min<size_t>(request.source.size() - done, window_.max_request_bytes()));
      const bool is_inline = num_bytes <= queue_pair_.max_inline_bytes();
      const uint32_t num_staged = is_inline ? 0 : num_bytes;
      if (chain.count == Chain::kCapacity || !window_.has_room(num_staged)) {
        // What was built goes first: its completions make room.
        if (const Status status = post(chain); status != Status::ok) return status;
        if (const Status status = wait_for_room(lock, num_staged); status != Status::ok) {
          return status;
        }
      }
      const SendWindow::Place place = window_.take(num_staged, false);
      const std::byte* source = request.source.data() + done;
      if (!is_inline) {
        std::memcpy(staging_.data() + place.staging_offset, source, num_bytes);
        source = staging_.data() + place.staging_offset;
      }
      ibv_send_wr& posted =
          add(chain, IBV_WR_RDMA_WRITE, request.offset + done, source, num_bytes, place);
      if (is_inline) posted.send_flags |= IBV_SEND_INLINE;
      done += num_bytes;
    }
  }
  return post(chain);
}

// Hot path: no allocation, no log. One reader at a time: the landing memory is shared.
Status VerbsTransport::read(std::span<const ReadRequest> batch) {
  if (const Status status = state(); status != Status::ok) return status;
  for (const ReadRequest& request : batch) {
    if (!fits(request.offset, request.target.size())) return Status::out_of_range;
  }
  const std::lock_guard reading(read_mutex_);
  size_t next = 0;
  size_t next_byte = 0;
  while (next < batch.size()) {
    const size_t first = next;
    const size_t first_byte = next_byte;
    uint64_t last_index = 0;
    if (const Status status = post_reads(batch, next, next_byte, last_index);
        status != Status::ok) {
      return status;
    }
    if (last_index == 0) break;  // only empty requests were left
    // The completion orders the card's writes into landing memory before these loads.
    if (const Status status = wait_for(last_index); status != Status::ok) return status;
    copy_out(batch, first, first_byte, next, next_byte);
  }
  return Status::ok;
}

// Posts as many reads from (next, next_byte) on as fit the landing memory.
Status VerbsTransport::post_reads(std::span<const ReadRequest> batch, size_t& next,
                                  size_t& next_byte, uint64_t& last_index) {
  Chain chain;
  size_t landed = 0;
  std::unique_lock lock(mutex_);
  while (next < batch.size()) {
    const ReadRequest& request = batch[next];
    const size_t left = request.target.size() - next_byte;
    const size_t num_bytes = std::min(left, landing_.size() - landed);
    if (left != 0 && num_bytes == 0) break;
    if (left != 0) {
      if (chain.count == Chain::kCapacity || !window_.has_room(0)) {
        if (const Status status = post(chain); status != Status::ok) return status;
        if (const Status status = wait_for_room(lock, 0); status != Status::ok) return status;
      }
      // Every read asks for its completion: what a full queue waits for is then always coming.
      const SendWindow::Place place = window_.take(0, true);
      ibv_send_wr& posted = add(chain, IBV_WR_RDMA_READ, request.offset + next_byte,
                                landing_.data() + landed, static_cast<uint32_t>(num_bytes), place);
      // The fence holds this one, and so those after it, until all before it have landed.
      if (landed != 0 && request.is_ordered) posted.send_flags |= IBV_SEND_FENCE;
      last_index = place.index;
      landed += (num_bytes + 7) / 8 * 8;
      next_byte += num_bytes;
    }
    if (next_byte == request.target.size()) {
      ++next;
      next_byte = 0;
    }
  }
  return post(chain);
}

void VerbsTransport::copy_out(std::span<const ReadRequest> batch, size_t first, size_t first_byte,
                              size_t end, size_t end_byte) {
  size_t landed = 0;
  while (first < end || (first == end && first_byte < end_byte)) {
    const size_t stop = first == end ? end_byte : batch[first].target.size();
    const size_t num_bytes = stop - first_byte;
    if (num_bytes != 0) {
      std::memcpy(batch[first].target.data() + first_byte, landing_.data() + landed, num_bytes);
    }
    landed += (num_bytes + 7) / 8 * 8;
    if (first == end) break;
    ++first;
    first_byte = 0;
  }
}

// A READ behind the writes: its answer says that they are in the ring's memory, not only that a
// card has taken them. Also the moment to see that the owner's process has gone.
Status VerbsTransport::flush() {
  if (const Status status = state(); status != Status::ok) return status;
  if (tcp_is_closed(socket_)) {
    const std::lock_guard lock(mutex_);
    return lose("the owner closed the link");
  }
  uint64_t magic = 0;
  return read_object(offsetof(blink_ring_header, magic), magic);
}

TransportInfo VerbsTransport::info() const {
  return {"verbs", peer_ + " over " + device_.name(), ring_bytes_, incarnation_, problem()};
}

void VerbsTransport::close() { is_closed_.store(true, std::memory_order_relaxed); }

std::unique_ptr<Transport> connect_verbs(const VerbsConnectConfig& config) {
  return std::make_unique<VerbsTransport>(config);
}

bool has_verbs_device(std::string& why) {
  try {
    const VerbsDevice device({}, 0);
    why = device.name();
    return true;
  } catch (const RingError& error) {
    why = error.what();
    return false;
  }
}

}  // namespace blink
