// One port of one RDMA card: opened, with a protection domain, memory regions and queue pairs.
// Everything is released by its destructor, in the order that the library asks for.
#ifndef BLINK_TRANSPORT_VERBS_DEVICE_H
#define BLINK_TRANSPORT_VERBS_DEVICE_H

#include <memory>
#include <string>

#include "transport/verbs.h"
#include "transport/verbs_bootstrap.h"
#include "transport/verbs_library.h"

namespace blink {

template <typename T>
using VerbsHandle = std::unique_ptr<T, int (*)(T*)>;

class VerbsDevice {
 public:
  // `link_ipv4`: the address (host order) of this end of the bootstrap connection; the card that
  // has it is taken when none is named. Throws RingError.
  VerbsDevice(const VerbsDeviceConfig& config, uint32_t link_ipv4);

  const VerbsLibrary& library() const { return library_; }
  const std::string& name() const { return name_; }  // "rxe0 port 1 gid 1"
  ibv_pd* pd() const { return pd_.get(); }

  VerbsHandle<ibv_mr> register_memory(void* address, uint64_t num_bytes, int access) const;
  // GPU memory through the dma-buf `fd`. Remote peers name it by `iova`. Never run on hardware.
  VerbsHandle<ibv_mr> register_dmabuf(int fd, uint64_t offset, uint64_t num_bytes, uint64_t iova,
                                      int access) const;
  VerbsHandle<ibv_cq> create_cq(uint32_t num_entries) const;

  // What this port tells a peer about a queue pair of its own.
  QueuePairAddress address_of(const ibv_qp& qp, uint32_t packet_number) const;
  uint8_t port() const { return port_; }
  uint8_t gid_index() const { return gid_index_; }
  uint8_t max_reads() const { return max_reads_; }
  uint8_t link_layer() const { return link_layer_; }

 private:
  bool use_port(ibv_context* context, uint8_t port, int wanted_gid, uint32_t link_ipv4);

  const VerbsLibrary& library_;
  std::string name_;
  VerbsHandle<ibv_context> context_;
  VerbsHandle<ibv_pd> pd_;
  uint8_t port_ = 0;
  uint8_t gid_index_ = 0;
  uint8_t mtu_ = 0;
  uint8_t link_layer_ = 0;
  uint8_t max_reads_ = 1;
  uint16_t lid_ = 0;
  ibv_gid gid_{};
};

// An RC queue pair, from creation to connection.
class QueuePair {
 public:
  // max_inline_bytes: asked for; fewer where the card has fewer. Throws RingError.
  QueuePair(const VerbsDevice& device, uint32_t send_depth, uint32_t max_inline_bytes,
            int remote_access);

  QueuePairAddress address() const { return device_.address_of(*qp_, packet_number_); }
  void connect(const QueuePairAddress& peer);
  uint32_t max_inline_bytes() const { return max_inline_bytes_; }
  ibv_qp* qp() const { return qp_.get(); }
  ibv_cq* cq() const { return cq_.get(); }

 private:
  void modify(ibv_qp_attr attributes, int mask, const char* state);

  const VerbsDevice& device_;
  VerbsHandle<ibv_cq> cq_;
  VerbsHandle<ibv_qp> qp_;
  uint32_t packet_number_;
  uint32_t max_inline_bytes_ = 0;
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_VERBS_DEVICE_H
