// Unit tests of the tokenizer's parts, run under sanitizers. Exit status 0 when all hold.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory_resource>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bpe.h"
#include "byte_class.h"
#include "huge_pages.h"
#include "mini_blob.h"
#include "tokenizer.h"

// Counts allocations of this thread, for the promise that encoding makes none.
static thread_local uint64_t num_allocations = 0;

void* operator new(size_t size) {
  ++num_allocations;
  void* p = std::malloc(size == 0 ? 1 : size);
  if (p == nullptr) std::abort();
  return p;
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace blink::test {
namespace {

int num_failures = 0;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++num_failures;                                                      \
    }                                                                      \
  } while (false)

using Ids = std::vector<uint32_t>;

Ids encode(const Tokenizer& tokenizer, std::string_view text, EncodeOptions options = {}) {
  Ids ids;
  tokenizer.encode(text, options, ids);
  return ids;
}

std::string random_bytes(std::mt19937& random, size_t size) {
  static constexpr std::string_view kCommon =
      " \n\r\tthea'sA1.<|bos|>\xD0\xB0\xF0\x9F\x98\x80\xCC\x81";
  std::string text(size, 0);
  for (char& c : text) {
    c = random() % 4 == 0 ? static_cast<char>(random()) : kCommon[random() % kCommon.size()];
  }
  return text;
}

// The vector classifiers must equal the scalar one, at every length around a block.
void test_byte_classes() {
  std::mt19937 random(1);
  for (size_t size = 0; size <= 200; ++size) {
    const std::string text = random_bytes(random, size + kBlockBytes * 2);
    const auto bytes = reinterpret_cast<const uint8_t*>(text.data()) + random() % 8;
    const size_t num_blocks = (text.size() - 8) / kBlockBytes;
    std::vector<BlockMasks> best(num_blocks), scalar(num_blocks);
    best_classify_blocks()(bytes, num_blocks, best.data());
    classify_blocks_scalar(bytes, num_blocks, scalar.data());
    for (size_t i = 0; i < num_blocks; ++i) {
      for (uint32_t kind = 0; kind < kNumByteKinds; ++kind) {
        CHECK(best[i].of[kind] == scalar[i].of[kind]);
      }
    }
  }
}

void test_runs() {
  std::mt19937 random(2);
  TextMasks masks;
  for (int round = 0; round < 500; ++round) {
    const std::string text = random_bytes(random, random() % 200);
    masks.assign(text);
    const auto is_space = [&](size_t i) {
      return text[i] == ' ' || (text[i] >= 9 && text[i] <= 13);
    };
    for (size_t at = 0; at <= text.size(); ++at) {
      size_t end = at;
      while (end < text.size() && is_space(end)) ++end;
      CHECK(masks.run_end(kByteSpace, at) == end);
      for (size_t stop : {at + 1, at + 63, at + 64, text.size()}) {
        if (stop <= at || stop > text.size()) continue;
        size_t last = stop;
        while (last > at && text[last - 1] != '\n' && text[last - 1] != '\r') --last;
        CHECK(masks.last_end(kByteNewline, at, stop) == last);
      }
    }
  }
}

// The obvious way: of all neighbours merge the pair of least rank, leftmost, until none is left.
Ids merge_naively(const std::vector<Merge>& merges, Ids symbols) {
  for (;;) {
    size_t best_rank = merges.size(), best_at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank].left == symbols[i] && merges[rank].right == symbols[i + 1]) {
          best_rank = rank;
          best_at = i;
        }
      }
    }
    if (best_rank == merges.size()) return symbols;
    symbols[best_at] = merges[best_rank].merged;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best_at) + 1);
  }
}

void test_merging() {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<Merge> merges;
    const auto num_bases = static_cast<uint32_t>(2 + random() % 3);
    for (uint32_t i = 0; i < 30; ++i) {
      const uint32_t num_ids = num_bases + i;
      const auto left = static_cast<uint32_t>(random() % num_ids);
      const auto right = static_cast<uint32_t>(random() % num_ids);
      const bool known = std::any_of(merges.begin(), merges.end(), [&](const Merge& m) {
        return m.left == left && m.right == right;
      });
      merges.push_back({known ? num_ids : left, known ? num_ids : right, num_ids});
    }
    const MergeTable table(merges, std::pmr::get_default_resource());
    Ids symbols(1 + random() % kMaxShortSymbols);
    for (uint32_t& s : symbols) s = static_cast<uint32_t>(random() % num_bases);
    const Ids expected = merge_naively(merges, symbols);

    MergeScratch scratch;
    scratch.symbols = symbols;
    Ids by_heap;
    merge_long(table, scratch, by_heap);
    CHECK(by_heap == expected);

    Ids ranks(symbols.size());
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      ranks[i] = table.rank(symbols[i], symbols[i + 1]);
    }
    Ids by_scan = symbols;
    by_scan.resize(merge_short(table, by_scan.data(), ranks.data(), by_scan.size()));
    CHECK(by_scan == expected);
  }
}

// An emoji whose bytes come in two tokens, a truncated one, and ill-formed bytes of every kind.
void test_detokenizer() {
  const Tokenizer tokenizer = Tokenizer::load(MiniBlob().bytes());
  const uint32_t first = *tokenizer.id_of("\xF0\x9F"), second = *tokenizer.id_of("\x98\x80");
  Detokenizer detokenizer(tokenizer);
  std::string text;
  detokenizer.append(first, text);
  CHECK(text.empty());
  detokenizer.append(second, text);
  CHECK(text == "\xF0\x9F\x98\x80");
  detokenizer.append(first, text);
  detokenizer.flush(text);
  CHECK(text == "\xF0\x9F\x98\x80\xEF\xBF\xBD");
  text.clear();
  detokenizer.flush(text);
  CHECK(text.empty());

  const std::string r = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> cases[] = {
      {"\xC3\xA9", "\xC3\xA9"},
      {"\xC3(", r + "("},
      {"\xE2\x82", r},
      {"\xE2\x82\x41", r + "A"},
      {"\xF0\x9F\x98", r},
      {"\xF0\x9F\xF0\x9F\x98\x80", r + "\xF0\x9F\x98\x80"},
      {"\x80\xBF", r + r},
      {"\xC0\x80", r + r},
      {"\xED\xA0\x80", r + r + r},
      {"\xF4\x90\x80\x80", r + r + r + r},
      {"\xE0\x80\x80", r + r + r},
      {"\xFF", r},
  };
  for (const auto& [bytes, expected] : cases) {
    Ids ids;
    for (const char c : bytes) ids.push_back(static_cast<uint8_t>(c));
    CHECK(tokenizer.decode(ids, true) == expected);
  }
  const uint32_t end = *tokenizer.id_of("<|end|>");
  CHECK(tokenizer.decode(Ids{'a', end, 'b', 1u << 30}, true) == "ab");
  CHECK(tokenizer.decode(Ids{'a', end, 'b'}, false) == "a<|end|>b");
}

// Output that never completes a code point, a million times: bounded memory, and done in an
// instant.
void test_degenerate_output() {
  const Tokenizer tokenizer = Tokenizer::load(MiniBlob().bytes());
  Detokenizer detokenizer(tokenizer);
  std::string text;
  for (int i = 0; i < 1'000'000; ++i) {
    detokenizer.append(0xE2, text);
    CHECK(text.size() <= 3);
    text.clear();
  }
}

void test_byte_fallback() {
  MiniOptions gemma = all_kinds().back();
  const Tokenizer tokenizer = Tokenizer::load(MiniBlob(gemma).bytes());
  const EncodeOptions bare{.add_special_tokens = false};
  CHECK(encode(tokenizer, "the the", bare).size() == 2);
  CHECK(encode(tokenizer, "Z", bare) == Ids{'Z'});
  CHECK(encode(tokenizer, "\xE4\xB8\xAD", bare) == (Ids{0xE4, 0xB8, 0xAD}));
  CHECK(tokenizer.decode(encode(tokenizer, "the caf\xC3\xA9 \xE4\xB8\xAD", bare), true) ==
        "the caf\xC3\xA9 \xE4\xB8\xAD");
  const std::string r = "\xEF\xBF\xBD";
  CHECK(tokenizer.decode(Ids{0xE4, 0xB8}, true) == r + r);
  CHECK(tokenizer.decode(Ids{0xC3, 0xA9, 0xFF}, true) == r + r + r);
  Detokenizer detokenizer(tokenizer);
  std::string text;
  for (uint32_t id : {0xE4u, 0xB8u, 0xADu, 0xE4u}) detokenizer.append(id, text);
  CHECK(text == "\xE4\xB8\xAD");
  detokenizer.append(256, text);
  CHECK(text == "\xE4\xB8\xAD" + r + "a");
}

// One space in front is put there by encoding and taken off by decoding, streamed or not.
void test_leading_space() {
  const std::vector<MiniOptions> kinds = all_kinds();
  const Tokenizer tokenizer = Tokenizer::load(MiniBlob(kinds[kinds.size() - 2]).bytes());
  const EncodeOptions bare{.add_special_tokens = false};
  const Ids ids = encode(tokenizer, "the the", bare);
  CHECK(ids.size() == 2 && ids[0] == ids[1]);
  CHECK(tokenizer.decode(ids, true) == "the the");
  Detokenizer detokenizer(tokenizer);
  for (int round = 0; round < 2; ++round) {
    std::string text;
    for (const uint32_t id : ids) detokenizer.append(id, text);
    detokenizer.flush(text);
    CHECK(text == "the the");
  }
  CHECK(encode(tokenizer, "", bare).empty());
}

void test_special_tokens() {
  const Tokenizer tokenizer = Tokenizer::load(MiniBlob().bytes());
  const uint32_t bos = *tokenizer.id_of("<|bos|>"), end = *tokenizer.id_of("<|end|>");
  const uint32_t tool = *tokenizer.id_of("<tool>"), word = *tokenizer.id_of("word");
  const EncodeOptions bare{.add_special_tokens = false};
  const EncodeOptions plain{.add_special_tokens = false, .parse_special = false};
  CHECK(encode(tokenizer, "") == (Ids{bos, end}));
  CHECK(encode(tokenizer, "", bare).empty());
  CHECK(encode(tokenizer, "<|bos|>a", bare) == (Ids{bos, 'a'}));
  CHECK(encode(tokenizer, "<|bos|>", plain).size() == 7);
  CHECK(encode(tokenizer, "<tool>", plain) == Ids{tool});
  CHECK(encode(tokenizer, "a \n<|end|> \tb", bare) == (Ids{'a', end, 'b'}));
  CHECK(encode(tokenizer, " <|end|> <|end|> ", bare) == (Ids{end, end}));
  CHECK(encode(tokenizer, "word", bare) == Ids{word});
  CHECK(encode(tokenizer, "words", bare).size() == 5);
  CHECK(encode(tokenizer, "-word-", bare) == (Ids{'-', word, '-'}));
  CHECK(tokenizer.is_special(bos) && !tokenizer.is_special(tool) && !tokenizer.is_special(1 << 25));
}

void test_no_allocation() {
  for (const MiniOptions& kind : all_kinds()) {
    const Tokenizer tokenizer = Tokenizer::load(MiniBlob(kind).bytes());
    std::mt19937 random(4);
    std::string texts[2];
    for (std::string& text : texts) {
      while (text.size() < 3000)
        text += "the e\xCC\x81 <|end|> aaaaaaa " + random_bytes(random, 30);
      text += std::string(200, 'a');
    }
    Ids ids;
    tokenizer.encode(texts[0] + texts[1], EncodeOptions{}, ids);
    for (const std::string& text : texts) {
      ids.clear();
      const uint64_t before = num_allocations;
      tokenizer.encode(text, EncodeOptions{}, ids);
      CHECK(num_allocations == before);
    }
  }
}

void test_round_trip() {
  std::mt19937 random(5);
  for (const MiniOptions& kind : all_kinds()) {
    const Tokenizer tokenizer = Tokenizer::load(MiniBlob(kind).bytes());
    for (int round = 0; round < 300; ++round) {
      const std::string text = random_bytes(random, random() % 300);
      const Ids ids = encode(tokenizer, text);
      CHECK(std::all_of(ids.begin(), ids.end(),
                        [&](uint32_t id) { return id < tokenizer.num_ids(); }));
      Detokenizer detokenizer(tokenizer);
      std::string streamed;
      for (const uint32_t id : ids) detokenizer.append(id, streamed);
      detokenizer.flush(streamed);
      if (kind.alphabet == AlphabetKind::kBytes) CHECK(streamed == tokenizer.decode(ids, true));
    }
  }
}

// Whatever bytes a blob has, loading refuses it or gives a tokenizer that stays inside its memory.
void test_huge_pages() {
  HugePages& pages = HugePages::instance();
  for (const size_t num_bytes : {size_t{1}, HugePages::kPageBytes, 3 * HugePages::kPageBytes + 1}) {
    auto* const p = static_cast<uint8_t*>(pages.allocate(num_bytes, 64));
    CHECK(reinterpret_cast<uintptr_t>(p) % HugePages::kPageBytes == 0);
    CHECK(p[0] == 0 && p[num_bytes - 1] == 0);
    p[0] = p[num_bytes - 1] = 1;
    // A second one lies elsewhere, though the first was cut out of a larger mapping.
    auto* const other = static_cast<uint8_t*>(pages.allocate(num_bytes, 64));
    std::memset(other, 2, num_bytes);
    CHECK(p[0] == 1 && p[num_bytes - 1] == 1);
    pages.deallocate(other, num_bytes, 64);
    pages.deallocate(p, num_bytes, 64);
  }
  for (const size_t too_many : {SIZE_MAX, SIZE_MAX / 4}) {
    bool is_refused = false;
    try {
      static_cast<void>(pages.allocate(too_many, 64));
    } catch (const std::bad_alloc&) {
      is_refused = true;
    }
    CHECK(is_refused);
  }
}

void test_broken_blobs() {
  const std::vector<std::byte> good = MiniBlob().bytes();
  const auto try_load = [](const std::vector<std::byte>& blob) {
    try {
      const Tokenizer tokenizer = Tokenizer::load(blob);
      encode(tokenizer, "the <|bos|> aaaa \xD0\xB0 1234 word");
      tokenizer.decode(Ids{0, 1, 255, 256, 300, 1u << 31}, true);
      return true;
    } catch (const TokenizerError&) {
      return false;
    }
  };
  CHECK(try_load(good));
  for (size_t size = 0; size < good.size(); size += size < 300 ? 1 : 61) {
    std::vector<std::byte> cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    CHECK(!try_load(cut));
    seal(cut);
    // Less than a line from the end only padding is lost.
    CHECK(!try_load(cut) || good.size() - size < 64);
  }
  std::mt19937 random(6);
  for (size_t at = 0; at < good.size(); at += at < sizeof(BlobHeader) ? 1 : 1 + random() % 16) {
    std::vector<std::byte> flipped = good;
    flipped[at] ^= static_cast<std::byte>(1 << random() % 8);
    const bool inside_checksum = at >= offsetof(BlobHeader, reserved0);
    CHECK(!try_load(flipped) || !inside_checksum);
    flipped[at] = static_cast<std::byte>(random());
    seal(flipped);
    try_load(flipped);
  }
}

void test_threads() {
  const Tokenizer tokenizer =
      Tokenizer::load(MiniBlob({.normalizer = NormalizerKind::kNfc}).bytes());
  std::mt19937 random(7);
  std::vector<std::string> texts;
  std::vector<Ids> expected;
  for (int i = 0; i < 50; ++i) {
    texts.push_back(random_bytes(random, random() % 500));
    expected.push_back(encode(tokenizer, texts.back()));
  }
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < texts.size(); ++i) {
          // Relaxed: joined before it is read.
          if (encode(tokenizer, texts[i]) != expected[i]) {
            num_wrong.fetch_add(1, std::memory_order_relaxed);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_wrong.load(std::memory_order_relaxed) == 0);
}

}  // namespace

int run() {
  test_byte_classes();
  test_runs();
  test_merging();
  test_detokenizer();
  test_degenerate_output();
  test_byte_fallback();
  test_leading_space();
  test_special_tokens();
  test_no_allocation();
  test_round_trip();
  test_huge_pages();
  test_broken_blobs();
  test_threads();
  std::printf("byte classes: %s; %d failures\n", best_classify_name(), num_failures);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace blink::test

int main() { return blink::test::run(); }
