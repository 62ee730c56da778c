// The call path: an operator bound to its attributes, as a METH_FASTCALL builtin of Python.
//
// aotops/call.py has CPython make builtins of aot_call_tensors and aot_call_addresses (PyCFunction_NewEx). CPython is
// reached through weak symbols only, so that the library needs no Python.h, serves every version of it, and loads
// without it. Tensors are read in C: torch's through its DLPack exchange table (torch >= 2.10), NumPy's from the array
// struct, whose layout is public. All arguments of a call live on the C stack: shared argument arrays would be a data
// race.
#include <atomic>
#include <memory>
#include <string>

#include "../aot.h"
#include "bind.h"
#include "device.h"

extern "C" const char *aot_last_error();

#define WEAK extern "C" __attribute__((weak))
WEAK void PyErr_SetString(void *exception, const char *text);
WEAK void *PyErr_Occurred();
WEAK void *PyEval_SaveThread();
WEAK void PyEval_RestoreThread(void *state);
WEAK void Py_IncRef(void *object);
WEAK void Py_DecRef(void *object);
WEAK void *PyObject_Vectorcall(void *callable, void *const *args, size_t n, void *names);
WEAK void *PyObject_CallMethod(void *object, const char *name, const char *format, ...);
WEAK int PyObject_IsTrue(void *object);
WEAK int PyObject_SetAttr(void *object, void *name, void *value);
WEAK void *PyUnicode_InternFromString(const char *text);
WEAK void *PyTuple_New(intptr_t n);
WEAK int PyTuple_SetItem(void *tuple, intptr_t i, void *value);
WEAK void *PyLong_AsVoidPtr(void *object);
WEAK long PyLong_AsLong(void *object);

namespace {

using namespace aot;

constexpr int kMaxSlots = 16, kMaxOptional = 8;
enum Device { kCpu, kCuda };

// -------------------------------------------------------------------------------------- what Python tells once
// (call.py)

struct Interpreter {
  void *none;
  void *errors[6];      // by Status; [0] is not used
  int64_t type_offset;  // of PyObject.ob_type
  int64_t head_size;    // sizeof(PyObject)
};

// DLPack 1.3, DLPackExchangeAPI; https://github.com/dmlc/dlpack
struct DLTensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLExchange {
  uint32_t major, minor;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*read)(void *object, DLTensor *out);
  int (*current_stream)(int device_type, int32_t device_id, void **stream);
};
struct Torch {
  const DLExchange *exchange;
  void *types[2];  // Tensor and Parameter: exactly these, a subclass may mean anything
};

// PyArrayObject after its head, and the dtypes by identity: a byte-swapped or otherwise special dtype is another
// object.
struct NumpyArray {
  char *data;
  int ndim;
  int64_t *shape, *strides;
  void *base, *dtype;
  int flags;
};
struct Numpy {
  void *type;
  int n;
  void *dtypes[8];
  const char *names[8];
};

Interpreter python;
Torch torch;
Numpy numpy;

// ------------------------------------------------------------------------------------------------------- bound calls

// An operator with its attributes. For each set of optional slots that is given, `extras` has what Init made.
struct Call {
  std::string op, attrs;
  std::string slots[kMaxSlots];
  int optional_bit[kMaxSlots];  // -1: required
  int n_in, n_slots;
  bool has_optional;
  Entry *entry[2];  // by Device; null where the library has none
  Init *init[2];
  std::atomic<void *> extras[2][1 << kMaxOptional] = {};

  ~Call() {
    for (auto &device : extras)
      for (auto &extra : device)
        if (extra) extra_delete(extra);
  }

  // `given`: bit i for slot i
  Status extra(Device device, unsigned given, void **result) {
    AOT_TRY(check_entry(device));
    unsigned variant = 0;
    for (int i = 0; has_optional && i < n_slots; ++i)
      if (optional_bit[i] >= 0 && given >> i & 1) variant |= 1u << optional_bit[i];
    std::atomic<void *> &cached = extras[device][variant];
    if ((*result = cached.load(std::memory_order_acquire))) return kOk;
    AOT_TRY(new_extra(device, given, result));
    void *expected = nullptr;
    if (!cached.compare_exchange_strong(expected, *result)) extra_delete(*result), *result = expected;
    return kOk;
  }

  Status check_entry(Device device) const {
    if (entry[device]) return kOk;
    return fail(kNotImplemented, "%s: this library was built without CUDA: build it where nvcc is, with `make lib`",
                op.c_str());
  }

  Status new_extra(Device device, unsigned given, void **result) const {
    std::string text =
        attrs + "\ninputs=" + std::to_string(given & ((1u << n_in) - 1)) + "\noutputs=" + std::to_string(given >> n_in);
    return bind(init[device], text.c_str(), result);
  }
};

// A call that allocates its one output, which is like an input, by the framework's own empty_like.
struct Function {
  Call *call;
  void *empty_like;
  int model;             // the input that the output is like
  int n_saved;           // for the backward:
  int saved[kMaxSlots];  // slots, of those that are inputs or the output, else None
  void *keep_residuals;  // a Python function that serves big CUDA tensors in the place of this one; null: none does
  int64_t keep_residuals_from;  // how many elements are big
};

// A call with fixed shapes and dtypes, so that addresses are all it is told.
struct Plan {
  Device device;
  Entry *entry;
  void *extra = nullptr;
  int n;
  int ndims[kMaxSlots];
  int64_t *shapes[kMaxSlots];
  const char *dtypes[kMaxSlots];
  std::unique_ptr<int64_t[]> dims;

  ~Plan() {
    if (extra) extra_delete(extra);
  }
};

// ---------------------------------------------------------------------------------------------------------- arguments

// What a builtin of ours is bound to: PyCapsule.pointer, without the check of the name.
template <typename T>
T *bound_to(void *capsule) {
  return *reinterpret_cast<T **>(static_cast<char *>(capsule) + python.head_size);
}

const char *type_name(void *object) {
  char *type = *reinterpret_cast<char **>(static_cast<char *>(object) + python.type_offset);
  return *reinterpret_cast<const char **>(type + python.head_size + sizeof(intptr_t));  // after PyVarObject.ob_size
}

const char *dlpack_dtype(const DLTensor &t) {
  if (t.code == 2 && t.bits == 32) return kFloat32;
  constexpr const char *ints[] = {"int8", "int16", "int32", "int64"},
                       *uints[] = {"uint8", "uint16", "uint32", "uint64"};
  int size = t.bits == 8 ? 0 : t.bits == 16 ? 1 : t.bits == 32 ? 2 : 3;
  switch (t.code) {
    case 0:
      return ints[size];
    case 1:
      return uints[size];
    case 2:
      return t.bits == 64 ? kFloat64 : kFloat16;
    case 4:
      return kBFloat16;
    case 5:
      return t.bits == 64 ? "complex64" : "complex128";
    case 6:
      return "bool";
    default:
      return "of another kind";
  }
}

struct Arguments {
  void *params[kMaxSlots];
  int ndims[kMaxSlots];
  int64_t *shapes[kMaxSlots];
  const char *dtypes[kMaxSlots];
  int n = 0;
  unsigned given = 0;
  int64_t elements = 0;  // of all tensors
  Device device = kCpu;
  int device_id = 0;
  void *stream = nullptr;

  Status read(const Call &call, void *const *objects, intptr_t count) {
    if (count != call.n_slots)
      return fail(kConventionMisused, "%s: %d arguments given, expected %d", call.op.c_str(), static_cast<int>(count),
                  call.n_slots);
    for (int i = 0; i < count; ++i) {
      if (objects[i] == python.none) {
        if (call.optional_bit[i] < 0)
          return fail(kUnsupportedDtype, "%s: %s is None, expected a tensor", call.op.c_str(), call.slots[i].c_str());
        continue;
      }
      AOT_TRY(read(call, i, objects[i]));
      given |= 1u << i;
      ++n;
    }
    return kOk;
  }

  // Work on so few elements is done sooner than another thread could use the interpreter's lock.
  bool worth_releasing() const { return device == kCuda || elements > 16384; }

  Status read(const Call &call, int slot, void *object) {
    void *type = *reinterpret_cast<void **>(static_cast<char *>(object) + python.type_offset);
    if (type == torch.types[0] || type == torch.types[1]) return read_torch(call, slot, object);
    if (type == numpy.type) return read_numpy(call, slot, object);
    return fail(kUnsupportedDtype, "%s: %s is a %s, expected a tensor", call.op.c_str(), call.slots[slot].c_str(),
                type_name(object));
  }

  Status read_torch(const Call &call, int slot, void *object) {
    DLTensor t;
    if (torch.exchange->read(object, &t)) return kConventionMisused;  // torch has set Python's error
    params[n] = static_cast<char *>(t.data) + t.byte_offset;
    ndims[n] = t.ndim, shapes[n] = t.shape, dtypes[n] = dlpack_dtype(t);
    int64_t stride = 1, size = 1;
    bool contiguous = true;
    for (int k = t.ndim - 1; k >= 0; --k) {
      if (t.shape[k] != 1 && t.strides && t.strides[k] != stride) contiguous = false;
      stride *= t.shape[k], size *= t.shape[k];
    }
    elements += size;
    if (!contiguous && size) return not_contiguous(call, slot);
    if (size == 1) AOT_TRY(check_not_negated(call, slot, object));
    return on_device(call, slot, t.device_type, t.device_id);
  }

  // The imaginary part of a conjugated tensor has its values negated by whoever reads them, which the exchange table
  // does not tell. With more elements than one such a view is not contiguous, and so refused already.
  Status check_not_negated(const Call &call, int slot, void *object) {
    void *is_neg = PyObject_CallMethod(object, "is_neg", nullptr);
    if (!is_neg) return kConventionMisused;
    bool negated = PyObject_IsTrue(is_neg) == 1;
    Py_DecRef(is_neg);
    if (!negated) return kOk;
    return fail(kInvalidArgument, "%s: %s is a negated view", call.op.c_str(), call.slots[slot].c_str());
  }

  Status read_numpy(const Call &call, int slot, void *object) {
    auto *a = reinterpret_cast<NumpyArray *>(static_cast<char *>(object) + python.head_size);
    int64_t size = 1;
    for (int k = 0; k < a->ndim; ++k) size *= a->shape[k];
    elements += size;
    params[n] = a->data, ndims[n] = a->ndim, shapes[n] = a->shape, dtypes[n] = "of another kind";
    for (int i = 0; i < numpy.n; ++i)
      if (a->dtype == numpy.dtypes[i]) dtypes[n] = numpy.names[i];
    constexpr int kCContiguous = 1, kAligned = 0x100;
    if (!(a->flags & kCContiguous) || !(a->flags & kAligned)) return not_contiguous(call, slot);
    return on_device(call, slot, 1, 0);
  }

  Status not_contiguous(const Call &call, int slot) {
    return fail(kInvalidArgument, "%s: %s is not contiguous", call.op.c_str(), call.slots[slot].c_str());
  }

  Status on_device(const Call &call, int slot, int type, int id) {
    constexpr int kDLCpu = 1, kDLCuda = 2, kDLCudaHost = 3;
    bool is_cpu = type == kDLCpu || type == kDLCudaHost;
    if (!is_cpu && type != kDLCuda)
      return fail(kNotImplemented, "%s: %s is on a device of DLPack's type %d, expected cpu or cuda", call.op.c_str(),
                  call.slots[slot].c_str(), type);
    if (n == 0) {
      device = is_cpu ? kCpu : kCuda, device_id = is_cpu ? 0 : id;
      if (!is_cpu && torch.exchange->current_stream(type, id, &stream)) return kConventionMisused;
      return kOk;
    }
    if ((device == kCpu) == is_cpu && (is_cpu || id == device_id)) return kOk;
    char here[24] = "cpu", first[24] = "cpu";
    if (!is_cpu) std::snprintf(here, sizeof here, "cuda:%d", id);
    if (device == kCuda) std::snprintf(first, sizeof first, "cuda:%d", device_id);
    return fail(kInvalidArgument, "%s: %s is on %s, expected %s, the device of %s", call.op.c_str(),
                call.slots[slot].c_str(), here, first, call.slots[0].c_str());
  }
};

int launch(Device device, int device_id, Entry *entry, int n, void **params, int *ndims, int64_t **shapes,
           const char **dtypes, void *stream, void *extra) {
  if (device == kCpu) return entry(n, params, ndims, shapes, dtypes, nullptr, extra);
  DeviceGuard guard;
  AOT_TRY(guard.enter(device_id));
  return entry(n, params, ndims, shapes, dtypes, stream, extra);
}

// None, or the exception of the status with the text of aot_last_error().
void *finish(int status) {
  if (!status) return Py_IncRef(python.none), python.none;
  if (!PyErr_Occurred()) PyErr_SetString(python.errors[status < 0 || status > 5 ? 5 : status], aot_last_error());
  return nullptr;
}

int call_tensors(Call &call, const Arguments &a) {
  void *extra;
  AOT_TRY(call.extra(a.device, a.given, &extra));
  void *thread = a.worth_releasing() ? PyEval_SaveThread() : nullptr;
  auto &m = const_cast<Arguments &>(a);  // the convention's arrays are not const
  int status =
      launch(a.device, a.device_id, call.entry[a.device], a.n, m.params, m.ndims, m.shapes, m.dtypes, a.stream, extra);
  if (thread) PyEval_RestoreThread(thread);
  return status;
}

// What save_for_backward does.
bool save(const Function &f, void *context, void *const *objects) {
  static void *to_save = PyUnicode_InternFromString("to_save");
  void *saved = PyTuple_New(f.n_saved);
  if (!saved) return false;
  for (int i = 0; i < f.n_saved; ++i) {
    Py_IncRef(objects[f.saved[i]]);
    PyTuple_SetItem(saved, i, objects[f.saved[i]]);
  }
  bool done = !PyObject_SetAttr(context, to_save, saved);
  Py_DecRef(saved);
  return done;
}

// `context`: where to save for the backward, followed by the inputs; null: nothing is saved.
void *run_function(const Function &f, void *const *context, void *const *inputs, intptr_t count) {
  Call &call = *f.call;
  if (count != call.n_in)
    return finish(fail(kConventionMisused, "%s: %d arguments given, expected %d", call.op.c_str(),
                       static_cast<int>(count), call.n_in));
  void *objects[kMaxSlots];
  for (int i = 0; i < call.n_slots; ++i) objects[i] = i < count ? inputs[i] : python.none;
  void *y = PyObject_Vectorcall(f.empty_like, &inputs[f.model], 1, nullptr);
  if (!y) return nullptr;
  objects[count] = y;
  Arguments a;
  int status = a.read(call, objects, call.n_slots);
  if (!status && context && f.keep_residuals && a.device == kCuda && a.elements > f.keep_residuals_from) {
    Py_DecRef(y);
    return PyObject_Vectorcall(f.keep_residuals, context, count + 1, nullptr);
  }
  if (!status) status = call_tensors(call, a);
  if (!status && (!context || !f.n_saved || save(f, *context, objects))) return y;
  Py_DecRef(y);
  return finish(status ? status : kConventionMisused);
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- setting up

AOT_API void aot_python_setup(const Interpreter *facts) { python = *facts; }
AOT_API void aot_python_torch(const Torch *facts) { torch = *facts; }
AOT_API void aot_python_numpy(const Numpy *facts) { numpy = *facts; }

AOT_API void *aot_extra_new(const char *attrs) { return extra_new(attrs); }
AOT_API void aot_extra_delete(void *extra) { extra_delete(extra); }

// `slots`: n_slots names; `optional`: 1 where a slot may be None. Null where there are too many of either.
AOT_API void *aot_call_new(const char *op, const char *attrs, int n_in, int n_slots, const char *const *slots,
                           const int *optional, void *const *entries, void *const *inits) {
  auto call = std::make_unique<Call>();
  call->op = op, call->attrs = attrs, call->n_in = n_in, call->n_slots = n_slots;
  if (n_slots > kMaxSlots) return nullptr;
  int bits = 0;
  for (int i = 0; i < n_slots; ++i) call->slots[i] = slots[i], call->optional_bit[i] = optional[i] ? bits++ : -1;
  if (bits > kMaxOptional) return nullptr;
  call->has_optional = bits > 0;
  for (int d : {kCpu, kCuda}) {
    call->entry[d] = reinterpret_cast<Entry *>(entries[d]);
    call->init[d] = reinterpret_cast<Init *>(inits[d]);
  }
  return call.release();
}

AOT_API void *aot_function_new(void *call, void *empty_like, int model, int n_saved, const int *saved,
                               void *keep_residuals, int64_t keep_residuals_from) {
  auto *f = new (std::nothrow)
      Function{static_cast<Call *>(call), empty_like, model, n_saved, {}, keep_residuals, keep_residuals_from};
  for (int i = 0; f && i < n_saved; ++i) f->saved[i] = saved[i];
  return f;
}

// Null, and its status, where there is no such entry or Init refuses the attributes.
AOT_API void *aot_plan_new(const void *call, int device, unsigned given, int n, const int *ndims, const int64_t *dims,
                           const char *const *dtypes, int *status) {
  auto *c = static_cast<const Call *>(call);
  auto plan = std::make_unique<Plan>();
  plan->device = static_cast<Device>(device), plan->entry = c->entry[device], plan->n = n;
  *status = c->check_entry(plan->device);
  if (!*status) *status = c->new_extra(plan->device, given, &plan->extra);
  if (*status) return nullptr;
  int64_t total = 0, at = 0;
  for (int i = 0; i < n; ++i) total += ndims[i];
  plan->dims.reset(new int64_t[total + 1]);
  std::memcpy(plan->dims.get(), dims, total * sizeof(int64_t));
  for (int i = 0; i < n; ++i) {
    plan->ndims[i] = ndims[i], plan->shapes[i] = plan->dims.get() + at, at += ndims[i];
    plan->dtypes[i] = dtypes[i];  // call.py keeps these strings
  }
  return plan.release();
}

AOT_API void aot_plan_delete(void *plan) { delete static_cast<Plan *>(plan); }
AOT_API void aot_plan_capsule_delete(void *capsule) { aot_plan_delete(bound_to<Plan>(capsule)); }

AOT_API int aot_plan_run(void *plan, int device_id, void *stream, void **params) {
  auto *p = static_cast<Plan *>(plan);
  return launch(p->device, device_id, p->entry, p->n, params, p->ndims, p->shapes, p->dtypes, stream, p->extra);
}

// ------------------------------------------------------------------------------------------------------- the builtins

// One object for each slot: a tensor, or None.
AOT_API void *aot_call_tensors(void *capsule, void *const *objects, intptr_t count) {
  auto *call = bound_to<Call>(capsule);
  Arguments a;
  int status = a.read(*call, objects, count);
  return finish(status ? status : call_tensors(*call, a));
}

// One object for each input; returns the output.
AOT_API void *aot_function_run(void *capsule, void *const *inputs, intptr_t count) {
  auto *f = bound_to<Function>(capsule);
  return run_function(*f, nullptr, inputs, count);
}

// The forward of a torch.autograd.Function: its context, then one object for each input.
AOT_API void *aot_function_forward(void *capsule, void *const *objects, intptr_t count) {
  auto *f = bound_to<Function>(capsule);
  return run_function(*f, objects, objects + 1, count - 1);
}

// The device's number, the stream, then the address of each tensor of the plan; all are ints.
AOT_API void *aot_call_addresses(void *capsule, void *const *objects, intptr_t count) {
  auto *plan = bound_to<Plan>(capsule);
  if (count != plan->n + 2)
    return finish(fail(kConventionMisused, "%d arguments given, expected %d", static_cast<int>(count), plan->n + 2));
  void *params[kMaxSlots];
  int device_id = static_cast<int>(PyLong_AsLong(objects[0]));
  void *stream = PyLong_AsVoidPtr(objects[1]);
  for (int i = 0; i < plan->n; ++i) params[i] = PyLong_AsVoidPtr(objects[i + 2]);
  if (PyErr_Occurred()) return nullptr;
  void *thread = PyEval_SaveThread();
  int status = aot_plan_run(plan, device_id, stream, params);
  PyEval_RestoreThread(thread);
  return finish(status);
}
