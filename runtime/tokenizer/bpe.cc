#include "bpe.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace blink {

size_t merge_short(const MergeTable& merges, uint32_t* symbols, uint32_t* ranks,
                   size_t num_symbols) {
  size_t n = num_symbols;
  while (n > 1) {
    size_t at = 0;
    uint32_t least = ranks[0];
    for (size_t i = 1; i + 1 < n; ++i) {
      if (ranks[i] < least) {
        least = ranks[i];
        at = i;
      }
    }
    if (least == kNoMerge) break;
    symbols[at] = merges.merged(least);
    // Symbol at + 1 goes, and with it the rank of (at + 1, at + 2); that of (at, at + 1) is new.
    std::memmove(symbols + at + 1, symbols + at + 2, (n - at - 2) * sizeof(uint32_t));
    if (n - at > 3) {
      std::memmove(ranks + at + 1, ranks + at + 2, (n - at - 3) * sizeof(uint32_t));
    }
    --n;
    if (at + 1 < n) ranks[at] = merges.rank(symbols[at], symbols[at + 1]);
    if (at > 0) ranks[at - 1] = merges.rank(symbols[at - 1], symbols[at]);
  }
  return n;
}

void merge_long(const MergeTable& merges, MergeScratch& scratch, std::vector<uint32_t>& out) {
  constexpr uint32_t kNone = 0xFFFFFFFF;
  // Not a structured binding: clang refuses those in lambdas.
  std::vector<uint32_t>& symbols = scratch.symbols;
  std::vector<uint32_t>& ranks = scratch.ranks;
  std::vector<uint32_t>& next = scratch.next;
  std::vector<uint32_t>& previous = scratch.previous;
  std::vector<uint64_t>& heap = scratch.heap;
  const auto n = static_cast<uint32_t>(symbols.size());
  if (n == 0) return;
  ranks.resize(n);
  next.resize(n);
  previous.resize(n);
  heap.clear();
  for (uint32_t i = 0; i < n; ++i) {
    next[i] = i + 1 < n ? i + 1 : kNone;
    previous[i] = i > 0 ? i - 1 : kNone;
    ranks[i] = i + 1 < n ? merges.rank(symbols[i], symbols[i + 1]) : kNoMerge;
    if (ranks[i] != kNoMerge) heap.push_back(uint64_t{ranks[i]} << 32 | i);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto update = [&](uint32_t i) {
    ranks[i] = next[i] != kNone ? merges.rank(symbols[i], symbols[next[i]]) : kNoMerge;
    if (ranks[i] == kNoMerge) return;
    heap.push_back(uint64_t{ranks[i]} << 32 | i);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    const auto at = static_cast<uint32_t>(heap.front());
    const auto rank = static_cast<uint32_t>(heap.front() >> 32);
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    // An entry whose pair is gone or has become another one; a symbol that is gone has no rank.
    if (ranks[at] != rank) continue;
    const uint32_t gone = next[at];
    symbols[at] = merges.merged(rank);
    ranks[gone] = kNoMerge;
    next[at] = next[gone];
    if (next[at] != kNone) previous[next[at]] = at;
    update(at);
    if (previous[at] != kNone) update(previous[at]);
  }
  for (uint32_t i = 0; i != kNone; i = next[i]) out.push_back(symbols[i]);
}

}  // namespace blink
