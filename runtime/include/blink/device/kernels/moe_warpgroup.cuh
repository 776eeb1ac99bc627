/* Experts in tiles of 128 assignments by warpgroup products (sm_90a): the same launches and results
 * as `gate_up_tiles` and `down_tiles` of moe.cuh.
 *
 * A block of two warpgroups takes 128 assignments by 128 columns, 64 assignments a warpgroup; two
 * blocks share a multiprocessor, so that one computes while the other waits.
 */
#ifndef BLINK_DEVICE_KERNELS_MOE_WARPGROUP_CUH
#define BLINK_DEVICE_KERNELS_MOE_WARPGROUP_CUH

#include "moe.cuh"
#include "warpgroup.cuh"

namespace blink::kernels {

constexpr int kPanelStages = 3, kPanelStageBytes = (kTileRows + kTileColumns) * kPanelBytes;
constexpr int panel_product_shared_bytes() { return kPanelStages * kPanelStageBytes + 1024; }

#if BLINK_HAS_WARPGROUP_PRODUCTS

/* One 128 x 128 tile of which `count` rows are real; warpgroup w has rows 64 w .. of it in `sum`.
 * row_of(m), column_of(n): the row's start, or null for zeros. num_k in steps of 32. */
template <typename T, typename RowOf, typename ColumnOf>
__device__ __forceinline__ void panel_product(float (&sum)[kTileColumns / 2], const RowOf& row_of,
                                              const ColumnOf& column_of, int num_k, int count,
                                              unsigned char* shared) {
  constexpr int kRowsApart = kTileThreads / 8;
  constexpr int kCopies = (kTileRows + kTileColumns) / kRowsApart;
  const int piece = threadIdx.x % 8, first = threadIdx.x / 8, group = threadIdx.x / 128;
  const uint32_t ring = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t place = ring + panel_offset(first, piece);
  const T* from[kCopies];
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
      copy_async(place + stage * kPanelStageBytes + i * kRowsApart * kPanelBytes,
                 real ? from[i] + k : from[kCopies - 1], real);
    }
  };
#pragma unroll
  for (int s = 0; s < kPanelStages - 1; ++s) {
    if (s * kTileDepth < num_k) request(s * kTileDepth, s);
    copy_async_commit();
  }
#pragma unroll
  for (int j = 0; j < kTileColumns / 2; ++j) sum[j] = 0.0f;
  int stage = 0;
#pragma unroll 1
  for (int k0 = 0; k0 < num_k; k0 += kTileDepth) {
    copy_async_wait<kPanelStages - 2>();
    show_to_products();
    __syncthreads();  // the stage is full, and the one before it is no longer read
    const int ahead = k0 + (kPanelStages - 1) * kTileDepth;
    if (ahead < num_k) request(ahead, stage == 0 ? kPanelStages - 1 : stage - 1);
    copy_async_commit();
    if (group * 64 < count) {  // else nothing but padding
      const uint32_t a0 = ring + stage * kPanelStageBytes + group * 64 * kPanelBytes;
      const uint64_t a = k_major(a0);
      const uint64_t b = k_major(ring + stage * kPanelStageBytes + kTileRows * kPanelBytes);
      hold(sum);
      products_begin();
#pragma unroll
      for (int i = 0; i < kTileDepth / 16; ++i)
        WarpgroupProduct<T, kTileColumns>::run(sum, a + i * kNext16, b + i * kNext16, true);
      products_commit();
      products_wait<0>();
      hold(sum);
    }
    stage = stage + 1 == kPanelStages ? 0 : stage + 1;
  }
}

/* Row of the tile that this lane's values 4 j + 2 r and 4 j + 2 r + 1 belong to. */
__device__ __forceinline__ int panel_row(int r) {
  return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r * 8;
}

/* Grid (max_tiles, ceil(I / 64)), tiles of kTileRows assignments. Columns 0..63 of a tile are gate
 * rows, 64..127 the up rows beside them. I in steps of 32. */
template <typename T, Activation kActivation>
__device__ __forceinline__ void gate_up_panels(const T* x, const T* gate_up, T* hidden,
                                               ExpertTiles tiles, int hidden_size,
                                               int intermediate_size, int num_choices) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_start();
  wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= *tiles.num_tiles) return;
  const int64_t expert = tiles.tile_expert[blockIdx.x];
  const int start = tiles.tile_start[blockIdx.x], count = tiles.tile_count[blockIdx.x];
  const int n0 = blockIdx.y * 64;
  float sum[kTileColumns / 2];
  panel_product<T>(
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
      hidden_size, count, shared);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = panel_row(r), n = n0 + threadIdx.x % 4 * 2;
    if (m >= count) continue;
    T* to = hidden + static_cast<int64_t>(start + m) * intermediate_size + n;
    auto product = [&](int i) {
      return activate<kActivation>(to_float(from_float<T>(sum[i]))) *
             to_float(from_float<T>(sum[i + 32]));
    };
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (n + j * 8 < intermediate_size)
        *reinterpret_cast<uint32_t*>(to + j * 8) =
            pack2<T>(product(j * 4 + r * 2), product(j * 4 + r * 2 + 1));
    }
  }
}

/* Grid (max_tiles, ceil(H / 128)); H in steps of 2. */
template <typename T>
__device__ __forceinline__ void down_panels(const T* hidden, const T* down, float* result,
                                            ExpertTiles tiles, int hidden_size,
                                            int intermediate_size) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_start();
  wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= *tiles.num_tiles) return;
  const int64_t expert = tiles.tile_expert[blockIdx.x];
  const int start = tiles.tile_start[blockIdx.x], count = tiles.tile_count[blockIdx.x];
  const int n0 = blockIdx.y * kTileColumns;
  float sum[kTileColumns / 2];
  panel_product<T>(
      sum,
      [&](int m) -> const T* {
        return m < count ? hidden + static_cast<int64_t>(start + m) * intermediate_size : nullptr;
      },
      [&](int n) -> const T* {
        return down + (expert * hidden_size + min(n0 + n, hidden_size - 1)) * intermediate_size;
      },
      intermediate_size, count, shared);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = panel_row(r), n = n0 + threadIdx.x % 4 * 2;
    if (m >= count) continue;
    float* to = result + static_cast<int64_t>(tiles.assignments[start + m]) * hidden_size + n;
#pragma unroll
    for (int j = 0; j < kTileColumns / 8; ++j) {
      if (n + j * 8 < hidden_size)
        *reinterpret_cast<float2*>(to + j * 8) =
            make_float2(sum[j * 4 + r * 2], sum[j * 4 + r * 2 + 1]);
    }
  }
}

#endif  // BLINK_HAS_WARPGROUP_PRODUCTS

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_MOE_WARPGROUP_CUH
