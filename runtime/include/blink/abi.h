/* The ring: memory shared by the GPU that serves and the front ends that feed it.
 *
 * One plain-C header, read by nvcc, NVRTC, g++ and (through cffi) Python. Fixed-width types,
 * explicit padding, no conditional compilation. Sizes that vary by bundle (slots, strides) are not
 * ABI: they stand in blink_ring_header and are checked on attach.
 *
 * Every word has exactly one writer, named beside it: FE a front end, GPU the scheduler, HOST the
 * process that owns the ring. "pairs:" names the load that a store is ordered with. Over a link the
 * payload is written first and the command last, on one queue pair.
 *
 * Version 1 is frozen: fields are only ever added in reserved space, which writers set to zero.
 */
#ifndef BLINK_ABI_H
#define BLINK_ABI_H

#include <stdint.h>

#define BLINK_MAGIC 0x31474E49524B4E42u /* "BNKRING1", little-endian */
#define BLINK_ABI_VERSION 1u
#define BLINK_MAX_FRONT_ENDS 16u
#define BLINK_MAX_STOP_TOKEN_IDS 16u
#define BLINK_MAX_LOGIT_BIAS 32u
#define BLINK_MAX_TOP_LOGPROBS 5u
#define BLINK_MAX_NUM_GENERATED 0xFFFFFFu /* the count shares a word with state and sequence */

/* slot_command.command */
#define BLINK_COMMAND_NONE 0u
#define BLINK_COMMAND_SUBMIT 1u
#define BLINK_COMMAND_ABORT 2u
#define BLINK_COMMAND_RELEASE 3u

/* slot_status.word: sequence << 32 | state << 24 | num_generated */
#define BLINK_STATE_EMPTY 0u
#define BLINK_STATE_PREFILL_PENDING 1u
#define BLINK_STATE_PREFILL_PROCESSING 2u
#define BLINK_STATE_DECODE_PROCESSING 3u
#define BLINK_STATE_DECODE_PAUSED 4u
#define BLINK_STATE_DECODE_COMPLETED 5u
#define BLINK_STATE_FAILED 6u

/* slot_status.finish_reason */
#define BLINK_FINISH_NONE 0u
#define BLINK_FINISH_STOP 1u
#define BLINK_FINISH_LENGTH 2u
#define BLINK_FINISH_ABORT 3u
#define BLINK_FINISH_ERROR 4u

/* slot_status.error */
#define BLINK_ERROR_NONE 0u
#define BLINK_ERROR_CHECKSUM 1u     /* payload and checksum disagreed on every reading */
#define BLINK_ERROR_BAD_REQUEST 2u  /* a field is outside the ring's limits */
#define BLINK_ERROR_NAN_LOGITS 3u   /* this request's logits held NaN */
#define BLINK_ERROR_LAUNCH 4u       /* the graph of its step could not be launched */
#define BLINK_ERROR_EPOCH 5u        /* its front end attached anew */
#define BLINK_ERROR_OUT_OF_PAGES 6u /* could never fit in the KV cache */

/* slot_request.flags */
#define BLINK_REQUEST_IGNORE_EOS 1u

typedef struct blink_counters {
  uint64_t steps; /* graphs launched and finished */
  uint64_t prefill_steps;
  uint64_t decode_steps;
  uint64_t off_cache_steps; /* steps whose exact bucket was missing: the fallback key ran */
  uint64_t prompt_tokens;   /* prefilled, resumed prefills included */
  uint64_t output_tokens;
  uint64_t admitted; /* requests that got a lane, first time */
  uint64_t finished; /* stop or length */
  uint64_t aborted;
  uint64_t failed;
  uint64_t paused;
  uint64_t resumed;
  uint64_t checksum_retries;
  uint64_t late_commands; /* commands whose sequence was not the slot's */
  uint64_t rescans;
  uint64_t idle_polls;
  uint32_t lanes_running; /* gauges from here on */
  uint32_t requests_waiting;
  uint32_t pages_free;
  uint32_t pages_total;
  uint32_t max_wait_steps; /* longest wait seen by a running lane, in prefill steps between two
                              decodes */
  uint32_t reserved0;
  uint64_t reserved[5];
} blink_counters; /* 192 bytes */

typedef struct blink_ring_header {
  /* line 0..1: written once by HOST before the magic, read on attach */
  uint64_t magic; /* stored last, release. pairs: acquire on attach */
  uint32_t abi_version;
  uint32_t header_bytes; /* sizeof(blink_ring_header) */
  uint64_t ring_bytes;
  uint32_t num_slots;
  uint32_t num_front_ends;    /* slot ranges: front end f owns [f*num_slots/F, (f+1)*num_slots/F) */
  uint32_t max_prompt_tokens; /* prompt area: tokens per slot */
  uint32_t max_output_tokens; /* output area: records per slot */
  uint32_t
      output_record_bytes; /* 8, or sizeof(blink_output_record) when logprobs were compiled in */
  uint32_t max_seqlen;     /* prompt + output tokens of one request */
  uint32_t max_batch;      /* lanes */
  uint32_t vocab_size;
  uint32_t page_size_tokens;
  uint32_t num_kv_pages;     /* usable pages, the sink page not counted */
  uint64_t front_end_offset; /* blink_front_end[num_front_ends] */
  uint64_t command_offset;   /* blink_slot_command[num_slots] */
  uint64_t request_offset;   /* blink_slot_request[num_slots] */
  uint64_t status_offset;    /* blink_slot_status[num_slots] */
  uint64_t prompt_offset;    /* uint32_t[num_slots][max_prompt_tokens] */
  uint64_t output_offset;  /* records, output_record_bytes apart, [num_slots][max_output_tokens] */
  uint64_t trace_offset;   /* blink_trace_record[trace_capacity] */
  uint32_t trace_capacity; /* a power of two */
  uint32_t sampler_features; /* BLINK_SAMPLER_* bits this target's sampler honours */
  uint64_t bundle_id;        /* first 8 bytes of the bundle's content hash; 0: unknown */
  uint64_t incarnation;      /* random for each ring that is made; 0: unknown */
  uint64_t reserved_sizes[14];
  /* line 4: HOST */
  uint32_t stop; /* 1: finish and return. release. pairs: GPU acquire each step and idle poll */
  uint32_t reserved_stop[15];
  /* line 5: GPU, every step and idle poll */
  uint64_t heartbeat;        /* grows while the scheduler lives. relaxed */
  uint64_t step;             /* steps finished. relaxed */
  uint32_t launch_error;     /* last CUDA error of a device launch, 0: none */
  uint32_t launch_error_key; /* its graph key's index */
  uint32_t stopped;          /* 1: the scheduler has returned. release */
  uint32_t scheduler_state;  /* BLINK_SCHEDULER_* */
  uint64_t trace_count;      /* records ever written, release. record i is at i & (capacity - 1) */
  uint64_t longest_step_ns;  /* of the last minute's steps; the watchdog's yardstick. relaxed */
  uint64_t reserved_gpu[2];
  /* lines 6..8: GPU, relaxed; statistics only */
  blink_counters counters;
  uint64_t reserved_tail[8];
} blink_ring_header; /* 640 bytes */

#define BLINK_SCHEDULER_STARTING 0u
#define BLINK_SCHEDULER_IDLE 1u
#define BLINK_SCHEDULER_RUNNING 2u
#define BLINK_SCHEDULER_STOPPED 3u

#define BLINK_SAMPLER_TOP_K 1u
#define BLINK_SAMPLER_TOP_P 2u
#define BLINK_SAMPLER_MIN_P 4u
#define BLINK_SAMPLER_PENALTIES 8u
#define BLINK_SAMPLER_LOGIT_BIAS 16u
#define BLINK_SAMPLER_LOGPROBS 32u
#define BLINK_SAMPLER_MIN_TOKENS 64u

/* One cache line per front end; writer: that FE. */
typedef struct blink_front_end {
  uint64_t submit_count; /* commands written since attach. release, after slot_command. pairs: GPU
                            acquire */
  uint32_t epoch; /* new at each attach, never 0 once attached. release. pairs: GPU acquire */
  uint32_t reserved0;
  uint64_t heartbeat; /* grows while the front end lives; relaxed */
  uint64_t reserved[5];
} blink_front_end; /* 64 bytes */

/* Writer: FE. sequence and command share one 8-byte word. */
typedef struct blink_slot_command {
  uint64_t word; /* sequence << 32 | command. release, after the payload. pairs: GPU acquire */
  uint64_t submit_number; /* order of submission within the front end; written before word */
} blink_slot_command;     /* 16 bytes */

/* Writer: GPU. */
typedef struct blink_slot_status {
  uint64_t word; /* sequence << 32 | state << 24 | num_generated. release, after records and
                    finish_reason. pairs: FE acquire */
  uint32_t finish_reason; /* BLINK_FINISH_*; valid once state is decode_completed or failed */
  uint32_t error;         /* BLINK_ERROR_* */
} blink_slot_status;      /* 16 bytes */

/* Writer: FE, before the submit command. Every unused field and entry is zero. */
typedef struct blink_slot_request {
  uint64_t checksum; /* blink_checksum over this struct from `sequence` on, then the prompt ids */
  uint32_t sequence; /* equals the command's */
  uint32_t epoch;    /* equals the front end's */
  uint64_t submit_number;
  uint64_t seed; /* always set; the front end draws one where the client gave none */
  uint32_t num_prompt_tokens;
  uint32_t max_output_tokens;
  uint32_t flags;           /* BLINK_REQUEST_* */
  float temperature;        /* 0: greedy */
  float top_p;              /* 1: off */
  float min_p;              /* 0: off */
  uint32_t top_k;           /* 0: off */
  float presence_penalty;   /* 0: off */
  float frequency_penalty;  /* 0: off */
  float repetition_penalty; /* 1: off */
  uint32_t num_logprobs;    /* 0: none; n: chosen token's and n-1 top ones */
  uint32_t num_stop_token_ids;
  uint32_t num_logit_bias;
  uint32_t reserved0;
  uint32_t stop_token_ids[16];
  uint32_t logit_bias_ids[32];
  float logit_bias_values[32];
  uint32_t min_output_tokens; /* no stop token is sampled before this many; 0: off */
  uint32_t reserved[25];
} blink_slot_request; /* 512 bytes */

typedef struct blink_output_record {
  uint32_t token_id;
  float logprob; /* of token_id, NaN where not asked for */
  uint32_t num_top;
  uint32_t reserved0;
  uint32_t top_ids[5];
  float top_logprobs[5];
  uint32_t reserved[2];
} blink_output_record; /* 64 bytes; rings without logprobs keep only its first 8 */

/* Writer: GPU; one for each step. */
typedef struct blink_trace_record {
  uint64_t step;
  uint64_t start_ns; /* GPU global timer (CPU target: CLOCK_MONOTONIC) */
  uint64_t end_ns;
  uint32_t kind; /* BLINK_GRAPH_* */
  uint32_t key_index;
  uint32_t batch;      /* of the key */
  uint32_t seqlen;     /* of the key */
  uint32_t num_lanes;  /* real rows */
  uint32_t num_tokens; /* real tokens */
  uint32_t requests_waiting;
  uint32_t pages_free;
  uint64_t reserved;
} blink_trace_record; /* 64 bytes */

#define BLINK_GRAPH_PREFILL 0u
#define BLINK_GRAPH_DECODE 1u

#endif /* BLINK_ABI_H */
