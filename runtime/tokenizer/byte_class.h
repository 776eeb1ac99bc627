// Which bytes of a text are ASCII letters, line breaks, white space or other signs, as bit masks.
//
// One pass over the text with AVX2 or NEON, or with the scalar twin, makes four bits per byte; the
// scanners then find the end of a run with a count of trailing zeros, not byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace blink {

inline constexpr size_t kBlockBytes = 64;

enum ByteKind : uint32_t {
  kByteLetter = 0,   // A-Z a-z
  kByteNewline = 1,  // 0x0A and 0x0D
  kByteSpace = 2,    // 0x09-0x0D and 0x20, so newlines too
  kByteOther = 3,    // any other below 0x80 that is not 0-9
};
inline constexpr uint32_t kNumByteKinds = 4;

// Bit i of a mask says whether byte i of the block is of the kind; no bit is set from 0x80 on.
struct BlockMasks {
  uint64_t of[kNumByteKinds];
};

using ClassifyBlocks = void (*)(const uint8_t* text, size_t num_blocks, BlockMasks* masks);

// Each classifies whole blocks of 64 bytes.
void classify_blocks_scalar(const uint8_t* text, size_t num_blocks, BlockMasks* masks);
// The quickest one that this machine runs, and its name.
ClassifyBlocks best_classify_blocks();
const char* best_classify_name();

// The masks of a text; the bytes after its end count as no kind.
class TextMasks {
 public:
  void assign(std::string_view text);

  // Index of the first byte from `at` on that is not of the kind; `at` is at most the text's size.
  size_t run_end(ByteKind kind, size_t at) const {
    size_t block = at / kBlockBytes;
    uint64_t rest = ~blocks_[block].of[kind] >> (at % kBlockBytes);
    if (rest != 0) return at + static_cast<size_t>(__builtin_ctzll(rest));
    do {
      rest = ~blocks_[++block].of[kind];
    } while (rest == 0);
    return block * kBlockBytes + static_cast<size_t>(__builtin_ctzll(rest));
  }

  // One past the last byte of the kind in [begin, end), or `begin`; requires begin < end.
  size_t last_end(ByteKind kind, size_t begin, size_t end) const {
    for (size_t block = (end - 1) / kBlockBytes;; --block) {
      const size_t start = block * kBlockBytes;
      uint64_t bits = blocks_[block].of[kind];
      if (end - start < kBlockBytes) bits &= (uint64_t{1} << (end - start)) - 1;
      if (bits != 0) {
        const size_t last = start + 63 - static_cast<size_t>(__builtin_clzll(bits));
        return last >= begin ? last + 1 : begin;
      }
      if (start <= begin) return begin;
      end = start;
    }
  }

 private:
  // One block more than the text fills, all zero, ends every run.
  std::vector<BlockMasks> blocks_;
};

// Index of the first byte of at least 0x80 from `at` on, or the size.
size_t ascii_end(std::string_view text, size_t at);

}  // namespace blink
