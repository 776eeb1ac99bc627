#include <nanobind/nanobind.h>

void bind_tokenizer(nanobind::module_& module);

NB_MODULE(_tokenizer, module) { bind_tokenizer(module); }
