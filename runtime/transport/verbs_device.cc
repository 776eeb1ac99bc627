#include "transport/verbs_device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

namespace blink {
namespace {

constexpr uint8_t kMaxReads = 16;
constexpr uint8_t kTimeout = 14;  // 4.096 us * 2^14 = 67 ms until a packet is sent again
constexpr uint8_t kRetries = 7;   // then the peer is lost: about half a second
constexpr uint8_t kHopLimit = 64;

[[noreturn]] void fail(const std::string& what, int error) {
  throw RingError("verbs: " + what + (error != 0 ? std::string(": ") + std::strerror(error) : ""));
}

uint32_t random_packet_number() {
  std::random_device device;
  return device() & 0xFFFFFFu;
}

// ::ffff:a.b.c.d in host order; 0: not an IPv4 address.
uint32_t ipv4_of(const ibv_gid& gid) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::memcmp(gid.raw, kMapped, sizeof(kMapped)) != 0) return 0;
  return static_cast<uint32_t>(gid.raw[12]) << 24 | gid.raw[13] << 16 | gid.raw[14] << 8 |
         gid.raw[15];
}

}  // namespace

VerbsDevice::VerbsDevice(const VerbsDeviceConfig& config, uint32_t link_ipv4)
    : library_(config.library != nullptr ? *config.library : VerbsLibrary::system()),
      context_(nullptr, library_.close_device),
      pd_(nullptr, library_.dealloc_pd) {
  int count = 0;
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> list(library_.get_device_list(&count),
                                                                  library_.free_device_list);
  // A kernel without InfiniBand gives no list at all (ENOSYS).
  if (list == nullptr || count <= 0) {
    throw RingError(
        "verbs: this machine has no RDMA device; see `rdma link`, load the card's driver, or make "
        "a Soft-RoCE one: rdma link add rxe0 type rxe netdev eth0");
  }
  std::string seen;
  // First a port with the link's own address, then any that is up.
  for (const bool needs_address : {true, false}) {
    if (needs_address && link_ipv4 == 0) continue;
    for (int i = 0; i < count; ++i) {
      const std::string device_name = library_.get_device_name(list.get()[i]);
      if (!needs_address || link_ipv4 == 0) seen += (seen.empty() ? "" : ", ") + device_name;
      if (!config.device.empty() && device_name != config.device) continue;
      VerbsHandle<ibv_context> context(library_.open_device(list.get()[i]), library_.close_device);
      if (context == nullptr) continue;
      ibv_device_attr attributes{};
      if (library_.query_device(context.get(), &attributes) != 0) continue;
      max_reads_ = static_cast<uint8_t>(std::clamp(
          std::min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom), 1, +kMaxReads));
      for (uint8_t port = 1; port <= attributes.phys_port_cnt; ++port) {
        const uint32_t wanted = needs_address ? link_ipv4 : 0;
        if (!use_port(context.get(), port, config.gid_index, wanted)) continue;
        name_ =
            device_name + " port " + std::to_string(port) + " gid " + std::to_string(gid_index_);
        context_ = std::move(context);
        pd_.reset(library_.alloc_pd(context_.get()));
        if (pd_ == nullptr) fail(name_ + ": cannot make a protection domain", errno);
        return;
      }
    }
  }
  const std::string wanted = config.device.empty() ? "" : "named '" + config.device + "' ";
  const std::string gid =
      config.gid_index < 0 ? "" : " with gid " + std::to_string(config.gid_index);
  throw RingError("verbs: no RDMA device " + wanted + "has an active port" + gid + " (devices: " +
                  seen + "); bring its network interface up and give it an address");
}

// True: the port is up and has a usable address. RoCE: a v2 GID, with the link's IPv4 address
// where one is asked for. InfiniBand: the LID and GID 0.
bool VerbsDevice::use_port(ibv_context* context, uint8_t port, int wanted_gid, uint32_t link_ipv4) {
  // The library's symbol fills the leading fields only, as its header does with the same cast.
  ibv_port_attr attributes{};
  auto* compatible = reinterpret_cast<_compat_ibv_port_attr*>(&attributes);
  if (library_.query_port(context, port, compatible) != 0) return false;
  if (attributes.state != IBV_PORT_ACTIVE) return false;
  port_ = port;
  lid_ = attributes.lid;
  mtu_ = static_cast<uint8_t>(attributes.active_mtu);
  link_layer_ = attributes.link_layer;
  const bool is_ethernet = link_layer_ == IBV_LINK_LAYER_ETHERNET;
  if (!is_ethernet && wanted_gid < 0) {
    gid_index_ = 0;
    return link_ipv4 == 0 && library_.query_gid(context, port, 0, &gid_) == 0;
  }
  for (int index = 0; index < attributes.gid_tbl_len; ++index) {
    if (wanted_gid >= 0 && index != wanted_gid) continue;
    ibv_gid_entry entry{};
    if (library_.query_gid_ex(context, port, static_cast<uint32_t>(index), &entry, 0,
                              sizeof(entry)) != 0) {
      continue;
    }
    const uint32_t ipv4 = ipv4_of(entry.gid);
    if (wanted_gid < 0 && (entry.gid_type != IBV_GID_TYPE_ROCE_V2 || ipv4 == 0)) continue;
    if (link_ipv4 != 0 && ipv4 != link_ipv4) continue;
    gid_ = entry.gid;
    gid_index_ = static_cast<uint8_t>(index);
    return true;
  }
  return false;
}

VerbsHandle<ibv_mr> VerbsDevice::register_memory(void* address, uint64_t num_bytes,
                                                 int access) const {
  VerbsHandle<ibv_mr> mr(library_.reg_mr(pd_.get(), address, num_bytes, access), library_.dereg_mr);
  if (mr == nullptr) {
    const int error = errno;
    fail(name_ + ": cannot register " + std::to_string(num_bytes) + " bytes" +
             (error == ENOMEM ? " (raise the locked-memory limit: ulimit -l unlimited)" : ""),
         error);
  }
  return mr;
}

VerbsHandle<ibv_mr> VerbsDevice::register_dmabuf(int fd, uint64_t offset, uint64_t num_bytes,
                                                 uint64_t iova, int access) const {
  if (library_.reg_dmabuf_mr == nullptr) {
    throw RingError("verbs: libibverbs knows no dma-buf: install rdma-core 34 or newer");
  }
  VerbsHandle<ibv_mr> mr(library_.reg_dmabuf_mr(pd_.get(), offset, num_bytes, iova, fd, access),
                         library_.dereg_mr);
  if (mr == nullptr) {
    const int error = errno;
    fail(name_ + ": cannot register GPU memory" +
             (error == EOPNOTSUPP
                  ? " (this card's driver takes no dma-buf; keep the ring in host memory)"
                  : ""),
         error);
  }
  return mr;
}

VerbsHandle<ibv_cq> VerbsDevice::create_cq(uint32_t num_entries) const {
  VerbsHandle<ibv_cq> cq(
      library_.create_cq(context_.get(), static_cast<int>(num_entries), nullptr, nullptr, 0),
      library_.destroy_cq);
  if (cq == nullptr) fail(name_ + ": cannot make a completion queue", errno);
  return cq;
}

QueuePairAddress VerbsDevice::address_of(const ibv_qp& qp, uint32_t packet_number) const {
  QueuePairAddress address{};
  std::memcpy(address.gid, gid_.raw, sizeof(address.gid));
  address.qp_num = qp.qp_num;
  address.packet_number = packet_number;
  address.lid = lid_;
  address.mtu = mtu_;
  address.link_layer = link_layer_;
  address.max_reads = max_reads_;
  return address;
}

QueuePair::QueuePair(const VerbsDevice& device, uint32_t send_depth, uint32_t max_inline_bytes,
                     int remote_access)
    : device_(device),
      cq_(device.create_cq(send_depth + 1)),
      qp_(nullptr, device.library().destroy_qp),
      packet_number_(random_packet_number()) {
  for (const uint32_t inline_bytes : {max_inline_bytes, 0u}) {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq_.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap.max_send_wr = send_depth;
    attributes.cap.max_recv_wr = 1;
    attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
    attributes.cap.max_inline_data = inline_bytes;
    qp_.reset(device.library().create_qp(device.pd(), &attributes));
    max_inline_bytes_ = std::min(inline_bytes, attributes.cap.max_inline_data);
    if (qp_ != nullptr) break;
  }
  if (qp_ == nullptr) {
    fail(device.name() + ": cannot make a queue pair of depth " + std::to_string(send_depth),
         errno);
  }
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device.port();
  attributes.qp_access_flags = static_cast<unsigned>(remote_access);
  modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
}

void QueuePair::modify(ibv_qp_attr attributes, int mask, const char* state) {
  const int error = device_.library().modify_qp(qp_.get(), &attributes, mask);
  if (error != 0) fail(device_.name() + ": queue pair does not go to " + state, error);
}

void QueuePair::connect(const QueuePairAddress& peer) {
  const QueuePairAddress own = address();
  if (peer.link_layer != own.link_layer) {
    throw RingError("verbs: one end speaks InfiniBand, the other RoCE");
  }
  if (peer.mtu < IBV_MTU_256 || peer.mtu > IBV_MTU_4096) {
    throw RingError("verbs: the peer's MTU code is " + std::to_string(peer.mtu));
  }
  const uint8_t num_reads =
      std::clamp<uint8_t>(std::min(peer.max_reads, own.max_reads), 1, +kMaxReads);
  ibv_qp_attr ready{};
  ready.qp_state = IBV_QPS_RTR;
  ready.path_mtu = static_cast<ibv_mtu>(std::min(peer.mtu, own.mtu));
  ready.dest_qp_num = peer.qp_num & 0xFFFFFFu;
  ready.rq_psn = peer.packet_number & 0xFFFFFFu;
  ready.max_dest_rd_atomic = num_reads;
  ready.min_rnr_timer = 12;
  ready.ah_attr.port_num = device_.port();
  ready.ah_attr.dlid = peer.lid;
  ready.ah_attr.is_global = own.link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 0;
  std::memcpy(ready.ah_attr.grh.dgid.raw, peer.gid, sizeof(peer.gid));
  ready.ah_attr.grh.sgid_index = device_.gid_index();
  ready.ah_attr.grh.hop_limit = kHopLimit;
  modify(ready,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
         "RTR");
  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.timeout = kTimeout;
  send.retry_cnt = kRetries;
  send.rnr_retry = kRetries;
  send.sq_psn = packet_number_;
  send.max_rd_atomic = num_reads;
  modify(send,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC,
         "RTS");
}

}  // namespace blink
