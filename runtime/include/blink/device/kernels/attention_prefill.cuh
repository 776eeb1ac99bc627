/* Attention of the new tokens of packed rows over their pages (which hold the new tokens too:
 * kv_append runs first). One block takes 128 (token, query head of the group) pairs of one row and
 * one KV head, and walks the keys in tiles of 64 through two shared-memory stages.
 *
 * A row's tiles start at its own first token, so a row's result does not depend on what is packed
 * beside it.
 */
#ifndef BLINK_DEVICE_KERNELS_ATTENTION_PREFILL_CUH
#define BLINK_DEVICE_KERNELS_ATTENTION_PREFILL_CUH

#include "types.cuh"

namespace blink::kernels {

struct PrefillAttention {
  const void* q;              // [T, Hq, d], rotated
  void* out;                  // [T, Hq, d]
  const void* kv;             // this layer's [num_pages, 2, Hkv, page_size, d]
  const int32_t* page_table;  // [lanes][max_pages_per_lane]
  const int32_t* row_query_start;
  const int32_t* row_kv_len;
  const int32_t* row_lane;
  const void* sinks;  // [Hq] or null
  int32_t num_rows;   // of the key
  int32_t num_kv_heads;
  int32_t group;
  int32_t max_pages_per_lane;
  int32_t page_shift;
  int32_t window;
  float scale;
  float softcap;
};

constexpr int kPrefillPairs = 128, kPrefillKeys = 64;

/* Tiles of 16 pairs that a warp holds: two share each load of keys and values, where registers
 * allow. */
template <int kDim>
constexpr int kPrefillRowTiles = kDim <= 128 ? 2 : 1;
template <int kDim>
constexpr int kPrefillThreads = kPrefillPairs / 16 / kPrefillRowTiles<kDim> * 32;

template <int kDim>
constexpr int prefill_attention_shared_bytes() {
  return (kPrefillPairs + 4 * kPrefillKeys) * (kDim + 8) * 2;
}

/* Tokens a block takes. */
__device__ __forceinline__ int prefill_tokens_per_tile(int group) { return kPrefillPairs / group; }

/* Grid (Hkv, tiles), tiles at least the sum over rows of ceil(tokens / tokens_per_tile): T / that +
 * B suffices. kPrefillThreads<kDim> threads. */
template <typename T, int kDim>
__device__ __forceinline__ void prefill_attention(const PrefillAttention& a) {
  // Rows of shared memory are padded by 16 bytes: 8 rows of a matrix load hit distinct banks.
  constexpr int kStride = kDim + 8, kPieces = kDim / 8, kSteps = kDim / 16;
  constexpr int kTiles = kPrefillRowTiles<kDim>, kThreads = kPrefillThreads<kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  T* q_shared = reinterpret_cast<T*>(shared);
  T* k_shared = q_shared + kPrefillPairs * kStride;     // two stages
  T* v_shared = k_shared + 2 * kPrefillKeys * kStride;  // two stages
  let_next_start();
  wait_for_previous();

  // The last tiles of a row see the most keys: they go first, of all heads.
  const int head = blockIdx.x, tile_tokens = prefill_tokens_per_tile(a.group);
  int row = 0, tile = gridDim.y - 1 - blockIdx.y, first = 0, num_new = 0, kv_len = 0;
  for (; row < a.num_rows; ++row) {
    kv_len = a.row_kv_len[row];
    first = a.row_query_start[row];
    num_new = kv_len > 0 ? a.row_query_start[row + 1] - first : 0;
    const int tiles = (num_new + tile_tokens - 1) / tile_tokens;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (row == a.num_rows) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tile_first = tile * tile_tokens;  // token within the row
  const int tile_count = min(tile_tokens, num_new - tile_first);
  const int position0 = kv_len - num_new + tile_first;
  const int num_q_heads = a.num_kv_heads * a.group;
  const int32_t* pages =
      a.page_table + static_cast<int64_t>(a.row_lane[row]) * a.max_pages_per_lane;
  const int page_mask = (1 << a.page_shift) - 1;

  for (int i = threadIdx.x; i < kPrefillPairs * kPieces; i += kThreads) {
    const int pair = i / kPieces, piece = i % kPieces, token = pair / a.group, h = pair % a.group;
    const bool real = token < tile_count;
    const T* from = static_cast<const T*>(a.q) +
                    (static_cast<int64_t>(first + tile_first + (real ? token : 0)) * num_q_heads +
                     head * a.group + h) *
                        kDim +
                    piece * 8;
    copy_async(shared_address(q_shared + pair * kStride + piece * 8), from, real);
  }
  const int key_end = position0 + tile_count;  // one past the last key any pair sees
  const int key_begin =
      a.window > 0 ? max(0, position0 - a.window + 1) / kPrefillKeys * kPrefillKeys : 0;
  const int64_t to_values = (static_cast<int64_t>(a.num_kv_heads) << a.page_shift) * kDim;
  auto request = [&](int key0, int stage) {
#pragma unroll 4
    for (int i = threadIdx.x; i < kPrefillKeys * kPieces; i += kThreads) {
      const int key = i / kPieces, piece = i % kPieces, token = key0 + key;
      const bool real = token < key_end;
      const int64_t page = real ? pages[token >> a.page_shift] : 0;
      const T* from =
          static_cast<const T*>(a.kv) +
          (((page * 2 * a.num_kv_heads + head) << a.page_shift) + (token & page_mask)) * kDim +
          piece * 8;
      const int at = (stage * kPrefillKeys + key) * kStride + piece * 8;
      copy_async(shared_address(k_shared + at), from, real);
      copy_async(shared_address(v_shared + at), from + to_values, real);
    }
    copy_async_commit();
  };
  request(key_begin, 0);

  // This lane's pairs: rows g and g + 8 of each of the warp's tiles.
  int position[kTiles][2];
  float top[kTiles][2], total[kTiles][2];
  float acc[kTiles][kDim / 8][4];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      position[m][r] = position0 + ((warp * kTiles + m) * 16 + r * 8 + g) / a.group;
      top[m][r] = kMinusInf;
      total[m][r] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[m][j][c] = 0.0f;
  }
  const float scale = a.softcap > 0.0f ? a.scale : a.scale * kLog2e;
  const uint32_t q_address =
      shared_address(q_shared + (warp * kTiles * 16 + (lane & 15)) * kStride + (lane >> 4) * 8);
  int stage = 0;
#pragma unroll 1
  for (int key0 = key_begin; key0 < key_end; key0 += kPrefillKeys, stage ^= 1) {
    if (key0 + kPrefillKeys < key_end) {
      request(key0 + kPrefillKeys, stage ^ 1);
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    __syncthreads();
    float s[kTiles][kPrefillKeys / 8][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kPrefillKeys / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
    const uint32_t k_address =
        shared_address(k_shared + (stage * kPrefillKeys + (lane & 7) + (lane >> 4) * 8) * kStride +
                       ((lane >> 3) & 1) * 8);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t q[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        load_matrix(q[m], q_address + (m * 16 * kStride + i * 16) * 2);
#pragma unroll
      for (int n = 0; n < kPrefillKeys / 16; ++n) {
        uint32_t k[4];
        load_matrix(k, k_address + (n * 16 * kStride + i * 16) * 2);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma<T>(s[m][2 * n], q[m][0], q[m][1], q[m][2], q[m][3], k[0], k[1]);
          mma<T>(s[m][2 * n + 1], q[m][0], q[m][1], q[m][2], q[m][3], k[2], k[3]);
        }
      }
    }
    if (a.softcap > 0.0f) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kPrefillKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            s[m][n][c] = a.softcap * kLog2e * tanhf(s[m][n][c] * scale / a.softcap);
    }
    const float factor_of_score = a.softcap > 0.0f ? 1.0f : scale;
    const bool edge = key0 + kPrefillKeys > position0 + 1 || a.window > 0;
    if (edge) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kPrefillKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int key = key0 + n * 8 + 2 * t + (c & 1), p = position[m][c >> 1];
            if (key > p || (a.window > 0 && key <= p - a.window)) s[m][n][c] = kMinusInf;
          }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float tile_top = kMinusInf;
#pragma unroll
        for (int n = 0; n < kPrefillKeys / 8; ++n)
          tile_top = fmaxf(tile_top, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        tile_top = fmaxf(tile_top, __shfl_xor_sync(0xffffffffu, tile_top, 1));
        tile_top = fmaxf(tile_top, __shfl_xor_sync(0xffffffffu, tile_top, 2));
        const float new_top = fmaxf(top[m][r], tile_top * factor_of_score);
        const float base = new_top == kMinusInf ? 0.0f : new_top;
        const float factor = exp2_fast(top[m][r] - base);
        top[m][r] = new_top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kPrefillKeys / 8; ++n) {
          s[m][n][2 * r] = exp2_fast(fmaf(s[m][n][2 * r], factor_of_score, -base));
          s[m][n][2 * r + 1] = exp2_fast(fmaf(s[m][n][2 * r + 1], factor_of_score, -base));
          sum += s[m][n][2 * r] + s[m][n][2 * r + 1];
        }
        total[m][r] = total[m][r] * factor + sum;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          acc[m][j][2 * r] *= factor;
          acc[m][j][2 * r + 1] *= factor;
        }
      }
    const uint32_t v_address =
        shared_address(v_shared + (stage * kPrefillKeys + (lane & 15)) * kStride + (lane >> 4) * 8);
#pragma unroll
    for (int n = 0; n < kPrefillKeys / 16; ++n) {
      uint32_t p[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        p[m][0] = pack2<T>(s[m][2 * n][0], s[m][2 * n][1]);
        p[m][1] = pack2<T>(s[m][2 * n][2], s[m][2 * n][3]);
        p[m][2] = pack2<T>(s[m][2 * n + 1][0], s[m][2 * n + 1][1]);
        p[m][3] = pack2<T>(s[m][2 * n + 1][2], s[m][2 * n + 1][3]);
      }
#pragma unroll
      for (int j = 0; j < kDim / 16; ++j) {
        uint32_t v[4];
        load_matrix_transposed(v, v_address + (n * 16 * kStride + j * 16) * 2);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma<T>(acc[m][2 * j], p[m][0], p[m][1], p[m][2], p[m][3], v[0], v[1]);
          mma<T>(acc[m][2 * j + 1], p[m][0], p[m][1], p[m][2], p[m][3], v[2], v[3]);
        }
      }
    }
    __syncthreads();  // the next request overwrites this stage
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = total[m][r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int pair = (warp * kTiles + m) * 16 + r * 8 + g, token = pair / a.group,
                h = pair % a.group;
      if (token >= tile_count) continue;
      float factor = 1.0f;
      if (a.sinks != nullptr) {
        const float sink = to_float(static_cast<const T*>(a.sinks)[head * a.group + h]) * kLog2e;
        const float new_top = fmaxf(top[m][r], sink);
        factor = exp2_fast(top[m][r] - new_top);
        sum = sum * factor + exp2_fast(sink - new_top);
      }
      const float inverse = factor / sum;
      T* to =
          static_cast<T*>(a.out) +
          (static_cast<int64_t>(first + tile_first + token) * num_q_heads + head * a.group + h) *
              kDim;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j)
        *reinterpret_cast<uint32_t*>(to + j * 8 + 2 * t) =
            pack2<T>(acc[m][j][2 * r] * inverse, acc[m][j][2 * r + 1] * inverse);
    }
}

struct KvAppend {
  const void* k;  // [T, Hkv, d]
  const void* v;  // [T, Hkv, d]
  void* kv;       // this layer's pages
  const int32_t* page_table;
  const int32_t* positions;
  const int32_t* token_row;
  const int32_t* row_lane;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t max_pages_per_lane;
  int32_t page_shift;
};

/* Writes the step's keys and values into their pages. One block a token; padding tokens write
 * nothing. */
template <typename T>
__device__ __forceinline__ void kv_append(const KvAppend& a) {
  let_next_start();
  wait_for_previous();
  const int token = blockIdx.x, row = a.token_row[token];
  if (row < 0) return;
  const int position = a.positions[token];
  const int64_t page = a.page_table[static_cast<int64_t>(a.row_lane[row]) * a.max_pages_per_lane +
                                    (position >> a.page_shift)];
  const int offset = position & ((1 << a.page_shift) - 1);
  const int pieces = a.head_dim / 8, half = a.num_kv_heads * pieces;
  for (int i = threadIdx.x; i < 2 * half; i += blockDim.x) {
    const int which = i / half, head = i % half / pieces, piece = i % pieces;
    const T* from = static_cast<const T*>(which == 0 ? a.k : a.v) +
                    (static_cast<int64_t>(token) * a.num_kv_heads + head) * a.head_dim + piece * 8;
    T* to = static_cast<T*>(a.kv) +
            ((((page * 2 + which) * a.num_kv_heads + head) << a.page_shift) + offset) * a.head_dim +
            piece * 8;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  }
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ATTENTION_PREFILL_CUH
