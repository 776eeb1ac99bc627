#include "native/python_codec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

namespace blink {
namespace {

namespace nb = nanobind;

class PythonDecoder final : public TextDecoder {
 public:
  explicit PythonDecoder(nb::object decoder) : decoder_(std::move(decoder)) {}

  void append(uint32_t token_id, std::string& text) override {
    const nb::gil_scoped_acquire gil;
    try {
      text += nb::cast<std::string>(decoder_.get().attr("append")(token_id));
    } catch (const nb::python_error&) {
      // An id the tokenizer does not know has no text; the detokenizer thread must live on.
    }
  }

  void flush(std::string& text) override {
    const nb::gil_scoped_acquire gil;
    try {
      text += nb::cast<std::string>(decoder_.get().attr("flush")());
    } catch (const nb::python_error&) {
      // As above.
    }
  }

 private:
  PythonReference decoder_;
};

}  // namespace

void PythonCodec::encode(std::string_view text, bool adds_special_tokens,
                         std::vector<uint32_t>& token_ids) const {
  const nb::gil_scoped_acquire gil;
  try {
    const nb::object ids = codec_.get().attr("encode")(text, adds_special_tokens);
    for (const nb::handle id : ids) token_ids.push_back(nb::cast<uint32_t>(id));
  } catch (const nb::python_error& error) {
    throw std::runtime_error(error.what());  // copied while the GIL is held
  }
}

void PythonCodec::append_token_bytes(uint32_t token_id, std::string& bytes) const {
  const nb::gil_scoped_acquire gil;
  try {
    const auto found = nb::cast<nb::bytes>(codec_.get().attr("token_bytes")(token_id));
    bytes.append(found.c_str(), found.size());
  } catch (const nb::python_error&) {
    // An id the tokenizer does not know has no text.
  }
}

std::unique_ptr<TextDecoder> PythonCodec::make_decoder(bool skips_special_tokens) const {
  const nb::gil_scoped_acquire gil;
  return std::make_unique<PythonDecoder>(codec_.get().attr("make_decoder")(skips_special_tokens));
}

}  // namespace blink
