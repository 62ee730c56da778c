// torch's cache of what autocast has cast, which has no name in Python: at::autocast::cached_cast, found in the loaded
// library by its name in C++.
#include <cstdint>
#include <new>

#include "cpython.h"
#include "torch_symbols.h"

using namespace aot;

namespace {

// at::Tensor, as it is passed and returned: the address of a TensorImpl, in a class with a destructor. Instances of it
// are LibTorch's; none is destroyed here.
struct Tensor {
  void *impl;
  Tensor(const Tensor &) = delete;
  ~Tensor() {}
};

struct Functions {
  Tensor (*cached_cast)(int8_t dtype, const Tensor &, int8_t device_type);
  int (*new_tensor)(void **handle);  // undefined; the handle is the address of an at::Tensor
  int (*delete_tensor)(void *handle);
  void *(*wrap)(const void *handle);

  bool find() {
    void *torch = libtorch_cpu();
    return aot::find(torch, kCachedCast, &cached_cast) &&
           aot::find(torch, "aoti_torch_new_uninitialized_tensor", &new_tensor) &&
           aot::find(torch, "aoti_torch_delete_tensor_object", &delete_tensor) && find_wrap(&wrap);
  }
};

// The error is left to Python, which casts by itself.
bool cast_into(const Functions &torch, void *handle, void *impl, int8_t dtype, int8_t device_type) {
  void *thread = PyEval_SaveThread();  // torch's cache has a lock, and a cast under a mode of Python needs the GIL
  bool done = true;
  try {
    new (handle) Tensor(torch.cached_cast(dtype, *reinterpret_cast<Tensor *>(&impl), device_type));
  } catch (...) {
    done = false;
  }
  PyEval_RestoreThread(thread);
  return done;
}

}  // namespace

// A tensor cast as torch.autocast casts it, from the address of its TensorImpl and torch's numbers of the dtype and the
// type of device. None: this torch has no such function, or it failed.
AOT_API void *aot_torch_cached_cast(void *, void *const *objects, intptr_t) {
  static Functions torch;
  static const bool found = torch.find();
  void *handle = nullptr;
  if (!found || torch.new_tensor(&handle)) return finish(kOk);
  Ref tensor;
  if (cast_into(torch, handle, PyLong_AsVoidPtr(objects[0]), static_cast<int8_t>(PyLong_AsLong(objects[1])),
                static_cast<int8_t>(PyLong_AsLong(objects[2]))))
    tensor = torch.wrap(handle);
  torch.delete_tensor(handle);
  if (tensor) return tensor.release();
  PyErr_Clear();
  return finish(kOk);
}
