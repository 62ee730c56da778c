// Kernels of y = x * x and its gradient, dx = 2 * x * dy, each with one fault that aotops.testing.check must find.
//
// Written to the calling convention without its headers, so that it compiles in a second.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace {

thread_local const char *message = "";
thread_local int axes;  // of the call at hand

int refuse(const char *text) {
  message = text;
  return 2;
}

bool is(const char *dtype, const char *name) { return !std::strcmp(dtype, name); }

// The output is like the last input.
int infer(int n, const int *ndims, int64_t *const *shapes, const char *const *dtypes, int *out_ndims,
          int64_t *out_shapes, const char **out_dtypes) {
  if (!is(dtypes[0], "float32") && !is(dtypes[0], "float64"))
    return refuse("faulty: x has another dtype, expected float32 or float64");
  out_ndims[0] = ndims[n - 1], out_dtypes[0] = is(dtypes[0], "float32") ? "float32" : "float64";
  for (int i = 0; i < ndims[n - 1]; ++i) out_shapes[i] = shapes[n - 1][i];
  return 0;
}

int64_t size_of(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

template <class T>
void square(const T *x, T *y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * x[i];
}

struct Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
  }
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    for (int64_t i = 0; i < n; ++i) dx[i] = 2 * x[i] * dy[i];
  }
};

struct WrongForOddSizes : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (n > 3 && n % 2) y[n - 1] = x[n - 1];
  }
};

struct WrongGradient : Correct {
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    for (int64_t i = 0; i < n; ++i) dx[i] = x[i] * dy[i];
  }
};

struct LastUnwritten : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n > 4 ? n - 1 : n);
  }
};

struct WritesPastTheEnd : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (n > 4) *const_cast<volatile T *>(y + n) = 0;
  }
};

struct ReadsBeforeTheStart : Correct {
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    Correct::backward(dy, x, dx, n);
    if (n) (void)*const_cast<const volatile T *>(x - 1);
  }
};

struct CountsCalls : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    static std::atomic<int> calls{0};
    square(x, y, n);
    if (n) y[0] += (calls++ % 2) * y[0] * std::numeric_limits<T>::epsilon();
  }
};

struct SharesScratch : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    static std::atomic<T> first;
    square(x, y, n);
    if (!n) return;
    first = x[0];
    usleep(1000);
    y[0] = first * first;
  }
};

struct SwallowsNaN : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] == x[i] ? x[i] * x[i] : 0;
  }
};

struct WritesItsInput : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (n) x[0] = 0;
  }
};

struct WrongIfMisaligned : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (n && reinterpret_cast<uintptr_t>(x) % 16) y[0] = 0;
  }
};

struct SwallowsNaNOfItsGradient : Correct {
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] == dy[i] ? 2 * x[i] * dy[i] : 0;
  }
};

struct SwallowsNaNInItsGradient : Correct {
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    for (int64_t i = 0; i < n; ++i) dx[i] = x[i] == x[i] ? 2 * x[i] * dy[i] : 0;
  }
};

// A compiler may not keep a volatile variable in a register.
struct SharesANumber : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    static volatile T last;
    for (int64_t i = 0; i < n; ++i) {
      last = x[i];
      y[i] = last * x[i];
    }
  }
};

struct SharesAnArray : Correct {
  static constexpr int64_t kSize = 65536;
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    static volatile T twice[kSize];
    for (int64_t start = 0; start < n; start += kSize) {
      const int64_t m = n - start < kSize ? n - start : kSize;
      for (int64_t i = 0; i < m; ++i) twice[i] = 2 * x[start + i];
      for (int64_t i = 0; i < m; ++i) dx[start + i] = twice[i] * dy[start + i];
    }
  }
};

// Right: a lock lets one call at a time use the array.
struct LocksAnArray : Correct {
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    static std::atomic_flag busy = ATOMIC_FLAG_INIT;
    while (busy.test_and_set()) usleep(10);
    SharesAnArray::backward(dy, x, dx, n);
    busy.clear();
  }
};

struct WrongIfOutputMisaligned : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (n && reinterpret_cast<uintptr_t>(y) % 16 == 4) y[0] = 0;
  }
};

struct WrongIfGradientMisaligned : Correct {
  template <class T>
  static void backward(const T *dy, const T *x, T *dx, int64_t n) {
    Correct::backward(dy, x, dx, n);
    if (n && reinterpret_cast<uintptr_t>(dx) % 32 == 8) dx[0] = 0;
  }
};

struct RestoresItsInput : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (!n) return;
    const T before = x[0];
    *const_cast<volatile T *>(x) = 0;
    *const_cast<volatile T *>(x) = before;
  }
};

struct Leaks : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    auto *kept = static_cast<volatile char *>(std::malloc(8 * n));
    if (n && kept) kept[0] = 0;
    square(x, y, n);
  }
};

struct CountsInInts : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    const int count = static_cast<int>(n);
    for (int i = 0; i < count; ++i) y[i] = x[i] * x[i];
  }
};

// With four axes, the last element is wrong.
struct WrongForFourAxes : Correct {
  template <class T>
  static void forward(T *x, T *y, int64_t n) {
    square(x, y, n);
    if (n && axes == 4) y[n - 1] = 0;
  }
};

template <class Kernels>
int forward(void **params, int *ndims, int64_t **shapes, const char **dtypes) {
  const int64_t n = size_of(ndims[0], shapes[0]);
  if (!is(dtypes[0], "float32") && !is(dtypes[0], "float64")) return refuse("faulty: no kernel for this dtype");
  axes = ndims[0];
  if (is(dtypes[0], "float32")) Kernels::forward((float *)params[0], (float *)params[1], n);
  else Kernels::forward((double *)params[0], (double *)params[1], n);
  return 0;
}

template <class Kernels>
int backward(void **params, int *ndims, int64_t **shapes, const char **dtypes) {
  const int64_t n = size_of(ndims[0], shapes[0]);
  if (!is(dtypes[0], "float32") && !is(dtypes[0], "float64")) return refuse("faulty: no kernel for this dtype");
  if (is(dtypes[0], "float32")) Kernels::backward((float *)params[0], (float *)params[1], (float *)params[2], n);
  else Kernels::backward((double *)params[0], (double *)params[1], (double *)params[2], n);
  return 0;
}

// Two outputs: the squares, and bools, whether x is positive.
int squares_and_signs(void **params, int *ndims, int64_t **shapes, const char **dtypes) {
  const int64_t n = size_of(ndims[0], shapes[0]);
  if (!is(dtypes[0], "float32")) return refuse("faulty: no kernel for this dtype");
  const auto *x = static_cast<const float *>(params[0]);
  square(x, static_cast<float *>(params[1]), n);
  for (int64_t i = 0; i < n; ++i) static_cast<bool *>(params[2])[i] = x[i] > 0;
  return 0;
}

// y[i] = table[index[i]]; an index that is out of range counts from the beginning.
int take(void **params, int *ndims, int64_t **shapes, const char **dtypes) {
  const int64_t n = size_of(ndims[1], shapes[1]), length = size_of(ndims[0], shapes[0]);
  if (!is(dtypes[0], "float32")) return refuse("faulty: no kernel for this dtype");
  const auto *table = static_cast<const float *>(params[0]);
  const auto *index = static_cast<const int64_t *>(params[1]);
  for (int64_t i = 0; i < n; ++i) static_cast<float *>(params[2])[i] = length ? table[index[i] % length] : 0;
  return 0;
}

int refuses(void **, int *, int64_t **, const char **) { return refuse("faulty: this kernel takes nothing"); }

}  // namespace

extern "C" const char *aot_last_error() { return message; }

#define ENTRY(symbol, call)                                                                                        \
  extern "C" int symbol##Init(int *, int64_t **, const char **, void *) { return 0; }                              \
  extern "C" int symbol##Infer(int n, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *, \
                               int *out_ndims, int64_t *out_shapes, const char **out_dtypes) {                     \
    return infer(n, ndims, shapes, dtypes, out_ndims, out_shapes, out_dtypes);                                     \
  }                                                                                                                \
  extern "C" int symbol(int, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *, void *) {   \
    return call(params, ndims, shapes, dtypes);                                                                    \
  }
#define OPERATOR(name, Kernels)             \
  ENTRY(aot_##name##_cpu, forward<Kernels>) \
  ENTRY(aot_##name##_backward_cpu, backward<Kernels>)

OPERATOR(correct, Correct)
OPERATOR(wrong_for_odd_sizes, WrongForOddSizes)
OPERATOR(wrong_gradient, WrongGradient)
OPERATOR(last_unwritten, LastUnwritten)
OPERATOR(writes_past_the_end, WritesPastTheEnd)
OPERATOR(reads_before_the_start, ReadsBeforeTheStart)
OPERATOR(counts_calls, CountsCalls)
OPERATOR(shares_scratch, SharesScratch)
OPERATOR(swallows_nan, SwallowsNaN)
OPERATOR(writes_its_input, WritesItsInput)
OPERATOR(wrong_if_misaligned, WrongIfMisaligned)
OPERATOR(wrong_formula, Correct)
ENTRY(aot_refuses_cpu, refuses)
ENTRY(squares_and_signs, squares_and_signs)
ENTRY(take, take)
OPERATOR(swallows_nan_of_its_gradient, SwallowsNaNOfItsGradient)
OPERATOR(swallows_nan_in_its_gradient, SwallowsNaNInItsGradient)
OPERATOR(shares_a_number, SharesANumber)
OPERATOR(shares_an_array, SharesAnArray)
OPERATOR(locks_an_array, LocksAnArray)
OPERATOR(wrong_if_output_misaligned, WrongIfOutputMisaligned)
OPERATOR(wrong_if_gradient_misaligned, WrongIfGradientMisaligned)
OPERATOR(restores_its_input, RestoresItsInput)
OPERATOR(leaks, Leaks)
OPERATOR(counts_in_ints, CountsInInts)
OPERATOR(wrong_for_four_axes, WrongForFourAxes)
