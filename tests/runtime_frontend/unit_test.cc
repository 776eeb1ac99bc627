// The pure parts of the front end, against slow obvious models and random inputs. Run with
// sanitizers.
#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "frontend/detokenizer_thread.h"
#include "frontend/metrics.h"
#include "frontend/request_parser.h"
#include "frontend/response_writer.h"
#include "frontend/slot_tracker.h"
#include "frontend/stop_matcher.h"
#include "transport/heartbeat_judge.h"

namespace blink {
namespace {

// ---- stop matcher
// ----------------------------------------------------------------------------------

struct Shown {
  std::string text;
  bool has_stopped = false;
};

// The obvious way: look at every prefix of the text.
Shown reference_stop(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (std::string_view(text).substr(0, end).ends_with(stop))
        longest = std::max(longest, stop.size());
    }
    if (longest > 0) return {text.substr(0, end - longest), true};
  }
  return {text, false};
}

// The least that must be held: the longest suffix of the text that begins a stop string.
size_t reference_held(const std::string& text, const std::vector<std::string>& stops) {
  size_t held = 0;
  for (const std::string& stop : stops) {
    for (size_t size = 1; size < stop.size() && size <= text.size(); ++size) {
      if (text.ends_with(stop.substr(0, size))) held = std::max(held, size);
    }
  }
  return held;
}

std::string random_text(std::mt19937& random, size_t max_size) {
  std::string text(random() % (max_size + 1), 'a');
  for (char& byte : text) byte = static_cast<char>('a' + random() % 3);
  return text;
}

TEST(stop_matcher_equals_the_obvious_model) {
  std::mt19937 random(1);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) stop = "a" + random_text(random, 5);
    const std::string text = random_text(random, 40);
    const Shown expected = reference_stop(text, stops);
    StopMatcher matcher(stops);
    std::string shown;
    bool has_stopped = false;
    for (size_t begin = 0; begin < text.size() && !has_stopped;) {
      const size_t size = 1 + random() % 5;
      has_stopped = matcher.feed(std::string_view(text).substr(begin, size), shown);
      begin += size;
      if (!has_stopped) {
        // Nothing is delayed more than needed.
        const std::string so_far = text.substr(0, std::min(begin, text.size()));
        CHECK_EQUAL(shown.size() + reference_held(so_far, stops), so_far.size());
        CHECK_EQUAL(matcher.num_held_bytes(), reference_held(so_far, stops));
      }
    }
    if (!has_stopped) matcher.flush(shown);
    CHECK_EQUAL(shown, expected.text);
    CHECK_EQUAL(has_stopped, expected.has_stopped);
  }
}

TEST(stop_matcher_is_linear_on_hostile_text) {
  // 16 stop strings that almost match all the time; a quadratic matcher would take minutes.
  std::vector<std::string> stops;
  for (int i = 0; i < 16; ++i)
    stops.push_back(std::string(1000 + static_cast<size_t>(i), 'a') + "b");
  StopMatcher matcher(stops);
  std::string shown;
  const std::string piece(1000, 'a');
  for (int i = 0; i < 1000; ++i) CHECK(!matcher.feed(piece, shown));
  CHECK_EQUAL(shown.size() + matcher.num_held_bytes(), size_t{1'000'000});
  CHECK(matcher.feed("b", shown));
  CHECK_EQUAL(shown.size(), size_t{1'000'000 - 1015});
}

TEST(stop_matcher_takes_nothing_after_a_stop) {
  StopMatcher matcher({"stop"});
  std::string shown;
  CHECK(matcher.feed("go stop more", shown));
  CHECK(matcher.feed("and more", shown));
  matcher.flush(shown);
  CHECK_EQUAL(shown, std::string("go "));
}

// ---- response writer
// -------------------------------------------------------------------------------

TEST(json_escapes) {
  std::string out;
  append_json_escaped(std::string_view("a\"b\\c\n\r\t\x01\x1f\x7f\0é", 14), out);
  CHECK_EQUAL(out, std::string("a\\\"b\\\\c\\n\\r\\t\\u0001\\u001f\x7f\\u0000é"));
  out.clear();
  append_json_escaped("\xC2\x85|\xE2\x80\xA8|\xE2\x80\xA9|\xE2\x80\xA7|\xC2\x86|\xC2", out);
  CHECK_EQUAL(out, std::string("\\u0085|\\u2028|\\u2029|\xE2\x80\xA7|\xC2\x86|\xC2"));
}

TEST(error_json_has_nulls_for_what_is_not_known) {
  CHECK_EQUAL(json_from_error(server_error(500, "c", "say \"no\"")),
              std::string("{\"error\":{\"message\":\"say \\\"no\\\"\",\"type\":\"server_error\","
                          "\"param\":null,\"code\":\"c\"}}"));
}

// ---- slot tracker
// ----------------------------------------------------------------------------------

TEST(slot_tracker_hands_out_each_free_slot_once) {
  constexpr uint32_t kSlots = 1000;
  SlotTracker tracker(kSlots);
  std::vector<blink_slot_status> statuses(kSlots);
  CHECK(!tracker.acquire());
  tracker.note_released();
  CHECK_EQUAL(tracker.refresh(statuses), 0u);  // empty, but nobody has said that we may use them
  for (uint32_t slot = 0; slot < kSlots; ++slot) tracker.mark_released(slot);
  std::vector<bool> is_held(kSlots, false);
  std::mt19937 random(2);
  uint32_t num_held = 0;
  for (int round = 0; round < 100'000; ++round) {
    if (random() % 2 == 0) {
      auto slot = tracker.acquire();
      if (!slot) tracker.note_released();
      if (!slot && tracker.refresh(statuses) > 0) slot = tracker.acquire();
      if (!slot) {
        // Only if really nothing is free.
        for (uint32_t i = 0; i < kSlots; ++i) {
          CHECK(is_held[i] || unpack_status(statuses[i].word).state != BLINK_STATE_EMPTY);
        }
        continue;
      }
      CHECK(!is_held[*slot]);
      is_held[*slot] = true;
      ++num_held;
      statuses[*slot].word = pack_status(1, BLINK_STATE_DECODE_PROCESSING, 0);
    } else {
      const uint32_t slot = random() % kSlots;
      if (is_held[slot]) {
        is_held[slot] = false;
        --num_held;
        tracker.mark_released(slot);
      }
      // The owner empties it some time later.
      const uint32_t other = random() % kSlots;
      if (!is_held[other]) statuses[other].word = pack_status(1, BLINK_STATE_EMPTY, 0);
    }
  }
  CHECK(num_held > 0);
}

// ---- metrics
// ---------------------------------------------------------------------------------------

TEST(histogram_counts) {
  TimeHistogram histogram(kRequestBounds);
  histogram.observe_ns(400'000);
  histogram.observe_ns(3'000'000, 4);
  histogram.observe_ns(1'000'000'000'000);
  std::string text;
  histogram.append_text("h", "help", text);
  CHECK(text.find("h_bucket{le=\"0.0005\"} 1\n") != std::string::npos);
  CHECK(text.find("h_bucket{le=\"0.005\"} 5\n") != std::string::npos);
  CHECK(text.find("h_bucket{le=\"120\"} 5\n") != std::string::npos);
  CHECK(text.find("h_bucket{le=\"+Inf\"} 6\n") != std::string::npos);
  CHECK(text.find("h_count 6\n") != std::string::npos);
}

// ---- request parser
// --------------------------------------------------------------------------------

RequestLimits limits() {
  RequestLimits limits;
  limits.vocab_size = 1000;
  limits.sampler_features = BLINK_SAMPLER_TOP_K | BLINK_SAMPLER_TOP_P | BLINK_SAMPLER_MIN_P;
  return limits;
}

GenerationRequest parsed(Endpoint endpoint, std::string_view body) {
  auto result = parse_generation_request(endpoint, body, limits());
  if (const auto* error = std::get_if<ApiError>(&result)) {
    testing::fail(__FILE__, __LINE__, std::string(body) + ": " + error->message);
  }
  return std::get<GenerationRequest>(std::move(result));
}

TEST(request_fields_arrive) {
  const GenerationRequest r = parsed(
      Endpoint::completions,
      R"({"model":"m","prompt":[1,2,999],"max_tokens":7,"temperature":0.5,"top_p":0.25,"min_p":0.125,
          "top_k":40,"seed":18446744073709551615,"stop":["a","b"],"stop_token_ids":[3],"stream":true,
          "stream_options":{"include_usage":true},"ignore_eos":true,"user":"u"})");
  CHECK_EQUAL(r.model, std::string("m"));
  CHECK(r.has_token_ids && (r.prompt_token_ids == std::vector<uint32_t>{1, 2, 999}));
  CHECK_EQUAL(r.max_tokens.value(), 7u);
  CHECK_EQUAL(r.temperature, 0.5f);
  CHECK_EQUAL(r.top_p, 0.25f);
  CHECK_EQUAL(r.min_p, 0.125f);
  CHECK_EQUAL(r.top_k, 40u);
  CHECK_EQUAL(r.seed.value(), std::numeric_limits<uint64_t>::max());
  CHECK((r.stop == std::vector<std::string>{"a", "b"}));
  CHECK((r.stop_token_ids == std::vector<uint32_t>{3}));
  CHECK(r.streams && r.includes_usage && r.ignores_eos);
}

TEST(request_defaults_and_edges) {
  GenerationRequest r = parsed(Endpoint::completions, R"({"prompt":"x"})");
  CHECK_EQUAL(r.temperature, 1.0f);
  CHECK(!r.max_tokens && !r.seed && !r.streams && r.adds_special_tokens);
  r = parsed(Endpoint::completions, R"({"prompt":"x","temperature":1e-45,"top_p":0,"top_k":1000})");
  CHECK_EQUAL(r.temperature, 0.0f);
  CHECK(r.top_p > 0);
  CHECK_EQUAL(r.top_k, 0u);  // every token: off
  r = parsed(Endpoint::chat_completions,
             R"({"messages":[{"role":"user","content":"é\n"}],"chat_template_kwargs":{"a":1}})");
  CHECK(!r.adds_special_tokens);
  CHECK_EQUAL(r.template_input,
              std::string("{\"messages\":[{\"role\":\"user\",\"content\":\"é\\n\"}],"
                          "\"kwargs\":{\"a\":1},\"add_generation_prompt\":true}"));
}

TEST(mutated_requests_never_crash) {
  const std::vector<std::string> seeds = {
      R"({"prompt":[1,2,3],"max_tokens":7,"temperature":0.5,"stop":["a"],"seed":-5,"logit_bias":{}})",
      R"({"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"stream":true,"n":1})",
      R"({"prompt":"x","stream":true,"stream_options":{"include_usage":true},"tools":[],"top_k":-1})"};
  const std::string alphabet = "{}[]\",:0123456789.eE-+truefalsn\\u\x00\xff\xc3 ";
  std::mt19937 random(3);
  int num_good = 0;
  for (int round = 0; round < 50'000; ++round) {
    std::string body = seeds[random() % seeds.size()];
    for (uint32_t i = 0, n = random() % 4; i < n; ++i) {
      const size_t place = random() % body.size();
      switch (random() % 3) {
        case 0:
          body[place] = alphabet[random() % alphabet.size()];
          break;
        case 1:
          body.erase(place, 1 + random() % 5);
          break;
        default:
          body.insert(place, 1, alphabet[random() % alphabet.size()]);
      }
      if (body.empty()) body = "{";
    }
    const auto endpoint = random() % 2 == 0 ? Endpoint::completions : Endpoint::chat_completions;
    const auto result = parse_generation_request(endpoint, body, limits());
    if (const auto* error = std::get_if<ApiError>(&result)) {
      CHECK_EQUAL(error->http_status, 400);
      CHECK(!error->message.empty());
    } else {
      ++num_good;
    }
  }
  CHECK(num_good > 1000);
}

// The bug: the network thread lost its core between reading the statuses, where the owner had not
// taken a slot's request yet, and using them, when that request had ended but the slot was not
// empty again. The next request's command hid the release, and nobody ever took it.
TEST(a_slot_released_after_the_statuses_were_read_is_not_free_by_them) {
  SlotTracker tracker(1);
  const std::vector<blink_slot_status> empty(1);
  tracker.mark_released(0);
  tracker.note_released();
  CHECK_EQUAL(tracker.refresh(empty), 1u);
  CHECK(tracker.acquire() == 0u);
  tracker.note_released();
  tracker.mark_released(0);
  CHECK_EQUAL(tracker.refresh(empty), 0u);
  tracker.note_released();
  CHECK_EQUAL(tracker.refresh(empty), 1u);
}

// ---- detokenizer
// ----------------------------------------------------------------------------------

// The bug: the thread looked at its queue, a request's last event came, the stop came, and the
// thread saw the stop and ended: the client's stream was cut without a word.
TEST(events_that_came_before_the_stop_are_handled) {
  constexpr size_t kNumGenerations = 2;
  Metrics metrics;
  SpscQueue<TokenEvent> events(kNumGenerations);
  Doorbell bell;
  DetokenizerThread::ReadyQueue ready(kNumGenerations);
  std::vector<std::shared_ptr<Generation>> generations;
  for (size_t i = 0; i < kNumGenerations; ++i) {
    generations.push_back(std::make_shared<Generation>());
    generations.back()->first.generation = generations.back().get();
  }
  const auto push_end = [&](Generation& generation) {
    CHECK(events.push(TokenEvent{.choice = &generation.first, .ending = Ending::aborted}));
  };
  const uint32_t rings_before_stop = 1;
  std::atomic<bool> is_emptied{false};
  DetokenizerThread detokenizer(metrics, events, bell, ready, [&] {
    if (is_emptied) return;
    push_end(*generations[1]);  // as the reader would; it has ended when the stop comes
    is_emptied = true;
    while (bell.value() == rings_before_stop) std::this_thread::yield();
  });
  detokenizer.start();
  push_end(*generations[0]);
  bell.ring();
  while (!is_emptied) std::this_thread::yield();
  detokenizer.stop();
  for (const auto& generation : generations) {
    std::shared_ptr<Generation> popped;
    CHECK(ready.pop(popped));
    CHECK(popped == generation);
    CHECK(generation->is_output_complete);
  }
}

// ---- heartbeat
// ----------------------------------------------------------------------------------

// The bug: a machine that stood still in the middle of a step, or a process that was stopped and
// went on, looked like an owner that is dead.
TEST(a_pause_of_whoever_looks_is_no_silence_of_the_owner) {
  using std::chrono::milliseconds;
  HeartbeatJudge::Clock::time_point now{};
  HeartbeatJudge judge(milliseconds(2000), now);
  OwnerSigns signs{.heartbeat = 1};
  CHECK(judge.judge(signs, now += milliseconds(100)) == OwnerVerdict::beating);
  for (int i = 0; i < 5; ++i) {
    CHECK(judge.judge(signs, now += milliseconds(100)) == OwnerVerdict::quiet);
  }
  CHECK(judge.judge(signs, now += milliseconds(60'000)) == OwnerVerdict::quiet);
  ++signs.heartbeat;
  CHECK(judge.judge(signs, now += milliseconds(100)) == OwnerVerdict::beating);
  CHECK(judge.silence() == milliseconds(0));
}

TEST(an_owner_is_silent_after_its_longest_steps) {
  using std::chrono::milliseconds;
  for (const uint64_t step_ms : {0, 100, 700}) {
    HeartbeatJudge::Clock::time_point now{};
    HeartbeatJudge judge(milliseconds(2000), now);
    const OwnerSigns signs{.heartbeat = 1, .longest_step_ns = step_ms * 1'000'000};
    CHECK(judge.judge(signs, now) == OwnerVerdict::beating);
    const uint64_t limit_ms = std::max<uint64_t>(2000, 4 * step_ms);
    for (uint64_t ms = 100; ms <= limit_ms; ms += 100) {
      CHECK(judge.judge(signs, now += milliseconds(100)) == OwnerVerdict::quiet);
    }
    CHECK(judge.judge(signs, now += milliseconds(100)) == OwnerVerdict::silent);
    CHECK(judge.silence() == milliseconds(limit_ms + 100));
  }
}

}  // namespace
}  // namespace blink

BLINK_TEST_MAIN
