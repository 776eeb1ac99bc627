// What a client is told when a request fails: OpenAI's error object and its HTTP status.
#ifndef BLINK_FRONTEND_API_ERROR_H
#define BLINK_FRONTEND_API_ERROR_H

#include <string>
#include <string_view>
#include <utility>

namespace blink {

struct ApiError {
  int http_status = 500;
  std::string type;   // "invalid_request_error", "server_error", ...
  std::string code;   // empty: null
  std::string param;  // empty: null
  std::string message;
  int retry_after_s = 0;  // 0: no Retry-After
};

inline ApiError bad_request(std::string param, std::string message,
                            std::string code = "invalid_value") {
  return ApiError{400, "invalid_request_error", std::move(code), std::move(param),
                  std::move(message)};
}

inline ApiError server_error(int http_status, std::string code, std::string message) {
  return ApiError{http_status, "server_error", std::move(code), "", std::move(message)};
}

// A server_error that will soon be over.
inline ApiError retry_error(int http_status, std::string code, std::string message) {
  ApiError error = server_error(http_status, std::move(code), std::move(message));
  error.retry_after_s = 1;
  return error;
}

// There is no room for the request at present.
inline ApiError rate_limit_error(std::string code, std::string message) {
  return ApiError{429, "rate_limit_error", std::move(code), "", std::move(message), 1};
}

inline ApiError stopping_error() { return retry_error(503, "stopping", "The server is stopping."); }

// Of plain HTTP where TLS is served.
inline ApiError plain_http_error() {
  return bad_request("", "This port speaks TLS: use https://.", "plain_http");
}

// What an error may quote of a client's own text: its beginning, cut between two code points, and
// "..." for the rest.
inline std::string shortened(std::string_view text, size_t max_bytes = 128) {
  if (text.size() <= max_bytes) return std::string(text);
  while (max_bytes > 0 && (static_cast<unsigned char>(text[max_bytes]) & 0xC0) == 0x80) --max_bytes;
  return std::string(text.substr(0, max_bytes)) + "...";
}

// {"error": {...}}, of a few KiB at most.
std::string json_from_error(const ApiError& error);

}  // namespace blink

#endif  // BLINK_FRONTEND_API_ERROR_H
