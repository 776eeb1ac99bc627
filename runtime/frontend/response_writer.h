// Writes the bodies of OpenAI responses: SSE events of a stream, or one JSON object.
#ifndef BLINK_FRONTEND_RESPONSE_WRITER_H
#define BLINK_FRONTEND_RESPONSE_WRITER_H

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "frontend/api_error.h"

namespace blink {

struct Usage {
  uint32_t num_prompt_tokens;
  uint32_t num_output_tokens;
};

// A call of a tool, as the client gets it.
struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text
};

// What one choice of a response that is no stream says.
struct ChoiceText {
  std::string_view text;
  std::string_view finish_reason;
  std::string_view logprobs;  // JSON; empty: null
  const std::vector<ToolCall>* tool_calls = nullptr;
};

// Appends `text` (valid UTF-8) as the inside of a JSON string.
void append_json_escaped(std::string_view text, std::string& out);
// With the quotes.
void append_json_string(std::string_view text, std::string& out);
void append_decimal(uint64_t value, std::string& out);

// Writes one choice of a response, and what the response's choices share. The constant part of
// every event is made once, so an event costs two copies and one escaping.
class ResponseWriter {
 public:
  struct Options {
    std::string id;
    std::string model;
    int64_t created_s = 0;  // Unix time
    uint32_t index = 0;     // of the choice
    bool is_chat = false;
    bool includes_usage = false;
    bool has_continuous_usage = false;  // every event carries the usage so far
  };

  ResponseWriter() = default;
  explicit ResponseWriter(Options options);

  const std::string& id() const { return options_.id; }
  uint32_t index() const { return options_.index; }

  // Stream. The first text event of a chat carries the role. `logprobs`: JSON, empty for null.
  // Hot path: no allocation once `out` has grown.
  void append_text_event(std::string_view text, std::string_view logprobs, Usage usage,
                         std::string& out);
  // The beginning of call `call`, with its id and name, or a piece of its arguments.
  void append_call_event(uint32_t call, const ToolCall& begun, Usage usage, std::string& out);
  void append_arguments_event(uint32_t call, std::string_view piece, Usage usage, std::string& out);
  void append_finish_event(std::string_view finish_reason, Usage usage, std::string& out);
  bool has_begun() const { return has_begun_; }

  // Once all choices are finished: the usage, if it was asked for, and the end of the stream.
  void append_stream_end(Usage usage, std::string& out) const;
  static void append_error_events(const ApiError& error, std::string& out);

  // Not a stream: an object of `choices`, then the whole around all of them, separated by commas.
  void append_choice(const ChoiceText& choice, std::string& out) const;
  void append_response(std::string_view choices, Usage usage, std::string& out) const;

 private:
  void append_event_end(Usage usage, std::string& out) const;

  Options options_;
  std::string head_;        // up to and with "choices":[
  std::string choice_;      // head_, then up to and with the index's comma
  std::string first_text_;  // head of the first text event
  std::string next_text_;   // head of the others
  std::string text_tail_;   // from the text's end to the event's, without logprobs
  bool has_begun_ = false;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_RESPONSE_WRITER_H
