// Limits of one compiled model. Rendered by blinkc 0.1.0 from config.cuh.jinja; do not edit.
#ifndef BLINK_RENDERED_CONFIG_CUH
#define BLINK_RENDERED_CONFIG_CUH

#include "blink/device/state.cuh"

namespace blink {

constexpr uint32_t kNumSlots = 16;
constexpr uint32_t kMaxBatch = 4;
constexpr uint32_t kMaxSeqlen = 128;
constexpr uint32_t kMaxPrefillTokens = 32;
constexpr uint32_t kPageSizeTokens = 8;
constexpr uint32_t kNumKvPages = 40;
constexpr uint32_t kNumGraphKeys = 11;

}  // namespace blink

#endif  // BLINK_RENDERED_CONFIG_CUH
