#include "transport/verbs_bootstrap.h"

#include <algorithm>
#include <cstring>

namespace blink {
namespace {

std::string hex(uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (int i = 15; i >= 0; --i, value >>= 4) text[static_cast<size_t>(i)] = kDigits[value & 15];
  return text;
}

[[noreturn]] void fail(const std::string& peer, const std::string& what) {
  throw RingError("link to " + peer + ": " + what);
}

// The peer's words, safe to print.
std::string message_of(const BootstrapWelcome& welcome) {
  const char* end = std::find(welcome.message, std::end(welcome.message), '\0');
  std::string text(welcome.message, end);
  for (char& byte : text) {
    if (byte < ' ' || byte > '~') byte = '?';
  }
  return text;
}

}  // namespace

const char* refusal_name(Refusal refusal) {
  switch (refusal) {
    case Refusal::none:
      return "none";
    case Refusal::malformed:
      return "malformed";
    case Refusal::abi_version:
      return "abi version";
    case Refusal::bundle:
      return "other bundle";
    case Refusal::slot_range:
      return "slot range";
    case Refusal::device:
      return "device";
    case Refusal::busy:
      return "busy";
  }
  return "unknown";
}

std::string check_prefix(const BootstrapPrefix& prefix, size_t num_bytes) {
  if (prefix.magic != kBootstrapMagic) return "not a blink link (magic " + hex(prefix.magic) + ")";
  if (prefix.version != kBootstrapVersion) {
    return "the peer speaks version " + std::to_string(prefix.version) +
           " of the link's bootstrap, this program " + std::to_string(kBootstrapVersion) +
           "; use the same blink-runtime on both ends";
  }
  if (prefix.num_bytes != num_bytes) {
    return "a message of " + std::to_string(prefix.num_bytes) + " bytes, expected " +
           std::to_string(num_bytes);
  }
  return {};
}

Refusal check_hello(const BootstrapHello& hello, const blink_ring_header& ring, std::string& why) {
  why = check_prefix(hello.prefix, sizeof(hello));
  if (!why.empty()) return Refusal::malformed;
  if (hello.abi_version != ring.abi_version) {
    why = "the ring's abi_version is " + std::to_string(ring.abi_version) +
          ", the front end's is " + std::to_string(hello.abi_version) +
          "; use the same blink-runtime on both ends";
    return Refusal::abi_version;
  }
  if (hello.bundle_id != 0 && ring.bundle_id != 0 && hello.bundle_id != ring.bundle_id) {
    why = "the owner serves bundle " + hex(ring.bundle_id) + ", the front end has bundle " +
          hex(hello.bundle_id) + "; copy the owner's bundle (its weights are not needed)";
    return Refusal::bundle;
  }
  if (hello.front_end_index >= ring.num_front_ends) {
    why = "front end " + std::to_string(hello.front_end_index) + " of " +
          std::to_string(ring.num_front_ends) + ": indices start at 0";
    return Refusal::slot_range;
  }
  return Refusal::none;
}

void fill_welcome(BootstrapWelcome& welcome, const blink_ring_header& ring,
                  uint32_t front_end_index) {
  welcome.prefix = bootstrap_prefix<BootstrapWelcome>();
  welcome.abi_version = ring.abi_version;
  welcome.bundle_id = ring.bundle_id;
  welcome.incarnation = ring.incarnation;
  welcome.ring_bytes = ring.ring_bytes;
  welcome.num_slots = ring.num_slots;
  welcome.num_front_ends = ring.num_front_ends;
  welcome.first_slot = front_end_first_slot(front_end_index, ring.num_slots, ring.num_front_ends);
  welcome.range_slots =
      front_end_first_slot(front_end_index + 1, ring.num_slots, ring.num_front_ends) -
      welcome.first_slot;
}

BootstrapWelcome refusing_welcome(Refusal refusal, std::string_view why) {
  BootstrapWelcome welcome{};
  welcome.prefix = bootstrap_prefix<BootstrapWelcome>();
  welcome.refusal = static_cast<uint32_t>(refusal);
  welcome.abi_version = BLINK_ABI_VERSION;
  why.copy(welcome.message, sizeof(welcome.message) - 1);
  return welcome;
}

void check_welcome(const BootstrapWelcome& welcome, const BootstrapHello& hello,
                   const std::string& peer) {
  if (const std::string why = check_prefix(welcome.prefix, sizeof(welcome)); !why.empty()) {
    fail(peer, why);
  }
  if (welcome.refusal != static_cast<uint32_t>(Refusal::none)) {
    const auto known = welcome.refusal <= static_cast<uint32_t>(Refusal::busy)
                           ? static_cast<Refusal>(welcome.refusal)
                           : Refusal::malformed;
    fail(peer, std::string("refused (") + refusal_name(known) + "): " + message_of(welcome));
  }
  std::string why;
  blink_ring_header ring{};
  ring.abi_version = welcome.abi_version;
  ring.bundle_id = welcome.bundle_id;
  ring.num_front_ends = welcome.num_front_ends;
  if (check_hello(hello, ring, why) != Refusal::none) fail(peer, why);
  const bool is_sane = welcome.num_front_ends <= BLINK_MAX_FRONT_ENDS &&
                       welcome.num_slots >= welcome.num_front_ends &&
                       welcome.num_slots <= (1u << 16) &&
                       welcome.ring_bytes >= sizeof(blink_ring_header) &&
                       welcome.ring_bytes <= (uint64_t{1} << 48) &&
                       welcome.ring_address <= ~uint64_t{0} - welcome.ring_bytes;
  if (!is_sane) fail(peer, "the owner's answer makes no sense");
  BootstrapWelcome expected{};
  ring.num_slots = welcome.num_slots;
  fill_welcome(expected, ring, hello.front_end_index);
  if (welcome.first_slot != expected.first_slot || welcome.range_slots != expected.range_slots) {
    fail(peer, "the owner's slot range is not that of front end " +
                   std::to_string(hello.front_end_index));
  }
}

}  // namespace blink
