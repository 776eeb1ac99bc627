// Everything a user or a bundle decides about a front end.
#ifndef BLINK_FRONTEND_FRONT_END_CONFIG_H
#define BLINK_FRONTEND_FRONT_END_CONFIG_H

#include <cstdint>
#include <string>
#include <vector>

#include "frontend/tool_call_parser.h"

namespace blink {

struct FrontEndConfig {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: any free one
  std::string model_name = "model";
  std::vector<std::string> api_keys;          // with api_key_file empty, none: no key is asked for
  std::string api_key_file;                   // a key or "NAME KEY" in each line; reloadable
  std::string tls_certificate;                // PEM, with its chain; empty: plain HTTP; reloadable
  std::string tls_key;                        // PEM, unencrypted; reloadable
  std::string access_log;                     // file, or - for standard output; empty: none
  std::vector<std::string> cors_origins;      // whose pages may use this server; *: all
  std::vector<uint32_t> eos_token_ids;        // from the bundle
  uint32_t front_end_index = 0;               // which slot range of the ring
  ToolFormat tool_format = ToolFormat::none;  // of the model's calls; none: tools are refused
  std::string target_name;                    // what the bundle runs on, for messages
  bool has_chat_template = true;              // false: chat completions are refused by name
  bool serves_chat_page = true;               // GET /

  uint32_t max_connections = 1024;
  uint32_t max_connections_per_address = 0;  // 0: no such limit; IPv6 counts by /64
  uint32_t max_requests = 4096;              // generations at a time, beside the ring's slots
  uint32_t max_headers = 100;
  uint32_t max_header_bytes = 16 * 1024;
  uint32_t max_body_bytes = 8 * 1024 * 1024;
  uint32_t max_total_body_bytes = 256 * 1024 * 1024;  // of all requests being read or answered
  uint32_t max_json_depth = 32;
  uint32_t max_stop_strings = 16;
  uint32_t max_stop_bytes = 1024;  // of one stop string
  uint32_t max_buffered_bytes =
      4 * 1024 * 1024;  // of one slow reader; past it the request is aborted
  uint32_t header_timeout_ms =
      10'000;  // from accept, or a request's first byte, to its header's end
  uint32_t body_timeout_ms = 30'000;
  uint32_t idle_timeout_ms = 75'000;        // between requests of one connection
  uint32_t write_timeout_ms = 30'000;       // for a client that reads nothing
  uint32_t request_timeout_ms = 3'600'000;  // from a request's first byte to its answer's last
  uint32_t num_prepare_threads = 1;         // chat templates and long prompts
  uint32_t inline_chat_bytes =
      2048;  // chats up to this as JSON are rendered on the network thread; 0: none
  uint32_t inline_prompt_bytes =
      16 * 1024;                        // bodies up to this are tokenized on the network thread
  uint32_t min_poll_interval_us = 20;   // token reader, after a new request
  uint32_t max_poll_interval_us = 200;  // token reader, while requests run
  uint32_t max_polls_per_s = 10'000;    // token reader, on average; see poll_pacer.h
  uint32_t stall_timeout_ms =
      2'000;  // heartbeat silent for this, or four of the longest steps: unhealthy
};

// Throws std::invalid_argument naming the field.
void check_front_end_config(const FrontEndConfig& config);

}  // namespace blink

#endif  // BLINK_FRONTEND_FRONT_END_CONFIG_H
