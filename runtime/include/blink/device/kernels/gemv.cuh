/* Matrix products for 1..16 rows at memory bandwidth: out[m, n] = sum_k x[m, k] w[n, k].
 *
 * A persistent block an SM. Its warps split K; a warp's lane copies the 16 bytes of weight it will
 * itself feed to the tensor core into its own place in shared memory, `kDepth` steps ahead, so that
 * neither barriers nor registers bound the bytes in flight. The order of k inside a step of 32 is
 * permuted alike for weights and activations: lane 4 g + t holds k = 8 t .. 8 t + 7 of weight row g
 * and of activation row g. Weights are requested before the previous kernel's results are awaited.
 *
 * A sum is formed in a fixed order that depends on K alone: equal rows give equal bits wherever
 * they sit.
 */
#ifndef BLINK_DEVICE_KERNELS_GEMV_CUH
#define BLINK_DEVICE_KERNELS_GEMV_CUH

#include "types.cuh"

namespace blink::kernels {

/* What `stream_rows` asks of a Work:
 *   int num_items()                      items of this launch, each a group of 8 * kTiles weight
 * rows const T* weight_row(item, tile, g)   row g of the tile int64_t weight_offset(k) where column
 * k lies behind it const T* input_row(item, m)          activation row m of the item; null: zeros
 *   void store(item, m, n, value[kTiles]) sum for activation row m and weight row n of each tile
 */
template <typename T, typename Work, int kTiles, int kRowTiles, bool kInputShared, int kWarps,
          int kDepth>
__device__ __forceinline__ void stream_rows(const Work& work, int num_k, unsigned char* shared) {
  constexpr int kPieces = kTiles + (kInputShared ? 0 : kRowTiles);
  constexpr int kStepBytes = kWarps * 32 * 16 * kPieces;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int num_steps = num_k / 32;
  const int steps_per_item = (num_steps + kWarps - 1) / kWarps;

  const uint32_t ring = shared_address(shared) + threadIdx.x * 16;
  float* partial = reinterpret_cast<float*>(shared + kDepth * kStepBytes);  // [2][kWarps][...]
  constexpr int kPartial = kTiles * kRowTiles * 64;
  const T* input_shared = reinterpret_cast<const T*>(partial + 2 * kWarps * kPartial);
  const int input_stride = num_k + 32;  // elements; 64 bytes of padding spread the banks

  // The stream's head: the next copy to ask for.
  int head_item = blockIdx.x, head_step = 0;
  const T* weight[kTiles];
  const T* input[kRowTiles];
  int num_items = 0;
  auto open_item = [&](bool weights, bool inputs) {
    if (head_item >= num_items) return;
    if (weights) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) weight[i] = work.weight_row(head_item, i, g);
    }
    if (inputs && !kInputShared) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) input[i] = work.input_row(head_item, i * 8 + g);
    }
  };
  auto request = [&](int slot, bool weights, bool inputs) {
    const int step = head_step * kWarps + warp;
    if (head_item < num_items && step < num_steps) {
      const int k = step * 32 + t * 8;
      if (weights) {
        const int64_t at = work.weight_offset(k);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          copy_async(ring + slot * kStepBytes + i * (kWarps * 512), weight[i] + at);
      }
      if (inputs && !kInputShared) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
          copy_async(ring + slot * kStepBytes + (kTiles + i) * (kWarps * 512),
                     input[i] ? input[i] + k : weight[0], input[i] != nullptr);
      }
    }
  };
  auto advance = [&](bool weights, bool inputs) {
    if (++head_step == steps_per_item) {
      head_step = 0;
      head_item += gridDim.x;
      open_item(weights, inputs);
    }
  };

  if constexpr (Work::kWeightsKnownEarly) {
    num_items = work.num_items();
    open_item(true, false);
#pragma unroll 1
    for (int s = 0; s < kDepth; ++s) {
      request(s, true, false);
      advance(true, false);
    }
    wait_for_previous();
    head_item = blockIdx.x;
    head_step = 0;
  } else {
    wait_for_previous();
    num_items = work.num_items();
  }
  if constexpr (kInputShared) {
    T* to = const_cast<T*>(input_shared);
    const int pieces = num_k / 8;
    for (int m = 0; m < work.num_rows(); ++m) {
      const T* from = work.input_row(0, m);
      for (int i = threadIdx.x; i < pieces; i += kWarps * 32)
        copy_async(shared_address(to + m * input_stride + i * 8), from + i * 8);
    }
    copy_async_commit();
  }
  open_item(true, true);
#pragma unroll 1
  for (int s = 0; s < kDepth; ++s) {
    request(s, !Work::kWeightsKnownEarly, true);
    copy_async_commit();
    advance(true, true);
  }
  if constexpr (kInputShared) {
    copy_async_wait<kDepth>();
    __syncthreads();
  }

  int slot = 0, buffer = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    float sum[kTiles][kRowTiles == 1 ? 2 : 4] = {};
#pragma unroll 1
    for (int s = 0; s < steps_per_item; ++s) {
      copy_async_wait<kDepth - 1>();
      const int step = s * kWarps + warp;
      if (step < num_steps) {
        uint4 w[kTiles], x[kRowTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          w[i] = load_shared16(ring + slot * kStepBytes + i * (kWarps * 512));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          if constexpr (kInputShared) {
            x[i] = make_uint4(0, 0, 0, 0);
            if (i * 8 + g < work.num_rows())
              x[i] = load_shared16(
                  shared_address(input_shared + (i * 8 + g) * input_stride + step * 32 + t * 8));
          } else {
            x[i] = load_shared16(ring + slot * kStepBytes + (kTiles + i) * (kWarps * 512));
          }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          if constexpr (kRowTiles == 1) {
            mma_half<T>(sum[i], x[0].x, x[0].y, w[i].x, w[i].y);
            mma_half<T>(sum[i], x[0].z, x[0].w, w[i].z, w[i].w);
          } else {
            mma<T>(sum[i], x[0].x, x[1].x, x[0].y, x[1].y, w[i].x, w[i].y);
            mma<T>(sum[i], x[0].z, x[1].z, x[0].w, x[1].w, w[i].z, w[i].w);
          }
        }
      }
      request(slot, true, true);
      copy_async_commit();
      advance(true, true);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    // Sum over the warps, in their order. Two buffers, so one barrier an item is enough.
    float* mine = partial + (buffer * kWarps + warp) * kPartial;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        *reinterpret_cast<float2*>(mine + (i * kRowTiles + r) * 64 + lane * 2) =
            make_float2(sum[i][r * 2], sum[i][r * 2 + 1]);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < kRowTiles * 64; j += kWarps * 32) {
      float value[kTiles] = {};
      const float* from = partial + buffer * kWarps * kPartial;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value[i] += from[w * kPartial + i * kRowTiles * 64 + j];
      }
      work.store(item, j / 8, j % 8, value);
    }
    buffer ^= 1;
  }
}

template <int kTiles, int kRowTiles, bool kInputShared, int kWarps, int kDepth>
constexpr int stream_rows_shared_bytes() {
  return kDepth * kWarps * 512 * (kTiles + (kInputShared ? 0 : kRowTiles)) +
         2 * kWarps * kTiles * kRowTiles * 64 *
             4;  // plus the inputs when they are kept in shared memory
}

/* Dense product. Rows of w past num_n read row num_n - 1 and store nothing. */
template <typename T, typename Out, int kTiles>
struct DenseWork {
  static constexpr bool kWeightsKnownEarly = true;
  const T* w;     // [num_n, num_k]
  const T* x;     // [num_m, num_k]
  const T* bias;  // [num_n] or null
  Out* out;       // [num_m, num_n]
  int num_m, num_n, num_k;

  __device__ int num_items() const { return (num_n + 8 * kTiles - 1) / (8 * kTiles); }
  __device__ int num_rows() const { return num_m; }
  __device__ const T* weight_row(int item, int tile, int g) const {
    const int n = min((item * kTiles + tile) * 8 + g, num_n - 1);
    return w + static_cast<int64_t>(n) * num_k;
  }
  __device__ int64_t weight_offset(int k) const { return k; }
  __device__ const T* input_row(int, int m) const {
    return m < num_m ? x + static_cast<int64_t>(m) * num_k : nullptr;
  }
  __device__ void store(int item, int m, int column, const float (&value)[kTiles]) const {
    if (m >= num_m) return;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int n = (item * kTiles + i) * 8 + column;
      if (n < num_n)
        out[static_cast<int64_t>(m) * num_n + n] =
            from_float<Out>(value[i] + (bias ? to_float(bias[n]) : 0.0f));
    }
  }
};

/* num_k % 32 == 0; x, w and their rows aligned to 16 bytes. */
template <typename T, typename Out, int kTiles, int kRowTiles, bool kInputShared, int kWarps,
          int kDepth>
__device__ __forceinline__ void gemv(const T* w, const T* x, const T* bias, Out* out, int num_m,
                                     int num_n, int num_k) {
  extern __shared__ __align__(128) unsigned char shared[];
  let_next_start();
  const DenseWork<T, Out, kTiles> work{w, x, bias, out, num_m, num_n, num_k};
  stream_rows<T, DenseWork<T, Out, kTiles>, kTiles, kRowTiles, kInputShared, kWarps, kDepth>(
      work, num_k, shared);
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_GEMV_CUH
