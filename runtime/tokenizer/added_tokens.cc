#include "added_tokens.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "unicode.h"

namespace blink {
namespace {

using Bytes = const uint8_t*;

Bytes bytes_of(std::string_view text) { return reinterpret_cast<Bytes>(text.data()); }

bool has_class_before(std::string_view text, size_t at, uint16_t mask) {
  const Bytes begin = bytes_of(text);
  const Bytes p = begin + at;
  return (unicode::classify(unicode::previous(p, begin), p).bits & mask) != 0;
}

bool has_class_at(std::string_view text, size_t at, uint16_t mask) {
  const Bytes begin = bytes_of(text);
  return (unicode::classify(begin + at, begin + text.size()).bits & mask) != 0;
}

bool is_single_word(std::string_view text, size_t begin, size_t end) {
  return (begin == 0 || !has_class_before(text, begin, unicode::kWord)) &&
         (end == text.size() || !has_class_at(text, end, unicode::kWord));
}

size_t strip_left(std::string_view text, size_t at) {
  const Bytes begin = bytes_of(text);
  while (at > 0) {
    const Bytes p = begin + at;
    const Bytes q = unicode::previous(p, begin);
    if ((unicode::classify(q, p).bits & unicode::kStrip) == 0) break;
    at = static_cast<size_t>(q - begin);
  }
  return at;
}

size_t strip_right(std::string_view text, size_t at) {
  const Bytes begin = bytes_of(text);
  const Bytes end = begin + text.size();
  while (at < text.size()) {
    const unicode::Classified c = unicode::classify(begin + at, end);
    if ((c.bits & unicode::kStrip) == 0) break;
    at += c.num_bytes;
  }
  return at;
}

}  // namespace

AddedTokenFinder::AddedTokenFinder(std::vector<Pattern> patterns) : patterns_(std::move(patterns)) {
  std::erase_if(patterns_, [](const Pattern& p) { return p.content.empty(); });
  roots_.fill(kNoId);
  std::vector<uint32_t> order(patterns_.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
    const int difference = patterns_[a].content.compare(patterns_[b].content);
    return difference != 0 ? difference < 0 : a < b;
  });
  const auto same_content = [this](uint32_t a, uint32_t b) {
    return patterns_[a].content == patterns_[b].content;
  };
  order.erase(std::unique(order.begin(), order.end(), same_content), order.end());
  const auto first_byte = [this](uint32_t i) {
    return static_cast<uint8_t>(patterns_[i].content[0]);
  };
  size_t num_first_bytes = 0;
  for (size_t i = 0; i < order.size(); ++num_first_bytes) {
    const uint8_t byte = first_byte(order[i]);
    size_t end = i;
    while (end < order.size() && first_byte(order[end]) == byte) ++end;
    roots_[byte] = build(std::span(order).subspan(i, end - i), 1);
    only_first_byte_ = byte;
    i = end;
  }
  if (num_first_bytes != 1) only_first_byte_ = -1;
}

// Builds the node of the patterns in `order`, which share their first `depth` bytes. The depth of
// the recursion is the length of a content without its forks, so chains are walked in the loop.
uint32_t AddedTokenFinder::build(std::span<const uint32_t> order, size_t depth) {
  const auto root = static_cast<uint32_t>(nodes_.size());
  struct Pending {
    uint32_t node;
    std::span<const uint32_t> order;
    size_t depth;
  };
  nodes_.push_back({0, 0, kNoId});
  std::vector<Pending> pending{{root, order, depth}};
  while (!pending.empty()) {
    Pending job = pending.back();
    pending.pop_back();
    if (patterns_[job.order[0]].content.size() == job.depth) {
      nodes_[job.node].pattern = job.order[0];
      job.order = job.order.subspan(1);
    }
    nodes_[job.node].first_edge = static_cast<uint32_t>(edges_.size());
    for (size_t i = 0; i < job.order.size();) {
      const char byte = patterns_[job.order[i]].content[job.depth];
      size_t end = i;
      while (end < job.order.size() && patterns_[job.order[end]].content[job.depth] == byte) ++end;
      const auto child = static_cast<uint32_t>(nodes_.size());
      nodes_.push_back({0, 0, kNoId});
      edges_.push_back({static_cast<uint8_t>(byte), child});
      ++nodes_[job.node].num_edges;
      pending.push_back({child, job.order.subspan(i, end - i), job.depth + 1});
      i = end;
    }
  }
  return root;
}

AddedTokenFinder::Match AddedTokenFinder::longest_at(std::string_view text, size_t at) const {
  Match match{kNoId, at};
  uint32_t node = roots_[static_cast<uint8_t>(text[at])];
  while (node != kNoId) {
    ++at;
    const Node& here = nodes_[node];
    if (here.pattern != kNoId) match = {here.pattern, at};
    node = kNoId;
    if (at == text.size()) break;
    const auto byte = static_cast<uint8_t>(text[at]);
    for (uint32_t e = here.first_edge; e < here.first_edge + here.num_edges; ++e) {
      if (edges_[e].byte == byte) {
        node = edges_[e].node;
        break;
      }
    }
  }
  return match;
}

// First position from `at` on where a content can start, or the end of the text.
size_t AddedTokenFinder::next_start(std::string_view text, size_t at) const {
  if (only_first_byte_ >= 0) {
    const void* found = at < text.size()
                            ? std::memchr(text.data() + at, only_first_byte_, text.size() - at)
                            : nullptr;
    return found ? static_cast<size_t>(static_cast<const char*>(found) - text.data()) : text.size();
  }
  while (at < text.size() && roots_[static_cast<uint8_t>(text[at])] == kNoId) ++at;
  return at;
}

void AddedTokenFinder::find(std::string_view text, bool parse_special,
                            std::vector<TextSplit>& splits) const {
  splits.clear();
  size_t done = 0;
  for (size_t at = next_start(text, 0); at < text.size();) {
    const Match match = longest_at(text, at);
    if (match.pattern == kNoId) {
      at = next_start(text, at + 1);
      continue;
    }
    const Pattern& pattern = patterns_[match.pattern];
    const bool wanted =
        (parse_special || (pattern.flags & kAddedSpecial) == 0) &&
        ((pattern.flags & kAddedSingleWord) == 0 || is_single_word(text, at, match.end));
    if (wanted) {
      size_t begin = at, end = match.end;
      // The spaces of the last match are not taken twice.
      if ((pattern.flags & kAddedLstrip) != 0) begin = std::max(strip_left(text, at), done);
      if ((pattern.flags & kAddedRstrip) != 0) end = strip_right(text, end);
      if (done < begin) splits.push_back({done, begin, kNoId});
      splits.push_back({begin, end, pattern.id});
      done = end;
    }
    // The search goes on after the content itself, even where rstrip took more.
    at = next_start(text, match.end);
  }
  if (done != text.size()) splits.push_back({done, text.size(), kNoId});
}

}  // namespace blink
