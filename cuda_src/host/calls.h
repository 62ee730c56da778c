// An operator bound to its attributes, and how its entry is run on arguments that have been read.
#pragma once
#include <atomic>
#include <memory>

#include "bound_entry.h"
#include "device.h"
#include "tensors.h"

namespace aot {

constexpr int kMaxOptional = 8;

struct Call {
  std::string op, attrs;
  CallSlot slots[kMaxSlots];
  int n_in, n_slots;
  bool has_optional;
  Entry *entry[2];  // by Device; null: the library has none
  Init *init[2];
  LastError *last_error;  // of their library; null: it has none
  // What Init returned, by Device and by the set of optional slots that are given.
  std::atomic<void *> extras[2][1 << kMaxOptional] = {};

  ~Call() {
    for (auto &device : extras)
      for (auto &extra : device)
        if (extra) extra_delete(extra);
  }

  // `given`: bit i for slot i.
  Status extra(Device device, unsigned given, void **result) {
    AOT_TRY(check_entry(device));
    unsigned variant = 0;
    for (int i = 0; has_optional && i < n_slots; ++i)
      if (slots[i].optional_bit >= 0 && given >> i & 1) variant |= 1u << slots[i].optional_bit;
    std::atomic<void *> &cached = extras[device][variant];
    if ((*result = cached.load(std::memory_order_acquire))) return kOk;
    AOT_TRY(new_extra(device, given, result));
    void *expected = nullptr;
    if (!cached.compare_exchange_strong(expected, *result)) extra_delete(*result), *result = expected;
    return kOk;
  }

  Status wrong_count(intptr_t count, int expected) const {
    return fail(kConventionMisused, "%s: %d arguments given, expected %d", op.c_str(), static_cast<int>(count),
                expected);
  }

  Status check_entry(Device device) const {
    if (entry[device]) return kOk;
    if (!attrs.rfind("hosted=", 0))  // hosted.cpp
      return fail(kNotImplemented, "%s: it has no function for %s", op.c_str(),
                  device == kCpu ? "the CPU" : "CUDA, or libaotops.so was built without CUDA");
    if (last_error != aot_last_error)
      return fail(kNotImplemented,
                  "%s: its library has no entry for %s: if it has a .cu source, build the package where nvcc is",
                  op.c_str(), device == kCpu ? "the CPU" : "CUDA");
    return fail(kNotImplemented, "%s: this library was built without CUDA: build it where nvcc is, with `make lib`",
                op.c_str());
  }

  Status new_extra(Device device, unsigned given, void **result) const {
    std::string text =
        attrs + "\ninputs=" + std::to_string(given & ((1u << n_in) - 1)) + "\noutputs=" + std::to_string(given >> n_in);
    return bind(init[device], text.c_str(), last_error, result);
  }
};

inline int launch(Device device, int device_id, Entry *entry, LastError *last_error, int n, void **params, int *ndims,
                  int64_t **shapes, const char **dtypes, void *stream, void *extra) {
  if (device == kCpu) return adopt(entry(n, params, ndims, shapes, dtypes, nullptr, extra), last_error);
  DeviceGuard guard;
  AOT_TRY(guard.enter(device_id));
  return adopt(entry(n, params, ndims, shapes, dtypes, stream, extra), last_error);
}

inline int run_entry(Call &call, const Arguments &a) {
  void *extra;
  AOT_TRY(call.extra(a.device, a.given, &extra));
  void *thread = a.worth_releasing() ? PyEval_SaveThread() : nullptr;
  auto &m = const_cast<Arguments &>(a);  // the convention's arrays are not const
  int status = launch(a.device, a.device_id, call.entry[a.device], call.last_error, a.n, m.params, m.ndims, m.shapes,
                      m.dtypes, a.stream, extra);
  if (thread) PyEval_RestoreThread(thread);
  return status;
}

}  // namespace aot
