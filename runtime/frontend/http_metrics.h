// What the HTTP server itself counts, beside the pipeline's Metrics.
#ifndef BLINK_FRONTEND_HTTP_METRICS_H
#define BLINK_FRONTEND_HTTP_METRICS_H

#include <array>
#include <string>

#include "frontend/metrics.h"

namespace blink {

struct HttpMetrics {
  static constexpr std::array<int, 19> kStatuses = {200, 204, 400, 401, 403, 404, 405,
                                                    408, 413, 414, 415, 417, 429, 431,
                                                    500, 501, 503, 504, 505};
  std::array<Counter, kStatuses.size() + 1> responses;  // by HTTP status; the last: others
  Counter access_log_dropped;
  Counter tls_failures;            // handshakes that did not end well
  Counter reloads;                 // of keys, certificate and log
  Counter connections_over_share;  // refused: their address has max_connections_per_address

  void count_response(int status);
  void append_text(std::string& out) const;  // Prometheus
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_METRICS_H
