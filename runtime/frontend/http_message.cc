#include "frontend/http_message.h"

#include <charconv>
#include <cstdio>

namespace blink {
namespace {

std::string start_of_head(int status, unsigned http_version, bool keeps_alive) {
  std::string head = http_version == 10 ? "HTTP/1.0 " : "HTTP/1.1 ";
  head += std::to_string(status);
  head += ' ';
  head += status_text(status);
  head += "\r\nServer: blink\r\n";
  if (!keeps_alive) {
    head += "Connection: close\r\n";
  } else if (http_version == 10) {
    head += "Connection: keep-alive\r\n";
  }
  return head;
}

// Compares all bytes whatever the first difference.
bool equals_in_constant_time(std::string_view given, std::string_view expected) {
  unsigned difference = given.size() == expected.size() ? 0 : 1;
  for (size_t i = 0; i < expected.size(); ++i) {
    const char byte = given.empty() ? '\0' : given[i % given.size()];
    difference |= static_cast<unsigned char>(byte) ^ static_cast<unsigned char>(expected[i]);
  }
  return difference == 0;
}

}  // namespace

std::string_view status_text(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 411:
      return "Length Required";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Error";
  }
}

std::string head_of_response(const HttpResponse& response, unsigned http_version,
                             bool keeps_alive) {
  std::string head = start_of_head(response.status, http_version, keeps_alive);
  head += "Content-Type: " + response.content_type + "\r\n";
  head += "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
  head += response.extra_headers;
  head += "\r\n";
  return head;
}

std::string head_of_stream(unsigned http_version, bool keeps_alive) {
  std::string head = start_of_head(200, http_version, keeps_alive && http_version != 10);
  head += "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n";
  if (http_version != 10) head += "Transfer-Encoding: chunked\r\n";
  head += "\r\n";
  return head;
}

std::string chunk_head(size_t num_bytes) {
  char text[24];
  const int length = std::snprintf(text, sizeof(text), "%zx\r\n", num_bytes);
  return std::string(text, static_cast<size_t>(length));
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    const char* begin = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(begin, begin + 2, value, 16).ptr == begin + 2) {
      out += static_cast<char>(value);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string printable(std::string_view text) {
  std::string out(text);
  for (char& byte : out) {
    if (byte < 0x20 || byte > 0x7e) byte = '?';
  }
  return out;
}

bool has_valid_key(std::string_view authorization, const std::vector<std::string>& api_keys) {
  if (api_keys.empty()) return true;
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() < kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    if ((authorization[i] | 0x20) != (kScheme[i] | 0x20)) return false;
  }
  const std::string_view key = authorization.substr(kScheme.size());
  bool is_valid = false;
  for (const std::string& expected : api_keys) is_valid |= equals_in_constant_time(key, expected);
  return is_valid;
}

}  // namespace blink
