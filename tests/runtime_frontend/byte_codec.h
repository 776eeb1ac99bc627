// A text codec for tests: one token is one byte.
#ifndef BLINK_TESTS_BYTE_CODEC_H
#define BLINK_TESTS_BYTE_CODEC_H

#include "frontend/text_codec.h"

namespace blink {

class ByteCodec final : public TextCodec {
 public:
  void encode(std::string_view text, bool, std::vector<uint32_t>& token_ids) const override {
    for (const char byte : text) token_ids.push_back(static_cast<unsigned char>(byte));
  }
  void append_token_bytes(uint32_t token_id, std::string& bytes) const override {
    if (token_id < 256) bytes += static_cast<char>(token_id);
  }
  std::unique_ptr<TextDecoder> make_decoder(bool) const override {
    return std::make_unique<Decoder>();
  }
  bool encodes_inline() const override { return true; }

 private:
  class Decoder final : public TextDecoder {
   public:
    void append(uint32_t token_id, std::string& text) override {
      if (token_id < 128) text += static_cast<char>(token_id);  // tests that use it speak ASCII
    }
    void flush(std::string&) override {}
  };
};

}  // namespace blink

#endif  // BLINK_TESTS_BYTE_CODEC_H
