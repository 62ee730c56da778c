// The calling convention: MindSpore's AOT convention, complete, in one place.
//
//   int Func(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra)
//
// Parallel arrays describe nparam tensors, inputs first, then outputs. `extra` holds the attributes (extra.h). An entry
// returns 0, or a Status whose message aot_last_error() returns. Each entry is exported with companions: <entry>Init,
// which reads the attributes once; MindSpore's <entry>InferShape and <entry>InferType, in C++; <entry>Infer, the same
// in plain C; and <entry>Signature, the names of its arguments.
//
// An operator is a struct of its slots, attributes and shape inference. All else is generic, and here:
//
//   struct Gelu {
//     static constexpr const char *name = "gelu";
//     static constexpr aot::Slot inputs[] = {{"x"}};
//     static constexpr aot::Slot outputs[] = {{"y"}};
//     bool tanh = false;                                                    // attributes, with their defaults
//     Status init(const aot::Attrs &attrs);                                 // reads them
//     Status infer(const aot::Tensor *in, aot::Spec *out) const;            // checks inputs, infers outputs
//   };
//   Status gelu_cpu(const Gelu &op, const aot::Tensor *in, const aot::Tensor *out, void *stream);   // a launcher
//   AOT_ENTRY(Gelu, aot_gelu_cpu, gelu_cpu)
//
// An output has the dtype that infer gives it, floating or not; one that is not floating has no gradient.
//
// An optional slot may be absent; its Tensor then converts to false. The integer attributes "inputs" and "outputs" have
// bit i set if slot i is present: a call that lacks one of these is refused. Without them every input is present, and
// nparam determines the number of outputs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <vector>

#include "extra.h"

#define AOT_API extern "C" __attribute__((visibility("default")))

// CPU sources are compiled once per instruction set (Makefile). Everything inline is in a namespace of that set, so
// that the linker cannot use a function compiled for AVX-512 in the baseline code.
#ifndef AOT_ISA
#define AOT_ISA baseline
#endif

namespace aot {

enum Status : int {
  kOk = 0,
  kInvalidArgument = 1,    // a shape or an attribute; ValueError in Python
  kUnsupportedDtype = 2,   // TypeError
  kNotImplemented = 3,     // NotImplementedError
  kDeviceError = 4,        // an error of CUDA; RuntimeError
  kConventionMisused = 5,  // such as a wrong nparam: an error of the calling code; RuntimeError
  kOutOfMemory = 6,        // host memory; MemoryError
};

// Stores the message for aot_last_error() (error.cpp) and returns `status`.
[[gnu::format(printf, 2, 3)]] Status fail(Status status, const char *format, ...) noexcept;

// aot_last_error() of this library, whatever another one in the process exports.
const char *last_error() noexcept;

// The arguments of an operator: what <entry>Signature returns (error.cpp).
struct SignatureText {
  char text[1024];
  size_t length;

  void add(const char *name, char mark) noexcept;
  void end(char mark) noexcept;
};

// The names of the floating dtypes (error.cpp). The call path passes these strings themselves, so that parse_dtype can
// compare addresses: comparing characters takes a tenth of a small call.
extern const char kFloat16[], kBFloat16[], kFloat32[], kFloat64[];

inline namespace AOT_ISA {

// Whether CUDA entries are compiled. The size of a workspace may depend on it.
#ifdef __CUDACC__
constexpr bool kIsCuda = true;
#else
constexpr bool kIsCuda = false;
#endif

constexpr int kMaxNdim = 32;
constexpr int64_t kUnknownDim = -1, kUnknownRank = -2;  // MindSpore's marks in a dynamic shape

// The maximum number of elements of a tensor: more than any memory holds, and small enough that the bytes or workspace
// of one tensor do not overflow. Products of several shapes are limited to kLarge (bounded_product).
constexpr int64_t kMostElements = int64_t{1} << 50, kLarge = int64_t{1} << 60;

// ---------------------------------------------------------------------------------------------------------- dtypes

enum class DType : uint8_t {
  absent,
  unknown,
  other,
  float16,
  bfloat16,
  float32,
  float64,
  int32,
  int64,
  boolean,
  int8,
  uint8,
  int16,
  uint16,
  uint32,
  uint64,
  complex64,
  complex128,
  float8_e4m3fn,
  float8_e5m2
};
constexpr int kDTypes = static_cast<int>(DType::float8_e5m2) + 1;

// The name of each dtype, and the bytes of an element.
constexpr struct {
  const char *name;
  int size;
} kDTypeFacts[kDTypes] = {{"absent", 0},    {"unknown", 0},     {"other", 0},         {"float16", 2},
                          {"bfloat16", 2},  {"float32", 4},     {"float64", 8},       {"int32", 4},
                          {"int64", 8},     {"bool", 1},        {"int8", 1},          {"uint8", 1},
                          {"int16", 2},     {"uint16", 2},      {"uint32", 4},        {"uint64", 8},
                          {"complex64", 8}, {"complex128", 16}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}};

template <size_t n>
inline bool is_word(const char *s, const char (&word)[n]) {
  for (size_t i = 0; i < n; ++i)
    if (s[i] != word[i]) return false;
  return true;
}

inline DType parse_dtype(const char *s) {
  if (s == kFloat32) return DType::float32;
  if (s == kBFloat16) return DType::bfloat16;
  if (s == kFloat16) return DType::float16;
  if (is_word(s, "float32") || is_word(s, "float")) return DType::float32;
  if (is_word(s, "bfloat16")) return DType::bfloat16;
  if (is_word(s, "float16")) return DType::float16;
  if (is_word(s, "float64")) return DType::float64;
  if (is_word(s, "int64")) return DType::int64;
  if (is_word(s, "int32") || is_word(s, "int")) return DType::int32;
  for (int i = static_cast<int>(DType::boolean); i < kDTypes; ++i)
    if (!std::strcmp(s, kDTypeFacts[i].name)) return static_cast<DType>(i);
  return DType::other;
}

inline const char *dtype_name(DType d) { return kDTypeFacts[static_cast<int>(d)].name; }

// Whether it is a dtype of indices: the other integers are none. Whether it may have a gradient: complex numbers and
// those of 8 bits have none.
inline bool is_integer(DType d) { return d == DType::int32 || d == DType::int64; }
inline bool is_floating(DType d) { return d >= DType::float16 && d <= DType::float64; }

// The dtype of statistics and sums of a tensor.
inline DType accumulate_dtype(DType d) { return d == DType::float64 || d == DType::unknown ? d : DType::float32; }

// Bytes of an element.
inline int64_t itemsize(DType d) { return kDTypeFacts[static_cast<int>(d)].size; }

// --------------------------------------------------------------------------------------------------------- tensors

// A workspace is an optional output: scratch of at least the inferred size.
enum SlotKind { required, optional, workspace };

struct Slot {
  const char *name;
  SlotKind kind = required;
  const char *dtypes = "float16, bfloat16, float32 or float64";  // accepted dtypes, for the error message
};
constexpr const char *kIntegers = "int32 or int64";

struct Spec {
  DType dtype = DType::absent;
  int ndim = 0;
  int64_t shape[kMaxNdim];  // the first ndim are set

  Spec() = default;
  Spec(const Spec &s) { *this = s; }
  Spec &operator=(const Spec &s) {  // copies only what is set: every call comes here
    dtype = s.dtype, ndim = s.ndim;
    for (int i = 0; i < ndim; ++i) shape[i] = s.shape[i];
    return *this;
  }
  explicit operator bool() const { return dtype != DType::absent; }
  bool rank_known() const { return !(ndim == 1 && shape[0] == kUnknownRank); }
  bool known() const {
    for (int i = 0; i < ndim; ++i)
      if (shape[i] < 0) return false;
    return true;
  }
  int64_t size(int first = 0) const { return product(first, ndim); }
  int64_t product(int first, int last) const {
    int64_t n = 1;
    for (int i = first; i < last; ++i) n *= shape[i];
    return n;
  }
  static Spec vector(DType dtype, int64_t n) {
    Spec s;
    s.dtype = dtype, s.ndim = 1, s.shape[0] = n;
    return s;
  }
  static Spec unknown_rank(DType dtype) { return vector(dtype, kUnknownRank); }
};

struct Tensor : Spec {
  void *data = nullptr;

  template <typename T>
  T *as() const {
    return static_cast<T *>(data);
  }
};

// min(a * b, kLarge), for a, b >= 0.
inline int64_t bounded_product(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) || product > kLarge ? kLarge : product;
}

// The number of elements of a shape. False if it exceeds kMostElements, with dimensions of 0 counted as 1, so that no
// partial product overflows. `unknown`: dimensions below 0 are skipped, else refused.
inline bool count_elements(const int64_t *shape, int ndim, bool unknown, int64_t *elements) {
  int64_t n = 1;
  bool empty = false;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] < 0 && !unknown) return false;
    if (shape[i] <= 0) empty |= shape[i] == 0;
    else if (__builtin_mul_overflow(n, shape[i], &n) || n > kMostElements) return false;
  }
  return *elements = empty ? 0 : n, true;
}

inline bool same_dim(int64_t a, int64_t b) { return a == b || a < 0 || b < 0; }

inline bool same_dtype(DType a, DType b) { return a == b || a == DType::unknown || b == DType::unknown; }

inline bool same_shape(const Spec &a, const Spec &b) {
  if (!a.rank_known() || !b.rank_known()) return true;
  if (a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i)
    if (!same_dim(a.shape[i], b.shape[i])) return false;
  return true;
}

// A shape as Python writes it: (2, 3).
struct ShapeText {
  char text[192];
  ShapeText(const int64_t *shape, int ndim) {
    int n = std::snprintf(text, sizeof text, "(");
    for (int i = 0; i < ndim && n < 160; ++i)
      n += std::snprintf(text + n, sizeof text - n, i ? ", %lld" : "%lld", static_cast<long long>(shape[i]));
    std::snprintf(text + n, sizeof text - n, ndim == 1 ? ",)" : ")");
  }
  explicit ShapeText(const Spec &s) : ShapeText(s.shape, s.ndim) {}
};

// ------------------------------------------------------------------------------------------------- checks for infer

#define AOT_TRY(expression)                                   \
  do {                                                        \
    if (::aot::Status status_ = (expression)) return status_; \
  } while (0)

inline Status check_floating(const char *op, const char *slot, const Spec &s) {
  if (s.dtype == DType::unknown || is_floating(s.dtype)) return kOk;
  return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected float16, bfloat16, float32 or float64", op, slot,
              dtype_name(s.dtype));
}

// The dtype is `model`, or float32 where that has 16 bits.
inline bool is_16_bits(DType d) { return d == DType::float16 || d == DType::bfloat16; }
inline bool is_wider(DType d, DType model) { return d == DType::float32 && is_16_bits(model); }
inline Status check_wider(const char *op, const char *slot, const Spec &s, DType model) {
  if (model == DType::unknown) return check_floating(op, slot, s);
  if (same_dtype(s.dtype, model) || is_wider(s.dtype, model)) return kOk;
  return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s%s", op, slot, dtype_name(s.dtype), dtype_name(model),
              is_16_bits(model) ? " or float32" : "");
}

inline Status check_integer(const char *op, const char *slot, const Spec &s) {
  if (s.dtype == DType::unknown || is_integer(s.dtype)) return kOk;
  return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected int32 or int64", op, slot, dtype_name(s.dtype));
}

inline Status check_dtype(const char *op, const char *slot, const Spec &s, DType expected) {
  if (same_dtype(s.dtype, expected)) return kOk;
  return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s", op, slot, dtype_name(s.dtype),
              dtype_name(expected));
}

inline Status check_shape(const char *op, const char *slot, const Spec &s, const char *model_slot, const Spec &model) {
  if (same_shape(s, model)) return kOk;
  return fail(kInvalidArgument, "%s: %s has shape %s, expected %s, the shape of %s", op, slot, ShapeText(s).text,
              ShapeText(model).text, model_slot);
}

inline Status check_like(const char *op, const char *slot, const Spec &s, const char *model_slot, const Spec &model) {
  if (Status status = check_floating(op, slot, s)) return status;
  if (Status status = check_dtype(op, slot, s, model.dtype)) return status;
  return check_shape(op, slot, s, model_slot, model);
}

// An output has the dtype that infer gives it, floating or not, and its shape.
inline Status check_output(const char *op, const char *slot, const Spec &s, const Spec &expected) {
  if (is_floating(expected.dtype)) return check_like(op, slot, s, "this output", expected);
  AOT_TRY(check_dtype(op, slot, s, expected.dtype));
  return check_shape(op, slot, s, "this output", expected);
}

// For a result that may have more elements than the inputs, such as a broadcast one.
inline Status check_size(const char *op, const char *slot, const Spec &s) {
  int64_t elements;
  if (count_elements(s.shape, s.ndim, true, &elements)) return kOk;
  return fail(kInvalidArgument, "%s: %s has shape %s, expected at most 2**50 elements", op, slot, ShapeText(s).text);
}

// ------------------------------------------------------------------------------------------------------ attributes

// A short list of integers that lives inside the operator: no allocation.
struct Ints {
  int n = 0;
  int64_t value[kMaxNdim];
};

// An optional number, of any value, NaN included.
struct Number {
  bool given = false;
  double value = 0;
};

// 'a', 'b' or 'c': the accepted values of an attribute. Null stands for None, which is passed as an absent attribute.
struct WordsText {
  char text[192];
  WordsText(const char *const *words, size_t n) {
    int at = 0;
    for (size_t i = 0; i < n; ++i) {
      const char *before = i == 0 ? "" : i + 1 < n ? ", " : " or ", *quote = words[i] ? "'" : "";
      at += std::snprintf(text + at, sizeof text - at, "%s%s%s%s", before, quote, words[i] ? words[i] : "None", quote);
      if (at >= static_cast<int>(sizeof text)) return;
    }
  }
};

// The attributes of one call, read through `extra`. A getter keeps the default if the attribute is absent. With a
// `signature` there is no call: the getters write down what they would read.
class Attrs {
 public:
  Attrs(const char *op, void *extra, SignatureText *signature = nullptr)
      : op_(op), extra_(extra), signature_(signature) {}

  const char *op() const { return op_; }

  Status get(const char *name, int64_t *value) const {
    if (signature_) return signature_->add(name, 'i'), kOk;
    return check(name, "an integer of 64 bits", extra_get_int(extra_, name, value));
  }
  Status get(const char *name, double *value) const {
    if (signature_) return signature_->add(name, 'f'), kOk;
    return check(name, "a number", extra_get_float(extra_, name, value));
  }
  Status get(const char *name, Number *number) const {
    if (signature_) return signature_->add(name, 'f'), kOk;
    const int found = extra_get_float(extra_, name, &number->value);
    number->given |= found > 0;
    return check(name, "a number", found);
  }
  Status get(const char *name, bool *value) const {
    if (signature_) return signature_->add(name, 'b'), kOk;
    return check(name, "a bool", extra_get_bool(extra_, name, value));
  }
  Status get(const char *name, Ints *value) const {
    if (signature_) return signature_->add(name, 'I'), kOk;
    return check(name, "a list of at most 32 integers of 64 bits",
                 extra_get_ints(extra_, name, value->value, kMaxNdim, &value->n));
  }
  // A choice among words: *value becomes the index of the word given.
  template <size_t n>
  Status get(const char *name, const char *const (&words)[n], int *value) const {
    if (signature_) return signature_->add(name, 's'), kOk;
    char text[32];
    const int found = extra_get_string(extra_, name, text, sizeof text);
    AOT_TRY(check(name, "a short string without NUL", found));
    if (!found) return kOk;
    for (size_t i = 0; i < n; ++i)
      if (words[i] && !std::strcmp(text, words[i])) return *value = static_cast<int>(i), kOk;
    return fail(kInvalidArgument, "%s: %s is '%s', expected %s", op_, name, text, WordsText(words, n).text);
  }

 private:
  Status check(const char *name, const char *kind, int found) const {
    if (found >= 0) return kOk;
    return fail(kInvalidArgument, "%s: attribute %s is not %s", op_, name, kind);
  }
  const char *op_;
  void *extra_;
  SignatureText *signature_;
};

// The data that an Init stores begins with a mark of its operator, so that an entry can refuse another operator's.
struct Marked : AotKernelData {
  const uint64_t mark;
  explicit Marked(uint64_t mark) : mark(mark) {}
};

// A hash (FNV-1a) of the operator's name, the same for every instruction set and device.
constexpr uint64_t mark_of(const char *name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 0x100000001b3;
  return hash;
}

// An operator with its attributes read: what Init stores in `extra` for the calls.
template <class Op>
struct Bound final : Marked {
  Op op;
  int64_t inputs = -1, outputs = kUntold;  // bit i: slot i is present
  static constexpr int64_t kUntold = -1;   // nparam tells how many outputs there are
  static constexpr int n_in = std::size(Op::inputs), n_out = std::size(Op::outputs);
  static constexpr uint64_t kMark = mark_of(Op::name);

  Bound() : Marked(kMark) {}

  Status init(void *extra) {
    Attrs attrs(Op::name, extra);
    AOT_TRY(attrs.get("inputs", &inputs));
    AOT_TRY(attrs.get("outputs", &outputs));
    for (int i = 0; i < n_in; ++i)
      if (!(inputs >> i & 1) && Op::inputs[i].kind == required)
        return fail(kInvalidArgument, "%s: %s is missing", Op::name, Op::inputs[i].name);
    return op.init(attrs);
  }

  // Calls read(n, slot, &tensor) for each input that is present, where n counts them; *count: how many there are.
  template <class Read>
  Status read_inputs(int nparam, Read read, Tensor *in, int *count) const {
    int n = 0;
    for (int i = 0; i < n_in; ++i) {
      if (!(inputs >> i & 1)) continue;
      if (n >= nparam)
        return fail(kConventionMisused, "%s: %d tensors given, %s is missing", Op::name, nparam, Op::inputs[i].name);
      AOT_TRY(read(n, Op::inputs[i], &in[i]));
      ++n;
    }
    return *count = n, kOk;
  }
};

template <class Op>
int init(void *extra) noexcept {
  if (!extra) return fail(kConventionMisused, "%s: Init is given no extra", Op::name);
  auto *bound = new (std::nothrow) Bound<Op>;
  if (!bound) return fail(kOutOfMemory, "%s: out of memory", Op::name);
  if (Status status = bound->init(extra)) return delete bound, status;
  delete extra_view(extra)->kernel_data;
  extra_view(extra)->kernel_data = bound;
  return kOk;
}

// ---------------------------------------------------------------------------------------------------------- entries

// Checks a tensor for any operator. `unknown_dims`: dimensions may be unknown.
inline Status check_spec(const char *op, const Slot &slot, int ndim, const int64_t *shape, const char *dtype,
                         bool unknown_dims, int64_t *elements) {
  if (ndim < 0 || ndim > kMaxNdim)
    return fail(kInvalidArgument, "%s: %s has %d dimensions, expected at most %d", op, slot.name, ndim, kMaxNdim);
  if (ndim && !shape) return fail(kConventionMisused, "%s: the shape of %s is null", op, slot.name);
  if (!dtype) return fail(kConventionMisused, "%s: the dtype of %s is null", op, slot.name);
  const ShapeText text(shape, ndim);
  for (int i = 0; i < ndim && !unknown_dims; ++i)
    if (shape[i] < 0)
      return fail(kInvalidArgument, "%s: %s has shape %s, expected no dimension below 0", op, slot.name, text.text);
  if (!count_elements(shape, ndim, unknown_dims, elements))
    return fail(kInvalidArgument, "%s: %s has shape %s, expected at most 2**50 elements", op, slot.name, text.text);
  if (parse_dtype(dtype) == DType::other)
    return fail(kUnsupportedDtype, "%s: %s has dtype %s, expected %s", op, slot.name, dtype, slot.dtypes);
  return kOk;
}

// The checks that read_tensor skips for an ordinary tensor.
[[gnu::cold, gnu::noinline]] inline Status examine_tensor(const char *op, const Slot &slot, const void *data, int ndim,
                                                          const int64_t *shape, const char *dtype) {
  int64_t elements;
  AOT_TRY(check_spec(op, slot, ndim, shape, dtype, false, &elements));
  if (data || !elements) return kOk;
  return fail(kConventionMisused, "%s: the data of %s is null, its shape is %s", op, slot.name,
              ShapeText(shape, ndim).text);
}

// By ndim: a shape whose dimensions all have at most this many bits has at most kMostElements.
struct SafeBits {
  uint8_t of[kMaxNdim + 1] = {50};
  constexpr SafeBits() {
    for (int i = 1; i <= kMaxNdim; ++i) of[i] = 50 / i;
  }
};
constexpr SafeBits kSafeBits;

inline Status read_tensor(const char *op, const Slot &slot, void *data, int ndim, const int64_t *shape,
                          const char *dtype, Tensor *t) {
  if (static_cast<unsigned>(ndim) > kMaxNdim || (ndim && !shape) || !dtype)
    return examine_tensor(op, slot, data, ndim, shape, dtype);
  uint64_t bits = 0;
  for (int i = 0; i < ndim; ++i) bits |= t->shape[i] = shape[i];
  t->data = data, t->ndim = ndim, t->dtype = parse_dtype(dtype);
  if (bits >> kSafeBits.of[ndim] || !data || t->dtype == DType::other)
    return examine_tensor(op, slot, data, ndim, shape, dtype);
  return kOk;
}

template <class Op>
using Launcher = Status(const Op &op, const Tensor *in, const Tensor *out, void *stream);

template <class Op>
int run(const Bound<Op> &bound, Launcher<Op> launch, int nparam, void **params, int *ndims, int64_t **shapes,
        const char **dtypes, void *stream) noexcept {
  constexpr int n_in = Bound<Op>::n_in, n_out = Bound<Op>::n_out;
  // 1. read
  if (nparam > 0 && !(params && ndims && shapes && dtypes))
    return fail(kConventionMisused, "%s: params, ndims, shapes or dtypes is null", Op::name);
  const auto read = [&](int i, const Slot &slot, Tensor *t) {
    return read_tensor(Op::name, slot, params[i], ndims[i], shapes[i], dtypes[i], t);
  };
  Tensor in[n_in], out[n_out];
  int n = 0;
  AOT_TRY(bound.read_inputs(nparam, read, in, &n));
  for (int i = 0; i < n_out; ++i) {
    if (!(bound.outputs >> i & 1)) continue;
    if (n == nparam) {
      if (bound.outputs == bound.kUntold) break;
      return fail(kConventionMisused, "%s: %d tensors given, %s is missing", Op::name, nparam, Op::outputs[i].name);
    }
    AOT_TRY(read(n, Op::outputs[i], &out[i]));
    ++n;
  }
  if (n != nparam) return fail(kConventionMisused, "%s: %d tensors given, expected %d", Op::name, nparam, n);
  // 2. check
  Spec expected[n_out];
  AOT_TRY(bound.op.infer(in, expected));
  int64_t elements = 0;
  for (int i = 0; i < n_out; ++i) {
    const Slot &slot = Op::outputs[i];
    if (!out[i] && slot.kind != required) continue;
    if (!out[i]) return fail(kConventionMisused, "%s: output %s is missing", Op::name, slot.name);
    if (slot.kind == workspace && out[i].dtype == expected[i].dtype && out[i].size() >= expected[i].size()) continue;
    AOT_TRY(check_output(Op::name, slot.name, out[i], expected[i]));
    elements += out[i].size();
  }
  // 3. launch, unless the outputs are empty
  return elements ? launch(bound.op, in, out, stream) : kOk;
}

// Calls f with the operator and its attributes: those that Init stored in `extra`, or, without Init, read now.
template <class Op, class F>
int with_bound(void *extra, F f) noexcept {
  if (extra && extra_view(extra)->kernel_data) {
    auto *marked = static_cast<Marked *>(extra_view(extra)->kernel_data);
    if (marked->mark != Bound<Op>::kMark)
      return fail(kConventionMisused, "%s: extra holds the data of another operator's Init", Op::name);
    return f(static_cast<const Bound<Op> &>(*marked));
  }
  Bound<Op> bound;
  AOT_TRY(bound.init(extra));
  return f(bound);
}

template <class Op>
int run(Launcher<Op> launch, int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
        void *extra) noexcept {
  return with_bound<Op>(
      extra, [=](const Bound<Op> &bound) { return run(bound, launch, nparam, params, ndims, shapes, dtypes, stream); });
}

// ------------------------------------------------------------------------------------------------------- inference

// <entry>Infer: the spec of every output slot, from the inputs that are present. A dimension may be kUnknownDim, a
// shape {kUnknownRank}; outputs that depend on these are unknown too. Status and message are those of the entry on the
// same inputs. out_shapes: a row of kMaxNdim for each output slot.
template <class Op>
int infer_outputs(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *extra,
                  int *out_ndims, int64_t *out_shapes, const char **out_dtypes) noexcept {
  return with_bound<Op>(extra, [=](const Bound<Op> &bound) -> Status {
    constexpr int n_out = Bound<Op>::n_out;
    const auto read = [&](int i, const Slot &slot, Tensor *t) -> Status {
      int64_t elements;
      AOT_TRY(check_spec(Op::name, slot, ndims[i], shapes[i], dtypes[i], true, &elements));
      t->dtype = parse_dtype(dtypes[i]), t->ndim = ndims[i];
      for (int k = 0; k < t->ndim; ++k) t->shape[k] = shapes[i][k];
      return kOk;
    };
    Tensor in[Bound<Op>::n_in];
    int n = 0;
    AOT_TRY(bound.read_inputs(nparam, read, in, &n));
    if (n != nparam) return fail(kConventionMisused, "%s: %d tensors given, expected %d", Op::name, nparam, n);
    Spec out[n_out];
    AOT_TRY(bound.op.infer(in, out));
    for (int i = 0; i < n_out; ++i) {
      out_ndims[i] = out[i].ndim, out_dtypes[i] = dtype_name(out[i].dtype);
      for (int k = 0; k < out[i].ndim; ++k) out_shapes[i * kMaxNdim + k] = out[i].shape[k];
    }
    return kOk;
  });
}

// <entry>Signature: inputs, outputs and attributes, each followed by a mark and a space, each of the three lists ended
// by
// ";". Marks of slots: "-", "?" optional, "*" a workspace. Those of attributes, in the order in which init reads them,
// are the letters of their types (aotops/op.py). Where init refuses to go on without values, "!" takes the place of the
// last
// ";": "x- weight? ;y- stats? ;normalized_shapeI epsf ;".
template <class Op>
const char *signature() noexcept {
  static const SignatureText made = [] {
    SignatureText made = {};
    for (const Slot &slot : Op::inputs) made.add(slot.name, "-?*"[slot.kind]);
    made.end(';');
    for (const Slot &slot : Op::outputs) made.add(slot.name, "-?*"[slot.kind]);
    made.end(';');
    Op op;
    made.end(op.init(Attrs(Op::name, nullptr, &made)) ? '!' : ';');
    return made;
  }();
  return made.text;
}

// MindSpore's numbers for its dtypes (mindapi/base/type_id.h).
enum TypeId : int {
  kTypeBool = 30,
  kTypeInt8 = 32,
  kTypeInt16 = 33,
  kTypeInt32 = 34,
  kTypeInt64 = 35,
  kTypeUInt8 = 37,
  kTypeUInt16 = 38,
  kTypeUInt32 = 39,
  kTypeUInt64 = 40,
  kTypeFloat16 = 42,
  kTypeFloat32 = 43,
  kTypeFloat64 = 44,
  kTypeBFloat16 = 45,
  kTypeFloat8_E4M3FN = 46,
  kTypeFloat8_E5M2 = 47,
  kTypeComplex64 = 51,
  kTypeComplex128 = 52
};
constexpr struct {
  DType dtype;
  TypeId id;
} kTypeIds[] = {{DType::int32, kTypeInt32},
                {DType::int64, kTypeInt64},
                {DType::float16, kTypeFloat16},
                {DType::float32, kTypeFloat32},
                {DType::float64, kTypeFloat64},
                {DType::bfloat16, kTypeBFloat16},
                {DType::boolean, kTypeBool},
                {DType::int8, kTypeInt8},
                {DType::uint8, kTypeUInt8},
                {DType::int16, kTypeInt16},
                {DType::uint16, kTypeUInt16},
                {DType::uint32, kTypeUInt32},
                {DType::uint64, kTypeUInt64},
                {DType::complex64, kTypeComplex64},
                {DType::complex128, kTypeComplex128},
                {DType::float8_e4m3fn, kTypeFloat8_E4M3FN},
                {DType::float8_e5m2, kTypeFloat8_E5M2}};

// The specs of the outputs that are present. If inference fails they are unknown, since MindSpore's companions cannot
// report an error; the call itself does.
template <class Op, class ReadInput>
std::vector<Spec> infer(void *extra, ReadInput read_input) {
  constexpr int n_in = Bound<Op>::n_in;
  const auto read = [&](int i, const Slot &, Tensor *t) { return read_input(i, t), kOk; };
  Bound<Op> bound;
  std::vector<Spec> result;
  bool failed = bound.init(extra) != kOk;
  Tensor in[n_in];
  int n = 0;
  failed |= bound.read_inputs(n_in, read, in, &n) != kOk;
  Spec out[Bound<Op>::n_out];
  failed = failed || bound.op.infer(in, out) != kOk;
  for (int i = 0; i < Bound<Op>::n_out; ++i)
    if (bound.outputs >> i & 1) result.push_back(failed ? Spec::unknown_rank(in[0].dtype) : out[i]);
  return result;
}

template <class Op>
std::vector<std::vector<int64_t>> infer_shapes(int *ndims, int64_t **shapes, void *extra) {
  std::vector<std::vector<int64_t>> result;
  for (const Spec &s : infer<Op>(extra, [&](int n, Tensor *t) {
         *static_cast<Spec *>(t) = Spec::unknown_rank(DType::unknown);
         int64_t elements;
         if (ndims[n] < 0 || ndims[n] > kMaxNdim || !count_elements(shapes[n], ndims[n], true, &elements)) return;
         t->ndim = ndims[n];
         for (int i = 0; i < t->ndim; ++i) t->shape[i] = shapes[n][i];
       }))
    result.emplace_back(s.shape, s.shape + s.ndim);
  return result;
}

template <class Op>
std::vector<TypeId> infer_types(const std::vector<TypeId> &types, void *extra) {
  std::vector<TypeId> result;
  for (const Spec &s : infer<Op>(extra, [&](int n, Tensor *t) {
         *static_cast<Spec *>(t) = Spec::unknown_rank(DType::other);
         for (auto known : kTypeIds)
           if (n < static_cast<int>(types.size()) && known.id == types[n]) t->dtype = known.dtype;
       })) {
    TypeId id = types.empty() ? kTypeFloat32 : types[0];
    for (auto known : kTypeIds)
      if (known.dtype == s.dtype) id = known.id;
    result.push_back(id);
  }
  return result;
}

template <class Op, class T>
auto one_or_list(std::vector<T> outputs) {
  if constexpr (std::size(Op::outputs) == 1) return outputs.empty() ? T{} : outputs[0];
  else return outputs;
}

}  // namespace AOT_ISA
}  // namespace aot

// Exports an entry and its companions. With one output slot the companions return that output's, else a list of them.
#define AOT_ENTRY(Op, symbol, launcher)                                                                          \
  AOT_API int symbol(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, \
                     void *extra) {                                                                              \
    return ::aot::run<Op>(launcher, nparam, params, ndims, shapes, dtypes, stream, extra);                       \
  }                                                                                                              \
  AOT_COMPANIONS(Op, symbol)

#define AOT_COMPANIONS(Op, symbol)                                                                            \
  AOT_API int symbol##Init(int *, int64_t **, const char **, void *extra) { return ::aot::init<Op>(extra); }  \
  AOT_API int symbol##Infer(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes,  \
                            void *extra, int *out_ndims, int64_t *out_shapes, const char **out_dtypes) {      \
    return ::aot::infer_outputs<Op>(nparam, ndims, shapes, dtypes, extra, out_ndims, out_shapes, out_dtypes); \
  }                                                                                                           \
  AOT_API const char *symbol##Signature() { return ::aot::signature<Op>(); }                                  \
  AOT_API auto symbol##InferShape(int *ndims, int64_t **shapes, void *extra) {                                \
    return ::aot::one_or_list<Op>(::aot::infer_shapes<Op>(ndims, shapes, extra));                             \
  }                                                                                                           \
  AOT_API auto symbol##InferType(std::vector<::aot::TypeId> types, void *extra) {                             \
    return ::aot::one_or_list<Op>(::aot::infer_types<Op>(types, extra));                                      \
  }
