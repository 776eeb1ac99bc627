// The machine that kernels are emulated on: blocks of threads, each a fiber of its own stack, all
// on one thread of the operating system.
//
// A fiber runs until it waits for others: at an operation of its warp, a barrier of its block or of
// its cluster. Who goes on next is drawn from the launch's seed, so that a barrier that is missing
// shows. Functions that find a kernel breaking a rule end the launch with `fail`.
#ifndef EMULATION_DEVICE_H
#define EMULATION_DEVICE_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

struct Dim3 {
  uint32_t x, y, z;
};

struct Copy {
  uint32_t to;  // shared address
  const void* from;
  uint32_t bytes;
  bool keep;  // else zeros
  bool done;
};

// A product of a warp's quarter of a warpgroup: 16 rows of `columns` sums.
struct Product {
  float* sums[32];       // of each lane
  uint32_t left[32][4];  // the left operand, where it comes from registers
  uint64_t a, b;         // descriptors
  bool a_in_registers, right_is_row_major, keep, is_bf16;
  int columns;
};

struct Block;

struct Warp {
  Block* block;
  uint32_t lanes;     // there are
  uint32_t runnable;  // lanes that wait for nothing
  uint32_t returned;
  uint32_t turn;  // where the next lane is looked for
  bool descends;
  // The operation that lanes wait at.
  void (*operation)(void* const* arguments);
  const char* name;
  uint32_t num_arrived;
  void* arguments[32];
  // Warpgroup products that are not waited for yet, and ends of their groups.
  std::vector<Product> products;
  std::vector<size_t> product_groups;
  uint32_t num_products;
  bool has_fence;
};

struct Thread {
  Dim3 index;
  Warp* warp;
  uint32_t lane;
  void* stack_pointer;
  char* stack;
  void* fake_stack;  // of the address sanitizer
  const char* waits_at;
  bool awaited_previous;
  std::vector<Copy> copies;
  std::vector<size_t> copy_groups;
  std::vector<uint32_t> unshown;  // 16-byte pieces written, not yet shown to products
};

struct Block {
  Dim3 index;
  uint32_t rank;  // in its cluster
  uint32_t num_arrived, num_arrived_cluster, num_returned;
  bool has_started;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  std::vector<char> image;          // of shared memory, while another block of the cluster runs
  std::vector<uint8_t> is_unshown;  // by 16-byte piece of shared memory
};

extern Thread* running;
extern Dim3 grid_size, block_size;

// Ends the launch with a message that names kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Waits until all lanes of the warp have come to the same `operation`, which the last one runs over
// their arguments. `name` is for messages.
void warp_operation(const char* name, void (*operation)(void* const*), void* argument);
void block_barrier();
void cluster_barrier();

// True or false, drawn from the launch's seed.
bool flip();

// A buffer that kernels may use; of an earlier kernel's making, only behind wait_for_previous.
struct Buffer {
  uint64_t address, num_bytes;
  uint32_t is_of_previous;
};

// Checks that `bytes` at `p` lie in a buffer the launch was told of, on a boundary of their size.
void check_global(const void* p, size_t bytes, const char* what);
// The bytes at a shared address of the running block, or of another one of its cluster.
char* shared_memory(uint32_t address, size_t bytes, const char* what);
char* cluster_memory(uint32_t address, size_t bytes, uint32_t rank, const char* what);
uint32_t shared_address(const void* p);

void copy_async(uint32_t to, const void* from, uint32_t bytes, bool keep);
void copy_async_commit();
void copy_async_wait(size_t pending);

// sums[lane][...] += left right; the layouts of mma.m16n8k16, `rows` 8 or 16.
void multiply(float* const sums[32], const uint32_t left[32][4], const uint32_t right[32][2],
              int rows, bool is_bf16);

void show_to_products();
void products_begin();
void products_commit();
void products_wait(size_t pending);
struct ProductArguments {
  float* sums;
  const uint32_t* left;  // four words, or null
  uint64_t a, b;
  bool right_is_row_major, keep, is_bf16;
  int columns;
};
void product(ProductArguments& arguments);

float float_of_half(uint16_t bits);
uint16_t half_of_float(float x);
uint16_t bf16_of_float(float x);

// A kernel of the module, as its table lists it.
struct Kernel {
  const char* name;
  void (*call)(void* const* arguments);
  uint32_t cluster;       // blocks
  uint32_t most_threads;  // of a block; 0: not said
};
struct Constant {
  const char* name;
  const uint32_t* value;
};
extern const Kernel kernels[];
extern const size_t num_kernels;
extern const Constant constants[];
extern const size_t num_constants;

}  // namespace emulation

// Dynamic shared memory of the running block, of every kernel whatever it calls it.
constexpr size_t kMaxDynamicShared = 232448;
extern thread_local unsigned char emulated_shared[] asm("emulated_shared");

#endif  // EMULATION_DEVICE_H
