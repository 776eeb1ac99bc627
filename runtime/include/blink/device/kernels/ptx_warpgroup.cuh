/* The instructions of warpgroup matrix products (sm_90a); part of ptx.cuh, which includes it. */
#ifndef BLINK_DEVICE_KERNELS_PTX_WARPGROUP_CUH
#define BLINK_DEVICE_KERNELS_PTX_WARPGROUP_CUH

#include "ptx.cuh"

namespace blink::kernels {

/* Registers and shared memory as they stand are what the following products read. */
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/* What this thread wrote to shared memory is seen by products issued after a barrier. */
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Keeps the compiler from moving accumulators across a product that is still running. */
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/* d[64 x kColumns] = a[64 x 16] b[kColumns x 16]^T + (keep ? d : 0) over a warpgroup. Warp w holds
 * rows 16 w ..; lane 4 g + t: d[4 j], d[4 j + 1] are row g, columns 8 j + 2 t and the next; d[4 j +
 * 2], d[4 j + 3] are row g + 8. */
template <typename T, int kColumns>
struct WarpgroupProduct;

/* The accumulators of a product as operands of its asm statement, and the operands' names. */
#define BLINK_D8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define BLINK_OPERANDS_8 BLINK_D8(0)
#define BLINK_OPERANDS_16 BLINK_OPERANDS_8, BLINK_D8(8)
#define BLINK_OPERANDS_32 BLINK_OPERANDS_16, BLINK_D8(16), BLINK_D8(24)
#define BLINK_OPERANDS_40 BLINK_OPERANDS_32, BLINK_D8(32)
#define BLINK_OPERANDS_48 BLINK_OPERANDS_40, BLINK_D8(40)
#define BLINK_OPERANDS_64 BLINK_OPERANDS_48, BLINK_D8(48), BLINK_D8(56)
#define BLINK_OPERANDS_128                                                                 \
  BLINK_OPERANDS_64, BLINK_D8(64), BLINK_D8(72), BLINK_D8(80), BLINK_D8(88), BLINK_D8(96), \
      BLINK_D8(104), BLINK_D8(112), BLINK_D8(120)
#define BLINK_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define BLINK_NAMES_16 BLINK_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define BLINK_NAMES_32 \
  BLINK_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BLINK_NAMES_40 BLINK_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define BLINK_NAMES_48 BLINK_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define BLINK_NAMES_64 \
  BLINK_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BLINK_NAMES_128                                                          \
  BLINK_NAMES_64                                                                 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

/* n0 to n6: the numbers of the operands behind the accumulators. */
#define BLINK_PRODUCT(type, name, columns, registers, n0, n1, n2, n3, n4, n5, n6)                 \
  template <>                                                                                     \
  struct WarpgroupProduct<type, columns> {                                                        \
    template <int kRowMajorB = 0>                                                                 \
    static __device__ __forceinline__ void run(float (&d)[registers], uint64_t a, uint64_t b,     \
                                               bool keep) {                                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n2                                          \
                   ", 0;"                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name          \
                   " {" BLINK_NAMES_##registers "}, %" #n0 ", %" #n1 ", p, 1, 1, 0, %" #n3 ";}"   \
                   : BLINK_OPERANDS_##registers                                                   \
                   : "l"(a), "l"(b), "r"(static_cast<int>(keep)), "n"(kRowMajorB));               \
    }                                                                                             \
    /* a in registers, in the layout of mma's a operand. */                                       \
    template <int kRowMajorB = 0>                                                                 \
    static __device__ __forceinline__ void run(float (&d)[registers], const uint32_t (&a)[4],     \
                                               uint64_t b, bool keep) {                           \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n5                                          \
                   ", 0;"                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name          \
                   " {" BLINK_NAMES_##registers "}, {%" #n0 ",%" #n1 ",%" #n2 ",%" #n3 "}, %" #n4 \
                                                ", p, 1, 1, %" #n6 ";}"                           \
                   : BLINK_OPERANDS_##registers                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
                     "r"(static_cast<int>(keep)), "n"(kRowMajorB));                               \
    }                                                                                             \
  };
#define BLINK_PRODUCTS(...)                \
  BLINK_PRODUCT(bf16, "bf16", __VA_ARGS__) \
  BLINK_PRODUCT(fp16, "f16", __VA_ARGS__)
BLINK_PRODUCTS(16, 8, 8, 9, 10, 11, 12, 13, 14)
BLINK_PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21, 22)
BLINK_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37, 38)
BLINK_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45, 46)
BLINK_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53, 54)
BLINK_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69, 70)
BLINK_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef BLINK_PRODUCTS
#undef BLINK_PRODUCT
#undef BLINK_NAMES_128
#undef BLINK_NAMES_64
#undef BLINK_NAMES_48
#undef BLINK_NAMES_40
#undef BLINK_NAMES_32
#undef BLINK_NAMES_16
#undef BLINK_NAMES_8
#undef BLINK_OPERANDS_128
#undef BLINK_OPERANDS_64
#undef BLINK_OPERANDS_48
#undef BLINK_OPERANDS_40
#undef BLINK_OPERANDS_32
#undef BLINK_OPERANDS_16
#undef BLINK_OPERANDS_8
#undef BLINK_D8

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_PTX_WARPGROUP_CUH
