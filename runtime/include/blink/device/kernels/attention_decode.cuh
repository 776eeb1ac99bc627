/* Attention of one new token a row over its pages: the KV range is split over blocks, the group of
 * query heads that share a KV head is one operand of the tensor core, and the block that owns the
 * new position appends it. The split follows from graph key and length alone, so equal keys give
 * equal bits.
 *
 * A lane copies the words of keys and values that it will itself feed to the tensor core into its
 * own places in shared memory, several chunks of 16 tokens ahead; no barrier is needed. The order
 * of the head size inside a step of 32 is permuted alike for q and k, and the columns of the output
 * product are head-size indices in an order of our choosing (see `ValueColumns`).
 */
#ifndef BLINK_DEVICE_KERNELS_ATTENTION_DECODE_CUH
#define BLINK_DEVICE_KERNELS_ATTENTION_DECODE_CUH

#include "types.cuh"

namespace blink::kernels {

struct DecodeAttention {
  const void* q;              // [B, Hq, d], rotated
  const void* k;              // [B, Hkv, d], rotated
  const void* v;              // [B, Hkv, d]
  void* out;                  // [B, Hq, d]
  void* kv;                   // this layer's [num_pages, 2, Hkv, page_size, d]
  const int32_t* page_table;  // [lanes][max_pages_per_lane]
  const int32_t* row_kv_len;
  const int32_t* row_lane;
  const void* sinks;   // [Hq] or null
  float* partial;      // [B][Hkv][splits][group][d + 2]; null when splits is 1
  uint32_t* arrivals;  // [B][Hkv], zero between launches
  int32_t num_kv_heads;
  int32_t group;  // query heads a KV head
  int32_t max_pages_per_lane;
  int32_t page_shift;        // log2 of page_size, at least 4
  int32_t min_split_tokens;  // a multiple of 16
  int32_t window;            // 0: all
  float scale;
  float softcap;  // 0: off
};

constexpr int kPieceStride = 512;  // a warp's lanes, 16 bytes each

/* A key row split over 4 lanes: 16 bytes a lane for each 32 values, then 8 bytes for a rest of 16.
 */
template <int kDim>
struct KeyWords {
  static constexpr int kFull = kDim / 32, kHasRest = kDim % 32 != 0;
  static constexpr int kCount = kFull * 4 + kHasRest * 2;  // words a lane
  static constexpr int kPieces = kFull + kHasRest;
  static_assert(kDim % 16 == 0, "head size in steps of 16");

  template <typename T>
  static __device__ __forceinline__ void load(uint32_t (&w)[kCount], const T* row, int t) {
#pragma unroll
    for (int i = 0; i < kFull; ++i) {
      const uint4 x = load_global16(row + i * 32 + t * 8);
      w[i * 4] = x.x, w[i * 4 + 1] = x.y, w[i * 4 + 2] = x.z, w[i * 4 + 3] = x.w;
    }
    if constexpr (kHasRest != 0) {
      const uint2 x = load_global8(row + kFull * 32 + t * 4);
      w[kFull * 4] = x.x, w[kFull * 4 + 1] = x.y;
    }
  }
  template <typename T>
  static __device__ __forceinline__ void request(uint32_t place, const T* row, int t) {
#pragma unroll
    for (int i = 0; i < kFull; ++i)
      copy_piece<16>(place + i * kPieceStride, row + i * 32 + t * 8, true);
    if constexpr (kHasRest != 0)
      copy_piece<8>(place + kFull * kPieceStride, row + kFull * 32 + t * 4, true);
  }
  static __device__ __forceinline__ void read(uint32_t (&w)[kCount], uint32_t place) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 x = load_shared16(place + i * kPieceStride);
      w[i * 4] = x.x, w[i * 4 + 1] = x.y;
      if (i < kFull) w[i * 4 + 2] = x.z, w[i * 4 + 3] = x.w;
    }
  }
};

/* A value row split over 8 lanes: g holds 8 values of each 64, 4 of a 32 and 2 of a 16 that remain.
 * Column tile j of the output product, column g, is then head-size index `index(j, g)`. */
template <int kDim>
struct ValueColumns {
  static constexpr int k64 = kDim / 64, k32 = kDim % 64 / 32, k16 = kDim % 32 / 16;
  static constexpr int kCount = kDim / 16;  // words a lane
  static constexpr int kTiles = kDim / 8;
  static constexpr int kPieces = k64 + k32 + k16;

  template <typename T>
  static __device__ __forceinline__ void request(uint32_t place, const T* row, int g, bool keep) {
#pragma unroll
    for (int i = 0; i < k64; ++i)
      copy_piece<16>(place + i * kPieceStride, row + i * 64 + g * 8, keep);
    if constexpr (k32 != 0) copy_piece<8>(place + k64 * kPieceStride, row + k64 * 64 + g * 4, keep);
    if constexpr (k16 != 0)
      copy_piece<4>(place + (k64 + k32) * kPieceStride, row + k64 * 64 + k32 * 32 + g * 2, keep);
  }
  static __device__ __forceinline__ void read(uint32_t (&w)[kCount], uint32_t place) {
#pragma unroll
    for (int i = 0; i < k64; ++i) {
      const uint4 x = load_shared16(place + i * kPieceStride);
      w[i * 4] = x.x, w[i * 4 + 1] = x.y, w[i * 4 + 2] = x.z, w[i * 4 + 3] = x.w;
    }
    if constexpr (k32 != 0) {
      const uint4 x = load_shared16(place + k64 * kPieceStride);
      w[k64 * 4] = x.x, w[k64 * 4 + 1] = x.y;
    }
    if constexpr (k16 != 0)
      w[k64 * 4 + k32 * 2] = load_shared16(place + (k64 + k32) * kPieceStride).x;
  }
  static __device__ __forceinline__ int index(int tile, int g) {
    if (tile < k64 * 8) return tile / 8 * 64 + g * 8 + tile % 8;
    tile -= k64 * 8;
    if (tile < k32 * 4) return k64 * 64 + g * 4 + tile;
    return k64 * 64 + k32 * 32 + g * 2 + (tile - k32 * 4);
  }
};

/* Folds the splits' partial results of one (row, KV head) in their order. `factors` holds group *
 * splits. */
template <typename T, int kDim, int kWarps>
__device__ __forceinline__ void merge_splits(const DecodeAttention& a, int row, int head,
                                             int splits_used, float* factors) {
  const int64_t stride = static_cast<int64_t>(a.group) * (kDim + 2);
  const float* base = a.partial + (row * a.num_kv_heads + head) * gridDim.x * stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int h = warp; h < a.group; h += kWarps) {
    const float* from = base + h * (kDim + 2) + kDim;
    float top = kMinusInf;
    for (int s = lane; s < splits_used; s += 32) top = fmaxf(top, __ldcg(from + s * stride));
    top = warp_max(top);
    float sink = kMinusInf;
    if (a.sinks != nullptr) {
      sink = to_float(static_cast<const T*>(a.sinks)[head * a.group + h]) * kLog2e;
      top = fmaxf(top, sink);
    }
    float total = 0.0f;
    for (int s = lane; s < splits_used; s += 32) {
      const float m = __ldcg(from + s * stride);
      const float factor = m == kMinusInf ? 0.0f : exp2_fast(m - top);
      factors[h * splits_used + s] = factor;
      total += __ldcg(from + s * stride + 1) * factor;
    }
    total = warp_sum(total) + (a.sinks != nullptr ? exp2_fast(sink - top) : 0.0f);
    __syncwarp();
    for (int s = lane; s < splits_used; s += 32) factors[h * splits_used + s] /= total;
  }
  __syncthreads();
  T* out =
      static_cast<T*>(a.out) + static_cast<int64_t>(row * a.num_kv_heads + head) * a.group * kDim;
  for (int i = threadIdx.x; i < a.group * kDim; i += kWarps * 32) {
    const int h = i / kDim, d = i % kDim;
    const float* from = base + h * (kDim + 2) + d;
    float value = 0.0f;
#pragma unroll 8
    for (int s = 0; s < splits_used; ++s)
      value += __ldcg(from + s * stride) * factors[h * splits_used + s];
    out[i] = from_float<T>(value);
  }
}

template <int kDim>
constexpr int kDecodeChunkBytes =
    (2 * KeyWords<kDim>::kPieces + 4 * ValueColumns<kDim>::kPieces) * kPieceStride;
constexpr int kDecodeDepth = 2;  // chunks in flight a warp

/* The ring of chunks, and in the same place afterwards the warps' results. */
template <int kDim, bool kWide, int kWarps>
constexpr int decode_attention_shared_bytes() {
  const int ring = kWarps * kDecodeDepth * kDecodeChunkBytes<kDim>;
  const int results = kWarps * (kWide ? 16 : 8) * (kDim + 2) * 4;
  return ring > results ? ring : results;
}

/* Grid (splits, Hkv, B), kWarps warps. kWide: group 9..16, else 1..8. At most 64 splits.
 *
 * Lengths and page tables were written before this graph began, and the pages of earlier tokens
 * before that, so the first keys and values are asked for without awaiting the previous kernel. */
template <typename T, int kDim, bool kWide, int kWarps>
__device__ __forceinline__ void decode_attention(const DecodeAttention& a) {
  constexpr int kRows = kWide ? 16 : 8, kHalves = kWide ? 2 : 1;
  using Keys = KeyWords<kDim>;
  using Values = ValueColumns<kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  float* shared_floats = reinterpret_cast<float*>(shared);
  __shared__ bool last_arrived;
  let_next_start();

  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_len = a.row_kv_len[row], last = kv_len - 1;
  const int first_key = a.window > 0 ? max(0, kv_len - a.window) : 0;
  const int origin = first_key & ~15;
  // A row shares its own length out evenly: the same length at the same key gives the same split.
  const int even =
      (kv_len - origin + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int split_tokens = max(a.min_split_tokens, (even + 15) & ~15);
  const int begin = origin + split * split_tokens;
  const int end = min(begin + split_tokens, kv_len);
  const int64_t new_row = static_cast<int64_t>(row * a.num_kv_heads + head) * kDim;
  T* out = static_cast<T*>(a.out) + new_row * a.group;
  if (kv_len == 0) {  // padding: zeros, so that nothing downstream depends on stale memory
    wait_for_previous();
    if (split == 0)
      for (int i = threadIdx.x; i < a.group * kDim; i += blockDim.x) out[i] = from_float<T>(0.0f);
    return;
  }
  if (begin >= kv_len) {
    wait_for_previous();
    return;
  }
  const int splits_used = (kv_len - origin + split_tokens - 1) / split_tokens;
  const int32_t* pages =
      a.page_table + static_cast<int64_t>(a.row_lane[row]) * a.max_pages_per_lane;
  const int page_mask = (1 << a.page_shift) - 1;
  const int64_t to_values = (static_cast<int64_t>(a.num_kv_heads) << a.page_shift) * kDim;
  auto key_row = [&](int token) -> T* {
    const int64_t page = pages[token >> a.page_shift];
    return static_cast<T*>(a.kv) +
           (((page * 2 * a.num_kv_heads + head) << a.page_shift) + (token & page_mask)) * kDim;
  };

  // 16 keys never straddle a page: `chunk` and the page size are multiples of 16. The new token's
  // place is being written by this very launch, so its key and value come from k and v.
  const T* new_key = static_cast<const T*>(a.k) + new_row;
  const T* new_value = static_cast<const T*>(a.v) + new_row;
  const uint32_t ring =
      shared_address(shared) + warp * kDecodeDepth * kDecodeChunkBytes<kDim> + lane * 16;
  constexpr int kKeyPieces = Keys::kPieces, kValuePieces = Values::kPieces;
  auto request = [&](int chunk, int slot, bool with_new) {
    const T* keys = key_row(chunk);
    const uint32_t place = ring + slot * kDecodeChunkBytes<kDim>;
    Keys::request(place, with_new && chunk + g == last ? new_key : keys + g * kDim, t);
    Keys::request(place + kKeyPieces * kPieceStride,
                  with_new && chunk + g + 8 == last ? new_key : keys + (g + 8) * kDim, t);
    const T* values = keys + to_values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * t + (i & 1) + (i >> 1) * 8;
      // Past the end zeros: stale memory may hold NaN, and 0 * NaN is NaN.
      Values::request(place + (2 * kKeyPieces + i * kValuePieces) * kPieceStride,
                      with_new && chunk + token == last ? new_value : values + token * kDim, g,
                      chunk + token < kv_len);
    }
  };
  constexpr int kStep = kWarps * 16;
  const int first_chunk = begin + warp * 16;
#pragma unroll
  for (int s = 0; s < kDecodeDepth; ++s) {
    const int chunk = first_chunk + s * kStep;
    if (chunk < end && chunk + 16 <= last) request(chunk, s, false);
  }
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < kDecodeDepth; ++s) {
    const int chunk = first_chunk + s * kStep;
    if (chunk < end && chunk + 16 > last) request(chunk, s, true);
    copy_async_commit();
  }
  uint32_t q[kHalves][Keys::kCount];
#pragma unroll
  for (int r = 0; r < kHalves; ++r) {
    const int h = r * 8 + g;
#pragma unroll
    for (int i = 0; i < Keys::kCount; ++i) q[r][i] = 0;
    if (h < a.group) Keys::load(q[r], static_cast<const T*>(a.q) + new_row * a.group + h * kDim, t);
  }
  if (end == kv_len) {  // this block owns the new token's place; nobody reads it in this launch
    constexpr int kPieces = kDim / 8;
    for (int i = threadIdx.x; i < 2 * kPieces; i += blockDim.x) {
      const int which = i / kPieces, piece = i % kPieces;
      const uint4 words = load_global16((which == 0 ? new_key : new_value) + piece * 8);
      *reinterpret_cast<uint4*>(key_row(last) + which * to_values + piece * 8) = words;
    }
  }

  float top[kHalves], total[kHalves];
  float acc[Values::kTiles][kHalves * 2];
#pragma unroll
  for (int r = 0; r < kHalves; ++r) top[r] = kMinusInf, total[r] = 0.0f;
#pragma unroll
  for (int j = 0; j < Values::kTiles; ++j)
#pragma unroll
    for (int c = 0; c < kHalves * 2; ++c) acc[j][c] = 0.0f;

  int slot = 0;
#pragma unroll 1
  for (int chunk = first_chunk; chunk < end; chunk += kStep) {
    copy_async_wait<kDecodeDepth - 1>();
    const uint32_t place = ring + slot * kDecodeChunkBytes<kDim>;
    float s[2][4] = {};  // scores of keys 0..7 and 8..15 of the chunk
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t k[Keys::kCount];
      Keys::read(k, place + n * kKeyPieces * kPieceStride);
#pragma unroll
      for (int i = 0; i < Keys::kCount; i += 2) {
        if constexpr (kWide) {
          mma<T>(s[n], q[0][i], q[1][i], q[0][i + 1], q[1][i + 1], k[i], k[i + 1]);
        } else {
          mma<T>(s[n], q[0][i], 0, q[0][i + 1], 0, k[i], k[i + 1]);
        }
      }
    }

    uint32_t p[kHalves][2];
#pragma unroll
    for (int r = 0; r < kHalves; ++r) {
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int key = chunk + (c >> 1) * 8 + 2 * t + (c & 1);
        float score = s[c >> 1][r * 2 + (c & 1)] * a.scale;
        if (a.softcap > 0.0f) score = a.softcap * tanhf(score / a.softcap);
        x[c] = key < kv_len && key >= first_key ? score * kLog2e : kMinusInf;
      }
      float chunk_top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      chunk_top = fmaxf(chunk_top, __shfl_xor_sync(0xffffffffu, chunk_top, 1));
      chunk_top = fmaxf(chunk_top, __shfl_xor_sync(0xffffffffu, chunk_top, 2));
      const float new_top = fmaxf(top[r], chunk_top);
      const float base = new_top == kMinusInf ? 0.0f : new_top;
      const float factor = exp2_fast(top[r] - base);
      top[r] = new_top;
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = exp2_fast(x[c] - base);
        sum += x[c];
      }
      total[r] = total[r] * factor + sum;
      p[r][0] = pack2<T>(x[0], x[1]);
      p[r][1] = pack2<T>(x[2], x[3]);
#pragma unroll
      for (int j = 0; j < Values::kTiles; ++j) {
        acc[j][r * 2] *= factor;
        acc[j][r * 2 + 1] *= factor;
      }
    }
    uint32_t v[4][Values::kCount];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Values::read(v[i], place + (2 * kKeyPieces + i * kValuePieces) * kPieceStride);
#pragma unroll
    for (int j = 0; j < Values::kTiles; ++j) {
      const uint32_t select = j & 1 ? 0x7632 : 0x5410;
      const uint32_t b0 = __byte_perm(v[0][j / 2], v[1][j / 2], select);
      const uint32_t b1 = __byte_perm(v[2][j / 2], v[3][j / 2], select);
      if constexpr (kWide) {
        mma<T>(acc[j], p[0][0], p[1][0], p[0][1], p[1][1], b0, b1);
      } else {
        mma_half<T>(acc[j], p[0][0], p[0][1], b0, b1);
      }
    }
    if (chunk + kDecodeDepth * kStep < end) request(chunk + kDecodeDepth * kStep, slot, true);
    copy_async_commit();
    slot = slot + 1 == kDecodeDepth ? 0 : slot + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // the results take the ring's place

  // Fold the warps, in their order.
#pragma unroll
  for (int r = 0; r < kHalves; ++r) {
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
    float* mine = shared_floats + (warp * kRows + r * 8 + g) * (kDim + 2);
#pragma unroll
    for (int j = 0; j < Values::kTiles; ++j) {
      // Columns 2t and 2t + 1 of the tile.
      mine[Values::index(j, 2 * t)] = acc[j][r * 2];
      mine[Values::index(j, 2 * t + 1)] = acc[j][r * 2 + 1];
    }
    if (t == 0) mine[kDim] = top[r], mine[kDim + 1] = total[r];
  }
  __syncthreads();
  const bool direct = splits_used == 1;
  float* partial = direct ? nullptr
                          : a.partial + ((row * a.num_kv_heads + head) * gridDim.x + split) *
                                            static_cast<int64_t>(a.group) * (kDim + 2);
  for (int i = threadIdx.x; i < a.group * kDim; i += kWarps * 32) {
    const int h = i / kDim, d = i % kDim;
    const float* from = shared_floats + h * (kDim + 2);
    constexpr int kStride = kRows * (kDim + 2);
    float all_top = kMinusInf;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all_top = fmaxf(all_top, from[w * kStride + kDim]);
    float sum = 0.0f, value = 0.0f;
    if (direct && a.sinks != nullptr) {
      const float sink = to_float(static_cast<const T*>(a.sinks)[head * a.group + h]) * kLog2e;
      all_top = fmaxf(all_top, sink);
      sum = exp2_fast(sink - all_top);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float m = from[w * kStride + kDim];
      const float factor = m == kMinusInf ? 0.0f : exp2_fast(m - all_top);
      sum += from[w * kStride + kDim + 1] * factor;
      value += from[w * kStride + d] * factor;
    }
    if (direct) {
      out[i] = from_float<T>(value / sum);
    } else {
      __stcg(partial + h * (kDim + 2) + d, value);
      if (d == 0) {
        __stcg(partial + h * (kDim + 2) + kDim, all_top);
        __stcg(partial + h * (kDim + 2) + kDim + 1, sum);
      }
    }
  }
  if (direct) return;

  // The last split to arrive folds all of them; the counter returns to zero for the next launch.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* arrivals = a.arrivals + row * a.num_kv_heads + head;
    last_arrived = atomicAdd(arrivals, 1u) + 1u == static_cast<uint32_t>(splits_used);
    if (last_arrived) *arrivals = 0;
  }
  __syncthreads();
  if (!last_arrived) return;
  __threadfence();
  merge_splits<T, kDim, kWarps>(a, row, head, splits_used, shared_floats);
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ATTENTION_DECODE_CUH
