// Writes the bodies of OpenAI responses: SSE events of a stream, or one JSON object.
#ifndef BLINK_FRONTEND_RESPONSE_WRITER_H
#define BLINK_FRONTEND_RESPONSE_WRITER_H

#include <cstdint>
#include <string>
#include <string_view>

#include "frontend/api_error.h"

namespace blink {

struct Usage {
  uint32_t num_prompt_tokens;
  uint32_t num_output_tokens;
};

// Appends `text` (valid UTF-8) as the inside of a JSON string.
void append_json_escaped(std::string_view text, std::string& out);

// The constant part of every event is made once, so an event costs two copies and one escaping.
class ResponseWriter {
 public:
  struct Options {
    std::string id;
    std::string model;
    int64_t created_s = 0;  // Unix time
    bool is_chat = false;
    bool includes_usage = false;
  };

  ResponseWriter() = default;
  explicit ResponseWriter(Options options);

  // Stream. The first text event of a chat carries the role. Hot path: no allocation once `out` has
  // grown.
  void append_text_event(std::string_view text, std::string& out);
  void append_final_events(std::string_view finish_reason, Usage usage, std::string& out);
  void append_error_events(const ApiError& error, std::string& out) const;
  bool has_begun() const { return has_begun_; }

  // Not a stream.
  void append_response(std::string_view text, std::string_view finish_reason, Usage usage,
                       std::string& out) const;

 private:
  void append_usage(Usage usage, std::string& out) const;

  Options options_;
  std::string head_;        // up to and with "choices":[
  std::string first_text_;  // head of the first text event
  std::string next_text_;   // head of the others
  std::string text_tail_;   // from the text's end to the event's
  bool has_begun_ = false;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_RESPONSE_WRITER_H
