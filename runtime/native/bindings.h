// One function per part of the module; module.cc calls them.
#ifndef BLINK_NATIVE_BINDINGS_H
#define BLINK_NATIVE_BINDINGS_H

#include <nanobind/nanobind.h>

namespace blink {

void bind_ring(nanobind::module_& module);
void bind_step_trace(nanobind::module_& module);
void bind_front_end(nanobind::module_& module);
void bind_link(nanobind::module_& module);
void bind_loader(nanobind::module_& module);

}  // namespace blink

void bind_tokenizer(nanobind::module_& module);

#endif  // BLINK_NATIVE_BINDINGS_H
