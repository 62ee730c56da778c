// The gate: whether a call from torch is plain, so that nothing but its arguments decides what it means.
//
// Everything else that may decide is checked here, and nowhere else:
//
//   where                          what it tells
//   the thread's dispatch keys     torch.func levels, torch_dispatch modes (fake tensors, functionalisation, make_fx,
//                                  export), tracing, autocast, inference mode, guards that include or exclude a key
//   the tensor's dispatch keys     zero tensors, negated and conjugated views, functional, batched, sparse, quantised,
//                                  nested, meta, mkldnn and other devices' tensors, wrapper subclasses
//   the tensor's type              subclasses with a __torch_function__
//   torch_function modes, record functions (the profiler), the level of forward AD
//   the storage                    one without memory (Arguments::read_dlpack)
//
// Dispatch keys are read from memory. The thread's are one exported variable of libc10, two words which are zero in a
// plain thread. A tensor's are one word of its TensorImpl; frontends/torch/gate.py finds the offset of that word on
// tensors whose keys it knows, and opens no gate where it does not find it. One word replaces about ten questions asked
// in Python, at 40 ns each.
#pragma once
#include <cstdint>

#include "cpython.h"
#include "torch_symbols.h"

namespace aot {

// c10::impl::PODLocalDispatchKeySet: the difference from a plain thread's keys.
struct LocalKeys {
  uint64_t included, excluded;
};

// frontends/torch/gate.py fills this struct.
struct GateFacts {
  uint64_t tensor_keys[4];  // plain tensors: of the CPU outside and inside of inference mode, then of CUDA likewise
  uint64_t autocast_keys;   // that autocast removes from the thread's excluded keys
  LocalKeys inference;      // in inference mode
  int64_t impl_offset;      // of the TensorImpl's address within a Python Tensor
  int64_t key_offset;       // of the keys within the TensorImpl
  void *forward_ad;         // torch.autograd.forward_ad.__dict__
  void *level, *no_level;   // its "_current_level", and the value of that outside of all levels
};

class Gate {
 public:
  // False: this torch does not export one of these symbols.
  bool open(const GateFacts &facts) {
    facts_ = facts;
    for (uint64_t keys : facts.tensor_keys) plain_keys_ |= keys;
    void *torch = libtorch_cpu();
    return find(torch, "aoti_torch_grad_mode_is_enabled", &grad_mode_) &&
           find(torch, kFunctionModeEnabled, &function_mode_) && find(torch, kHasCallbacks, &callbacks_) &&
           local_keys();
  }

  bool records_gradients() const { return grad_mode_(); }
  bool records_calls() const { return callbacks_(); }

  // Everything about the thread but record functions. `autocast`: whether it may be on.
  bool plain_thread(bool autocast) const {
    if (!callbacks_) return false;  // never opened
    LocalKeys keys = *local_keys();
    if (keys.included || keys.excluded) {
      if (keys.included == facts_.inference.included) {
        keys.included = 0, keys.excluded ^= facts_.inference.excluded;
      }
      // To exclude a key that no plain tensor has changes nothing: torch 2.11 excludes Named in CUDA's backward.
      keys.excluded &= plain_keys_ & ~(autocast ? facts_.autocast_keys : 0);
      if (keys.included || keys.excluded) return false;
    }
    return !function_mode_() && PyDict_GetItemWithError(facts_.forward_ad, facts_.level) == facts_.no_level;
  }

  // `tensor`: a Python Tensor or Parameter, no subclass.
  bool plain_tensor(void *tensor) const {
    const uint64_t keys = keys_of(tensor);
    for (uint64_t plain : facts_.tensor_keys)
      if (keys == plain) return true;
    return false;
  }

  // Whether a plain tensor was made in inference mode.
  bool made_in_inference(void *tensor) const {
    const uint64_t keys = keys_of(tensor);
    return keys == facts_.tensor_keys[1] || keys == facts_.tensor_keys[3];
  }

 private:
  uint64_t keys_of(void *tensor) const {
    const char *impl = *reinterpret_cast<char **>(static_cast<char *>(tensor) + facts_.impl_offset);
    return *reinterpret_cast<const uint64_t *>(impl + facts_.key_offset);
  }

  // The calling thread's; null: this torch does not export them.
  static const LocalKeys *local_keys() {
    static thread_local const LocalKeys *keys;
    if (!keys) find(loaded("libc10.so"), kLocalDispatchKeys, &keys);
    return keys;
  }

  GateFacts facts_ = {};
  uint64_t plain_keys_ = 0;  // of any plain tensor
  bool (*grad_mode_)() = nullptr, (*function_mode_)() = nullptr, (*callbacks_)() = nullptr;
};
inline Gate gate;

}  // namespace aot
