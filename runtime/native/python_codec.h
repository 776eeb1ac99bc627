// A text codec written in Python: for tokenizers that the built-in one does not know. Takes the GIL
// per call.
#ifndef BLINK_NATIVE_PYTHON_CODEC_H
#define BLINK_NATIVE_PYTHON_CODEC_H

#include <nanobind/nanobind.h>

#include "frontend/text_codec.h"

namespace blink {

// Gives the calling thread a Python thread state until it ends. A thread without one makes and
// destroys a state, with a stack of its own mapped and unmapped, each time it takes the GIL. Called
// on threads that take it often; costs a look at a thread-local afterwards.
void keep_python_thread();

// Holds a Python object from any thread; takes the GIL to drop it.
class PythonReference {
 public:
  explicit PythonReference(nanobind::object object) : object_(std::move(object)) {}
  PythonReference(const PythonReference&) = delete;
  PythonReference& operator=(const PythonReference&) = delete;
  ~PythonReference() {
    const nanobind::gil_scoped_acquire gil;
    object_.reset();
  }
  const nanobind::object& get() const { return object_; }  // with the GIL

 private:
  nanobind::object object_;
};

// `codec` has encode(text: str, adds_special_tokens: bool) -> list[int],
// token_bytes(token_id: int) -> bytes and
// make_decoder(skips_special_tokens: bool), whose result has append(token_id: int) -> str and
// flush() -> str.
class PythonCodec final : public TextCodec {
 public:
  explicit PythonCodec(nanobind::object codec) : codec_(std::move(codec)) {}
  void encode(std::string_view text, bool adds_special_tokens,
              std::vector<uint32_t>& token_ids) const override;
  void append_token_bytes(uint32_t token_id, std::string& bytes) const override;
  std::unique_ptr<TextDecoder> make_decoder(bool skips_special_tokens) const override;
  bool encodes_inline() const override { return false; }

 private:
  PythonReference codec_;
};

}  // namespace blink

#endif  // BLINK_NATIVE_PYTHON_CODEC_H
