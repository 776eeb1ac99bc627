#include <nanobind/nanobind.h>

#include <chrono>
#include <string_view>
#include <vector>

#include "tokenizer.h"

namespace nb = nanobind;

void bind_tokenizer(nb::module_& module);

namespace {

// Nanoseconds that encoding all texts takes without Python.
int64_t encode_ns(const blink::Tokenizer& tokenizer, nb::list texts) {
  std::vector<std::string_view> views;
  for (nb::handle text : texts) {
    Py_ssize_t num_bytes = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &num_bytes);
    if (bytes == nullptr) nb::raise_python_error();
    views.emplace_back(bytes, static_cast<size_t>(num_bytes));
  }
  std::vector<uint32_t> ids;
  const auto start = std::chrono::steady_clock::now();
  for (const std::string_view text : views) {
    ids.clear();
    tokenizer.encode(text, blink::EncodeOptions{}, ids);
  }
  return std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

NB_MODULE(_tokenizer, module) {
  bind_tokenizer(module);
  module.def("encode_ns", &encode_ns);
}
