// Functions that Python calls by ctypes.

#include <ATen/Context.h>

#include "machine.h"

using simulated::Machine;
using simulated::knobs;

extern "C" {

void sim_init() { at::globalContext().lazyInitDevice(c10::kCUDA); }

void sim_set(const char* knob, double value) {
  std::string name(knob);
  if (name == "num_devices") knobs.num_devices = int(value);
  else if (name == "capacity_bytes") knobs.capacity_bytes = int64_t(value);
  else if (name == "poison") knobs.poison = value != 0;
  else if (name == "sync_mode") knobs.sync_mode = int(value);
  else if (name == "refuse_registration") knobs.refuse_registration = int(value);
  else if (name == "h2d_bytes_per_s") knobs.h2d_bytes_per_s = value;
  else if (name == "d2h_bytes_per_s") knobs.d2h_bytes_per_s = value;
  else if (name == "compute_bytes_per_s") knobs.compute_bytes_per_s = value;
  else if (name == "delay_s") knobs.delay_s = value;
  else if (name == "h2d_stall_s") knobs.h2d_gate.close(value);
  else if (name == "d2h_stall_s") knobs.d2h_gate.close(value);
  else if (name == "fail_at") knobs.fail_at = value < 0 ? -1 : knobs.num_operations + int64_t(value);
  else std::abort();
}

int64_t sim_num_syncs() { return knobs.num_syncs; }
int64_t sim_num_operations() { return knobs.num_operations; }

void sim_statistics(int device, int64_t* values) {
  auto found = Machine::get().memory(device).statistics();
  values[0] = found.allocated, values[1] = found.peak_allocated;
  values[2] = found.reserved, values[3] = found.peak_reserved, values[4] = found.num_allocations;
}
void sim_reset_peaks(int device) { Machine::get().memory(device).reset_peaks(); }
void sim_empty_cache(int device) { Machine::get().memory(device).empty_cache(); }
int64_t sim_free_bytes(int device) { return Machine::get().memory(device).free_bytes(); }

int sim_register_host(const void* address, size_t nbytes) {
  bool is_refused = knobs.refuse_registration > 0;
  if (is_refused) --knobs.refuse_registration;
  return Machine::get().register_host(address, nbytes, is_refused) ? 0 : 1;
}
int sim_unregister_host(const void* address) { return Machine::get().unregister_host(address) ? 0 : 1; }

void sim_sleep(int device, int stream, double seconds) {
  Machine::get().stream(device, stream).push([seconds] { simulated::sleep_s(seconds); });
}
}
