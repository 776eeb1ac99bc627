#include "frontend/metrics.h"

#include <cstdio>

namespace blink {
namespace {

// By BLINK_GRAPH_*.
constexpr std::array<std::string_view, 2> kKindLabels = {"kind=\"prefill\"", "kind=\"decode\""};

void append_value(std::string_view name, std::string_view labels, double value, std::string& out) {
  char number[32];
  std::snprintf(number, sizeof(number), " %.15g\n", value);
  out.append(name).append(labels).append(number);
}

void append_header(std::string_view name, std::string_view type, std::string_view help,
                   std::string& out) {
  out.append("# HELP ").append(name).append(" ").append(help).append("\n# TYPE ");
  out.append(name).append(" ").append(type).append("\n");
}

void append_metric(std::string_view name, std::string_view type, std::string_view help,
                   double value, std::string& out) {
  append_header(name, type, help, out);
  append_value(name, "", value, out);
}

void append_ring(const blink_ring_header& header, std::string& out) {
  const blink_counters& c = header.counters;
  struct Row {
    const char* name;
    const char* type;
    const char* help;
    uint64_t value;
  };
  const Row rows[] = {
      {"blink_steps_total", "counter", "Graphs launched and finished", c.steps},
      {"blink_prefill_steps_total", "counter", "Prefill steps", c.prefill_steps},
      {"blink_decode_steps_total", "counter", "Decode steps", c.decode_steps},
      {"blink_off_cache_steps_total", "counter", "Steps whose exact bucket was missing",
       c.off_cache_steps},
      {"blink_scheduler_prompt_tokens_total", "counter", "Tokens prefilled, resumed ones included",
       c.prompt_tokens},
      {"blink_scheduler_output_tokens_total", "counter", "Tokens sampled", c.output_tokens},
      {"blink_scheduler_admitted_total", "counter", "Requests that got a lane", c.admitted},
      {"blink_scheduler_paused_total", "counter", "Requests paused for want of pages", c.paused},
      {"blink_scheduler_resumed_total", "counter", "Requests resumed", c.resumed},
      {"blink_checksum_retries_total", "counter", "Payloads read again", c.checksum_retries},
      {"blink_max_wait_steps", "gauge",
       "Prefill steps in a row that decoding lanes waited for, at most", c.max_wait_steps},
      {"blink_late_commands_total", "counter", "Commands for a request that was over",
       c.late_commands},
      {"blink_lanes_running", "gauge", "Lanes in use", c.lanes_running},
      {"blink_requests_waiting", "gauge", "Requests without a lane", c.requests_waiting},
      {"blink_pages_free", "gauge", "KV pages free", c.pages_free},
      {"blink_pages", "gauge", "KV pages", c.pages_total},
      {"blink_heartbeat_total", "counter", "The scheduler's heartbeat", header.heartbeat},
      {"blink_launch_error", "gauge", "Last error of a graph launch, 0: none", header.launch_error},
      {"blink_launch_error_key", "gauge", "Index of the graph key whose launch failed last",
       header.launch_error_key},
  };
  for (const Row& row : rows) {
    append_metric(row.name, row.type, row.help, static_cast<double>(row.value), out);
  }
}

}  // namespace

void Histogram::observe(uint64_t value, uint64_t count) {
  const double scaled = static_cast<double>(value) * unit_;
  size_t bucket = 0;
  while (bucket < bounds_.size() && scaled > bounds_[bucket]) ++bucket;
  buckets_[bucket].add(count);
  sum_.add(value * count);
}

void Histogram::append_text(std::string_view name, std::string_view help, std::string& out) const {
  append_header(name, "histogram", help, out);
  append_samples(name, "", out);
}

void Histogram::append_samples(std::string_view name, std::string_view label,
                               std::string& out) const {
  const std::string before = label.empty() ? std::string() : std::string(label) + ",";
  const std::string labels = label.empty() ? std::string() : "{" + std::string(label) + "}";
  const std::string bucket_name = std::string(name) + "_bucket";
  uint64_t cumulative = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    cumulative += buckets_[i].value();
    char bound[32];
    std::snprintf(bound, sizeof(bound), "le=\"%g\"}", bounds_[i]);
    append_value(bucket_name, "{" + before + bound, static_cast<double>(cumulative), out);
  }
  cumulative += buckets_[bounds_.size()].value();
  append_value(bucket_name, "{" + before + "le=\"+Inf\"}", static_cast<double>(cumulative), out);
  append_value(std::string(name) + "_sum", labels, static_cast<double>(sum_.value()) * unit_, out);
  append_value(std::string(name) + "_count", labels, static_cast<double>(cumulative), out);
}

std::string Metrics::prometheus_text(const blink_ring_header* header, bool is_healthy) const {
  std::string out;
  append_metric("blink_healthy", "gauge", "1 while the scheduler's heart beats", is_healthy ? 1 : 0,
                out);
  const auto gauge = [](const std::atomic<int64_t>& value) {
    return static_cast<double>(value.load(std::memory_order_relaxed));
  };
  append_metric("blink_connections_open", "gauge", "Open connections", gauge(connections_open),
                out);
  append_metric("blink_requests_running", "gauge", "Requests in the ring", gauge(requests_running),
                out);
  const auto count = [&out](const char* name, const char* help, const Counter& counter) {
    append_metric(name, "counter", help, static_cast<double>(counter.value()), out);
  };
  count("blink_connections_accepted_total", "Connections accepted", connections_accepted);
  count("blink_connections_refused_total", "Connections over the limit", connections_refused);
  append_header("blink_requests_total", "counter", "Requests by how they ended", out);
  const auto ending = [&out](const char* label, const Counter& counter) {
    append_value("blink_requests_total", label, static_cast<double>(counter.value()), out);
  };
  ending("{finish_reason=\"stop\"}", requests_stopped);
  ending("{finish_reason=\"length\"}", requests_at_length);
  ending("{finish_reason=\"abort\"}", requests_aborted);
  ending("{finish_reason=\"error\"}", requests_failed);
  count("blink_prompt_tokens_total", "Prompt tokens of submitted requests", prompt_tokens);
  count("blink_output_tokens_total", "Output tokens read from the ring", output_tokens);
  count("blink_sequence_mismatches_total", "Output that was not the request's own",
        sequence_mismatches);
  count("blink_ring_attachments_total", "Rings found again after a loss", ring_attachments);
  ttft.append_text("blink_ttft_seconds", "Submission to first token", out);
  tpot.append_text("blink_tpot_seconds", "Time per output token of a request after its first", out);
  itl.append_text("blink_itl_seconds", "Between two tokens of a request", out);
  e2e.append_text("blink_e2e_seconds", "Submission to last token", out);
  append_header("blink_step_seconds", "histogram", "Steps by kind, from the scheduler's trace",
                out);
  for (size_t kind = 0; kind < steps.size(); ++kind) {
    steps[kind].seconds.append_samples("blink_step_seconds", kKindLabels[kind], out);
  }
  append_header("blink_step_lanes", "histogram", "Requests in a step, by kind", out);
  for (size_t kind = 0; kind < steps.size(); ++kind) {
    steps[kind].lanes.append_samples("blink_step_lanes", kKindLabels[kind], out);
  }
  count("blink_steps_missed_total", "Trace records overwritten before they were read",
        steps_missed);
  if (header != nullptr) append_ring(*header, out);
  return out;
}

}  // namespace blink
