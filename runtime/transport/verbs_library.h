// libibverbs as a table of functions, found at run time: a machine without it still runs all else.
// Posting and polling are not here: they go through the device context's own table, as in the
// library's header. A test fills the table (and a context's) with its own functions.
#ifndef BLINK_TRANSPORT_VERBS_LIBRARY_H
#define BLINK_TRANSPORT_VERBS_LIBRARY_H

#include <infiniband/verbs.h>

// The header's macros would call the library at link time.
#undef ibv_query_port
#undef ibv_reg_mr

namespace blink {

struct VerbsLibrary {
  ibv_device** (*get_device_list)(int* num_devices);
  void (*free_device_list)(ibv_device** list);
  const char* (*get_device_name)(ibv_device* device);
  ibv_context* (*open_device)(ibv_device* device);
  int (*close_device)(ibv_context* context);
  int (*query_device)(ibv_context* context, ibv_device_attr* attributes);
  int (*query_port)(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attributes);
  int (*query_gid_ex)(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry,
                      uint32_t flags, size_t entry_bytes);
  int (*query_gid)(ibv_context* context, uint8_t port, int index, ibv_gid* gid);
  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* pd);
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t num_bytes, int access);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, uint64_t offset, size_t num_bytes, uint64_t iova, int fd,
                           int access);  // null: a library from before dma-buf
  int (*dereg_mr)(ibv_mr* mr);
  ibv_cq* (*create_cq)(ibv_context* context, int num_entries, void* cookie,
                       ibv_comp_channel* channel, int vector);
  int (*destroy_cq)(ibv_cq* cq);
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attributes);
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attributes, int mask);
  int (*destroy_qp)(ibv_qp* qp);
  const char* (*wc_status_str)(ibv_wc_status status);

  // The system's; throws RingError naming the package that is missing.
  static const VerbsLibrary& system();
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_VERBS_LIBRARY_H
