// The built-in tokenizer as the front end's text codec.
#ifndef BLINK_FRONTEND_TOKENIZER_CODEC_H
#define BLINK_FRONTEND_TOKENIZER_CODEC_H

#include <memory>

#include "frontend/text_codec.h"
#include "tokenizer/tokenizer.h"

namespace blink {

class TokenizerCodec final : public TextCodec {
 public:
  explicit TokenizerCodec(std::shared_ptr<const Tokenizer> tokenizer)
      : tokenizer_(std::move(tokenizer)) {}

  void encode(std::string_view text, bool adds_special_tokens,
              std::vector<uint32_t>& token_ids) const override {
    tokenizer_->encode(text, {.add_special_tokens = adds_special_tokens, .parse_special = true},
                       token_ids);
  }

  void append_token_bytes(uint32_t token_id, std::string& bytes) const override {
    tokenizer_->append_token_bytes(token_id, bytes);
  }

  std::unique_ptr<TextDecoder> make_decoder(bool skips_special_tokens) const override {
    return std::make_unique<Decoder>(tokenizer_, skips_special_tokens);
  }

  bool encodes_inline() const override { return true; }

 private:
  class Decoder final : public TextDecoder {
   public:
    Decoder(std::shared_ptr<const Tokenizer> tokenizer, bool skips_special_tokens)
        : tokenizer_(std::move(tokenizer)), detokenizer_(*tokenizer_, skips_special_tokens) {}
    void append(uint32_t token_id, std::string& text) override {
      detokenizer_.append(token_id, text);
    }
    void flush(std::string& text) override { detokenizer_.flush(text); }

   private:
    std::shared_ptr<const Tokenizer> tokenizer_;  // the detokenizer refers to it
    Detokenizer detokenizer_;
  };

  std::shared_ptr<const Tokenizer> tokenizer_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_TOKENIZER_CODEC_H
