// Python: FrontEnd, the HTTP server over a ring.
#include <chrono>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "frontend/front_end.h"
#include "frontend/http_entrance.h"
#include "native/bindings.h"
#include "native/link_handle.h"
#include "native/python_codec.h"
#include "native/ring_handle.h"
#ifdef BLINK_HAS_TOKENIZER
#include "frontend/tokenizer_codec.h"
#endif

namespace blink {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

ToolFormat tool_format_from_name(const std::string& name) {
  if (name == "hermes") return ToolFormat::hermes;
  if (name == "llama3") return ToolFormat::llama3;
  if (name == "none") return ToolFormat::none;
  throw std::invalid_argument("tool_format is '" + name + "'; it may be none, hermes or llama3");
}

// Sets one field by its name; the names are FrontEndConfig's.
void set_field(FrontEndConfig& config, const std::string& name, nb::handle value) {
#define BLINK_FIELD(field)                                  \
  if (name == #field) {                                     \
    config.field = nb::cast<decltype(config.field)>(value); \
    return;                                                 \
  }
  BLINK_FIELD(host)
  BLINK_FIELD(port)
  BLINK_FIELD(model_name)
  BLINK_FIELD(api_keys)
  BLINK_FIELD(api_key_file)
  BLINK_FIELD(tls_certificate)
  BLINK_FIELD(tls_key)
  BLINK_FIELD(access_log)
  BLINK_FIELD(cors_origins)
  BLINK_FIELD(eos_token_ids)
  BLINK_FIELD(front_end_index)
  BLINK_FIELD(has_chat_template)
  BLINK_FIELD(target_name)
  BLINK_FIELD(serves_chat_page)
  BLINK_FIELD(max_connections)
  BLINK_FIELD(max_connections_per_address)
  BLINK_FIELD(max_requests)
  BLINK_FIELD(max_headers)
  BLINK_FIELD(max_total_body_bytes)
  BLINK_FIELD(max_header_bytes)
  BLINK_FIELD(max_body_bytes)
  BLINK_FIELD(max_json_depth)
  BLINK_FIELD(max_stop_strings)
  BLINK_FIELD(max_stop_bytes)
  BLINK_FIELD(max_buffered_bytes)
  BLINK_FIELD(header_timeout_ms)
  BLINK_FIELD(body_timeout_ms)
  BLINK_FIELD(idle_timeout_ms)
  BLINK_FIELD(write_timeout_ms)
  BLINK_FIELD(request_timeout_ms)
  BLINK_FIELD(num_prepare_threads)
  BLINK_FIELD(inline_chat_bytes)
  BLINK_FIELD(inline_prompt_bytes)
  BLINK_FIELD(min_poll_interval_us)
  BLINK_FIELD(max_poll_interval_us)
  BLINK_FIELD(max_polls_per_s)
  BLINK_FIELD(stall_timeout_ms)
#undef BLINK_FIELD
  if (name == "tool_format") {
    config.tool_format = tool_format_from_name(nb::cast<std::string>(value));
    return;
  }
  throw std::invalid_argument("FrontEnd has no option '" + name + "'");
}

FrontEndConfig config_from_dict(const nb::dict& options) {
  FrontEndConfig config;
  for (const auto [key, value] : options) {
    const auto name = nb::cast<std::string>(key);
    try {
      set_field(config, name, value);
    } catch (const nb::cast_error&) {
      throw std::invalid_argument("FrontEnd option '" + name + "' has a wrong type or value");
    }
  }
  return config;
}

std::shared_ptr<const TextCodec> codec_from_python(nb::object codec) {
#ifdef BLINK_HAS_TOKENIZER
  const Tokenizer* tokenizer = nullptr;
  if (nb::try_cast(codec, tokenizer) && tokenizer != nullptr) {
    // The Python object keeps the tokenizer alive.
    auto owner = std::make_shared<PythonReference>(std::move(codec));
    return std::make_shared<TokenizerCodec>(
        std::shared_ptr<const Tokenizer>(std::move(owner), tokenizer));
  }
#endif
  return std::make_shared<PythonCodec>(std::move(codec));
}

// A ValueError of the renderer is the client's fault, anything else is ours.
TemplateRenderer renderer_from_python(nb::object render) {
  auto owner = std::make_shared<PythonReference>(std::move(render));
  return [owner](const std::string& input) -> std::variant<std::string, ApiError> {
    keep_python_thread();
    const nb::gil_scoped_acquire gil;
    try {
      return nb::cast<std::string>(owner->get()(input));
    } catch (nb::python_error& error) {
      const bool is_clients = error.matches(PyExc_ValueError);
      const std::string message = nb::cast<std::string>(nb::str(error.value()));
      if (is_clients) return bad_request("messages", message);
      return server_error(500, "chat_template", "The chat template failed: " + message);
    }
  };
}

// An entrance, until a FrontEnd takes it or it is closed.
class EntranceHandle {
 public:
  explicit EntranceHandle(const nb::dict& options) : entrance_(config_from_dict(options)) {}

  HttpEntrance take() {
    if (!entrance_) throw std::runtime_error("the entrance is closed, or a FrontEnd has it");
    HttpEntrance taken = std::move(*entrance_);
    entrance_.reset();
    return taken;
  }
  void close() { entrance_.reset(); }

 private:
  std::optional<HttpEntrance> entrance_;
};

class PythonFrontEnd {
 public:
  // `entrance`: None, or an EntranceHandle, whose entrance is taken.
  PythonFrontEnd(nb::object ring, nb::object codec, nb::object render, const nb::dict& options,
                 nb::object entrance)
      : ring_(ring),
        front_end_(config_from_dict(options), transport_from_python(ring),
                   codec_from_python(std::move(codec)), renderer_from_python(std::move(render)),
                   entrance.is_none() ? HttpEntrance(config_from_dict(options))
                                      : nb::cast<EntranceHandle&>(entrance).take()) {}

  // A forgotten stop(): without the GIL, as the threads that end may need it first.
  ~PythonFrontEnd() {
    const nb::gil_scoped_release release;
    front_end_.stop(std::chrono::milliseconds(0));
  }

  FrontEnd& get() { return front_end_; }

  nb::dict stats() {
    Metrics& metrics = front_end_.pipeline().metrics();
    nb::dict out;
    out["connections_open"] = metrics.connections_open.load(std::memory_order_relaxed);
    out["requests_running"] = metrics.requests_running.load(std::memory_order_relaxed);
    out["requests_stopped"] = metrics.requests_stopped.value();
    out["requests_at_length"] = metrics.requests_at_length.value();
    out["requests_aborted"] = metrics.requests_aborted.value();
    out["requests_failed"] = metrics.requests_failed.value();
    out["prompt_tokens"] = metrics.prompt_tokens.value();
    out["output_tokens"] = metrics.output_tokens.value();
    out["sequence_mismatches"] = metrics.sequence_mismatches.value();
    return out;
  }

 private:
  nb::object ring_;  // outlives the transport over it
  FrontEnd front_end_;
};

}  // namespace

void bind_front_end(nb::module_& module) {
  nb::class_<EntranceHandle>(module, "HttpEntrance",
                             "An address held, and keys, certificate and log that are good.")
      .def(nb::init<const nb::dict&>(), "options"_a)
      .def("close", &EntranceHandle::close);
  nb::class_<PythonFrontEnd>(module, "FrontEnd", "OpenAI's HTTP API over a ring.")
      .def(nb::init<nb::object, nb::object, nb::object, const nb::dict&, nb::object>(), "ring"_a,
           "codec"_a, "render_chat_template"_a, "options"_a, "entrance"_a = nb::none(),
           "codec: Tokenizer, or an object with encode and make_decoder. render_chat_template: "
           "JSON text\n"
           "-> prompt; ValueError is told to the client. options: the fields of FrontEndConfig.\n"
           "entrance: a HttpEntrance of the same options, which is then used up.")
      .def(
          "start", [](PythonFrontEnd& self) { self.get().start(); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "stop",
          [](PythonFrontEnd& self, double patience_s) {
            self.get().stop(std::chrono::milliseconds(static_cast<int64_t>(patience_s * 1000)));
          },
          "patience_s"_a = 0.0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "reload", [](PythonFrontEnd& self) { self.get().reload(); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Read keys and certificate again, open the log anew; RuntimeError: the old ones stay.")
      .def_prop_ro("port", [](PythonFrontEnd& self) { return self.get().port(); })
      .def_prop_ro("health", [](PythonFrontEnd& self) { return health_name(self.get().health()); })
      .def("stats", &PythonFrontEnd::stats);
}

}  // namespace blink
