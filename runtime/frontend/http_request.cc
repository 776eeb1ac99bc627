#include "frontend/http_request.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "frontend/http_message.h"

namespace blink {
namespace {

constexpr size_t kKeptHeadBytes = 4 * 1024;   // capacity that outlives its request: many are idle
constexpr size_t kKeptBodyBytes = 64 * 1024;  // the same
constexpr uint32_t kMaxChunkLineBytes = 256;  // size and extensions

// RFC 9110 section 5.6.2.
constexpr std::array<bool, 256> kIsTokenByte = [] {
  std::array<bool, 256> table{};
  for (int c = '0'; c <= '9'; ++c) table[static_cast<size_t>(c)] = true;
  for (int c = 'a'; c <= 'z'; ++c) table[static_cast<size_t>(c)] = true;
  for (int c = 'A'; c <= 'Z'; ++c) table[static_cast<size_t>(c)] = true;
  for (const char c : std::string_view("!#$%&'*+-.^_`|~")) table[static_cast<uint8_t>(c)] = true;
  return table;
}();

bool is_token(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](char c) { return kIsTokenByte[static_cast<uint8_t>(c)]; });
}

// Tab, blanks, visible bytes and those above ASCII: no other control character, no CR, no NUL.
bool is_field_text(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<uint8_t>(c);
    return byte == '\t' || (byte >= 0x20 && byte != 0x7f);
  });
}

bool is_visible_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

std::string_view trimmed(std::string_view text) {
  const auto is_blank = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// `lower` is in lower case.
bool equals_ignoring_case(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(), [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? static_cast<char>(a + 32) : a) == b;
  });
}

bool may_begin_request(char byte) {
  return kIsTokenByte[static_cast<uint8_t>(byte)] || byte == '\r' || byte == '\n';
}

HttpMethod method_from_name(std::string_view name) {
  if (name == "POST") return HttpMethod::post;
  if (name == "GET") return HttpMethod::get;
  if (name == "HEAD") return HttpMethod::head;
  if (name == "OPTIONS") return HttpMethod::options;
  return HttpMethod::other;
}

}  // namespace

HttpFaultText text_of_fault(HttpFault fault, const HttpLimits& limits) {
  switch (fault) {
    case HttpFault::none:
      break;
    case HttpFault::malformed_request_line:
      return {400, "malformed_http", "The request line is malformed."};
    case HttpFault::unknown_version:
      return {505, "http_version", "Only HTTP/1.0 and HTTP/1.1 are served."};
    case HttpFault::malformed_target:
      return {400, "malformed_http", "The request's target is malformed."};
    case HttpFault::malformed_header:
      return {400, "malformed_http", "A header field is malformed."};
    case HttpFault::folded_header:
      return {400, "malformed_http", "A header field goes on in the next line."};
    case HttpFault::lone_line_feed:
      return {400, "malformed_http", "A line does not end with CR LF."};
    case HttpFault::repeated_header:
      return {400, "malformed_http", "A header field that may be there once is repeated."};
    case HttpFault::too_many_headers:
      return {431, "headers_too_large",
              "The request has more than " + std::to_string(limits.max_headers) +
                  " header fields, or as many trailers."};
    case HttpFault::headers_too_large:
      return {431, "headers_too_large",
              "The request's first line and header fields, or its trailers, are over " +
                  std::to_string(limits.max_header_bytes) + " bytes."};
    case HttpFault::target_too_long:
      return {414, "target_too_long",
              "The request's first line is over " + std::to_string(limits.max_header_bytes) +
                  " bytes."};
    case HttpFault::missing_host:
      return {400, "malformed_http", "HTTP/1.1 requires one Host field."};
    case HttpFault::malformed_length:
      return {400, "malformed_http", "Content-Length must be one plain number."};
    case HttpFault::length_and_encoding:
      return {400, "malformed_http", "Content-Length and Transfer-Encoding exclude each other."};
    case HttpFault::encoding_in_old_version:
      return {400, "malformed_http", "HTTP/1.0 knows no Transfer-Encoding."};
    case HttpFault::unknown_transfer_coding:
      return {501, "transfer_coding", "The only Transfer-Encoding understood is 'chunked'."};
    case HttpFault::malformed_chunk:
      return {400, "malformed_http", "The chunked body is malformed."};
    case HttpFault::body_too_large:
      return {413, "body_too_large",
              "The request body is over " + std::to_string(limits.max_body_bytes) + " bytes."};
  }
  return {500, "internal", "The request has no fault."};
}

std::string_view name_of_method(HttpMethod method) {
  switch (method) {
    case HttpMethod::get:
      return "GET";
    case HttpMethod::head:
      return "HEAD";
    case HttpMethod::post:
      return "POST";
    case HttpMethod::options:
      return "OPTIONS";
    case HttpMethod::other:
      break;
  }
  return "other";
}

void HttpRequestParser::reset() {
  std::string head = std::move(head_);
  std::string body = std::move(body_);
  *this = HttpRequestParser(limits_);
  head.clear();
  body.clear();
  if (head.capacity() <= kKeptHeadBytes) head_ = std::move(head);
  if (body.capacity() <= kKeptBodyBytes) body_ = std::move(body);
}

size_t HttpRequestParser::feed(std::string_view bytes) {
  const size_t num_given = bytes.size();
  while (!bytes.empty() && state_ != State::complete && fault_ == HttpFault::none) {
    has_begun_ = true;
    size_t num_used = 0;
    if (state_ == State::fixed_body || state_ == State::chunk_data) {
      num_used = static_cast<size_t>(std::min<uint64_t>(bytes.size(), remaining_bytes_));
      body_.append(bytes.substr(0, num_used));
      remaining_bytes_ -= num_used;
      if (remaining_bytes_ == 0) {
        state_ = state_ == State::fixed_body ? State::complete : State::chunk_end;
      }
    } else {
      num_used = take_line(bytes);
    }
    bytes.remove_prefix(num_used);
  }
  return num_given - bytes.size();
}

// Adds bytes to the line being read, up to its end or to the limit.
size_t HttpRequestParser::take_line(std::string_view bytes) {
  // The head stays where it is once it is whole: request() points into it.
  std::string& lines = has_head() ? framing_ : head_;
  const size_t begin = has_head() ? 0 : line_begin_;
  const size_t line_feed = bytes.find('\n');
  size_t count = line_feed == std::string_view::npos ? bytes.size() : line_feed + 1;
  const bool is_too_long = lines.size() - begin + count > line_limit();
  if (is_too_long) count = line_limit() - (lines.size() - begin);
  lines.append(bytes.substr(0, count));
  const std::string_view line = std::string_view(lines).substr(begin);
  if (state_ == State::request_line && !line.empty() && !may_begin_request(line.front())) {
    fail(HttpFault::malformed_request_line);  // TLS on a plain port, for one
  } else if (is_too_long) {
    fail(fault_of_long_line());
  } else if (line.ends_with('\n')) {
    if (line.size() < 2 || line[line.size() - 2] != '\r') {
      fail(HttpFault::lone_line_feed);
    } else {
      end_line(line.substr(0, line.size() - 2));
      framing_.clear();
      if (!has_head()) line_begin_ = head_.size();
    }
  }
  return count;
}

uint32_t HttpRequestParser::line_limit() const {
  switch (state_) {
    case State::chunk_size:
      return kMaxChunkLineBytes;
    case State::chunk_end:
      return 2;
    case State::trailer_line:
      return limits_.max_header_bytes - num_trailer_bytes_;
    case State::request_line:
    case State::header_line:
    case State::fixed_body:
    case State::chunk_data:
    case State::complete:
      break;
  }
  return limits_.max_header_bytes - static_cast<uint32_t>(line_begin_);
}

HttpFault HttpRequestParser::fault_of_long_line() const {
  switch (state_) {
    case State::request_line:
      return HttpFault::target_too_long;
    case State::chunk_size:
    case State::chunk_end:
      return HttpFault::malformed_chunk;
    case State::header_line:
    case State::trailer_line:
    case State::fixed_body:
    case State::chunk_data:
    case State::complete:
      break;
  }
  return HttpFault::headers_too_large;
}

void HttpRequestParser::end_line(std::string_view line) {
  switch (state_) {
    case State::request_line:
      if (line.empty() && !has_skipped_line_) {
        has_skipped_line_ = true;  // RFC 9112 section 2.2: one may stand before a request
      } else {
        read_request_line(line);
      }
      return;
    case State::header_line:
      line.empty() ? end_head() : read_header(line);
      return;
    case State::chunk_size:
      read_chunk_size(line);
      return;
    case State::chunk_end:
      if (!line.empty()) fail(HttpFault::malformed_chunk);
      state_ = State::chunk_size;
      return;
    case State::trailer_line:
      num_trailer_bytes_ += static_cast<uint32_t>(line.size()) + 2;
      if (line.empty()) {
        state_ = State::complete;
      } else {
        read_header(line);
      }
      return;
    case State::fixed_body:
    case State::chunk_data:
    case State::complete:
      return;
  }
}

void HttpRequestParser::read_request_line(std::string_view line) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last || !is_token(line.substr(0, first))) {
    return fail(HttpFault::malformed_request_line);
  }
  const std::string_view version = line.substr(last + 1);
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    const bool is_http = version.size() == 8 && version.starts_with("HTTP/") && version[6] == '.';
    return fail(is_http ? HttpFault::unknown_version : HttpFault::malformed_request_line);
  }
  request_.method = method_from_name(line.substr(0, first));
  request_.version = version.back() == '1' ? 11 : 10;
  read_target(line.substr(first + 1, last - first - 1));
  if (fault_ == HttpFault::none) state_ = State::header_line;
}

// RFC 9112 section 3.2: a path, an http URL (of which the path counts), or * for OPTIONS.
void HttpRequestParser::read_target(std::string_view target) {
  if (target.empty() || !is_visible_ascii(target)) return fail(HttpFault::malformed_target);
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (target.size() > scheme.size() &&
        equals_ignoring_case(target.substr(0, scheme.size()), scheme)) {
      const size_t slash = target.find_first_of("/?#", scheme.size());
      if (slash == scheme.size() || slash == std::string_view::npos || target[slash] != '/') {
        return fail(HttpFault::malformed_target);
      }
      target.remove_prefix(slash);
    }
  }
  if (target.front() != '/' && !(target == "*" && request_.method == HttpMethod::options)) {
    return fail(HttpFault::malformed_target);
  }
  path_ = place_of(target.substr(0, target.find('?')));
  const std::optional<size_t> size = decode_unreserved({head_.data() + path_.begin, path_.size});
  if (!size) return fail(HttpFault::malformed_target);
  path_.size = static_cast<uint32_t>(*size);
}

void HttpRequestParser::read_header(std::string_view line) {
  if (line.front() == ' ' || line.front() == '\t') return fail(HttpFault::folded_header);
  if (++num_headers_ > limits_.max_headers) return fail(HttpFault::too_many_headers);
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon)) ||
      !is_field_text(line.substr(colon + 1))) {
    return fail(HttpFault::malformed_header);
  }
  // Trailers are checked and dropped: nothing that matters may come after the body.
  if (state_ == State::header_line) {
    read_field(line.substr(0, colon), trimmed(line.substr(colon + 1)));
  }
}

void HttpRequestParser::read_field(std::string_view name, std::string_view value) {
  const auto is = [name](std::string_view lower) { return equals_ignoring_case(name, lower); };
  const auto keep_once = [&](Place& place) {
    if (place.begin != 0) return fail(HttpFault::repeated_header);
    place = place_of(value);
  };
  switch (name.size()) {
    case 4:
      if (is("host")) {
        has_host_ = true;
        keep_once(host_);
      }
      return;
    case 6:
      if (is("origin")) keep_once(origin_);
      if (is("expect")) keep_once(expect_);
      return;
    case 10:
      if (is("connection")) read_connection(value);
      return;
    case 12:
      if (is("content-type")) keep_once(content_type_);
      if (is("x-request-id") && request_id_.begin == 0) request_id_ = place_of(value);
      return;
    case 13:
      if (is("authorization")) keep_once(authorization_);
      return;
    case 14:
      if (is("content-length")) read_content_length(value);
      return;
    case 16:
      if (is("content-encoding")) keep_once(content_encoding_);
      return;
    case 17:
      if (is("transfer-encoding")) {
        if (has_encoding_) return fail(HttpFault::repeated_header);
        has_encoding_ = true;
        is_encoding_known_ = equals_ignoring_case(value, "chunked");
      }
      return;
    default:
      return;
  }
}

void HttpRequestParser::read_connection(std::string_view value) {
  while (!value.empty()) {
    const size_t comma = value.find(',');
    const std::string_view option = trimmed(value.substr(0, comma));
    if (equals_ignoring_case(option, "close")) asks_close_ = true;
    if (equals_ignoring_case(option, "keep-alive")) asks_keep_alive_ = true;
    value.remove_prefix(comma == std::string_view::npos ? value.size() : comma + 1);
  }
}

void HttpRequestParser::read_content_length(std::string_view value) {
  if (has_length_) return fail(HttpFault::repeated_header);
  has_length_ = true;
  if (value.empty()) return fail(HttpFault::malformed_length);
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();  // stands for all above it
  uint64_t length = 0;
  for (const char digit : value) {
    if (digit < '0' || digit > '9') return fail(HttpFault::malformed_length);
    const auto number = static_cast<uint64_t>(digit - '0');
    length = length > (kMost - number) / 10 ? kMost : length * 10 + number;
  }
  request_.content_length = length;
}

void HttpRequestParser::end_head() {
  request_.path = at(path_);
  request_.host = at(host_);
  request_.authorization = at(authorization_);
  request_.content_type = at(content_type_);
  request_.content_encoding = at(content_encoding_);
  request_.origin = at(origin_);
  request_.expect = at(expect_);
  request_.request_id = at(request_id_);
  request_.is_chunked = has_encoding_;
  request_.keeps_alive = !asks_close_ && (request_.version == 11 || asks_keep_alive_);
  const bool is_old = request_.version == 10;
  num_headers_ = 0;  // trailers are counted anew
  remaining_bytes_ = request_.content_length;
  if (has_encoding_) {
    state_ = State::chunk_size;
  } else {
    state_ = remaining_bytes_ > 0 ? State::fixed_body : State::complete;
  }
  if (!is_old && !has_host_) return fail(HttpFault::missing_host);
  if (has_encoding_ && has_length_) return fail(HttpFault::length_and_encoding);
  if (has_encoding_ && is_old) return fail(HttpFault::encoding_in_old_version);
  if (!is_encoding_known_) return fail(HttpFault::unknown_transfer_coding);
  if (request_.content_length > limits_.max_body_bytes) return fail(HttpFault::body_too_large);
  if (remaining_bytes_ <= kKeptBodyBytes) body_.reserve(remaining_bytes_);
}

// "<hex digits>[;extensions]"
void HttpRequestParser::read_chunk_size(std::string_view line) {
  const size_t num_digits = std::min(line.find(';'), line.size());
  if (num_digits == 0 || num_digits > 15 || !is_field_text(line)) {
    return fail(HttpFault::malformed_chunk);
  }
  uint64_t size = 0;
  for (const char digit : line.substr(0, num_digits)) {
    const int value = hex_value(digit);
    if (value < 0) return fail(HttpFault::malformed_chunk);
    size = size * 16 + static_cast<uint64_t>(value);
  }
  if (size > limits_.max_body_bytes - body_.size()) return fail(HttpFault::body_too_large);
  remaining_bytes_ = size;
  state_ = size > 0 ? State::chunk_data : State::trailer_line;
}

void HttpRequestParser::fail(HttpFault fault) {
  if (fault_ == HttpFault::none) fault_ = fault;
  if (state_ == State::request_line) {  // the answer to HEAD has no body, whatever is wrong
    const std::string_view line = std::string_view(head_).substr(line_begin_);
    request_.method = method_from_name(line.substr(0, line.find(' ')));
  }
}

HttpRequestParser::Place HttpRequestParser::place_of(std::string_view text) const {
  return {static_cast<uint32_t>(text.data() - head_.data()), static_cast<uint32_t>(text.size())};
}

}  // namespace blink
