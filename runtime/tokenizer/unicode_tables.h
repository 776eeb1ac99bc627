// Declarations of the generated tables in unicode_tables.cc.
#pragma once

#include <cstdint>

namespace blink::unicode {

inline constexpr uint32_t kBlockSize = 256;
inline constexpr uint32_t kNumBlocks = 0x110000 / kBlockSize;

extern const uint8_t kClassIndex[kNumBlocks];      // block of each group of 256 code points
extern const uint16_t kClassBlocks[];              // CharClass bits, one block after another
extern const uint8_t kCombiningIndex[kNumBlocks];  // same two stages for combining classes
extern const uint8_t kCombiningBlocks[];
extern const uint32_t kDecompositionKeys[];     // ascending code points
extern const uint16_t kDecompositionOffsets[];  // into kDecompositionChars; one more than keys
extern const uint32_t kDecompositionChars[];
extern const uint64_t kCompositionPairs[];  // ascending, first << 32 | second
extern const uint32_t kCompositionResults[];
extern const uint32_t kNumDecompositions;
extern const uint32_t kNumCompositions;

}  // namespace blink::unicode
