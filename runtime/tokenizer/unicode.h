// Character classes and UTF-8 decoding, as the split patterns of tokenizers see them.
#pragma once

#include <cstdint>

#include "unicode_tables.h"

namespace blink::unicode {

// Bit order equals the one in generate_unicode_tables.py.
enum CharClass : uint16_t {
  kUpper = 1 << 0,        // Lu, Lt
  kLower = 1 << 1,        // Ll
  kOtherLetter = 1 << 2,  // Lm, Lo
  kMark = 1 << 3,
  kNumber = 1 << 4,
  kPunctuation = 1 << 5,
  kSymbol = 1 << 6,
  kSpace = 1 << 7,       // \s
  kNumeric = 1 << 8,     // what the Digits pre-tokenizer splits off
  kWord = 1 << 9,        // \w next to a single_word added token
  kStrip = 1 << 10,      // white space that lstrip and rstrip swallow
  kNfcUnsafe = 1 << 11,  // may change under NFC, or change what stands before it
  kLetter = kUpper | kLower | kOtherLetter,
};

inline constexpr uint32_t kInvalid = 0xFFFFFFFF;  // an ill-formed byte: no class at all

// Any 32-bit value is allowed.
inline uint16_t class_of(uint32_t code_point) {
  if (code_point >= 0x110000) return 0;
  return kClassBlocks[uint32_t{kClassIndex[code_point / kBlockSize]} * kBlockSize +
                      code_point % kBlockSize];
}

inline uint8_t combining_class_of(uint32_t code_point) {
  if (code_point >= 0x110000) return 0;
  return kCombiningBlocks[uint32_t{kCombiningIndex[code_point / kBlockSize]} * kBlockSize +
                          code_point % kBlockSize];
}

struct Decoded {
  uint32_t code_point;  // kInvalid for an ill-formed byte
  uint32_t num_bytes;   // 1 for an ill-formed byte
};

// Decodes the code point at `p`; requires p < end. Ill-formed input is taken byte by byte, so that
// any bytes can be tokenized.
inline Decoded decode(const uint8_t* p, const uint8_t* end) {
  const uint32_t b0 = p[0];
  if (b0 < 0x80) return {b0, 1};
  const auto left = static_cast<uint64_t>(end - p);
  const auto continuation = [p](uint32_t i) { return (p[i] & 0xC0) == 0x80; };
  if (b0 >= 0xC2 && b0 < 0xE0) {
    if (left >= 2 && continuation(1)) return {(b0 & 0x1F) << 6 | (p[1] & 0x3Fu), 2};
  } else if (b0 >= 0xE0 && b0 < 0xF0) {
    if (left >= 3 && continuation(1) && continuation(2)) {
      const uint32_t c = (b0 & 0x0F) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
      if (c >= 0x800 && (c < 0xD800 || c > 0xDFFF)) return {c, 3};
    }
  } else if (b0 >= 0xF0 && b0 < 0xF5) {
    if (left >= 4 && continuation(1) && continuation(2) && continuation(3)) {
      const uint32_t c =
          (b0 & 0x07) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
      if (c >= 0x10000 && c < 0x110000) return {c, 4};
    }
  }
  return {kInvalid, 1};
}

struct Classified {
  uint16_t bits;       // CharClass bits
  uint16_t num_bytes;  // length of the character
};

// Class and length of the character at `p`; requires p < end.
inline Classified classify(const uint8_t* p, const uint8_t* end) {
  if (*p < 0x80) return {kClassBlocks[kClassIndex[0] * kBlockSize + *p], 1};
  const Decoded decoded = decode(p, end);
  return {class_of(decoded.code_point), static_cast<uint16_t>(decoded.num_bytes)};
}

// Start of the character that ends just before `p`; requires begin < p. Over ill-formed bytes any
// position after `begin` may be returned.
inline const uint8_t* previous(const uint8_t* p, const uint8_t* begin) {
  const uint8_t* q = p - 1;
  while (q > begin && p - q < 4 && (*q & 0xC0) == 0x80) --q;
  return q;
}

// Appends the UTF-8 form of a scalar value at `out` and returns its length.
inline uint32_t encode(uint32_t c, char* out) {
  if (c < 0x80) {
    out[0] = static_cast<char>(c);
    return 1;
  }
  if (c < 0x800) {
    out[0] = static_cast<char>(0xC0 | c >> 6);
    out[1] = static_cast<char>(0x80 | (c & 0x3F));
    return 2;
  }
  if (c < 0x10000) {
    out[0] = static_cast<char>(0xE0 | c >> 12);
    out[1] = static_cast<char>(0x80 | (c >> 6 & 0x3F));
    out[2] = static_cast<char>(0x80 | (c & 0x3F));
    return 3;
  }
  out[0] = static_cast<char>(0xF0 | c >> 18);
  out[1] = static_cast<char>(0x80 | (c >> 12 & 0x3F));
  out[2] = static_cast<char>(0x80 | (c >> 6 & 0x3F));
  out[3] = static_cast<char>(0x80 | (c & 0x3F));
  return 4;
}

}  // namespace blink::unicode
