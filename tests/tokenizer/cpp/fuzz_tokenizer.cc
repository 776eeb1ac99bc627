// Fuzz target: loading, encoding and decoding. The first byte picks what the rest is.
//
// With clang it is a libFuzzer target. Elsewhere BLINK_FUZZ_MAIN makes a program of it that runs
// random inputs: `fuzz_tokenizer SECONDS [SEED]`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "mini_blob.h"
#include "tokenizer.h"
#include "tokenizer_data.h"

namespace blink::test {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

const std::vector<Tokenizer>& tokenizers() {
  static const std::vector<Tokenizer> all = [] {
    std::vector<Tokenizer> made;
    for (const MiniOptions& kind : all_kinds()) {
      made.push_back(Tokenizer::load(MiniBlob(kind).bytes()));
    }
    return made;
  }();
  return all;
}

// Loads a good blob with bytes replaced: pairs of position (3 bytes) and value.
void fuzz_load(const uint8_t* data, size_t size) {
  static const std::vector<std::byte> good = MiniBlob().bytes();
  std::vector<std::byte> blob = good;
  for (size_t i = 0; i + 4 <= size; i += 4) {
    const size_t at = data[i] | size_t{data[i + 1]} << 8 | size_t{data[i + 2]} << 16;
    blob[at % blob.size()] = static_cast<std::byte>(data[i + 3]);
  }
  seal(blob);
  try {
    const Tokenizer tokenizer = Tokenizer::load(blob);
    std::vector<uint32_t> ids;
    tokenizer.encode("the <|bos|> aaaaaaaa\xD0\xB0\xD0\xB0 word 12", EncodeOptions{}, ids);
    tokenizer.decode(ids, false);
  } catch (const TokenizerError&) {
  }
}

void fuzz_encode(const Tokenizer& tokenizer, bool parse_special, std::string_view text) {
  std::vector<uint32_t> ids;
  tokenizer.encode(text, parse_special, ids);
  Detokenizer detokenizer(tokenizer, false);
  std::string streamed;
  for (const uint32_t id : ids) {
    require(id < tokenizer.num_ids(), "an id is in the vocabulary");
    require(parse_special || !tokenizer.is_special(id), "no special id from plain text");
    detokenizer.append(id, streamed);
  }
  detokenizer.flush(streamed);
  if (!tokenizer.data().characters()) {
    require(streamed == tokenizer.decode(ids, false), "streamed text equals decoded text");
  }
}

}  // namespace
}  // namespace blink::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace blink::test;
  if (size == 0) return 0;
  const size_t choice = data[0] & 0x7F;
  const bool parse_special = (data[0] & 0x80) == 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (choice < tokenizers().size()) {
    fuzz_encode(tokenizers()[choice], parse_special, rest);
  } else if (choice % 2 == 0) {
    fuzz_load(data + 1, size - 1);
  } else {
    const std::vector<std::byte> raw(reinterpret_cast<const std::byte*>(data + 1),
                                     reinterpret_cast<const std::byte*>(data + size));
    try {
      blink::Tokenizer::load(raw);
    } catch (const blink::TokenizerError&) {
    }
  }
  return 0;
}

#ifdef BLINK_FUZZ_MAIN
#include <chrono>
#include <random>

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1);
  static constexpr std::string_view kBits[] = {"the",
                                               " ",
                                               "\n",
                                               "\r\n",
                                               "aaaa",
                                               "'s",
                                               "'S",
                                               "12",
                                               "<|bos|>",
                                               "<|end|>",
                                               "word",
                                               "\xD0\xB0",
                                               "\xCC\x81",
                                               "\xC5\xBF",
                                               "\xE4\xB8\xAD",
                                               "\xF0\x9F\x98\x80",
                                               "\xE1\x84\x92\xE1\x85\xA1",
                                               "/",
                                               ".",
                                               "A"};
  const auto start = std::chrono::steady_clock::now();
  uint64_t num_inputs = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
         seconds) {
    std::string input(1, static_cast<char>(random() % 2 ? random() : random() % 16));
    const size_t num_bits = random() % 40;
    for (size_t i = 0; i < num_bits; ++i) {
      if (random() % 3 == 0) {
        input.push_back(static_cast<char>(random()));
      } else {
        input += kBits[random() % std::size(kBits)];
      }
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    ++num_inputs;
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(num_inputs));
  return 0;
}
#endif
