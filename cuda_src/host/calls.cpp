// The call path: an operator bound to its attributes, as METH_FASTCALL builtins of Python.
//
// aotops/call.py has CPython make builtins of the two functions at the end (PyCFunction_NewEx): one takes tensors, the
// other addresses. What a builtin is bound to is a capsule.
#include "calls.h"

#include <numeric>

using namespace aot;

namespace {

// A call with fixed shapes and dtypes, which takes addresses alone.
struct Plan {
  Device device;
  EntryFunctions functions;
  void *extra = nullptr;
  EntryArguments<kMaxSlots> arguments;  // each call has params of its own
  std::unique_ptr<int64_t[]> dims;

  ~Plan() {
    if (extra) extra_delete(extra);
  }
};

}  // namespace

// ------------------------------------------------------------------------------------------------------------ set-up

// The structs that aotops/call.py mirrors. A change of one of them raises the version here and there.
AOT_API const char *aot_call_structs() {
  static const std::string text = "version 4" +
                                  AOT_DESCRIBE(Interpreter, none, errors, int_type, float_type, bool_type, str_type,
                                               tuple_type, type_offset, head_size) +
                                  AOT_DESCRIBE(Numpy, type, n, dtypes, names) +
                                  AOT_DESCRIBE(EntryFunctions, entry, init, infer, last_error);
  return text.c_str();
}

AOT_API void aot_python_setup(const Interpreter *facts) { python = *facts; }
AOT_API void aot_python_numpy(const Numpy *facts) { numpy = *facts; }

AOT_API void *aot_extra_new(const char *attrs) { return extra_new(attrs); }
AOT_API void aot_extra_delete(void *extra) { extra_delete(extra); }

// `slots`: n_slots names; `optional`: 1 where a slot may be None; `scalars`: bit i where slot i accepts a scalar
// (CallSlot); `functions`: by Device. Null: there are too many slots, or too many that may be None.
AOT_API void *aot_call_new(const char *op, const char *attrs, int n_in, int n_slots, const char *const *slots,
                           const int *optional, uint64_t scalars, const EntryFunctions *functions) {
  auto call = std::make_unique<Call>();
  call->op = op, call->attrs = attrs, call->n_in = n_in;
  for (int i = 0; i < n_slots; ++i)
    if (!call->add_slot(slots[i], optional[i], scalars >> i & 1)) return nullptr;
  for (int d : {kCpu, kCuda}) call->functions[d] = functions[d];
  return call.release();
}

// Null, and its status: the library has no such entry, or Init refuses the attributes.
AOT_API void *aot_plan_new(const void *call, int device, uint64_t given, int n, const int *ndims, const int64_t *dims,
                           const char *const *dtypes, int *status) {
  auto *c = static_cast<const Call *>(call);
  auto plan = std::make_unique<Plan>();
  if (n > kMaxSlots) return *status = c->wrong_count(n, c->n_slots), nullptr;
  plan->device = static_cast<Device>(device), plan->functions = c->functions[device];
  *status = c->check_entry(plan->device);
  if (!*status) *status = c->new_extra(plan->device, given, &plan->extra);
  if (*status) return nullptr;
  const int64_t total = std::accumulate(ndims, ndims + n, int64_t{0});
  plan->dims.reset(new int64_t[total + 1]);
  std::copy_n(dims, total, plan->dims.get());
  int64_t *shape = plan->dims.get();
  for (int i = 0; i < n; shape += ndims[i++])
    plan->arguments.push(nullptr, ndims[i], shape, dtypes[i]);  // call.py keeps the dtypes' strings
  return plan.release();
}

AOT_API void aot_plan_delete(void *plan) { delete static_cast<Plan *>(plan); }
AOT_API void aot_plan_capsule_delete(void *capsule) { aot_plan_delete(capsule_pointer<Plan>(capsule)); }
AOT_API void aot_call_capsule_delete(void *capsule) { delete capsule_pointer<Call>(capsule); }

// The destructor of a capsule whose context is a Python object that it keeps alive.
AOT_API void aot_capsule_release(void *capsule) { Py_DecRef(PyCapsule_GetContext(capsule)); }

AOT_API int aot_plan_run(void *plan, int device_id, void *stream, void **params) {
  auto *p = static_cast<Plan *>(plan);
  return launch(p->functions, p->device, device_id, p->arguments, params, stream, p->extra);
}

// ------------------------------------------------------------------------------------------------------- the builtins

// One object for each slot: a tensor, or None.
AOT_API void *aot_call_tensors(void *capsule, void *const *objects, intptr_t count) {
  auto *call = capsule_pointer<Call>(capsule);
  if (count != call->n_slots) return finish(call->wrong_count(count, call->n_slots));
  Arguments a;
  int status = a.read(call->slots, objects, 0, call->n_slots);
  if (!status) status = a.check_overlap(call->slots, call->n_slots);
  return finish(status ? status : run_entry(*call, a));
}

// The device's number, the stream, then the address of each tensor of the plan; all are ints.
AOT_API void *aot_call_addresses(void *capsule, void *const *objects, intptr_t count) {
  auto *plan = capsule_pointer<Plan>(capsule);
  const int n = plan->arguments.n;
  if (count != n + 2)
    return finish(fail(kConventionMisused, "%d arguments given, expected %d", static_cast<int>(count), n + 2));
  void *params[kMaxSlots];
  int device_id = static_cast<int>(PyLong_AsLong(objects[0]));
  void *stream = PyLong_AsVoidPtr(objects[1]);
  for (int i = 0; i < n; ++i) params[i] = PyLong_AsVoidPtr(objects[i + 2]);
  if (PyErr_Occurred()) return nullptr;
  void *thread = PyEval_SaveThread();
  int status = aot_plan_run(plan, device_id, stream, params);
  PyEval_RestoreThread(thread);
  return finish(status);
}
