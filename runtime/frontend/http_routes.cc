#include "frontend/http_routes.h"

#include <algorithm>

namespace blink {
namespace {

bool equals_ignoring_case(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(), [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? static_cast<char>(a + 32) : a) == b;
  });
}

// A form or plain text could come from any web page a user visits.
bool is_json_or_missing(std::string_view content_type) {
  std::string_view type = content_type.substr(0, content_type.find(';'));
  while (type.ends_with(' ') || type.ends_with('\t')) type.remove_suffix(1);
  return type.empty() || equals_ignoring_case(type, "application/json");
}

bool is_allowed(std::string_view origin, const std::vector<std::string>& allowed_origins) {
  return std::any_of(
      allowed_origins.begin(), allowed_origins.end(),
      [origin](const std::string& allowed) { return allowed == "*" || allowed == origin; });
}

}  // namespace

Route route_of_path(std::string_view path) {
  if (path == "/v1/chat/completions") return Route::chat_completions;
  if (path == "/v1/completions") return Route::completions;
  if (path == "/v1/models") return Route::models;
  if (path.starts_with("/v1/models/")) return Route::model;
  if (path == "/health") return Route::health;
  if (path == "/metrics") return Route::metrics;
  if (path == "/openapi.json") return Route::open_api;
  if (path == "/") return Route::chat_page;
  if (path == "*") return Route::server;
  return Route::unknown;
}

bool takes_post(Route route) {
  return route == Route::completions || route == Route::chat_completions;
}

bool is_protected(Route route) {
  return takes_post(route) || route == Route::models || route == Route::model;
}

std::string_view allowed_methods(Route route) {
  if (route == Route::server) return "GET, HEAD, POST, OPTIONS";
  return takes_post(route) ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
}

ApiError http_error(int status, std::string code, std::string message) {
  return ApiError{status, "invalid_request_error", std::move(code), "", std::move(message)};
}

HttpResponse response_of(const ApiError& error) {
  HttpResponse response;
  response.status = error.http_status;
  response.body = json_from_error(error);
  if (error.retry_after_s > 0) {
    response.extra_headers = "Retry-After: " + std::to_string(error.retry_after_s) + "\r\n";
  }
  if (error.http_status == 401) response.extra_headers += "WWW-Authenticate: Bearer\r\n";
  return response;
}

std::string cors_headers(std::string_view origin, const std::vector<std::string>& allowed_origins) {
  if (allowed_origins.empty()) return {};
  std::string headers = "Vary: Origin\r\n";
  if (!origin.empty() && is_allowed(origin, allowed_origins)) {
    headers.append("Access-Control-Allow-Origin: ").append(origin);
    headers += "\r\nAccess-Control-Expose-Headers: X-Request-Id, Retry-After\r\n";
  }
  return headers;
}

bool is_foreign_page(const HttpRequest& request, const std::vector<std::string>& allowed_origins) {
  if (request.origin.empty() || is_allowed(request.origin, allowed_origins)) return false;
  const size_t scheme = request.origin.find("://");
  return scheme == std::string_view::npos || request.origin.substr(scheme + 3) != request.host;
}

std::optional<ApiError> refusal_of_head(const HttpRequest& request, Route route, bool has_key,
                                        const std::vector<std::string>& allowed_origins) {
  if (!request.expect.empty() && !equals_ignoring_case(request.expect, "100-continue")) {
    return http_error(417, "expectation", "Only 'Expect: 100-continue' is understood.");
  }
  if (request.method == HttpMethod::options && route != Route::unknown) return std::nullopt;
  if (is_protected(route) && !has_key) {
    return http_error(401, "invalid_api_key", "Send a valid key as 'Authorization: Bearer KEY'.");
  }
  if (route == Route::unknown) {
    return http_error(404, "not_found",
                      "No such path: " + shortened(printable(request.path)) +
                          "; /openapi.json has all. A client's base_url ends in /v1.");
  }
  const bool is_get = request.method == HttpMethod::get || request.method == HttpMethod::head;
  if (takes_post(route) ? request.method != HttpMethod::post : !is_get) {
    return http_error(405, "method_not_allowed",
                      takes_post(route) ? "Use POST here." : "Use GET here.");
  }
  if (!takes_post(route)) return std::nullopt;
  if (is_foreign_page(request, allowed_origins)) {
    return http_error(
        403, "origin_not_allowed",
        "Pages of " + shortened(printable(request.origin)) +
            " may not use this server; start it with '--cors-origin ORIGIN' to let them.");
  }
  if (!is_json_or_missing(request.content_type)) {
    return http_error(415, "unsupported_media_type",
                      "Send the body as 'Content-Type: application/json'.");
  }
  if (!request.content_encoding.empty() &&
      !equals_ignoring_case(request.content_encoding, "identity")) {
    return http_error(415, "unsupported_content_encoding",
                      "Send the body without a Content-Encoding.");
  }
  return std::nullopt;
}

HttpResponse options_response(Route route, bool is_cors) {
  HttpResponse response;
  response.status = 204;
  const std::string methods(allowed_methods(route));
  response.extra_headers = "Allow: " + methods + "\r\n";
  if (is_cors) {
    response.extra_headers += "Access-Control-Allow-Methods: " + methods +
                              "\r\nAccess-Control-Allow-Headers: *, Authorization\r\n"
                              "Access-Control-Max-Age: 600\r\n";
  }
  return response;
}

}  // namespace blink
