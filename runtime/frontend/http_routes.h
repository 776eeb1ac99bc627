// Which paths there are, which methods they take, and who may ask from where: pure functions.
#ifndef BLINK_FRONTEND_HTTP_ROUTES_H
#define BLINK_FRONTEND_HTTP_ROUTES_H

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "frontend/api_error.h"
#include "frontend/http_message.h"
#include "frontend/http_request.h"

namespace blink {

enum class Route {
  unknown,
  server,  // the * of OPTIONS
  chat_page,
  health,
  metrics,
  open_api,
  models,
  model,
  completions,
  chat_completions,
};

Route route_of_path(std::string_view path);

// POST for what generates, GET and HEAD for the rest.
bool takes_post(Route route);

// Whether a key is asked for, where there are keys.
bool is_protected(Route route);

// "GET, HEAD, OPTIONS" or "POST, OPTIONS".
std::string_view allowed_methods(Route route);

// Error of HTTP itself, in OpenAI's shape.
ApiError http_error(int status, std::string code, std::string message);

HttpResponse response_of(const ApiError& error);

// Headers that let pages of `origin` read the answer; empty where nobody asked for CORS.
std::string cors_headers(std::string_view origin, const std::vector<std::string>& allowed_origins);

// Whether a page of another server sends this: its user does not know. Pages of the allowed origins
// may, and those that this server sent itself (Origin is where Host says).
bool is_foreign_page(const HttpRequest& request, const std::vector<std::string>& allowed_origins);

// What is wrong with the head alone: method, path, key (`has_key`), origin, content type,
// expectation. Nothing: the body is worth reading.
std::optional<ApiError> refusal_of_head(const HttpRequest& request, Route route, bool has_key,
                                        const std::vector<std::string>& allowed_origins);

// To OPTIONS.
HttpResponse options_response(Route route, bool is_cors);

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_ROUTES_H
