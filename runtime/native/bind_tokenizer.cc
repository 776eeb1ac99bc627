// Python binding of the tokenizer: Tokenizer and Detokenizer of blink_runtime._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>
#include <vector>

#include "tokenizer.h"

namespace nb = nanobind;

namespace {

using blink::Detokenizer;
using blink::EncodeOptions;
using blink::Tokenizer;

// Texts from this size on are worth letting other Python threads run.
constexpr size_t kReleaseBytes = 16384;

std::vector<uint32_t>& thread_ids() {
  thread_local std::vector<uint32_t> ids;
  ids.clear();
  return ids;
}

void encode_into(const Tokenizer& tokenizer, std::string_view text, EncodeOptions options,
                 std::vector<uint32_t>& ids) {
  if (text.size() < kReleaseBytes) {
    tokenizer.encode(text, options, ids);
    return;
  }
  nb::gil_scoped_release release;
  tokenizer.encode(text, options, ids);
}

nb::object list_of(const std::vector<uint32_t>& ids) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(ids.size()));
  if (list == nullptr) nb::raise_python_error();
  for (size_t i = 0; i < ids.size(); ++i) {
    PyObject* value = PyLong_FromUnsignedLong(ids[i]);
    if (value == nullptr) {
      Py_DECREF(list);
      nb::raise_python_error();
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), value);
  }
  return nb::steal(list);
}

std::string_view view_of(nb::handle text) {
  Py_ssize_t num_bytes = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &num_bytes);
  if (bytes == nullptr) nb::raise_python_error();  // a lone surrogate
  return {bytes, static_cast<size_t>(num_bytes)};
}

nb::object encode(const Tokenizer& tokenizer, nb::str text, bool add_special_tokens,
                  bool parse_special) {
  std::vector<uint32_t>& ids = thread_ids();
  encode_into(tokenizer, view_of(text),
              {.add_special_tokens = add_special_tokens, .parse_special = parse_special}, ids);
  return list_of(ids);
}

nb::list encode_batch(const Tokenizer& tokenizer, nb::sequence texts, bool add_special_tokens,
                      bool parse_special) {
  nb::list result;
  for (nb::handle text : texts) {
    result.append(encode(tokenizer, nb::cast<nb::str>(text), add_special_tokens, parse_special));
  }
  return result;
}

std::vector<uint32_t>& ids_of(nb::sequence values) {
  std::vector<uint32_t>& ids = thread_ids();
  for (nb::handle value : values) ids.push_back(nb::cast<uint32_t>(value));
  return ids;
}

Tokenizer load(nb::bytes compiled) {
  return Tokenizer::load({reinterpret_cast<const std::byte*>(compiled.c_str()), compiled.size()});
}

std::string append(Detokenizer& detokenizer, uint32_t id) {
  std::string text;
  detokenizer.append(id, text);
  return text;
}

std::string flush(Detokenizer& detokenizer) {
  std::string text;
  detokenizer.flush(text);
  return text;
}

}  // namespace

void bind_tokenizer(nb::module_& module) {
  nb::exception<blink::TokenizerError>(module, "TokenizerError", PyExc_ValueError);

  nb::class_<Tokenizer>(module, "Tokenizer",
                        "A compiled tokenizer: text to ids and back. Safe to share by threads.")
      .def(
          "__init__",
          [](Tokenizer* self, nb::bytes compiled) { new (self) Tokenizer(load(compiled)); },
          nb::arg("compiled"),
          "Load the bytes of blinkc's compile_tokenizer. Raises TokenizerError.")
      .def("encode", &encode, nb::arg("text"), nb::arg("add_special_tokens") = true,
           nb::arg("parse_special") = true,
           nb::sig("def encode(self, text: str, "
                   "add_special_tokens: bool = True, parse_special: bool = True) -> list[int]"),
           "Return the ids of a text. Without parse_special, special tokens in it are plain text.")
      .def("encode_batch", &encode_batch, nb::arg("texts"), nb::arg("add_special_tokens") = true,
           nb::arg("parse_special") = true,
           nb::sig("def encode_batch(self, texts: "
                   "collections.abc.Sequence[str], add_special_tokens: bool = True, "
                   "parse_special: bool = True) -> list[list[int]]"),
           "Return the ids of each text.")
      .def(
          "decode",
          [](const Tokenizer& self, nb::sequence ids, bool skip_special_tokens) {
            return self.decode(ids_of(ids), skip_special_tokens);
          },
          nb::arg("ids"), nb::arg("skip_special_tokens") = true,
          "Return the text of a sequence of ids.")
      .def("id_of", &Tokenizer::id_of, nb::arg("token"),
           "Return the id of an added token, or of the vocabulary entry with these bytes, or None.")
      .def("is_special", &Tokenizer::is_special, nb::arg("id"))
      .def_prop_ro("num_ids", &Tokenizer::num_ids, "One more than the greatest id.");

  nb::class_<Detokenizer>(module, "Detokenizer",
                          "Turns the ids of one request into text as they come.")
      .def(nb::init<const Tokenizer&, bool>(), nb::arg("tokenizer"),
           nb::arg("skip_special_tokens") = true, nb::keep_alive<1, 2>())
      .def("append", &append, nb::arg("id"),
           "Return the text that this id completes; a code point that is not whole is held back.")
      .def("flush", &flush, "Return what is held back, as U+FFFD, at the end of the output.");
}
