// The pure parts of HTTP responses: heads, chunk framing, request ids.
#ifndef BLINK_FRONTEND_HTTP_MESSAGE_H
#define BLINK_FRONTEND_HTTP_MESSAGE_H

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace blink {

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::string extra_headers;  // each with its CRLF
};

// What a response's head says of its connection and its request.
struct HeadContext {
  unsigned http_version = 11;  // 10 or 11
  bool keeps_alive = true;
  std::string_view request_id;
  std::string_view date;          // of date_text()
  std::string_view cors_headers;  // each with its CRLF
};

std::string_view status_text(int status);

// Head with Content-Length (none for 204), up to and with the empty line.
void append_head(const HttpResponse& response, const HeadContext& context, std::string& out);

// Head of an SSE stream: chunked for HTTP/1.1 (11); HTTP/1.0 (10) ends with the connection.
void append_stream_head(const HeadContext& context, std::string& out);

// "<hex size>\r\n"; the chunk's bytes and "\r\n" follow.
void append_chunk_head(size_t num_bytes, std::string& out);

// "Sun, 06 Nov 1994 08:49:37 GMT" of a Unix time.
std::string date_text(int64_t unix_s);

// The value of a hexadecimal digit; -1: it is none.
int hex_value(char digit);

// Decodes escapes of unreserved characters where they lie and returns how long the path then is:
// "%68" means "h" to everybody, while "%2F" stays apart from "/" (RFC 3986 section 6.2.2.2).
// Nothing: a '%' has no two hexadecimal digits behind it.
std::optional<size_t> decode_unreserved(std::span<char> path);

// "%2F" -> "/"; what is no escape stays.
std::string percent_decoded(std::string_view text);

// The text with all but printable ASCII replaced by '?', for messages that repeat what a client
// sent.
std::string printable(std::string_view text);

// Whether a client's X-Request-Id may stand in logs and answers: 1 to 64 of letters, digits and
// "-_.:".
bool is_sane_request_id(std::string_view text);

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_MESSAGE_H
