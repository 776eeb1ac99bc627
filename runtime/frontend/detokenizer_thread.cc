#include "frontend/detokenizer_thread.h"

#include <algorithm>

#include "frontend/urgent_thread.h"

namespace blink {
namespace {

uint64_t ns_between(Clock::time_point from, Clock::time_point to) {
  return static_cast<uint64_t>(std::chrono::nanoseconds(to - from).count());
}

ApiError error_of_owner(uint32_t error) {
  switch (error) {
    case BLINK_ERROR_NAN_LOGITS:
      return server_error(500, "nan_logits", "The model produced NaN for this request.");
    case BLINK_ERROR_CHECKSUM:
      return server_error(500, "checksum", "The request was damaged on its way to the scheduler.");
    case BLINK_ERROR_BAD_REQUEST:
      return server_error(500, "bad_request", "The scheduler refused the request's fields.");
    case BLINK_ERROR_LAUNCH:
      return server_error(500, "launch", "A step of this request could not be launched.");
    case BLINK_ERROR_EPOCH:
      return retry_error(503, "epoch", "The front end was replaced while this request ran.");
    case BLINK_ERROR_OUT_OF_PAGES:
      return server_error(500, "out_of_pages", "The request can never fit in the KV cache.");
    default:
      return server_error(500, "failed", "The request failed.");
  }
}

Usage usage_of(const Generation& generation) {
  return {generation.num_prompt_tokens, generation.num_output_tokens};
}

// Unique as the response's own id is, of which it keeps 20 digits.
std::string call_id(const ResponseWriter& writer, uint32_t number) {
  const std::string& id = writer.id();
  std::string out = "call_";
  out += std::string_view(id).substr(id.size() - std::min<size_t>(id.size(), 20));
  out += static_cast<char>('a' + writer.index());
  append_decimal(number, out);
  return out;
}

}  // namespace

DetokenizerThread::DetokenizerThread(Metrics& metrics, SpscQueue<TokenEvent>& events,
                                     Doorbell& events_bell, ReadyQueue& ready,
                                     std::function<void()> wake_network)
    : metrics_(metrics),
      events_(events),
      events_bell_(events_bell),
      ready_(ready),
      wake_network_(std::move(wake_network)) {}

void DetokenizerThread::start() {
  thread_ = std::thread([this] { run(); });
}

void DetokenizerThread::stop() {
  if (!thread_.joinable()) return;
  is_stopping_.store(true, std::memory_order_release);  // pairs with run(): all events came before
  events_bell_.ring();
  thread_.join();
}

void DetokenizerThread::run() {
  become_urgent_thread("blink-detok");
  TokenEvent event;
  while (true) {
    const uint32_t seen = events_bell_.value();
    const bool is_last = is_stopping_.load(std::memory_order_acquire);  // before the queue's end
    while (events_.pop(event)) handle(event);
    if (has_pushed_) {
      has_pushed_ = false;
      wake_network_();
    }
    if (is_last) break;
    events_bell_.wait(seen);
  }
}

void DetokenizerThread::handle(const TokenEvent& event) {
  Choice& choice = *event.choice;
  Generation& generation = *choice.generation;
  if (event.num_tokens > 0 && !choice.is_answered) take_tokens(choice, event, Clock::now());
  if (event.ending == Ending::none) return;
  if (!choice.is_answered) end(choice, event);
  metrics_.requests_running.fetch_sub(1, std::memory_order_relaxed);
  if (--generation.num_running_choices > 0) return;
  // The last use of the pipeline; the network thread may hold another reference.
  const std::shared_ptr<Generation> last = std::move(generation.pipeline_reference);
}

void DetokenizerThread::take_tokens(Choice& choice, const TokenEvent& event,
                                    Clock::time_point now) {
  Generation& generation = *choice.generation;
  // Tokens that came in one poll share its time.
  const bool is_first = choice.num_output_tokens == 0;
  if (is_first) {
    choice.first_token_at = now;
    const uint64_t ttft_ns = ns_between(generation.submitted_at, now);
    if (generation.num_output_tokens == 0) {
      generation.ttft_ns.store(ttft_ns, std::memory_order_relaxed);
    }
    metrics_.ttft.observe_ns(ttft_ns);
  }
  const uint64_t ns = is_first ? 0 : ns_between(choice.last_token_at, now) / event.num_tokens;
  metrics_.itl.observe_ns(ns, is_first ? event.num_tokens - 1u : event.num_tokens);
  choice.last_token_at = now;
  metrics_.output_tokens.add(event.num_tokens);
  if (choice.logprobs != nullptr) choice.logprobs->take(event.num_tokens);
  for (uint32_t i = 0; i < event.num_tokens && !choice.is_answered; ++i) {
    take_token(choice, event.token_ids[i]);
  }
  generation.num_seen_tokens.store(generation.num_output_tokens, std::memory_order_relaxed);
  if (!choice.is_answered) publish(generation, false);
}

void DetokenizerThread::take_token(Choice& choice, uint32_t token_id) {
  Generation& generation = *choice.generation;
  ++choice.num_output_tokens;
  ++generation.num_output_tokens;
  const auto& stops = generation.stop_token_ids;
  piece_.clear();
  shown_.clear();
  const bool has_text = std::find(stops.begin(), stops.end(), token_id) == stops.end();
  if (has_text) choice.decoder->append(token_id, piece_);
  if (choice.logprobs != nullptr) {
    if (has_text) {
      choice.logprobs->add(token_id, piece_);
    } else {
      choice.logprobs->skip();
    }
  }
  bool has_stopped = false;
  if (choice.num_output_tokens > generation.min_tokens) {
    has_stopped = choice.matcher.feed(piece_, shown_);
  } else {
    shown_ += piece_;
  }
  show(choice, has_stopped);
  if (has_stopped) {
    choice.is_abort_requested.store(true, std::memory_order_relaxed);
    end_text(choice, "stop");
  } else if (choice.tools != nullptr && choice.tools->parser.is_full()) {
    choice.is_abort_requested.store(true, std::memory_order_relaxed);
    answer(choice, "tool_calls");
  }
}

// Brings shown_ to the client, or to the text that it will get.
void DetokenizerThread::show(Choice& choice, bool has_stopped) {
  const Generation& generation = *choice.generation;
  std::string_view logprobs;
  if (choice.logprobs != nullptr) {
    choice.num_shown_bytes += shown_.size();
    if (has_stopped) {
      choice.logprobs->cut(choice.num_shown_bytes);
    } else {
      choice.logprobs->show(choice.num_shown_bytes);
    }
    if (generation.streams) logprobs = choice.logprobs->json();
  }
  if (generation.streams && !generation.echo.empty() && !choice.writer.has_begun()) {
    choice.writer.append_text_event(generation.echo, {}, usage_of(generation), bytes_);
  }
  if (choice.tools != nullptr) {
    show_with_tools(choice, false);
  } else if (!generation.streams) {
    choice.text += shown_;
  } else if (!shown_.empty() || !logprobs.empty() || !choice.writer.has_begun()) {
    choice.writer.append_text_event(shown_, logprobs, usage_of(generation), bytes_);
    if (choice.logprobs != nullptr) choice.logprobs->clear();
  }
}

void DetokenizerThread::show_with_tools(Choice& choice, bool is_end) {
  ToolCallParser& parser = choice.tools->parser;
  pieces_.clear();
  if (is_end) {
    parser.finish(pieces_);
  } else {
    parser.feed(shown_, pieces_);
  }
  for (const ToolPiece& piece : pieces_) show_piece(choice, piece);
  const Generation& generation = *choice.generation;
  if (generation.streams && !choice.writer.has_begun()) {
    choice.writer.append_text_event({}, {}, usage_of(generation), bytes_);
  }
}

void DetokenizerThread::show_piece(Choice& choice, const ToolPiece& piece) {
  std::vector<ToolCall>& calls = choice.tools->calls;
  const bool streams = choice.generation->streams;
  const Usage usage = usage_of(*choice.generation);
  switch (piece.kind) {
    case ToolPiece::Kind::content:
      if (streams) {
        choice.writer.append_text_event(piece.text, {}, usage, bytes_);
      } else {
        choice.text += piece.text;
      }
      return;
    case ToolPiece::Kind::call_begin: {
      const auto number = static_cast<uint32_t>(calls.size());
      calls.push_back({.id = call_id(choice.writer, number), .name = piece.text, .arguments = {}});
      if (streams) choice.writer.append_call_event(number, calls.back(), usage, bytes_);
      return;
    }
    case ToolPiece::Kind::arguments:
      if (streams) {
        const auto number = static_cast<uint32_t>(calls.size() - 1);
        choice.writer.append_arguments_event(number, piece.text, usage, bytes_);
      } else {
        calls.back().arguments += piece.text;
      }
      return;
    case ToolPiece::Kind::call_end:
      return;
    case ToolPiece::Kind::call_lost:
      // What was streamed cannot be taken back: the client has arguments that end early.
      if (streams) return;
      calls.pop_back();
      choice.text += piece.text;
      return;
  }
}

void DetokenizerThread::end(Choice& choice, const TokenEvent& event) {
  Generation& generation = *choice.generation;
  switch (event.ending) {
    case Ending::none:
      return;
    case Ending::stop:
    case Ending::length: {
      piece_.clear();
      shown_.clear();
      choice.decoder->flush(piece_);
      if (choice.logprobs != nullptr) choice.logprobs->add_rest(piece_);
      const bool has_stopped = choice.matcher.feed(piece_, shown_);
      if (!has_stopped) choice.matcher.flush(shown_);
      if (!shown_.empty() || choice.logprobs != nullptr) show(choice, has_stopped);
      end_text(choice, has_stopped || event.ending == Ending::stop ? "stop" : "length");
      return;
    }
    case Ending::aborted:
      metrics_.requests_aborted.add();
      fail(generation,
           retry_error(503, "aborted", "The request was aborted, as the server is stopping."),
           false);
      return;
    case Ending::failed:
      fail(generation, error_of_owner(event.error));
      return;
    case Ending::stalled:
      fail(generation, retry_error(503, "stalled", "The scheduler makes no progress."));
      return;
    case Ending::stopped:
      fail(generation, retry_error(503, "stopped", "The scheduler was stopped."));
      return;
    case Ending::lost:
      fail(generation, retry_error(503, "lost", "The link to the scheduler is lost."));
      return;
    case Ending::mismatch:
      fail(generation, server_error(500, "mismatch", "The request's slot was taken from it."));
      return;
  }
}

// All text was shown; what a beginning call held back follows.
void DetokenizerThread::end_text(Choice& choice, const char* finish_reason) {
  if (choice.tools != nullptr) {
    show_with_tools(choice, true);
    const bool has_calls = choice.tools->parser.num_whole_calls() > 0;
    if (has_calls && finish_reason[0] == 's') finish_reason = "tool_calls";
  }
  answer(choice, finish_reason);
}

// The choice is complete; whatever tokens follow are dropped.
void DetokenizerThread::answer(Choice& choice, const char* finish_reason) {
  Generation& generation = *choice.generation;
  choice.is_answered = true;
  choice.finish_reason = finish_reason;
  generation.num_seen_tokens.store(generation.num_output_tokens, std::memory_order_relaxed);
  const bool is_last = --generation.num_unanswered_choices == 0;
  if (generation.streams) {
    choice.writer.append_finish_event(finish_reason, usage_of(generation), bytes_);
    if (is_last) choice.writer.append_stream_end(usage_of(generation), bytes_);
  } else if (is_last) {
    append_whole_response(generation);
  }
  (finish_reason[0] == 'l' ? metrics_.requests_at_length : metrics_.requests_stopped).add();
  metrics_.e2e.observe_ns(ns_between(generation.submitted_at, Clock::now()));
  if (choice.num_output_tokens > 1) {
    metrics_.tpot.observe_ns(ns_between(choice.first_token_at, choice.last_token_at) /
                             (choice.num_output_tokens - 1));
  }
  publish(generation, is_last);
}

void DetokenizerThread::append_whole_response(Generation& generation) {
  std::string choices;
  generation.for_each_choice([&](Choice& choice) {
    if (!choices.empty()) choices += ',';
    ChoiceText text{.text = choice.text, .finish_reason = choice.finish_reason, .logprobs = {}};
    if (choice.logprobs != nullptr) text.logprobs = choice.logprobs->json();
    if (choice.tools != nullptr) text.tool_calls = &choice.tools->calls;
    choice.writer.append_choice(text, choices);
  });
  generation.first.writer.append_response(choices, usage_of(generation), bytes_);
}

// One choice fails them all: the others are dropped.
void DetokenizerThread::fail(Generation& generation, ApiError error, bool is_counted) {
  const bool is_answered = generation.num_unanswered_choices == 0;
  bool has_begun = false;
  generation.for_each_choice([&](Choice& choice) {
    has_begun |= choice.writer.has_begun();
    choice.is_answered = true;
    choice.is_abort_requested.store(true, std::memory_order_relaxed);
  });
  if (is_answered) return;
  generation.num_unanswered_choices = 0;
  if (is_counted) metrics_.requests_failed.add();
  if (generation.streams && has_begun) {
    ResponseWriter::append_error_events(error, bytes_);
  } else {
    bytes_.clear();
    const std::lock_guard lock(generation.output_mutex);
    generation.failure = std::move(error);
  }
  publish(generation, true);
}

// Hands bytes_ to the network thread, at most once into its queue.
void DetokenizerThread::publish(Generation& generation, bool is_complete) {
  if (bytes_.empty() && !is_complete) return;
  {
    const std::lock_guard lock(generation.output_mutex);
    // A whole answer cannot be read before its end: what it may hold bounds it.
    if (generation.streams &&
        generation.output.size() + bytes_.size() > generation.max_buffered_bytes) {
      // The client does not read. What it has is cut off; the connection will be closed.
      generation.failure = server_error(500, "slow_reader", "The client reads too slowly.");
      generation.is_abort_requested.store(true, std::memory_order_relaxed);
      metrics_.requests_aborted.add(generation.num_unanswered_choices);
      generation.num_unanswered_choices = 0;
      generation.for_each_choice([](Choice& choice) { choice.is_answered = true; });
      is_complete = true;
    } else {
      generation.output += bytes_;
    }
    if (is_complete) generation.is_output_complete = true;
  }
  bytes_.clear();
  // Acquire-release with the network thread's exchange: either it sees these bytes, or we queue it
  // again.
  if (generation.is_queued.exchange(true, std::memory_order_acq_rel)) return;
  while (!ready_.push(generation.shared_from_this())) {
    wake_network_();
    std::this_thread::yield();
  }
  has_pushed_ = true;
}

}  // namespace blink
