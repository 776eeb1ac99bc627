// What a front end and a ring's owner tell each other over TCP before the card takes over.
//
//   front end -> owner   BootstrapHello    who I am, which slot range, where my queue pair is
//   owner -> front end   BootstrapWelcome  yes and where the ring is, or no and why
//   front end -> owner   BootstrapReady    my queue pair is connected
//
// Every message begins with magic, version and size; what does not fit is refused by message.
// Little-endian, as the ring itself.
#ifndef BLINK_TRANSPORT_VERBS_BOOTSTRAP_H
#define BLINK_TRANSPORT_VERBS_BOOTSTRAP_H

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/ring_layout.h"

namespace blink {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kBootstrapMagic = 0x314B4E494C4B4E42u;  // "BNKLINK1", little-endian
constexpr uint32_t kBootstrapVersion = 1;

enum class Refusal : uint32_t {
  none,
  malformed,    // not this protocol, or another version of it
  abi_version,  // the rings' ABIs differ
  bundle,       // the owner serves another bundle
  slot_range,   // no such front end, or its range is taken
  device,       // the queue pairs do not fit each other
  busy,         // too many connections at once
};

const char* refusal_name(Refusal refusal);

struct BootstrapPrefix {
  uint64_t magic;
  uint32_t version;
  uint32_t num_bytes;  // of the whole message
};
static_assert(sizeof(BootstrapPrefix) == 16);

// Where a queue pair is.
struct QueuePairAddress {
  uint8_t gid[16];
  uint32_t qp_num;
  uint32_t packet_number;  // of its first packet
  uint16_t lid;            // InfiniBand; 0 on Ethernet
  uint8_t mtu;             // enum ibv_mtu
  uint8_t link_layer;      // IBV_LINK_LAYER_*
  uint8_t max_reads;       // READs it answers at once
  uint8_t reserved[3];
};
static_assert(sizeof(QueuePairAddress) == 32);

struct BootstrapHello {
  BootstrapPrefix prefix;
  uint32_t abi_version;
  uint32_t front_end_index;
  uint64_t bundle_id;  // 0: anything
  uint64_t client_id;
  QueuePairAddress queue_pair;
  uint64_t reserved[4];
};
static_assert(sizeof(BootstrapHello) == 104);

struct BootstrapWelcome {
  BootstrapPrefix prefix;
  uint32_t refusal;  // Refusal; not none: only `message` below counts
  uint32_t abi_version;
  uint64_t bundle_id;
  uint64_t incarnation;   // of the ring: another one after its owner restarted
  uint64_t ring_address;  // as work requests name it
  uint64_t ring_bytes;
  uint32_t rkey;
  uint32_t num_slots;
  uint32_t num_front_ends;
  uint32_t first_slot;  // of this front end's range
  uint32_t range_slots;
  uint32_t reserved0;
  QueuePairAddress queue_pair;
  char message[192];  // ends with 0
  uint64_t reserved[4];
};
static_assert(sizeof(BootstrapWelcome) == 336);

struct BootstrapReady {
  BootstrapPrefix prefix;
  uint64_t client_id;
};
static_assert(sizeof(BootstrapReady) == 24);

template <typename Message>
BootstrapPrefix bootstrap_prefix() {
  return {kBootstrapMagic, kBootstrapVersion, sizeof(Message)};
}

// Empty: it is a message of this protocol, version and size; else what is wrong.
std::string check_prefix(const BootstrapPrefix& prefix, size_t num_bytes);

// The owner's decision over a hello, slot ranges in use apart.
Refusal check_hello(const BootstrapHello& hello, const blink_ring_header& ring, std::string& why);

// Throws RingError: the welcome is a refusal, or contradicts itself or what was asked for. Trusts
// nothing in it.
void check_welcome(const BootstrapWelcome& welcome, const BootstrapHello& hello,
                   const std::string& peer);

// The slots of a front end's range, from the ring's sizes.
void fill_welcome(BootstrapWelcome& welcome, const blink_ring_header& ring,
                  uint32_t front_end_index);
BootstrapWelcome refusing_welcome(Refusal refusal, std::string_view why);

}  // namespace blink

#endif  // BLINK_TRANSPORT_VERBS_BOOTSTRAP_H
