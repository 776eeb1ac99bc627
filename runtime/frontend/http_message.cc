#include "frontend/http_message.h"

#include <algorithm>
#include <charconv>
#include <ctime>

namespace blink {
namespace {

void append_number(uint64_t value, int base, std::string& out) {
  char text[24];
  out.append(text, std::to_chars(text, text + sizeof(text), value, base).ptr);
}

void append_start(int status, const HeadContext& context, bool keeps_alive, std::string& out) {
  out += context.http_version == 10 ? "HTTP/1.0 " : "HTTP/1.1 ";
  append_number(static_cast<uint64_t>(status), 10, out);
  out.append(" ").append(status_text(status)).append("\r\nServer: blink\r\nDate: ");
  out.append(context.date).append("\r\nX-Request-Id: ").append(context.request_id).append("\r\n");
  out.append(context.cors_headers);
  if (!keeps_alive) {
    out += "Connection: close\r\n";
  } else if (context.http_version == 10) {
    out += "Connection: keep-alive\r\n";
  }
}

// RFC 3986 section 2.3.
bool is_unreserved(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '.' || c == '_' || c == '~';
}

// The byte that the '%' at `place` and two digits stand for; -1: they are no digits.
int escaped_at(std::string_view text, size_t place) {
  if (place + 2 >= text.size()) return -1;
  const int high = hex_value(text[place + 1]);
  const int low = hex_value(text[place + 2]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace

std::string_view status_text(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
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
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Error";
  }
}

void append_head(const HttpResponse& response, const HeadContext& context, std::string& out) {
  append_start(response.status, context, context.keeps_alive, out);
  if (response.status != 204) {
    out.append("Content-Type: ").append(response.content_type).append("\r\nContent-Length: ");
    append_number(response.body.size(), 10, out);
    out += "\r\n";
  }
  out.append(response.extra_headers).append("\r\n");
}

void append_stream_head(const HeadContext& context, std::string& out) {
  const bool is_old = context.http_version == 10;
  append_start(200, context, context.keeps_alive && !is_old, out);
  out += "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n";
  if (!is_old) out += "Transfer-Encoding: chunked\r\n";
  out += "\r\n";
}

void append_chunk_head(size_t num_bytes, std::string& out) {
  append_number(num_bytes, 16, out);
  out += "\r\n";
}

std::string date_text(int64_t unix_s) {
  const auto time = static_cast<std::time_t>(unix_s);
  std::tm utc{};
  ::gmtime_r(&time, &utc);
  char text[40];  // names of days and months as in the C locale: nothing here sets another
  return std::string(text, std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &utc));
}

int hex_value(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  const int lower = digit | 0x20;
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

std::optional<size_t> decode_unreserved(std::span<char> path) {
  size_t size = 0;
  for (size_t i = 0; i < path.size(); ++i) {
    path[size++] = path[i];
    if (path[i] != '%') continue;
    const int meant = escaped_at({path.data(), path.size()}, i);
    if (meant < 0) return std::nullopt;
    if (is_unreserved(static_cast<char>(meant))) {
      path[size - 1] = static_cast<char>(meant);
    } else {
      path[size++] = path[i + 1];
      path[size++] = path[i + 2];
    }
    i += 2;
  }
  return size;
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const int meant = text[i] == '%' ? escaped_at(text, i) : -1;
    out += meant < 0 ? text[i] : static_cast<char>(meant);
    if (meant >= 0) i += 2;
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

bool is_sane_request_id(std::string_view text) {
  return !text.empty() && text.size() <= 64 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.' || c == ':';
  });
}

}  // namespace blink
