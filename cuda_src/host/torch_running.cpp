// The running statistics of a batch norm's module as a builtin (frontends/torch/running.py).
#include "operators/batch_norm/running.h"

#include "device.h"
#include "gate.h"
#include "tensors.h"

using namespace aot;

namespace {

template <typename T>
int update(const RunningStatistics &call) {
  const T *mean = static_cast<const T *>(call.mean), *var = static_cast<const T *>(call.var);
  T *running_mean = static_cast<T *>(call.running_mean), *running_var = static_cast<T *>(call.running_var);
  const T share = static_cast<T>(call.share), of_var = static_cast<T>(call.share * call.unbiased());
  if (call.batches) ++*call.batches;
  for (int64_t i = 0; i < call.channels; ++i) {
    running_mean[i] = (1 - share) * running_mean[i] + share * mean[i];
    running_var[i] = (1 - share) * running_var[i] + of_var * var[i];
  }
  return kOk;
}

bool is_like(const DLTensor &a, const DLTensor &b) {
  return a.ndim == 1 && a.shape[0] == b.shape[0] && a.code == b.code && a.bits == b.bits && Layout(a).contiguous;
}

// Whether torch's elementwise operators write to a plain tensor: not to one that requires a gradient, nor, outside of
// inference mode, to one that was made there, which is left to Python inside of it too.
bool may_write(void *tensor) {
  static void *const requires_grad = PyUnicode_InternFromString("requires_grad");
  if (gate.made_in_inference(tensor)) return false;
  const int wants = is_true(PyObject_GetAttr(tensor, requires_grad));
  if (wants < 0) PyErr_Clear();
  return wants == 0;
}

// False: Python must do it.
bool read(void *const *objects, RunningStatistics *call, int *device) {
  DLTensor t[5] = {};  // mean, var, running_mean, running_var, num_batches_tracked, which may be absent
  const int n = objects[4] == python.none ? 4 : 5;
  if (!gate.plain_thread(true)) return false;
  for (int i = 0; i < n; ++i) {
    if (!is_dlpack(objects[i]) || !gate.plain_tensor(objects[i])) return false;
    if (i > 1 && !may_write(objects[i])) return false;
    if (dlpack.exchange->read(objects[i], &t[i])) return PyErr_Clear(), false;
    if (t[i].device_type != t[0].device_type || t[i].device_id != t[0].device_id || t[i].lanes != 1) return false;
    if (!t[i].data) return false;
    t[i].data = static_cast<char *>(t[i].data) + t[i].byte_offset;
  }
  const DType wide = parse_dtype(dlpack_dtype(t[0])), dtype = parse_dtype(dlpack_dtype(t[2]));
  const bool is_cpu = t[0].device_type == kDLCpu;
  if (!is_cpu && (t[0].device_type != kDLCuda || !aot_running_statistics_cuda)) return false;
  if (t[0].ndim != 1 || !is_like(t[0], t[0]) || !is_like(t[1], t[0]) || !is_like(t[3], t[2])) return false;
  if (!is_like(t[2], t[3]) || t[2].shape[0] != t[0].shape[0]) return false;
  if (n == 5 && (t[4].code != 0 || t[4].bits != 64 || t[4].ndim != 0)) return false;
  const bool is_half = dtype == DType::float16 || dtype == DType::bfloat16;
  const bool on_cpu = (wide == DType::float32 || wide == DType::float64) && dtype == wide;
  const bool on_gpu = wide == DType::float32 && (dtype == wide || is_half);
  if (is_cpu ? !on_cpu : !on_gpu) return false;
  *call = {t[0].data,     t[1].data, t[2].data, t[3].data, static_cast<int64_t *>(t[4].data),
           t[0].shape[0], 0,         0,         dtype,     nullptr};
  if (!is_cpu && dlpack.exchange->current_stream(kDLCuda, t[0].device_id, &call->stream)) return PyErr_Clear(), false;
  *device = is_cpu ? -1 : t[0].device_id;
  return true;
}

int run(const RunningStatistics &call, int device) {
  if (device < 0) return call.dtype == DType::float64 ? update<double>(call) : update<float>(call);
  DeviceGuard guard;
  AOT_TRY(guard.enter(device));
  return aot_running_statistics_cuda(&call);
}

}  // namespace

// Updates the running statistics, but not their tensors' versions. The arguments are the tensors mean, var,
// running_mean, running_var and num_batches_tracked, which may be None, then the share and the number of terms. False:
// nothing was done, and torch's operators must.
AOT_API void *aot_torch_running(void *, void *const *objects, intptr_t count) {
  RunningStatistics call;
  int device;
  if (count != 7 || type_of(objects[5]) != python.float_type || !read(objects, &call, &device))
    return PyBool_FromLong(0);
  call.share = PyFloat_AsDouble(objects[5]), call.terms = PyLong_AsLong(objects[6]);
  if (PyErr_Occurred()) return nullptr;
  if (call.terms < 2) return PyBool_FromLong(0);
  if (const int status = run(call, device)) return finish(status);
  return PyBool_FromLong(1);
}
