// A ring behind a modelled card, and its owner.
#ifndef BLINK_TESTS_VERBS_HOST_H
#define BLINK_TESTS_VERBS_HOST_H

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>

#include "check.h"
#include "fake_verbs.h"
#include "transport/verbs.h"

namespace blink {

inline RingSizes small_sizes() {
  RingSizes sizes;
  sizes.num_slots = 16;
  sizes.num_front_ends = 2;
  sizes.max_prompt_tokens = 4096;
  sizes.max_output_tokens = 64;
  sizes.max_seqlen = 8192;
  sizes.max_batch = 4;
  sizes.vocab_size = 100;
  sizes.num_kv_pages = 8;
  return sizes;
}

// A ring in this process's memory and its owner.
class Host {
 public:
  explicit Host(uint64_t bundle_id = 5, uint16_t port = 0,
                std::chrono::milliseconds bootstrap_timeout = std::chrono::seconds(30))
      : num_bytes_(ring_layout_from_sizes(small_sizes()).ring_bytes),
        memory_(static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes_)), std::free) {
    std::memset(memory_.get(), 0, num_bytes_);
    create_ring({memory_.get(), num_bytes_}, small_sizes(), bundle_id);
    VerbsRingMemory ring{.address = memory_.get(), .num_bytes = num_bytes_};
    std::memcpy(&ring.header, memory_.get(), sizeof(ring.header));
    VerbsOwnerConfig config{.host = "127.0.0.1", .port = port};
    config.device.library = &fake_verbs();
    config.bootstrap_timeout = bootstrap_timeout;
    owner_ = serve_verbs(ring, config);
  }

  std::byte* bytes() const { return memory_.get(); }
  uint64_t num_bytes() const { return num_bytes_; }
  VerbsOwner& owner() const { return *owner_; }
  uint16_t port() const { return owner_->port(); }

  VerbsConnectConfig config() const {
    VerbsConnectConfig config{.host = "127.0.0.1", .port = port()};
    config.device.library = &fake_verbs();
    config.bundle_id = 5;
    config.client_id = 11;
    config.connect_timeout = config.transfer_timeout = std::chrono::seconds(30);
    return config;
  }

 private:
  uint64_t num_bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  std::unique_ptr<VerbsOwner> owner_;
};

// Each test ends with nothing of the card left: the bug it guards is a leak on some path.
inline void on_fresh_card(const std::function<void()>& test) {
  fake_card().reset();
  test();
  CHECK_EQUAL(fake_card().num_live(), 0);
  CHECK_EQUAL(fake_card().all_access & IBV_ACCESS_RELAXED_ORDERING, 0);
}

}  // namespace blink

#endif  // BLINK_TESTS_VERBS_HOST_H
