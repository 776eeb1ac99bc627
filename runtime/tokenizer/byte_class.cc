#include "byte_class.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace blink {
namespace {

bool is_letter(uint8_t b) { return static_cast<uint8_t>((b | 0x20) - 'a') < 26; }
bool is_digit(uint8_t b) { return static_cast<uint8_t>(b - '0') < 10; }
bool is_space(uint8_t b) { return b == ' ' || static_cast<uint8_t>(b - 9) < 5; }

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline uint32_t bits_below(__m256i x, uint8_t base, uint8_t count) {
  const __m256i offset = _mm256_sub_epi8(x, _mm256_set1_epi8(static_cast<char>(base)));
  const __m256i limit = _mm256_set1_epi8(static_cast<char>(count - 1));
  const __m256i within = _mm256_cmpeq_epi8(_mm256_min_epu8(offset, limit), offset);
  return static_cast<uint32_t>(_mm256_movemask_epi8(within));
}

__attribute__((target("avx2"))) void classify_blocks_avx2(const uint8_t* text, size_t num_blocks,
                                                          BlockMasks* masks) {
  for (size_t block = 0; block < num_blocks; ++block) {
    uint64_t letter = 0, newline = 0, space = 0, skipped = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      const __m256i x = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(text + block * kBlockBytes + half * 32));
      const __m256i lower = _mm256_or_si256(x, _mm256_set1_epi8(0x20));
      const __m256i blank = _mm256_cmpeq_epi8(x, _mm256_set1_epi8(' '));
      const __m256i breaks = _mm256_or_si256(_mm256_cmpeq_epi8(x, _mm256_set1_epi8('\n')),
                                             _mm256_cmpeq_epi8(x, _mm256_set1_epi8('\r')));
      const uint32_t shift = half * 32;
      letter |= uint64_t{bits_below(lower, 'a', 26)} << shift;
      newline |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(breaks))} << shift;
      space |= uint64_t{bits_below(x, 9, 5) | static_cast<uint32_t>(_mm256_movemask_epi8(blank))}
               << shift;
      skipped |= uint64_t{bits_below(x, '0', 10) | static_cast<uint32_t>(_mm256_movemask_epi8(x))}
                 << shift;
    }
    masks[block] = {{letter, newline, space, ~(letter | space | skipped)}};
  }
}

#elif defined(__aarch64__)

// One bit of each of 64 bytes that are all ones or all zeros.
inline uint64_t movemask(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
  static constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits = vld1q_u8(kBits);
  const uint8x16_t ab = vpaddq_u8(vandq_u8(a, bits), vandq_u8(b, bits));
  const uint8x16_t cd = vpaddq_u8(vandq_u8(c, bits), vandq_u8(d, bits));
  const uint8x16_t abcd = vpaddq_u8(ab, cd);
  return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(abcd, abcd)), 0);
}

inline uint8x16_t within(uint8x16_t x, uint8_t base, uint8_t count) {
  return vcltq_u8(vsubq_u8(x, vdupq_n_u8(base)), vdupq_n_u8(count));
}

void classify_blocks_neon(const uint8_t* text, size_t num_blocks, BlockMasks* masks) {
  for (size_t block = 0; block < num_blocks; ++block) {
    uint8x16_t letter[4], newline[4], space[4], skipped[4];
    for (uint32_t i = 0; i < 4; ++i) {
      const uint8x16_t x = vld1q_u8(text + block * kBlockBytes + i * 16);
      letter[i] = within(vorrq_u8(x, vdupq_n_u8(0x20)), 'a', 26);
      newline[i] = vorrq_u8(vceqq_u8(x, vdupq_n_u8('\n')), vceqq_u8(x, vdupq_n_u8('\r')));
      space[i] = vorrq_u8(within(x, 9, 5), vceqq_u8(x, vdupq_n_u8(' ')));
      skipped[i] = vorrq_u8(within(x, '0', 10), vcgeq_u8(x, vdupq_n_u8(0x80)));
    }
    const uint64_t letters = movemask(letter[0], letter[1], letter[2], letter[3]);
    const uint64_t newlines = movemask(newline[0], newline[1], newline[2], newline[3]);
    const uint64_t spaces = movemask(space[0], space[1], space[2], space[3]);
    const uint64_t skips = movemask(skipped[0], skipped[1], skipped[2], skipped[3]);
    masks[block] = {{letters, newlines, spaces, ~(letters | spaces | skips)}};
  }
}

#endif

struct Choice {
  ClassifyBlocks function;
  const char* name;
};

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // static constructors may run before the compiler's own
  if (__builtin_cpu_supports("avx2")) return {classify_blocks_avx2, "avx2"};
#elif defined(__aarch64__)
  return {classify_blocks_neon, "neon"};
#endif
  return {classify_blocks_scalar, "scalar"};
}

const Choice kChoice = choose();

}  // namespace

void classify_blocks_scalar(const uint8_t* text, size_t num_blocks, BlockMasks* masks) {
  for (size_t block = 0; block < num_blocks; ++block) {
    masks[block] = {};
    for (size_t i = 0; i < kBlockBytes; ++i) {
      const uint8_t b = text[block * kBlockBytes + i];
      const uint64_t bit = uint64_t{1} << i;
      if (is_letter(b)) masks[block].of[kByteLetter] |= bit;
      if (b == '\n' || b == '\r') masks[block].of[kByteNewline] |= bit;
      if (is_space(b)) masks[block].of[kByteSpace] |= bit;
      if (b < 0x80 && !is_letter(b) && !is_space(b) && !is_digit(b)) {
        masks[block].of[kByteOther] |= bit;
      }
    }
  }
}

ClassifyBlocks best_classify_blocks() { return kChoice.function; }
const char* best_classify_name() { return kChoice.name; }

void TextMasks::assign(std::string_view text) {
  const size_t whole = text.size() / kBlockBytes;
  const size_t tail_bytes = text.size() % kBlockBytes;
  const auto bytes = reinterpret_cast<const uint8_t*>(text.data());
  blocks_.resize(whole + 2);
  kChoice.function(bytes, whole, blocks_.data());
  uint8_t tail[kBlockBytes];
  std::memset(tail, 0xFF, sizeof(tail));
  if (tail_bytes != 0) std::memcpy(tail, bytes + whole * kBlockBytes, tail_bytes);
  kChoice.function(tail, 1, blocks_.data() + whole);
  blocks_[whole + 1] = {};
}

size_t ascii_end(std::string_view text, size_t at) {
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (at < text.size() && static_cast<uint8_t>(text[at]) < 0x80) ++at;
  return at;
}

}  // namespace blink
