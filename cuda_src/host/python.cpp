// The call path: an operator bound to its attributes, as a METH_FASTCALL builtin of Python.
//
// aotops/call.py has CPython make builtins of the functions at the end (PyCFunction_NewEx). CPython is reached through
// weak symbols only, so that the library needs no Python.h, serves every version of it, and loads without it. Tensors
// are read in C: torch's through its DLPack exchange table (torch >= 2.10), NumPy's from the array struct, whose layout
// is public. All arguments of a call live on the C stack: shared argument arrays would be a data race.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "../aot.h"
#include "bind.h"
#include "device.h"
#include "gate.h"

extern "C" const char *aot_last_error();

#define WEAK extern "C" __attribute__((weak))
WEAK void PyErr_SetString(void *exception, const char *text);
WEAK void *PyErr_Occurred();
WEAK void PyErr_Clear();
WEAK void *PyEval_SaveThread();
WEAK void PyEval_RestoreThread(void *state);
WEAK void Py_IncRef(void *object);
WEAK void Py_DecRef(void *object);
WEAK void *PyObject_VectorcallDict(void *callable, void *const *args, size_t n, void *keywords);
WEAK void *PyObject_VectorcallMethod(void *name, void *const *args, size_t n, void *names);
WEAK int PyObject_IsTrue(void *object);
WEAK void *PyObject_GetAttr(void *object, void *name);
WEAK int PyObject_SetAttr(void *object, void *name, void *value);
WEAK void *PyUnicode_InternFromString(const char *text);
WEAK void *PyTuple_New(intptr_t n);
WEAK intptr_t PyTuple_Size(void *tuple);
WEAK void *PyTuple_GetItem(void *tuple, intptr_t i);
WEAK int PyTuple_SetItem(void *tuple, intptr_t i, void *value);
WEAK void *PyBool_FromLong(long value);
WEAK void *PyBytes_FromStringAndSize(const char *bytes, intptr_t n);
WEAK void *PyDict_New();
WEAK intptr_t PyDict_Size(void *dict);
WEAK void PyDict_Clear(void *dict);
WEAK int PyDict_SetItem(void *dict, void *key, void *value);
WEAK int PyDict_DelItem(void *dict, void *key);
WEAK int PyDict_Next(void *dict, intptr_t *at, void **key, void **value);
WEAK void *PyCapsule_GetContext(void *capsule);
WEAK void *PyLong_AsVoidPtr(void *object);
WEAK long PyLong_AsLong(void *object);
// since 3.12
using Vectorcall = void *(void *callable, void *const *args, size_t n, void *names);
WEAK void PyFunction_SetVectorcall(void *function, Vectorcall *vectorcall);
WEAK Vectorcall *PyVectorcall_Function(void *callable);
WEAK void *PyInterpreterState_Get();
WEAK void *_PyInterpreterState_GetEvalFrameFunc(void *interpreter);
WEAK void *_PyEval_EvalFrameDefault(void *thread, void *frame, int throws);

namespace {

using namespace aot;

constexpr int kMaxSlots = 16, kMaxOptional = 8;
enum Device { kCpu, kCuda };

// ------------------------------------------------------------------------------------ what Python tells once (call.py)

struct Interpreter {
  void *none;
  void *errors[6];  // by Status; [0] is not used
  void *int_type, *float_type, *bool_type, *str_type, *tuple_type;
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
  void *types[2];    // Tensor and Parameter: exactly these, a subclass may mean anything
  void *size_type;   // torch.Size, a tuple of ints
  void *empty_like;  // a function of torch's
  GateFacts gate;
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
Gate gate;
Numpy numpy;

// ------------------------------------------------------------------------------------------------------- bound calls

// An operator with its attributes. For each set of optional slots that is given, `extras` has what Init made.
struct Call {
  std::string op, attrs;
  std::string slots[kMaxSlots];
  int optional_bit[kMaxSlots];  // -1: required
  int n_in, n_slots;
  bool has_optional;
  unsigned uniform;  // bit i for slot i: where all elements are the same one, the entry takes it alone
  Entry *entry[2];   // by Device; null where the library has none
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

  Status wrong_count(intptr_t count, int expected) const {
    return fail(kConventionMisused, "%s: %d arguments given, expected %d", op.c_str(), static_cast<int>(count),
                expected);
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

// The structs from here to Public are call.py's, which fills and keeps them.

// A call that allocates what the entry writes: each an `empty_like` of a model. The model is an input, or a tensor of
// the right shape and dtype that Python has made for inputs of these shapes and dtypes.
struct Function {
  Call *call;
  int model[kMaxSlots];    // by slot, for outputs: the input that it is like; -1: one of those that Python makes
  bool has_models;         // Python makes some
  unsigned always;         // bit i for slot i: outputs and workspaces that are not left out
  unsigned residuals;      // that are kept for the backward where the first input is big, and on a GPU
  unsigned scratch;        // workspaces: on the CPU, small ones are on the stack
  int64_t keep_from;       // how many elements of a GPU's are big; -1: any, and of a CPU's too
  int n_returned;          // the first outputs
  int n_saved;             // for the backward:
  int saved[kMaxSlots];    // slots,
  int instead[kMaxSlots];  // and the residual that is saved in the place of each where it is kept; -1: none
  void *make_models;       // of all inputs; a tuple with one for each output, None where an input serves
  void *models;            // what it made, a dict by what is to be known of the inputs
};

// The backward of a torch.autograd.Function.
struct Backward {
  Function *function;       // the operator's
  int n_grads, n_inputs;    // of the forward: outputs and inputs
  int source[kMaxSlots];    // by input slot: a number below n_grads is an incoming gradient, others are saved tensors
  int gradient[kMaxSlots];  // for each input of the forward the slot of its gradient; -1: it has none
  void *otherwise;          // the same in Python, for what is unusual
};

// A differentiable operator with its attributes.
struct Differentiable {
  Function *function;
  void *apply;        // the autograd.Function's
  uint64_t last_use;  // on the clock of its public function
};

// A public function of the torch frontend.
struct Public {
  int n_inputs, n_attrs, n_parameters;
  int place[2 * kMaxSlots];       // by parameter: its place among the inputs, and the attributes after them
  void *names[2 * kMaxSlots];     // interned
  void *defaults[2 * kMaxSlots];  // null: there is none
  int n_transposable;             // inputs that may lie transposed:
  int transposable[kMaxSlots];    // their places
  int transposes[kMaxSlots];      // the places of the attributes that say so, each a bool
  char kinds[2 * kMaxSlots];      // of attributes: the first letter of Op.attrs' types, "l" for a list of integers
  bool has_autocast;
  int most_bound;   // entries of `bound`
  uint64_t clock;   // calls
  void *bind;       // of the attributes: gives a capsule of the Differentiable
  void *bound;      // what it gave, a dict by attributes
  void *otherwise;  // the same in Python, for what is not plain, and what is refused
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

// A reference that is owned.
class Ref {
 public:
  Ref(void *object = nullptr) : object_(object) {}
  Ref(Ref &&other) noexcept : object_(other.release()) {}
  ~Ref() {
    if (object_) Py_DecRef(object_);
  }
  Ref &operator=(Ref &&other) noexcept { return std::swap(object_, other.object_), *this; }
  operator void *() const { return object_; }
  void *release() { return std::exchange(object_, nullptr); }

 private:
  void *object_;
};

// What a builtin of ours is bound to: PyCapsule.pointer, without the check of the name.
template <typename T>
T *bound_to(void *capsule) {
  return *reinterpret_cast<T **>(static_cast<char *>(capsule) + python.head_size);
}

void *type_of(void *object) { return *reinterpret_cast<void **>(static_cast<char *>(object) + python.type_offset); }

const char *type_name(void *object) {
  char *type = static_cast<char *>(type_of(object));
  return *reinterpret_cast<const char **>(type + python.head_size + sizeof(intptr_t));  // after PyVarObject.ob_size
}

bool is_torch(void *object) { return type_of(object) == torch.types[0] || type_of(object) == torch.types[1]; }

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

// How a tensor lies: its elements side by side, or all of them in one place.
struct Layout {
  int64_t size = 1;
  bool contiguous = true, uniform = true;

  explicit Layout(const DLTensor &t) {
    for (int k = t.ndim - 1; k >= 0; --k) {
      const int64_t stride = t.strides ? t.strides[k] : size;
      if (t.shape[k] != 1) contiguous = contiguous && stride == size, uniform = uniform && stride == 0;
      size *= t.shape[k];
    }
    contiguous = contiguous || size == 0;
  }
  // Whether the slot takes the one number that all elements are, in their place.
  bool as_number(const Call &call, int slot) const { return !contiguous && uniform && call.uniform >> slot & 1; }
};

struct Arguments {
  void *params[kMaxSlots];
  int ndims[kMaxSlots];
  int64_t *shapes[kMaxSlots];
  const char *dtypes[kMaxSlots];
  int n = 0;
  unsigned given = 0;
  int64_t elements = 0;        // of all tensors
  int64_t first_elements = 0;  // of the first
  Device device = kCpu;
  int device_id = 0;
  void *stream = nullptr;

  // The slots from `first` to before `last`.
  Status read(const Call &call, void *const *objects, int first, int last) {
    for (int i = first; i < last; ++i) {
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

  // Memory of ours in the place of a tensor like `model`, one of torch's; false where it is too small.
  bool use(char *memory, int64_t bytes, int slot, void *model) {
    DLTensor t;
    if (torch.exchange->read(model, &t)) return PyErr_Clear(), false;
    for (int k = 0; k < t.ndim; ++k) bytes /= std::max<int64_t>(t.shape[k], 1);
    if (bytes < t.bits / 8) return false;
    params[n] = memory, ndims[n] = t.ndim, shapes[n] = t.shape, dtypes[n] = dlpack_dtype(t);
    given |= 1u << slot, ++n;
    return true;
  }

  void count(int64_t size) {
    if (n == 0) first_elements = size;
    elements += size;
  }

  // Work on so few elements is done sooner than another thread could use the interpreter's lock.
  bool worth_releasing() const { return device == kCuda || elements > 16384; }

  Status read(const Call &call, int slot, void *object) {
    if (is_torch(object)) return read_torch(call, slot, object);
    if (type_of(object) == numpy.type) return read_numpy(call, slot, object);
    return fail(kUnsupportedDtype, "%s: %s is a %s, expected a tensor", call.op.c_str(), call.slots[slot].c_str(),
                type_name(object));
  }

  Status read_torch(const Call &call, int slot, void *object) {
    DLTensor t;
    if (!gate.plain_tensor(object))
      return fail(kInvalidArgument, "%s: %s is not a plain tensor", call.op.c_str(), call.slots[slot].c_str());
    if (torch.exchange->read(object, &t)) return kConventionMisused;  // torch has set Python's error
    if (t.ndim > kMaxNdim)
      return fail(kInvalidArgument, "%s: %s has %d dimensions, expected at most %d", call.op.c_str(),
                  call.slots[slot].c_str(), t.ndim, kMaxNdim);
    params[n] = static_cast<char *>(t.data) + t.byte_offset;
    ndims[n] = t.ndim, shapes[n] = t.shape, dtypes[n] = dlpack_dtype(t);
    const Layout layout(t);
    count(layout.size);
    const bool one = layout.as_number(call, slot);
    if (one) ndims[n] = 0, shapes[n] = nullptr;
    if (!layout.contiguous && !one) return not_contiguous(call, slot);
    if (!t.data && layout.size)
      return fail(kInvalidArgument, "%s: %s has no memory: its storage was freed", call.op.c_str(),
                  call.slots[slot].c_str());
    return on_device(call, slot, t.device_type, t.device_id);
  }

  Status read_numpy(const Call &call, int slot, void *object) {
    auto *a = reinterpret_cast<NumpyArray *>(static_cast<char *>(object) + python.head_size);
    int64_t size = 1;
    for (int k = 0; k < a->ndim; ++k) size *= a->shape[k];
    count(size);
    params[n] = a->data, ndims[n] = a->ndim, shapes[n] = a->shape, dtypes[n] = "of another kind";
    for (int i = 0; i < numpy.n; ++i)
      if (a->dtype == numpy.dtypes[i]) dtypes[n] = numpy.names[i];
    constexpr int kCContiguous = 1, kAligned = 0x100, kWriteable = 0x400;
    if (!(a->flags & kCContiguous) || !(a->flags & kAligned)) return not_contiguous(call, slot);
    if (slot >= call.n_in && !(a->flags & kWriteable))
      return fail(kInvalidArgument, "%s: %s is read-only, expected an array to write to", call.op.c_str(),
                  call.slots[slot].c_str());
    return on_device(call, slot, 1, 0);
  }

  int64_t bytes(int i) const {
    int64_t elements = 1;
    for (int k = 0; k < ndims[i]; ++k) elements *= shapes[i][k];
    const DType dtype = parse_dtype(dtypes[i]);
    return elements * (dtype == DType::int64 ? 8 : dtype == DType::int32 ? 4 : itemsize(dtype));
  }

  // An output may be an input, element by element, but nothing else may share its memory.
  Status check_apart(const Call &call) const {
    const int n_in = __builtin_popcount(given & ((1u << call.n_in) - 1));
    for (int i = n_in; i < n; ++i)
      for (int j = 0; j < i; ++j) {
        const char *a = static_cast<char *>(params[i]), *b = static_cast<char *>(params[j]);
        const bool apart = a + bytes(i) <= b || b + bytes(j) <= a;
        if (!apart && !(j < n_in && a == b && bytes(i) == bytes(j)))
          return fail(kInvalidArgument, "%s: %s shares memory with %s", call.op.c_str(), slot_name(call, i),
                      slot_name(call, j));
      }
    return kOk;
  }

  // Of the i-th tensor given.
  const char *slot_name(const Call &call, int i) const {
    int slot = 0;
    for (;; ++slot)
      if (given >> slot & 1 && i-- == 0) return call.slots[slot].c_str();
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

thread_local bool refused;  // whether Python's error is a refusal of ours, rather than raised by what we called

// None, or the exception of the status with the text of aot_last_error().
void *finish(int status) {
  if (!status) return Py_IncRef(python.none), python.none;
  refused = !PyErr_Occurred();
  if (refused) PyErr_SetString(python.errors[status < 0 || status > 5 ? 5 : status], aot_last_error());
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

// --------------------------------------------------------------------------------------------- calls that allocate

// What Python has made for inputs like these; null: it raised.
Ref models(const Function &f, const Arguments &a, void *const *inputs) {
  int64_t known[2 + kMaxSlots * (2 + kMaxNdim)];
  int n = 0;
  known[n++] = a.given, known[n++] = a.device == kCpu ? -1 : a.device_id;
  for (int i = 0; i < a.n; ++i) {
    known[n++] = reinterpret_cast<intptr_t>(a.dtypes[i]), known[n++] = a.ndims[i];
    for (int k = 0; k < a.ndims[i]; ++k) known[n++] = a.shapes[i][k];
  }
  Ref key = PyBytes_FromStringAndSize(reinterpret_cast<char *>(known), n * sizeof *known);
  if (!key) return nullptr;
  if (void *found = PyDict_GetItemWithError(f.models, key)) return Py_IncRef(found), found;
  Ref made = PyObject_VectorcallDict(f.make_models, inputs, f.call->n_in, nullptr);
  if (!made) return nullptr;
  if (PyDict_Size(f.models) >= 1024) PyDict_Clear(f.models);
  if (PyDict_SetItem(f.models, key, made)) return nullptr;
  return made;
}

struct Slots {
  void *objects[kMaxSlots];  // by slot; None where there is none
  Ref outputs[kMaxSlots];    // those that are ours
  alignas(64) char scratch[1 << 15];

  // Runs the entry on the inputs, which are in their slots, and writes those outputs that are `wanted`.
  // `for_backward`: and the residuals, if they are worth it.
  int run(const Function &f, unsigned wanted, bool for_backward) {
    Call &call = *f.call;
    Arguments a;
    AOT_TRY(a.read(call, objects, 0, call.n_in));
    const bool may_keep = a.device == kCuda || f.keep_from < 0;
    if (for_backward && may_keep && a.first_elements > f.keep_from) wanted |= f.residuals;
    Ref made;
    if (f.has_models && !(made = models(f, a, objects))) return kConventionMisused;
    for (int i = call.n_in; i < call.n_slots; ++i) {
      objects[i] = python.none;
      if (!(wanted >> i & 1)) continue;
      void *model = f.model[i] >= 0 ? objects[f.model[i]] : PyTuple_GetItem(made, i - call.n_in);
      if (f.scratch >> i & 1 && a.device == kCpu && a.use(scratch, sizeof scratch, i, model)) continue;
      outputs[i] = PyObject_VectorcallDict(torch.empty_like, &model, 1, nullptr);
      if (!outputs[i]) return kConventionMisused;
      objects[i] = outputs[i];
      AOT_TRY(a.read(call, objects, i, i + 1));
    }
    return call_tensors(call, a);
  }
};

// New references to what `at` names.
Ref tuple_of(void *const *objects, const int *at, int n) {
  Ref tuple = PyTuple_New(n);
  for (int i = 0; tuple && i < n; ++i) {
    void *object = at[i] < 0 ? python.none : objects[at[i]];
    Py_IncRef(object);
    PyTuple_SetItem(tuple, i, object);
  }
  return tuple;
}

// `context`: where to save for the backward, as save_for_backward does; null: nothing is saved.
void *run_function(const Function &f, void *context, void *const *inputs, intptr_t count) {
  const Call &call = *f.call;
  if (count != call.n_in) return finish(call.wrong_count(count, call.n_in));
  Slots slots;
  std::copy(inputs, inputs + count, slots.objects);
  if (int status = slots.run(f, f.always, context)) return finish(status);
  if (context && f.n_saved) {
    static void *to_save = PyUnicode_InternFromString("to_save");
    int at[kMaxSlots], replaced[kMaxSlots], n_replaced = 0;
    for (int i = 0; i < f.n_saved; ++i) {
      const int instead = f.instead[i];
      const bool kept = instead >= 0 && slots.objects[instead] != python.none;
      at[i] = kept ? instead : f.saved[i];
      if (kept) replaced[n_replaced++] = f.saved[i];
    }
    if (n_replaced) {
      static void *name = PyUnicode_InternFromString("inputs");
      Ref hold = tuple_of(slots.objects, replaced, n_replaced);
      if (!hold || PyObject_SetAttr(context, name, hold)) return nullptr;
    }
    Ref saved = tuple_of(slots.objects, at, f.n_saved);
    if (!saved || PyObject_SetAttr(context, to_save, saved)) return nullptr;
  }
  if (f.n_returned == 1) return slots.outputs[call.n_in].release();
  int returned[kMaxSlots];
  for (int i = 0; i < f.n_returned; ++i) returned[i] = call.n_in + i;
  return tuple_of(slots.objects, returned, f.n_returned).release();
}

// 1 or 0; -1: Python has an error.
int is_true(Ref object) { return object ? PyObject_IsTrue(object) : -1; }

bool is_plain(void *object) { return is_torch(object) && gate.plain_tensor(object); }

// Whether the slot takes a plain tensor of torch's as it lies.
bool lies_well(const Call &call, int slot, void *object) {
  DLTensor t;
  if (torch.exchange->read(object, &t)) return PyErr_Clear(), false;
  const Layout layout(t);
  return layout.contiguous || layout.as_number(call, slot);
}

// A tuple with a gradient, or None, for each input of the forward. Null, with or without an error of Python's: this is
// not for us.
Ref run_plain_backward(const Backward &b, void *needed, void *saved, void *const *grads) {
  static void *contiguous = PyUnicode_InternFromString("contiguous");
  const Function &f = *b.function;
  if (!gate.plain_thread(true) || gate.records_gradients()) return nullptr;
  bool has_kernel = f.call->n_slots > f.call->n_in;
  Slots slots;
  Ref plain[kMaxSlots];
  for (int i = 0; i < f.call->n_in; ++i) {
    int at = b.source[i];
    void *&tensor = slots.objects[i];
    tensor = at < b.n_grads ? grads[at] : PyTuple_GetItem(saved, at - b.n_grads);
    if (tensor != python.none && !is_plain(tensor)) return nullptr;
    if (has_kernel && at < b.n_grads && !lies_well(*f.call, i, tensor))
      tensor = plain[i] = PyObject_VectorcallMethod(contiguous, &tensor, 1, nullptr);
    if (!tensor) return nullptr;
  }
  int gradient[kMaxSlots];
  unsigned wanted = 0;
  for (int i = 0; i < b.n_inputs; ++i) {
    gradient[i] = PyObject_IsTrue(PyTuple_GetItem(needed, i)) == 1 ? b.gradient[i] : -1;
    if (gradient[i] >= 0) wanted |= 1u << gradient[i];
  }
  if (has_kernel && wanted)
    if (int status = slots.run(f, wanted | f.always, false)) return finish(status), nullptr;
  return tuple_of(slots.objects, gradient, b.n_inputs);
}

// The saved tensors are asked for once: a hook that unpacks them may cost, count or raise.
Ref run_backward(const Backward &b, void *context, void *const *grads) {
  static void *needs_input_grad = PyUnicode_InternFromString("needs_input_grad"),
              *saved_tensors = PyUnicode_InternFromString("saved_tensors");
  Ref needed = PyObject_GetAttr(context, needs_input_grad);
  if (!needed) return nullptr;
  Ref saved = PyObject_GetAttr(context, saved_tensors);
  if (!saved) return nullptr;
  refused = false;
  if (Ref gradients = run_plain_backward(b, needed, saved, grads)) return gradients;
  if (PyErr_Occurred()) {
    if (!refused) return nullptr;
    PyErr_Clear();
  }
  Ref given = PyTuple_New(b.n_grads);
  if (!given) return nullptr;
  for (int i = 0; i < b.n_grads; ++i) Py_IncRef(grads[i]), PyTuple_SetItem(given, i, grads[i]);
  void *const arguments[] = {saved, given, needed, context};
  return PyObject_VectorcallDict(b.otherwise, arguments, 4, nullptr);
}

// ------------------------------------------------------------------------------------------------- public functions

// The arguments sorted by Python's rules into the places of inputs and attributes; false: Python shall say what is
// wrong.
bool sort_arguments(const Public &p, void *const *arguments, intptr_t count, void *names, void **places) {
  for (int i = 0; i < p.n_parameters; ++i) places[p.place[i]] = nullptr;
  if (count > p.n_parameters) return false;
  for (int i = 0; i < count; ++i) places[p.place[i]] = arguments[i];
  intptr_t n_names = names ? PyTuple_Size(names) : 0;
  for (int k = 0; k < n_names; ++k) {
    void *name = PyTuple_GetItem(names, k);
    int i = 0;
    while (i < p.n_parameters && p.names[i] != name) ++i;
    if (i == p.n_parameters || places[p.place[i]]) return false;
    places[p.place[i]] = arguments[count + k];
  }
  for (int i = 0; i < p.n_parameters; ++i)
    if (!places[p.place[i]] && !(places[p.place[i]] = p.defaults[i])) return false;
  return true;
}

// Whether it is the view of a matrix, or of a batch of them, with its last two axes in each other's place.
bool lies_transposed(void *tensor) {
  DLTensor t;
  if (torch.exchange->read(tensor, &t)) return PyErr_Clear(), false;
  if (t.ndim < 2 || t.ndim > kMaxNdim || !t.strides || Layout(t).contiguous) return false;
  int64_t shape[kMaxNdim], strides[kMaxNdim];
  std::copy_n(t.shape, t.ndim, shape), std::copy_n(t.strides, t.ndim, strides);
  std::swap(shape[t.ndim - 1], shape[t.ndim - 2]), std::swap(strides[t.ndim - 1], strides[t.ndim - 2]);
  t.shape = shape, t.strides = strides;
  return Layout(t).contiguous;
}

// Puts the matrix itself in the place of a transposed view of it. `matrices` keeps it. False: Python raised.
bool take_as_they_lie(const Public &p, void **places, Ref *matrices) {
  static void *const no = PyBool_FromLong(0), *const yes = PyBool_FromLong(1), *mT = PyUnicode_InternFromString("mT");
  for (int k = 0; k < p.n_transposable; ++k) {
    void *&tensor = places[p.transposable[k]], *&transposed = places[p.transposes[k]];
    if (!is_torch(tensor) || (transposed != no && transposed != yes) || !lies_transposed(tensor)) continue;
    if (!(matrices[k] = PyObject_GetAttr(tensor, mT))) return false;
    tensor = matrices[k], transposed = transposed == no ? yes : no;
  }
  return true;
}

bool is_int(void *value) { return type_of(value) == python.int_type; }

bool is_ints(void *value) {
  if (type_of(value) != python.tuple_type && type_of(value) != torch.size_type) return is_int(value);
  for (intptr_t i = 0, n = PyTuple_Size(value); i < n; ++i)
    if (!is_int(PyTuple_GetItem(value, i))) return false;
  return true;
}

// Whether the value is of the very type that a dict may be asked for: 1, 1.0 and True are one key, a tensor changes.
bool is_key(char kind, void *value) {
  if (value == python.none) return true;
  switch (kind) {
    case 'i':
      return is_int(value);
    case 'l':
      return is_ints(value);
    case 'f':
      return type_of(value) == python.float_type || is_int(value);
    case 'b':
      return type_of(value) == python.bool_type;
    default:
      return type_of(value) == python.str_type;
  }
}

// Frees the place of the binding that was used least recently.
bool forget_one(const Public &p) {
  void *key, *value, *oldest = nullptr;
  uint64_t last_use = ~uint64_t{0};
  for (intptr_t at = 0; PyDict_Next(p.bound, &at, &key, &value);)
    if (auto *d = bound_to<Differentiable>(value); d->last_use < last_use) oldest = key, last_use = d->last_use;
  Ref hold(oldest);
  if (oldest) Py_IncRef(oldest);
  return !oldest || !PyDict_DelItem(p.bound, oldest);
}

// A capsule of the Differentiable. Null: Python raised, or an attribute is not what it should be.
Ref bind_attributes(Public &p, void *const *attrs) {
  for (int i = 0; i < p.n_attrs; ++i)
    if (!is_key(p.kinds[i], attrs[i])) return nullptr;
  Ref key = PyTuple_New(p.n_attrs);
  if (!key) return nullptr;
  for (int i = 0; i < p.n_attrs; ++i) Py_IncRef(attrs[i]), PyTuple_SetItem(key, i, attrs[i]);
  void *found = PyDict_GetItemWithError(p.bound, key);
  if (!found && PyErr_Occurred()) return nullptr;
  if (found) Py_IncRef(found);
  Ref bound = found;
  if (!found) {
    bound = PyObject_VectorcallDict(p.bind, attrs, p.n_attrs, nullptr);
    if (!bound || (PyDict_Size(p.bound) >= p.most_bound && !forget_one(p))) return nullptr;
    if (PyDict_SetItem(p.bound, key, bound)) return nullptr;
  }
  bound_to<Differentiable>(bound)->last_use = ++p.clock;
  return bound;
}

// 1 where one of the inputs wants a gradient, 0; -1: Python has an error.
int wants_gradient(const Public &p, void *const *inputs) {
  static void *requires_grad = PyUnicode_InternFromString("requires_grad");
  if (!gate.records_gradients()) return 0;
  for (int i = 0; i < p.n_inputs; ++i) {
    if (inputs[i] == python.none) continue;
    if (int it_does = is_true(PyObject_GetAttr(inputs[i], requires_grad))) return it_does;
  }
  return 0;
}

// Whether the gate lets a call on these inputs pass.
bool is_plain_call(bool autocast, void *const *inputs, int n) {
  if (!gate.plain_thread(autocast)) return false;
  for (int i = 0; i < n; ++i)
    if (inputs[i] != python.none && !is_plain(inputs[i])) return false;
  return true;
}

// Null, with or without an error of Python's: this call is not for us.
void *run_plain(Public &p, void *const *arguments, intptr_t count, void *names) {
  void *places[2 * kMaxSlots];
  if (!sort_arguments(p, arguments, count, names, places)) return nullptr;
  if (!is_plain_call(!p.has_autocast, places, p.n_inputs) || gate.records_calls()) return nullptr;
  Ref matrices[kMaxSlots];
  if (!take_as_they_lie(p, places, matrices)) return nullptr;
  Ref bound = bind_attributes(p, places + p.n_inputs);
  if (!bound) return nullptr;
  auto *d = bound_to<Differentiable>(bound);
  int gradient = wants_gradient(p, places);
  if (gradient < 0) return nullptr;
  if (gradient) return PyObject_VectorcallDict(d->apply, places, p.n_inputs, nullptr);
  return run_function(*d->function, nullptr, places, p.n_inputs);
}

void *run_public(Public &p, void *const *arguments, intptr_t count, void *names) {
  refused = false;
  if (void *result = run_plain(p, arguments, count, names)) return result;
  if (PyErr_Occurred()) {
    if (!refused) return nullptr;
    PyErr_Clear();
  }
  Ref keywords = PyDict_New();
  for (int i = 0, n = names ? PyTuple_Size(names) : 0; keywords && i < n; ++i)
    if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), arguments[count + i])) return nullptr;
  return keywords ? PyObject_VectorcallDict(p.otherwise, arguments, count, keywords) : nullptr;
}

std::unordered_map<void *, Public *> served;  // by function of Python
Vectorcall *call_in_python;

// What CPython calls in the place of such a function's code, unless frames are evaluated otherwise, as torch.compile
// does.
void *call_served(void *function, void *const *arguments, size_t count, void *names) {
  auto *evaluate = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
  if (evaluate != reinterpret_cast<void *>(_PyEval_EvalFrameDefault))
    return call_in_python(function, arguments, count, names);
  constexpr size_t kArgumentsOffset = size_t{1} << (8 * sizeof(size_t) - 1);  // PY_VECTORCALL_ARGUMENTS_OFFSET
  return run_public(*served.find(function)->second, arguments, count & ~kArgumentsOffset, names);
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- setting up

AOT_API void aot_python_setup(const Interpreter *facts) { python = *facts; }
AOT_API int aot_python_torch(const Torch *facts) {
  if (!gate.open(facts->gate)) return 0;
  torch = *facts;
  return 1;
}
AOT_API void aot_python_numpy(const Numpy *facts) { numpy = *facts; }

// `function`, of Python, which forwards to the builtin of `capsule`, is from now on called without its frame.
AOT_API void aot_python_serve(void *function, void *capsule) {
  if (!PyFunction_SetVectorcall || !_PyInterpreterState_GetEvalFrameFunc || !_PyEval_EvalFrameDefault) return;
  served[function] = bound_to<Public>(capsule);
  call_in_python = PyVectorcall_Function(function);
  PyFunction_SetVectorcall(function, call_served);
}

AOT_API void *aot_extra_new(const char *attrs) { return extra_new(attrs); }
AOT_API void aot_extra_delete(void *extra) { extra_delete(extra); }

// `slots`: n_slots names; `optional`: 1 where a slot may be None; `uniform`: as of Call. Null where there are too many
// slots, or too many that may be None.
AOT_API void *aot_call_new(const char *op, const char *attrs, int n_in, int n_slots, const char *const *slots,
                           const int *optional, unsigned uniform, void *const *entries, void *const *inits) {
  auto call = std::make_unique<Call>();
  call->op = op, call->attrs = attrs, call->n_in = n_in, call->n_slots = n_slots, call->uniform = uniform;
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

// Null, and its status, where there is no such entry or Init refuses the attributes.
AOT_API void *aot_plan_new(const void *call, int device, unsigned given, int n, const int *ndims, const int64_t *dims,
                           const char *const *dtypes, int *status) {
  auto *c = static_cast<const Call *>(call);
  auto plan = std::make_unique<Plan>();
  if (n > kMaxSlots) return *status = c->wrong_count(n, c->n_slots), nullptr;
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
AOT_API void aot_call_capsule_delete(void *capsule) { delete bound_to<Call>(capsule); }

// The destructor of a capsule whose context is one object of Python that it keeps.
AOT_API void aot_capsule_release(void *capsule) { Py_DecRef(PyCapsule_GetContext(capsule)); }

AOT_API int aot_plan_run(void *plan, int device_id, void *stream, void **params) {
  auto *p = static_cast<Plan *>(plan);
  return launch(p->device, device_id, p->entry, p->n, params, p->ndims, p->shapes, p->dtypes, stream, p->extra);
}

// ------------------------------------------------------------------------------------------------------- the builtins

// One object for each slot: a tensor, or None.
AOT_API void *aot_call_tensors(void *capsule, void *const *objects, intptr_t count) {
  auto *call = bound_to<Call>(capsule);
  if (count != call->n_slots) return finish(call->wrong_count(count, call->n_slots));
  Arguments a;
  int status = a.read(*call, objects, 0, call->n_slots);
  if (!status) status = a.check_apart(*call);
  return finish(status ? status : call_tensors(*call, a));
}

// One object for each input; returns the output, or a tuple of them.
AOT_API void *aot_function_run(void *capsule, void *const *inputs, intptr_t count) {
  return run_function(*bound_to<Function>(capsule), nullptr, inputs, count);
}

// The forward of a torch.autograd.Function: its context, then one object for each input.
AOT_API void *aot_function_forward(void *capsule, void *const *objects, intptr_t count) {
  return run_function(*bound_to<Function>(capsule), objects[0], objects + 1, count - 1);
}

// Its backward: the context, then the gradient of each output.
AOT_API void *aot_function_backward(void *capsule, void *const *objects, intptr_t count) {
  auto *b = bound_to<Backward>(capsule);
  if (count != 1 + b->n_grads) return finish(b->function->call->wrong_count(count, 1 + b->n_grads));
  return run_backward(*b, objects[0], objects + 1).release();
}

// A public function, called as Python calls one.
AOT_API void *aot_public(void *capsule, void *const *arguments, intptr_t count, void *names) {
  return run_public(*bound_to<Public>(capsule), arguments, count, names);
}

// Whether a call on these tensors is plain, with autocast on or off.
AOT_API void *aot_gate(void *, void *const *tensors, intptr_t count) {
  return PyBool_FromLong(is_plain_call(true, tensors, count));
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
