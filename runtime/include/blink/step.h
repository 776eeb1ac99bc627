/* The step: fixed addresses through which the scheduler and an opaque captured graph talk.
 *
 * The scheduler fills the inputs, launches the graph of a key, and reads the outputs. Both sides
 * take the struct of pointers once, at start. Plain C, for the GPU and for the CPU target alike;
 * not part of the ring's ABI (both sides come from one bundle).
 *
 * A step runs `num_rows` rows (each one lane of the batch) over `num_tokens` new tokens, packed
 * without gaps: row b owns tokens [row_query_start[b], row_query_start[b+1]). A graph of key (kind,
 * batch, seqlen) runs `batch` rows, and for prefill `seqlen` tokens, for decode `batch` tokens.
 * What lies past num_rows or num_tokens is padding, which the scheduler keeps harmless: token_row
 * -1 (its KV goes to sink page 0), row_kv_len 0, row_lane the sink lane (index max_batch),
 * sample_token 0 and sampling flags 0.
 */
#ifndef BLINK_STEP_H
#define BLINK_STEP_H

#include <stdint.h>

#include "blink/abi.h"

#define BLINK_SAMPLE_ENABLED \
  1u /* without it the row samples nothing: padding, or a chunk but the last */
/* The logits are changed before sampling, by fields of the slot's request; only samplers whose
 * BLINK_SAMPLER_* bits say so look at these. */
#define BLINK_SAMPLE_PENALTIES 2u
#define BLINK_SAMPLE_LOGIT_BIAS 4u
#define BLINK_SAMPLE_MIN_TOKENS 8u

typedef struct blink_sampling_params {
  uint64_t seed;
  uint32_t token_index; /* of the token being sampled: 0 for the first output token */
  uint32_t flags;       /* BLINK_SAMPLE_* */
  float temperature;    /* 0: greedy */
  float top_p;          /* 1: off */
  float min_p;          /* 0: off */
  uint32_t top_k;       /* 0: off */
  uint32_t slot;        /* ring slot: where penalties, logit bias and the output history are read */
  uint32_t num_logprobs;
  uint32_t reserved[6];
} blink_sampling_params; /* 64 bytes */

/* Where a sampler finds a slot's request and the tokens before the one it samples. The scheduler's
 * own; it stays as it is from start to stop. Output token i of a slot is the first word of record
 * i; records before `token_index` are there when the graph runs, also after a pause. Prompt ids may
 * be past the vocabulary if a front end overwrites them. */
typedef struct blink_sampling_history {
  const blink_slot_request* requests; /* [num_slots] verified copies */
  const uint32_t* prompts;
  const unsigned char* outputs;
  uint64_t output_stride_bytes; /* of a slot */
  uint32_t output_record_bytes;
  uint32_t prompt_stride_tokens; /* of a slot */
} blink_sampling_history;        /* 40 bytes */

typedef struct blink_step_state {
  uint64_t completion; /* written last by the graph: `launch` of the step it finished */
  uint64_t launch;     /* number of this launch, from 1; written by the scheduler */
  uint32_t num_tokens;
  uint32_t num_rows;
  uint32_t kind; /* BLINK_GRAPH_* */
  uint32_t key_index;
  const blink_sampling_history* history; /* null: nobody schedules, so nothing but the parameters */
  uint32_t reserved[6];
} blink_step_state; /* 64 bytes */

typedef struct blink_step_buffers {
  blink_step_state* state;
  /* inputs: the scheduler writes, the graph reads */
  int32_t* input_ids;       /* [max_step_tokens] */
  int32_t* positions;       /* [max_step_tokens] position of the token in its sequence */
  int32_t* token_row;       /* [max_step_tokens] row of the token, -1 for padding */
  int32_t* row_query_start; /* [max_batch + 1] */
  int32_t* row_kv_len; /* [max_batch] KV length once this step's tokens are appended; 0: padding */
  int32_t* row_lane;   /* [max_batch] index into page_table; max_batch: the sink lane */
  int32_t* sample_token; /* [max_batch] index of the token whose logits the row samples */
  int32_t* page_table; /* [max_batch + 1][max_pages_per_lane] physical pages; page 0 is the sink */
  blink_sampling_params* sampling; /* [max_batch] by row */
  /* outputs: the graph writes, the scheduler reads */
  int32_t* sampled_ids;    /* [max_batch] token id; -1: the row's logits held NaN */
  float* sampled_logprobs; /* [max_batch][1 + 2 * BLINK_MAX_TOP_LOGPROBS]: chosen, then (id,
                              logprob) pairs; null when logprobs were not compiled in */
  uint32_t max_step_tokens;
  uint32_t max_batch;
  uint32_t max_pages_per_lane;
  uint32_t page_size_tokens;
} blink_step_buffers;

#endif /* BLINK_STEP_H */
