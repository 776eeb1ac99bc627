/* The attention of attention_prefill.cuh by warpgroup products (sm_90a): same launch, same results
 * up to rounding.
 *
 * A block's two warpgroups take 64 (token, query head) pairs each and share the tiles of 64 keys
 * and values, which come through two stages. Queries stay in shared memory; scores become weights
 * in registers, which are an operand of the second product as they lie. Where registers allow, two
 * blocks share a multiprocessor: one's exponentials run beside the other's products.
 */
#ifndef BLINK_DEVICE_KERNELS_ATTENTION_PREFILL_WARPGROUP_CUH
#define BLINK_DEVICE_KERNELS_ATTENTION_PREFILL_WARPGROUP_CUH

#include "attention_prefill.cuh"
#include "warpgroup.cuh"

namespace blink::kernels {

constexpr int kPanelPrefillThreads = 256;
template <int kDim>
constexpr int kHeadPanels = (kDim + 63) / 64;
/* Blocks on a multiprocessor: a head of 256 values wants all registers. */
template <int kDim>
constexpr int kPanelPrefillBlocks = kDim <= 128 ? 2 : 1;
template <int kDim>
constexpr int panel_prefill_shared_bytes() {
  return (kPrefillPairs + 4 * kPrefillKeys) * kHeadPanels<kDim> * kPanelBytes + 1024;
}

#if BLINK_HAS_WARPGROUP_PRODUCTS

/* The part of a row that a block works on. */
struct PrefillTile {
  int row;
  int first_token;  // of the step
  int count;        // tokens
  int position;     // of the first token in its sequence
};

/* Finds the block's tile; false when there are fewer. The last tiles of a row see the most keys:
 * they go first. */
__device__ __forceinline__ bool find_prefill_tile(const PrefillAttention& a, PrefillTile& found) {
  const int tile_tokens = prefill_tokens_per_tile(a.group);
  int tile = static_cast<int>(gridDim.y) - 1 - static_cast<int>(blockIdx.y);
  for (int row = 0; row < a.num_rows; ++row) {
    const int kv_len = a.row_kv_len[row], first = a.row_query_start[row];
    const int num_new = kv_len > 0 ? a.row_query_start[row + 1] - first : 0;
    const int tiles = (num_new + tile_tokens - 1) / tile_tokens;
    if (tile < tiles) {
      const int at = tile * tile_tokens;
      found = {row, first + at, min(tile_tokens, num_new - at), kv_len - num_new + at};
      return true;
    }
    tile -= tiles;
  }
  return false;
}

/* Copies tiles of keys and values from their pages. The numbers of a tile's pages come a tile ahead
 * into shared memory: in registers they would spill, and their load be waited for in every tile. */
template <typename T, int kDim>
struct PanelLoader {
  static constexpr uint32_t kPieces = kDim / 8, kThreads = kPanelPrefillThreads;
  static constexpr int kCopies = (kPrefillKeys * kPieces + kThreads - 1) / kThreads;
  static constexpr int kPanel = kPrefillKeys * kPanelBytes;
  static constexpr int kChunks = kPrefillKeys / 16;  // no page is smaller

  const int32_t* pages;
  const char* base;  // the head's keys in page 0
  uint32_t page_bytes;
  uint32_t to_values;  // bytes from a key to its value
  int page_shift;
  int key_end;                   // one past the last key that is read
  uint32_t (*numbers)[kChunks];  // shared memory; of two tiles

  __device__ PanelLoader(const PrefillAttention& a, int row, int head, int end,
                         uint32_t (*shared_numbers)[kChunks])
      : page_shift(a.page_shift), key_end(end), numbers(shared_numbers) {
    pages = a.page_table + static_cast<int64_t>(a.row_lane[row]) * a.max_pages_per_lane;
    const uint32_t head_bytes = static_cast<uint32_t>(kDim * 2) << page_shift;
    base = static_cast<const char*>(a.kv) + static_cast<int64_t>(head) * head_bytes;
    to_values = a.num_kv_heads * head_bytes;
    page_bytes = 2 * to_values;
  }
  /* Asks for the page numbers of the tile at `key0`, which the next copies' wait brings. */
  __device__ __forceinline__ void look_up(int key0, int slot) const {
    if (threadIdx.x >= kChunks) return;
    const int token = key0 + static_cast<int>(threadIdx.x) * 16;
    const bool real = token < key_end;
    copy_piece<4>(shared_address(&numbers[slot][threadIdx.x]),
                  pages + (real ? token >> page_shift : 0), real);
  }
  /* A thread's first copy is 16 bytes of a key's row. Where its others are of keys kRows further
   * each, they lie alike in the swizzle, which repeats every 8 rows. */
  static constexpr bool kIsEven = kThreads % kPieces == 0;
  static constexpr uint32_t kRows = kThreads / kPieces;
  static_assert(!kIsEven || kRows % 8 == 0);
  static __device__ __forceinline__ uint32_t key_of(uint32_t thread, int copy) {
    return kIsEven ? thread / kPieces + copy * kRows : (thread + copy * kThreads) / kPieces;
  }

  /* `stage`: the keys' panels, the values' behind them. */
  __device__ __forceinline__ void request(int key0, uint32_t stage, int slot) const {
    // Places are reckoned anew each time: kept over the loop, they would spill.
    const uint32_t thread = thread_read_anew(), mask = (1u << page_shift) - 1;
    uint32_t number[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      number[i] = numbers[slot][min(key_of(thread, i), kPrefillKeys - 1u) / 16];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t index = thread + i * kThreads;
      const uint32_t key = key_of(thread, i);
      const uint32_t piece = kIsEven ? thread % kPieces : index % kPieces;
      if (!kIsEven && key >= kPrefillKeys) break;
      const int token = key0 + static_cast<int>(key);
      const uint32_t inside = (static_cast<uint32_t>(token) & mask) * (kDim * 2) + piece * 16;
      const char* from = base + static_cast<uint64_t>(number[i]) * page_bytes + inside;
      const uint32_t row = kIsEven ? thread / kPieces : key;
      const uint32_t to =
          stage + piece / 8 * kPanel + panel_offset(row, piece % 8) + (key - row) * kPanelBytes;
      copy_async(to, from, token < key_end);
      copy_async(to + kHeadPanels<kDim> * kPanel, from + to_values, token < key_end);
    }
  }
};

/* tanh(x / 2) of x in units of log2(e), to about 1e-7: a few instructions where tanhf takes forty.
 */
__device__ __forceinline__ float tanh_of_half(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x));
}

/* Turns scores into weights: soft cap, mask, running maximum and sum. `factor` is what the sums so
 * far shrink by. position: of this lane's two rows. */
template <int kCount>
__device__ __forceinline__ void weigh_scores(const PrefillAttention& a, float (&s)[kCount],
                                             int key0, const int (&position)[2], int first_position,
                                             float (&top)[2], float (&total)[2],
                                             float (&factor)[2]) {
  const int t = threadIdx.x % 4;
  float scale = a.scale * kLog2e;
  if (a.softcap > 0.0f) {
    const float inner = 2.0f * scale / a.softcap, outer = a.softcap * kLog2e;
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = outer * tanh_of_half(s[i] * inner);
    scale = 1.0f;
  }
  if (key0 + kPrefillKeys > first_position + 1 || a.window > 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = key0 + i / 4 * 8 + 2 * t + (i & 1), p = position[i >> 1 & 1];
      if (key > p || (a.window > 0 && key <= p - a.window)) s[i] = kMinusInf;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float tile_top = kMinusInf;
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      tile_top = fmaxf(tile_top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    tile_top = fmaxf(tile_top, __shfl_xor_sync(0xffffffffu, tile_top, 1));
    tile_top = fmaxf(tile_top, __shfl_xor_sync(0xffffffffu, tile_top, 2));
    const float new_top = fmaxf(top[r], tile_top * scale);
    const float base = new_top == kMinusInf ? 0.0f : new_top;
    factor[r] = exp2_fast(top[r] - base);
    top[r] = new_top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      s[i + 2 * r] = exp2_fast(fmaf(s[i + 2 * r], scale, -base));
      s[i + 2 * r + 1] = exp2_fast(fmaf(s[i + 2 * r + 1], scale, -base));
      sum += s[i + 2 * r] + s[i + 2 * r + 1];
    }
    total[r] = total[r] * factor[r] + sum;
  }
}

/* Divides by the sums, sinks included, and stores this lane's two rows. */
template <typename T, int kDim>
__device__ __forceinline__ void store_prefill(const PrefillAttention& a, const PrefillTile& tile,
                                              int head, int first_pair, float (&acc)[kDim / 2],
                                              const float (&top)[2], const float (&total)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = total[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int pair = first_pair + r * 8, token = pair / a.group, h = pair % a.group;
    if (token >= tile.count) continue;
    float factor = 1.0f;
    if (a.sinks != nullptr) {
      const float sink = to_float(static_cast<const T*>(a.sinks)[head * a.group + h]) * kLog2e;
      const float new_top = fmaxf(top[r], sink);
      factor = exp2_fast(top[r] - new_top);
      sum = sum * factor + exp2_fast(sink - new_top);
    }
    const float inverse = factor / sum;
    T* to = static_cast<T*>(a.out) +
            (static_cast<int64_t>(tile.first_token + token) * a.num_kv_heads * a.group +
             head * a.group + h) *
                kDim +
            2 * t;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j)
      *reinterpret_cast<uint32_t*>(to + j * 8) =
          pack2<T>(acc[4 * j + 2 * r] * inverse, acc[4 * j + 2 * r + 1] * inverse);
  }
}

/* Grid (Hkv, tiles) as for `prefill_attention`; kPanelPrefillThreads threads. */
template <typename T, int kDim>
__device__ __forceinline__ void panel_prefill_attention(const PrefillAttention& a) {
  constexpr int kPanels = kHeadPanels<kDim>, kPieces = kDim / 8, kSteps = kDim / 16;
  constexpr int kQueryPanel = kPrefillPairs * kPanelBytes, kKeyPanel = kPrefillKeys * kPanelBytes;
  constexpr int kStage = 2 * kPanels * kKeyPanel;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t queries = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t ring = queries + kPanels * kQueryPanel;
  let_next_start();
  wait_for_previous();
  PrefillTile tile;
  if (!find_prefill_tile(a, tile)) return;
  const int head = blockIdx.x, num_q_heads = a.num_kv_heads * a.group;

  const int key_end = tile.position + tile.count;  // one past the last key any pair sees
  const int key_begin =
      a.window > 0 ? max(0, tile.position - a.window + 1) / kPrefillKeys * kPrefillKeys : 0;
  using Loader = PanelLoader<T, kDim>;
  __shared__ uint32_t page_numbers[2][Loader::kChunks];
  const Loader loader(a, tile.row, head, key_end, page_numbers);
  loader.look_up(key_begin, 0);
  loader.look_up(key_begin + kPrefillKeys, 1);
  copy_async_commit();
  for (int i = threadIdx.x; i < kPrefillPairs * kPieces; i += kPanelPrefillThreads) {
    const int pair = i / kPieces, piece = i % kPieces, token = pair / a.group, h = pair % a.group;
    const bool real = token < tile.count;
    const T* from = static_cast<const T*>(a.q) +
                    (static_cast<int64_t>(tile.first_token + (real ? token : 0)) * num_q_heads +
                     head * a.group + h) *
                        kDim +
                    piece * 8;
    copy_async(queries + piece / 8 * kQueryPanel + panel_offset(pair, piece % 8), from, real);
  }
  copy_async_commit();
  copy_async_wait<1>();
  __syncthreads();  // the page numbers are there
  loader.request(key_begin, ring, 0);
  copy_async_commit();

  const int group = threadIdx.x / 128;
  const int first_pair = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int position[2] = {tile.position + first_pair / a.group,
                           tile.position + (first_pair + 8) / a.group};
  float top[2] = {kMinusInf, kMinusInf}, total[2] = {}, acc[kDim / 2];
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) acc[i] = 0.0f;
  const uint64_t q = k_major(queries + group * 64 * kPanelBytes);
  int stage = 0;
#pragma unroll 1
  for (int key0 = key_begin; key0 < key_end; key0 += kPrefillKeys, stage ^= 1) {
    copy_async_wait<0>();
    show_to_products();
    __syncthreads();  // the stage is full, and the other one is no longer read
    if (key0 + kPrefillKeys < key_end) {
      loader.request(key0 + kPrefillKeys, ring + (stage ^ 1) * kStage, stage ^ 1);
      loader.look_up(key0 + 2 * kPrefillKeys, stage);
    }
    copy_async_commit();
    const uint32_t keys = ring + stage * kStage;
    float s[kPrefillKeys / 2];
    const uint64_t k = k_major(keys);
    products_begin();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      WarpgroupProduct<T, kPrefillKeys>::run(s, q + i / 4 * (kQueryPanel >> 4) + i % 4 * kNext16,
                                             k + i / 4 * (kKeyPanel >> 4) + i % 4 * kNext16, i > 0);
    products_commit();
    products_wait<0>();
    hold(s);
    float factor[2];
    weigh_scores(a, s, key0, position, tile.position, top, total, factor);
    // Maxima settle after a few tiles; times one is left out.
    if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) acc[i] *= factor[i >> 1 & 1];
    }
    uint32_t p[kPrefillKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kPrefillKeys / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) p[i][j] = pack2<T>(s[i * 8 + j * 2], s[i * 8 + j * 2 + 1]);
    const uint64_t v = row_major(keys + kPanels * kKeyPanel, kKeyPanel);
    hold(acc);
    products_begin();
#pragma unroll
    for (int i = 0; i < kPrefillKeys / 16; ++i)
      WarpgroupProduct<T, kDim>::template run<1>(acc, p[i], v + i * kNext16Rows, true);
    products_commit();
    products_wait<0>();
    hold(acc);
  }
  store_prefill<T, kDim>(a, tile, head, first_pair, acc, top, total);
}

#endif  // BLINK_HAS_WARPGROUP_PRODUCTS

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ATTENTION_PREFILL_WARPGROUP_CUH
