#include "nfc.h"

#include <algorithm>

#include "byte_class.h"
#include "unicode.h"

namespace blink {
namespace {

using Bytes = const uint8_t*;

constexpr uint32_t kHangulBase = 0xAC00, kLBase = 0x1100, kVBase = 0x1161, kTBase = 0x11A7;
constexpr uint32_t kLCount = 19, kVCount = 21, kTCount = 28;
constexpr uint32_t kHangulCount = kLCount * kVCount * kTCount;

bool is_unsafe(uint32_t c) { return (unicode::class_of(c) & unicode::kNfcUnsafe) != 0; }

void push_char(uint32_t c, NfcScratch& scratch) {
  const uint64_t ccc = unicode::combining_class_of(c);
  scratch.marks.push_back(ccc << 56 | uint64_t{scratch.marks.size()} << 24 | c);
}

void push_decomposed(uint32_t c, NfcScratch& scratch) {
  if (c - kHangulBase < kHangulCount) {
    const uint32_t s = c - kHangulBase;
    push_char(kLBase + s / (kVCount * kTCount), scratch);
    push_char(kVBase + s / kTCount % kVCount, scratch);
    if (s % kTCount != 0) push_char(kTBase + s % kTCount, scratch);
    return;
  }
  const uint32_t* keys = unicode::kDecompositionKeys;
  const uint32_t* keys_end = keys + unicode::kNumDecompositions;
  const uint32_t* found = std::lower_bound(keys, keys_end, c);
  if (found == keys_end || *found != c) return push_char(c, scratch);
  const auto index = static_cast<size_t>(found - keys);
  for (uint32_t i = unicode::kDecompositionOffsets[index];
       i < unicode::kDecompositionOffsets[index + 1]; ++i) {
    push_char(unicode::kDecompositionChars[i], scratch);
  }
}

// The primary composite of two characters, or 0.
uint32_t composite(uint32_t first, uint32_t second) {
  if (first - kLBase < kLCount && second - kVBase < kVCount) {
    return kHangulBase + ((first - kLBase) * kVCount + (second - kVBase)) * kTCount;
  }
  if (first - kHangulBase < kHangulCount && (first - kHangulBase) % kTCount == 0 &&
      second - kTBase - 1 < kTCount - 1) {
    return first + (second - kTBase);
  }
  const uint64_t pair = uint64_t{first} << 32 | second;
  const uint64_t* pairs = unicode::kCompositionPairs;
  const uint64_t* pairs_end = pairs + unicode::kNumCompositions;
  const uint64_t* found = std::lower_bound(pairs, pairs_end, pair);
  return found != pairs_end && *found == pair ? unicode::kCompositionResults[found - pairs] : 0;
}

// Sorts each run of characters of non-zero class by class; the position keeps equal ones in order.
void reorder(NfcScratch& scratch) {
  auto& marks = scratch.marks;
  for (size_t i = 0; i < marks.size();) {
    if (marks[i] >> 56 == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < marks.size() && marks[end] >> 56 != 0) ++end;
    std::sort(marks.begin() + static_cast<std::ptrdiff_t>(i),
              marks.begin() + static_cast<std::ptrdiff_t>(end));
    i = end;
  }
}

// Canonical composition of scratch.marks into scratch.chars.
void compose(NfcScratch& scratch) {
  constexpr size_t kNone = ~size_t{0};
  auto& chars = scratch.chars;
  chars.clear();
  size_t starter = kNone;
  uint64_t last_class = 0;  // of the last character kept after the starter; 0 if none
  for (const uint64_t mark : scratch.marks) {
    const auto c = static_cast<uint32_t>(mark & 0xFFFFFF);
    const uint64_t ccc = mark >> 56;
    if (starter != kNone) {
      const bool adjacent = chars.size() == starter + 1;
      if (adjacent || (last_class != 0 && last_class < ccc)) {
        if (const uint32_t both = composite(chars[starter], c); both != 0) {
          chars[starter] = both;
          continue;
        }
      }
    }
    if (ccc == 0) starter = chars.size();
    last_class = ccc;
    chars.push_back(c);
  }
}

void append_char(uint32_t c, std::string& out) {
  char bytes[4];
  out.append(bytes, unicode::encode(c, bytes));
}

}  // namespace

size_t nfc_prefix_bytes(std::string_view text) {
  const auto begin = reinterpret_cast<Bytes>(text.data());
  const Bytes end = begin + text.size();
  Bytes p = begin, last = begin;
  while (p < end) {
    if (*p < 0x80) {
      p = begin + ascii_end(text, static_cast<size_t>(p - begin));
      last = p - 1;
      continue;
    }
    // Below U+0300 (0xCC 0x80) nothing changes.
    if (*p < 0xCC) {
      if ((*p & 0xC0) != 0x80) last = p;
      ++p;
      continue;
    }
    const unicode::Decoded d = unicode::decode(p, end);
    if (is_unsafe(d.code_point)) return static_cast<size_t>(last - begin);
    last = p;
    p += d.num_bytes;
  }
  return text.size();
}

void normalize_nfc(std::string_view text, NfcScratch& scratch, std::string& out) {
  out.clear();
  const auto begin = reinterpret_cast<Bytes>(text.data());
  const Bytes end = begin + text.size();
  Bytes p = begin;
  while (p < end) {
    const std::string_view rest(reinterpret_cast<const char*>(p), static_cast<size_t>(end - p));
    const size_t safe = nfc_prefix_bytes(rest);
    out.append(rest.substr(0, safe));
    p += safe;
    if (p == end) break;
    // From the character before the first unsafe one to the next safe one.
    scratch.marks.clear();
    bool first = true;
    while (p < end) {
      const unicode::Decoded d = unicode::decode(p, end);
      if (d.code_point == unicode::kInvalid || (!first && !is_unsafe(d.code_point))) break;
      push_decomposed(d.code_point, scratch);
      p += d.num_bytes;
      first = false;
    }
    if (first) {  // an ill-formed byte
      out.push_back(static_cast<char>(*p++));
      continue;
    }
    reorder(scratch);
    compose(scratch);
    for (const uint32_t c : scratch.chars) append_char(c, out);
  }
}

}  // namespace blink
