// frontend_bench RING PORT --name=value ...: load over a front end of another process, and a ring's
// owner that answers at once, which stamps when each token became visible. Prints one line of JSON.
//
//   --shape=closed    every connection sends its next request as soon as it has an answer;
//                     --ramp-ms: over which their first ones are spread
//           open      --rate requests a second, whatever comes back
//           pending   one request at a time: from send to prefill_pending in the ring
//   --connections=N --requests=N --seconds=N (closed, open: whichever ends first; 0: no bound)
//   --tokens=N        of each answer        --stream=0|1  --chat=0|1  --prompts=FILE (one a line)
//   --token-interval-us=N    the owner's pace per request; 0: a token each pass
//   --pace=as_admitted|lockstep|spread   see FakeOwner::Pace
//   --polls=0|1       1: owner and client take turns on one thread that never sleeps, as machines
//   of
//                     their own: the front end need not wake them, and they cost it nothing
//
// All times are CLOCK_MONOTONIC of this process; a token's is taken right before the word that
// publishes it is written.
#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_owner.h"
#include "load_client.h"
#include "transport/shared_memory.h"

namespace blink {
namespace {

constexpr uint64_t kPassIntervalNs = 50'000;  // of the ring's owner

struct Options {
  std::string shape = "closed";
  uint32_t num_connections = 1;
  uint32_t num_requests = 1000;
  uint32_t seconds = 0;
  uint32_t rate = 1000;
  uint32_t ramp_ms = 0;
  bool polls = false;
  LoadRequest request;
  FakeOwner::Options owner;
};

double thread_cpu_s() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

// When things happened, by request number and token. Written by the owner's thread before the
// token is published in the ring, read by the client's after it came back: ordered by the ring.
class Stamps {
 public:
  Stamps(uint32_t num_requests, uint32_t num_tokens)
      : num_tokens_(num_tokens),
        pending_(num_requests),
        tokens_(static_cast<size_t>(num_requests) * num_tokens) {}
  uint64_t& pending(uint64_t request) { return pending_[request % pending_.size()]; }
  uint64_t& token(uint64_t request, uint32_t index) {
    return tokens_[request % pending_.size() * num_tokens_ + index];
  }

 private:
  uint32_t num_tokens_;
  std::vector<uint64_t> pending_;
  std::vector<uint64_t> tokens_;
};

class StampingOwner final : public FakeOwner {
 public:
  StampingOwner(void* ring, const Options& options, Stamps& stamps)
      : FakeOwner(ring, options),
        heartbeat_(&RingView(ring).header()->heartbeat),
        stamps_(stamps) {}

  bool beat_and_pass() {
    std::atomic_ref<uint64_t>(*heartbeat_).fetch_add(1, std::memory_order_relaxed);
    return pass();
  }

 private:
  void before_pending(const blink_slot_request& request) override {
    stamps_.pending(request.seed) = monotonic_ns();
  }
  void before_token(const blink_slot_request& request, uint32_t index) override {
    stamps_.token(request.seed, index) = monotonic_ns();
  }

  uint64_t* heartbeat_;
  Stamps& stamps_;
};

class Latencies final : public LoadClient::Sink {
 public:
  explicit Latencies(Stamps& stamps) : stamps_(stamps) {}
  void on_token(uint32_t request, uint32_t index, uint64_t now_ns) override {
    add(tokens_, now_ns - stamps_.token(request, index));
  }
  void on_done(uint32_t, uint64_t) override { ++num_done_; }
  void add_pending(uint64_t ns) { add(pending_, ns); }

  uint64_t num_done() const { return num_done_; }
  std::string json() {
    return "\"token_to_recv_us\":" + percentiles(tokens_) +
           ",\"post_to_pending_us\":" + percentiles(pending_);
  }

 private:
  static constexpr size_t kMaxSamples = 4'000'000;  // the first ones; enough for any percentile

  static void add(std::vector<uint32_t>& samples, uint64_t ns) {
    if (samples.size() < kMaxSamples) {
      samples.push_back(static_cast<uint32_t>(std::min<uint64_t>(ns, UINT32_MAX)));
    }
  }
  static std::string percentiles(std::vector<uint32_t>& samples) {
    if (samples.empty()) return "null";
    std::sort(samples.begin(), samples.end());
    const auto at = [&](double part) {
      const auto last = static_cast<double>(samples.size() - 1);
      return static_cast<double>(samples[static_cast<size_t>(part * last)]) * 1e-3;
    };
    char text[160];
    std::snprintf(text, sizeof(text),
                  "{\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f}", at(0.5),
                  at(0.9), at(0.99), at(0.999), at(1));
    return text;
  }

  Stamps& stamps_;
  uint64_t num_done_ = 0;
  std::vector<uint32_t> tokens_;
  std::vector<uint32_t> pending_;
};

bool is_over(const Options& options, uint32_t num_sent, uint64_t begin) {
  if (options.num_requests != 0 && num_sent >= options.num_requests) return true;
  return options.seconds != 0 && monotonic_ns() - begin >= options.seconds * 1'000'000'000ull;
}

// Takes what came back; sleeps up to so many microseconds where nothing did.
using Wait = std::function<void(uint32_t)>;

// Each connection's first request comes at its own part of the ramp: those that follow keep the
// distances, where otherwise all would end, and begin anew, at one instant.
uint32_t run_closed(const Options& options, LoadClient& client, const Wait& wait, uint64_t begin) {
  const uint64_t distance_ns = options.ramp_ms * 1'000'000ull / options.num_connections;
  const auto is_due = [&](uint32_t number) {
    return number >= options.num_connections || monotonic_ns() - begin >= number * distance_ns;
  };
  uint32_t num_sent = 0;
  while (true) {
    Connection* connection = nullptr;
    while (!is_over(options, num_sent, begin) && is_due(num_sent) &&
           (connection = client.idle()) != nullptr) {
      client.send(*connection, num_sent++);
    }
    const bool has_more = !is_over(options, num_sent, begin);
    if (!has_more && client.num_busy() == 0) return num_sent;
    wait(has_more && num_sent < options.num_connections ? 500 : 100'000);
  }
}

// Arrivals at even distances; one that finds no free connection waits for it (and is counted late).
uint32_t run_open(const Options& options, LoadClient& client, const Wait& wait, uint64_t begin) {
  uint32_t num_sent = 0;
  const uint64_t interval_ns = 1'000'000'000ull / options.rate;
  while (true) {
    const bool has_more = !is_over(options, num_sent, begin);
    if (!has_more && client.num_busy() == 0) return num_sent;
    const uint64_t due = begin + num_sent * interval_ns;
    const uint64_t now = monotonic_ns();
    if (has_more && now >= due) {
      if (Connection* connection = client.idle()) {
        client.send(*connection, num_sent++);
        wait(0);
        continue;
      }
    }
    wait(has_more && due > now ? static_cast<uint32_t>((due - now) / 1000) : 1000);
  }
}

// Owner and client take turns on this thread, so that neither waits for the other's wake-up.
uint32_t run_pending(const Options& options, LoadClient& client, StampingOwner& owner,
                     Stamps& stamps, Latencies& latencies) {
  for (uint32_t number = 0; number < options.num_requests; ++number) {
    stamps.pending(number) = 0;
    const uint64_t sent = client.send(*client.idle(), number);
    while (stamps.pending(number) == 0) owner.beat_and_pass();
    latencies.add_pending(stamps.pending(number) - sent);
    while (client.num_busy() > 0) {
      owner.beat_and_pass();
      client.wait(0);
    }
    const uint64_t rest = monotonic_ns() + 200'000;  // the front end's threads go to sleep
    while (monotonic_ns() < rest) owner.beat_and_pass();
  }
  return options.num_requests;
}

int run(const char* ring_name, uint16_t port, const Options& options) {
  const SharedMemory memory = SharedMemory::open(ring_name);
  void* ring = memory.bytes().data();
  const uint32_t num_stamped = options.num_requests == 0 ? 1 << 16 : options.num_requests;
  Stamps stamps(num_stamped, options.request.max_tokens);
  Latencies latencies(stamps);
  StampingOwner owner(ring, options.owner, stamps);
  const bool is_pending = options.shape == "pending";
  const bool is_paced = options.owner.token_interval_us > 0;
  const bool is_one_thread = is_pending || options.polls;
  double owner_cpu_s = 0;
  std::thread owner_thread;
  std::atomic<bool> is_ending{false};
  if (!is_one_thread) {
    owner_thread = std::thread([&] {
      ::prctl(PR_SET_NAME, "owner");
      ::prctl(PR_SET_TIMERSLACK, 1000);
      while (!is_ending.load(std::memory_order_relaxed)) {
        // Paced tokens are stamped as they come: a busy owner would only take the client's core.
        const bool has_worked = owner.beat_and_pass();
        if (!has_worked || is_paced) {
          std::this_thread::sleep_for(std::chrono::nanoseconds(kPassIntervalNs));
        }
      }
      owner_cpu_s = thread_cpu_s();
    });
  } else {
    const uint64_t rest = monotonic_ns() + 500'000'000;  // until the front end believes in us
    while (monotonic_ns() < rest) owner.beat_and_pass();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(is_one_thread ? 0 : 300));
  LoadClient client(port, options.num_connections, options.request, latencies);
  const double client_cpu_before_s = thread_cpu_s();
  const uint64_t begin = monotonic_ns();
  uint32_t num_sent = 0;
  uint64_t next_pass = 0;
  const Wait wait = [&](uint32_t timeout_us) {
    if (!options.polls) {
      client.wait(timeout_us);
      return;
    }
    if (const uint64_t now = monotonic_ns(); now >= next_pass) {
      owner.beat_and_pass();
      next_pass = now + kPassIntervalNs;
    }
    client.wait(0);
  };
  if (options.shape == "closed") num_sent = run_closed(options, client, wait, begin);
  if (options.shape == "open") num_sent = run_open(options, client, wait, begin);
  if (is_pending) num_sent = run_pending(options, client, owner, stamps, latencies);
  const double seconds = static_cast<double>(monotonic_ns() - begin) * 1e-9;
  const double client_cpu_s = thread_cpu_s() - client_cpu_before_s;
  is_ending.store(true, std::memory_order_relaxed);
  if (owner_thread.joinable()) owner_thread.join();
  std::printf(
      "{\"requests\":%u,\"tokens\":%llu,\"refused\":%llu,\"receives\":%llu,\"seconds\":%.4f,"
      "\"client_cpu_s\":%.3f,"
      "\"owner_cpu_s\":%.3f,%s}\n",
      num_sent, static_cast<unsigned long long>(client.num_tokens()),
      static_cast<unsigned long long>(client.num_refused()),
      static_cast<unsigned long long>(client.num_receives()), seconds, client_cpu_s, owner_cpu_s,
      latencies.json().c_str());
  return latencies.num_done() == num_sent ? 0 : 1;
}

Options options_from(int argc, char** argv) {
  Options options;
  options.owner.is_wellbehaved = true;
  const std::map<std::string, uint32_t*> numbers = {
      {"--connections", &options.num_connections},
      {"--requests", &options.num_requests},
      {"--seconds", &options.seconds},
      {"--rate", &options.rate},
      {"--ramp-ms", &options.ramp_ms},
      {"--tokens", &options.request.max_tokens},
  };
  const std::map<std::string, bool*> flags = {{"--stream", &options.request.streams},
                                              {"--chat", &options.request.is_chat},
                                              {"--polls", &options.polls}};
  const std::map<std::string, FakeOwner::Pace> paces = {
      {"as_admitted", FakeOwner::Pace::as_admitted},
      {"lockstep", FakeOwner::Pace::lockstep},
      {"spread", FakeOwner::Pace::spread}};
  for (int i = 3; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    const std::string name(argv[i], equals == nullptr ? std::strlen(argv[i]) : equals - argv[i]);
    const char* value = equals == nullptr ? "" : equals + 1;
    const uint64_t number = std::strtoull(value, nullptr, 10);
    if (const auto found = numbers.find(name); found != numbers.end()) {
      *found->second = static_cast<uint32_t>(number);
    } else if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = number != 0;
    } else if (name == "--shape") {
      options.shape = value;
    } else if (name == "--pace" && paces.contains(value)) {
      options.owner.pace = paces.at(value);
    } else if (name == "--prompts") {
      std::ifstream file(value);
      for (std::string line; std::getline(file, line);) options.request.prompts.push_back(line);
    } else if (name == "--token-interval-us") {
      options.owner.token_interval_us = number;
    } else {
      std::fprintf(stderr, "frontend_bench: unknown option %s\n", argv[i]);
      std::exit(2);
    }
  }
  if (options.request.prompts.empty()) options.request.prompts.emplace_back("hello");
  return options;
}

}  // namespace
}  // namespace blink

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: frontend_bench RING PORT [--name=value ...]; see main.cc\n");
    return 2;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::prctl(PR_SET_TIMERSLACK, 1000);
  return blink::run(argv[1], static_cast<uint16_t>(std::atoi(argv[2])),
                    blink::options_from(argc, argv));
}
