/* Warpgroup matrix products of Hopper (sm_90a): shared-memory layouts, descriptors, instructions.
 *
 * A tile in shared memory is made of panels of 64 values (128 bytes) a row; the 16-byte pieces of a
 * row change places by its number modulo 8 (128-byte swizzle), so that copies and products meet no
 * bank twice. A panel starts on 1024 bytes. PTX ISA, "Asynchronous warpgroup level matrix
 * instructions"; only compiled where the target has them.
 */
#ifndef BLINK_DEVICE_KERNELS_WARPGROUP_CUH
#define BLINK_DEVICE_KERNELS_WARPGROUP_CUH

#include "types.cuh"

namespace blink::kernels {

constexpr int kPanelBytes = 128;  // of a row; 64 half-precision values

/* Where piece `piece` (16 bytes, 0..7) of row `row` lies in a panel, in bytes. */
__host__ __device__ constexpr int panel_offset(int row, int piece) {
  return row * kPanelBytes + ((piece ^ (row & 7)) << 4);
}

#if BLINK_HAS_WARPGROUP_PRODUCTS

/* Descriptor of a swizzled panel whose rows hold consecutive k (k-major): groups of 8 rows are 1024
 * bytes apart. Going 16 values along k adds kNext16 to a descriptor. */
__device__ __forceinline__ uint64_t k_major(uint32_t shared) {
  return (static_cast<uint64_t>(shared & 0x3ffff) >> 4) | uint64_t{1} << 16 | uint64_t{64} << 32 |
         uint64_t{1} << 62;
}
constexpr uint64_t kNext16 = 2;
/* The same with the product's other dimension along a row (rows are k): panels of 64 columns lie
 * `panel_bytes` apart. Going 16 values along k adds 16 rows. */
__device__ __forceinline__ uint64_t row_major(uint32_t shared, int panel_bytes) {
  return (static_cast<uint64_t>(shared & 0x3ffff) >> 4) |
         static_cast<uint64_t>(panel_bytes >> 4) << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}
constexpr uint64_t kNext16Rows = 16 * kPanelBytes >> 4;

#endif  // BLINK_HAS_WARPGROUP_PRODUCTS

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_WARPGROUP_CUH
