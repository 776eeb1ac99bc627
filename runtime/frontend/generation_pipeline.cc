#include "frontend/generation_pipeline.h"

#include <algorithm>
#include <ctime>

namespace blink {
namespace {

constexpr size_t kEventsPerSlot = 8;

std::mt19937_64 seeded_generator() {
  std::random_device device;
  std::seed_seq seed{device(), device(), device(), device(), device(), device()};
  return std::mt19937_64(seed);
}

// Counts what is under way, until it returns or throws.
class Counted {
 public:
  explicit Counted(std::atomic<uint32_t>& count) : count_(count) {
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Counted() { count_.fetch_sub(1, std::memory_order_relaxed); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<uint32_t>& count_;
};

uint32_t pages_of(uint64_t num_tokens, uint32_t page_size_tokens) {
  return static_cast<uint32_t>((num_tokens + page_size_tokens - 1) / page_size_tokens);
}

blink_slot_request ring_request(const GenerationRequest& request, uint32_t max_output_tokens,
                                uint64_t seed, const std::vector<uint32_t>& stop_token_ids) {
  blink_slot_request out{};
  out.seed = seed;
  out.max_output_tokens = max_output_tokens;
  out.flags = request.ignores_eos ? BLINK_REQUEST_IGNORE_EOS : 0;
  out.temperature = request.temperature;
  out.top_p = request.top_p;
  out.min_p = request.min_p;
  out.top_k = request.top_k;
  out.presence_penalty = request.presence_penalty;
  out.frequency_penalty = request.frequency_penalty;
  out.repetition_penalty = request.repetition_penalty;
  out.min_output_tokens = request.min_tokens;
  out.num_logprobs = request.num_top_logprobs ? 1 + *request.num_top_logprobs : 0;
  out.num_logit_bias = static_cast<uint32_t>(request.logit_bias.size());
  for (size_t i = 0; i < request.logit_bias.size(); ++i) {
    out.logit_bias_ids[i] = request.logit_bias[i].first;
    out.logit_bias_values[i] = request.logit_bias[i].second;
  }
  out.num_stop_token_ids = static_cast<uint32_t>(stop_token_ids.size());
  std::copy(stop_token_ids.begin(), stop_token_ids.end(), out.stop_token_ids);
  return out;
}

}  // namespace

GenerationPipeline::GenerationPipeline(const FrontEndConfig& config,
                                       std::unique_ptr<Transport> transport,
                                       std::shared_ptr<const TextCodec> codec,
                                       TemplateRenderer render, std::function<void()> wake_network)
    : config_(config),
      codec_(std::move(codec)),
      render_(std::move(render)),
      ring_(std::move(transport), config.front_end_index),
      slots_(ring_.num_slots()),
      events_(ring_.num_slots() * kEventsPerSlot),
      ready_(ring_.num_slots() * 2),
      detokenizer_(metrics_, events_, events_bell_, ready_, std::move(wake_network)),
      reader_(config, ring_, slots_, metrics_, events_, events_bell_),
      step_metrics_(ring_.transport(), ring_.sizes(), metrics_),
      statuses_(ring_.num_slots()),
      random_(seeded_generator()) {}

void GenerationPipeline::start() {
  detokenizer_.start();
  reader_.start();
  step_metrics_.start();
}

void GenerationPipeline::stop(std::chrono::milliseconds patience) {
  reader_.stop(patience);  // emits the last events, so the detokenizer ends after it
  detokenizer_.stop();
  step_metrics_.stop();
  ring_.close();
}

RequestLimits GenerationPipeline::request_limits() const {
  RequestLimits limits;
  limits.vocab_size = ring_.sizes().vocab_size;
  limits.sampler_features = ring_.sizes().sampler_features;
  limits.max_json_depth = config_.max_json_depth;
  limits.max_stop_strings = config_.max_stop_strings;
  limits.max_stop_bytes = config_.max_stop_bytes;
  limits.has_chat_template = config_.has_chat_template;
  limits.has_tools = config_.tool_format != ToolFormat::none;
  limits.target_name = config_.target_name;
  limits.max_choices = std::min(limits.max_choices, ring_.num_slots());
  return limits;
}

bool GenerationPipeline::prepares_inline(const GenerationRequest& request) const {
  if (request.is_chat) {
    // A short template costs less than going to a prepare thread and back; but never wait here for
    // one that renders a long chat and has Python's lock.
    return codec_->encodes_inline() && request.template_input.size() <= config_.inline_chat_bytes &&
           num_rendering_.load(std::memory_order_relaxed) == 0;
  }
  if (request.has_token_ids) return true;
  return codec_->encodes_inline() && request.prompt_text.size() <= config_.inline_prompt_bytes;
}

std::optional<ApiError> GenerationPipeline::prepare(GenerationRequest& request) const try {
  if (request.has_token_ids) return std::nullopt;
  if (request.is_chat) {
    const Counted counted(num_rendering_);
    std::variant<std::string, ApiError> rendered = render_(request.template_input);
    if (auto* error = std::get_if<ApiError>(&rendered)) return std::move(*error);
    request.prompt_text = std::move(std::get<std::string>(rendered));
  }
  codec_->encode(request.prompt_text, request.adds_special_tokens, request.prompt_token_ids);
  return std::nullopt;
} catch (const std::exception& error) {
  return server_error(500, "prepare",
                      std::string("The prompt could not be prepared: ") + error.what());
}

std::optional<ApiError> GenerationPipeline::check_lengths(const GenerationRequest& request) const {
  const RingSizes& sizes = ring_.sizes();
  const char* prompt_name = request.is_chat ? "messages" : "prompt";
  const auto limit_name = [&] { return std::string(request.max_tokens_name); };
  const uint64_t num_prompt = request.prompt_token_ids.size();
  const auto number = [](uint64_t value) { return std::to_string(value); };
  if (num_prompt == 0) return bad_request(prompt_name, "The prompt has no tokens.");
  if (num_prompt > sizes.max_prompt_tokens || num_prompt >= sizes.max_seqlen) {
    return bad_request(prompt_name,
                       "The prompt has " + number(num_prompt) + " tokens; at most " +
                           number(std::min(sizes.max_prompt_tokens, sizes.max_seqlen - 1)) +
                           " are allowed.",
                       "context_length_exceeded");
  }
  const uint64_t num_output = request.max_tokens.value_or(1);
  if (num_prompt + num_output > sizes.max_seqlen) {
    return bad_request(limit_name(),
                       "This model's context length is " + number(sizes.max_seqlen) +
                           " tokens, but the request asks for " + number(num_prompt + num_output) +
                           " (" + number(num_prompt) + " in the prompt, " + number(num_output) +
                           " of '" + limit_name() + "', which can be " +
                           number(sizes.max_seqlen - num_prompt) + " at most).",
                       "context_length_exceeded");
  }
  if (num_output > sizes.max_output_tokens) {
    return bad_request(limit_name(), "'" + limit_name() + "' is " + number(num_output) +
                                         "; at most " + number(sizes.max_output_tokens) +
                                         " are allowed.");
  }
  const uint32_t num_pages = pages_of(num_prompt + num_output, sizes.page_size_tokens);
  if (num_pages > sizes.num_kv_pages) {
    return bad_request(limit_name(),
                       number(num_prompt) + " prompt tokens and " + number(num_output) +
                           " output tokens need " + number(num_pages) + " pages of " +
                           number(sizes.page_size_tokens) + " tokens; the KV cache has " +
                           number(sizes.num_kv_pages) + ".",
                       "context_length_exceeded");
  }
  if (const uint32_t limit = output_limit(request); request.min_tokens > limit) {
    return bad_request("min_tokens", "'min_tokens' is " + number(request.min_tokens) +
                                         ", more than the " + number(limit) + " of '" +
                                         limit_name() + "'" +
                                         (request.max_tokens ? "." : ", which is its default."));
  }
  return std::nullopt;
}

// What was asked for, or else as much as ever fits (completions: 16, as OpenAI's API says).
uint32_t GenerationPipeline::output_limit(const GenerationRequest& request) const {
  if (request.max_tokens) return static_cast<uint32_t>(*request.max_tokens);  // was checked
  const RingSizes& sizes = ring_.sizes();
  const uint64_t num_prompt = request.prompt_token_ids.size();
  const uint64_t in_pages = static_cast<uint64_t>(sizes.num_kv_pages) * sizes.page_size_tokens;
  uint64_t limit = std::min<uint64_t>(
      {sizes.max_seqlen - num_prompt, in_pages - num_prompt, sizes.max_output_tokens});
  if (!request.is_chat) limit = std::min<uint64_t>(limit, 16);
  return static_cast<uint32_t>(limit);
}

std::variant<std::vector<uint32_t>, ApiError> GenerationPipeline::stop_token_ids(
    const GenerationRequest& request) const {
  std::vector<uint32_t> ids = request.stop_token_ids;
  if (!request.ignores_eos) {
    for (const uint32_t id : config_.eos_token_ids) {
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  if (ids.size() > BLINK_MAX_STOP_TOKEN_IDS) {
    return bad_request("stop_token_ids", "With the model's own end tokens 'stop_token_ids' has " +
                                             std::to_string(ids.size()) + " ids; at most " +
                                             std::to_string(BLINK_MAX_STOP_TOKEN_IDS) +
                                             " are allowed.");
  }
  return ids;
}

// All choices get a slot, or none does.
std::optional<ApiError> GenerationPipeline::take_slots(Generation& generation) {
  const auto num_choices = static_cast<uint32_t>(1 + generation.others.size());
  if (slots_.num_cached() < num_choices) {
    slots_.note_released();
    if (ring_.read_statuses(0, statuses_) == Status::ok) slots_.refresh(statuses_);
  }
  if (slots_.num_cached() < num_choices) {
    return rate_limit_error("ring_full", "All slots are in use; try again soon.");
  }
  generation.for_each_choice([&](Choice& choice) {
    choice.slot = *slots_.acquire();
    choice.sequence = ring_.next_sequence(choice.slot);
  });
  return std::nullopt;
}

std::string GenerationPipeline::random_id(const char* prefix) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string id = prefix;
  for (int word = 0; word < 2; ++word) {
    uint64_t bits = random_();
    for (int i = 0; i < 16; ++i, bits >>= 4) id += kHex[bits & 15];
  }
  return id;
}

void GenerationPipeline::set_up_choice(Choice& choice, const GenerationRequest& request,
                                       const std::string& id, uint32_t index) const {
  // The tags around calls may be special tokens.
  const bool has_tags = !request.tool_names.empty() && config_.tool_format == ToolFormat::hermes;
  choice.decoder = codec_->make_decoder(request.skips_special_tokens && !has_tags);
  choice.matcher = StopMatcher(request.stop);
  choice.writer = ResponseWriter({.id = id,
                                  .model = config_.model_name,
                                  .created_s = std::time(nullptr),
                                  .index = index,
                                  .is_chat = request.is_chat,
                                  .includes_usage = request.includes_usage,
                                  .has_continuous_usage = request.has_continuous_usage});
  if (request.num_top_logprobs) {
    choice.logprobs =
        std::make_unique<LogprobTracker>(codec_, request.is_chat, *request.num_top_logprobs);
  }
  if (!request.tool_names.empty()) {
    choice.tools = std::make_unique<ToolCalls>(ToolCalls{
        ToolCallParser(config_.tool_format, request.tool_names, request.calls_in_parallel), {}});
  }
}

// As the client gave it, or else what its token ids say.
std::string GenerationPipeline::text_of_prompt(const GenerationRequest& request) const {
  if (!request.has_token_ids) return request.prompt_text;
  std::string text;
  const auto decoder = codec_->make_decoder(request.skips_special_tokens);
  for (const uint32_t id : request.prompt_token_ids) decoder->append(id, text);
  decoder->flush(text);
  return text;
}

std::shared_ptr<Generation> GenerationPipeline::make_generation(
    GenerationRequest& request, std::vector<uint32_t> stop_token_ids) {
  auto generation = std::make_shared<Generation>();
  generation->num_prompt_tokens = static_cast<uint32_t>(request.prompt_token_ids.size());
  generation->max_output_tokens = output_limit(request);
  generation->min_tokens = request.min_tokens;
  generation->max_buffered_bytes = config_.max_buffered_bytes;
  generation->streams = request.streams;
  generation->stop_token_ids = std::move(stop_token_ids);
  if (request.echoes) generation->echo = text_of_prompt(request);
  generation->num_unanswered_choices = generation->num_running_choices = request.num_choices;
  for (uint32_t i = 1; i < request.num_choices; ++i) {
    generation->others.push_back(std::make_unique<Choice>());
  }
  const std::string id = random_id(request.is_chat ? "chatcmpl-" : "cmpl-");
  uint32_t index = 0;
  generation->for_each_choice([&](Choice& choice) {
    choice.generation = generation.get();
    set_up_choice(choice, request, id, index++);
    if (!request.streams) choice.text = generation->echo;
  });
  return generation;
}

std::variant<std::shared_ptr<Generation>, ApiError> GenerationPipeline::submit(
    GenerationRequest& request) {
  if (auto error = check_lengths(request)) return std::move(*error);
  auto stops = stop_token_ids(request);
  if (auto* error = std::get_if<ApiError>(&stops)) return std::move(*error);
  if (!is_healthy()) {
    return retry_error(503, "unavailable",
                       std::string("The scheduler is not serving: ") + health_name(health()) + ".");
  }
  auto generation = make_generation(request, std::move(std::get<std::vector<uint32_t>>(stops)));
  if (auto error = take_slots(*generation)) return std::move(*error);
  if (auto error = submit_choices(*generation, request)) return std::move(*error);
  return generation;
}

std::optional<ApiError> GenerationPipeline::submit_choices(Generation& generation,
                                                           const GenerationRequest& request) {
  generation.submitted_at = Clock::now();
  const uint64_t seed = request.seed ? *request.seed : random_();
  blink_slot_request in_ring =
      ring_request(request, generation.max_output_tokens, seed, generation.stop_token_ids);
  uint32_t num_submitted = 0;
  bool is_lost = false;
  generation.for_each_choice([&](Choice& choice) {
    in_ring.seed = seed + num_submitted;
    is_lost = is_lost || ring_.submit(choice.slot, choice.sequence, in_ring,
                                      request.prompt_token_ids) != Status::ok;
    if (is_lost) {
      slots_.give_back(choice.slot);
    } else {
      ++num_submitted;
    }
  });
  if (is_lost) {
    // The choices before the first lost one may run: they are watched to their end, for nobody.
    generation.is_abort_requested.store(true, std::memory_order_relaxed);
    generation.num_unanswered_choices = 0;
    generation.num_running_choices = num_submitted;
  } else {
    metrics_.prompt_tokens.add(generation.num_prompt_tokens);
  }
  metrics_.requests_running.fetch_add(num_submitted, std::memory_order_relaxed);
  if (num_submitted > 0) generation.pipeline_reference = generation.shared_from_this();
  uint32_t index = 0;
  generation.for_each_choice([&](Choice& choice) {
    choice.is_answered = is_lost;
    if (index++ < num_submitted) reader_.watch(&choice);
  });
  if (is_lost) return server_error(503, "lost", "The ring cannot be reached.");
  return std::nullopt;
}

std::string GenerationPipeline::prometheus_text() {
  step_metrics_.refresh();
  blink_ring_header header;
  const bool is_read = ring_.read_header(header) == Status::ok;
  return metrics_.prometheus_text(is_read ? &header : nullptr, is_healthy());
}

}  // namespace blink
