// The operators of LibTorch's dispatcher, registered through its stable C ABI, which is found in the loaded library: a
// C++ program needs no Python for them, and this file no header of torch.
//
// build/torch_table.inc has a row for each operator, made of the definitions (packaging/torch_table.py). One generic
// kernel serves every row, on the CPU and on CUDA. What it returns, strides too, is what the fake kernel of
// frontends/torch.py says.
#include <dlfcn.h>
#include <link.h>
#include <locale.h>

#include <array>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "calls.h"
#include "libraries.h"

// The base class of exceptions that torch's bindings turn into the Python exception that they set. It is declared here
// because a boxed kernel has no other way to say which one. Where it is not known, it is a runtime_error.
namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

WEAK void *PyImport_ImportModule(const char *name);

namespace {

using namespace aot;

// --------------------------------------------------------------------------------------------------------- the table

enum class Kind { integer, number, boolean, text, integers };

struct Attribute {
  const char *name;
  Kind kind;
  bool optional;
};

constexpr int kMaxAttributes = 8;

struct Operator {
  const char *name, *schema;
  int n_inputs;
  const char *inputs[kMaxSlots];
  unsigned optional;  // bit i: input i may be absent
  int n_results, n_workspaces;
  const char *written[kMaxSlots];  // results, then workspaces
  unsigned maskable;               // bit i: the argument `wanted` has a value for result i
  bool elementwise;
  int n_attributes;
  Attribute attributes[kMaxAttributes];
};

constexpr Operator kOperators[] = {
#include "torch_table.inc"
};
constexpr size_t kCount = std::size(kOperators);

constexpr bool have_few_optional_slots() {
  for (const Operator &op : kOperators)
    if (__builtin_popcount(op.optional) + __builtin_popcount(op.maskable) > kMaxOptional) return false;
  return true;
}
static_assert(have_few_optional_slots(), "Call::extras has no place for them");

// -------------------------------------------------------------------------------------------------- torch's functions

using TensorHandle = void *;
using Value = uint64_t;  // StableIValue: a handle, an integer, the bits of a double
using Kernel = void(Value *stack, uint64_t n_arguments, uint64_t n_results);

// The version of the ABI that this file is written for: LibTorch 2.10.
constexpr uint64_t kAbiVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

#define STABLE_FUNCTIONS(F)                                                                                           \
  F(aoti_torch_library_init_fragment, const char *name, const char *file, uint32_t line, void **library)              \
  F(aoti_torch_library_init_impl, const char *name, const char *key, const char *file, uint32_t line, void **library) \
  F(aoti_torch_library_def, void *library, const char *schema)                                                        \
  F(torch_library_impl, void *library, const char *name, Kernel *kernel, uint64_t version)                            \
  F(aoti_torch_get_dim, TensorHandle, int64_t *)                                                                      \
  F(aoti_torch_get_sizes, TensorHandle, int64_t **)                                                                   \
  F(aoti_torch_get_strides, TensorHandle, int64_t **)                                                                 \
  F(aoti_torch_get_dtype, TensorHandle, int32_t *)                                                                    \
  F(aoti_torch_get_device_type, TensorHandle, int32_t *)                                                              \
  F(aoti_torch_get_device_index, TensorHandle, int32_t *)                                                             \
  F(aoti_torch_get_data_ptr, TensorHandle, void **)                                                                   \
  F(aoti_torch_copy_, TensorHandle to, TensorHandle from, int32_t non_blocking)                                       \
  F(aoti_torch_empty_strided, int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype,              \
    int32_t device_type, int32_t device_index, TensorHandle *)                                                        \
  F(aoti_torch_new_uninitialized_tensor, TensorHandle *)                                                              \
  F(aoti_torch_delete_tensor_object, TensorHandle)                                                                    \
  F(torch_list_size, void *list, size_t *)                                                                            \
  F(torch_list_get_item, void *list, size_t, Value *)                                                                 \
  F(torch_delete_list, void *list)                                                                                    \
  F(torch_string_length, void *string, size_t *)                                                                      \
  F(torch_string_c_str, void *string, const char **)                                                                  \
  F(torch_delete_string, void *string)

// 0 is success.
#define DECLARE_FUNCTION(name, ...) int32_t (*name)(__VA_ARGS__);
struct Torch {
  STABLE_FUNCTIONS(DECLARE_FUNCTION)
  int32_t (*torch_library_def_with_tags)(void *library, const char *schema, const int32_t *tags, int32_t n);  // 2.12
  int32_t (*torch_tag_needs_exact_strides)();                                                                 // 2.12
  int32_t (*torch_delete_stable_ivalue)(Value *);                                                             // 2.13
  const char *(*torch_exception_get_what_without_backtrace)();                                                // 2.13

  int32_t cpu, cuda;
  const char *dtype_names[128];  // by torch's number
  int32_t dtypes[kDTypes];
};
Torch torch;

template <class F>
bool find(void *library, const char *name, F **function) {
  *function = reinterpret_cast<F *>(dlsym(library, name));
  return *function;
}

bool find_constant(void *library, const std::string &name, int32_t *value) {
  int32_t (*read)();
  return find(library, name.c_str(), &read) && (*value = read(), true);
}

Status find_dtypes(void *library) {
  for (const char *name :
       {"bool",      "uint8",      "int8",        "int16",         "int32",           "int64",          "uint16",
        "uint32",    "uint64",     "float16",     "bfloat16",      "float32",         "float64",        "complex32",
        "complex64", "complex128", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"}) {
    int32_t number;
    if (!find_constant(library, std::string("aoti_torch_dtype_") + name, &number)) continue;
    if (number >= 0 && number < static_cast<int32_t>(std::size(torch.dtype_names))) torch.dtype_names[number] = name;
    if (const DType d = parse_dtype(name); d != DType::other) torch.dtypes[static_cast<int>(d)] = number;
  }
  return kOk;
}

// Python loads torch for itself alone, so that the default search does not see it. Its SONAME finds what is loaded.
Status find_torch() {
  void *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (!library)
    return fail(kNotImplemented,
                "torch: libtorch_cpu.so is not loaded: link the program with LibTorch, or load it first");
#define FIND_FUNCTION(name, ...)          \
  if (!find(library, #name, &torch.name)) \
    return fail(kNotImplemented, "torch: libtorch_cpu.so exports no %s, expected LibTorch 2.10 or newer", #name);
  STABLE_FUNCTIONS(FIND_FUNCTION)
  find(library, "torch_library_def_with_tags", &torch.torch_library_def_with_tags);
  find(library, "torch_tag_needs_exact_strides", &torch.torch_tag_needs_exact_strides);
  find(library, "torch_delete_stable_ivalue", &torch.torch_delete_stable_ivalue);
  find(library, "torch_exception_get_what_without_backtrace", &torch.torch_exception_get_what_without_backtrace);
  if (!find_constant(library, "aoti_torch_device_type_cpu", &torch.cpu) ||
      !find_constant(library, "aoti_torch_device_type_cuda", &torch.cuda))
    return fail(kNotImplemented, "torch: libtorch_cpu.so does not tell the numbers of its devices");
  return find_dtypes(library);
}

// Why torch's last function failed. Before 2.13 only its log says so.
const char *torch_error() {
  return torch.torch_exception_get_what_without_backtrace ? torch.torch_exception_get_what_without_backtrace()
                                                          : "torch has logged the reason";
}

Status current_stream(const Operator &op, int32_t device, void **stream) {
  static int32_t (*const get)(int32_t, void **) = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library
               ? reinterpret_cast<int32_t (*)(int32_t, void **)>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
               : nullptr;
  }();
  if (!get) return fail(kNotImplemented, "%s: this LibTorch does not tell its current CUDA stream", op.name);
  return get(device, stream) ? fail(kDeviceError, "%s: the current CUDA stream: %s", op.name, torch_error()) : kOk;
}

// --------------------------------------------------------------------------------------------------- bound attributes

// An operator bound to its attributes.
struct Bound {
  std::string key;
  size_t hash;
  Call call;
  Bound *next;
};

// The entries of an operator, and what they were bound to, which is kept for good: a list that only grows, so that a
// look-up takes no lock.
struct Entries {
  Infer *infer[2];
  Entry *entry[2];
  Init *init[2];
  std::atomic<Bound *> bound;
  std::atomic<int> n_bound;
  bool registered;
};
Entries all_entries[kCount];

// Bindings that are kept of each operator. A program has few, unless an attribute changes with each call.
constexpr int kMostBound = 256;

void find_entries(const Operator &op, Entries *entries) {
  void *handle = find_library("")->handle;
  for (int d : {kCpu, kCuda}) {
    const std::string symbol = std::string("aot_") + op.name + (d == kCpu ? "_cpu" : "_cuda");
    find(handle, symbol.c_str(), &entries->entry[d]);
    find(handle, (symbol + "Init").c_str(), &entries->init[d]);
    find(handle, (symbol + "Infer").c_str(), &entries->infer[d]);
  }
}

std::unique_ptr<Bound> new_bound(const Operator &op, const Entries &entries, std::string key, size_t hash,
                                 std::string attributes) {
  auto bound = std::make_unique<Bound>();
  bound->key = std::move(key), bound->hash = hash;
  Call &call = bound->call;
  call.op = op.name, call.attrs = std::move(attributes), call.last_error = aot_last_error;
  call.n_in = op.n_inputs, call.n_slots = op.n_inputs + op.n_results + op.n_workspaces;
  int bits = 0;
  for (int i = 0; i < call.n_slots; ++i) {
    const bool is_input = i < op.n_inputs;
    const int k = is_input ? i : i - op.n_inputs;
    const bool optional = (is_input ? op.optional : op.maskable) >> k & 1;
    const char *name = is_input ? op.inputs[k] : op.written[k];
    call.slots[i] = {op.name, name, optional ? bits++ : -1, !is_input, false};
  }
  call.has_optional = bits > 0;
  for (int d : {kCpu, kCuda}) call.entry[d] = entries.entry[d], call.init[d] = entries.init[d];
  return bound;
}

// ----------------------------------------------------------------------------------------------------------- one call

struct TensorView {
  TensorHandle handle = nullptr;  // null: absent
  int64_t ndim, *shape, *strides;
  int32_t dtype, device_type, device_index;
  void *data;

  int64_t size() const {
    int64_t n = 1;
    for (int64_t k = 0; k < ndim; ++k) n *= shape[k];
    return n;
  }
  bool has_strides(const int64_t *expected) const {
    for (int64_t k = 0; k < ndim; ++k)
      if (strides[k] != expected[k]) return false;
    return true;
  }
  // Whether the elements lie densely if `order` lists the axes from the innermost one.
  bool dense(const int *order) const {
    int64_t expected = 1;
    for (int64_t i = 0; i < ndim; ++i) {
      const int k = order[i];
      if (shape[k] != 1 && strides[k] != expected) return false;
      expected *= shape[k];
    }
    return true;
  }
  bool contiguous() const {
    int order[kMaxNdim];
    for (int64_t i = 0; i < ndim; ++i) order[i] = static_cast<int>(ndim - 1 - i);
    return dense(order) || size() == 0;
  }
};

// The order of two axes, from the innermost one, that torch gives the result of an elementwise operator: below 0, a
// lies inside b; 0: no input tells. torch._prims_common.compute_elementwise_output_logical_to_physical_perm.
int compare_axes(const TensorView *inputs, int n, int a, int b) {
  const auto at_least = [](int64_t x, int64_t y) { return y == 0 || (x != 0 && (x >= y || x % y == 0)); };
  for (int i = 0; i < n; ++i) {
    if (!inputs[i].handle) continue;
    const int64_t *shape = inputs[i].shape, stride_a = inputs[i].strides[a], stride_b = inputs[i].strides[b];
    if (stride_a == 0 || stride_b == 0) continue;
    if (stride_a == stride_b) {
      if (at_least(shape[b], shape[a])) continue;
      return 1;
    }
    if (at_least(stride_b, stride_a)) return -1;
    if (at_least(stride_a, stride_b)) return 1;
  }
  return 0;
}

// The strides that torch gives the result of an elementwise operator on inputs of one shape, not all contiguous.
void elementwise_strides(const TensorView *inputs, int n, int64_t *strides) {
  const TensorView &model = inputs[0];
  const int ndim = static_cast<int>(model.ndim);
  int order[kMaxNdim];  // from the innermost axis
  for (int i = 0; i < ndim; ++i) order[i] = ndim - 1 - i;
  constexpr int kChannelsLast[] = {1, 3, 2, 0};
  bool channels_last = ndim == 4;
  for (int i = 0; i < n && channels_last; ++i) channels_last = !inputs[i].handle || inputs[i].dense(kChannelsLast);
  if (channels_last) {
    std::copy_n(kChannelsLast, 4, order);
  } else {  // an insertion sort, because not every pair of axes has an order
    for (int i = 1; i < ndim; ++i)
      for (int at = i, before = i - 1; before >= 0; --before) {
        const int comparison = compare_axes(inputs, n, order[before], order[at]);
        if (comparison < 0) break;
        if (comparison > 0) std::swap(order[before], order[at]), at = before;
      }
  }
  int64_t stride = 1;
  for (int i = 0; i < ndim; ++i) strides[order[i]] = stride, stride *= std::max<int64_t>(model.shape[order[i]], 1);
}

class Invocation {
 public:
  Invocation(const Operator &op, Entries &entries) : op_(op), entries_(entries) {}
  Invocation(const Invocation &) = delete;
  ~Invocation() {
    for (int i = 0; i < n_owned_; ++i) torch.aoti_torch_delete_tensor_object(owned_[i]);
  }

  // Results take the place of the arguments.
  Status run(Value *stack) {
    take_inputs(stack);
    take_attributes(stack + op_.n_inputs);
    take_wanted(stack + op_.n_inputs + op_.n_attributes);
    AOT_TRY(check_arguments());
    AOT_TRY(bind());
    AOT_TRY(infer());
    AOT_TRY(check_inputs());
    AOT_TRY(lay_out_inputs());
    AOT_TRY(allocate());
    AOT_TRY(launch_entry());
    for (int i = 0; i < op_.n_results; ++i) std::memcpy(&stack[i], &results_[i], sizeof results_[i]);
    n_owned_ -= op_.n_results;  // they were allocated last
    return kOk;
  }

 private:
  // A kernel owns its arguments. An argument that may be absent is null, or the address of a value on the heap.
  Value take_optional(Value argument, bool *given) const {
    auto *value = reinterpret_cast<Value *>(argument);
    if (!(*given = value)) return 0;
    const Value result = *value;
    if (torch.torch_delete_stable_ivalue) torch.torch_delete_stable_ivalue(value);
    else delete value;
    return result;
  }

  void take_inputs(const Value *stack) {
    for (int i = 0; i < op_.n_inputs; ++i) {
      bool given = true;
      const Value value = op_.optional >> i & 1 ? take_optional(stack[i], &given) : stack[i];
      if (!given) continue;
      inputs_[i].handle = owned_[n_owned_++] = reinterpret_cast<TensorHandle>(value);
      given_ |= 1u << i;
    }
  }

  void take_attributes(const Value *stack) {
    for (int i = 0; i < op_.n_attributes; ++i) {
      const Attribute &attribute = op_.attributes[i];
      bool given = true;
      const Value value = attribute.optional ? take_optional(stack[i], &given) : stack[i];
      key_ += given ? '1' : '0';
      if (given) take_attribute(attribute, value);
    }
  }

  void take_attribute(const Attribute &attribute, Value value) {
    size_t n = 1;
    switch (attribute.kind) {
      case Kind::text:
        return take_text(attribute, reinterpret_cast<void *>(value));
      case Kind::integers: {
        void *list = reinterpret_cast<void *>(value);
        torch.torch_list_size(list, &n);
        add(n);
        for (size_t k = 0; k < n; ++k) torch.torch_list_get_item(list, k, &value), add(value);
        torch.torch_delete_list(list);
        return;
      }
      case Kind::boolean:
        return add(value & 0xff ? 1 : 0);
      default:
        return add(value);
    }
  }

  void add(Value value) { key_.append(reinterpret_cast<char *>(&value), sizeof value); }

  void take_text(const Attribute &attribute, void *string) {
    size_t n = 0;
    const char *text = "";
    torch.torch_string_length(string, &n), torch.torch_string_c_str(string, &text);
    const auto unprintable = [](char c) { return c < ' ' || c > '~'; };
    if (std::any_of(text, text + n, unprintable)) {
      refused_ = &attribute, refused_text_.assign(text, n);
      std::replace_if(refused_text_.begin(), refused_text_.end(), unprintable, '?');
    }
    add(n), key_.append(text, n);
    torch.torch_delete_string(string);
  }

  void take_wanted(const Value *argument) {
    wanted_ = all_results();
    if (!op_.maskable) return;
    void *list = reinterpret_cast<void *>(*argument);
    torch.torch_list_size(list, &n_wanted_);
    size_t k = 0;
    for (int i = 0; i < op_.n_results; ++i) {
      if (!(op_.maskable >> i & 1) || k == n_wanted_) continue;
      Value flag = 0;
      torch.torch_list_get_item(list, k++, &flag);
      if (!(flag & 0xff)) wanted_ &= ~(1u << i);
    }
    torch.torch_delete_list(list);
  }

  unsigned all_results() const { return (1u << op_.n_results) - 1; }

  // After all arguments were taken, so that what they own is freed.
  Status check_arguments() const {
    if (refused_)
      return fail(kInvalidArgument, "%s: %s is '%.80s', expected a string of printable ASCII characters", op_.name,
                  refused_->name, refused_text_.c_str());
    return n_wanted_ == static_cast<size_t>(__builtin_popcount(op_.maskable)) ? kOk : wrong_wanted();
  }

  Status wrong_wanted() const {
    std::string names;
    for (int i = 0; i < op_.n_results; ++i)
      if (op_.maskable >> i & 1) names += (names.empty() ? "" : ", ") + std::string(op_.written[i]);
    return fail(kInvalidArgument, "%s: wanted has %zu values, expected %d, for %s", op_.name, n_wanted_,
                __builtin_popcount(op_.maskable), names.c_str());
  }

  // ------------------------------------------------------------------------------------------------------ attributes

  Status bind() {
    const size_t hash = std::hash<std::string>()(key_);
    for (Bound *b = entries_.bound.load(std::memory_order_acquire); b; b = b->next)
      if (b->hash == hash && b->key == key_) return call_ = &b->call, kOk;
    std::string attributes;
    AOT_TRY(attributes_as_text(&attributes));
    auto bound = new_bound(op_, entries_, key_, hash, std::move(attributes));
    call_ = &bound->call;
    if (entries_.n_bound >= kMostBound) return temporary_ = std::move(bound), kOk;
    ++entries_.n_bound;
    // Two threads may both come here; the second binding is as good as the first.
    bound->next = entries_.bound.load(std::memory_order_relaxed);
    while (!entries_.bound.compare_exchange_weak(bound->next, bound.get(), std::memory_order_release,
                                                 std::memory_order_relaxed)) {
    }
    bound.release();
    return kOk;
  }

  // Of the values in key_, as extra.h reads them.
  Status attributes_as_text(std::string *text) const {
    const char *at = key_.data();
    const auto next = [&at] {
      Value value;
      std::memcpy(&value, at, sizeof value), at += sizeof value;
      return value;
    };
    for (int i = 0; i < op_.n_attributes; ++i) {
      const Attribute &attribute = op_.attributes[i];
      if (*at++ == '0') continue;
      *text += (text->empty() ? "" : "\n") + std::string(attribute.name) + "=";
      const Value value = next();
      switch (attribute.kind) {
        case Kind::text:
          text->append(at, value), at += value;
          break;
        case Kind::integers:
          for (Value k = 0; k < value; ++k) *text += (k ? "," : "") + std::to_string(static_cast<int64_t>(next()));
          break;
        case Kind::number:
          *text += number_as_text(value);
          break;
        default:
          *text += std::to_string(static_cast<int64_t>(value));
      }
    }
    return kOk;
  }

  // Every digit of a double, in the C locale.
  static std::string number_as_text(Value bits) {
    static const locale_t c = newlocale(LC_ALL_MASK, "C", locale_t{});
    double number;
    std::memcpy(&number, &bits, sizeof number);
    char text[32];
    const locale_t before = uselocale(c);
    std::snprintf(text, sizeof text, "%.17g", number + 0.0);  // 0.0 for -0.0
    uselocale(before);
    return text;
  }

  // ---------------------------------------------------------------------------------------------------------- inputs

  Status infer() {
    int ndims[kMaxSlots];
    int64_t *shapes[kMaxSlots];
    const char *dtypes[kMaxSlots];
    int n = 0;
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (!t.handle) continue;
      if (torch.aoti_torch_get_dim(t.handle, &t.ndim) || torch.aoti_torch_get_sizes(t.handle, &t.shape) ||
          torch.aoti_torch_get_strides(t.handle, &t.strides) || torch.aoti_torch_get_dtype(t.handle, &t.dtype) ||
          torch.aoti_torch_get_device_type(t.handle, &t.device_type) ||
          torch.aoti_torch_get_device_index(t.handle, &t.device_index))
        return fail(kUnsupportedDtype, "%s: %s cannot be read, expected a strided tensor: %s", op_.name, op_.inputs[i],
                    torch_error());
      ndims[n] = static_cast<int>(t.ndim), shapes[n] = t.shape, dtypes[n++] = dtype_text(t.dtype);
    }
    device_ = inputs_[0].device_type == torch.cuda ? kCuda : kCpu;
    void *extra;
    AOT_TRY(call_->extra(device_, slots(all_results()), &extra));
    return static_cast<Status>(
        entries_.infer[device_](n, ndims, shapes, dtypes, extra, out_ndims_, out_shapes_[0], out_dtypes_));
  }

  // A call's slots with some results: bit i for slot i.
  unsigned slots(unsigned results) const {
    const unsigned workspaces = ((1u << op_.n_workspaces) - 1) << op_.n_results;
    return given_ | (results | workspaces) << op_.n_inputs;
  }

  static const char *dtype_text(int32_t dtype) {
    const bool known = dtype >= 0 && dtype < static_cast<int32_t>(std::size(torch.dtype_names));
    const char *name = known ? torch.dtype_names[dtype] : nullptr;
    return name ? name : kUnnamedDtype;
  }

  Status check_inputs() {
    const TensorView &first = inputs_[0];
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (t.handle && (t.device_type != first.device_type || t.device_index != first.device_index))
        return fail(kInvalidArgument, "%s: %s is on %s, expected %s, the device of %s", op_.name, op_.inputs[i],
                    device_text(t).c_str(), device_text(first).c_str(), op_.inputs[0]);
    }
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (!t.handle) continue;
      if (torch.aoti_torch_get_data_ptr(t.handle, &t.data))
        return fail(kDeviceError, "%s: %s cannot be read: %s", op_.name, op_.inputs[i], torch_error());
      if (!t.data && t.size())
        return fail(kDeviceError, "%s: %s has no memory: its storage was freed", op_.name, op_.inputs[i]);
    }
    return kOk;
  }

  static std::string device_text(const TensorView &t) {
    if (t.device_type == torch.cpu) return "cpu";
    const std::string name = t.device_type == torch.cuda ? "cuda" : "device " + std::to_string(t.device_type);
    return name + ":" + std::to_string(t.device_index);
  }

  // Makes the inputs contiguous; those of an elementwise operator get the strides of its results.
  Status lay_out_inputs() {
    bool contiguous = true;
    for (int i = 0; i < op_.n_inputs; ++i) contiguous = contiguous && (!inputs_[i].handle || inputs_[i].contiguous());
    if (contiguous) return kOk;
    as_vectors_ = op_.elementwise;
    if (as_vectors_) elementwise_strides(inputs_, op_.n_inputs, strides_);
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (!t.handle || (as_vectors_ ? t.has_strides(strides_) : t.contiguous())) continue;
      int64_t dense[kMaxNdim];
      row_major(t.ndim, t.shape, dense);
      TensorHandle copy;
      AOT_TRY(allocate_one(op_.inputs[i], t.ndim, t.shape, as_vectors_ ? strides_ : dense, t.dtype, &copy, &t.data));
      if (torch.aoti_torch_copy_(copy, t.handle, 0))
        return fail(kDeviceError, "%s: %s cannot be copied: %s", op_.name, op_.inputs[i], torch_error());
      t.handle = copy;
    }
    return kOk;
  }

  static void row_major(int64_t ndim, const int64_t *shape, int64_t *strides) {
    int64_t stride = 1;
    for (int64_t k = ndim - 1; k >= 0; --k) strides[k] = stride, stride *= std::max<int64_t>(shape[k], 1);
  }

  // --------------------------------------------------------------------------------------------------------- outputs

  Status allocate() {
    for (int i = op_.n_results; i < op_.n_results + op_.n_workspaces; ++i) AOT_TRY(allocate_workspace(i));
    for (int i = 0; i < op_.n_results; ++i) {
      if (!is_passed(i)) {
        AOT_TRY(allocate_undefined(op_.written[i], &results_[i]));
        continue;
      }
      int64_t dense[kMaxNdim];
      row_major(out_ndims_[i], out_shapes_[i], dense);
      AOT_TRY(allocate_one(op_.written[i], out_ndims_[i], out_shapes_[i], as_vectors_ ? strides_ : dense,
                           torch.dtypes[static_cast<int>(parse_dtype(out_dtypes_[i]))], &results_[i], &out_data_[i]));
    }
    return kOk;
  }

  // Whether the entry gets memory for a result or workspace.
  bool is_passed(int i) const { return i >= op_.n_results || wanted_ >> i & 1; }

  Status allocate_undefined(const char *slot, TensorHandle *handle) {
    if (torch.aoti_torch_new_uninitialized_tensor(handle))
      return out_of_memory_ = true, fail(kDeviceError, "%s: %s cannot be made: %s", op_.name, slot, torch_error());
    owned_[n_owned_++] = *handle;
    return kOk;
  }

  // On the CPU a small one is on the stack.
  Status allocate_workspace(int i) {
    const int64_t n = out_shapes_[i][0], one = 1;
    const DType dtype = parse_dtype(out_dtypes_[i]);
    if (device_ == kCpu && n * itemsize(dtype) <= static_cast<int64_t>(sizeof scratch_ - n_scratch_)) {
      out_data_[i] = scratch_ + n_scratch_;
      n_scratch_ += (n * itemsize(dtype) + 63) / 64 * 64;
      return kOk;
    }
    TensorHandle handle;
    return allocate_one(op_.written[i], 1, &n, &one, torch.dtypes[static_cast<int>(dtype)], &handle, &out_data_[i]);
  }

  Status allocate_one(const char *slot, int64_t ndim, const int64_t *shape, const int64_t *strides, int32_t dtype,
                      TensorHandle *handle, void **data) {
    const TensorView &model = inputs_[0];
    if (torch.aoti_torch_empty_strided(ndim, shape, strides, dtype, model.device_type, model.device_index, handle))
      return out_of_memory_ = true, fail(kDeviceError, "%s: %s of shape %s cannot be allocated: %s", op_.name, slot,
                                         ShapeText(shape, static_cast<int>(ndim)).text, torch_error());
    owned_[n_owned_++] = *handle;
    if (torch.aoti_torch_get_data_ptr(*handle, data))
      return fail(kDeviceError, "%s: %s has no address: %s", op_.name, slot, torch_error());
    return kOk;
  }

  // ---------------------------------------------------------------------------------------------------------- launch

  Status launch_entry() {
    void *extra;
    AOT_TRY(call_->extra(device_, slots(wanted_), &extra));
    void *params[kMaxSlots], *stream = nullptr;
    int ndims[kMaxSlots], n = 0;
    int64_t *shapes[kMaxSlots], elements = inputs_[0].size();
    const char *dtypes[kMaxSlots];
    const auto pass = [&](void *data, int64_t ndim, int64_t *shape, const char *dtype) {
      params[n] = data, dtypes[n] = dtype;
      ndims[n] = as_vectors_ ? 1 : static_cast<int>(ndim), shapes[n] = as_vectors_ ? &elements : shape, ++n;
    };
    for (int i = 0; i < op_.n_inputs; ++i)
      if (const TensorView &t = inputs_[i]; t.handle) pass(t.data, t.ndim, t.shape, dtype_text(t.dtype));
    for (int i = 0; i < op_.n_results + op_.n_workspaces; ++i)
      if (is_passed(i)) pass(out_data_[i], out_ndims_[i], out_shapes_[i], out_dtypes_[i]);
    if (device_ == kCuda) AOT_TRY(current_stream(op_, inputs_[0].device_index, &stream));
    return static_cast<Status>(launch(device_, inputs_[0].device_index, call_->entry[device_], aot_last_error, n,
                                      params, ndims, shapes, dtypes, stream, extra));
  }

 public:
  bool out_of_memory() const { return out_of_memory_; }

 private:
  const Operator &op_;
  Entries &entries_;
  TensorHandle owned_[3 * kMaxSlots];  // inputs, their copies, workspaces and results
  int n_owned_ = 0;
  TensorView inputs_[kMaxSlots];
  unsigned given_ = 0;  // bit i: input i
  unsigned wanted_;     // bit i: result i
  size_t n_wanted_ = 0;
  std::string key_;  // the attributes, as bytes
  const Attribute *refused_ = nullptr;
  std::string refused_text_;
  std::unique_ptr<Bound> temporary_;
  Call *call_ = nullptr;
  Device device_ = kCpu;
  bool as_vectors_ = false;  // an elementwise operator, on tensors of strides_
  int64_t strides_[kMaxNdim];
  int out_ndims_[kMaxSlots];
  int64_t out_shapes_[kMaxSlots][kMaxNdim];
  const char *out_dtypes_[kMaxSlots];
  void *out_data_[kMaxSlots];
  TensorHandle results_[kMaxSlots];
  bool out_of_memory_ = false;
  int64_t n_scratch_ = 0;
  alignas(64) char scratch_[1 << 15];
};

// ------------------------------------------------------------------------------------------------------------- errors

// What Python is to raise.
class PythonError final : public pybind11::builtin_exception {
 public:
  PythonError(Status status, bool out_of_memory, const char *text)
      : builtin_exception(text), status_(status), out_of_memory_(out_of_memory) {}
  void set_error() const override {
    const Ref exception = out_of_memory_ ? torchs_out_of_memory() : Ref();
    PyErr_SetString(exception ? static_cast<void *>(exception) : python.errors[status_], what());
  }

 private:
  static Ref torchs_out_of_memory() {
    const Ref module = PyImport_ImportModule("torch");
    Ref found = module ? PyObject_GetAttr(module, PyUnicode_InternFromString("OutOfMemoryError")) : nullptr;
    if (!found) PyErr_Clear();
    return found;
  }
  Status status_;
  bool out_of_memory_;
};

// As torch's own stable kernels do, a kernel throws, and the dispatcher's caller catches.
template <size_t i>
void kernel(Value *stack, uint64_t, uint64_t) {
  Status status;
  bool out_of_memory;
  {
    Invocation invocation(kOperators[i], all_entries[i]);
    status = invocation.run(stack), out_of_memory = invocation.out_of_memory();
  }
  if (!status) return;
  const std::string text = aot_last_error();
  if (python.none) throw PythonError(status, out_of_memory, text.c_str());
  throw std::runtime_error(text);
}

template <size_t... i>
constexpr std::array<Kernel *, sizeof...(i)> all_kernels(std::index_sequence<i...>) {
  return {kernel<i>...};
}
constexpr auto kKernels = all_kernels(std::make_index_sequence<kCount>());

// ------------------------------------------------------------------------------------------------------- registration

std::mutex registering;
constexpr char kNamespace[] = "aotops";

Status open_torch() {
  static const Status found = find_torch();
  if (!found) return kOk;
  return find_torch();  // for the message, or because torch is loaded now
}

Status torch_refused(const char *what) { return fail(kConventionMisused, "torch: %s: %s", what, torch_error()); }

// The libraries of registrations are kept for good: to delete one is to unregister what it registered.
Status implement(size_t i) {
  static void *libraries[2];
  find_entries(kOperators[i], &all_entries[i]);
  for (int d : {kCpu, kCuda}) {
    if (!libraries[d] &&
        torch.aoti_torch_library_init_impl(kNamespace, d == kCpu ? "CPU" : "CUDA", __FILE__, __LINE__, &libraries[d]))
      return torch_refused(kNamespace);
    if (torch.torch_library_impl(libraries[d], kOperators[i].name, kKernels[i], kAbiVersion))
      return torch_refused(kOperators[i].name);
  }
  all_entries[i].registered = true;
  return kOk;
}

Status define(size_t i) {
  static void *library;
  if (!library && torch.aoti_torch_library_init_fragment(kNamespace, __FILE__, __LINE__, &library))
    return torch_refused(kNamespace);
  const char *schema = kOperators[i].schema;
  const bool has_tags = torch.torch_library_def_with_tags && torch.torch_tag_needs_exact_strides;
  const int32_t tag = has_tags ? torch.torch_tag_needs_exact_strides() : 0;
  const bool failed = has_tags ? torch.torch_library_def_with_tags(library, schema, &tag, 1)
                               : torch.aoti_torch_library_def(library, schema);
  return failed ? torch_refused(schema) : kOk;
}

// Whether another copy of this library in the process has registered its operators; false, and an error, if it has
// another version.
Status find_other_copy(bool *found) {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *paths) {
        if (*info->dlpi_name) static_cast<std::vector<std::string> *>(paths)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  for (const std::string &path : paths) {
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!handle) continue;
    auto *registered = reinterpret_cast<int (*)()>(dlsym(handle, "aot_torch_registered"));
    auto *version = reinterpret_cast<const char *(*)()>(dlsym(handle, "aot_version"));
    dlclose(handle);
    if (!registered ||
        dlsym(find_library("")->handle, "aot_torch_registered") == reinterpret_cast<void *>(registered) ||
        !registered())
      continue;
    if (!version || std::strcmp(version(), AOT_VERSION))
      return fail(kInvalidArgument, "torch: %s has registered the operators of its version %s, expected %s",
                  path.c_str(), version ? version() : "", AOT_VERSION);
    return *found = true, kOk;
  }
  return kOk;
}

}  // namespace

// 1: operators of torch's dispatcher are this library's.
AOT_API int aot_torch_registered() {
  return std::any_of(std::begin(all_entries), std::end(all_entries), [](const Entries &e) { return e.registered; });
}

AOT_API int aot_torch_register() {
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  bool elsewhere = false;
  AOT_TRY(find_other_copy(&elsewhere));
  for (size_t i = 0; i < kCount && !elsewhere; ++i) {
    if (all_entries[i].registered) continue;
    AOT_TRY(define(i));
    AOT_TRY(implement(i));
  }
  return kOk;
}

// Registers the kernels of an operator that Python has defined with this schema.
AOT_API int aot_torch_implement(const char *schema) {
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  for (size_t i = 0; i < kCount; ++i)
    if (!std::strcmp(kOperators[i].schema, schema)) return implement(i);
  return fail(kInvalidArgument, "torch: the library has no operator %s: rebuild it with `make lib`", schema);
}
