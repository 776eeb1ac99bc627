/* Matrix products for up to 64 rows at memory bandwidth, by warpgroup products (sm_90a):
 * out[m, n] = sum_k x[m, k] w[n, k].
 *
 * The weights are the operand with 64 rows, the activations the narrow one. A block takes 128
 * weight rows and, where that leaves multiprocessors idle, a share of k: the blocks that share a
 * tile are a cluster, take its steps in turn (so that what they read at a time lies together) and
 * add their sums through each other's shared memory, in their order. Weights are requested before
 * the previous kernel's results are awaited.
 *
 * A sum's order depends on n, k and the instance alone: equal rows give equal bits wherever they
 * sit.
 */
#ifndef BLINK_DEVICE_KERNELS_NARROW_CUH
#define BLINK_DEVICE_KERNELS_NARROW_CUH

#include "warpgroup.cuh"

namespace blink::kernels {

constexpr int kNarrowDepth = 64;

/* Weight rows of a block: 128 for each of its warpgroups, which share the activations' copies. */
constexpr int narrow_tile(int groups) { return 128 * groups; }
/* Floats between rows of the sums; 8 rows hit distinct banks. */
constexpr int narrow_stride(int groups) { return narrow_tile(groups) + 4; }

template <int kColumns, int kGroups>
constexpr int kNarrowStageBytes = (narrow_tile(kGroups) + kColumns) * kPanelBytes;
template <int kColumns, int kGroups, int kStages>
constexpr int narrow_shared_bytes() {
  constexpr int kRing = kStages * kNarrowStageBytes<kColumns, kGroups>;
  constexpr int kSums = kColumns * narrow_stride(kGroups) * 4;
  return (kRing > kSums ? kRing : kSums) + 1024;
}

#if BLINK_HAS_WARPGROUP_PRODUCTS

/* Adds the cluster's sums in its order and stores this block's share of the rows. */
template <typename T, int kGroups, int kSplits>
__device__ __forceinline__ void store_narrow(uint32_t sums, const T* bias, T* out, int split,
                                             int first_n, int num_m, int num_n) {
  constexpr int kPairs = narrow_tile(kGroups) / 2, kStride = narrow_stride(kGroups);
  const int column = threadIdx.x % kPairs * 2, n = first_n + column;
  if (n >= num_n) return;
  const bool both = n + 1 < num_n;
  float2 base = make_float2(0.0f, 0.0f);
  if (bias != nullptr) base = {to_float(bias[n]), both ? to_float(bias[n + 1]) : 0.0f};
  for (int m = split + threadIdx.x / kPairs * kSplits; m < num_m; m += 2 * kSplits) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      const float2 part = load_of_cluster(sums + (m * kStride + column) * 4, s);
      sum.x += part.x, sum.y += part.y;
    }
    sum.x += base.x, sum.y += base.y;
    T* to = out + static_cast<int64_t>(m) * num_n + n;
    if (num_n % 2 == 0) {
      *reinterpret_cast<uint32_t*>(to) = pack2<T>(sum.x, sum.y);
    } else {
      to[0] = from_float<T>(sum.x);
      if (both) to[1] = from_float<T>(sum.y);
    }
  }
}

/* Grid (kSplits, ceil(num_n / narrow_tile)), clusters of kSplits, 128 kGroups threads. num_m <=
 * kColumns, num_k % 64 == 0; w, x and their rows aligned to 16 bytes. Weight rows past num_n read
 * row num_n - 1 and store nothing. */
template <typename T, int kColumns, int kGroups, int kSplits, int kStages>
__device__ __forceinline__ void narrow_product(const T* w, const T* x, const T* bias, T* out,
                                               int num_m, int num_n, int num_k) {
  constexpr int kTile = narrow_tile(kGroups), kStride = narrow_stride(kGroups);
  constexpr int kStage = kNarrowStageBytes<kColumns, kGroups>;
  constexpr int kRowsApart = 16 * kGroups;  // rows that a thread copies a piece of
  constexpr int kInputCopies = (kColumns + kRowsApart - 1) / kRowsApart;
  static_assert(kColumns % kRowsApart == 0);
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t ring = (shared_address(shared) + 1023) & ~1023u;
  let_next_start();
  const int split = blockIdx.x, first_n = blockIdx.y * kTile;
  const int steps = (num_k / kNarrowDepth - split + kSplits - 1) / kSplits;
  auto depth_of = [split](int step) { return (step * kSplits + split) * kNarrowDepth; };

  const int piece = threadIdx.x % 8, first_row = threadIdx.x / 8;
  const uint32_t place = ring + panel_offset(first_row, piece);
  const T* weight[kTile / kRowsApart];
#pragma unroll
  for (int i = 0; i < kTile / kRowsApart; ++i)
    weight[i] = w +
                static_cast<int64_t>(min(first_n + first_row + i * kRowsApart, num_n - 1)) * num_k +
                piece * 8;
  auto request_weights = [&](int step, int slot) {
#pragma unroll
    for (int i = 0; i < kTile / kRowsApart; ++i)
      copy_async(place + slot * kStage + i * kRowsApart * kPanelBytes, weight[i] + depth_of(step));
  };
  auto request_input = [&](int step, int slot) {
#pragma unroll
    for (int i = 0; i < kInputCopies; ++i) {
      const int m = first_row + i * kRowsApart;
      const bool real = m < num_m;
      copy_async(place + slot * kStage + (kTile + i * kRowsApart) * kPanelBytes,
                 x + static_cast<int64_t>(real ? m : 0) * num_k + depth_of(step) + piece * 8, real);
    }
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) request_weights(s, s);
  }
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) request_input(s, s);
    copy_async_commit();
  }

  float sum[2][kColumns / 2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) sum[i][j] = 0.0f;
  const int group = threadIdx.x / 128;
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    show_to_products();
    __syncthreads();  // the stage is full, and the one before it is no longer read
    const int ahead = step + kStages - 1, free_slot = slot == 0 ? kStages - 1 : slot - 1;
    if (ahead < steps) {
      request_weights(ahead, free_slot);
      request_input(ahead, free_slot);
    }
    copy_async_commit();
    const uint32_t stage = ring + slot * kStage;
    const uint64_t a = k_major(stage + group * 128 * kPanelBytes);
    const uint64_t b = k_major(stage + kTile * kPanelBytes);
    hold(sum[0]);
    hold(sum[1]);
    products_begin();
#pragma unroll
    for (int i = 0; i < kNarrowDepth / 16; ++i) {
      WarpgroupProduct<T, kColumns>::run(sum[0], a + i * kNext16, b + i * kNext16, true);
      WarpgroupProduct<T, kColumns>::run(sum[1], a + (64 * kPanelBytes >> 4) + i * kNext16,
                                         b + i * kNext16, true);
    }
    products_commit();
    products_wait<0>();
    hold(sum[0]);
    hold(sum[1]);
    slot = slot + 1 == kStages ? 0 : slot + 1;
  }
  copy_async_wait<0>();
  __syncthreads();  // the sums take the ring's place
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_row_of_warp = group * 128 + threadIdx.x % 128 / 32 * 16;
  float* sums = reinterpret_cast<float*>(shared + (ring - shared_address(shared)));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        sums[(j * 8 + 2 * t + (c & 1)) * kStride + first_row_of_warp + i * 64 + g + (c >> 1) * 8] =
            sum[i][j * 4 + c];
  cluster_barrier();
  store_narrow<T, kGroups, kSplits>(ring, bias, out, split, first_n, num_m, num_n);
  if constexpr (kSplits > 1) cluster_barrier();  // nobody leaves while its sums are read
}

#endif  // BLINK_HAS_WARPGROUP_PRODUCTS

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_NARROW_CUH
