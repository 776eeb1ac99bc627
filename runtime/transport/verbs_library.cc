#include "transport/verbs_library.h"

#include <dlfcn.h>

#include <string>

#include "transport/ring_layout.h"
#include "transport/verbs.h"

namespace blink {
namespace {

constexpr const char* kFile = "libibverbs.so.1";

template <typename Function>
void find(void* handle, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(handle, name));
  if (function == nullptr) {
    throw RingError(std::string("verbs: ") + kFile + " has no " + name +
                    ": install a newer libibverbs1");
  }
}

VerbsLibrary load() {
  // Never closed: providers start threads and register handlers.
  void* handle = ::dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw RingError(std::string("verbs: ") + ::dlerror() +
                    ": install the packages libibverbs1 and ibverbs-providers");
  }
  VerbsLibrary library{};
  find(handle, "ibv_get_device_list", library.get_device_list);
  find(handle, "ibv_free_device_list", library.free_device_list);
  find(handle, "ibv_get_device_name", library.get_device_name);
  find(handle, "ibv_open_device", library.open_device);
  find(handle, "ibv_close_device", library.close_device);
  find(handle, "ibv_query_device", library.query_device);
  find(handle, "ibv_query_port", library.query_port);
  find(handle, "_ibv_query_gid_ex", library.query_gid_ex);
  find(handle, "ibv_query_gid", library.query_gid);
  find(handle, "ibv_alloc_pd", library.alloc_pd);
  find(handle, "ibv_dealloc_pd", library.dealloc_pd);
  find(handle, "ibv_reg_mr", library.reg_mr);
  find(handle, "ibv_dereg_mr", library.dereg_mr);
  find(handle, "ibv_create_cq", library.create_cq);
  find(handle, "ibv_destroy_cq", library.destroy_cq);
  find(handle, "ibv_create_qp", library.create_qp);
  find(handle, "ibv_modify_qp", library.modify_qp);
  find(handle, "ibv_destroy_qp", library.destroy_qp);
  find(handle, "ibv_wc_status_str", library.wc_status_str);
  library.reg_dmabuf_mr =
      reinterpret_cast<decltype(library.reg_dmabuf_mr)>(::dlsym(handle, "ibv_reg_dmabuf_mr"));
  return library;
}

}  // namespace

const VerbsLibrary& VerbsLibrary::system() {
  static const VerbsLibrary library = load();
  return library;
}

}  // namespace blink
