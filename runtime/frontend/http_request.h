// Reads HTTP/1.x requests from a connection's bytes: head, fixed or chunked body, limits.
//
// Strict on purpose: whatever two readers could take differently (two lengths, a length beside a
// coding, folded lines, a lone LF, odd chunk sizes) is refused, so that nothing can be smuggled
// past a proxy. RFC 9112 is the source of the rules.
#ifndef BLINK_FRONTEND_HTTP_REQUEST_H
#define BLINK_FRONTEND_HTTP_REQUEST_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace blink {

struct HttpLimits {
  uint32_t max_header_bytes = 16 * 1024;  // request line, fields and line ends; trailers apart
  uint32_t max_headers = 100;             // fields; of the trailers as well
  uint32_t max_body_bytes = 8 * 1024 * 1024;
};

// What is wrong with a request's bytes.
enum class HttpFault : uint8_t {
  none,
  malformed_request_line,
  unknown_version,          // neither HTTP/1.0 nor HTTP/1.1
  malformed_target,         // not a path, an http URL or *
  malformed_header,         // a name or a byte that may not be there
  folded_header,            // a field that goes on in the next line
  lone_line_feed,           // a line that does not end with CR LF
  repeated_header,          // a field that may be there once
  too_many_headers,         // over max_headers
  headers_too_large,        // over max_header_bytes
  target_too_long,          // over max_header_bytes already in the first line
  missing_host,             // HTTP/1.1 without Host
  malformed_length,         // Content-Length is not one plain number
  length_and_encoding,      // Content-Length beside Transfer-Encoding
  encoding_in_old_version,  // Transfer-Encoding in HTTP/1.0
  unknown_transfer_coding,  // anything but chunked
  malformed_chunk,          // chunk size, extension or end
  body_too_large,           // over max_body_bytes
};

struct HttpFaultText {
  int status;        // of the answer
  const char* code;  // of OpenAI's error object
  std::string message;
};
HttpFaultText text_of_fault(HttpFault fault, const HttpLimits& limits);

enum class HttpMethod : uint8_t { get, head, post, options, other };
std::string_view name_of_method(HttpMethod method);

// The views point into the parser and are good until its reset().
struct HttpRequest {
  HttpMethod method = HttpMethod::other;
  std::string_view path;  // of the target, escapes of unreserved characters decoded; "*" as it is
  unsigned version = 11;  // 10 or 11
  bool keeps_alive = true;
  bool is_chunked = false;
  uint64_t content_length = 0;
  // Fields, without white space around them; empty: not sent.
  std::string_view host;
  std::string_view authorization;
  std::string_view content_type;
  std::string_view content_encoding;
  std::string_view origin;
  std::string_view expect;
  std::string_view request_id;
};

class HttpRequestParser {
 public:
  explicit HttpRequestParser(const HttpLimits& limits) : limits_(limits) {}

  // Forgets the request and is ready for the next; memory is kept, but no large body's.
  void reset();

  // Takes bytes of the connection in any pieces; returns how many belong to this request. None do
  // once it is complete or has a fault.
  size_t feed(std::string_view bytes);

  bool has_begun() const { return has_begun_; }
  bool has_head() const { return state_ > State::header_line; }
  bool is_complete() const { return state_ == State::complete; }
  HttpFault fault() const { return fault_; }

  // Good once has_head(); with a fault: what was read of it.
  const HttpRequest& request() const { return request_; }
  std::string_view body() const { return body_; }

 private:
  enum class State : uint8_t {
    request_line,
    header_line,
    fixed_body,
    chunk_size,
    chunk_data,
    chunk_end,
    trailer_line,
    complete,
  };
  struct Place {  // in head_, which moves while it grows
    uint32_t begin = 0;
    uint32_t size = 0;
  };

  size_t take_line(std::string_view bytes);
  void end_line(std::string_view line);
  void read_request_line(std::string_view line);
  void read_target(std::string_view target);
  void read_header(std::string_view line);
  void read_field(std::string_view name, std::string_view value);
  void read_connection(std::string_view value);
  void read_content_length(std::string_view value);
  void end_head();
  void read_chunk_size(std::string_view line);
  void fail(HttpFault fault);
  uint32_t line_limit() const;
  HttpFault fault_of_long_line() const;
  Place place_of(std::string_view text) const;
  std::string_view at(Place place) const { return {head_.data() + place.begin, place.size}; }

  HttpLimits limits_;
  State state_ = State::request_line;
  HttpFault fault_ = HttpFault::none;
  bool has_begun_ = false;
  bool has_skipped_line_ = false;
  HttpRequest request_;
  std::string head_;       // its lines, each with its end
  size_t line_begin_ = 0;  // of the line being read, in head_
  std::string framing_;    // the line being read after the head: chunk sizes, trailers
  uint32_t num_headers_ = 0;
  uint32_t num_trailer_bytes_ = 0;
  Place path_, host_, authorization_, content_type_, content_encoding_, origin_, expect_;
  Place request_id_;
  bool has_host_ = false;
  bool has_length_ = false;
  bool has_encoding_ = false;
  bool is_encoding_known_ = true;
  bool asks_close_ = false;
  bool asks_keep_alive_ = false;
  uint64_t remaining_bytes_ = 0;  // of the fixed body or of the chunk
  std::string body_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_REQUEST_H
