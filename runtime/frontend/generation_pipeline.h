// From a validated request to response bytes: text codec, ring, token reader and detokenizer in one
// place.
#ifndef BLINK_FRONTEND_GENERATION_PIPELINE_H
#define BLINK_FRONTEND_GENERATION_PIPELINE_H

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <variant>

#include "frontend/detokenizer_thread.h"
#include "frontend/front_end_config.h"
#include "frontend/generation.h"
#include "frontend/generation_request.h"
#include "frontend/metrics.h"
#include "frontend/request_parser.h"
#include "frontend/ring_client.h"
#include "frontend/slot_tracker.h"
#include "frontend/step_metrics.h"
#include "frontend/text_codec.h"
#include "frontend/token_reader.h"

namespace blink {

// Renders a chat: the JSON of GenerationRequest::template_input -> prompt, or why not. Called on a
// prepare thread, once a request.
using TemplateRenderer = std::function<std::variant<std::string, ApiError>(const std::string&)>;

class GenerationPipeline {
 public:
  using ReadyQueue = DetokenizerThread::ReadyQueue;

  // `wake_network`: called by the detokenizer when ready() has something.
  GenerationPipeline(const FrontEndConfig& config, std::unique_ptr<Transport> transport,
                     std::shared_ptr<const TextCodec> codec, TemplateRenderer render,
                     std::function<void()> wake_network);

  void start();
  void stop(std::chrono::milliseconds patience);

  RequestLimits request_limits() const;

  // True: prepare() neither blocks nor takes long for this request.
  bool prepares_inline(const GenerationRequest& request) const;
  // Any thread: renders the chat, encodes the text.
  std::optional<ApiError> prepare(GenerationRequest& request) const;

  // Network thread: checks the lengths, takes a slot, writes the request into the ring.
  std::variant<std::shared_ptr<Generation>, ApiError> submit(GenerationRequest& request);

  // Network thread: generations with new output.
  ReadyQueue& ready() { return ready_; }

  Health health() const { return reader_.health(); }
  bool is_healthy() const { return health() == Health::serving; }
  Metrics& metrics() { return metrics_; }
  std::string prometheus_text();
  const RingSizes& ring_sizes() const { return ring_.sizes(); }

 private:
  std::optional<ApiError> check_lengths(const GenerationRequest& request) const;
  uint32_t output_limit(const GenerationRequest& request) const;
  std::variant<std::vector<uint32_t>, ApiError> stop_token_ids(
      const GenerationRequest& request) const;
  std::optional<ApiError> take_slots(Generation& generation);
  std::shared_ptr<Generation> make_generation(GenerationRequest& request,
                                              std::vector<uint32_t> stop_token_ids);
  void set_up_choice(Choice& choice, const GenerationRequest& request, const std::string& id,
                     uint32_t index) const;
  std::string text_of_prompt(const GenerationRequest& request) const;
  std::optional<ApiError> submit_choices(Generation& generation, const GenerationRequest& request);
  std::string random_id(const char* prefix);

  const FrontEndConfig& config_;
  std::shared_ptr<const TextCodec> codec_;
  TemplateRenderer render_;
  RingClient ring_;
  SlotTracker slots_;
  Metrics metrics_;
  SpscQueue<TokenEvent> events_;
  Doorbell events_bell_;
  ReadyQueue ready_;
  DetokenizerThread detokenizer_;
  TokenReader reader_;
  StepMetrics step_metrics_;
  mutable std::atomic<uint32_t> num_rendering_{0};  // relaxed: a hint, it guards no data
  std::vector<blink_slot_status> statuses_;         // the network thread's mirror
  std::mt19937_64 random_;  // network thread: ids, and seeds where a client gave none
};

}  // namespace blink

#endif  // BLINK_FRONTEND_GENERATION_PIPELINE_H
