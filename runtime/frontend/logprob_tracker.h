// The logprobs of one choice on their way: records from the ring -> JSON beside the text that they
// belong to.
#ifndef BLINK_FRONTEND_LOGPROB_TRACKER_H
#define BLINK_FRONTEND_LOGPROB_TRACKER_H

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "blink/abi.h"
#include "frontend/text_codec.h"

namespace blink {

// A token is told once its text is certain to be shown, and not at all where a stop string cut it
// off; stop tokens have no text and are not told. Offsets count code points of the choice's text.
class LogprobTracker {
 public:
  LogprobTracker(std::shared_ptr<const TextCodec> codec, bool is_chat, uint32_t num_top)
      : codec_(std::move(codec)), is_chat_(is_chat), num_top_(num_top) {}

  // Token reader: the records of the tokens that it is about to announce.
  void put(const blink_output_record* records, uint32_t count);

  // Detokenizer from here on. Takes the records of the next tokens announced, in order.
  void take(uint32_t count);
  // The next token of those, which made the decoder give `piece`.
  void add(uint32_t token_id, std::string_view piece);
  // The next token is a stop token: skipped.
  void skip();
  // Text was decoded that no token made: the decoder's rest.
  void add_rest(std::string_view piece) { num_decoded_bytes_ += piece.size(); }
  // The text is certain up to here, in bytes since the beginning.
  void show(uint64_t num_shown_bytes);
  // A stop string was found: only what is shown has begun before `num_shown_bytes`.
  void cut(uint64_t num_shown_bytes);

  // What may be told and was not: JSON, empty if nothing. A stream asks for each event.
  std::string_view json();
  void clear();

 private:
  struct Pending {
    blink_output_record record;
    uint64_t begin_bytes;
    uint64_t end_bytes;  // of the text that was certain with this token
    uint64_t offset;     // code points before it
  };

  void tell(const Pending& pending);
  void tell_chat(const blink_output_record& record);
  void append_token(uint32_t token_id, std::string& out);
  void append_chat_token(uint32_t token_id, float logprob, std::string& out);

  std::shared_ptr<const TextCodec> codec_;
  bool is_chat_;
  uint32_t num_top_;
  std::mutex mutex_;                        // guards inbox_, for the length of a copy
  std::vector<blink_output_record> inbox_;  // read, not announced
  std::vector<blink_output_record> taken_;  // announced; the first next_ are done with
  size_t next_ = 0;
  std::deque<Pending> pending_;
  uint64_t num_decoded_bytes_ = 0;
  uint64_t num_decoded_points_ = 0;
  std::string bytes_;  // of one token
  // JSON so far. Chats use the first only; completions have parallel lists.
  std::string tokens_;
  std::string token_logprobs_;
  std::string top_logprobs_;
  std::string offsets_;
  std::string whole_;
};

// JSON has neither infinities nor NaN: what is impossible is -9999, as OpenAI says it.
void append_logprob(float logprob, std::string& out);

}  // namespace blink

#endif  // BLINK_FRONTEND_LOGPROB_TRACKER_H
