// What a client is told when a request fails: OpenAI's error object and its HTTP status.
#ifndef BLINK_FRONTEND_API_ERROR_H
#define BLINK_FRONTEND_API_ERROR_H

#include <string>
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

inline ApiError stopping_error() { return retry_error(503, "stopping", "The server is stopping."); }

// {"error": {...}}
std::string json_from_error(const ApiError& error);

}  // namespace blink

#endif  // BLINK_FRONTEND_API_ERROR_H
