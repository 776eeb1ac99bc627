// A CUDA driver that is none: the scheduler's kernel follows a script, graphs are only counted.
#include <cstdint>
#include <cstring>

namespace {

struct Mailbox {
  uint64_t turn;
  uint32_t action;
  uint32_t action_key;
};

struct Script {
  Mailbox* mailbox;
  const uint32_t* actions;  // (action, key) pairs, one for each step
  uint32_t num_actions;
  uint32_t next;
  uint32_t launched[16];
  uint32_t num_launched;
  uint32_t errors_seen[16];
  uint32_t num_errors_seen;
  int fails_graph;  // the next graph launch returns this
  int fails_sync;   // every synchronization returns this once it is set
};

Script* script = nullptr;

}  // namespace

extern "C" {

void fake_set_script(Script* given) { script = given; }

int cuCtxSetCurrent(void* context) { return context == nullptr ? 201 : 0; }

int cuLaunchKernel(void* function, unsigned, unsigned, unsigned, unsigned block_x, unsigned,
                   unsigned, unsigned, void*, void** params, void**) {
  if (function == nullptr || block_x != 256) return 1;
  uint32_t error;
  std::memcpy(&error, params[1], sizeof error);
  if (error != 0) script->errors_seen[script->num_errors_seen++] = error;
  return 0;
}

int cuStreamSynchronize(void*) {
  if (script->fails_sync != 0) return script->fails_sync;
  const uint32_t step =
      script->next < script->num_actions ? script->next++ : script->num_actions - 1;
  script->mailbox->action = script->actions[2 * step];
  script->mailbox->action_key = script->actions[2 * step + 1];
  return 0;
}

int cuGraphLaunch(void* exec, void*) {
  const int error = script->fails_graph;
  script->fails_graph = 0;
  if (error == 0) {
    script->launched[script->num_launched++] =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(exec));
  }
  return error;
}
}
