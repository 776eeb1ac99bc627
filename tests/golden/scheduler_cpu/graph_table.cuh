// Graph keys and look-up tables of one compiled model. Rendered by blinkc 0.1.0 from
// graph_table.cuh.jinja; do not edit.
#ifndef BLINK_RENDERED_GRAPH_TABLE_CUH
#define BLINK_RENDERED_GRAPH_TABLE_CUH

#include "blink/device/state.cuh"

namespace blink {

// clang-format off
const GraphKey kGraphKeys[11] = {  // kind, batch, seqlen
  {BLINK_GRAPH_PREFILL, 1, 8},  // 0
  {BLINK_GRAPH_PREFILL, 1, 16},  // 1
  {BLINK_GRAPH_PREFILL, 1, 32},  // 2
  {BLINK_GRAPH_PREFILL, 2, 8},  // 3
  {BLINK_GRAPH_PREFILL, 2, 32},  // 4
  {BLINK_GRAPH_DECODE, 1, 32},  // 5
  {BLINK_GRAPH_DECODE, 1, 128},  // 6
  {BLINK_GRAPH_DECODE, 2, 32},  // 7
  {BLINK_GRAPH_DECODE, 2, 128},  // 8
  {BLINK_GRAPH_DECODE, 4, 32},  // 9
  {BLINK_GRAPH_DECODE, 4, 128},  // 10
};

// prefill: [batch][seqlen bucket] key index, plus 32768 where a larger key stands in, for seqlen buckets 8, 16, 32
const uint16_t kPrefillLut[3][3] = {
  {0, 1, 2},
  {0, 1, 2},
  {3, 32772, 4},
};
const uint16_t kPrefillBucketIndex[5] = {
  0, 0, 1, 2, 2,
};

// decode: [batch][seqlen bucket] key index, plus 32768 where a larger key stands in, for seqlen buckets 32, 128
const uint16_t kDecodeLut[5][2] = {
  {5, 6},
  {5, 6},
  {7, 8},
  {9, 10},
  {9, 10},
};
const uint16_t kDecodeBucketIndex[5] = {
  0, 0, 1, 1, 1,
};
// clang-format on

// The tables' addresses, valid where this is called.
inline GraphTable graph_table() {
  GraphTable table{};
  table.keys = kGraphKeys;
  table.num_keys = 11;
  table.prefill.lut = kPrefillLut[0];
  table.prefill.seqlen_bucket_index = kPrefillBucketIndex;
  table.prefill.num_seqlen_buckets = 3;
  table.prefill.granule_tokens = 8;
  table.prefill.num_granules = 5;
  table.prefill.max_batch = 2;
  table.prefill.max_seqlen = 32;
  table.decode.lut = kDecodeLut[0];
  table.decode.seqlen_bucket_index = kDecodeBucketIndex;
  table.decode.num_seqlen_buckets = 2;
  table.decode.granule_tokens = 32;
  table.decode.num_granules = 5;
  table.decode.max_batch = 4;
  table.decode.max_seqlen = 128;
  return table;
}

}  // namespace blink

#endif  // BLINK_RENDERED_GRAPH_TABLE_CUH
