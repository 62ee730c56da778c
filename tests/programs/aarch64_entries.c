/* Calls entries of the library as a program in plain C does, and compares them with the formulas in double precision.
   `make aarch64` compiles it and the library for aarch64 and runs them under qemu; make test runs it here.

       entries libaotops.so      prints what failed; the exit status is 1 then */
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int entry(int, void **, int *, int64_t **, const char **, void *, void *);
typedef int init(int *, int64_t **, const char **, void *);

static void *library;
static void *(*extra_new)(const char *);
static void (*extra_delete)(void *);
static const char *(*last_error)(void);
static int checks, failures;

typedef struct {
  void *data;
  const char *dtype;
  int ndim;
  int64_t shape[3];
} tensor;

static tensor make(void *data, const char *dtype, int ndim, int64_t a, int64_t b, int64_t c) {
  tensor t = {data, dtype, ndim, {a, b, c}};
  return t;
}
#define F32(data, ...) \
  make_f32(data, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (int64_t[]){__VA_ARGS__, 0, 0})
static tensor make_f32(float *data, int ndim, const int64_t *shape) {
  return make(data, "float32", ndim, shape[0], shape[1], shape[2]);
}

static void *symbol(const char *name) {
  void *found = dlsym(library, name);
  if (!found) printf("no symbol %s\n", name), exit(2);
  return found;
}

/* The status of an entry, called with attributes after its Init. */
static int call(const char *name, const char *attrs, int n, tensor *tensors) {
  void *params[8], *extra = extra_new(attrs);
  int ndims[8], status;
  int64_t *shapes[8];
  const char *dtypes[8];
  char initializer[64];
  for (int i = 0; i < n; ++i)
    params[i] = tensors[i].data, ndims[i] = tensors[i].ndim, shapes[i] = tensors[i].shape, dtypes[i] = tensors[i].dtype;
  snprintf(initializer, sizeof initializer, "%sInit", name);
  status = ((init *)symbol(initializer))(ndims, shapes, dtypes, extra);
  if (!status) status = ((entry *)symbol(name))(n, params, ndims, shapes, dtypes, NULL, extra);
  extra_delete(extra);
  return status;
}
#define CALL(name, attrs, ...) \
  call(name, attrs, sizeof((tensor[]){__VA_ARGS__}) / sizeof(tensor), (tensor[]){__VA_ARGS__})

static void expect(int holds, const char *format, ...) {
  va_list args;
  ++checks;
  if (holds) return;
  ++failures;
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  putchar('\n');
}

static void succeed(const char *what, int status) {
  expect(status == 0, "%s: status %d: %s", what, status, status ? last_error() : "");
}

static void compare(const char *what, const float *found, const double *wanted, int n) {
  for (int i = 0; i < n; ++i)
    if (!(fabs(found[i] - wanted[i]) <= 2e-5 * (1 + fabs(wanted[i])))) {
      expect(0, "%s: element %d is %.9g, expected %.9g", what, i, found[i], wanted[i]);
      return;
    }
  expect(1, "");
}

static float drawn(void) {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (int32_t)state / 1e9f;
}
static float *draw(int n) {
  float *x = malloc(n * sizeof *x);
  for (int i = 0; i < n; ++i) x[i] = drawn();
  return x;
}

/* ------------------------------------------------------------------------------------------------------ operators */

enum { kRows = 37, kCols = 101, kSize = kRows * kCols };

static void test_add(void) {
  float *a = draw(kSize), *b = draw(kSize), *y = draw(kSize);
  double *wanted = malloc(kSize * sizeof *wanted);
  for (int i = 0; i < kSize; ++i) wanted[i] = (double)a[i] + b[i];
  succeed("add", CALL("aot_add_cpu", "", F32(a, kRows, kCols), F32(b, kRows, kCols), F32(y, kRows, kCols)));
  compare("add", y, wanted, kSize);
}

static double gelu(double x) { return x * erfc(-x * M_SQRT1_2) / 2; }

static void test_gelu(int n) {
  float *x = draw(n), *y = draw(n);
  double *wanted = malloc(n * sizeof *wanted);
  for (int i = 0; i < n; ++i) wanted[i] = gelu(x[i]);
  succeed("gelu", CALL("aot_gelu_cpu", "approximate=none", F32(x, n), F32(y, n)));
  compare("gelu", y, wanted, n);
}

static void test_gelu_backward(void) {
  float *x = draw(kSize), *dy = draw(kSize), *dx = draw(kSize);
  double *wanted = malloc(kSize * sizeof *wanted);
  for (int i = 0; i < kSize; ++i) {
    const double t = x[i], slope = erfc(-t * M_SQRT1_2) / 2 + t * exp(-t * t / 2) / sqrt(2 * M_PI);
    wanted[i] = dy[i] * slope;
  }
  succeed("gelu_backward", CALL("aot_gelu_backward_cpu", "", F32(dy, kSize), F32(x, kSize), F32(dx, kSize)));
  compare("gelu_backward", dx, wanted, kSize);
}

/* Every finite float16 is doubled exactly, until it overflows. bfloat16 likewise. */
static void test_16_bits(const char *dtype, int exponent_bits) {
  enum { n = 1 << 16 };
  static uint16_t x[n], y[n];
  const int mantissa = 15 - exponent_bits, top = (1 << exponent_bits) - 1;
  tensor t = make(x, dtype, 1, n, 0, 0), sum = make(y, dtype, 1, n, 0, 0);
  for (int i = 0; i < n; ++i) x[i] = (uint16_t)i;
  succeed(dtype, CALL("aot_add_cpu", "", t, t, sum));
  for (int i = 0; i < n; ++i) {
    const int exponent = i >> mantissa & top, sign = i & 0x8000, fraction = i & ((1 << mantissa) - 1);
    int wanted = exponent ? i + (1 << mantissa) : sign | fraction << 1;
    if (exponent >= top - 1) wanted = sign | top << mantissa;
    if (exponent == top && fraction) continue; /* NaN */
    if (y[i] != wanted) {
      expect(0, "add in %s: 0x%04x doubled is 0x%04x, expected 0x%04x", dtype, i, y[i], wanted);
      return;
    }
  }
  expect(1, "");
}

static void test_layer_norm(void) {
  const double eps = 1e-5;
  float *x = draw(kSize), *weight = draw(kCols), *bias = draw(kCols), *y = draw(kSize);
  double *wanted = malloc(kSize * sizeof *wanted);
  for (int i = 0; i < kRows; ++i) {
    double mean = 0, variance = 0;
    for (int j = 0; j < kCols; ++j) mean += x[i * kCols + j] / (double)kCols;
    for (int j = 0; j < kCols; ++j) variance += pow(x[i * kCols + j] - mean, 2) / kCols;
    for (int j = 0; j < kCols; ++j)
      wanted[i * kCols + j] = (x[i * kCols + j] - mean) / sqrt(variance + eps) * weight[j] + bias[j];
  }
  succeed("layer_norm", CALL("aot_layer_norm_cpu", "normalized_shape=101\neps=1e-5\noutputs=1", F32(x, kRows, kCols),
                             F32(weight, kCols), F32(bias, kCols), F32(y, kRows, kCols)));
  compare("layer_norm", y, wanted, kSize);
}

static void test_softmax(void) {
  float *x = draw(kSize), *y = draw(kSize);
  double *wanted = malloc(kSize * sizeof *wanted);
  for (int j = 0; j < kCols; ++j) { /* along the first axis */
    double sum = 0;
    for (int i = 0; i < kRows; ++i) sum += exp(x[i * kCols + j]);
    for (int i = 0; i < kRows; ++i) wanted[i * kCols + j] = exp(x[i * kCols + j]) / sum;
  }
  succeed("softmax", CALL("aot_softmax_cpu", "dim=0", F32(x, kRows, kCols), F32(y, kRows, kCols)));
  compare("softmax", y, wanted, kSize);
}

static void test_matmul(int m, int k, int n) {
  float *a = draw(m * k), *b = draw(n * k), *y = draw(m * n);
  double *wanted = calloc(m * n, sizeof *wanted);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int l = 0; l < k; ++l) wanted[i * n + j] += (double)a[i * k + l] * b[j * k + l];
  succeed("matmul", CALL("aot_matmul_cpu", "transpose_b=1\noutputs=1", F32(a, m, k), F32(b, n, k), F32(y, m, n)));
  compare("matmul", y, wanted, m * n);
}

static void test_cross_entropy(void) {
  float *x = draw(kSize), *slope = draw(kSize), *dx = draw(kSize), loss, dy = 1, work[4 + kRows];
  int64_t target[kRows];
  double wanted = 0, *gradient = malloc(kSize * sizeof *gradient);
  for (int i = 0; i < kRows; ++i) {
    double sum = 0;
    target[i] = (i * 7) % kCols;
    for (int j = 0; j < kCols; ++j) sum += exp(x[i * kCols + j]);
    for (int j = 0; j < kCols; ++j) gradient[i * kCols + j] = (exp(x[i * kCols + j]) / sum - (j == target[i])) / kRows;
    wanted += (log(sum) - x[i * kCols + target[i]]) / kRows;
  }
  tensor t = make(target, "int64", 1, kRows, 0, 0), y = make(&loss, "float32", 0, 0, 0, 0),
         scale = make(&dy, "float32", 0, 0, 0, 0);
  succeed("cross_entropy", CALL("aot_cross_entropy_cpu", "reduction=mean\nignore_index=-100\nlabel_smoothing=0\ninputs=3",
                                F32(x, kRows, kCols), t, y, F32(slope, kRows, kCols), F32(work, 4 + kRows)));
  compare("cross_entropy", &loss, &wanted, 1);
  succeed("cross_entropy_backward", CALL("aot_cross_entropy_backward_cpu", "reduction=mean\ninputs=23\noutputs=1", scale,
                                         F32(x, kRows, kCols), t, F32(slope, kRows, kCols), F32(dx, kRows, kCols)));
  compare("cross_entropy_backward", dx, gradient, kSize);
}

/* --------------------------------------------------------------------------------------------------------- errors */

static void refuse(int status, int wanted, const char *text) {
  const char *message = status ? last_error() : "";
  expect(status == wanted && strstr(message, text), "status %d, '%s', expected %d, '%s'", status, message, wanted,
         text);
}

static void test_errors(void) {
  float x[6] = {0}, y[6];
  int64_t far = 3;
  tensor wrong = make(x, "int64", 1, 6, 0, 0), target = make(&far, "int64", 1, 1, 0, 0);
  refuse(CALL("aot_add_cpu", "", F32(x, 2, 3), F32(x, 6), F32(y, 6)), 1, "add: ");
  refuse(CALL("aot_gelu_cpu", "", wrong, F32(y, 6)), 2, "gelu: x has dtype int64, expected float16");
  refuse(CALL("aot_gelu_cpu", "approximate=cubic", F32(x, 6), F32(y, 6)), 1, "gelu: ");
  refuse(CALL("aot_softmax_cpu", "dim=2", F32(x, 2, 3), F32(y, 2, 3)), 1, "softmax: dim is 2, expected an axis of x");
  refuse(CALL("aot_gelu_cpu", "", F32(x, 6)), 5, "gelu: ");
  refuse(CALL("aot_cross_entropy_cpu", "reduction=none\ninputs=3\noutputs=1", F32(x, 1, 3), target, F32(y, 1)), 1,
         "cross_entropy: ");
}

int main(int argc, char **argv) {
  if (argc != 2) return puts("usage: entries libaotops.so"), 2;
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return printf("%s\n", dlerror()), 2;
  *(void **)&extra_new = symbol("aot_extra_new");
  *(void **)&extra_delete = symbol("aot_extra_delete");
  *(void **)&last_error = symbol("aot_last_error");
  test_add();
  test_gelu(kSize);
  test_gelu(1 << 18); /* on several threads */
  test_gelu_backward();
  test_16_bits("float16", 5);
  test_16_bits("bfloat16", 8);
  test_layer_norm();
  test_softmax();
  test_matmul(5, 7, 3);
  test_matmul(70, 130, 90);
  test_cross_entropy();
  test_errors();
  printf("%d checks, %d failed; threads: %s\n", checks, failures,
         ((const char *(*)(void))symbol("aot_thread_runtime"))());
  return failures != 0;
}
