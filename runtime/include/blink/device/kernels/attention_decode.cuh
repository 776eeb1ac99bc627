/* Attention of one new token a row over its pages: the KV range is split over blocks, the group of query
 * heads that share a KV head is one operand of the tensor core, and the block that owns the new position
 * appends it first. The split is fixed by the graph key, so equal keys give equal bits.
 *
 * Keys go from memory to registers in the order the tensor core wants them, without shared memory: the order
 * of the head size inside a step of 32 is permuted alike for q and k, and the columns of the output
 * product are head-size indices in an order of our choosing (see `ValueColumns`).
 */
#ifndef BLINK_DEVICE_KERNELS_ATTENTION_DECODE_CUH
#define BLINK_DEVICE_KERNELS_ATTENTION_DECODE_CUH

#include "types.cuh"

namespace blink::kernels {

struct DecodeAttention {
  const void* q;             // [B, Hq, d], rotated
  const void* k;             // [B, Hkv, d], rotated
  const void* v;             // [B, Hkv, d]
  void* out;                 // [B, Hq, d]
  void* kv;                  // this layer's [num_pages, 2, Hkv, page_size, d]
  const int32_t* page_table; // [lanes][max_pages_per_lane]
  const int32_t* row_kv_len;
  const int32_t* row_lane;
  const void* sinks;         // [Hq] or null
  float* partial;            // [B][Hkv][splits][group][d + 2]; null when splits is 1
  uint32_t* arrivals;        // [B][Hkv], zero between launches
  int32_t num_kv_heads;
  int32_t group;             // query heads a KV head
  int32_t max_pages_per_lane;
  int32_t page_shift;        // log2 of page_size, at least 4
  int32_t split_tokens;      // a multiple of 16
  int32_t window;            // 0: all
  float scale;
  float softcap;             // 0: off
};

__device__ __forceinline__ uint4 load_global16(const void* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
}
__device__ __forceinline__ uint2 load_global8(const void* p) {
  uint2 r;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ uint32_t load_global4(const void* p) {
  uint32_t r;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}

/* A row of head size kDim as words of 2 values, split over 4 lanes: 16 bytes a lane for each 32 values,
 * then 8 bytes for a rest of 16. */
template <int kDim>
struct KeyWords {
  static constexpr int kFull = kDim / 32, kHasRest = kDim % 32 != 0;
  static constexpr int kCount = kFull * 4 + kHasRest * 2;
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
};

/* A value row split over 8 lanes: g holds 8 values of each 64, 4 of a 32 and 2 of a 16 that remain. Column
 * tile j of the output product, column g, is then head-size index `index(j, g)`. */
template <int kDim>
struct ValueColumns {
  static constexpr int k64 = kDim / 64, k32 = kDim % 64 / 32, k16 = kDim % 32 / 16;
  static constexpr int kCount = kDim / 16;  // words a lane
  static constexpr int kTiles = kDim / 8;

  template <typename T>
  static __device__ __forceinline__ void load(uint32_t (&w)[kCount], const T* row, int g) {
#pragma unroll
    for (int i = 0; i < k64; ++i) {
      const uint4 x = load_global16(row + i * 64 + g * 8);
      w[i * 4] = x.x, w[i * 4 + 1] = x.y, w[i * 4 + 2] = x.z, w[i * 4 + 3] = x.w;
    }
    if constexpr (k32 != 0) {
      const uint2 x = load_global8(row + k64 * 64 + g * 4);
      w[k64 * 4] = x.x, w[k64 * 4 + 1] = x.y;
    }
    if constexpr (k16 != 0) w[k64 * 4 + k32 * 2] = load_global4(row + k64 * 64 + k32 * 32 + g * 2);
  }
  static __device__ __forceinline__ int index(int tile, int g) {
    if (tile < k64 * 8) return tile / 8 * 64 + g * 8 + tile % 8;
    tile -= k64 * 8;
    if (tile < k32 * 4) return k64 * 64 + g * 4 + tile;
    return k64 * 64 + k32 * 32 + g * 2 + (tile - k32 * 4);
  }
};

/* Folds the splits' partial results of one (row, KV head) in their order. */
template <typename T, int kDim>
__device__ __forceinline__ void merge_splits(const DecodeAttention& a, int row, int head, int splits_used) {
  const int splits = gridDim.x;
  const float* base = a.partial + static_cast<int64_t>((row * a.num_kv_heads + head) * splits) * a.group *
                                      (kDim + 2);
  const int64_t stride = static_cast<int64_t>(a.group) * (kDim + 2);
  T* out = static_cast<T*>(a.out) +
           static_cast<int64_t>(row * a.num_kv_heads + head) * a.group * kDim;
  for (int i = threadIdx.x; i < a.group * kDim; i += blockDim.x) {
    const int h = i / kDim, d = i % kDim;
    const float* from = base + h * (kDim + 2);
    float top = kMinusInf;
    for (int s = 0; s < splits_used; ++s) top = fmaxf(top, __ldcg(from + s * stride + kDim));
    float total = 0.0f, value = 0.0f;
    if (a.sinks != nullptr) {
      const float sink =
          to_float(static_cast<const T*>(a.sinks)[head * a.group + h]) * kLog2e;
      top = fmaxf(top, sink);
      total = exp2f(sink - top);
    }
    for (int s = 0; s < splits_used; ++s) {
      const float m = __ldcg(from + s * stride + kDim);
      const float factor = m == kMinusInf ? 0.0f : exp2f(m - top);
      total += __ldcg(from + s * stride + kDim + 1) * factor;
      value += __ldcg(from + s * stride + d) * factor;
    }
    out[i] = from_float<T>(value / total);
  }
}

template <int kDim, bool kWide, int kWarps>
constexpr int decode_attention_shared_bytes() {
  return kWarps * (kWide ? 16 : 8) * (kDim + 2) * 4;
}

/* Grid (splits, Hkv, B), kWarps warps. kWide: group 9..16, else 1..8. */
template <typename T, int kDim, bool kWide, int kWarps>
__device__ __forceinline__ void decode_attention(const DecodeAttention& a) {
  constexpr int kRows = kWide ? 16 : 8, kHalves = kWide ? 2 : 1;
  using Keys = KeyWords<kDim>;
  using Values = ValueColumns<kDim>;
  extern __shared__ __align__(128) unsigned char shared[];
  float* shared_floats = reinterpret_cast<float*>(shared);
  __shared__ bool last;
  let_next_start();
  wait_for_previous();

  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_len = a.row_kv_len[row];
  T* out = static_cast<T*>(a.out) + static_cast<int64_t>(row * a.num_kv_heads + head) * a.group * kDim;
  if (kv_len == 0) {  // padding: zeros, so that nothing downstream depends on stale memory
    if (split == 0)
      for (int i = threadIdx.x; i < a.group * kDim; i += blockDim.x) out[i] = from_float<T>(0.0f);
    return;
  }
  const int first_key = a.window > 0 ? max(0, kv_len - a.window) : 0;
  const int origin = first_key & ~15;
  const int begin = origin + split * a.split_tokens;
  const int end = min(begin + a.split_tokens, kv_len);
  if (begin >= kv_len) return;
  const int splits_used = (kv_len - origin + a.split_tokens - 1) / a.split_tokens;

  const int32_t* pages = a.page_table + static_cast<int64_t>(a.row_lane[row]) * a.max_pages_per_lane;
  const int page_mask = (1 << a.page_shift) - 1;
  auto key_row = [&](int token, int which) -> T* {
    const int64_t page = pages[token >> a.page_shift];
    return static_cast<T*>(a.kv) +
           ((((page * 2 + which) * a.num_kv_heads + head) << a.page_shift) + (token & page_mask)) * kDim;
  };
  if (end == kv_len) {  // this block owns the new token's place
    constexpr int kPieces = kDim / 8;
    const int64_t from = static_cast<int64_t>(row * a.num_kv_heads + head) * kDim;
    for (int i = threadIdx.x; i < 2 * kPieces; i += blockDim.x) {
      const int which = i / kPieces, piece = i % kPieces;
      const T* source = static_cast<const T*>(which == 0 ? a.k : a.v) + from + piece * 8;
      *reinterpret_cast<uint4*>(key_row(kv_len - 1, which) + piece * 8) = load_global16(source);
    }
    __syncthreads();
  }

  uint32_t q[kHalves][Keys::kCount];
#pragma unroll
  for (int r = 0; r < kHalves; ++r) {
    const int h = r * 8 + g;
#pragma unroll
    for (int i = 0; i < Keys::kCount; ++i) q[r][i] = 0;
    if (h < a.group)
      Keys::load(q[r],
                 static_cast<const T*>(a.q) +
                     (static_cast<int64_t>(row * a.num_kv_heads + head) * a.group + h) * kDim,
                 t);
  }

  float top[kHalves], total[kHalves];
  float acc[Values::kTiles][kHalves * 2];
#pragma unroll
  for (int r = 0; r < kHalves; ++r) top[r] = kMinusInf, total[r] = 0.0f;
#pragma unroll
  for (int j = 0; j < Values::kTiles; ++j)
#pragma unroll
    for (int c = 0; c < kHalves * 2; ++c) acc[j][c] = 0.0f;

#pragma unroll 1
  for (int chunk = begin + warp * 16; chunk < end; chunk += kWarps * 16) {
    // 16 keys never straddle a page: `chunk` and the page size are multiples of 16.
    const T* keys = key_row(chunk, 0);
    const T* values = keys + (static_cast<int64_t>(a.num_kv_heads) << a.page_shift) * kDim;
    uint32_t k0[Keys::kCount], k1[Keys::kCount];
    Keys::load(k0, keys + g * kDim, t);
    Keys::load(k1, keys + (g + 8) * kDim, t);
    uint32_t v[4][Values::kCount];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * t + (i & 1) + (i >> 1) * 8;
      Values::load(v[i], values + token * kDim, g);
      if (chunk + token >= kv_len) {  // stale memory may hold NaN, and 0 * NaN is NaN
#pragma unroll
        for (int w = 0; w < Values::kCount; ++w) v[i][w] = 0;
      }
    }

    float s[2][4] = {};  // scores of keys 0..7 and 8..15 of the chunk
#pragma unroll
    for (int i = 0; i < Keys::kCount; i += 2) {
      if constexpr (kWide) {
        mma<T>(s[0], q[0][i], q[1][i], q[0][i + 1], q[1][i + 1], k0[i], k0[i + 1]);
        mma<T>(s[1], q[0][i], q[1][i], q[0][i + 1], q[1][i + 1], k1[i], k1[i + 1]);
      } else {
        mma<T>(s[0], q[0][i], 0, q[0][i + 1], 0, k0[i], k0[i + 1]);
        mma<T>(s[1], q[0][i], 0, q[0][i + 1], 0, k1[i], k1[i + 1]);
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
      const float factor = exp2f(top[r] - base);
      top[r] = new_top;
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = exp2f(x[c] - base);
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
  }

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
                          : a.partial + (static_cast<int64_t>((row * a.num_kv_heads + head) * gridDim.x) +
                                         split) * a.group * (kDim + 2);
  for (int i = threadIdx.x; i < a.group * kDim; i += blockDim.x) {
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
      sum = exp2f(sink - all_top);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float m = from[w * kStride + kDim];
      const float factor = m == kMinusInf ? 0.0f : exp2f(m - all_top);
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
    last = atomicAdd(arrivals, 1u) + 1u == static_cast<uint32_t>(splits_used);
    if (last) *arrivals = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  merge_splits<T, kDim>(a, row, head, splits_used);
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ATTENTION_DECODE_CUH
