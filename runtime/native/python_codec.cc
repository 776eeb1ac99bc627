#include "native/python_codec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

namespace blink {
namespace {

namespace nb = nanobind;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

class PythonThread {
 public:
  PythonThread() : gil_(PyGILState_Ensure()), state_(PyEval_SaveThread()) {}
  PythonThread(const PythonThread&) = delete;
  PythonThread& operator=(const PythonThread&) = delete;
  ~PythonThread() {
    if (is_finalizing()) return;  // the GIL is not to be had any more; the state ends with Python
    PyEval_RestoreThread(state_);
    PyGILState_Release(gil_);
  }

 private:
  PyGILState_STATE gil_;
  PyThreadState* state_;
};

class PythonDecoder final : public TextDecoder {
 public:
  explicit PythonDecoder(nb::object decoder) : decoder_(std::move(decoder)) {}

  void append(uint32_t token_id, std::string& text) override {
    keep_python_thread();
    const nb::gil_scoped_acquire gil;
    try {
      text += nb::cast<std::string>(decoder_.get().attr("append")(token_id));
    } catch (const nb::python_error&) {
      // An id the tokenizer does not know has no text; the detokenizer thread must live on.
    }
  }

  void flush(std::string& text) override {
    keep_python_thread();
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

void keep_python_thread() {
  if (PyGILState_GetThisThreadState() != nullptr) return;  // Python's own, or kept already
  static thread_local PythonThread thread;
}

void PythonCodec::encode(std::string_view text, bool adds_special_tokens,
                         std::vector<uint32_t>& token_ids) const {
  keep_python_thread();
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
