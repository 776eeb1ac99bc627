// Byte-pair merging of one piece of text.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "merge_table.h"

namespace blink {

// Memory of one thread that merging uses; grows to the longest piece seen.
struct MergeScratch {
  std::vector<uint32_t> symbols;
  std::vector<uint32_t> ranks;     // of the merge with the next symbol
  std::vector<uint32_t> next;      // index of the next symbol
  std::vector<uint32_t> previous;  // index of the previous symbol
  std::vector<uint64_t> heap;      // rank << 32 | index, least first
};

// A piece of up to this many symbols is merged in small arrays on the stack: looking at all ranks
// for each merge is quicker there than a heap.
inline constexpr size_t kMaxShortSymbols = 48;

// Merges `num_symbols` symbols in place, always the pair of least rank and of those the leftmost,
// and returns how many are left. `ranks[i]` is the rank of symbols i and i + 1 on entry.
size_t merge_short(const MergeTable& merges, uint32_t* symbols, uint32_t* ranks,
                   size_t num_symbols);

// The same for any length, in O(n log n): merges scratch.symbols and appends what is left to `out`.
void merge_long(const MergeTable& merges, MergeScratch& scratch, std::vector<uint32_t>& out);

}  // namespace blink
