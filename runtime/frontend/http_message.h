// The pure parts of HTTP: response heads, chunk framing, bearer keys.
#ifndef BLINK_FRONTEND_HTTP_MESSAGE_H
#define BLINK_FRONTEND_HTTP_MESSAGE_H

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace blink {

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::string extra_headers;  // each with its CRLF
};

std::string_view status_text(int status);

// Head with Content-Length, up to and with the empty line.
std::string head_of_response(const HttpResponse& response, unsigned http_version, bool keeps_alive);

// Head of an SSE stream: chunked for HTTP/1.1 (11); HTTP/1.0 (10) ends with the connection.
std::string head_of_stream(unsigned http_version, bool keeps_alive);

// "<hex size>\r\n"; the chunk's bytes and "\r\n" follow.
std::string chunk_head(size_t num_bytes);

// "%2F" -> "/"; what is no escape stays.
std::string percent_decoded(std::string_view text);

// The text with all but printable ASCII replaced by '?', for messages that repeat what a client
// sent.
std::string printable(std::string_view text);

// Whether `authorization` ("Bearer KEY") holds one of the keys. Its time depends on the lengths
// only.
bool has_valid_key(std::string_view authorization, const std::vector<std::string>& api_keys);

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_MESSAGE_H
