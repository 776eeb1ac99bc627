/* Experts of a mixture: route (group the assignments by expert, on the device), gate and up with
 * the activation, down, combine. Two ways for the products: `stream` for few tokens (weights at
 * memory bandwidth) `tile` for many (tensor-core tiles of 128 tokens), and a shorter way for a
 * single token. Padding tokens pick no expert and get zeros.
 *
 * An assignment is (token, choice), index token * k + choice. Its result does not depend on which
 * other assignments share its tile, so the order inside an expert, left to atomics, does not show.
 */
#ifndef BLINK_DEVICE_KERNELS_MOE_CUH
#define BLINK_DEVICE_KERNELS_MOE_CUH

#include "gemv.cuh"
#include "types.cuh"

namespace blink::kernels {

/* What routing leaves behind. */
struct ExpertTiles {
  int32_t* num_tiles;    // [1]
  int32_t* tile_expert;  // [max_tiles]
  int32_t* tile_start;   // [max_tiles] first position of the tile in `assignments`
  int32_t* tile_count;   // [max_tiles]
  int32_t* assignments;  // [T * k] sorted by expert
};

constexpr int kRouteThreads = 1024, kMaxExperts = 1024;

/* One block of kRouteThreads. token_row -1 marks padding. An id outside [0, num_experts) picks
 * none. */
template <typename Id>
__device__ __forceinline__ void route_experts(const Id* ids, const int32_t* token_row,
                                              int num_tokens, int num_choices, int num_experts,
                                              int tile_rows, ExpertTiles tiles) {
  __shared__ int32_t count[kMaxExperts], start[kMaxExperts], first_tile[kMaxExperts];
  __shared__ int32_t warp_rows[32], warp_tiles[32];
  let_next_start();
  wait_for_previous();
  const int e = threadIdx.x, lane = e % 32, warp = e / 32;
  count[e] = 0;
  __syncthreads();
  const int num_assignments = num_tokens * num_choices;
  auto expert_of = [&](int a) -> int {
    const int64_t id = static_cast<int64_t>(ids[a]);
    return token_row[a / num_choices] >= 0 && id >= 0 && id < num_experts ? static_cast<int>(id)
                                                                          : -1;
  };
  for (int a = threadIdx.x; a < num_assignments; a += kRouteThreads) {
    const int expert = expert_of(a);
    if (expert >= 0) atomicAdd(&count[expert], 1);
  }
  __syncthreads();
  const int mine = count[e], my_tiles = (mine + tile_rows - 1) / tile_rows;
  int rows = mine, all_tiles = my_tiles;  // inclusive sums over experts
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const int other_rows = __shfl_up_sync(0xffffffffu, rows, i);
    const int other_tiles = __shfl_up_sync(0xffffffffu, all_tiles, i);
    if (lane >= i) rows += other_rows, all_tiles += other_tiles;
  }
  if (lane == 31) warp_rows[warp] = rows, warp_tiles[warp] = all_tiles;
  __syncthreads();
  for (int w = 0; w < warp; ++w) rows += warp_rows[w], all_tiles += warp_tiles[w];
  start[e] = rows - mine;
  first_tile[e] = all_tiles - my_tiles;
  for (int i = 0; i < my_tiles; ++i) {
    const int tile = first_tile[e] + i;
    tiles.tile_expert[tile] = e;
    tiles.tile_start[tile] = start[e] + i * tile_rows;
    tiles.tile_count[tile] = min(tile_rows, mine - i * tile_rows);
  }
  if (e == kRouteThreads - 1) *tiles.num_tiles = all_tiles;
  __syncthreads();
  count[e] = 0;
  __syncthreads();
  for (int a = threadIdx.x; a < num_assignments; a += kRouteThreads) {
    const int expert = expert_of(a);
    if (expert >= 0) tiles.assignments[start[expert] + atomicAdd(&count[expert], 1)] = a;
  }
}

enum class Activation { kSilu, kGelu, kGeluTanh };

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu) return x / (1.0f + exp2f(-x * kLog2e));
  if constexpr (kActivation == Activation::kGelu)
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

/* Gate and up for tiles of 8 assignments: hidden[position] = act(gate) * up, by sorted position. */
template <typename T, Activation kActivation>
struct GateUpWork {
  static constexpr bool kWeightsKnownEarly = false;
  const T* x;        // [T, H]
  const T* gate_up;  // [E, 2 I, H]
  T* hidden;         // [T * k, I]
  ExpertTiles tiles;
  int hidden_size, intermediate_size, num_choices;

  __device__ int num_items() const { return *tiles.num_tiles * (intermediate_size / 8); }
  __device__ int num_rows() const { return 0; }
  __device__ const T* weight_row(int item, int tile, int g) const {
    const int groups = intermediate_size / 8;
    const int64_t expert = tiles.tile_expert[item / groups];
    return gate_up +
           ((expert * 2 + tile) * intermediate_size + item % groups * 8 + g) * hidden_size;
  }
  __device__ int64_t weight_offset(int k) const { return k; }
  __device__ const T* input_row(int item, int m) const {
    const int tile = item / (intermediate_size / 8);
    if (m >= tiles.tile_count[tile]) return nullptr;
    const int64_t token = tiles.assignments[tiles.tile_start[tile] + m] / num_choices;
    return x + token * hidden_size;
  }
  __device__ void store(int item, int m, int column, const float (&value)[2]) const {
    const int groups = intermediate_size / 8, tile = item / groups;
    if (m >= tiles.tile_count[tile]) return;
    const int64_t position = tiles.tile_start[tile] + m;
    hidden[position * intermediate_size + item % groups * 8 + column] =
        from_float<T>(activate<kActivation>(to_float(from_float<T>(value[0]))) *
                      to_float(from_float<T>(value[1])));
  }
};

/* Down for tiles of 8 assignments: result[assignment] in fp32. */
template <typename T, int kTiles>
struct DownWork {
  static constexpr bool kWeightsKnownEarly = false;
  const T* hidden;  // [T * k, I]
  const T* down;    // [E, H, I]
  float* result;    // [T * k, H]
  ExpertTiles tiles;
  int hidden_size, intermediate_size;

  __device__ int groups() const { return hidden_size / (8 * kTiles); }
  __device__ int num_items() const { return *tiles.num_tiles * groups(); }
  __device__ int num_rows() const { return 0; }
  __device__ const T* weight_row(int item, int tile, int g) const {
    const int64_t expert = tiles.tile_expert[item / groups()];
    return down + (expert * hidden_size + item % groups() * (8 * kTiles) + tile * 8 + g) *
                      intermediate_size;
  }
  __device__ int64_t weight_offset(int k) const { return k; }
  __device__ const T* input_row(int item, int m) const {
    const int tile = item / groups();
    if (m >= tiles.tile_count[tile]) return nullptr;
    return hidden + static_cast<int64_t>(tiles.tile_start[tile] + m) * intermediate_size;
  }
  __device__ void store(int item, int m, int column, const float (&value)[kTiles]) const {
    const int tile = item / groups();
    if (m >= tiles.tile_count[tile]) return;
    const int64_t a = tiles.assignments[tiles.tile_start[tile] + m];
    float* to = result + a * hidden_size + item % groups() * (8 * kTiles) + column;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) to[i * 8] = value[i];
  }
};

/* One token: its experts one behind the other, so that nothing needs to be grouped. hidden[choice]
 * is weighted already; then the down products of all choices are one product over k = choice * I +
 * i. */
template <typename T, Activation kActivation, typename Weight>
struct SingleGateUpWork {
  static constexpr bool kWeightsKnownEarly = false;
  const T* x;              // [1, H]
  const T* gate_up;        // [E, 2 I, H]
  T* hidden;               // [k, I]
  const int32_t* experts;  // [k], each in [0, E); shared memory
  const Weight* weights;   // [k]
  int hidden_size, intermediate_size, num_choices;

  __device__ int num_items() const { return num_choices * (intermediate_size / 8); }
  __device__ int num_rows() const { return 1; }
  __device__ const T* weight_row(int item, int tile, int g) const {
    const int groups = intermediate_size / 8;
    const int64_t expert = experts[item / groups];
    return gate_up +
           ((expert * 2 + tile) * intermediate_size + item % groups * 8 + g) * hidden_size;
  }
  __device__ int64_t weight_offset(int k) const { return k; }
  __device__ const T* input_row(int, int m) const { return m == 0 ? x : nullptr; }
  __device__ void store(int item, int m, int column, const float (&value)[2]) const {
    if (m != 0) return;
    const int groups = intermediate_size / 8, choice = item / groups;
    const float product = activate<kActivation>(to_float(from_float<T>(value[0]))) *
                          to_float(from_float<T>(value[1]));
    hidden[choice * intermediate_size + item % groups * 8 + column] =
        from_float<T>(to_float(from_float<T>(product)) * to_float(weights[choice]));
  }
};

template <typename T>
struct SingleDownWork {
  static constexpr bool kWeightsKnownEarly = false;
  const T* hidden;         // [k, I], weighted
  const T* down;           // [E, H, I]
  T* out;                  // [1, H]
  const int32_t* experts;  // as above
  int hidden_size, intermediate_size;

  __device__ int num_items() const { return hidden_size / 8; }
  __device__ int num_rows() const { return 1; }
  __device__ const T* weight_row(int item, int, int g) const {
    return down + static_cast<int64_t>(item * 8 + g) * intermediate_size;
  }
  __device__ int64_t weight_offset(int k) const {
    const int choice = k / intermediate_size;
    return static_cast<int64_t>(experts[choice]) * hidden_size * intermediate_size +
           (k - choice * intermediate_size);
  }
  __device__ const T* input_row(int, int m) const { return m == 0 ? hidden : nullptr; }
  __device__ void store(int item, int m, int column, const float (&value)[1]) const {
    if (m == 0) out[item * 8 + column] = from_float<T>(value[0]);
  }
};

constexpr int kMaxChoices = 32;

/* The experts of the one token, for all threads; an id that is none counts as expert 0 with its
 * weight. */
template <typename Id>
__device__ __forceinline__ const int32_t* single_experts(const Id* ids, int num_choices,
                                                         int num_experts) {
  __shared__ int32_t experts[kMaxChoices];
  if (threadIdx.x < num_choices)
    experts[threadIdx.x] = min(max(static_cast<int32_t>(ids[threadIdx.x]), 0), num_experts - 1);
  __syncthreads();
  return experts;
}

/* out[token] = sum over choices, in their order, of weight * result. One block a token. */
template <typename T, typename Id, typename Weight>
__device__ __forceinline__ void combine_experts(const float* result, const Id* ids,
                                                const Weight* weights, const int32_t* token_row,
                                                T* out, int num_choices, int num_experts,
                                                int hidden_size) {
  let_next_start();
  wait_for_previous();
  const int64_t token = blockIdx.x;
  const bool real = token_row[token] >= 0;
  for (int i = threadIdx.x; i < hidden_size; i += blockDim.x) {
    float sum = 0.0f;
    for (int c = 0; real && c < num_choices; ++c) {
      const int64_t a = token * num_choices + c;
      const int64_t id = static_cast<int64_t>(ids[a]);
      if (id >= 0 && id < num_experts) sum += to_float(weights[a]) * result[a * hidden_size + i];
    }
    out[token * hidden_size + i] = from_float<T>(sum);
  }
}

constexpr int kTileRows = 128, kTileColumns = 128, kTileDepth = 64, kTileStages = 3,
              kTileThreads = 256;
constexpr int kTileStride = kTileDepth + 8;
constexpr int tile_product_shared_bytes() {
  return kTileStages * (kTileRows + kTileColumns) * kTileStride * 2;
}

/* One 128 x 128 tile of which `count` rows are real: sum[mi][ni] covers rows warp_m * 32 + mi * 16,
 * columns warp_n * 32 + ni * 8 for ni < 4 and 64 + warp_n * 32 + (ni - 4) * 8 above. row_of(m),
 * column_of(n): the row's start, or null for zeros. */
template <typename T, typename RowOf, typename ColumnOf>
__device__ __forceinline__ void tile_product(float (&sum)[2][8][4], const RowOf& row_of,
                                             const ColumnOf& column_of, int num_k, int count,
                                             T* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / 2, warp_n = warp % 2;
  constexpr int kStage = (kTileRows + kTileColumns) * kTileStride;
  constexpr int kPieces = kTileDepth / 8;
  // A thread copies the same piece of rows 16 apart, so the row pointers are looked up once.
  constexpr int kRowsApart = kTileThreads / kPieces;
  constexpr int kCopies = (kTileRows + kTileColumns) / kRowsApart;
  const T* from[kCopies];
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int r = first + i * kRowsApart;
    from[i] = r < kTileRows ? row_of(r) : column_of(r - kTileRows);
  }
  auto request = [&](int k0, int stage) {
    const int k = k0 + piece * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool real = from[i] != nullptr && k < num_k;
      copy_async(shared_address(shared + stage * kStage + (first + i * kRowsApart) * kTileStride +
                                piece * 8),
                 real ? from[i] + k : from[kCopies - 1], real);
    }
  };
#pragma unroll
  for (int s = 0; s < kTileStages - 1; ++s) {
    if (s * kTileDepth < num_k) request(s * kTileDepth, s);
    copy_async_commit();
  }
  int stage = 0;
#pragma unroll 1
  for (int k0 = 0; k0 < num_k; k0 += kTileDepth) {
    copy_async_wait<kTileStages - 2>();
    __syncthreads();
    const int ahead = k0 + (kTileStages - 1) * kTileDepth;
    if (ahead < num_k) request(ahead, (stage + kTileStages - 1) % kTileStages);
    copy_async_commit();
    if (warp_m * 32 >= count) {  // nothing but padding
      stage = (stage + 1) % kTileStages;
      continue;
    }
    const uint32_t a_address = shared_address(
        shared + stage * kStage + (warp_m * 32 + (lane & 15)) * kTileStride + (lane >> 4) * 8);
    const uint32_t b_address =
        shared_address(shared + stage * kStage +
                       (kTileRows + warp_n * 32 + (lane & 7) + (lane >> 4) * 8) * kTileStride +
                       ((lane >> 3) & 1) * 8);
#pragma unroll
    for (int i = 0; i < kTileDepth / 16; ++i) {
      uint32_t a[2][4], b[4][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_matrix(a[m], a_address + (m * 16 * kTileStride + i * 16) * 2);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = n < 2 ? n * 16 : 64 + (n - 2) * 16;
        load_matrix(b[n], b_address + (column * kTileStride + i * 16) * 2);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          mma<T>(sum[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[n][0], b[n][1]);
          mma<T>(sum[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[n][2], b[n][3]);
        }
    }
    stage = (stage + 1) % kTileStages;
  }
}

/* Grid (max_tiles, ceil(I / 64)), tiles of kTileRows assignments. */
template <typename T, Activation kActivation>
__device__ __forceinline__ void gate_up_tiles(const T* x, const T* gate_up, T* hidden,
                                              ExpertTiles tiles, int hidden_size,
                                              int intermediate_size, int num_choices) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_start();
  wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= *tiles.num_tiles) return;
  const int64_t expert = tiles.tile_expert[blockIdx.x];
  const int start = tiles.tile_start[blockIdx.x], count = tiles.tile_count[blockIdx.x];
  const int n0 = blockIdx.y * 64;
  float sum[2][8][4] = {};
  tile_product<T>(
      sum,
      [&](int m) -> const T* {
        return m < count ? x + static_cast<int64_t>(tiles.assignments[start + m] / num_choices) *
                                   hidden_size
                         : nullptr;
      },
      [&](int n) -> const T* {
        const int column = min(n0 + n % 64, intermediate_size - 1);
        return gate_up + ((expert * 2 + n / 64) * intermediate_size + column) * hidden_size;
      },
      hidden_size, count, reinterpret_cast<T*>(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mi = 0; mi < 2; ++mi)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int m = warp / 2 * 32 + mi * 16 + g + (c >> 1) * 8;
      if (m >= count) continue;
#pragma unroll
      for (int ni = 0; ni < 4; ++ni) {
        const int n = n0 + warp % 2 * 32 + ni * 8 + 2 * t + (c & 1);
        if (n < intermediate_size)
          hidden[static_cast<int64_t>(start + m) * intermediate_size + n] =
              from_float<T>(activate<kActivation>(to_float(from_float<T>(sum[mi][ni][c]))) *
                            to_float(from_float<T>(sum[mi][ni + 4][c])));
      }
    }
}

/* Grid (max_tiles, ceil(H / 128)). */
template <typename T>
__device__ __forceinline__ void down_tiles(const T* hidden, const T* down, float* result,
                                           ExpertTiles tiles, int hidden_size,
                                           int intermediate_size) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_start();
  wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= *tiles.num_tiles) return;
  const int64_t expert = tiles.tile_expert[blockIdx.x];
  const int start = tiles.tile_start[blockIdx.x], count = tiles.tile_count[blockIdx.x];
  const int n0 = blockIdx.y * kTileColumns;
  float sum[2][8][4] = {};
  tile_product<T>(
      sum,
      [&](int m) -> const T* {
        return m < count ? hidden + static_cast<int64_t>(start + m) * intermediate_size : nullptr;
      },
      [&](int n) -> const T* {
        return down + (expert * hidden_size + min(n0 + n, hidden_size - 1)) * intermediate_size;
      },
      intermediate_size, count, reinterpret_cast<T*>(shared));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int mi = 0; mi < 2; ++mi)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int m = warp / 2 * 32 + mi * 16 + g + (c >> 1) * 8;
      if (m >= count) continue;
      const int64_t a = tiles.assignments[start + m];
#pragma unroll
      for (int ni = 0; ni < 8; ++ni) {
        const int n = n0 + (ni < 4 ? 0 : 64) + warp % 2 * 32 + ni % 4 * 8 + 2 * t + (c & 1);
        if (n < hidden_size) result[a * hidden_size + n] = sum[mi][ni][c];
      }
    }
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_MOE_CUH
