// The call path of PyTorch: whole calls in C, with outputs allocated and gradients recorded.
//
// frontends/torch/call.py makes builtins of the functions at the end, and fills and keeps the structs that they are
// bound to. gate.h decides which calls are made here. Everything else goes back to Python, to a `fallback`.
#include <new>
#include <unordered_map>
#include <vector>

#include "calls.h"
#include "elementwise_strides.h"
#include "gate.h"
#include "torch_tensors.h"

using namespace aot;

namespace {

struct Torch {
  const DLExchange *exchange;
  void *types[2];    // Tensor and Parameter
  void *size_type;   // torch.Size, a tuple of ints
  void *empty_like;  // torch.empty_like
  GateFacts gate;
};
Torch torch;
TorchTensors tensors;

// A call that allocates what the entry writes, each with `empty_like` of a prototype. The prototype is an input, or a
// tensor of the right shape and dtype that Python made for inputs of these shapes and dtypes.
struct Function {
  Call *call;
  int prototype[kMaxSlots];  // by slot, for what is written: the input that it is like; -1: Python makes the prototype
  bool has_prototypes;       // Python makes some
  int equal[kMaxSlots];      // by slot: an earlier one that stands for it too where the two have one dtype; -1: none
  uint64_t always;           // bit i: slot i is always written
  uint64_t residuals;        // bit i: slot i is a residual. It is written for the backward where that is worth it
  uint64_t scratch;          // bit i: slot i is a workspace. On the CPU small ones are on the stack
  int64_t keep_from;         // a first input on a GPU with more elements is worth residuals; -1: every first input is
  int n_returned;            // outputs, the first slots that are written
  int n_saved;               // what is saved for the backward:
  int saved[kMaxSlots];      // the slot of each,
  int instead[kMaxSlots];    // and the residual that is saved in its place if it is written; -1: none
  uint64_t saved_for[kMaxSlots];  // and, as bits, the inputs for whose gradients alone it is saved; 0: always
  uint64_t channels_last;         // bit i: the entry reads or writes slot i with its second axis as its last
  bool none_for_unread;   // the gradient of an output that nobody has read is None, which autograd else makes zeros of
  void *hooks;            // takes False; returns None unless a hook packs what is saved: then nothing is replaced
  void *make_prototypes;  // takes the inputs; returns None for those that the operator refuses, whose error is then
                          // this library's, else a tuple with one for each slot written, None where an input is
  void *prototypes;       // a dict of what it returned, by what the shapes of outputs depend on
};

// The backward of a torch.autograd.Function.
struct Backward {
  Function *function;       // of the backward operator
  int n_grads, n_inputs;    // outputs and inputs of the forward
  int source[kMaxSlots];    // by input slot: below n_grads an incoming gradient, from there on a saved tensor
  int gradient[kMaxSlots];  // for each input of the forward the slot of its gradient; -1: it has none
  void *fallback;           // takes the saved tensors, the gradients, needs_input_grad and the context
  int over_output;          // the slot of a gradient that may be written over an input; -1: none is
  int over_input;           // the slot of that input, which is saved
  int64_t over_from;        // bytes of it from which may_overwrite is asked
  void *may_overwrite;      // takes the saved tensors; returns a bool
  void *drop_inputs;        // after a backward, takes the context, of which inputs were replaced; null: none were
};

// A differentiable operator with its attributes.
struct Differentiable {
  Function *function;
  void *apply;        // the autograd.Function's
  uint64_t last_use;  // Public::clock at its last call
};

// A call in code that torch.compile has made.
struct Compiled {
  Function *function;
  void *fallback;  // takes the inputs of a call that is not plain, or that is refused
};

// A public function of the torch frontend. Below, "argument k" is an input, or after them an attribute.
struct Public {
  int n_inputs, n_attrs, n_parameters;
  int position[2 * kMaxSlots];    // by parameter: its argument
  void *names[2 * kMaxSlots];     // by parameter; interned
  void *defaults[2 * kMaxSlots];  // by parameter; null: none
  int n_transposable;             // inputs that may be transposed views:
  int transposable[kMaxSlots];    // the argument of each,
  int transposes[kMaxSlots];      // and the attribute, a bool, that transposes it
  char kinds[2 * kMaxSlots];      // by attribute: the first letter of its type in Op.attrs; "l" for a list of integers;
                                  // "x" for one that Python binds
  uint64_t images;  // bit i: input i has channels as its second axis where argument `layout` is `first_layout`,
  int layout;       // as its last where it is `last_layout`
  int most_axes;    // of an image; the least is 4
  void *first_layout, *last_layout;
  char copies;  // which inputs the entry gets as contiguous copies: "a", all that are not contiguous; "e", of an
                // elementwise operator, where the results are contiguous all the same; "n", none: the fallback runs
  Public *channels_last;  // binds the operator for images in channels_last, seen with `last_layout`; null: none
  void *cast;             // for an operator that autocast changes: takes the arguments; returns a tuple of those to run
                          // with, or None: the fallback runs. null: autocast changes nothing
  uint64_t constants;     // bit i: the backward has no gradient for input i
  int most_bound;         // limit of entries in `bound`
  uint64_t clock;         // number of calls
  void *bind;             // takes the attributes; returns a capsule of the Differentiable, or None: the fallback runs
  void *bound;            // a dict of what it returned, by attributes
  void *last_attrs, *last;  // of the last call: a tuple of the attributes, which are immutable, and the capsule; owned
  void *record;             // takes the tensors; returns a context manager, a profile's event
  void *fallback;           // takes the arguments of a call that is not plain, or that is refused
};

// A call of a replaced module that is a call of a public function.
struct Module {
  Public *function;
  void *type;                   // its class
  char sources[2 * kMaxSlots];  // what each argument is: "x", the call's; "r", the call's second, like x; "p", a
                                // parameter; "a", an attribute of the instance; "n", the size of x's last axis; "f",
                                // what a function of no arguments returns; "c", a constant
  void *values[2 * kMaxSlots];  // the name of each, the function or the constant
  bool widens;                  // 32-bit parameters serve an x of 16 bits; else their dtype is x's
  bool wide_in_autocast;        // autocast has an x of 16 bits computed in 32
  bool reads_contiguous;        // an x that is not contiguous is the original's
  int device;                   // DLPack's number of the device that what follows is about
  int64_t elements, rows;       // in training an x there with fewer of both is the original's
  int product_bits;             // of a product of x and a weight, and no more, the most of an element of x where it is
                                // served, which is there alone; else 0
  int64_t uneven_weight;        // elements of a weight from which on sizes that are no multiples of 8 are served
  int64_t fewest_rows;          // of x in a product that is served
  int image_bits;               // of a function of images, the most of an element of x where one of several pixels is
                                // served, which is there alone; else 0
  int64_t few_channels;         // of such an image: up to so many are served wherever others are
  void *held_name, *held;       // an attribute of the instance that must be this object; null: none
  int64_t last_size;            // of x's last axis, in the last call, and the int; owned. The GIL guards both: without
  void *last_int;               // it Python's tensors are not read here (aotops/call.py)
};

// How instances of a replaced module's class are called.
struct ModuleCall {
  Module *module;
  void *original;  // the class that it was made of,
  void *ways[2];   // its `__call__` and `_call_impl`, which are nn.Module's,
  void *forward;   // and its forward
  void *replaced;  // the forward that stands in its place
  void *hooks[4];  // the dictionaries of all modules' hooks
};

// Objects that a call owns: at most one for each slot.
class Refs {
 public:
  Refs() = default;
  Refs(const Refs &) = delete;
  ~Refs() {
    for (int i = 0; i < n_; ++i) Py_DecRef(objects_[i]);
  }
  // The object, which may be null.
  void *keep(Ref object) { return object ? objects_[n_++] = object.release() : nullptr; }

 private:
  void *objects_[kMaxSlots];
  int n_ = 0;
};

// --------------------------------------------------------------------------------------------- calls that allocate

// The prototypes of inputs like these; null: Python's error is set.
Ref prototypes(const Function &f, const Arguments &a, void *const *inputs) {
  int64_t known[2 + kMaxSlots * (2 + kMaxNdim)];
  int n = 0;
  known[n++] = a.given, known[n++] = a.device == kCpu ? -1 : a.device_id;
  for (int i = 0; i < a.n; ++i) {
    known[n++] = reinterpret_cast<intptr_t>(a.dtypes[i]), known[n++] = a.ndims[i];
    for (int k = 0; k < a.ndims[i]; ++k) known[n++] = a.shapes[i][k];
  }
  Ref key = PyBytes_FromStringAndSize(reinterpret_cast<char *>(known), n * sizeof *known);
  if (!key) return nullptr;
  if (void *found = PyDict_GetItemWithError(f.prototypes, key)) return Py_IncRef(found), found;
  Ref made = PyObject_VectorcallDict(f.make_prototypes, inputs, f.call->n_in, nullptr);
  if (!made || made == python.none) return nullptr;
  if (PyDict_Size(f.prototypes) >= 1024) PyDict_Clear(f.prototypes);
  if (PyDict_SetItem(f.prototypes, key, made)) return nullptr;
  return made;
}

// An uninitialized tensor like this one, contiguous or in channels_last; where `torch.empty_like` makes a contiguous
// one instead, the call is refused. Null: Python's error is set.
Ref empty_like(void *prototype, bool channels_last) {
  DLTensor t;
  if (torch.exchange->read(prototype, &t)) return nullptr;
  if (Ref made = tensors.empty(t, channels_last)) return made;
  return PyObject_VectorcallDict(torch.empty_like, &prototype, 1, nullptr);
}

struct Slots {
  void *objects[kMaxSlots];  // by slot; None: absent
  Refs outputs;              // those that were allocated here
  int over_output = -1;      // the slot that is written over the input in slot over_input; -1: none is
  int over_input;
  alignas(64) char scratch[1 << 15];

  // Runs the entry on the inputs, which are in their slots, and writes the slots of `wanted`, and of `residuals` where
  // they are worth it. Returns a status.
  int run(const Function &f, uint64_t wanted, uint64_t residuals) {
    Call &call = *f.call;
    Arguments a;
    a.channels_last = f.channels_last;
    AOT_TRY(a.read(call.slots, objects, 0, call.n_in));
    const bool may_keep = a.device == kCuda || f.keep_from < 0;
    if (may_keep && a.first_elements > f.keep_from) wanted |= residuals;
    Ref made;
    if (f.has_prototypes && !(made = prototypes(f, a, objects))) return kConventionMisused;
    for (int i = call.n_in; i < call.n_slots; ++i) {
      objects[i] = python.none;
      if (!(wanted >> i & 1)) continue;
      if (i == over_output) {
        objects[i] = objects[over_input];
        AOT_TRY(a.read(call.slots, objects, i, i + 1));
        continue;
      }
      if (const int other = f.equal[i]; other >= 0 && objects[other] != python.none && same_dtype(f, a, i, other)) {
        objects[i] = objects[other];
        continue;
      }
      void *prototype = f.prototype[i] >= 0 ? objects[f.prototype[i]] : PyTuple_GetItem(made, i - call.n_in);
      if (f.scratch >> i & 1 && a.device == kCpu && a.use(scratch, sizeof scratch, i, prototype)) continue;
      if (!(objects[i] = outputs.keep(empty_like(prototype, f.channels_last >> i & 1)))) return kConventionMisused;
      AOT_TRY(a.read(call.slots, objects, i, i + 1));
    }
    return run_entry(call, a);
  }

 private:
  // Whether two slots, each like an input that is present, have one dtype.
  static bool same_dtype(const Function &f, const Arguments &a, int i, int k) {
    const auto dtype = [&](int slot) {
      return a.dtypes[__builtin_popcountll(a.given & ((uint64_t{1} << f.prototype[slot]) - 1))];
    };
    return dtype(i) == dtype(k);
  }
};

// A tuple of n objects: the first ones, or each given by its index, None by -1.
Ref tuple_of(void *const *objects, int n, const int *index = nullptr) {
  Ref tuple = PyTuple_New(n);
  for (int i = 0; tuple && i < n; ++i) {
    void *object = !index ? objects[i] : index[i] < 0 ? python.none : objects[index[i]];
    Py_IncRef(object);
    PyTuple_SetItem(tuple, i, object);
  }
  return tuple;
}

// Whether residuals are saved in the place of inputs: 1 or 0; -1: Python's error is set. A hook that packs what is
// saved is given the inputs too: a checkpoint drops them.
int replaces(const Function &f) {
  if (!f.hooks) return 0;
  static void *const no = PyBool_FromLong(0);
  Ref hooks = PyObject_VectorcallDict(f.hooks, &no, 1, nullptr);
  return hooks ? hooks == python.none : -1;
}

// As bits, the inputs whose gradients are needed. -1: Python's error is set.
int64_t needed_inputs(void *context, int n_inputs) {
  static void *needs_input_grad = PyUnicode_InternFromString("needs_input_grad");
  Ref needed = PyObject_GetAttr(context, needs_input_grad);
  int64_t bits = 0;
  for (int i = 0; needed && i < n_inputs; ++i)
    bits |= int64_t{PyObject_IsTrue(PyTuple_GetItem(needed, i)) == 1 ? 1 : 0} << i;
  return needed ? bits : -1;
}

// Sets context.to_save, as save_for_backward does (torch/call.py compares that), and keeps the inputs that a residual
// replaces as context.inputs, with their versions as context.versions. False: Python's error is set.
bool save(const Function &f, void *context, void *const *objects) {
  static void *to_save = PyUnicode_InternFromString("to_save"), *inputs = PyUnicode_InternFromString("inputs"),
              *versions = PyUnicode_InternFromString("versions"), *version = PyUnicode_InternFromString("_version");
  int saved[kMaxSlots], replaced[kMaxSlots], n_replaced = 0;
  const int replace = replaces(f);
  if (replace < 0) return false;
  for (int i = 0; i < f.n_saved; ++i) {
    const int instead = f.instead[i];
    const bool kept = replace && instead >= 0 && objects[instead] != python.none;
    saved[i] = kept ? instead : f.saved[i];
    if (f.saved_for[i]) {
      const int64_t needed = needed_inputs(context, f.call->n_in);
      if (needed < 0) return false;
      if (!(f.saved_for[i] & needed)) saved[i] = -1;
    }
    if (kept) replaced[n_replaced++] = f.saved[i];
  }
  if (n_replaced) {
    Ref kept = tuple_of(objects, n_replaced, replaced);
    Ref counts = PyTuple_New(n_replaced);
    if (!kept || !counts || PyObject_SetAttr(context, inputs, kept)) return false;
    for (int i = 0; i < n_replaced; ++i) {
      void *count = PyObject_GetAttr(objects[replaced[i]], version);
      if (!count) return false;
      PyTuple_SetItem(counts, i, count);
    }
    if (PyObject_SetAttr(context, versions, counts)) return false;
  }
  Ref tensors = tuple_of(objects, f.n_saved, saved);
  return tensors && !PyObject_SetAttr(context, to_save, tensors);
}

// As bits, the residuals that a backward takes. -1: Python's error is set.
int64_t residuals_for(const Function &f, void *context) {
  uint64_t found = f.residuals;
  for (int i = 0; i < f.n_saved; ++i) {
    const uint64_t residual = f.residuals & uint64_t{1} << f.saved[i];
    if (!residual || !f.saved_for[i]) continue;
    const int64_t needed = needed_inputs(context, f.call->n_in);
    if (needed < 0) return -1;
    if (!(f.saved_for[i] & needed)) found &= ~residual;
  }
  return found;
}

// As set_materialize_grads(False). False: Python's error is set.
bool keeps_none(void *context) {
  static void *const materialize_grads = PyUnicode_InternFromString("materialize_grads"), *const no =
                                                                                              PyBool_FromLong(0);
  return !PyObject_SetAttr(context, materialize_grads, no);
}

// `context`: of the autograd.Function; null: nothing is saved for a backward. Returns the output, or a tuple of them.
void *run_function(const Function &f, void *context, void *const *inputs, intptr_t count) {
  const Call &call = *f.call;
  if (count != call.n_in) return finish(call.wrong_count(count, call.n_in));
  Slots slots;
  std::copy(inputs, inputs + count, slots.objects);
  const int64_t residuals = context ? residuals_for(f, context) : 0;
  if (residuals < 0) return nullptr;
  if (int status = slots.run(f, f.always, residuals)) return finish(status);
  if (context && f.n_saved && !save(f, context, slots.objects)) return nullptr;
  if (context && f.none_for_unread && !keeps_none(context)) return nullptr;
  if (f.n_returned == 1) return Py_IncRef(slots.objects[call.n_in]), slots.objects[call.n_in];
  return tuple_of(slots.objects + call.n_in, f.n_returned).release();
}

bool is_plain(void *object) { return is_dlpack(object) && gate.plain_tensor(object); }

// Whether the slot accepts a plain tensor without a copy. `moves`: with the second axis as the last.
bool is_accepted(const CallSlot &slot, void *object, bool moves) {
  DLTensor t;
  int64_t shape[kMaxNdim], strides[kMaxNdim];
  if (torch.exchange->read(object, &t)) return PyErr_Clear(), false;
  if (moves && !move_channels(&t, shape, strides)) return false;
  const Layout layout(t);
  return layout.contiguous || layout.as_scalar(slot.accepts_scalar);
}

// Whether two tensors have one dtype and shape.
bool same_spec(const DLTensor &a, const DLTensor &b) {
  return a.code == b.code && a.bits == b.bits && a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// Whether the gradient in slot over_output is written over its input. -1: Python's error is set.
int overwrites(const Backward &b, uint64_t wanted, const Slots &slots, void *saved) {
  if (b.over_output < 0 || !(wanted >> b.over_output & 1) || slots.objects[b.over_input] == python.none) return 0;
  DLTensor t, like;
  if (torch.exchange->read(slots.objects[b.over_input], &t)) return PyErr_Clear(), 0;
  const int prototype = b.function->prototype[b.over_output];
  if (prototype >= 0 && (torch.exchange->read(slots.objects[prototype], &like) || !same_spec(t, like)))
    return PyErr_Clear(), 0;
  int64_t bytes = t.bits / 8;
  for (int k = 0; k < t.ndim; ++k) bytes *= t.shape[k];
  if (bytes < b.over_from || !Layout(t).contiguous) return 0;
  return is_true(PyObject_VectorcallDict(b.may_overwrite, &saved, 1, nullptr));
}

// A tuple with a gradient, or None, for each input of the forward. Null: Python's error is set, or, where it is not,
// the fallback must run.
Ref run_plain_backward(const Backward &b, void *needed, void *saved, void *const *grads) {
  static void *contiguous = PyUnicode_InternFromString("contiguous");
  const Function &f = *b.function;
  if (!gate.plain_thread(true) || gate.records_gradients()) return nullptr;
  bool has_kernel = f.call->n_slots > f.call->n_in;
  Slots slots;
  Refs copies;
  for (int i = 0; i < f.call->n_in; ++i) {
    const int source = b.source[i];
    void *&tensor = slots.objects[i];
    tensor = source < b.n_grads ? grads[source] : PyTuple_GetItem(saved, source - b.n_grads);
    const bool given = tensor != python.none;
    if (given ? !is_plain(tensor) : source < b.n_grads && f.call->slots[i].optional_bit < 0) return nullptr;
    const bool moves = f.channels_last >> i & 1;
    if (given && has_kernel && source < b.n_grads && !is_accepted(f.call->slots[i], tensor, moves)) {
      if (moves) return nullptr;
      tensor = copies.keep(PyObject_VectorcallMethod(contiguous, &tensor, 1, nullptr));
    }
    if (!tensor) return nullptr;
  }
  int gradient[kMaxSlots];
  uint64_t wanted = 0;
  for (int i = 0; i < b.n_inputs; ++i) {
    const bool is_needed = PyObject_IsTrue(PyTuple_GetItem(needed, i)) == 1;
    if (is_needed && b.gradient[i] < 0) return nullptr;
    gradient[i] = is_needed ? b.gradient[i] : -1;
    if (gradient[i] >= 0) wanted |= uint64_t{1} << gradient[i];
  }
  if (has_kernel && wanted) {
    const int overwritten = overwrites(b, wanted, slots, saved);
    if (overwritten < 0) return nullptr;
    if (overwritten) slots.over_output = b.over_output, slots.over_input = b.over_input;
    if (int status = slots.run(f, wanted | f.always, 0)) return finish(status), nullptr;
  }
  return tuple_of(slots.objects, b.n_inputs, gradient);
}

// After a null result: whether the fallback must run. An error that is ours is dropped, the fallback raises a better
// one.
bool must_fall_back() {
  if (!PyErr_Occurred()) return true;
  if (error_is_ours) PyErr_Clear();
  return error_is_ours;
}

// The saved tensors are read once: a hook that unpacks them may be slow, count its calls or raise.
Ref run_backward(const Backward &b, void *context, void *const *grads) {
  static void *needs_input_grad = PyUnicode_InternFromString("needs_input_grad"),
              *saved_tensors = PyUnicode_InternFromString("saved_tensors");
  Ref needed = PyObject_GetAttr(context, needs_input_grad);
  if (!needed) return nullptr;
  Ref saved = PyObject_GetAttr(context, saved_tensors);
  if (!saved) return nullptr;
  error_is_ours = false;
  Ref gradients = run_plain_backward(b, needed, saved, grads);
  if (!gradients) {
    if (!must_fall_back()) return nullptr;
    Ref given = tuple_of(grads, b.n_grads);
    if (!given) return nullptr;
    void *const arguments[] = {saved, given, needed, context};
    gradients = PyObject_VectorcallDict(b.fallback, arguments, 4, nullptr);
  }
  if (!gradients || !b.drop_inputs) return gradients;
  Ref dropped = PyObject_VectorcallDict(b.drop_inputs, &context, 1, nullptr);
  return dropped ? std::move(gradients) : Ref(nullptr);
}

// ------------------------------------------------------------------------------------------------- public functions

// Sorts what a function was called with into inputs and attributes, by Python's rules. False: Python raises the
// TypeError.
bool sort_arguments(const Public &p, void *const *given, intptr_t count, void *names, void **arguments) {
  for (int i = 0; i < p.n_parameters; ++i) arguments[p.position[i]] = nullptr;
  if (count > p.n_parameters) return false;
  for (int i = 0; i < count; ++i) arguments[p.position[i]] = given[i];
  intptr_t n_names = names ? PyTuple_Size(names) : 0;
  for (int k = 0; k < n_names; ++k) {
    void *name = PyTuple_GetItem(names, k);
    int i = 0;
    while (i < p.n_parameters && p.names[i] != name) ++i;
    if (i == p.n_parameters || arguments[p.position[i]]) return false;
    arguments[p.position[i]] = given[count + k];
  }
  for (int i = 0; i < p.n_parameters; ++i)
    if (!arguments[p.position[i]] && !(arguments[p.position[i]] = p.defaults[i])) return false;
  return true;
}

// Whether the tensor, with its last two axes swapped, is contiguous, and without that is not.
bool is_transposed_view(void *tensor) {
  DLTensor t;
  if (torch.exchange->read(tensor, &t)) return PyErr_Clear(), false;
  if (t.ndim < 2 || t.ndim > kMaxNdim || !t.strides || Layout(t).contiguous) return false;
  int64_t shape[kMaxNdim], strides[kMaxNdim];
  std::copy_n(t.shape, t.ndim, shape), std::copy_n(t.strides, t.ndim, strides);
  std::swap(shape[t.ndim - 1], shape[t.ndim - 2]), std::swap(strides[t.ndim - 1], strides[t.ndim - 2]);
  t.shape = shape, t.strides = strides;
  return Layout(t).contiguous;
}

// Replaces each transposed view by the matrix that it is a view of, and flips the attribute that transposes it.
// `matrices` owns them. False: Python's error is set.
bool absorb_transposed_views(const Public &p, void **arguments, Refs &matrices) {
  static void *const no = PyBool_FromLong(0), *const yes = PyBool_FromLong(1), *mT = PyUnicode_InternFromString("mT");
  for (int k = 0; k < p.n_transposable; ++k) {
    void *&tensor = arguments[p.transposable[k]], *&transposed = arguments[p.transposes[k]];
    if (!is_dlpack(tensor) || (transposed != no && transposed != yes) || !is_transposed_view(tensor)) continue;
    if (!(tensor = matrices.keep(PyObject_GetAttr(tensor, mT)))) return false;
    transposed = transposed == no ? yes : no;
  }
  return true;
}

// Whether images have their channels as the second axis, and in memory as the last: one at least as that axis alone.
bool has_channels_last(const Public &p, void *const *arguments) {
  if (!p.channels_last || arguments[p.layout] != p.first_layout) return false;
  bool alone = false;
  for (int i = 0; i < p.n_inputs; ++i) {
    DLTensor t;
    int64_t shape[kMaxNdim], strides[kMaxNdim];
    if (!(p.images >> i & 1) || arguments[i] == python.none) continue;
    if (torch.exchange->read(arguments[i], &t)) return PyErr_Clear(), false;
    if (t.ndim < 4 || t.ndim > p.most_axes) return false;
    alone = alone || !Layout(t).contiguous;
    if (!move_channels(&t, shape, strides) || !Layout(t).contiguous) return false;
  }
  return alone;
}

// Whether the results of an elementwise operator on these inputs, not all contiguous, are.
bool has_contiguous_results(void *const *inputs, int n) {
  TensorView views[kMaxSlots];
  int64_t strides[kMaxNdim], size = 1;
  int given = 0;
  for (int i = 0; i < n; ++i) {
    DLTensor t;
    if (inputs[i] == python.none) continue;
    if (torch.exchange->read(inputs[i], &t)) return PyErr_Clear(), false;
    if (t.ndim > kMaxNdim || !t.strides) return false;
    views[given++] = {inputs[i], t.ndim, t.shape, t.strides, 0, 0, 0, nullptr};
    if (t.ndim != views[0].ndim || !std::equal(t.shape, t.shape + t.ndim, views[0].shape)) return false;
  }
  elementwise_strides(views, given, strides);
  for (int64_t k = views[0].ndim - 1; k >= 0; size *= std::max<int64_t>(views[0].shape[k--], 1))
    if (strides[k] != size) return false;
  return true;
}

// Replaces inputs that are not contiguous by copies, as p.copies says; `copies` owns them. False: Python's error is
// set.
bool copy_strided(const Public &p, const Call &call, void **inputs, Refs &copies) {
  static void *contiguous = PyUnicode_InternFromString("contiguous");
  uint64_t strided = 0;
  for (int i = 0; i < p.n_inputs && p.copies != 'n'; ++i)
    if (inputs[i] != python.none && !is_accepted(call.slots[i], inputs[i], false)) strided |= uint64_t{1} << i;
  if (!strided || (p.copies == 'e' && !has_contiguous_results(inputs, p.n_inputs))) return true;
  for (int i = 0; i < p.n_inputs; ++i)
    if (strided >> i & 1 && !(inputs[i] = copies.keep(PyObject_VectorcallMethod(contiguous, &inputs[i], 1, nullptr))))
      return false;
  return true;
}

bool is_int(void *value) { return type_of(value) == python.int_type; }

bool is_ints(void *value) {
  if (type_of(value) != python.tuple_type && type_of(value) != torch.size_type) return is_int(value);
  for (intptr_t i = 0, n = PyTuple_Size(value); i < n; ++i)
    if (!is_int(PyTuple_GetItem(value, i))) return false;
  return true;
}

// Whether the attribute is exactly of its type, and so may be part of a key: 1, 1.0 and True are the same key, and a
// tensor can change.
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
    case 's':
      return type_of(value) == python.str_type;
    default:
      return false;
  }
}

// Removes the binding that was used least recently. False: Python's error is set.
bool forget_one(const Public &p) {
  void *key, *value, *oldest = nullptr;
  uint64_t last_use = ~uint64_t{0};
  for (intptr_t position = 0; PyDict_Next(p.bound, &position, &key, &value);)
    if (auto *d = capsule_pointer<Differentiable>(value); d->last_use < last_use) oldest = key, last_use = d->last_use;
  Ref hold(oldest);
  if (oldest) Py_IncRef(oldest);
  return !oldest || !PyDict_DelItem(p.bound, oldest);
}

// Whether the attributes are the same objects as in the last call.
bool are_last(const Public &p, void *const *attrs) {
  for (int i = 0; i < p.n_attrs; ++i)
    if (PyTuple_GetItem(p.last_attrs, i) != attrs[i]) return false;
  return true;
}

// A capsule of the Differentiable. Null: Python's error is set, or these attributes are not bound.
Ref bind_attributes(Public &p, void *const *attrs) {
  if (p.last && are_last(p, attrs)) {
    capsule_pointer<Differentiable>(p.last)->last_use = ++p.clock;
    return Py_IncRef(p.last), p.last;
  }
  for (int i = 0; i < p.n_attrs; ++i)
    if (!is_key(p.kinds[i], attrs[i])) return nullptr;
  Ref key = tuple_of(attrs, p.n_attrs);
  if (!key) return nullptr;
  void *found = PyDict_GetItemWithError(p.bound, key);
  if (!found && PyErr_Occurred()) return nullptr;
  if (found) Py_IncRef(found);
  Ref bound = found;
  if (!found) {
    bound = PyObject_VectorcallDict(p.bind, attrs, p.n_attrs, nullptr);
    if (bound == python.none) return nullptr;
    if (!bound || (PyDict_Size(p.bound) >= p.most_bound && !forget_one(p))) return nullptr;
    if (PyDict_SetItem(p.bound, key, bound)) return nullptr;
  }
  capsule_pointer<Differentiable>(bound)->last_use = ++p.clock;
  Ref old_attrs = std::exchange(p.last_attrs, key.release()), old = std::exchange(p.last, bound);
  Py_IncRef(bound);
  return bound;
}

// Whether a gradient is recorded: 1 or 0; -1: Python's error is set, or, where it is not, the fallback must run.
int wants_gradient(const Public &p, void *const *inputs) {
  static void *requires_grad = PyUnicode_InternFromString("requires_grad");
  if (!gate.records_gradients()) return 0;
  int found = 0;
  for (int i = 0; i < p.n_inputs; ++i) {
    const bool is_constant = p.constants >> i & 1;
    if (inputs[i] == python.none || (found && !is_constant)) continue;
    const int wants = is_true(PyObject_GetAttr(inputs[i], requires_grad));
    if (wants < 0 || (wants && is_constant)) return -1;
    found |= wants;
  }
  return found;
}

// `autocast`: whether it may be on.
bool is_plain_call(bool autocast, void *const *inputs, int n) {
  if (!gate.plain_thread(autocast)) return false;
  for (int i = 0; i < n; ++i)
    if (inputs[i] != python.none && !is_plain(inputs[i])) return false;
  return true;
}

// Runs a plain call.
void *run_differentiable(const Differentiable &d, void *const *inputs, int n, bool gradient) {
  return gradient ? PyObject_VectorcallDict(d.apply, inputs, n, nullptr)
                  : run_function(*d.function, nullptr, inputs, n);
}

// Runs it as an event of a profile, which is of what runs without one.
void *run_recorded(const Public &p, const Differentiable &d, void *const *inputs, bool gradient) {
  static void *const enter = PyUnicode_InternFromString("__enter__"), *const leave =
                                                                          PyUnicode_InternFromString("__exit__");
  void *given[kMaxSlots];
  const auto n = static_cast<int>(
      std::copy_if(inputs, inputs + p.n_inputs, given, [](void *t) { return t != python.none; }) - given);
  Ref shown = tuple_of(given, n);
  if (!shown) return nullptr;
  void *arguments[] = {shown, nullptr, nullptr, nullptr};
  Ref event = PyObject_VectorcallDict(p.record, arguments, 1, nullptr);
  arguments[0] = event;
  if (!event || !Ref(PyObject_VectorcallMethod(enter, arguments, 1, nullptr))) return nullptr;
  Ref result = run_differentiable(d, inputs, p.n_inputs, gradient);
  void *type, *value, *traceback;  // null where there is a result
  PyErr_Fetch(&type, &value, &traceback);
  std::fill_n(arguments + 1, 3, python.none);
  Ref left = PyObject_VectorcallMethod(leave, arguments, 4, nullptr);
  if (!result) PyErr_Restore(type, value, traceback);
  return left ? result.release() : nullptr;
}

// Null: Python's error is set, or, where it is not, the fallback must run.
void *run_arguments(Public &p, void **arguments) {
  Ref cast;
  if (!is_plain_call(!p.cast, arguments, p.n_inputs)) {
    if (!p.cast || !is_plain_call(true, arguments, p.n_inputs)) return nullptr;
    cast = PyObject_VectorcallDict(p.cast, arguments, p.n_inputs + p.n_attrs, nullptr);
    if (!cast || cast == python.none) return nullptr;
    for (int i = 0; i < p.n_inputs + p.n_attrs; ++i) arguments[i] = PyTuple_GetItem(cast, i);
    if (!is_plain_call(true, arguments, p.n_inputs)) return nullptr;
  }
  Refs matrices;
  if (!absorb_transposed_views(p, arguments, matrices)) return nullptr;
  const bool channels_last = has_channels_last(p, arguments);
  if (channels_last) arguments[p.layout] = p.last_layout;
  Ref bound = bind_attributes(channels_last ? *p.channels_last : p, arguments + p.n_inputs);
  if (!bound) return nullptr;
  auto *d = capsule_pointer<Differentiable>(bound);
  Refs copies;
  if (!channels_last && !copy_strided(p, *d->function->call, arguments, copies)) return nullptr;
  int gradient = wants_gradient(p, arguments);
  if (gradient < 0) return nullptr;
  if (gate.records_calls()) return run_recorded(p, *d, arguments, gradient);
  return run_differentiable(*d, arguments, p.n_inputs, gradient);
}

// As run_arguments.
void *run_plain(Public &p, void *const *given, intptr_t count, void *names) {
  void *arguments[2 * kMaxSlots];
  return sort_arguments(p, given, count, names, arguments) ? run_arguments(p, arguments) : nullptr;
}

// The size of a tensor's last axis as Python's int. Null: Python's error is set.
void *last_size(Module &m, const DLTensor &x) {
  const int64_t size = x.shape[x.ndim - 1];
  if (!m.last_int || size != m.last_size) {
    Ref made = PyLong_FromLongLong(size), old;
    if (!made) return nullptr;
    m.last_size = size, old = std::exchange(m.last_int, made.release());
  }
  return m.last_int;
}

// A parameter in the instance's own dictionary of them, borrowed; null, without an error: it has none there.
void *parameter_of(void *own, void *name) {
  static void *const parameters_name = PyUnicode_InternFromString("_parameters");
  static void *const dict_type = type_of(Ref(PyDict_New()));
  void *parameters = PyDict_GetItemWithError(own, parameters_name);
  void *found = parameters && type_of(parameters) == dict_type ? PyDict_GetItemWithError(parameters, name) : nullptr;
  if (!found) PyErr_Clear();
  return found;
}

bool is_float(const DLTensor &t, int bits) { return (t.code == 2 || t.code == 4) && t.bits <= bits; }

// Whether a parameter is a plain tensor of a dtype that m says beside that of x, or absent. Autocast gives those of a
// function of images one dtype.
bool is_parameter(const Module &m, const DLTensor &x, void *object) {
  DLTensor t;
  if (object == python.none) return true;
  if (!is_plain(object)) return false;
  if (torch.exchange->read(object, &t)) return PyErr_Clear(), false;
  if (t.code == x.code && t.bits == x.bits) return true;
  if (m.image_bits) return is_float(x, 32) && is_float(t, 32) && !gate.plain_thread(false);
  return m.widens && t.code == 2 && t.bits == 32 && x.bits == 16;
}

// Whether it is a plain tensor of the dtype and shape of x that a backward may keep.
bool is_like(const DLTensor &x, void *object) {
  DLTensor t;
  if (!is_plain(object) || (gate.records_gradients() && gate.made_in_inference(object))) return false;
  if (torch.exchange->read(object, &t)) return PyErr_Clear(), false;
  return same_spec(x, t);
}

// Whether x has the dtype and the rows of a product that is served.
bool is_large_enough(const Module &m, const DLTensor &x) {
  const int64_t columns = std::max<int64_t>(x.shape[x.ndim - 1], 1);
  return is_float(x, m.product_bits) && Layout(x).size / columns >= m.fewest_rows;
}

// The arguments of the function in a call of a module. `kept` owns them, because another thread may exchange a
// parameter. False: the call is left to Python, without an error.
bool module_arguments(Module &m, void *self, void *given, void *second, void **arguments, Refs &kept) {
  DLTensor x;
  if (type_of(self) != m.type || !is_plain(given)) return false;
  Ref own = PyObject_GenericGetDict(self, nullptr);
  if (!own || torch.exchange->read(given, &x)) return PyErr_Clear(), false;
  if (x.ndim < 1 || x.ndim > kMaxNdim) return false;
  // a backward may not keep it, where it may keep what the original's operators make of it
  if (gate.records_gradients() && gate.made_in_inference(given)) return false;
  if (m.wide_in_autocast && x.bits == 16 && !gate.plain_thread(false)) return false;
  if (m.held && PyDict_GetItemWithError(own, m.held_name) != m.held) return false;
  if (m.product_bits && !is_large_enough(m, x)) return false;
  for (int i = 0; i < m.function->n_inputs + m.function->n_attrs; ++i) {
    void *&argument = arguments[i] = m.values[i];
    switch (m.sources[i]) {
      case 'x':
        argument = given;
        break;
      case 'r':
        argument = second && is_like(x, second) ? second : nullptr;
        second = nullptr;
        break;
      case 'n':
        argument = last_size(m, x);
        break;
      case 'f':
        argument = PyObject_VectorcallDict(m.values[i], nullptr, 0, nullptr);
        if (!argument) return PyErr_Clear(), false;
        kept.keep(Ref(argument));
        continue;
      case 'a':
        argument = PyDict_GetItemWithError(own, m.values[i]);
        if (argument == python.none && x.bits == 16) return false;  // torch's epsilon is that of the dtype
        break;
      case 'p':
        if (PyDict_GetItemWithError(own, m.values[i])) return false;
        argument = parameter_of(own, m.values[i]);
        if (argument && !is_parameter(m, x, argument)) return false;
    }
    if (!argument) return PyErr_Clear(), false;
    Py_IncRef(argument), kept.keep(argument);
  }
  return !second;  // no argument is the second: the original refuses it
}

bool is_in_training(void *module) {
  static void *const training = PyUnicode_InternFromString("training"), *const yes = PyBool_FromLong(1);
  Ref own = PyObject_GenericGetDict(module, nullptr);
  if (!own) return PyErr_Clear(), false;
  return PyDict_GetItemWithError(own, training) == yes;
}

// Whether a product is the original's. If sizes are multiples of 8, torch's kernels are as fast as those here, but
// torch records four nodes: such a product is served in training.
bool is_originals_product(const Module &m, void *self, const DLTensor &x) {
  static void *const weight_name = PyUnicode_InternFromString("weight");
  static void *const requires_grad = PyUnicode_InternFromString("requires_grad");
  if (x.device_type != m.device || x.ndim < 1) return true;
  DLTensor w;
  Ref own = PyObject_GenericGetDict(self, nullptr);
  if (!own) return PyErr_Clear(), false;
  void *weight = parameter_of(own, weight_name);
  if (!weight || !is_plain(weight)) return false;
  if (torch.exchange->read(weight, &w)) return PyErr_Clear(), false;
  const Layout layout(w);
  if (w.ndim != 2 || x.shape[x.ndim - 1] != w.shape[1]) return true;
  if (w.shape[0] % 8 || w.shape[1] % 8) return layout.size < m.uneven_weight;
  const Layout rows(x);
  // of a frozen weight torch saves no x for a backward
  if (is_true(PyObject_GetAttr(weight, requires_grad)) != 1) return PyErr_Clear(), true;
  return !layout.contiguous || !rows.contiguous || !is_large_enough(m, x) || !gate.plain_thread(false) ||
         !is_in_training(self);
}

// Whether a call of a function of images is the original's. Of many channels, calls in training alone were measured.
// Where image and weight are NCHW, torch's convolutions of 16 bits without groups take as long; under autocast torch
// casts a weight once, and calls here cost the host more.
bool is_originals_image(const Module &m, void *self, const DLTensor &x) {
  static void *const groups = PyUnicode_InternFromString("groups");
  static void *const weight = PyUnicode_InternFromString("weight");
  if (x.device_type != m.device || x.ndim != 4 || x.bits > m.image_bits || x.shape[2] * x.shape[3] == 1) return true;
  if (x.shape[1] <= m.few_channels) return false;
  if (!is_in_training(self)) return true;
  const bool autocasts = !gate.plain_thread(false);
  if (!autocasts && (x.bits > 16 || !Layout(x).contiguous)) return false;
  DLTensor w;
  Ref own = PyObject_GenericGetDict(self, nullptr);
  void *const found = own ? PyDict_GetItemWithError(own, groups) : nullptr;
  const bool is_one = found && PyLong_AsLong(found) == 1;
  void *const tensor = is_one && !autocasts ? parameter_of(own, weight) : nullptr;
  const bool reads = tensor && is_plain(tensor) && !torch.exchange->read(tensor, &w);
  return PyErr_Clear(), is_one && !(reads && !Layout(w).contiguous);
}

// Whether the original's forward serves a call without further questions. What decides is the same with and without a
// gradient recorded: a checkpoint computes a forward twice.
bool is_originals(const Module &m, void *self, void *given) {
  DLTensor x;
  const bool asks = m.reads_contiguous || m.elements || m.wide_in_autocast || m.image_bits;
  if (!asks || type_of(self) != m.type || !is_plain(given)) return false;
  if (torch.exchange->read(given, &x)) return PyErr_Clear(), false;
  if (m.image_bits) return is_originals_image(m, self, x);
  if (m.product_bits) return is_originals_product(m, self, x);
  if (m.wide_in_autocast && x.bits == 16 && gate.plain_thread(true) && !gate.plain_thread(false)) return true;
  const Layout layout(x);
  if (m.reads_contiguous && !layout.contiguous) return true;
  if (x.device_type != m.device || layout.size >= m.elements) return false;
  const int64_t columns = x.ndim ? std::max<int64_t>(x.shape[x.ndim - 1], 1) : 1;
  return layout.size / columns < m.rows && is_in_training(self);
}

// None: the call is left to Python; False: to the original's forward. Null: Python's error is set. `second`: null, or a
// second argument, of a norm of both's sum: where the norm is the original's, the sum is Python's.
void *run_module(Module &m, void *self, void *given, void *second) {
  if (is_originals(m, self, given)) return second ? finish(kOk) : PyBool_FromLong(0);
  error_is_ours = false;
  void *arguments[2 * kMaxSlots];
  Refs kept;
  if (module_arguments(m, self, given, second, arguments, kept)) {
    if (void *result = run_arguments(*m.function, arguments)) return result;
    if (!must_fall_back()) return nullptr;
  }
  return finish(kOk);
}

// Whether a call of a module is its class's forward, and nothing more: it has no hooks, and `hooks` are none.
bool is_bare(void *module, void *const *hooks) {
  static void *const forward = PyUnicode_InternFromString("forward");
  static void *const names[] = {
      PyUnicode_InternFromString("_forward_hooks"), PyUnicode_InternFromString("_forward_pre_hooks"),
      PyUnicode_InternFromString("_backward_hooks"), PyUnicode_InternFromString("_backward_pre_hooks")};
  Ref own = PyObject_GenericGetDict(module, nullptr);
  bool bare = own && !PyDict_GetItemWithError(own, forward);
  for (int i = 0; bare && i < 4; ++i) {
    void *found = PyDict_GetItemWithError(own, names[i]);
    bare = found && !PyDict_Size(found) && !PyDict_Size(hooks[i]);
  }
  PyErr_Clear();
  return bare;
}

// Whether nn.Module's `__call__` would find nothing but that forward: neither the class nor the instance has others.
bool is_called_as_known(const ModuleCall &m, void *module) {
  static void *const forward = PyUnicode_InternFromString("forward"),
                     *const call = PyUnicode_InternFromString("__call__"),
                     *const call_impl = PyUnicode_InternFromString("_call_impl"),
                     *const compiled = PyUnicode_InternFromString("_compiled_call_impl");
  if (!is_bare(module, m.hooks)) return false;
  Ref own = PyObject_GenericGetDict(module, nullptr);
  const bool known = own && !PyDict_GetItemWithError(own, compiled) && !PyDict_GetItemWithError(own, call_impl) &&
                     Ref(PyObject_GetAttr(m.original, call)) == m.ways[0] &&
                     Ref(PyObject_GetAttr(type_of(module), call_impl)) == m.ways[1] &&
                     Ref(PyObject_GetAttr(type_of(module), forward)) == m.replaced;
  PyErr_Clear();
  return known;
}

// A call of an instance of the class. None: nn.Module's `__call__` must make it. Null: Python's error is set.
void *call_module(const ModuleCall &m, void *const *given) {
  if (gate.records_calls() || !gate.plain_thread(true) || !is_called_as_known(m, given[0])) return finish(kOk);
  static void *const no = PyBool_FromLong(0);
  Ref result = run_module(*m.module, given[0], given[1], nullptr);
  return result == no ? PyObject_VectorcallDict(m.forward, given, 2, nullptr) : result.release();
}

// Nothing is recorded: the compiler has made the backward too. Autocast has been traced.
void *run_compiled(const Compiled &c, void *const *inputs, intptr_t count) {
  error_is_ours = false;
  if (!gate.records_calls() && is_plain_call(true, inputs, static_cast<int>(count)))
    if (void *result = run_function(*c.function, nullptr, inputs, count)) return result;
  return must_fall_back() ? PyObject_VectorcallDict(c.fallback, inputs, count, nullptr) : nullptr;
}

void *run_public(Public &p, void *const *given, intptr_t count, void *names) {
  error_is_ours = false;
  if (void *result = run_plain(p, given, count, names)) return result;
  if (!must_fall_back()) return nullptr;
  Ref keywords = PyDict_New();
  for (int i = 0, n = names ? PyTuple_Size(names) : 0; keywords && i < n; ++i)
    if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), given[count + i])) return nullptr;
  return keywords ? PyObject_VectorcallDict(p.fallback, given, count, keywords) : nullptr;
}

}  // namespace

// ------------------------------------------------------------------------------------------- calls without a frame

// A Python function that only forwards to a builtin is called without its frame, which would take 0.2 to 0.3 us: 13 %
// of add, 5 to 11 % of other operators (benchmarks/call_overhead.py without gradients, CPython 3.12). CPython has
// PyFunction_SetVectorcall since 3.12. The functions with an underscore are private; without them frames stay.
using Vectorcall = void *(void *callable, void *const *args, size_t n, void *names);
WEAK void PyFunction_SetVectorcall(void *function, Vectorcall *vectorcall);
WEAK Vectorcall *PyVectorcall_Function(void *callable);
WEAK void *PyInterpreterState_Get();
WEAK void *_PyInterpreterState_GetEvalFrameFunc(void *interpreter);
WEAK void *_PyEval_EvalFrameDefault(void *thread, void *frame, int throws);

namespace {

std::unordered_map<void *, Public *> installed;            // by Python function
std::unordered_map<void *, ModuleCall *> installed_calls;  // by `__call__` of a replaced module's class
Vectorcall *call_frame;                                    // CPython's own

constexpr size_t kArgumentsOffset = size_t{1} << (8 * sizeof(size_t) - 1);  // PY_VECTORCALL_ARGUMENTS_OFFSET

// torch.compile evaluates frames itself, and must be given one.
bool needs_frame() {
  auto *evaluate = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
  return evaluate != reinterpret_cast<void *>(_PyEval_EvalFrameDefault);
}

void *call_without_frame(void *function, void *const *given, size_t count, void *names) {
  if (needs_frame()) return call_frame(function, given, count, names);
  return run_public(*installed.find(function)->second, given, count & ~kArgumentsOffset, names);
}

void *call_module_without_frame(void *function, void *const *given, size_t count, void *names) {
  if ((count & ~kArgumentsOffset) == 2 && !names && !needs_frame()) {
    Ref result = call_module(*installed_calls.find(function)->second, given);
    if (result != python.none) return result.release();
  }
  return call_frame(function, given, count, names);
}

int install(void *function, Vectorcall *call) {
  if (!PyFunction_SetVectorcall || !_PyInterpreterState_GetEvalFrameFunc || !_PyEval_EvalFrameDefault) return 0;
  call_frame = PyVectorcall_Function(function);
  return PyFunction_SetVectorcall(function, call), 1;
}

}  // namespace

// `capsule`: of the builtin that `function` forwards to. 0: this interpreter makes a frame of every call.
AOT_API int aot_torch_install_vectorcall(void *function, void *capsule) {
  installed[function] = capsule_pointer<Public>(capsule);
  return install(function, call_without_frame);
}

// `function`: the `__call__` of a replaced module's class, which calls nn.Module's; `capsule`: of a ModuleCall.
AOT_API int aot_torch_install_call(void *function, void *capsule) {
  installed_calls[function] = capsule_pointer<ModuleCall>(capsule);
  return install(function, call_module_without_frame);
}

// ------------------------------------------------------------------------------------------------------------ set-up

// The structs that frontends/torch/call.py mirrors. A change of one of them raises the version here and there.
AOT_API const char *aot_torch_structs() {
  static const std::string text =
      "version 20" +
      AOT_DESCRIBE(GateFacts, tensor_keys, autocast_keys, inference, impl_offset, key_offset, forward_ad, level,
                   no_level) +
      AOT_DESCRIBE(Torch, exchange, types, size_type, empty_like, gate) +
      AOT_DESCRIBE(Function, call, prototype, has_prototypes, equal, always, residuals, scratch, keep_from, n_returned,
                   n_saved, saved, instead, saved_for, channels_last, none_for_unread, hooks, make_prototypes,
                   prototypes) +
      AOT_DESCRIBE(Backward, function, n_grads, n_inputs, source, gradient, fallback, over_output, over_input,
                   over_from, may_overwrite, drop_inputs) +
      AOT_DESCRIBE(Differentiable, function, apply, last_use) + AOT_DESCRIBE(Compiled, function, fallback) +
      AOT_DESCRIBE(Public, n_inputs, n_attrs, n_parameters, position, names, defaults, n_transposable, transposable,
                   transposes, kinds, images, layout, most_axes, first_layout, last_layout, copies, channels_last, cast,
                   constants, most_bound, clock, bind, bound, last_attrs, last, record, fallback) +
      AOT_DESCRIBE(Module, function, type, sources, values, widens, wide_in_autocast, reads_contiguous, device,
                   elements, rows, product_bits, uneven_weight, fewest_rows, image_bits, few_channels, held_name, held,
                   last_size, last_int) +
      AOT_DESCRIBE(ModuleCall, module, original, ways, forward, replaced, hooks);
  return text.c_str();
}

// From here on torch's tensors are read. 0: the gate does not open.
AOT_API int aot_torch_setup(const Torch *facts) {
  if (!gate.open(facts->gate)) return 0;
  torch = *facts;
  dlpack = {torch.exchange, {torch.types[0], torch.types[1]}, [](void *tensor) { return gate.plain_tensor(tensor); }};
  tensors.open(torch.types[0]);
  return 1;
}

// ------------------------------------------------------------------------------------------------------- the builtins

// One object for each input; returns the output, or a tuple of them.
AOT_API void *aot_torch_run(void *capsule, void *const *inputs, intptr_t count) {
  return run_function(*capsule_pointer<Function>(capsule), nullptr, inputs, count);
}

// As aot_torch_run, in code of torch.compile's.
AOT_API void *aot_torch_compiled(void *capsule, void *const *inputs, intptr_t count) {
  return run_compiled(*capsule_pointer<Compiled>(capsule), inputs, count);
}

// The forward of a torch.autograd.Function: its context, then one object for each input.
AOT_API void *aot_torch_forward(void *capsule, void *const *objects, intptr_t count) {
  return run_function(*capsule_pointer<Function>(capsule), objects[0], objects + 1, count - 1);
}

// Its backward: the context, then the gradient of each output.
AOT_API void *aot_torch_backward(void *capsule, void *const *objects, intptr_t count) {
  auto *b = capsule_pointer<Backward>(capsule);
  if (count != 1 + b->n_grads) return finish(b->function->call->wrong_count(count, 1 + b->n_grads));
  return run_backward(*b, objects[0], objects + 1).release();
}

// A public function, with Python's calling convention.
AOT_API void *aot_torch_public(void *capsule, void *const *arguments, intptr_t count, void *names) {
  return run_public(*capsule_pointer<Public>(capsule), arguments, count, names);
}

// A call of a replaced module: the module, then its one argument. None: the call is left to Python; False: to the
// original's forward. With a second argument, of the norm of both's sum.
AOT_API void *aot_torch_module(void *capsule, void *const *objects, intptr_t count) {
  if (count != 2 && count != 3) return finish(kOk);
  return run_module(*capsule_pointer<Module>(capsule), objects[0], objects[1], count == 3 ? objects[2] : nullptr);
}

// is_bare of a module; the capsule has the four dictionaries.
AOT_API void *aot_torch_bare(void *capsule, void *const *objects, intptr_t count) {
  return PyBool_FromLong(count == 1 && is_bare(objects[0], capsule_pointer<void *>(capsule)));
}

// The facts about tensors that a step of an optimizer depends on: bytes of their addresses, and of their dtypes,
// devices, shapes and strides, which are 0 for an axis of one element. None where one of them is not plain.
AOT_API void *aot_torch_facts(void *, void *const *tensors, intptr_t count) try {
  std::vector<int64_t> addresses, forms;
  for (intptr_t i = 0; i < count; ++i) {
    DLTensor t;
    if (!is_plain(tensors[i])) return finish(kOk);
    if (torch.exchange->read(tensors[i], &t)) return PyErr_Clear(), finish(kOk);
    addresses.push_back(reinterpret_cast<int64_t>(t.data) + static_cast<int64_t>(t.byte_offset));
    forms.insert(forms.end(), {t.code, t.bits, t.lanes, t.device_type, t.device_id, t.ndim});
    forms.insert(forms.end(), t.shape, t.shape + t.ndim);
    for (int k = 0; k < t.ndim; ++k) forms.push_back(t.shape[k] == 1 ? 0 : t.strides ? t.strides[k] : -1);
  }
  Ref both = PyTuple_New(2);
  for (int i = 0; both && i < 2; ++i) {
    const std::vector<int64_t> &each = i ? forms : addresses;
    void *bytes = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(each.data()), each.size() * sizeof each[0]);
    if (!bytes || PyTuple_SetItem(both, i, bytes)) return nullptr;
  }
  return both.release();
} catch (const std::bad_alloc &) {
  return finish(kOk);
}

// Whether a call on these tensors is plain, with autocast on or off.
AOT_API void *aot_torch_gate(void *, void *const *tensors, intptr_t count) {
  return PyBool_FromLong(is_plain_call(true, tensors, count));
}
