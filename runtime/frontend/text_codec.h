// Text <-> token ids, as the front end sees it: the built-in tokenizer, or a slower one behind
// callbacks.
#ifndef BLINK_FRONTEND_TEXT_CODEC_H
#define BLINK_FRONTEND_TEXT_CODEC_H

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace blink {

// Turns one request's output ids into text, in order.
class TextDecoder {
 public:
  virtual ~TextDecoder() = default;
  // Appends the text that token completes: whole code points only. May append nothing.
  virtual void append(uint32_t token_id, std::string& text) = 0;
  // Appends what was held back; an incomplete code point becomes U+FFFD.
  virtual void flush(std::string& text) = 0;
};

class TextCodec {
 public:
  virtual ~TextCodec() = default;
  // Thread-safe. adds_special_tokens: with the tokenizer's BOS, EOS or prefix around the text. The
  // text's own special tokens are recognized either way.
  virtual void encode(std::string_view text, bool adds_special_tokens,
                      std::vector<uint32_t>& token_ids) const = 0;
  // Appends what one token is by itself, perhaps a part of a code point; special tokens too. For
  // logprobs. Thread-safe.
  virtual void append_token_bytes(uint32_t token_id, std::string& bytes) const = 0;
  virtual std::unique_ptr<TextDecoder> make_decoder(bool skips_special_tokens) const = 0;
  // True: encode neither blocks nor takes a lock, so it may run on the network thread.
  virtual bool encodes_inline() const = 0;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_TEXT_CODEC_H
