// The C++ view of abi.h: layout of a ring from its sizes, packed status and command words, the
// payload checksum. Host and device code share it, so the core needs no standard library.
#ifndef BLINK_ABI_HPP
#define BLINK_ABI_HPP

#include <stddef.h>
#include <stdint.h>

#include "blink/abi.h"

#if defined(__CUDACC__)
#define BLINK_HOST_DEVICE __host__ __device__
#else
#define BLINK_HOST_DEVICE
#endif

namespace blink {

// ---- words
// -----------------------------------------------------------------------------------------

struct StatusWord {
  uint32_t sequence;
  uint32_t state;          // BLINK_STATE_*
  uint32_t num_generated;  // tokens, at most BLINK_MAX_NUM_GENERATED
};

BLINK_HOST_DEVICE constexpr uint64_t pack_status(uint32_t sequence, uint32_t state,
                                                 uint32_t num_generated) {
  return (static_cast<uint64_t>(sequence) << 32) | (static_cast<uint64_t>(state & 0xFFu) << 24) |
         (num_generated & BLINK_MAX_NUM_GENERATED);
}

BLINK_HOST_DEVICE constexpr StatusWord unpack_status(uint64_t word) {
  return StatusWord{static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word >> 24) & 0xFFu,
                    static_cast<uint32_t>(word) & BLINK_MAX_NUM_GENERATED};
}

struct CommandWord {
  uint32_t sequence;
  uint32_t command;  // BLINK_COMMAND_*
};

BLINK_HOST_DEVICE constexpr uint64_t pack_command(uint32_t sequence, uint32_t command) {
  return (static_cast<uint64_t>(sequence) << 32) | command;
}

BLINK_HOST_DEVICE constexpr CommandWord unpack_command(uint64_t word) {
  return CommandWord{static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
}

BLINK_HOST_DEVICE constexpr bool is_final_state(uint32_t state) {
  return state == BLINK_STATE_DECODE_COMPLETED || state == BLINK_STATE_FAILED;
}

// ---- checksum
// --------------------------------------------------------------------------------------

// splitmix64's finalizer (Steele, Lea, Flood 2014).
BLINK_HOST_DEVICE constexpr uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

// Word `index` of the payload adds this to the checksum: a sum, so that threads may share the work.
BLINK_HOST_DEVICE constexpr uint64_t checksum_term(uint32_t index, uint32_t word) {
  return mix64((static_cast<uint64_t>(index) << 32) | word);
}

inline constexpr uint32_t kChecksumSkipWords = 2;  // `checksum` itself
inline constexpr uint32_t kChecksumRequestWords =
    sizeof(blink_slot_request) / 4 - kChecksumSkipWords;  // prompt ids have indices from here on

// Terms first, first + stride, ... of the checksum over `request` (from `sequence` on) and its
// prompt.
BLINK_HOST_DEVICE inline uint64_t partial_checksum(const blink_slot_request* request,
                                                   const uint32_t* prompt,
                                                   uint32_t num_prompt_tokens, uint32_t first,
                                                   uint32_t stride) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(request) + kChecksumSkipWords;
  const uint32_t num_words = kChecksumRequestWords + num_prompt_tokens;
  uint64_t sum = 0;
  for (uint32_t i = first; i < num_words; i += stride) {
    sum +=
        checksum_term(i, i < kChecksumRequestWords ? words[i] : prompt[i - kChecksumRequestWords]);
  }
  return sum;
}

BLINK_HOST_DEVICE inline uint64_t request_checksum(const blink_slot_request* request,
                                                   const uint32_t* prompt,
                                                   uint32_t num_prompt_tokens) {
  return partial_checksum(request, prompt, num_prompt_tokens, 0, 1);
}

// ---- layout
// ----------------------------------------------------------------------------------------

// What the maker of a ring chooses; everything else follows.
struct RingSizes {
  uint32_t num_slots = 0;
  uint32_t num_front_ends = 1;
  uint32_t max_prompt_tokens = 0;
  uint32_t max_output_tokens = 0;
  uint32_t output_record_bytes = 8;
  uint32_t max_seqlen = 0;
  uint32_t max_batch = 0;
  uint32_t vocab_size = 0;
  uint32_t page_size_tokens = 16;
  uint32_t num_kv_pages = 0;  // usable pages, the sink page not counted
  uint32_t trace_capacity = 4096;
  uint32_t sampler_features = 0;  // BLINK_SAMPLER_*
};

// Offsets in bytes from the ring's start.
struct RingLayout {
  uint64_t front_end_offset;
  uint64_t command_offset;
  uint64_t request_offset;
  uint64_t status_offset;
  uint64_t prompt_offset;
  uint64_t output_offset;
  uint64_t trace_offset;
  uint64_t ring_bytes;
};

inline constexpr uint64_t kRingLineBytes = 64;    // tables start on a cache line
inline constexpr uint64_t kRingPageBytes = 4096;  // status, prompt and output start on a page

BLINK_HOST_DEVICE constexpr uint64_t align_up(uint64_t bytes, uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

BLINK_HOST_DEVICE constexpr RingLayout ring_layout_from_sizes(const RingSizes& sizes) {
  const uint64_t slots = sizes.num_slots;
  RingLayout layout{};
  layout.front_end_offset = align_up(sizeof(blink_ring_header), kRingLineBytes);
  layout.command_offset = align_up(
      layout.front_end_offset + sizes.num_front_ends * sizeof(blink_front_end), kRingLineBytes);
  layout.request_offset =
      align_up(layout.command_offset + slots * sizeof(blink_slot_command), kRingLineBytes);
  layout.status_offset =
      align_up(layout.request_offset + slots * sizeof(blink_slot_request), kRingPageBytes);
  layout.prompt_offset =
      align_up(layout.status_offset + slots * sizeof(blink_slot_status), kRingPageBytes);
  layout.output_offset = align_up(
      layout.prompt_offset + slots * sizes.max_prompt_tokens * sizeof(uint32_t), kRingPageBytes);
  layout.trace_offset =
      align_up(layout.output_offset + slots * sizes.max_output_tokens * sizes.output_record_bytes,
               kRingPageBytes);
  layout.ring_bytes = align_up(
      layout.trace_offset + sizes.trace_capacity * sizeof(blink_trace_record), kRingPageBytes);
  return layout;
}

BLINK_HOST_DEVICE constexpr RingSizes ring_sizes_from_header(const blink_ring_header& header) {
  RingSizes sizes{};
  sizes.num_slots = header.num_slots;
  sizes.num_front_ends = header.num_front_ends;
  sizes.max_prompt_tokens = header.max_prompt_tokens;
  sizes.max_output_tokens = header.max_output_tokens;
  sizes.output_record_bytes = header.output_record_bytes;
  sizes.max_seqlen = header.max_seqlen;
  sizes.max_batch = header.max_batch;
  sizes.vocab_size = header.vocab_size;
  sizes.page_size_tokens = header.page_size_tokens;
  sizes.num_kv_pages = header.num_kv_pages;
  sizes.trace_capacity = header.trace_capacity;
  sizes.sampler_features = header.sampler_features;
  return sizes;
}

// Fills a zeroed header but for the magic, which its owner stores last (release).
BLINK_HOST_DEVICE constexpr void fill_ring_header(blink_ring_header& header,
                                                  const RingSizes& sizes) {
  const RingLayout layout = ring_layout_from_sizes(sizes);
  header.abi_version = BLINK_ABI_VERSION;
  header.header_bytes = sizeof(blink_ring_header);
  header.ring_bytes = layout.ring_bytes;
  header.num_slots = sizes.num_slots;
  header.num_front_ends = sizes.num_front_ends;
  header.max_prompt_tokens = sizes.max_prompt_tokens;
  header.max_output_tokens = sizes.max_output_tokens;
  header.output_record_bytes = sizes.output_record_bytes;
  header.max_seqlen = sizes.max_seqlen;
  header.max_batch = sizes.max_batch;
  header.vocab_size = sizes.vocab_size;
  header.page_size_tokens = sizes.page_size_tokens;
  header.num_kv_pages = sizes.num_kv_pages;
  header.front_end_offset = layout.front_end_offset;
  header.command_offset = layout.command_offset;
  header.request_offset = layout.request_offset;
  header.status_offset = layout.status_offset;
  header.prompt_offset = layout.prompt_offset;
  header.output_offset = layout.output_offset;
  header.trace_offset = layout.trace_offset;
  header.trace_capacity = sizes.trace_capacity;
  header.sampler_features = sizes.sampler_features;
}

// Front end f owns slots [front_end_first_slot(f, ...), front_end_first_slot(f + 1, ...)).
BLINK_HOST_DEVICE constexpr uint32_t front_end_first_slot(uint32_t front_end, uint32_t num_slots,
                                                          uint32_t num_front_ends) {
  return static_cast<uint32_t>(static_cast<uint64_t>(front_end) * num_slots / num_front_ends);
}

// ---- what every compiler must agree on
// ---------------------------------------------------------------

static_assert(sizeof(blink_counters) == 192, "blink_counters");
static_assert(sizeof(blink_ring_header) == 640, "blink_ring_header");
static_assert(sizeof(blink_front_end) == 64, "blink_front_end");
static_assert(sizeof(blink_slot_command) == 16, "blink_slot_command");
static_assert(sizeof(blink_slot_status) == 16, "blink_slot_status");
static_assert(sizeof(blink_slot_request) == 512, "blink_slot_request");
static_assert(sizeof(blink_output_record) == 64, "blink_output_record");
static_assert(sizeof(blink_trace_record) == 64, "blink_trace_record");

#if !defined(__CUDACC_RTC__)  // NVRTC 13.0 has no offsetof in constant expressions
static_assert(offsetof(blink_ring_header, front_end_offset) == 64, "front_end_offset");
static_assert(offsetof(blink_ring_header, stop) == 256, "stop");
static_assert(offsetof(blink_ring_header, heartbeat) == 320, "heartbeat");
static_assert(offsetof(blink_ring_header, counters) == 384, "counters");
static_assert(offsetof(blink_slot_request, stop_token_ids) == 88, "stop_token_ids");
static_assert(offsetof(blink_slot_request, logit_bias_ids) == 152, "logit_bias_ids");
static_assert(offsetof(blink_slot_request, sequence) == kChecksumSkipWords * 4, "sequence");
#endif

}  // namespace blink

#endif  // BLINK_ABI_HPP
