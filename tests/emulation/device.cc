// Blocks, warps and threads of the emulated device, and the launch of a kernel over a grid.
#include "emulation/device.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "fibers.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

alignas(128) thread_local unsigned char emulated_shared[kMaxDynamicShared + 1024];

namespace emulation {

Thread* running = nullptr;
Dim3 grid_size, block_size;

namespace {

constexpr uint32_t kWindow = 1024;  // shared addresses start here: small ones are mistakes
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kGuard = 0;
#else
constexpr size_t kGuard = 1024;  // bytes behind dynamic shared memory that nobody may write
#endif
constexpr unsigned char kPoison = 0xff;  // NaN in every type

const Kernel* kernel;
void* const* kernel_arguments;
uint64_t random_state;
uint32_t dynamic_bytes;
std::vector<Buffer> buffers;
std::vector<Block> cluster;
Block* resident;  // whose shared memory is in place
std::string failure;
bool has_failed;

// The module's thread-local memory: static shared variables and the dynamic array.
struct Window {
  char* begin = nullptr;
  size_t num_bytes = 0, dynamic_at = 0;
};
Window window;

int find_window(dl_phdr_info* info, size_t, void* own_base) {
  if (reinterpret_cast<void*>(info->dlpi_addr) != own_base) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
    window.begin = static_cast<char*>(info->dlpi_tls_data);
    window.num_bytes = info->dlpi_phdr[i].p_memsz;
  }
  return 1;
}

void open_window() {
  char* dynamic = reinterpret_cast<char*>(emulated_shared);  // brings the memory into being
  asm volatile("" : "+r"(dynamic)::"memory");
  Dl_info own;
  dladdr(reinterpret_cast<void*>(&open_window), &own);
  window = {};
  dl_iterate_phdr(find_window, own.dli_fbase);
  if (window.begin == nullptr) fail("the module's thread-local memory is not found");
  window.dynamic_at = static_cast<size_t>(dynamic - window.begin);
}

uint64_t draw() {
  random_state += 0x9e3779b97f4a7c15ull;
  uint64_t x = random_state;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

size_t end_of_dynamic() { return window.dynamic_at + dynamic_bytes; }

// With the address sanitizer what lies behind dynamic shared memory is closed.
void close_rest_of_dynamic() {
#ifdef __SANITIZE_ADDRESS__
  const size_t size = sizeof emulated_shared;
  __asan_unpoison_memory_region(emulated_shared, size);
  __asan_poison_memory_region(emulated_shared + dynamic_bytes, size - dynamic_bytes);
#endif
}

// Calls f(offset, bytes) for the parts of the window that a block uses.
template <typename F>
void for_each_part(const F& f) {
  f(size_t{0}, end_of_dynamic() + kGuard);
  const size_t behind = window.dynamic_at + sizeof emulated_shared;
  f(behind, window.num_bytes - behind);
}

void make_resident(Block& block) {
  if (resident == &block) return;
  if (resident != nullptr)
    for_each_part([](size_t at, size_t bytes) {
      memcpy(resident->image.data() + at, window.begin + at, bytes);
    });
  for_each_part(
      [&](size_t at, size_t bytes) { memcpy(window.begin + at, block.image.data() + at, bytes); });
  resident = &block;
}

void check_guard(const Block& block) {
  const char* memory = &block == resident ? window.begin : block.image.data();
  for (size_t i = 0; i < kGuard; ++i)
    if (static_cast<unsigned char>(memory[end_of_dynamic() + i]) != kPoison)
      fail("byte %zu behind %u bytes of dynamic shared memory was written", i, dynamic_bytes);
}

void return_thread() {
  Thread& me = *running;
  Warp& warp = *me.warp;
  Block& block = *warp.block;
  if (!me.awaited_previous) fail("returned without wait_for_previous");
  if (!me.copies.empty()) fail("returned before its asynchronous copies were waited for");
  if (warp.num_arrived > 0)
    fail("returned while %u lanes of its warp wait at %s", warp.num_arrived, warp.name);
  if (!warp.product_groups.empty()) fail("returned before its warpgroup products were waited for");
  warp.runnable &= ~(1u << me.lane);
  warp.returned |= 1u << me.lane;
  if (++block.num_returned == block.threads.size()) {
    check_guard(block);
    for (size_t i = 0; i + 3 < block.warps.size(); i += 4)
      for (size_t j = 1; j < 4; ++j)
        if (block.warps[i + j].num_products != block.warps[i].num_products)
          fail("warps of one warpgroup ran %u and %u products", block.warps[i].num_products,
               block.warps[i + j].num_products);
  }
}

void thread_main() {
  begin_fiber();
  kernel->call(kernel_arguments);
  return_thread();
  leave_fiber();
}

// The next lane of the warp that can go on; null when all wait.
Thread* next_lane(Warp& warp) {
  if (warp.runnable == 0) return nullptr;
  const uint32_t turn = warp.turn & 31;
  const uint32_t turned = warp.runnable >> turn | warp.runnable << (-turn & 31);
  const int found = warp.descends ? 31 - __builtin_clz(turned) : __builtin_ctz(turned);
  const uint32_t lane = (found + turn) & 31;
  const size_t first = static_cast<size_t>(&warp - warp.block->warps.data()) * 32;
  return &warp.block->threads[first + lane];
}

void wait_at(const char* what) {
  running->waits_at = what;
  leave_fiber();
}

void release(Warp& warp) {
  warp.runnable = warp.lanes & ~warp.returned;
  const uint64_t x = draw();
  warp.turn = x & 31;
  warp.descends = x >> 5 & 1;
}

std::string describe_waiting() {
  struct Count {
    const char* at;
    size_t threads;
  };
  std::vector<Count> counts;
  size_t returned = 0;
  for (const Block& block : cluster) {
    returned += block.num_returned;
    for (const Thread& thread : block.threads) {
      if (thread.warp->returned >> thread.lane & 1) continue;
      auto known = std::find_if(counts.begin(), counts.end(),
                                [&](const Count& c) { return strcmp(c.at, thread.waits_at) == 0; });
      if (known == counts.end()) known = counts.insert(known, {thread.waits_at, 0});
      ++known->threads;
    }
  }
  std::string text;
  for (const Count& count : counts)
    text += std::to_string(count.threads) + " threads wait at " + count.at + ", ";
  return text + std::to_string(returned) + " have returned";
}

void start_block(Block& block, Dim3 index, uint32_t rank, uint32_t num_threads) {
  block.index = index;
  block.rank = rank;
  block.num_arrived = block.num_arrived_cluster = block.num_returned = 0;
  block.has_started = false;
  block.image.assign(window.num_bytes, static_cast<char>(kPoison));
  block.is_unshown.assign(window.num_bytes / 16 + 1, 0);
  block.threads.resize(num_threads);
  block.warps.resize((num_threads + 31) / 32);
  for (size_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    const uint32_t lanes = std::min<uint32_t>(32, num_threads - w * 32);
    warp = {};
    warp.block = &block;
    warp.lanes = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    release(warp);
  }
  for (uint32_t i = 0; i < num_threads; ++i) {
    Thread& thread = block.threads[i];
    thread.index = {i, 0, 0};
    thread.warp = &block.warps[i / 32];
    thread.lane = i % 32;
    thread.waits_at = "its start";
    thread.awaited_previous = false;
    thread.copies.clear();
    thread.copy_groups.clear();
    thread.unshown.clear();
    prepare_fiber(thread, rank * num_threads + i, thread_main);
  }
}

// Runs warps of the block, drawn at random, until all of them wait. False: none could go on.
bool run_block(Block& block) {
  bool any = false;
  for (;;) {
    const size_t count = block.warps.size(), first = draw() % count;
    Warp* found = nullptr;
    for (size_t i = 0; i < count && found == nullptr; ++i)
      if (block.warps[(first + i) % count].runnable != 0) found = &block.warps[(first + i) % count];
    if (found == nullptr) return any;
    if (!any) make_resident(block);
    any = block.has_started = true;
    enter_fibers(*next_lane(*found));
    if (has_failed) return false;
  }
}

void run_cluster() {
  for (;;) {
    bool any = false;
    const size_t first = draw() % cluster.size();
    for (size_t i = 0; i < cluster.size() && !has_failed; ++i)
      any |= run_block(cluster[(first + i) % cluster.size()]);
    if (has_failed) return;
    if (std::all_of(cluster.begin(), cluster.end(),
                    [](const Block& b) { return b.num_returned == b.threads.size(); }))
      return;
    if (!any) fail("nobody can go on: %s", describe_waiting().c_str());
  }
}

void run_grid(uint32_t num_threads) {
  open_window();
  close_rest_of_dynamic();
  const size_t width = kernel->cluster;
  if (grid_size.x % width != 0) fail("a grid %u wide for clusters of %zu", grid_size.x, width);
  cluster.resize(width);
  std::vector<Dim3> order;
  for (uint32_t z = 0; z < grid_size.z; ++z)
    for (uint32_t y = 0; y < grid_size.y; ++y)
      for (uint32_t x = 0; x < grid_size.x; x += width) order.push_back({x, y, z});
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
  for (const Dim3& at : order) {
    resident = nullptr;
    for (uint32_t rank = 0; rank < width; ++rank)
      start_block(cluster[rank], {at.x + rank, at.y, at.z}, rank, num_threads);
    run_cluster();
    if (has_failed) return;
  }
}

}  // namespace

Thread* lane_after_running() { return next_lane(*running->warp); }

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  failure = kernel == nullptr ? "" : std::string(kernel->name) + ": ";
  if (running != nullptr) {
    const Dim3& block = running->warp->block->index;
    failure += "block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ", " +
               std::to_string(block.z) + ") thread " + std::to_string(running->index.x) + ": ";
  }
  failure += text;
  has_failed = true;
  abandon_fibers();
}

void warp_operation(const char* name, void (*operation)(void* const*), void* argument) {
  Thread& me = *running;
  Warp& warp = *me.warp;
  if (warp.lanes != 0xffffffffu) fail("%s in a warp of fewer than 32 lanes", name);
  if (warp.returned != 0) fail("%s after lanes of the warp have returned", name);
  if (warp.num_arrived > 0 && warp.operation != operation)
    fail("at %s while other lanes of the warp are at %s", name, warp.name);
  warp.operation = operation;
  warp.name = name;
  warp.arguments[me.lane] = argument;
  if (++warp.num_arrived == 32) {
    warp.num_arrived = 0;
    release(warp);
    operation(warp.arguments);
  } else {
    warp.runnable &= ~(1u << me.lane);
    wait_at(name);
  }
}

void block_barrier() {
  Block& block = *running->warp->block;
  running->warp->runnable &= ~(1u << running->lane);
  if (++block.num_arrived == block.threads.size()) {
    block.num_arrived = 0;
    for (Warp& warp : block.warps) release(warp);
  }
  wait_at("__syncthreads");
}

void cluster_barrier() {
  Block& block = *running->warp->block;
  running->warp->runnable &= ~(1u << running->lane);
  if (++block.num_arrived_cluster == block.threads.size() &&
      std::all_of(cluster.begin(), cluster.end(),
                  [](const Block& b) { return b.num_arrived_cluster == b.threads.size(); })) {
    for (Block& one : cluster) {
      one.num_arrived_cluster = 0;
      for (Warp& warp : one.warps) release(warp);
    }
  }
  wait_at("the cluster's barrier");
}

bool flip() { return draw() >> 63; }

void check_global(const void* p, size_t bytes, const char* what) {
  const uint64_t at = reinterpret_cast<uint64_t>(p);
  if (at % bytes != 0)
    fail("%s of %zu bytes at %p, which is not on their boundary", what, bytes, p);
  static size_t last = 0;
  auto holds = [&](const Buffer& b) {
    return at >= b.address && at + bytes <= b.address + b.num_bytes;
  };
  if (last >= buffers.size() || !holds(buffers[last])) {
    for (last = 0; last < buffers.size() && !holds(buffers[last]); ++last) {
    }
    if (last == buffers.size()) fail("%s of %zu bytes at %p, in no buffer", what, bytes, p);
  }
  if (buffers[last].is_of_previous && !running->awaited_previous)
    fail("%s of what the previous kernel wrote, before wait_for_previous", what);
}

uint32_t shared_address(const void* p) {
  const ptrdiff_t at = static_cast<const char*>(p) - window.begin;
  if (at < 0 || static_cast<size_t>(at) > window.num_bytes) fail("%p is no shared memory", p);
  return kWindow + static_cast<uint32_t>(at);
}

char* shared_memory(uint32_t address, size_t bytes, const char* what) {
  const size_t at = size_t{address} - kWindow, end = at + bytes;
  const bool in_dynamic = at >= window.dynamic_at && end <= end_of_dynamic();
  const bool in_static =
      end <= window.dynamic_at ||
      (at >= window.dynamic_at + sizeof emulated_shared && end <= window.num_bytes);
  if (address < kWindow || !(in_dynamic || in_static))
    fail("%s of %zu bytes at %td of %u bytes of dynamic shared memory", what, bytes,
         static_cast<ptrdiff_t>(at) - static_cast<ptrdiff_t>(window.dynamic_at), dynamic_bytes);
  if (address % bytes != 0)
    fail("%s of %zu bytes at shared address %u, not on their boundary", what, bytes, address);
  return window.begin + at;
}

char* cluster_memory(uint32_t address, size_t bytes, uint32_t rank, const char* what) {
  char* own = shared_memory(address, bytes, what);
  if (rank >= cluster.size()) fail("%s in block %u of %zu", what, rank, cluster.size());
  Block& there = cluster[rank];
  if (!there.has_started) fail("%s in a block that has not started", what);
  if (there.num_returned == there.threads.size()) fail("%s in a block that has returned", what);
  return &there == resident ? own : there.image.data() + (own - window.begin);
}

}  // namespace emulation

using namespace emulation;

// 0: done; else the reason is in `message`.
extern "C" __attribute__((visibility("default"))) int emulation_launch(
    const char* name, const uint32_t* grid, uint32_t num_threads, uint32_t shared_bytes,
    void* const* arguments, const Buffer* given, size_t num_buffers, uint64_t seed, char* message,
    size_t message_bytes) {
  running = nullptr;
  has_failed = false;
  kernel = nullptr;
  random_state = seed;
  dynamic_bytes = shared_bytes;
  kernel_arguments = arguments;
  buffers.assign(given, given + num_buffers);
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {num_threads, 1, 1};
  run_guarded([&] {
    for (size_t i = 0; i < num_kernels; ++i)
      if (strcmp(kernels[i].name, name) == 0) kernel = &kernels[i];
    if (kernel == nullptr) fail("there is no kernel %s", name);
    if (kernel->most_threads != 0 && num_threads > kernel->most_threads)
      fail("%u threads, compiled for %u", num_threads, kernel->most_threads);
    if (shared_bytes > kMaxDynamicShared) fail("%u bytes of shared memory", shared_bytes);
    run_grid(num_threads);
  });
  if (!has_failed) return 0;
  snprintf(message, message_bytes, "%s", failure.c_str());
  return 1;
}

// Whether the module has the kernel.
extern "C" __attribute__((visibility("default"))) int emulation_has_kernel(const char* name) {
  for (size_t i = 0; i < num_kernels; ++i)
    if (strcmp(kernels[i].name, name) == 0) return 1;
  return 0;
}

// The value of a constant of the module; false when there is none of the name.
extern "C" __attribute__((visibility("default"))) int emulation_constant(const char* name,
                                                                         uint32_t* value) {
  for (size_t i = 0; i < num_constants; ++i)
    if (strcmp(constants[i].name, name) == 0) return *value = *constants[i].value, 1;
  return 0;
}
