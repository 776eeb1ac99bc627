// Ends of runs of characters: ASCII by bit masks of the whole text, all else character by
// character.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "byte_class.h"
#include "unicode.h"

namespace blink::pretokenize {

using unicode::Classified;
using unicode::classify;

using Bytes = const uint8_t*;

inline constexpr uint16_t kNotOther = unicode::kSpace | unicode::kLetter | unicode::kNumber;

inline bool is_newline(uint8_t b) { return b == '\r' || b == '\n'; }

// The text that a pattern cuts. Every position given to a member lies in the text.
class Runs {
 public:
  // `masks` are those of `text`; both must outlive this.
  Runs(std::string_view text, const TextMasks& masks)
      : base_(reinterpret_cast<Bytes>(text.data())), masks_(&masks) {}

  // End of the run of \p{L} at `p`.
  Bytes letters_end(Bytes p, Bytes end) const {
    return end_of<kByteLetter>(p, end,
                               [](uint16_t bits) { return (bits & unicode::kLetter) != 0; });
  }

  // End of the run of [^\s\p{L}\p{N}].
  Bytes others_end(Bytes p, Bytes end) const {
    return end_of<kByteOther>(p, end, [](uint16_t bits) { return (bits & kNotOther) == 0; });
  }

  // End of the run of \s.
  Bytes spaces_end(Bytes p, Bytes end) const {
    return end_of<kByteSpace>(p, end, [](uint16_t bits) { return (bits & unicode::kSpace) != 0; });
  }

  // Just after the last line break in [begin, end), or `begin`; requires begin < end.
  Bytes last_newline_end(Bytes begin, Bytes end) const {
    return base_ + masks_->last_end(kByteNewline, offset(begin), offset(end));
  }

  // End of the run of characters of any of `mask`.
  static Bytes run_end(Bytes p, Bytes end, uint16_t mask) {
    while (p < end) {
      const Classified c = classify(p, end);
      if ((c.bits & mask) == 0) break;
      p += c.num_bytes;
    }
    return p;
  }

  // End of the run of characters of none of `mask`.
  static Bytes run_end_without(Bytes p, Bytes end, uint16_t mask) {
    while (p < end) {
      const Classified c = classify(p, end);
      if ((c.bits & mask) != 0) break;
      p += c.num_bytes;
    }
    return p;
  }

 private:
  size_t offset(Bytes p) const { return static_cast<size_t>(p - base_); }

  template <ByteKind kKind, typename Wanted>
  Bytes end_of(Bytes p, Bytes end, Wanted&& wanted) const {
    while (p < end) {
      if (*p < 0x80) {
        p = std::min(end, base_ + masks_->run_end(kKind, offset(p)));
        if (p == end || *p < 0x80) return p;
      }
      const Classified c = classify(p, end);
      if (!wanted(c.bits)) return p;
      p += c.num_bytes;
    }
    return p;
  }

  Bytes base_;
  const TextMasks* masks_;
};

}  // namespace blink::pretokenize
