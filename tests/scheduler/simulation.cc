// Runs random histories of the scheduler: simulation FIRST_SEED COUNT [TEAM_THREADS]
//
// Prints one line of totals, or the first failure with its seed and exits with 1. With TEAM_THREADS
// above one, each history runs twice, by one thread and by a team, and must take the same steps.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "history.h"

namespace {

struct Totals {
  uint64_t requests = 0;
  uint64_t steps = 0;
  uint64_t output_tokens = 0;
  uint64_t paused = 0;
  uint64_t aborted = 0;
  uint64_t failed = 0;
  uint64_t late_commands = 0;
  uint64_t checksum_retries = 0;
  uint64_t off_cache_steps = 0;
};

void add(Totals& totals, blink::testing::History& history) {
  const blink_counters& counters = history.counters();
  totals.requests += history.num_requests();
  totals.steps += counters.steps;
  totals.output_tokens += counters.output_tokens;
  totals.paused += counters.paused;
  totals.aborted += counters.aborted;
  totals.failed += counters.failed;
  totals.late_commands += counters.late_commands;
  totals.checksum_retries += counters.checksum_retries;
  totals.off_cache_steps += counters.off_cache_steps;
}

}  // namespace

int main(int argc, char** argv) {
  using blink::testing::History;
  if (argc < 3) {
    std::fprintf(stderr, "usage: simulation FIRST_SEED COUNT [TEAM_THREADS]\n");
    return 2;
  }
  const uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const uint64_t count = std::strtoull(argv[2], nullptr, 10);
  const auto num_threads = static_cast<uint32_t>(argc > 3 ? std::atoi(argv[3]) : 1);
  const auto team =
      num_threads > 1 ? std::make_unique<blink::testing::ThreadTeam>(num_threads) : nullptr;
  Totals totals;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    try {
      History history(seed, nullptr);
      history.run();
      add(totals, history);
      if (team != nullptr) {
        History by_team(seed, team.get());
        by_team.run();
        BLINK_CHECK(by_team.digest() == history.digest(), "a team takes other steps");
      }
    } catch (const std::exception& error) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
  }
  const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf(
      "histories %llu requests %llu steps %llu output_tokens %llu paused %llu aborted %llu failed "
      "%llu "
      "late_commands %llu checksum_retries %llu off_cache_steps %llu\n",
      number(count), number(totals.requests), number(totals.steps), number(totals.output_tokens),
      number(totals.paused), number(totals.aborted), number(totals.failed),
      number(totals.late_commands), number(totals.checksum_retries),
      number(totals.off_cache_steps));
  return 0;
}
