// Paged attention of one layer: appends the step's keys and values to their pages, then attends.
//
// Every query is computed by one fixed sequence of operations over its own keys, oldest first, in
// pages; which other queries are in the step, and which thread runs it, changes nothing.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "blink/cpu/gemm.hpp"
#include "blink/cpu/math.hpp"
#include "blink/cpu/parallel.hpp"

namespace blink::cpu {

struct AttentionArgs {
  const float* q;             // [num_tokens, num_q_heads, head_dim]
  const float* k;             // [num_tokens, num_kv_heads, head_dim]
  const float* v;             // [num_tokens, num_kv_heads, head_dim]
  const float* sinks;         // [num_q_heads] or null: a logit each head adds to its softmax
  float* out;                 // [num_tokens, num_q_heads, head_dim]
  float* cache;               // [num_pages, 2, num_kv_heads, page_size, head_dim]
  const int32_t* positions;   // [num_tokens]
  const int32_t* token_row;   // [num_tokens], -1: padding
  const int32_t* row_lane;    // [rows]
  const int32_t* page_table;  // [lanes, max_pages_per_lane]
  uint32_t num_tokens;
  uint32_t num_q_heads;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t page_size;  // tokens
  uint32_t max_pages_per_lane;
  uint32_t num_pages;
  uint32_t window;  // keys a query sees, its own included; 0: all
  float scale;
  float softcap;  // 0: off
};

struct AttentionScratch {
  float* scores;  // [max_pages_per_lane * page_size + 8] for each thread
  size_t stride;  // floats from thread to thread
};

// A part of a vector, the rest zero.
inline Vector8 load_part(const float* p, uint32_t count) {
  Vector8 v = splat(0.0f);
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

// Lane j of the result is the sum of the lanes of a[j], added pairwise in one fixed order.
inline Vector8 sum_lanes(const Vector8 (&a)[8]) {
  using Mask = VectorU8;
  Vector8 b[4];
  for (int i = 0; i < 4; ++i) {
    const Vector8 even = __builtin_shuffle(a[2 * i], a[2 * i + 1], Mask{0, 8, 2, 10, 4, 12, 6, 14});
    const Vector8 odd = __builtin_shuffle(a[2 * i], a[2 * i + 1], Mask{1, 9, 3, 11, 5, 13, 7, 15});
    b[i] = even + odd;
  }
  Vector8 c[2];
  for (int i = 0; i < 2; ++i) {
    const Vector8 low = __builtin_shuffle(b[2 * i], b[2 * i + 1], Mask{0, 1, 8, 9, 4, 5, 12, 13});
    const Vector8 high =
        __builtin_shuffle(b[2 * i], b[2 * i + 1], Mask{2, 3, 10, 11, 6, 7, 14, 15});
    c[i] = low + high;
  }
  const Vector8 low = __builtin_shuffle(c[0], c[1], Mask{0, 1, 2, 3, 8, 9, 10, 11});
  const Vector8 high = __builtin_shuffle(c[0], c[1], Mask{4, 5, 6, 7, 12, 13, 14, 15});
  return low + high;
}

inline const float* page_of(const AttentionArgs& a, const int32_t* pages, uint32_t position,
                            uint32_t part, uint32_t head) {
  const uint32_t page = static_cast<uint32_t>(pages[position / a.page_size]);
  const size_t line = (size_t{page} * 2 + part) * a.num_kv_heads + head;
  return a.cache + line * a.page_size * a.head_dim;
}

// Whether the token's place lies in its lane's pages; a scheduler's mistake must not write
// elsewhere.
inline bool has_place(const AttentionArgs& a, uint32_t token) {
  const int64_t position = a.positions[token];
  if (a.token_row[token] < 0 || position < 0) return false;
  return position < int64_t{a.max_pages_per_lane} * a.page_size;
}

inline const int32_t* pages_of(const AttentionArgs& a, uint32_t token) {
  const int32_t lane = a.row_lane[a.token_row[token]];
  return a.page_table + size_t(lane) * a.max_pages_per_lane;
}

inline void append_token(const AttentionArgs& a, uint32_t token) {
  if (!has_place(a, token)) return;  // padding: nothing reads what it would write
  const uint32_t position = static_cast<uint32_t>(a.positions[token]);
  const int32_t* pages = pages_of(a, token);
  if (static_cast<uint32_t>(pages[position / a.page_size]) >= a.num_pages) return;
  const size_t slot = size_t{position % a.page_size} * a.head_dim;
  const size_t line = size_t{token} * a.num_kv_heads * a.head_dim;
  for (uint32_t head = 0; head < a.num_kv_heads; ++head) {
    const size_t from = line + size_t{head} * a.head_dim;
    float* key = const_cast<float*>(page_of(a, pages, position, 0, head)) + slot;
    float* value = const_cast<float*>(page_of(a, pages, position, 1, head)) + slot;
    std::memcpy(key, a.k + from, a.head_dim * sizeof(float));
    std::memcpy(value, a.v + from, a.head_dim * sizeof(float));
  }
}

// Scores of `count` keys of one page against q; writes eight at a time, the excess is overwritten
// later.
inline void score_page(const float* q, const float* keys, uint32_t head_dim, uint32_t count,
                       float* scores) {
  const uint32_t whole = head_dim / 8 * 8;
  for (uint32_t first = 0; first < count; first += 8) {
    const uint32_t group = std::min(8u, count - first);
    const float* line = keys + first * size_t{head_dim};
    Vector8 acc[8];
    for (Vector8& v : acc) v = splat(0.0f);
    if (group == 8) {
      for (uint32_t i = 0; i < whole; i += 8) {
        const Vector8 x = load8(q + i);
#pragma GCC unroll 8
        for (uint32_t j = 0; j < 8; ++j) {
          acc[j] = fma8(x, load8(line + j * size_t{head_dim} + i), acc[j]);
        }
      }
    } else {
      for (uint32_t j = 0; j < group; ++j) {
        for (uint32_t i = 0; i < whole; i += 8) {
          acc[j] = fma8(load8(q + i), load8(line + j * size_t{head_dim} + i), acc[j]);
        }
      }
    }
    if (whole < head_dim) {
      const Vector8 x = load_part(q + whole, head_dim - whole);
      for (uint32_t j = 0; j < group; ++j) {
        const float* rest = line + j * size_t{head_dim} + whole;
        acc[j] = fma8(x, load_part(rest, head_dim - whole), acc[j]);
      }
    }
    store8(scores + first, sum_lanes(acc));
  }
}

// Turns scores into unnormalized probabilities; returns 1 / their sum. Maximum and sum run in eight
// lanes; `scores` has room for a multiple of eight.
inline float softmax_scores(const AttentionArgs& a, uint32_t head, float* scores, uint32_t count) {
  const uint32_t padded = (count + 7) / 8 * 8;
  for (uint32_t i = 0; i < count; ++i) scores[i] *= a.scale;
  for (uint32_t i = count; i < padded; ++i) scores[i] = -INFINITY;
  if (a.softcap > 0.0f) {
    for (uint32_t i = 0; i < count; ++i) scores[i] = a.softcap * tanh_f32(scores[i] / a.softcap);
  }
  Vector8 tops = splat(a.sinks ? a.sinks[head] : -INFINITY);
  for (uint32_t i = 0; i < padded; i += 8) {
    const Vector8 s = load8(scores + i);
    tops = tops < s ? s : tops;
  }
  float top = tops[0];
  for (uint32_t lane = 1; lane < 8; ++lane) top = max_f32(top, tops[lane]);
  for (uint32_t i = 0; i < padded; ++i) scores[i] = exp_f32(scores[i] - top);
  Vector8 sums = splat(0.0f);
  for (uint32_t i = 0; i < padded; i += 8) sums += load8(scores + i);
  float sum = a.sinks ? exp_f32(a.sinks[head] - top) : 0.0f;
  for (uint32_t lane = 0; lane < 8; ++lane) sum += sums[lane];
  return 1.0f / sum;
}

// Fetches what a head of one page will read: keys and values lie far from what came before.
inline void prefetch_page(const AttentionArgs& a, const int32_t* pages, uint32_t position,
                          uint32_t part, uint32_t kv_head) {
  const float* line = page_of(a, pages, position, part, kv_head);
  const uint32_t size = a.page_size * a.head_dim;
  for (uint32_t i = 0; i < size; i += 16) __builtin_prefetch(line + i, 0, 3);
}

// 64 columns of the weighted sum of values over all keys, oldest first.
inline void weigh_values(const AttentionArgs& a, const int32_t* pages, uint32_t kv_head,
                         uint32_t first, uint32_t last, const float* p, uint32_t column,
                         float factor, float* out) {
  const uint32_t columns = std::min(64u, a.head_dim - column);
  Vector8 acc[8];
  for (Vector8& v : acc) v = splat(0.0f);
  for (uint32_t position = first; position <= last;) {
    const uint32_t slot = position % a.page_size;
    const uint32_t count = std::min(a.page_size - slot, last + 1 - position);
    const float* values =
        page_of(a, pages, position, 1, kv_head) + size_t{slot} * a.head_dim + column;
    for (uint32_t j = 0; j < count; ++j, ++p, values += a.head_dim) {
      const Vector8 weight = splat(*p);
      if (columns == 64) {
#pragma GCC unroll 8
        for (uint32_t c = 0; c < 8; ++c) acc[c] = fma8(weight, load8(values + 8 * c), acc[c]);
      } else {
        for (uint32_t c = 0; 8 * c < columns; ++c) {
          const uint32_t part = std::min(8u, columns - 8 * c);
          acc[c] = fma8(weight, load_part(values + 8 * c, part), acc[c]);
        }
      }
    }
    position += count;
  }
  float line[64];
  for (uint32_t c = 0; c < 8; ++c) store8(line + 8 * c, acc[c] * splat(factor));
  std::memcpy(out + column, line, columns * sizeof(float));
}

inline void attend(const AttentionArgs& a, uint32_t token, uint32_t head, float* scores) {
  const size_t line = (size_t{token} * a.num_q_heads + head) * a.head_dim;
  float* out = a.out + line;
  if (!has_place(a, token)) {
    std::memset(out, 0, a.head_dim * sizeof(float));
    return;
  }
  const int32_t* pages = pages_of(a, token);
  const uint32_t group = a.num_q_heads / a.num_kv_heads;
  const uint32_t kv_head = head / group;
  const bool first_of_group = head % group == 0;
  const uint32_t last = static_cast<uint32_t>(a.positions[token]);
  const uint32_t first = a.window && last + 1 > a.window ? last + 1 - a.window : 0;
  for (uint32_t position = first; position <= last;) {
    const uint32_t slot = position % a.page_size;
    const uint32_t count = std::min(a.page_size - slot, last + 1 - position);
    const float* keys = page_of(a, pages, position, 0, kv_head) + size_t{slot} * a.head_dim;
    if (first_of_group) {  // the other heads of the group find them in the cache
      if (position + count <= last) prefetch_page(a, pages, position + count, 0, kv_head);
      prefetch_page(a, pages, position, 1, kv_head);
    }
    score_page(a.q + line, keys, a.head_dim, count, scores + (position - first));
    position += count;
  }
  const float factor = softmax_scores(a, head, scores, last + 1 - first);
  for (uint32_t column = 0; column < a.head_dim; column += 64) {
    weigh_values(a, pages, kv_head, first, last, scores, column, factor, out);
  }
}

// Two phases: all keys and values of the step are in place before any query runs.
inline void paged_attention(Worker& worker, const AttentionArgs& a,
                            const AttentionScratch& scratch) {
  const RowChunks appends(a.num_tokens, worker.num_threads());
  worker.phase(appends.count(), [&](uint32_t chunk) {
    for (uint32_t t = appends.begin(chunk); t < appends.end(chunk); ++t) append_token(a, t);
  });
  float* scores = scratch.scores + worker.index() * scratch.stride;
  const uint32_t tasks = a.num_tokens * a.num_q_heads;
  const uint32_t size = std::max(1u, std::min(tasks / (8 * worker.num_threads()), 64u));
  worker.phase((tasks + size - 1) / size, [&](uint32_t chunk) {
    for (uint32_t i = chunk * size; i < std::min(tasks, (chunk + 1) * size); ++i) {
      attend(a, i % a.num_tokens, i / a.num_tokens, scores);
    }
  });
}

}  // namespace blink::cpu
