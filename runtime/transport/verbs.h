// The network transport: a front end reaches a ring in another machine's memory over an RDMA
// network card. Builds and links without libibverbs; what needs it says so when it is called.
//
//   VerbsOwner      beside the ring: registers its memory, answers front ends, then sleeps
//   connect_verbs   the front end's side: a Transport (transport.h)
//
// TCP carries one exchange at the start (verbs_bootstrap.h) and stays open only so that either side
// sees the other end; all data goes by RDMA WRITE and READ, which the owner's CPU never sees.
#ifndef BLINK_TRANSPORT_VERBS_H
#define BLINK_TRANSPORT_VERBS_H

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace blink {

struct VerbsLibrary;  // verbs_library.h: libibverbs' functions, or a test's

// Which card and how to talk to it.
struct VerbsDeviceConfig {
  std::string device;                     // "mlx5_0"; empty: one that has the link's address
  int gid_index = -1;                     // -1: RoCE v2 with the link's IPv4 address
  const VerbsLibrary* library = nullptr;  // null: the system's libibverbs
};

struct VerbsConnectConfig {
  std::string host;
  uint16_t port = 0;
  VerbsDeviceConfig device;
  uint32_t front_end_index = 0;  // whose slot range to take
  uint64_t bundle_id = 0;        // what the owner must serve; 0: anything
  uint64_t client_id = 0;        // the same over reconnects: one's own old session may be replaced
  std::chrono::milliseconds connect_timeout{3000};   // the whole bootstrap
  std::chrono::milliseconds transfer_timeout{3000};  // from a post to its completion
  uint32_t send_queue_depth = 256;                   // work requests
  uint32_t signal_interval = 32;                     // every so many work requests ask to be told
  uint32_t staging_bytes = 1u << 20;                 // registered memory that writes go through
  uint32_t read_bytes = 256u << 10;                  // registered memory that reads land in
};

// Throws RingError: no library, no device, nobody there, another ABI, another bundle, a slot range
// that is taken.
std::unique_ptr<Transport> connect_verbs(const VerbsConnectConfig& config);

// The ring's memory as the card is to see it.
struct VerbsRingMemory {
  void* address = nullptr;  // host memory, or the GPU address of a dma-buf
  uint64_t num_bytes = 0;
  int dmabuf_fd = -1;          // not -1: GPU memory, exported by the CUDA driver
  uint64_t dmabuf_offset = 0;  // of the ring within the dma-buf
  blink_ring_header header{};  // a copy: sizes, bundle, incarnation
};

struct VerbsOwnerConfig {
  std::string host;
  uint16_t port = 0;  // 0: any free one
  VerbsDeviceConfig device;
  std::chrono::milliseconds bootstrap_timeout{2000};  // from accept to a complete hello
  uint32_t max_pending = 32;                          // connections that have not said hello
};

struct VerbsSessionInfo {
  uint32_t front_end_index;
  std::string peer;
};

// The ring's side. One thread answers bootstraps and forgets front ends that are gone; while none
// comes or goes it sleeps in poll(). The memory is the caller's and must outlive this object.
class VerbsOwner {
 public:
  virtual ~VerbsOwner() = default;

  virtual uint16_t port() const = 0;
  virtual std::string device() const = 0;  // "rxe0 port 1 gid 1"
  virtual std::vector<VerbsSessionInfo> sessions() const = 0;
  virtual uint64_t num_refused() const = 0;
};

// An owner's address and card, held from before there is a ring; nobody can connect yet.
class VerbsPlace {
 public:
  virtual ~VerbsPlace() = default;
};

// Throws RingError: the address is taken, or there is no library or no device.
std::unique_ptr<VerbsPlace> hold_verbs_place(const VerbsOwnerConfig& config);

// Throws RingError.
std::unique_ptr<VerbsOwner> serve_verbs(const VerbsRingMemory& ring,
                                        std::unique_ptr<VerbsPlace> place);
std::unique_ptr<VerbsOwner> serve_verbs(const VerbsRingMemory& ring,
                                        const VerbsOwnerConfig& config);

// True: the system's libibverbs is here and knows a device. `why` says what is missing.
bool has_verbs_device(std::string& why);

}  // namespace blink

#endif  // BLINK_TRANSPORT_VERBS_H
