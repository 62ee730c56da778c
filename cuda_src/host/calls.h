// An operator bound to its attributes, and how its entry is run on arguments that have been read.
#pragma once
#include "device.h"
#include "tensors.h"

namespace aot {

constexpr int kMaxOptional = 14;

struct Call {
  std::string op, attrs;
  CallSlot slots[kMaxSlots];
  int n_in, n_slots = 0;
  int n_optional = 0;
  EntryFunctions functions[2];  // by Device
  using Extras = std::atomic<void *>;
  // The results of Init, by Device, from its first call on, and by the set of optional slots that are given.
  std::atomic<Extras *> extras[2] = {};

  ~Call() {
    for (Extras *device : extras) {
      for (int i = 0; device && i < 1 << n_optional; ++i)
        if (device[i]) extra_delete(device[i]);
      delete[] device;
    }
  }

  // False: there are too many slots, or too many that may be absent.
  bool add_slot(const char *name, bool optional, bool accepts_scalar) {
    if (n_slots == kMaxSlots || (optional && n_optional == kMaxOptional)) return false;
    slots[n_slots] = {op, name, optional ? n_optional++ : -1, n_slots >= n_in, accepts_scalar};
    return ++n_slots;
  }

  // `given`: bit i for slot i.
  Status extra(Device device, uint64_t given, void **result) {
    *result = nullptr;
    AOT_TRY(check_entry(device));
    unsigned variant = 0;
    for (int i = 0; n_optional && i < n_slots; ++i)
      if (slots[i].optional_bit >= 0 && given >> i & 1) variant |= 1u << slots[i].optional_bit;
    Extras *const extras = extras_of(device);
    if (!extras) return fail(kOutOfMemory, "%s: out of memory", op.c_str());
    Extras &cached = extras[variant];
    if ((*result = cached.load(std::memory_order_acquire))) return kOk;
    AOT_TRY(new_extra(device, given, result));
    void *expected = nullptr;
    if (!cached.compare_exchange_strong(expected, *result)) extra_delete(*result), *result = expected;
    return kOk;
  }

  // Null without memory.
  Extras *extras_of(Device device) {
    Extras *found = extras[device].load(std::memory_order_acquire);
    if (found) return found;
    auto *made = new (std::nothrow) Extras[size_t{1} << n_optional]();
    if (!made || extras[device].compare_exchange_strong(found, made)) return made;
    return delete[] made, found;
  }

  Status wrong_count(intptr_t count, int expected) const {
    return fail(kConventionMisused, "%s: %d arguments given, expected %d", op.c_str(), static_cast<int>(count),
                expected);
  }

  Status check_entry(Device device) const {
    if (functions[device].entry) return kOk;
    if (!attrs.rfind("hosted=", 0))  // hosted.cpp
      return fail(kNotImplemented, "%s: it has no function for %s", op.c_str(),
                  device == kCpu ? "the CPU" : "CUDA, or libaotops.so was built without CUDA");
    if (functions[kCpu].last_error != aot_last_error && device == kCpu)
      return fail(kNotImplemented, "%s: its library has no entry for the CPU: give it a C++ source with aot_%s_cpu",
                  op.c_str(), op.c_str());
    if (functions[kCpu].last_error != aot_last_error)
      return fail(kNotImplemented,
                  "%s: its library has no entry for CUDA: if it has a .cu source, build the package where nvcc is",
                  op.c_str());
    return fail(kNotImplemented, "%s: this library was built without CUDA: build it where nvcc is, with `make lib`",
                op.c_str());
  }

  Status new_extra(Device device, uint64_t given, void **result) const {
    std::string text = attrs + "\ninputs=" + std::to_string(given & ((uint64_t{1} << n_in) - 1)) +
                       "\noutputs=" + std::to_string(given >> n_in);
    return functions[device].bind(text.c_str(), result);
  }
};

inline Status launch(const EntryFunctions &f, Device device, int device_id, EntryArguments<kMaxSlots> &a, void **params,
                     void *stream, void *extra) {
  if (device == kCpu) return f.adopt(f.entry(a.n, params, a.ndims, a.shapes, a.dtypes, nullptr, extra));
  DeviceGuard guard;
  AOT_TRY(guard.enter(device_id));
  return f.adopt(f.entry(a.n, params, a.ndims, a.shapes, a.dtypes, stream, extra));
}

inline int run_entry(Call &call, Arguments &a) {
  void *extra;
  AOT_TRY(call.extra(a.device, a.given, &extra));
  void *thread = a.worth_releasing() ? PyEval_SaveThread() : nullptr;
  const int status = launch(call.functions[a.device], a.device, a.device_id, a, a.params, a.stream, extra);
  if (thread) PyEval_RestoreThread(thread);
  return status;
}

}  // namespace aot
