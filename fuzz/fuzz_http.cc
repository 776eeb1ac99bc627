// Fuzz target: the HTTP request parser over the bytes of one connection.
//
// The first byte seeds the sizes of the pieces in which the rest arrives. Whatever the pieces, the
// same requests must come out, and none may pass a limit.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "frontend/http_request.h"

namespace {

using namespace blink;

constexpr HttpLimits kLimits{.max_header_bytes = 2048, .max_headers = 16, .max_body_bytes = 4096};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

struct Outcome {
  HttpFault fault;
  bool is_complete;
  HttpMethod method;
  unsigned version;
  bool keeps_alive;
  std::string fields;  // path, then the others
  std::string body;
  bool operator==(const Outcome&) const = default;
};

Outcome outcome_of(const HttpRequestParser& parser) {
  Outcome outcome{parser.fault(), parser.is_complete(), HttpMethod::other, 11, true, "", ""};
  if (!parser.is_complete()) return outcome;
  const HttpRequest& request = parser.request();
  outcome.method = request.method;
  outcome.version = request.version;
  outcome.keeps_alive = request.keeps_alive;
  for (const std::string_view field :
       {request.path, request.host, request.authorization, request.content_type,
        request.content_encoding, request.origin, request.expect, request.request_id}) {
    require(field.find_first_of(std::string_view("\r\n\0", 3)) == std::string_view::npos,
            "no field holds a line end or NUL");
    outcome.fields.append(field).append("\n");
  }
  outcome.body = parser.body();
  require(request.path == "*" || request.path.starts_with('/'), "a path is a path");
  require(outcome.fields.size() <= kLimits.max_header_bytes + 8, "the header limit holds");
  require(outcome.body.size() <= kLimits.max_body_bytes, "the body limit holds");
  require(request.is_chunked || outcome.body.size() == request.content_length,
          "a fixed body has its length");
  return outcome;
}

// All requests of a connection, in pieces of next_size() bytes.
template <typename NextSize>
std::vector<Outcome> read_connection(std::string_view bytes, NextSize next_size) {
  std::vector<Outcome> outcomes;
  HttpRequestParser parser(kLimits);
  while (!bytes.empty()) {
    // Memory of its own: a read past the piece's end is seen.
    const std::string piece(bytes.substr(0, next_size()));
    const size_t num_used = parser.feed(piece);
    require(num_used <= piece.size(), "no more is used than there is");
    bytes.remove_prefix(num_used);
    const bool is_over = parser.is_complete() || parser.fault() != HttpFault::none;
    require(is_over || num_used == piece.size(), "all is used until the end");
    if (!is_over) continue;
    require(parser.feed("GET / HTTP/1.1\r\n") == 0, "nothing is used after the end");
    outcomes.push_back(outcome_of(parser));
    if (parser.fault() != HttpFault::none) return outcomes;
    parser.reset();
  }
  outcomes.push_back(outcome_of(parser));
  return outcomes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  uint32_t random = data[0] * 2654435761u + 1;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto whole = read_connection(bytes, [&] { return bytes.size(); });
  const auto pieces = read_connection(bytes, [&] {
    random = random * 1664525u + 1013904223u;
    return size_t{1} + (random >> 24) % 17;
  });
  require(whole == pieces, "pieces give what the whole gives");
  return 0;
}
