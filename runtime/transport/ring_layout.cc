#include "transport/ring_layout.h"

#include <bit>
#include <limits>
#include <random>

namespace blink {
namespace {

[[noreturn]] void fail(const std::string& what) { throw RingError("ring: " + what); }

void require_range(const char* name, uint64_t value, uint64_t low, uint64_t high) {
  if (value < low || value > high) {
    fail(std::string(name) + " is " + std::to_string(value) + ", must be " + std::to_string(low) +
         ".." + std::to_string(high));
  }
}

void require_equal(const char* name, uint64_t value, uint64_t expected) {
  if (value != expected) {
    fail(std::string(name) + " is " + std::to_string(value) + ", expected " +
         std::to_string(expected));
  }
}

}  // namespace

void check_ring_sizes(const RingSizes& sizes) {
  require_range("num_slots", sizes.num_slots, 1, 1u << 16);
  require_range("num_front_ends", sizes.num_front_ends, 1, BLINK_MAX_FRONT_ENDS);
  require_range("num_front_ends", sizes.num_front_ends, 1, sizes.num_slots);
  require_range("max_prompt_tokens", sizes.max_prompt_tokens, 1, BLINK_MAX_NUM_GENERATED);
  require_range("max_output_tokens", sizes.max_output_tokens, 1, BLINK_MAX_NUM_GENERATED);
  if (sizes.output_record_bytes != 8 && sizes.output_record_bytes != sizeof(blink_output_record)) {
    fail("output_record_bytes is " + std::to_string(sizes.output_record_bytes) + ", must be 8 or " +
         std::to_string(sizeof(blink_output_record)));
  }
  require_range("max_seqlen", sizes.max_seqlen, 2, BLINK_MAX_NUM_GENERATED);
  require_range("max_batch", sizes.max_batch, 1, 1u << 16);
  require_range("vocab_size", sizes.vocab_size, 1, std::numeric_limits<int32_t>::max());
  require_range("page_size_tokens", sizes.page_size_tokens, 1, 1u << 16);
  require_range("num_kv_pages", sizes.num_kv_pages, 1, std::numeric_limits<int32_t>::max());
  require_range("trace_capacity", sizes.trace_capacity, 1, 1u << 24);
  if (!std::has_single_bit(sizes.trace_capacity)) {
    fail("trace_capacity is " + std::to_string(sizes.trace_capacity) + ", must be a power of two");
  }
}

void create_ring(std::span<std::byte> memory, const RingSizes& sizes, uint64_t bundle_id) {
  check_ring_sizes(sizes);
  const RingLayout layout = ring_layout_from_sizes(sizes);
  require_range("memory", memory.size(), layout.ring_bytes, std::numeric_limits<uint64_t>::max());
  auto& header = *reinterpret_cast<blink_ring_header*>(memory.data());
  fill_ring_header(header, sizes);
  header.bundle_id = bundle_id;
  std::random_device random;
  header.incarnation = (static_cast<uint64_t>(random()) << 32 | random()) | 1;  // never 0
  // Release: the sizes are visible to whoever sees the magic. Pairs with the acquire of an attach.
  std::atomic_ref<uint64_t>(header.magic).store(BLINK_MAGIC, std::memory_order_release);
}

void check_ring_header(const blink_ring_header& header, uint64_t available_bytes) {
  if (header.magic != BLINK_MAGIC) fail("no ring here (magic is wrong or not yet written)");
  if (header.abi_version != BLINK_ABI_VERSION) {
    fail("abi_version is " + std::to_string(header.abi_version) + ", this program speaks " +
         std::to_string(BLINK_ABI_VERSION) + "; use the runtime that came with the bundle");
  }
  require_equal("header_bytes", header.header_bytes, sizeof(blink_ring_header));
  const RingSizes sizes = ring_sizes_from_header(header);
  check_ring_sizes(sizes);
  const RingLayout layout = ring_layout_from_sizes(sizes);
  require_equal("front_end_offset", header.front_end_offset, layout.front_end_offset);
  require_equal("command_offset", header.command_offset, layout.command_offset);
  require_equal("request_offset", header.request_offset, layout.request_offset);
  require_equal("status_offset", header.status_offset, layout.status_offset);
  require_equal("prompt_offset", header.prompt_offset, layout.prompt_offset);
  require_equal("output_offset", header.output_offset, layout.output_offset);
  require_equal("trace_offset", header.trace_offset, layout.trace_offset);
  require_equal("ring_bytes", header.ring_bytes, layout.ring_bytes);
  require_range("ring_bytes", header.ring_bytes, 0, available_bytes);
}

}  // namespace blink
