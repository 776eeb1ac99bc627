// blink_runtime._native: ring, tokenizer and front end for the Python shell.
#include "native/bindings.h"

NB_MODULE(_native, module) {
  module.doc() = "The native half of blink-runtime.";
  blink::bind_ring(module);
  blink::bind_step_trace(module);
#ifdef BLINK_HAS_TOKENIZER
  bind_tokenizer(module);
#endif
  blink::bind_link(module);
  blink::bind_front_end(module);
  blink::bind_loader(module);
}
