#include "fake_verbs.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace blink {
namespace {

struct Region {
  ibv_mr mr{};
  std::byte* memory = nullptr;
  uint64_t start = 0;  // as work requests name it
  uint64_t num_bytes = 0;
  int access = 0;
  void* mapping = nullptr;  // of a dma-buf
};

struct Request {
  std::optional<ibv_wc_status> outcome;  // of a READ that ran before its turn to complete
  ibv_send_wr request{};
  ibv_sge piece{};
  std::vector<std::byte> inline_bytes;
};

struct Queue {
  ibv_qp qp{};
  uint32_t depth = 0;
  uint32_t num_held = 0;  // entries since the last polled signal
  uint32_t peer = 0;
  int access = 0;
  ibv_qp_state state = IBV_QPS_RESET;
  std::deque<Request> pending;
};

struct Completion {
  ibv_wc done;
  Queue* queue;
  uint32_t num_entries;  // it frees
};

struct CompletionQueue {
  ibv_cq cq{};
  std::deque<Completion> ready;
};

// Everything under one lock: the model is about order and accounting, not speed.
struct State {
  std::mutex mutex;
  std::map<uint32_t, std::unique_ptr<Region>> regions;  // by key
  std::map<uint32_t, std::unique_ptr<Queue>> queues;    // by number
  std::map<ibv_cq*, std::unique_ptr<CompletionQueue>> completions;
  uint32_t next_key = 100;
  uint32_t next_queue = 7;
  int num_contexts = 0;
  int num_domains = 0;
};

State& state() {
  static State the_state;
  return the_state;
}

ibv_device the_device{};

Region* find(uint32_t key, uint64_t address, uint64_t num_bytes, int access) {
  const auto found = state().regions.find(key);
  if (found == state().regions.end()) return nullptr;
  Region& region = *found->second;
  const bool fits = address >= region.start && num_bytes <= region.num_bytes &&
                    address - region.start <= region.num_bytes - num_bytes;
  return fits && (region.access & access) == access ? &region : nullptr;
}

// Words whole and ordered, as the transport promises; the rest byte by byte.
void store(std::byte* target, const std::byte* source, size_t num_bytes) {
  if (num_bytes == 8 && reinterpret_cast<uintptr_t>(target) % 8 == 0) {
    uint64_t value;
    std::memcpy(&value, source, 8);
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(target))
        .store(value, std::memory_order_release);
    return;
  }
  std::memcpy(target, source, num_bytes);
}

void load(std::byte* target, std::byte* source, size_t num_bytes) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(source) % 8 == 0;
  size_t i = 0;
  for (; is_aligned && i + 8 <= num_bytes; i += 8) {
    const uint64_t value = std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(source + i))
                               .load(std::memory_order_acquire);
    std::memcpy(target + i, &value, 8);
  }
  std::memcpy(target + i, source + i, num_bytes - i);
}

ibv_wc_status run(const Queue& queue, const Request& posted) {
  if (!fake_card().is_link_up) return IBV_WC_RETRY_EXC_ERR;
  const auto peer = state().queues.find(queue.peer);
  if (peer == state().queues.end() || peer->second->peer != queue.qp.qp_num) {
    return IBV_WC_RETRY_EXC_ERR;  // nobody acknowledges
  }
  const bool reads = posted.request.opcode == IBV_WR_RDMA_READ;
  const int wanted = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  const uint64_t address = posted.request.wr.rdma.remote_addr;
  const uint32_t num_bytes = posted.piece.length;
  Region* remote = find(posted.request.wr.rdma.rkey, address, num_bytes, wanted);
  if (remote == nullptr || (peer->second->access & wanted) == 0) return IBV_WC_REM_ACCESS_ERR;
  std::byte* there = remote->memory + (address - remote->start);
  if (!posted.inline_bytes.empty()) {
    store(there, posted.inline_bytes.data(), num_bytes);
    return IBV_WC_SUCCESS;
  }
  Region* local =
      find(posted.piece.lkey, posted.piece.addr, num_bytes, reads ? IBV_ACCESS_LOCAL_WRITE : 0);
  if (local == nullptr) return IBV_WC_LOC_PROT_ERR;
  std::byte* here = local->memory + (posted.piece.addr - local->start);
  if (reads) {
    if (fake_card().before_read) fake_card().before_read();
    load(here, there, num_bytes);
  } else {
    store(there, here, num_bytes);
  }
  return IBV_WC_SUCCESS;
}

int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** refused) {
  const std::lock_guard lock(state().mutex);
  Queue& queue = *state().queues.at(qp->qp_num);
  for (; request != nullptr; request = request->next) {
    *refused = request;
    if (queue.state != IBV_QPS_RTS && queue.state != IBV_QPS_ERR) return EINVAL;
    if (queue.num_held >= queue.depth) return ENOMEM;
    ++queue.num_held;
    ++fake_card().num_posted;
    if ((request->send_flags & IBV_SEND_SIGNALED) != 0) ++fake_card().num_signalled;
    if ((request->send_flags & IBV_SEND_FENCE) != 0) ++fake_card().num_fenced;
    Request& posted = queue.pending.emplace_back();
    posted.request = *request;
    posted.piece = *request->sg_list;
    if ((request->send_flags & IBV_SEND_INLINE) != 0) {
      const auto* bytes = reinterpret_cast<const std::byte*>(posted.piece.addr);
      posted.inline_bytes.assign(bytes, bytes + posted.piece.length);
    }
  }
  return 0;
}

bool is_read(const Request& posted) { return posted.request.opcode == IBV_WR_RDMA_READ; }

// READs that no fence keeps apart run in the order that would hurt most, the last one first; they
// complete in order, as those of a reliable connection do.
void run_reads_backwards(Queue& queue) {
  size_t end = 0;
  while (end < queue.pending.size() && is_read(queue.pending[end]) &&
         (end == 0 || (queue.pending[end].request.send_flags & IBV_SEND_FENCE) == 0)) {
    ++end;
  }
  while (end > 0) {
    Request& posted = queue.pending[--end];
    if (!posted.outcome) posted.outcome = run(queue, posted);
  }
}

// Runs a few requests of the queues that report here.
void work(ibv_cq* cq, CompletionQueue& completions) {
  for (auto& [number, queue] : state().queues) {
    if (queue->qp.send_cq != cq) continue;
    for (uint32_t i = 0; i < fake_card().requests_a_poll && !queue->pending.empty(); ++i) {
      if (!fake_card().answers) return;
      if (queue->state != IBV_QPS_ERR) run_reads_backwards(*queue);
      const Request posted = std::move(queue->pending.front());
      queue->pending.pop_front();
      ibv_wc_status status = IBV_WC_WR_FLUSH_ERR;
      if (queue->state != IBV_QPS_ERR) {
        status = posted.outcome ? *posted.outcome : run(*queue, posted);
      }
      if (status != IBV_WC_SUCCESS) queue->state = IBV_QPS_ERR;
      const bool is_signalled = (posted.request.send_flags & IBV_SEND_SIGNALED) != 0;
      if (status == IBV_WC_SUCCESS && !is_signalled) continue;
      Completion completion{};
      completion.done.wr_id = posted.request.wr_id;
      completion.done.status = status;
      completion.queue = queue.get();
      completion.num_entries = queue->num_held - static_cast<uint32_t>(queue->pending.size());
      for (const Completion& other : completions.ready) {
        if (other.queue == queue.get()) completion.num_entries -= other.num_entries;
      }
      completions.ready.push_back(completion);
    }
  }
}

int poll_cq(ibv_cq* cq, int count, ibv_wc* done) {
  const std::lock_guard lock(state().mutex);
  CompletionQueue& completions = *state().completions.at(cq);
  work(cq, completions);
  int found = 0;
  while (found < count && !completions.ready.empty()) {
    const Completion& completion = completions.ready.front();
    done[found++] = completion.done;
    completion.queue->num_held -= completion.num_entries;
    completions.ready.pop_front();
  }
  return found;
}

ibv_device** get_device_list(int* count) {
  static ibv_device* list[] = {&the_device, nullptr};
  *count = fake_card().has_device ? 1 : 0;
  if (fake_card().has_device) return list;
  errno = ENOSYS;
  return nullptr;
}

ibv_context* open_device(ibv_device* device) {
  const std::lock_guard lock(state().mutex);
  ++state().num_contexts;
  auto* context = new ibv_context{};
  context->device = device;
  context->ops.post_send = post_send;
  context->ops.poll_cq = poll_cq;
  return context;
}

int close_device(ibv_context* context) {
  const std::lock_guard lock(state().mutex);
  --state().num_contexts;
  delete context;
  return 0;
}

int query_device(ibv_context*, ibv_device_attr* attributes) {
  attributes->phys_port_cnt = 1;
  attributes->max_qp_rd_atom = 16;
  attributes->max_qp_init_rd_atom = 16;
  return 0;
}

int query_port(ibv_context*, uint8_t, _compat_ibv_port_attr* compatible) {
  auto* attributes = reinterpret_cast<ibv_port_attr*>(compatible);
  attributes->state = IBV_PORT_ACTIVE;
  attributes->active_mtu = IBV_MTU_1024;
  attributes->gid_tbl_len = 3;
  attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

// A link-local address, RoCE v1 and v2 of 127.0.0.1: only the last will do.
int query_gid_ex(ibv_context*, uint32_t, uint32_t index, ibv_gid_entry* entry, uint32_t, size_t) {
  *entry = {};
  entry->gid_index = index;
  entry->gid_type = index == 1 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
  if (index == 0) {
    entry->gid.raw[0] = 0xfe;
    entry->gid.raw[1] = 0x80;
    return 0;
  }
  entry->gid.raw[10] = entry->gid.raw[11] = 0xff;
  entry->gid.raw[12] = 127;
  entry->gid.raw[15] = 1;
  return 0;
}

ibv_pd* alloc_pd(ibv_context* context) {
  const std::lock_guard lock(state().mutex);
  ++state().num_domains;
  return new ibv_pd{context, 0};
}

int dealloc_pd(ibv_pd* pd) {
  const std::lock_guard lock(state().mutex);
  --state().num_domains;
  delete pd;
  return 0;
}

ibv_mr* add_region(ibv_pd* pd, std::byte* memory, uint64_t start, uint64_t num_bytes, int access,
                   void* mapping) {
  const std::lock_guard lock(state().mutex);
  auto region = std::make_unique<Region>();
  region->memory = memory;
  region->start = start;
  region->num_bytes = num_bytes;
  region->access = access;
  region->mapping = mapping;
  region->mr.context = pd->context;
  region->mr.lkey = region->mr.rkey = state().next_key++;
  fake_card().all_access |= access;
  ibv_mr* mr = &region->mr;
  state().regions[mr->rkey] = std::move(region);
  return mr;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t num_bytes, int access) {
  return add_region(pd, static_cast<std::byte*>(address), reinterpret_cast<uint64_t>(address),
                    num_bytes, access, nullptr);
}

// "GPU memory" is the file's: nothing but the card can reach it through this address.
ibv_mr* reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t num_bytes, uint64_t iova, int fd,
                      int access) {
  void* mapping = ::mmap(nullptr, offset + num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) return nullptr;
  fake_card().last_dmabuf_access = access;
  ibv_mr* mr =
      add_region(pd, static_cast<std::byte*>(mapping) + offset, iova, num_bytes, access, mapping);
  mr->length = offset + num_bytes;
  return mr;
}

int dereg_mr(ibv_mr* mr) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().regions.find(mr->rkey);
  if (found->second->mapping != nullptr) ::munmap(found->second->mapping, mr->length);
  state().regions.erase(found);
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int, void*, ibv_comp_channel*, int) {
  const std::lock_guard lock(state().mutex);
  auto completions = std::make_unique<CompletionQueue>();
  completions->cq.context = context;
  ibv_cq* cq = &completions->cq;
  state().completions[cq] = std::move(completions);
  return cq;
}

int destroy_cq(ibv_cq* cq) {
  const std::lock_guard lock(state().mutex);
  state().completions.erase(cq);
  return 0;
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attributes) {
  if (attributes->cap.max_inline_data > fake_card().max_inline) {
    errno = EINVAL;
    return nullptr;
  }
  const std::lock_guard lock(state().mutex);
  auto queue = std::make_unique<Queue>();
  queue->qp.context = pd->context;
  queue->qp.send_cq = attributes->send_cq;
  queue->qp.qp_num = state().next_queue++;
  queue->depth = attributes->cap.max_send_wr;
  ibv_qp* qp = &queue->qp;
  state().queues[qp->qp_num] = std::move(queue);
  return qp;
}

int modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  const std::lock_guard lock(state().mutex);
  Queue& queue = *state().queues.at(qp->qp_num);
  const auto next = static_cast<int>(queue.state) + 1;
  if ((mask & IBV_QP_STATE) == 0 || attributes->qp_state != next) return EINVAL;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0)
    queue.access = static_cast<int>(attributes->qp_access_flags);
  if ((mask & IBV_QP_DEST_QPN) != 0) queue.peer = attributes->dest_qp_num;
  queue.state = attributes->qp_state;
  return 0;
}

int destroy_qp(ibv_qp* qp) {
  const std::lock_guard lock(state().mutex);
  Queue* queue = state().queues.at(qp->qp_num).get();
  for (auto& [cq, completions] : state().completions) {
    std::erase_if(completions->ready, [&](const Completion& c) { return c.queue == queue; });
  }
  state().queues.erase(qp->qp_num);
  return 0;
}

const char* wc_status_str(ibv_wc_status status) {
  if (status == IBV_WC_RETRY_EXC_ERR) return "transport retry counter exceeded";
  return status == IBV_WC_REM_ACCESS_ERR ? "remote access error" : "another error";
}

}  // namespace

void FakeCard::reset() {
  has_device = is_link_up = answers = true;
  max_inline = 64;
  requests_a_poll = 3;
  num_signalled = num_posted = num_fenced = 0;
  all_access = 0;
  before_read = nullptr;
}

int FakeCard::num_live() const {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().regions.size() + state().queues.size() +
                          state().completions.size()) +
         state().num_contexts + state().num_domains;
}

FakeCard& fake_card() {
  static FakeCard card;
  return card;
}

const VerbsLibrary& fake_verbs() {
  static const VerbsLibrary library = {
      get_device_list,
      [](ibv_device**) {},
      [](ibv_device*) { return "fake0"; },
      open_device,
      close_device,
      query_device,
      query_port,
      query_gid_ex,
      [](ibv_context*, uint8_t, int, ibv_gid*) { return 0; },
      alloc_pd,
      dealloc_pd,
      reg_mr,
      reg_dmabuf_mr,
      dereg_mr,
      create_cq,
      destroy_cq,
      create_qp,
      modify_qp,
      destroy_qp,
      wc_status_str,
  };
  return library;
}

}  // namespace blink
