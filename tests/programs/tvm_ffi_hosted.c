// Functions of tvm-ffi in plain C: of its stable ABI, without a header, and linked with nothing of it.
#include <stdint.h>

typedef struct {
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    double number;
    void *pointer;
    const char *string;
  };
} Any;

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

enum { kFloat = 3, kTensorPointer = 7, kString = 8 };

__attribute__((weak)) void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);

static int refused(const char *kind, const char *message) {
  if (TVMFFIErrorSetRaisedFromCStr) TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

// out = alpha * x + y, in the order alpha, x, out, y.
int __tvm_ffi_axpy(void *self, const Any *args, int32_t n_args, Any *result) {
  (void)self, (void)result;
  if (n_args != 4) return refused("TypeError", "expected 4 arguments");
  if (args[0].type != kFloat) return refused("TypeError", "alpha is argument #0, expected a float");
  const Tensor *t[3];
  int64_t n = 1;
  for (int i = 0; i < 3; ++i) {
    if (args[i + 1].type != kTensorPointer) return refused("TypeError", "expected a tensor");
    t[i] = args[i + 1].pointer;
    if (t[i]->code != 2 || t[i]->bits != 32) return refused("TypeError", "expected float32");
    if (t[i]->ndim != t[0]->ndim) return refused("ValueError", "expected tensors of one shape");
    for (int k = 0; k < t[i]->ndim; ++k)
      if (t[i]->shape[k] != t[0]->shape[k]) return refused("ValueError", "expected tensors of one shape");
  }
  for (int k = 0; k < t[0]->ndim; ++k) n *= t[0]->shape[k];
  const float *x = t[0]->data, *y = t[2]->data;
  float *out = t[1]->data;
  for (int64_t i = 0; i < n; ++i) out[i] = (float)args[0].number * x[i] + y[i];
  return 0;
}

// Raises an error of the kind that is told.
int __tvm_ffi_raises(void *self, const Any *args, int32_t n_args, Any *result) {
  (void)self, (void)n_args, (void)result;
  return args[1].type == kString ? refused(args[1].string, "100% wrong") : -1;
}

int __tvm_ffi_number(void *self, const Any *args, int32_t n_args, Any *result) {
  (void)self, (void)args, (void)n_args;
  result->type = kFloat, result->number = 3;
  return 0;
}

// x *= 2, and None in the place of a second argument.
int __tvm_ffi_twice_cpu(void *self, const Any *args, int32_t n_args, Any *result) {
  (void)self, (void)result;
  if (n_args != 2 || args[1].type) return refused("TypeError", "expected None as argument #1");
  const Tensor *x = args[0].pointer;
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float *)x->data)[i] *= 2;
  return 0;
}
