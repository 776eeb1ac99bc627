// KV pages: a stack of free ones; a lane's own stand in its row of the step's page table.
#ifndef BLINK_DEVICE_PAGES_CUH
#define BLINK_DEVICE_PAGES_CUH

#include "blink/device/state.cuh"

namespace blink {

BLINK_FUNCTION int32_t* page_table_of(const Scheduler* s, uint32_t lane) {
  return s->step.page_table + static_cast<uint64_t>(lane) * s->limits.max_pages_per_lane;
}

// Gives `num_pages` free pages, which must be there, to a lane. By the whole team.
template <typename Team>
BLINK_FUNCTION void take_pages(Scheduler* s, Team& team, uint32_t lane, uint32_t num_pages) {
  int32_t* table = page_table_of(s, lane) + s->lanes[lane].num_pages;
  const uint32_t* top = s->free_pages + s->num_free_pages;
  for (uint32_t i = team.id(); i < num_pages; i += team.count()) {
    table[i] = static_cast<int32_t>(*(top - 1 - i));
  }
  team.sync();
  if (team.is_leader()) {
    s->num_free_pages -= num_pages;
    s->lanes[lane].num_pages += num_pages;
  }
  team.sync();
}

// Takes all pages back from a lane; its table points to the sink again. By the whole team.
template <typename Team>
BLINK_FUNCTION void return_pages(Scheduler* s, Team& team, uint32_t lane) {
  int32_t* table = page_table_of(s, lane);
  const uint32_t num_pages = s->lanes[lane].num_pages;
  uint32_t* top = s->free_pages + s->num_free_pages;
  for (uint32_t i = team.id(); i < num_pages; i += team.count()) {
    top[i] = static_cast<uint32_t>(table[i]);
    table[i] = 0;
  }
  team.sync();
  if (team.is_leader()) {
    s->num_free_pages += num_pages;
    s->lanes[lane].num_pages = 0;
  }
  team.sync();
}

// Whether the next token of a decoding lane starts a new page.
BLINK_FUNCTION bool needs_page(const Scheduler* s, const Lane& lane) {
  return lane.kv_len == lane.num_pages * s->limits.page_size_tokens;
}

}  // namespace blink

#endif  // BLINK_DEVICE_PAGES_CUH
