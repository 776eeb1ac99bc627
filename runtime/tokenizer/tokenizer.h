// The tokenizer of a bundle: text to token ids and back, equal to Hugging Face `tokenizers`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace blink {

// A compiled tokenizer that cannot be used: truncated, altered, or of another version.
class TokenizerError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct EncodeOptions {
  // Puts the post-processor's ids (BOS, EOS) around the text. Off for rendered chat templates,
  // which spell theirs out.
  bool add_special_tokens = true;
  // Recognizes special tokens inside the text. Off for text of a user that must not be able to
  // write them; added tokens that are not special are found either way, as `encode_special_tokens`
  // does.
  bool parse_special = true;
};

struct TokenizerData;

// Immutable once loaded: every const member may be called from any number of threads.
class Tokenizer {
 public:
  // Loads the bytes that `blinkc.bundle.compile_tokenizer` wrote; they need not outlive the call.
  // Throws TokenizerError and trusts nothing in them.
  static Tokenizer load(std::span<const std::byte> compiled);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Appends the ids of `text` to `out`, so that a caller can keep one vector for all requests.
  // Does not allocate once `out` and this thread's scratch memory have grown to their size.
  void encode(std::string_view text, EncodeOptions options, std::vector<uint32_t>& out) const;

  // Appends the ids of text without BOS or EOS, as for a rendered chat template.
  void encode(std::string_view text, bool parse_special, std::vector<uint32_t>& out) const {
    encode(text, {.add_special_tokens = false, .parse_special = parse_special}, out);
  }

  // The text of a whole sequence, well-formed UTF-8; ids outside the vocabulary give nothing.
  std::string decode(std::span<const uint32_t> ids, bool skip_special_tokens) const;

  // Appends the bytes that `id` adds to the output, special or not; nothing outside the vocabulary.
  void append_token_bytes(uint32_t id, std::string& out) const;

  // The id of an added token by its content, else of the vocabulary entry with these bytes.
  std::optional<uint32_t> id_of(std::string_view token) const;

  // One more than the greatest id.
  uint32_t num_ids() const;
  bool is_special(uint32_t id) const;

  const TokenizerData& data() const { return *data_; }

 private:
  explicit Tokenizer(std::unique_ptr<const TokenizerData> data);

  std::unique_ptr<const TokenizerData> data_;
};

// Turns one request's ids into text as they come. The pieces put together equal Tokenizer::decode
// of all ids; each piece is well-formed UTF-8 of its own. Constant time and memory per byte of
// text.
class Detokenizer {
 public:
  // `tokenizer` must outlive the detokenizer.
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens = true)
      : tokenizer_(&tokenizer), skip_special_tokens_(skip_special_tokens) {}

  // Appends the text that `id` completes; bytes of a code point that is not whole are held back.
  void append(uint32_t id, std::string& out);

  // Appends what is held back at the end of the output, as U+FFFD, and starts anew.
  void flush(std::string& out);

 private:
  void append_bytes(std::string_view bytes, std::string& out);
  void replace_held(std::string& out);
  bool strip_leading_space(std::string_view& text);

  const Tokenizer* tokenizer_;
  bool skip_special_tokens_;
  bool at_start_ = true;  // nothing has been given out yet
  uint8_t num_held_ = 0;  // bytes of held_ in use
  uint8_t held_[4] = {};  // the well-formed beginning of one code point
};

}  // namespace blink
