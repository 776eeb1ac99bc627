#include "frontend/detokenizer_thread.h"

#include <sys/prctl.h>

#include <algorithm>

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
      return server_error(503, "epoch", "The front end was replaced while this request ran.");
    case BLINK_ERROR_OUT_OF_PAGES:
      return server_error(500, "out_of_pages", "The request can never fit in the KV cache.");
    default:
      return server_error(500, "failed", "The request failed.");
  }
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
  is_stopping_.store(true, std::memory_order_relaxed);
  events_bell_.ring();
  thread_.join();
}

void DetokenizerThread::run() {
  ::prctl(PR_SET_NAME, "blink-detok");
  TokenEvent event;
  while (true) {
    const uint32_t seen = events_bell_.value();
    while (events_.pop(event)) handle(event);
    if (has_pushed_) {
      has_pushed_ = false;
      wake_network_();
    }
    if (is_stopping_.load(std::memory_order_relaxed)) break;
    events_bell_.wait(seen);
  }
}

void DetokenizerThread::handle(const TokenEvent& event) {
  Generation& generation = *event.generation;
  if (event.num_tokens > 0 && !generation.is_answered) take_tokens(generation, event, Clock::now());
  if (event.ending == Ending::none) return;
  if (!generation.is_answered) end(generation, event);
  metrics_.requests_running.fetch_sub(1, std::memory_order_relaxed);
  // The last use of the pipeline; the network thread may hold another reference.
  const std::shared_ptr<Generation> last = std::move(generation.pipeline_reference);
}

void DetokenizerThread::take_tokens(Generation& generation, const TokenEvent& event,
                                    Clock::time_point now) {
  // Tokens that came in one poll share its time.
  const bool is_first = generation.num_output_tokens == 0;
  if (is_first) {
    generation.first_token_at = now;
    const uint64_t ttft_ns = ns_between(generation.submitted_at, now);
    generation.ttft_ns.store(ttft_ns, std::memory_order_relaxed);
    metrics_.ttft.observe_ns(ttft_ns);
  }
  const uint64_t ns = is_first ? 0 : ns_between(generation.last_token_at, now) / event.num_tokens;
  metrics_.itl.observe_ns(ns, is_first ? event.num_tokens - 1u : event.num_tokens);
  generation.last_token_at = now;
  metrics_.output_tokens.add(event.num_tokens);
  for (uint32_t i = 0; i < event.num_tokens && !generation.is_answered; ++i) {
    take_token(generation, event.token_ids[i]);
  }
  generation.num_seen_tokens.store(generation.num_output_tokens, std::memory_order_relaxed);
  if (!generation.is_answered) publish(generation, false);
}

void DetokenizerThread::take_token(Generation& generation, uint32_t token_id) {
  const bool is_first = generation.num_output_tokens++ == 0;
  const auto& stops = generation.stop_token_ids;
  piece_.clear();
  shown_.clear();
  if (std::find(stops.begin(), stops.end(), token_id) == stops.end()) {
    generation.decoder->append(token_id, piece_);
  }
  const bool has_stopped = generation.matcher.feed(piece_, shown_);
  if (!generation.streams) {
    generation.text += shown_;
  } else if (!shown_.empty() || is_first) {
    generation.writer.append_text_event(shown_, bytes_);
  }
  if (has_stopped) {
    generation.is_abort_requested.store(true, std::memory_order_relaxed);
    answer(generation, "stop");
  }
}

void DetokenizerThread::end(Generation& generation, const TokenEvent& event) {
  switch (event.ending) {
    case Ending::none:
      return;
    case Ending::stop:
    case Ending::length: {
      piece_.clear();
      shown_.clear();
      generation.decoder->flush(piece_);
      const bool has_stopped = generation.matcher.feed(piece_, shown_);
      if (!has_stopped) generation.matcher.flush(shown_);
      if (!generation.streams) {
        generation.text += shown_;
      } else if (!shown_.empty()) {
        generation.writer.append_text_event(shown_, bytes_);
      }
      answer(generation, has_stopped || event.ending == Ending::stop ? "stop" : "length");
      return;
    }
    case Ending::aborted:
      metrics_.requests_aborted.add();
      generation.is_answered = true;
      fail(generation, server_error(503, "aborted", "The request was aborted."));
      return;
    case Ending::failed:
      fail(generation, error_of_owner(event.error));
      return;
    case Ending::stalled:
      fail(generation, server_error(503, "stalled", "The scheduler makes no progress."));
      return;
    case Ending::mismatch:
      fail(generation, server_error(500, "mismatch", "The request's slot was taken from it."));
      return;
  }
}

// The answer is complete; whatever tokens follow are dropped.
void DetokenizerThread::answer(Generation& generation, const char* finish_reason) {
  generation.is_answered = true;
  generation.num_seen_tokens.store(generation.num_output_tokens, std::memory_order_relaxed);
  const Usage usage{generation.num_prompt_tokens, generation.num_output_tokens};
  if (generation.streams) {
    generation.writer.append_final_events(finish_reason, usage, bytes_);
  } else {
    generation.writer.append_response(generation.text, finish_reason, usage, bytes_);
  }
  (finish_reason[0] == 's' ? metrics_.requests_stopped : metrics_.requests_at_length).add();
  metrics_.e2e.observe_ns(ns_between(generation.submitted_at, Clock::now()));
  if (generation.num_output_tokens > 1) {
    metrics_.tpot.observe_ns(ns_between(generation.first_token_at, generation.last_token_at) /
                             (generation.num_output_tokens - 1));
  }
  publish(generation, true);
}

void DetokenizerThread::fail(Generation& generation, ApiError error) {
  if (!generation.is_answered) metrics_.requests_failed.add();
  generation.is_answered = true;
  if (generation.streams && generation.writer.has_begun()) {
    generation.writer.append_error_events(error, bytes_);
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
    if (generation.output.size() + bytes_.size() > generation.max_buffered_bytes) {
      // The client does not read. What it has is cut off; the connection will be closed.
      generation.failure = server_error(500, "slow_reader", "The client reads too slowly.");
      generation.is_abort_requested.store(true, std::memory_order_relaxed);
      generation.is_answered = true;
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
