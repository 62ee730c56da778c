// Launches of Triton kernels whose code is embedded in a library: what the sources that `aotops build` makes of a
// declaration include. It needs neither Triton nor CUDA's headers: the driver is found in libcuda.so.1 at the first
// call. Code is loaded once for each context, and a call neither allocates nor waits.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <initializer_list>
#include <mutex>
#include <type_traits>

#include "aot.h"

namespace aot {
inline namespace AOT_ISA {
namespace triton {

// ------------------------------------------------------------------------------------------------------ expressions

// Arithmetic of declarations. `failed`: a division by zero, or an integer of more than 64 bits.
struct Arithmetic {
  bool failed = false;

  template <class A, class B>
  auto add(A a, B b) {
    if constexpr (!both<A, B>) return a + b;
    else return checked([](int64_t x, int64_t y, int64_t *z) { return __builtin_add_overflow(x, y, z); }, a, b);
  }
  template <class A, class B>
  auto sub(A a, B b) {
    if constexpr (!both<A, B>) return a - b;
    else return checked([](int64_t x, int64_t y, int64_t *z) { return __builtin_sub_overflow(x, y, z); }, a, b);
  }
  template <class A, class B>
  auto mul(A a, B b) {
    if constexpr (!both<A, B>) return a * b;
    else return checked([](int64_t x, int64_t y, int64_t *z) { return __builtin_mul_overflow(x, y, z); }, a, b);
  }
  // As in Python, rounded down.
  int64_t div(int64_t a, int64_t b) {
    if (!divides(a, b)) return 0;
    return a / b - (a % b && (a < 0) != (b < 0));
  }
  int64_t mod(int64_t a, int64_t b) {
    if (!divides(a, b)) return 0;
    const int64_t rest = a % b;
    return rest && (rest < 0) != (b < 0) ? rest + b : rest;
  }
  double quotient(double a, double b) {
    failed |= b == 0;
    return b == 0 ? 0 : a / b;
  }
  int64_t cdiv(int64_t a, int64_t b) { return sub(0, div(sub(0, a), b)); }
  int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
  int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
  int64_t next_power_of_2(int64_t a) {
    int64_t power = 1;
    while (power < a && !failed) power = mul(power, int64_t{2});
    return power;
  }

 private:
  template <class A, class B>
  static constexpr bool both = std::is_integral_v<A> && std::is_integral_v<B>;

  template <class F>
  int64_t checked(F compute, int64_t a, int64_t b) {
    int64_t result = 0;
    failed |= compute(a, b, &result);
    return result;
  }
  bool divides(int64_t a, int64_t b) {
    const bool fits = b != 0 && !(a == INT64_MIN && b == -1);
    failed |= !fits;
    return fits;
  }
};

inline Status check_computed(const char *op, const char *what, const Arithmetic &m) {
  if (!m.failed) return kOk;
  return fail(kInvalidArgument, "%s: %s divides by zero, or needs more than 64 bits, for these shapes", op, what);
}

// ----------------------------------------------------------------------------------------------------------- shapes

// The leading axes that a declaration calls *M.
struct Axes {
  bool set = false;
  int n = 0;
  int64_t dim[kMaxNdim];

  int64_t product() const {
    int64_t product = set ? 1 : kUnknownDim;
    for (int i = 0; i < n && product >= 0; ++i) product = dim[i] < 0 ? kUnknownDim : product * dim[i];
    return product;
  }
};

// An axis of an input: a name, whose value is unknown until an input has it, or a number.
struct Axis {
  const char *name;
  int64_t *value;
  int64_t number;
};

inline Status match_type(const char *op, const Slot &slot, const Spec &s, const DType *accepted, size_t n,
                         DType *bound) {
  if (s.dtype == DType::unknown) return kOk;
  if (*bound != DType::unknown) return check_dtype(op, slot.name, s, *bound);
  if (std::find(accepted, accepted + n, s.dtype) == accepted + n)
    return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s", op, slot.name, dtype_name(s.dtype), slot.dtypes);
  return *bound = s.dtype, kOk;
}

// `text`: the declaration, such as [*M, N].
inline Status match_shape(const char *op, const char *slot, const Spec &s, const char *text, Axes *leading,
                          const char *leading_name, std::initializer_list<Axis> axes) {
  if (!s.rank_known()) return kOk;
  const int n = static_cast<int>(axes.size()), first = s.ndim - n;
  if (first < 0 || (first > 0 && !leading))
    return fail(kInvalidArgument, "%s: %s has shape %s, expected %s", op, slot, ShapeText(s).text, text);
  if (leading && leading->set) {
    if (leading->n != first || !std::equal(s.shape, s.shape + first, leading->dim, same_dim))
      return fail(kInvalidArgument, "%s: %s has shape %s, expected %s, where *%s is %s", op, slot, ShapeText(s).text,
                  text, leading_name, ShapeText(leading->dim, leading->n).text);
    for (int i = 0; i < first; ++i) leading->dim[i] = std::max(leading->dim[i], s.shape[i]);
  } else if (leading) {
    leading->set = true, leading->n = first;
    std::copy(s.shape, s.shape + first, leading->dim);
  }
  int i = first;
  for (const Axis &axis : axes) {
    const int64_t found = s.shape[i++], expected = axis.value ? *axis.value : axis.number;
    if (!same_dim(found, expected)) {
      if (!axis.value)
        return fail(kInvalidArgument, "%s: %s has shape %s, expected %s", op, slot, ShapeText(s).text, text);
      return fail(kInvalidArgument, "%s: %s has shape %s, expected %s, where %s is %lld", op, slot, ShapeText(s).text,
                  text, axis.name, static_cast<long long>(expected));
    }
    if (axis.value) *axis.value = std::max(expected, found);
  }
  return kOk;
}

// A dimension that was computed of known ones.
inline Status check_dimension(const char *op, const char *what, int64_t value) {
  if (value >= 0) return kOk;
  return fail(kInvalidArgument, "%s: %s is %lld, expected no number below 0", op, what, static_cast<long long>(value));
}

inline Spec made_spec(DType dtype, const Axes *leading, std::initializer_list<int64_t> dims) {
  if (leading && !leading->set) return Spec::unknown_rank(dtype);
  Spec s;
  s.dtype = dtype;
  for (int i = 0; leading && i < leading->n; ++i) s.shape[s.ndim++] = leading->dim[i];
  for (int64_t dim : dims)
    if (s.ndim < kMaxNdim) s.shape[s.ndim++] = dim;
  return s;
}

inline int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::boolean:
    case DType::int8:
    case DType::uint8:
      return 1;
    default:
      return 2;
  }
}

constexpr int64_t kAlignment = 256;

inline int64_t aligned(Arithmetic &m, int64_t bytes) { return m.mul(m.cdiv(bytes, kAlignment), kAlignment); }

// The workspace: float32, with room to align its first byte.
inline Spec workspace_spec(int64_t bytes) {
  return Spec::vector(DType::float32, bytes < 0 ? kUnknownDim : bytes ? (bytes + kAlignment) / 4 : 0);
}

inline char *workspace_start(const Tensor &workspace) {
  const auto at = reinterpret_cast<uintptr_t>(workspace.data);
  return reinterpret_cast<char *>((at + kAlignment - 1) / kAlignment * kAlignment);
}

// ------------------------------------------------------------------------------------------------------------- code

// A kernel as it was compiled for a GPU and a variant: configuration, dtypes and hints.
struct Kernel {
  const void *image;  // null: not for this GPU
  int code;           // the number of the image: variants may share one
  const char *name;
  int threads, shared, ctas;
  bool pdl, cooperative;
};

struct Arch {
  const char *name;  // such as sm_90a
  int number;        // 90
  bool exact;        // its code runs on no other GPU
};

// All code of an entry: kernels[arch * variants + variant].
struct Program {
  const char *op;
  const Arch *archs;
  int n_archs;
  const Kernel *kernels;
  int n_variants;

  const Kernel &kernel(int arch, int variant) const { return kernels[arch * n_variants + variant]; }
  // The index of the architecture whose code a GPU runs, or -1.
  int arch_for(int capability) const {
    int found = -1;
    for (int i = 0; i < n_archs; ++i) {
      const int number = archs[i].number;
      const bool runs = archs[i].exact ? number == capability : number / 10 == capability / 10 && number <= capability;
      if (runs && (found < 0 || number > archs[found].number)) found = i;
    }
    return found;
  }
};

inline Status fail_no_code(const Program &program, const char *gpu, int capability) {
  char names[160] = "none";
  for (int i = 0, used = 0; i < program.n_archs && used < 140; ++i)
    used += std::snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", program.archs[i].name);
  return fail(
      kNotImplemented,
      "%s: the library has no code for %s, compute capability %d.%d (it was compiled for %s): build the package "
      "with \"%d\" in archs",
      program.op, gpu, capability / 10, capability % 10, names, capability);
}

// ------------------------------------------------------------------------------------------------------- the launches

constexpr int kMostArguments = 96, kMostLaunches = 8, kMostZeroed = 8;
// Grids know of no more multiprocessors than the first; a plan that is made without a GPU has the second.
constexpr int kMostMultiprocessors = 256, kAssumedMultiprocessors = 132;

struct Gpu {
  int arch;  // whose code it runs
  int multiprocessors;
};

struct Launch {
  const char *kernel;  // as it is declared
  int variant, config, hint, n;
  int64_t grid[3];
  uint64_t values[kMostArguments];  // each argument in a word of its own
};

struct Zeroed {
  void *data;
  int64_t bytes;
};

// All that an entry does in a call.
struct Plan {
  int launches = 0, zeroed = 0;
  Launch launch[kMostLaunches];
  Zeroed zero[kMostZeroed];
};

inline bool is_aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

inline void pass(Launch *l, const void *data) { l->values[l->n++] = reinterpret_cast<uintptr_t>(data); }

template <class T>
void pass_as(Launch *l, T value) {
  l->values[l->n] = 0;
  std::memcpy(&l->values[l->n++], &value, sizeof value);
}

inline Status check_int32(const char *op, const Launch &l, const char *argument, int64_t value) {
  if (value >= INT32_MIN && value <= INT32_MAX) return kOk;
  return fail(kInvalidArgument, "%s: the argument %s of %s is %lld, expected an integer of 32 bits: declare it as i64",
              op, argument, l.kernel, static_cast<long long>(value));
}

inline Status check_grid(const char *op, const Launch &l) {
  constexpr int64_t most[3] = {0x7fffffff, 65535, 65535};
  bool fits = true;
  for (int i = 0; i < 3; ++i) fits &= l.grid[i] > 0 && l.grid[i] <= most[i];
  if (fits) return kOk;
  return fail(kInvalidArgument,
              "%s: the grid of %s is (%lld, %lld, %lld), expected numbers from 1 to 2147483647, 65535, 65535", op,
              l.kernel, static_cast<long long>(l.grid[0]), static_cast<long long>(l.grid[1]),
              static_cast<long long>(l.grid[2]));
}

inline Status fail_no_config(const char *op, const char *kernel) {
  return fail(kNotImplemented, "%s: no configuration of %s is for these shapes, dtypes and attributes on this GPU", op,
              kernel);
}

inline Status fail_no_hint(const char *op, const char *kernel) {
  return fail(kNotImplemented, "%s: no hints of %s hold for these tensors, expected {} as the last of hints", op,
              kernel);
}

// ---------------------------------------------------------------------------------------------------------- the driver

// cuda.h's CUlaunchAttribute and CUlaunchConfig.
struct Attribute {
  enum Id { kCooperative = 2, kCluster = 4, kClusterPolicy = 5, kOverlap = 6 };
  int id;
  int unused = 0;
  unsigned value[16] = {};
};
struct Configuration {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned n;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Configuration) == 56, "cuda.h's layout");

// The functions of libcuda.so.1 that are used. Null members: the driver is older.
struct Driver {
  int (*init)(unsigned);
  int (*current)(void **);
  int (*make_current)(void *);
  int (*device)(int *);
  int (*context_of)(void *, void **);
  int (*primary)(void **, int);
  int (*attribute)(int *, int, int);
  int (*name)(char *, int, int);
  int (*load)(void **, const void *);
  int (*function)(void **, void *, const char *);
  int (*set)(void *, int, int);
  int (*prefer)(void *, int);
  int (*fill)(unsigned long long, unsigned char, size_t, void *);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  int (*launch_ex)(const Configuration *, void *, void **, void **);
  int (*capture_mode)(int *);
  int (*text)(int, const char **);

  bool found(void *library) {
    auto find = [=](auto *function, const char *symbol) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
      return *function != nullptr;
    };
    find(&launch_ex, "cuLaunchKernelEx");
    return find(&init, "cuInit") && find(&current, "cuCtxGetCurrent") && find(&make_current, "cuCtxSetCurrent") &&
           find(&device, "cuCtxGetDevice") && find(&context_of, "cuStreamGetCtx") &&
           find(&primary, "cuDevicePrimaryCtxRetain") && find(&attribute, "cuDeviceGetAttribute") &&
           find(&name, "cuDeviceGetName") && find(&load, "cuModuleLoadData") &&
           find(&function, "cuModuleGetFunction") && find(&set, "cuFuncSetAttribute") &&
           find(&prefer, "cuFuncSetCacheConfig") && find(&fill, "cuMemsetD8Async") && find(&launch, "cuLaunchKernel") &&
           find(&capture_mode, "cuThreadExchangeStreamCaptureMode") && find(&text, "cuGetErrorString");
  }
};

// The driver; null if there is none. It stays loaded. `load`: load it, if the process has not.
inline const Driver *driver(bool load) {
  static std::atomic<const Driver *> known{nullptr};
  static std::mutex loading;
  static Driver functions;
  if (const Driver *found = known.load(std::memory_order_acquire)) return found;
  std::lock_guard<std::mutex> hold(loading);
  if (known.load(std::memory_order_relaxed)) return &functions;
  void *library = dlopen("libcuda.so.1", RTLD_NOW | (load ? 0 : RTLD_NOLOAD));
  if (!library || !functions.found(library)) return nullptr;
  known.store(&functions, std::memory_order_release);
  return &functions;
}

inline Status check_driver(const Driver &driver, const char *op, const char *what, int error) {
  if (!error) return kOk;
  const char *text = nullptr;
  driver.text(error, &text);
  return fail(kDeviceError, "%s: %s: %s (CUDA error %d)", op, what, text ? text : "unknown error", error);
}

// Makes a context current in this thread: that of the stream, or of the first device, as the CUDA runtime does.
inline Status enter_context(const Driver &driver, const char *op, void *stream, void **context) {
  constexpr int kNotInitialized = 3;
  int error = driver.current(context);
  if (error == kNotInitialized) {
    AOT_TRY(check_driver(driver, op, "cuInit", driver.init(0)));
    error = driver.current(context);
  }
  AOT_TRY(check_driver(driver, op, "cuCtxGetCurrent", error));
  if (*context) return kOk;
  if (reinterpret_cast<uintptr_t>(stream) > 2)  // 1 and 2 are the legacy stream, and that of the thread
    AOT_TRY(check_driver(driver, op, "cuStreamGetCtx", driver.context_of(stream, context)));
  else AOT_TRY(check_driver(driver, op, "cuDevicePrimaryCtxRetain", driver.primary(context, 0)));
  return check_driver(driver, op, "cuCtxSetCurrent", driver.make_current(*context));
}

// The code of a program in the contexts of this process, one for each device.
template <int codes>
class Loaded {
 public:
  explicit constexpr Loaded(const Program &program) : program_(program) {}

  // The current context's entry, which has the architecture.
  struct Context {
    std::atomic<void *> handle{nullptr};
    int arch = 0, shared = 0, capability = 0, multiprocessors = 0;
    std::atomic<void *> functions[codes] = {};
  };

  Status enter(const Driver &driver, void *stream, Context **context) {
    void *handle = nullptr;
    AOT_TRY(enter_context(driver, program_.op, stream, &handle));
    for (Context &each : contexts_) {
      void *known = each.handle.load(std::memory_order_acquire);
      if (known == handle) return *context = &each, kOk;
      if (!known) break;
    }
    return add(driver, handle, context);
  }

  Status function(const Driver &driver, Context *context, const Kernel &kernel, void **function) {
    *function = context->functions[kernel.code].load(std::memory_order_acquire);
    return *function ? kOk : load(driver, context, kernel, function);
  }

  // Loads all code for the current context, if there is one: then a call need not. Errors are those of the calls.
  void preload() noexcept {
    const Driver *found = driver(false);
    void *handle = nullptr, *function = nullptr;
    if (!found || found->current(&handle) || !handle) return;
    Context *context = nullptr;
    if (enter(*found, nullptr, &context)) return;
    for (int i = 0; i < program_.n_variants; ++i)
      if (const Kernel &kernel = program_.kernel(context->arch, i); kernel.image)
        this->function(*found, context, kernel, &function);
  }

 private:
  Status add(const Driver &driver, void *handle, Context **context) {
    const char *op = program_.op;
    int device = 0, major = 0, minor = 0, shared = 0, multiprocessors = 0;
    AOT_TRY(check_driver(driver, op, "cuCtxGetDevice", driver.device(&device)));
    AOT_TRY(check_driver(driver, op, "cuDeviceGetAttribute", driver.attribute(&major, 75, device)));
    AOT_TRY(check_driver(driver, op, "cuDeviceGetAttribute", driver.attribute(&minor, 76, device)));
    AOT_TRY(check_driver(driver, op, "cuDeviceGetAttribute", driver.attribute(&shared, 97, device)));
    AOT_TRY(check_driver(driver, op, "cuDeviceGetAttribute", driver.attribute(&multiprocessors, 16, device)));
    const int arch = program_.arch_for(10 * major + minor);
    if (arch < 0) {
      char gpu[96] = "this GPU";
      driver.name(gpu, sizeof gpu, device);
      return fail_no_code(program_, gpu, 10 * major + minor);
    }
    std::lock_guard<std::mutex> hold(lock_);
    for (Context &each : contexts_) {
      void *known = each.handle.load(std::memory_order_relaxed);
      if (known && known != handle) continue;
      each.arch = arch, each.shared = shared, each.capability = 10 * major + minor;
      each.multiprocessors = std::min(multiprocessors, kMostMultiprocessors);
      each.handle.store(handle, std::memory_order_release);
      return *context = &each, kOk;
    }
    return fail(kDeviceError, "%s: it was called in %d contexts of CUDA, expected no more", op, kContexts);
  }

  // Loading allocates, which a stream capture in another mode refuses.
  Status load(const Driver &driver, Context *context, const Kernel &kernel, void **function) {
    std::lock_guard<std::mutex> hold(lock_);
    if ((*function = context->functions[kernel.code].load(std::memory_order_relaxed))) return kOk;
    int mode = 2;  // relaxed
    driver.capture_mode(&mode);
    const Status status = load_now(driver, *context, kernel, function);
    driver.capture_mode(&mode);
    if (!status) context->functions[kernel.code].store(*function, std::memory_order_release);
    return status;
  }

  Status load_now(const Driver &driver, const Context &context, const Kernel &kernel, void **function) {
    constexpr int kMostShared = 8, kLargeClusters = 14, kPreferShared = 1, kAlways = 48 << 10;
    const char *op = program_.op;
    if (kernel.shared > context.shared)
      return fail(kNotImplemented, "%s: %s needs %d bytes of shared memory, this GPU has %d", op, kernel.name,
                  kernel.shared, context.shared);
    void *module = nullptr, *found = nullptr;
    AOT_TRY(check_driver(driver, op, "cuModuleLoadData", driver.load(&module, kernel.image)));
    AOT_TRY(check_driver(driver, op, kernel.name, driver.function(&found, module, kernel.name)));
    if (kernel.shared > kAlways) {
      AOT_TRY(check_driver(driver, op, "cuFuncSetCacheConfig", driver.prefer(found, kPreferShared)));
      AOT_TRY(check_driver(driver, op, "cuFuncSetAttribute", driver.set(found, kMostShared, kernel.shared)));
    }
    if (kernel.ctas > 8) AOT_TRY(check_driver(driver, op, "cuFuncSetAttribute", driver.set(found, kLargeClusters, 1)));
    return *function = found, kOk;
  }

  static constexpr int kContexts = 64;
  const Program &program_;
  std::mutex lock_;
  Context contexts_[kContexts];
};

inline Status start(const Driver &driver, const char *op, const Kernel &kernel, int capability, void *function,
                    Launch &l, void *stream) {
  void *values[kMostArguments];
  for (int i = 0; i < l.n; ++i) values[i] = &l.values[i];
  const unsigned x = static_cast<unsigned>(l.grid[0]), y = static_cast<unsigned>(l.grid[1]),
                 z = static_cast<unsigned>(l.grid[2]), threads = kernel.threads, ctas = kernel.ctas;
  const bool overlaps = kernel.pdl && capability >= 90;
  if (ctas == 1 && !overlaps && !kernel.cooperative)
    return check_driver(driver, op, l.kernel,
                        driver.launch(function, x, y, z, threads, 1, 1, kernel.shared, stream, values, nullptr));
  if (!driver.launch_ex)
    return fail(kDeviceError, "%s: %s has clusters or starts early, expected a driver of CUDA 11.8 or later", op,
                l.kernel);
  Attribute attributes[4];
  Configuration config = {{x * ctas, y, z}, {threads, 1, 1}, static_cast<unsigned>(kernel.shared),
                          stream,           attributes,      0};
  const auto add = [&](int id, unsigned value) {
    attributes[config.n].id = id;
    attributes[config.n].value[0] = value;
    return &attributes[config.n++];
  };
  if (overlaps) add(Attribute::kOverlap, 1);
  if (kernel.cooperative) add(Attribute::kCooperative, 1);
  if (ctas > 1) {
    Attribute *cluster = add(Attribute::kCluster, ctas);
    cluster->value[1] = cluster->value[2] = 1;
    add(Attribute::kClusterPolicy, 1);  // spread, as Triton asks for
  }
  return check_driver(driver, op, l.kernel, driver.launch_ex(&config, function, values, nullptr));
}

// ------------------------------------------------------------------------------------------------------------- calls

// Makes the plan of a call for a GPU.
template <class Op>
using Planner = Status(const Op &op, const Tensor *in, const Tensor *out, const Gpu &gpu, Plan *plan);

template <class Op, int codes>
Status run_plan(const Op &op, const Tensor *in, const Tensor *out, void *stream, Loaded<codes> &loaded,
                const Program &program, Planner<Op> make) {
  const Driver *found = driver(true);
  if (!found) return fail(kDeviceError, "%s: no NVIDIA driver was found (libcuda.so.1)", Op::name);
  typename Loaded<codes>::Context *context = nullptr;
  AOT_TRY(loaded.enter(*found, stream, &context));
  Plan plan;
  AOT_TRY(make(op, in, out, {program.archs[context->arch].number, context->multiprocessors}, &plan));
  void *functions[kMostLaunches];
  for (int i = 0; i < plan.launches; ++i)  // all of them first: a call runs whole or not at all
    AOT_TRY(loaded.function(*found, context, program.kernel(context->arch, plan.launch[i].variant), &functions[i]));
  for (int i = 0; i < plan.zeroed; ++i)
    if (plan.zero[i].bytes)
      AOT_TRY(check_driver(*found, Op::name, "cuMemsetD8Async",
                           found->fill(reinterpret_cast<uintptr_t>(plan.zero[i].data), 0, plan.zero[i].bytes, stream)));
  for (int i = 0; i < plan.launches; ++i)
    AOT_TRY(start(*found, Op::name, program.kernel(context->arch, plan.launch[i].variant), context->capability,
                  functions[i], plan.launch[i], stream));
  return kOk;
}

// Text of limited length. It is cut at the end.
struct Text {
  char *at;
  size_t left;
  bool cut = false;

  [[gnu::format(printf, 2, 3)]] void add(const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int n = std::vsnprintf(at, left, format, args);
    va_end(args);
    cut |= n < 0 || static_cast<size_t>(n) >= left;
    const size_t step = cut ? 0 : n;
    at += step, left -= step;
  }
};

// The question for a plan, in the place of a stream.
struct Question {
  const Program *program;
  int capability;
  Text text;
};

template <class Op>
Status answer(const Op &op, const Tensor *in, const Tensor *out, Question *q, Planner<Op> make) {
  const int arch = q->program->arch_for(q->capability);
  if (arch < 0) return fail_no_code(*q->program, "a GPU", q->capability);
  Plan plan;
  AOT_TRY(make(op, in, out, {q->program->archs[arch].number, kAssumedMultiprocessors}, &plan));
  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  q->text.add("{\"arch\": \"%s\", \"zeroed\": [", q->program->archs[arch].name);
  for (int i = 0; i < plan.zeroed; ++i)
    q->text.add("%s[%llu, %lld]", i ? ", " : "",
                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(plan.zero[i].data)),
                number(plan.zero[i].bytes));
  q->text.add("], \"launches\": [");
  for (int i = 0; i < plan.launches; ++i) {
    const Launch &l = plan.launch[i];
    const Kernel &kernel = q->program->kernel(arch, l.variant);
    q->text.add(
        "%s{\"kernel\": \"%s\", \"config\": %d, \"hint\": %d, \"grid\": [%lld, %lld, %lld], \"threads\": %d, "
        "\"shared\": %d, \"ctas\": %d, \"values\": [",
        i ? ", " : "", l.kernel, l.config, l.hint, number(l.grid[0]), number(l.grid[1]), number(l.grid[2]),
        kernel.threads, kernel.shared, kernel.ctas);
    for (int k = 0; k < l.n; ++k) q->text.add("%s%llu", k ? ", " : "", static_cast<unsigned long long>(l.values[k]));
    q->text.add("]}");
  }
  q->text.add("]}");
  return q->text.cut ? fail(kConventionMisused, "%s: the plan does not fit", Op::name) : kOk;
}

}  // namespace triton
}  // namespace AOT_ISA
}  // namespace aot

// Exports the CUDA entry of an operator whose kernels are Triton's, and <entry>Plan, which tells as JSON what a call
// would launch on a GPU of a compute capability: it reads no tensor. `planner` makes the plan, `program` is the code,
// and `loaded` that of the contexts.
#define AOT_TRITON_ENTRY(Op, symbol, planner, program, loaded)                                                        \
  namespace {                                                                                                         \
  ::aot::Status symbol##_launch(const Op &op, const ::aot::Tensor *in, const ::aot::Tensor *out, void *stream) {      \
    return ::aot::triton::run_plan<Op>(op, in, out, stream, loaded, program, planner);                                \
  }                                                                                                                   \
  ::aot::Status symbol##_answer(const Op &op, const ::aot::Tensor *in, const ::aot::Tensor *out, void *question) {    \
    return ::aot::triton::answer<Op>(op, in, out, static_cast<::aot::triton::Question *>(question), planner);         \
  }                                                                                                                   \
  }                                                                                                                   \
  AOT_API int symbol##Plan(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *extra, \
                           int capability, char *text, int capacity) {                                                \
    ::aot::triton::Question question = {&program, capability, {text, static_cast<size_t>(capacity)}};                 \
    if (capacity > 0) *text = 0;                                                                                      \
    return ::aot::run<Op>(symbol##_answer, nparam, params, ndims, shapes, dtypes, &question, extra);                  \
  }                                                                                                                   \
  AOT_ENTRY(Op, symbol, symbol##_launch)
