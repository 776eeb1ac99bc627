// libibverbs with a card that is not there: the library's calls, answered by a small model of one.
//
// Work requests are copied when posted and run when their completion queue is polled, a few at a
// time, so that completions come late; READs that no fence keeps apart run backwards. Memory that
// is not inline is read only then. The send queue refuses more than its depth; its entries come
// free when a signalled completion is polled. So staging that is reused too early, or an entry that
// is never signalled, fails a test.
#ifndef BLINK_TESTS_FAKE_VERBS_H
#define BLINK_TESTS_FAKE_VERBS_H

#include <atomic>
#include <cstdint>
#include <functional>

#include "transport/verbs_library.h"

namespace blink {

// One card for the whole process; reset() between tests.
struct FakeCard {
  std::atomic<bool> has_device{true};
  std::atomic<bool> is_link_up{true};    // false: requests end with a retry error
  std::atomic<bool> answers{true};       // false: requests never end
  std::atomic<uint32_t> max_inline{64};  // a queue pair asking for more is refused
  std::atomic<uint32_t> requests_a_poll{3};
  std::atomic<uint32_t> num_signalled{0};  // requests posted so far
  std::atomic<uint32_t> num_posted{0};
  std::atomic<uint32_t> num_fenced{0};
  std::atomic<int> last_dmabuf_access{0};
  std::atomic<int> all_access{0};  // of every region, or-ed
  // Called before each READ; touches memory only. Set while no front end is connected.
  std::function<void()> before_read;

  void reset();
  // Objects of the library that were made and not released.
  int num_live() const;
};

FakeCard& fake_card();
const VerbsLibrary& fake_verbs();

}  // namespace blink

#endif  // BLINK_TESTS_FAKE_VERBS_H
