#include "frontend/http_metrics.h"

#include <algorithm>

namespace blink {
namespace {

void append_header(std::string_view name, std::string_view help, std::string& out) {
  out.append("# HELP ").append(name).append(" ").append(help);
  out.append("\n# TYPE ").append(name).append(" counter\n");
}

void append_value(std::string_view name, std::string_view label, const Counter& counter,
                  std::string& out) {
  out.append(name).append(label).append(" ").append(std::to_string(counter.value())).append("\n");
}

}  // namespace

void HttpMetrics::count_response(int status) {
  const auto* found = std::find(kStatuses.begin(), kStatuses.end(), status);
  responses[static_cast<size_t>(found - kStatuses.begin())].add();
}

void HttpMetrics::append_text(std::string& out) const {
  constexpr std::string_view kResponses = "blink_http_responses_total";
  append_header(kResponses, "HTTP responses by status", out);
  for (size_t i = 0; i < kStatuses.size(); ++i) {
    append_value(kResponses, "{status=\"" + std::to_string(kStatuses[i]) + "\"}", responses[i],
                 out);
  }
  append_value(kResponses, "{status=\"other\"}", responses.back(), out);
  const auto count = [&out](const char* name, const char* help, const Counter& counter) {
    append_header(name, help, out);
    append_value(name, "", counter, out);
  };
  count("blink_connections_over_share_total", "Connections over the limit of their address",
        connections_over_share);
  count("blink_tls_failures_total", "TLS connections without a good handshake", tls_failures);
  count("blink_access_log_dropped_total", "Log lines that the file did not take in time",
        access_log_dropped);
  count("blink_reloads_total", "Reloads of keys, certificate and log", reloads);
}

}  // namespace blink
