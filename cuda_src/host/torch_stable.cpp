// The operators of LibTorch's dispatcher, registered through its stable C ABI, which is found in the loaded library: a
// C++ program needs no Python for them, and this file no header of torch.
//
// One generic kernel serves every operator, on the CPU and on CUDA, of this library and of others. The frontend tells
// of an operator when it registers it (torch_operator.h says what); a C++ program has those of this library in
// build/torch_table.inc, which packaging/torch_table.py makes of the definitions. What a kernel returns, strides too,
// is what the fake kernel of frontends/torch.py says.
#include <link.h>

#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "elementwise_strides.h"
#include "libraries.h"
#include "number_text.h"
#include "torch_abi.h"
#include "torch_operator.h"

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

// Bindings that are kept of each operator. A program has few, unless an attribute changes with each call.
constexpr int kMostBound = 256;

// ----------------------------------------------------------------------------------------------------------- one call

class Invocation {
 public:
  explicit Invocation(const DispatchedOperator &op) : op_(op) {}
  Invocation(const Invocation &) = delete;
  ~Invocation() {
    for (int i = 0; i < n_owned_; ++i) stable.aoti_torch_delete_tensor_object(owned_[i]);
  }

  // Results take the place of the arguments.
  Status run(Value *stack) {
    take_inputs(stack);
    take_attributes(stack + op_.n_inputs);
    take_wanted(stack + op_.n_inputs + op_.attributes.size());
    AOT_TRY(check_arguments());
    bind();
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
  const char *name() const { return op_.name.c_str(); }

  // A kernel owns its arguments. An argument that may be absent is null, or the address of a value on the heap.
  Value take_optional(Value argument, bool *given) const {
    auto *value = reinterpret_cast<Value *>(argument);
    if (!(*given = value)) return 0;
    const Value result = *value;
    if (stable.torch_delete_stable_ivalue) stable.torch_delete_stable_ivalue(value);
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
    for (const Attribute &attribute : op_.attributes) {
      bool given = true;
      const Value value = attribute.optional ? take_optional(*stack++, &given) : *stack++;
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
        stable.torch_list_size(list, &n);
        add(n);
        for (size_t k = 0; k < n; ++k) stable.torch_list_get_item(list, k, &value), add(value);
        stable.torch_delete_list(list);
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
    stable.torch_string_length(string, &n), stable.torch_string_c_str(string, &text);
    const auto unprintable = [](char c) { return c < ' ' || c > '~'; };
    if (std::any_of(text, text + n, unprintable)) {
      refused_ = &attribute, refused_text_.assign(text, n);
      std::replace_if(refused_text_.begin(), refused_text_.end(), unprintable, '?');
    }
    add(n), key_.append(text, n);
    stable.torch_delete_string(string);
  }

  void take_wanted(const Value *argument) {
    wanted_ = all_results();
    if (!op_.maskable) return;
    void *list = reinterpret_cast<void *>(*argument);
    stable.torch_list_size(list, &n_wanted_);
    size_t k = 0;
    for (int i = 0; i < op_.n_results; ++i) {
      if (!(op_.maskable >> i & 1) || k == n_wanted_) continue;
      Value flag = 0;
      stable.torch_list_get_item(list, k++, &flag);
      if (!(flag & 0xff)) wanted_ &= ~(1u << i);
    }
    stable.torch_delete_list(list);
  }

  unsigned all_results() const { return (1u << op_.n_results) - 1; }

  // After all arguments were taken, so that what they own is freed.
  Status check_arguments() const {
    if (refused_)
      return fail(kInvalidArgument, "%s: %s is '%.80s', expected a string of printable ASCII characters", name(),
                  refused_->name.c_str(), refused_text_.c_str());
    return n_wanted_ == static_cast<size_t>(__builtin_popcount(op_.maskable)) ? kOk : wrong_wanted();
  }

  Status wrong_wanted() const {
    std::string names;
    for (int i = 0; i < op_.n_results; ++i)
      if (op_.maskable >> i & 1) names += (names.empty() ? "" : ", ") + op_.written[i];
    return fail(kInvalidArgument, "%s: wanted has %zu values, expected %d, for %s", name(), n_wanted_,
                __builtin_popcount(op_.maskable), names.c_str());
  }

  // ------------------------------------------------------------------------------------------------------ attributes

  void bind() {
    const size_t hash = std::hash<std::string>()(key_);
    BoundAttributes *found = op_.bound.find([&](const BoundAttributes &b) { return b.hash == hash && b.key == key_; });
    if (!found) {
      auto bound = std::make_unique<BoundAttributes>();
      bound->key = key_, bound->hash = hash;
      op_.add_slots(&bound->call);
      bound->call.attrs = attributes_as_text();
      for (int d : {kCpu, kCuda}) bound->call.functions[d] = op_.functions[d];
      found = bound.get();
      if (op_.n_bound >= kMostBound) temporary_ = std::move(bound);
      else ++op_.n_bound, op_.bound.add(std::move(bound));
    }
    call_ = &found->call;
  }

  static double as_double(Value bits) {
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  // The values in key_, as extra.h reads them.
  std::string attributes_as_text() const {
    std::string text;
    const char *at = key_.data();
    const auto next = [&at] {
      Value value;
      std::memcpy(&value, at, sizeof value), at += sizeof value;
      return value;
    };
    for (const Attribute &attribute : op_.attributes) {
      if (*at++ == '0') continue;
      text += (text.empty() ? "" : "\n") + attribute.name + "=";
      const Value value = next();
      switch (attribute.kind) {
        case Kind::text:
          text.append(at, value), at += value;
          break;
        case Kind::integers:
          for (Value k = 0; k < value; ++k) text += (k ? "," : "") + std::to_string(static_cast<int64_t>(next()));
          break;
        case Kind::number:
          text += number_text(as_double(value));
          break;
        default:
          text += std::to_string(static_cast<int64_t>(value));
      }
    }
    return text;
  }

  // ---------------------------------------------------------------------------------------------------------- inputs

  Status infer() {
    EntryArguments<kMaxSlots> a;
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (!t.handle) continue;
      if (stable.aoti_torch_get_dim(t.handle, &t.ndim) || stable.aoti_torch_get_sizes(t.handle, &t.shape) ||
          stable.aoti_torch_get_strides(t.handle, &t.strides) || stable.aoti_torch_get_dtype(t.handle, &t.dtype) ||
          stable.aoti_torch_get_device_type(t.handle, &t.device_type) ||
          stable.aoti_torch_get_device_index(t.handle, &t.device_index))
        return fail(kUnsupportedDtype, "%s: %s cannot be read, expected a strided tensor: %s", name(),
                    op_.inputs[i].c_str(), torch_error());
      a.push(nullptr, t.ndim, t.shape, dtype_text(t.dtype));
    }
    device_ = inputs_[0].device_type == stable.cuda ? kCuda : kCpu;
    void *extra;
    AOT_TRY(call_->extra(device_, slots(all_results()), &extra));
    const EntryFunctions &f = op_.functions[device_];
    return f.adopt(f.infer(a.n, a.ndims, a.shapes, a.dtypes, extra, out_ndims_, out_shapes_[0], out_dtypes_));
  }

  // A call's slots with some results: bit i for slot i.
  unsigned slots(unsigned results) const {
    const unsigned workspaces = ((1u << op_.n_workspaces) - 1) << op_.n_results;
    return given_ | (results | workspaces) << op_.n_inputs;
  }

  Status check_inputs() {
    const TensorView &first = inputs_[0];
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (t.handle && (t.device_type != first.device_type || t.device_index != first.device_index))
        return fail(kInvalidArgument, "%s: %s is on %s, expected %s, the device of %s", name(), op_.inputs[i].c_str(),
                    device_text(t).c_str(), device_text(first).c_str(), op_.inputs[0].c_str());
    }
    for (int i = 0; i < op_.n_inputs; ++i) {
      TensorView &t = inputs_[i];
      if (!t.handle) continue;
      if (stable.aoti_torch_get_data_ptr(t.handle, &t.data))
        return fail(kDeviceError, "%s: %s cannot be read: %s", name(), op_.inputs[i].c_str(), torch_error());
      if (!t.data && t.size())
        return fail(kDeviceError, "%s: %s has no memory: its storage was freed", name(), op_.inputs[i].c_str());
    }
    return kOk;
  }

  static std::string device_text(const TensorView &t) {
    if (t.device_type == stable.cpu) return "cpu";
    const std::string name = t.device_type == stable.cuda ? "cuda" : "device " + std::to_string(t.device_type);
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
      AOT_TRY(allocate_one(op_.inputs[i].c_str(), t.ndim, t.shape, as_vectors_ ? strides_ : dense, t.dtype, &copy,
                           &t.data));
      if (stable.aoti_torch_copy_(copy, t.handle, 0))
        return fail(kDeviceError, "%s: %s cannot be copied: %s", name(), op_.inputs[i].c_str(), torch_error());
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
        AOT_TRY(allocate_undefined(op_.written[i].c_str(), &results_[i]));
        continue;
      }
      int64_t dense[kMaxNdim];
      row_major(out_ndims_[i], out_shapes_[i], dense);
      AOT_TRY(allocate_one(op_.written[i].c_str(), out_ndims_[i], out_shapes_[i], as_vectors_ ? strides_ : dense,
                           dtype_number(out_dtypes_[i]), &results_[i], &out_data_[i]));
    }
    return kOk;
  }

  // Whether the entry gets memory for a result or workspace.
  bool is_passed(int i) const { return i >= op_.n_results || wanted_ >> i & 1; }

  Status allocate_undefined(const char *slot, TensorHandle *handle) {
    if (stable.aoti_torch_new_uninitialized_tensor(handle))
      return out_of_memory_ = true, fail(kDeviceError, "%s: %s cannot be made: %s", name(), slot, torch_error());
    owned_[n_owned_++] = *handle;
    return kOk;
  }

  // On the CPU a small one is on the stack.
  Status allocate_workspace(int i) {
    const int64_t n = out_shapes_[i][0], one = 1;
    const int64_t size = element_bytes(out_dtypes_[i]);
    if (device_ == kCpu && n <= static_cast<int64_t>(sizeof scratch_ - n_scratch_) / size) {
      out_data_[i] = scratch_ + n_scratch_;
      n_scratch_ += (n * size + 63) / 64 * 64;
      return kOk;
    }
    TensorHandle handle;
    return allocate_one(op_.written[i].c_str(), 1, &n, &one, dtype_number(out_dtypes_[i]), &handle, &out_data_[i]);
  }

  Status allocate_one(const char *slot, int64_t ndim, const int64_t *shape, const int64_t *strides, int32_t dtype,
                      TensorHandle *handle, void **data) {
    const TensorView &model = inputs_[0];
    if (stable.aoti_torch_empty_strided(ndim, shape, strides, dtype, model.device_type, model.device_index, handle))
      return out_of_memory_ = true, fail(kDeviceError, "%s: %s of shape %s cannot be allocated: %s", name(), slot,
                                         ShapeText(shape, static_cast<int>(ndim)).text, torch_error());
    owned_[n_owned_++] = *handle;
    if (stable.aoti_torch_get_data_ptr(*handle, data))
      return fail(kDeviceError, "%s: %s has no address: %s", name(), slot, torch_error());
    return kOk;
  }

  // ---------------------------------------------------------------------------------------------------------- launch

  Status launch_entry() {
    void *extra;
    AOT_TRY(call_->extra(device_, slots(wanted_), &extra));
    EntryArguments<kMaxSlots> a;
    int64_t elements = inputs_[0].size();
    const auto pass = [&](void *data, int64_t ndim, int64_t *shape, const char *dtype) {
      if (as_vectors_) a.push(data, 1, &elements, dtype);
      else a.push(data, ndim, shape, dtype);
    };
    for (int i = 0; i < op_.n_inputs; ++i)
      if (const TensorView &t = inputs_[i]; t.handle) pass(t.data, t.ndim, t.shape, dtype_text(t.dtype));
    for (int i = 0; i < op_.n_results + op_.n_workspaces; ++i)
      if (is_passed(i)) pass(out_data_[i], out_ndims_[i], out_shapes_[i], out_dtypes_[i]);
    void *stream = nullptr;
    const int32_t index = inputs_[0].device_index;
    if (device_ == kCuda) AOT_TRY(current_stream(name(), index, &stream));
    return launch(op_.functions[device_], device_, index, a, a.params, stream, extra);
  }

 public:
  bool out_of_memory() const { return out_of_memory_; }

 private:
  const DispatchedOperator &op_;
  TensorHandle owned_[3 * kMaxSlots];  // inputs, their copies, workspaces and results
  int n_owned_ = 0;
  TensorView inputs_[kMaxSlots];
  unsigned given_ = 0;  // bit i: input i
  unsigned wanted_;     // bit i: result i
  size_t n_wanted_ = 0;
  std::string key_;  // the attributes, as bytes
  const Attribute *refused_ = nullptr;
  std::string refused_text_;
  std::unique_ptr<BoundAttributes> temporary_;
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

// The exception that Python is to raise.
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

// ----------------------------------------------------------------------------------------------------------- kernels

// As torch's own stable kernels do, a kernel throws, and the dispatcher's caller catches.
void run(const DispatchedOperator &op, Value *stack) {
  Status status;
  bool out_of_memory;
  {
    Invocation invocation(op);
    status = invocation.run(stack), out_of_memory = invocation.out_of_memory();
  }
  if (!status) return;
  const std::string text = aot_last_error();
  if (python.none) throw PythonError(status, out_of_memory, text.c_str());
  throw std::runtime_error(text);
}

// A kernel of torch's is a plain function, to which nothing is bound: there is one for each operator that may come.
constexpr size_t kMostOperators = 512;
std::mutex registering;
std::deque<DispatchedOperator> operators;  // kept for good. Only who registers one looks at it
const DispatchedOperator *served[kMostOperators];
std::atomic<bool> registered{false};  // one of this library's operators is

template <size_t i>
void kernel(Value *stack, uint64_t, uint64_t) {
  run(*served[i], stack);
}

template <size_t... i>
Kernel *kernel_of(size_t wanted, std::index_sequence<i...>) {
  static constexpr Kernel *kernels[] = {kernel<i>...};
  return kernels[wanted];
}

// ------------------------------------------------------------------------------------------------------- registration

constexpr char kOwnName[] = "aotops";

Status open_torch() {
  static const Status found = find_torch();
  if (!found) return kOk;
  return find_torch();  // for the message, or because torch is loaded now
}

Status torch_refused(const char *what) { return fail(kConventionMisused, "torch: %s: %s", what, torch_error()); }

bool is_implemented(std::string_view library, std::string_view schema) {
  return std::any_of(operators.begin(), operators.end(),
                     [&](const DispatchedOperator &op) { return op.library == library && op.schema == schema; });
}

Status read_operator(const char *library, const char *schema, const char *written, bool elementwise,
                     DispatchedOperator *op) {
  const SharedLibrary *owner = find_library(std::strcmp(library, kOwnName) ? library : "");
  if (!owner) return fail(kInvalidArgument, "torch: the library %s is not registered", library);
  op->library = library, op->elementwise = elementwise;
  AOT_TRY(op->read(schema, written));
  int entries = 0, inferring = 0;
  for (Device d : {kCpu, kCuda}) {
    EntryFunctions &f = op->functions[d];
    if (f.read(owner->handle, symbol_of("aot_" + op->name, d))) ++entries, inferring += f.infer != nullptr;
  }
  if (entries && inferring == entries) return kOk;
  return fail(kNotImplemented, "torch: the library %s has no complete entry of %s: rebuild it", library, schema);
}

// torch's objects for registrations are kept for good: to delete one is to unregister what it registered.
Status implement(const char *library, const char *schema, const char *written, bool elementwise) {
  const size_t i = operators.size();
  if (i == kMostOperators)
    return fail(kNotImplemented, "torch: there are kernels of %zu operators already, for more there is no place", i);
  DispatchedOperator &op = operators.emplace_back();
  const Status status = read_operator(library, schema, written, elementwise, &op);
  if (status) return operators.pop_back(), status;
  served[i] = &op;
  for (const char *key : {"CPU", "CUDA"}) {
    void *registration;
    if (stable.aoti_torch_library_init_impl(library, key, __FILE__, __LINE__, &registration))
      return torch_refused(library);
    Kernel *const made = kernel_of(i, std::make_index_sequence<kMostOperators>());
    if (stable.torch_library_impl(registration, op.name.c_str(), made, kAbiVersion))
      return torch_refused(op.name.c_str());
  }
  if (op.library == kOwnName) registered = true;
  return kOk;
}

Status define(const char *schema) {
  static void *library;
  if (!library && stable.aoti_torch_library_init_fragment(kOwnName, __FILE__, __LINE__, &library))
    return torch_refused(kOwnName);
  const bool has_tags = stable.torch_library_def_with_tags && stable.torch_tag_needs_exact_strides;
  const int32_t tag = has_tags ? stable.torch_tag_needs_exact_strides() : 0;
  const bool failed = has_tags ? stable.torch_library_def_with_tags(library, schema, &tag, 1)
                               : stable.aoti_torch_library_def(library, schema);
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
    int (*theirs)(), (*ours)();
    const char *(*version)();
    find(handle, "aot_torch_registered", &theirs), find(handle, "aot_version", &version);
    find(find_library("")->handle, "aot_torch_registered", &ours);
    dlclose(handle);
    if (!theirs || theirs == ours || !theirs()) continue;
    if (!version || std::strcmp(version(), AOT_VERSION))
      return fail(kInvalidArgument, "torch: %s has registered the operators of its version %s, expected %s",
                  path.c_str(), version ? version() : "", AOT_VERSION);
    return *found = true, kOk;
  }
  return kOk;
}

// The operators of this library.
constexpr struct {
  const char *schema, *written;
  bool elementwise;
} kOwn[] = {
#include "torch_table.inc"
};

}  // namespace

// 1: operators of torch's dispatcher are this library's.
AOT_API int aot_torch_registered() { return registered; }

AOT_API int aot_torch_register() {
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  bool elsewhere = false;
  AOT_TRY(find_other_copy(&elsewhere));
  for (const auto &own : kOwn) {
    if (elsewhere || is_implemented(kOwnName, own.schema)) continue;
    AOT_TRY(define(own.schema));
    AOT_TRY(implement(kOwnName, own.schema, own.written, own.elementwise));
  }
  return kOk;
}

// Registers the kernels of an operator that Python has defined with this schema. `library`: its namespace, and the name
// by which libraries.h knows the library of its entries. torch_operator.h says what `written` is.
AOT_API int aot_torch_implement(const char *library, const char *schema, const char *written, int elementwise) {
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  return implement(library, schema, written, elementwise);
}
