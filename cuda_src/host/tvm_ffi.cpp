// Operators as functions of tvm-ffi's calling convention: what the stubs of tvm_ffi.h call, of any library.
//
// A function takes the operator's inputs, attributes and outputs, in the order of its entry. Whatever is absent at the
// end, or None, is an optional input that is not given, an attribute's default, or an output to allocate. Where the
// caller gives outputs, these are written and None is returned. Without them the function allocates and returns the
// required outputs, or all optional ones where none is required, as in a backward: a tensor, or an Array of several.
#include "tvm_ffi.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "bound_entry.h"
#include "number_text.h"
#include "tvm_ffi_abi.h"

namespace aot::tvm_ffi {

namespace {

constexpr int kMaxTensors = 64;
constexpr int kMostBound = 256;
constexpr int kMostKey = 128;
constexpr int kMostForms = 8;
constexpr Any kAbsent = {kNone, 0, {0}};

struct Argument {
  std::string name;
  char mark;  // as <entry>Signature says
};

// The entries' data for some attributes and a set of slots.
struct Binding {
  Device device;
  std::vector<uint64_t> key;
  void *extra = nullptr;
  Binding *next;

  ~Binding() {
    if (extra) extra_delete(extra);
  }
};

// The arguments of a call but for its tensors' memory and shapes, and what they are bound to. Most calls have the form
// of an earlier one, and are then not read again.
struct Form {
  static constexpr int kMostArgs = 16;
  int n_args, n_inputs;  // that are given
  Device device;
  uint32_t tensors;  // bit i: argument i is one
  void *extra;       // of a Binding, which is kept
  Form *next;
  Any args[kMostArgs];  // those that are no tensors

  bool fits(const Any *given, int32_t n) const {
    if (n != n_args) return false;
    for (int32_t i = 0; i < n; ++i)
      if (tensors >> i & 1 ? !is_on_device(given[i]) : std::memcmp(&given[i], &args[i], sizeof(Any)) != 0) return false;
    return true;
  }

 private:
  bool is_on_device(const Any &any) const {
    return is_tensor(any) && tensor(any).device_type == (device == kCpu ? kDLCpu : kDLCuda);
  }
};

}  // namespace

struct Operator {
  GrowingList<Form> forms;
  std::atomic<int> n_forms{0};
  std::string name;
  EntryFunctions functions[2];  // by aot::Device
  std::vector<Argument> inputs, outputs, attributes;
  GrowingList<Binding> bound;
  std::atomic<int> n_bound{0};

  Status read(const Exported &exported) {
    name = exported.name;
    Dl_info info;
    void *library = nullptr;
    if (dladdr(&exported, &info)) library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = dlopen(nullptr, RTLD_NOW);  // it is part of the program
    const char *(*signature)() = nullptr;
    for (Device d : {kCuda, kCpu}) {
      const std::string symbol = symbol_of("aot_" + name, d);
      if (functions[d].read(library, symbol)) find(library, (symbol + "Signature").c_str(), &signature);
    }
    if (!signature)
      return fail(kNotImplemented, "%s: the library has no complete entry aot_%s_cpu or aot_%s_cuda", exported.name,
                  exported.name, exported.name);
    return read_signature(signature());
  }

  bool has_required_output() const {
    return std::any_of(outputs.begin(), outputs.end(), [](const Argument &output) { return output.mark == '-'; });
  }

  std::string argument_names() const {
    std::string names;
    for (const auto *list : {&inputs, &attributes, &outputs})
      for (const Argument &one : *list) names += (names.empty() ? "" : ", ") + one.name;
    return names;
  }

 private:
  Status read_signature(const char *at) {
    std::vector<Argument> *lists[] = {&inputs, &outputs, &attributes};
    for (auto *list : lists)
      for (;;) {
        const char *end = at + std::strcspn(at, " ;!");
        if (*end != ' ') {
          at = end + 1;
          if (*end == ';') break;
          return fail(kNotImplemented,
                      "%s: tvm-ffi: its init refuses to go on without values, expected that it reads all attributes "
                      "before it checks them",
                      name.c_str());
        }
        list->push_back({std::string(at, end - 1), end[-1]});
        at = end + 1;
      }
    if (inputs.size() + outputs.size() < static_cast<size_t>(kMaxTensors)) return kOk;
    return fail(kNotImplemented, "%s: tvm-ffi: it has more than %d tensors", name.c_str(), kMaxTensors - 1);
  }
};

namespace {

// ---------------------------------------------------------------------------------------------------------- attributes

// An attribute's value, as a key and as the text that extra.h reads.
class Value {
 public:
  Value(const Any &any, char kind) : any_(any), kind_(kind) {}

  // False: it has another type.
  bool fits() const {
    switch (kind_) {
      case 'b':
        return any_.type == kBool;
      case 'i':
        return any_.type == kInt;
      case 'f':
        return any_.type == kInt || any_.type == kFloat;
      case 's':
        return is_string() && is_printable();
      default:
        return any_.type == kInt || any_.type == kShape || is_list_of_ints();
    }
  }

  static const char *expected(char kind) {
    switch (kind) {
      case 'b':
        return "True or False";
      case 'i':
        return "an integer of 64 bits";
      case 'f':
        return "a number";
      case 's':
        return "a string of printable ASCII characters";
      default:
        return "integers of 64 bits";
    }
  }

  // Calls add(word) for what tells it from another value.
  template <class Add>
  void add_to_key(Add add) const {
    if (kind_ == 's') {
      const Bytes text = bytes();
      add(text.size);
      for (size_t i = 0; i < text.size; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, text.data + i, std::min(sizeof word, text.size - i));
        add(word);
      }
    } else if (any_.type >= kObject) {
      add(size());
      for (int64_t i = 0; i < size(); ++i) add(item(i));
    } else {
      add(static_cast<uint64_t>(any_.type) << 32), add(any_.integer);
    }
  }

  std::string text() const {
    if (kind_ == 's') return std::string(bytes().data, bytes().size);
    if (any_.type == kFloat) return number_text(any_.number);
    if (any_.type < kObject) return std::to_string(any_.integer);
    std::string list;
    for (int64_t i = 0; i < size(); ++i) list += (i ? "," : "") + std::to_string(item(i));
    return list;
  }

 private:
  bool is_string() const { return any_.type == kRawString || any_.type == kSmallString || any_.type == kString; }
  Bytes bytes() const {
    if (any_.type == kSmallString) return {any_.small, any_.small_length};
    if (any_.type == kString) return *cell<Bytes>(any_.pointer);
    return {any_.string, std::strlen(any_.string)};
  }
  bool is_printable() const {
    const Bytes text = bytes();
    return std::all_of(text.data, text.data + text.size, [](char c) { return ' ' <= c && c <= '~'; });
  }

  const SequenceCell *sequence() const { return cell<SequenceCell>(any_.pointer); }
  int64_t size() const {
    return any_.type == kShape ? static_cast<int64_t>(cell<ShapeCell>(any_.pointer)->size) : sequence()->size;
  }
  const Any &element(int64_t i) const { return static_cast<const Any *>(sequence()->data)[i]; }
  int64_t item(int64_t i) const {
    return any_.type == kShape ? cell<ShapeCell>(any_.pointer)->data[i] : element(i).integer;
  }
  bool is_list_of_ints() const {
    if (any_.type != kArray && any_.type != kList) return false;
    for (int64_t i = 0; i < sequence()->size; ++i)
      if (element(i).type != kInt) return false;
    return true;
  }

  const Any &any_;
  char kind_;
};

// ------------------------------------------------------------------------------------------------------------- memory

// A tensor of the library's own, for callers on the CPU that set no allocator: its memory begins with its struct.
Status new_tensor_on_cpu(const Api &tvm, const DLTensor &like, int64_t bytes, void **tensor) {
  constexpr size_t kAlignment = 64;
  const size_t head =
      (sizeof(ManagedTensor) + 2 * kMaxNdim * sizeof(int64_t) + kAlignment - 1) / kAlignment * kAlignment;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto *memory = static_cast<char *>(std::aligned_alloc(kAlignment, head + rounded));
  if (!memory) return kOutOfMemory;
  auto *managed = reinterpret_cast<ManagedTensor *>(memory);
  auto *shape = reinterpret_cast<int64_t *>(managed + 1), *strides = shape + kMaxNdim;
  int64_t stride = 1;
  for (int k = like.ndim - 1; k >= 0; --k)
    shape[k] = like.shape[k], strides[k] = stride, stride *= std::max<int64_t>(shape[k], 1);
  managed->tensor = like;
  managed->tensor.data = memory + head, managed->tensor.shape = shape, managed->tensor.strides = strides;
  managed->context = nullptr, managed->deleter = [](ManagedTensor *self) { std::free(self); };
  if (!tvm.tensor_of(managed, 0, 0, tensor)) return kOk;
  std::free(memory);
  return kOutOfMemory;
}

class DeviceGuard {
 public:
  Status enter(const Exported &e, int device) {
    int current = -1;
    if (!e.get_device)
      return fail(kNotImplemented, "%s: this library was built without CUDA: build it where nvcc is", e.name);
    if (e.get_device(&current)) return fail(kDeviceError, "%s: cudaGetDevice failed", e.name);
    if (current == device) return kOk;
    if (e.set_device(device)) return fail(kDeviceError, "%s: cudaSetDevice(%d) failed", e.name, device);
    return set_device_ = e.set_device, previous_ = current, kOk;
  }
  ~DeviceGuard() {
    if (previous_ >= 0) set_device_(previous_);
  }

 private:
  int (*set_device_)(int) = nullptr;
  int previous_ = -1;
};

// ------------------------------------------------------------------------------------------------------------ one call

class Invocation {
 public:
  Invocation(const Exported &exported, Operator &op, const Api &tvm, const Any *args, int32_t n_args)
      : exported_(exported), op_(op), tvm_(tvm), args_(args), n_args_(n_args) {}
  Invocation(const Invocation &) = delete;
  ~Invocation() {
    for (int i = 0; i < n_owned_; ++i) tvm_.release(owned_[i]);
    for (int i = 0; i < n_scratch_; ++i) std::free(scratch_[i]);
  }

  Status run(Any *result) {
    const Form *form = op_.forms.find([this](const Form &f) { return f.fits(args_, n_args_); });
    if (form && read_plainly(*form)) return *result = Any::none(), launch();
    AOT_TRY(check_count());
    AOT_TRY(read_inputs());
    AOT_TRY(read_attributes());
    AOT_TRY(read_outputs());
    AOT_TRY(bind());
    AOT_TRY(allocate());
    AOT_TRY(check_overlap());
    if (!form) keep_form();
    AOT_TRY(launch());
    return give(result);
  }

  // A function of tvm-ffi has failed, and its error is set.
  bool has_raised() const { return has_raised_; }

 private:
  const char *name() const { return op_.name.c_str(); }
  int n_in() const { return static_cast<int>(op_.inputs.size()); }
  int n_out() const { return static_cast<int>(op_.outputs.size()); }
  int n_attrs() const { return static_cast<int>(op_.attributes.size()); }

  // ------------------------------------------------------------------------------------------------- calls of a form

  // False, and nothing is read: the call is read in full, which also finds what is wrong.
  bool read_plainly(const Form &form) {
    device_ = form.device, extra_ = form.extra;
    for (int i = 0; i < n_args_; ++i)
      if (form.tensors >> i & 1 && !push_plain(tensor(args_[i]))) return a_.n = 0, false;
    for (int i = form.n_inputs; i < a_.n; ++i)
      for (int j = 0; j < i; ++j)
        if (!may_write(i, j, form.n_inputs)) return a_.n = 0, false;
    return true;
  }

  bool push_plain(const DLTensor &t) {
    if (!a_.n) device_id_ = device_ == kCpu ? 0 : t.device_id;
    int64_t elements;
    if ((device_ == kCuda && t.device_id != device_id_) || t.ndim < 0 || t.ndim > kMaxNdim || t.lanes != 1 ||
        !is_contiguous(t, &elements))
      return false;
    auto *data = static_cast<char *>(t.data) + t.byte_offset;
    const int size = t.bits / 8;
    if (is_unaligned(data, size)) return false;
    bytes_[a_.n] = elements * size;
    return a_.push(data, t.ndim, t.shape, dlpack_dtype(t)), true;
  }

  void keep_form() {
    if (to_allocate_ || temporary_ || n_args_ > Form::kMostArgs || op_.n_forms >= kMostForms) return;
    auto form = std::make_unique<Form>();
    form->n_args = n_args_, form->tensors = 0;
    for (int i = 0; i < n_args_; ++i) {
      if (is_tensor(args_[i])) form->tensors |= 1u << i;
      else if (args_[i].type > kFloat && args_[i].type != kSmallString) return;  // a pointer, whose content may change
      form->args[i] = args_[i];
    }
    form->n_inputs = n_given_inputs_, form->device = device_, form->extra = extra_;
    ++op_.n_forms, op_.forms.add(std::move(form));
  }

  const Any &argument(int i) const { return i < n_args_ ? args_[i] : kAbsent; }

  Status check_count() const {
    const int most = n_in() + n_attrs() + n_out();
    if (n_args_ <= most) return kOk;
    return fail(kUnsupportedDtype, "%s: %d arguments given, expected at most %d: %s", name(), n_args_, most,
                op_.argument_names().c_str());
  }

  // ---------------------------------------------------------------------------------------------------------- tensors

  Status read_inputs() {
    for (int i = 0; i < n_in(); ++i) {
      const Argument &input = op_.inputs[i];
      if (argument(i).type == kNone && input.mark != '-') continue;
      AOT_TRY(read_tensor(input, argument(i)));
      given_ |= uint64_t{1} << i;
    }
    n_given_inputs_ = a_.n;
    return a_.n ? kOk : fail(kUnsupportedDtype, "%s: no tensor given, expected one", name());
  }

  // `slot`: of a_, where it becomes the next tensor.
  Status read_tensor(const Argument &slot, const Any &any) {
    if (!is_tensor(any))
      return fail(kUnsupportedDtype, "%s: %s is %s, expected a tensor%s", name(), slot.name.c_str(), type_text(any),
                  slot.mark == '-' ? "" : " or None");
    const DLTensor &t = tensor(any);
    if (t.ndim < 0 || t.ndim > kMaxNdim)
      return fail(kInvalidArgument, "%s: %s has %d dimensions, expected at most %d", name(), slot.name.c_str(), t.ndim,
                  kMaxNdim);
    AOT_TRY(check_device(slot, t));
    int64_t elements;
    if (!is_contiguous(t, &elements))
      return fail(kInvalidArgument, "%s: %s has shape %s and strides %s, expected a contiguous tensor", name(),
                  slot.name.c_str(), ShapeText(t.shape, t.ndim).text, ShapeText(t.strides, t.ndim).text);
    auto *data = static_cast<char *>(t.data) + t.byte_offset;
    const int size = t.bits / 8;
    if (is_unaligned(data, size))
      return fail(kInvalidArgument, "%s: %s is at address %p, expected a multiple of %d", name(), slot.name.c_str(),
                  static_cast<void *>(data), size);
    slots_[a_.n] = &slot, bytes_[a_.n] = elements * size;
    a_.push(data, t.ndim, t.shape, t.lanes == 1 ? dlpack_dtype(t) : kUnnamedDtype);
    return kOk;
  }

  static bool is_unaligned(const void *data, int size) {
    return size && !(size & (size - 1)) && reinterpret_cast<uintptr_t>(data) & (size - 1);
  }

  static bool is_contiguous(const DLTensor &t, int64_t *elements) {
    bool contiguous = true;
    int64_t n = 1;
    for (int k = t.ndim - 1; k >= 0; n *= t.shape[k--])
      contiguous &= !t.strides || t.strides[k] == n || t.shape[k] == 1;
    return *elements = n, contiguous || n == 0;
  }

  // The first tensor chooses the device; the others must be on it.
  Status check_device(const Argument &slot, const DLTensor &t) {
    const bool is_cpu = t.device_type == kDLCpu || t.device_type == kDLCudaHost;
    if (!is_cpu && t.device_type != kDLCuda)
      return fail(kNotImplemented, "%s: %s is on a device of DLPack's type %d, expected cpu or cuda", name(),
                  slot.name.c_str(), t.device_type);
    const int id = is_cpu ? 0 : t.device_id;
    if (!a_.n) return device_ = is_cpu ? kCpu : kCuda, device_id_ = id, kOk;
    if ((device_ == kCpu) == is_cpu && id == device_id_) return kOk;
    return fail(kInvalidArgument, "%s: %s is on %s, expected %s, the device of %s", name(), slot.name.c_str(),
                device_text(is_cpu, id).c_str(), device_text(device_ == kCpu, device_id_).c_str(),
                slots_[0]->name.c_str());
  }

  static std::string device_text(bool is_cpu, int id) { return is_cpu ? "cpu" : "cuda:" + std::to_string(id); }

  // Where the caller gives outputs these are all, but for workspaces.
  Status read_outputs() {
    const int first = n_in() + n_attrs();
    for (int i = first; i < n_args_; ++i) destination_passing_ |= args_[i].type != kNone;
    const bool all = !op_.has_required_output();
    for (int i = 0; i < n_out(); ++i) {
      const Argument &output = op_.outputs[i];
      const Any &any = argument(first + i);
      const bool wanted = output.mark == '*' || output.mark == '-' || (all && !destination_passing_);
      if (!wanted && any.type == kNone) continue;
      given_ |= uint64_t{1} << (n_in() + i);
      if (any.type != kNone || (destination_passing_ && output.mark == '-')) AOT_TRY(read_tensor(output, any));
      else to_allocate_ |= uint64_t{1} << a_.n, slots_[a_.n] = &output, a_.push(nullptr, 0, nullptr, nullptr);
      output_of_[a_.n - 1] = i;
    }
    return kOk;
  }

  // Whether tensor i, an output, and j share no memory, or are an output and an input element for element.
  bool may_write(int i, int j, int n_inputs) const {
    const char *a = static_cast<char *>(a_.params[i]), *b = static_cast<char *>(a_.params[j]);
    const bool disjoint = a + bytes_[i] <= b || b + bytes_[j] <= a;
    return disjoint || (j < n_inputs && a == b && bytes_[i] == bytes_[j]);
  }

  // An output may be an input, element for element. Nothing else may share an output's memory.
  Status check_overlap() const {
    for (int i = n_given_inputs_; i < a_.n; ++i)
      for (int j = 0; j < i && destination_passing_; ++j) {
        if (!may_write(i, j, n_given_inputs_))
          return fail(kInvalidArgument, "%s: %s shares memory with %s", name(), slots_[i]->name.c_str(),
                      slots_[j]->name.c_str());
      }
    return kOk;
  }

  // ------------------------------------------------------------------------------------------------------- attributes

  Status read_attributes() {
    for (int i = 0; i < n_attrs(); ++i) {
      const Any &any = argument(n_in() + i);
      const Argument &attribute = op_.attributes[i];
      if (any.type == kNone) {
        add_to_key(~uint64_t{0});
        continue;
      }
      const Value value(any, attribute.mark);
      if (!value.fits())
        return fail(kUnsupportedDtype, "%s: %s is %s, expected %s", name(), attribute.name.c_str(), type_text(any),
                    Value::expected(attribute.mark));
      value.add_to_key([this](uint64_t word) { add_to_key(word); });
    }
    return kOk;
  }

  void add_to_key(uint64_t word) {
    if (n_key_ < kMostKey) key_[n_key_] = word;
    ++n_key_;
  }

  bool is_bound_to(const Binding &b) const {
    if (b.device != device_ || b.key.size() != static_cast<size_t>(n_key_)) return false;
    for (int i = 0; i < n_key_; ++i)
      if (b.key[i] != key_[i]) return false;
    return true;
  }

  Status bind() {
    add_to_key(given_);
    if (n_key_ > kMostKey) return fail(kInvalidArgument, "%s: the attributes have too many values", name());
    const Binding *found = op_.bound.find([this](const Binding &b) { return is_bound_to(b); });
    if (found) return extra_ = found->extra, kOk;
    if (!op_.functions[device_].entry)
      return fail(kNotImplemented,
                  "%s: its library has no entry for %s: if it has a .cu source, build it where nvcc is", name(),
                  device_ == kCpu ? "the CPU" : "CUDA");
    auto made = std::make_unique<Binding>();
    made->device = device_, made->key.assign(key_, key_ + n_key_);
    AOT_TRY(op_.functions[device_].bind(attributes_as_text().c_str(), &made->extra));
    extra_ = made->extra;
    if (op_.n_bound >= kMostBound) temporary_ = std::move(made);
    else ++op_.n_bound, op_.bound.add(std::move(made));
    return kOk;
  }

  std::string attributes_as_text() const {
    std::string text;
    for (int i = 0; i < n_attrs(); ++i) {
      const Any &any = argument(n_in() + i);
      const Argument &attribute = op_.attributes[i];
      if (any.type != kNone) text += attribute.name + "=" + Value(any, attribute.mark).text() + "\n";
    }
    const uint64_t inputs = given_ & ((uint64_t{1} << n_in()) - 1);
    return text + "inputs=" + std::to_string(inputs) + "\noutputs=" + std::to_string(given_ >> n_in());
  }

  // ------------------------------------------------------------------------------------------------------- allocation

  Status allocate() {
    if (!to_allocate_) return kOk;
    const EntryFunctions &f = op_.functions[device_];
    if (!f.infer) return fail(kNotImplemented, "%s: its library has no Infer of it", name());
    out_shapes_.reset(new int64_t[n_out() * kMaxNdim]);
    int ndims[kMaxTensors];
    const char *dtypes[kMaxTensors];
    AOT_TRY(
        f.adopt(f.infer(n_given_inputs_, a_.ndims, a_.shapes, a_.dtypes, extra_, ndims, out_shapes_.get(), dtypes)));
    for (int i = n_given_inputs_; i < a_.n; ++i) {
      if (!(to_allocate_ >> i & 1)) continue;
      const int slot = output_of_[i];
      a_.ndims[i] = ndims[slot], a_.shapes[i] = &out_shapes_[slot * kMaxNdim], a_.dtypes[i] = dtypes[slot];
      int64_t elements = 1;
      for (int k = 0; k < a_.ndims[i]; ++k) elements *= a_.shapes[i][k];
      bytes_[i] = elements * element_bytes(a_.dtypes[i]);
      AOT_TRY(allocate(i));
    }
    return kOk;
  }

  Status allocate(int i) {
    const bool scratch = slots_[i]->mark == '*';
    if (scratch && device_ == kCpu) {
      scratch_[n_scratch_] = a_.params[i] = std::aligned_alloc(64, (bytes_[i] + 64) / 64 * 64);
      return a_.params[i] ? ++n_scratch_, kOk : out_of_memory(i);
    }
    DLTensor like = {};
    like.device_type = device_ == kCpu ? kDLCpu : kDLCuda, like.device_id = device_id_;
    like.ndim = a_.ndims[i], like.shape = a_.shapes[i];
    if (!set_dtype(a_.dtypes[i], &like))
      return fail(kNotImplemented, "%s: %s has dtype %s, which DLPack does not have", name(), slots_[i]->name.c_str(),
                  a_.dtypes[i]);
    void *made = nullptr;
    if (tvm_.get_allocator()) {
      if (tvm_.allocate(&like, &made)) return has_raised_ = true, kOutOfMemory;
    } else if (device_ == kCpu) {
      if (new_tensor_on_cpu(tvm_, like, bytes_[i], &made)) return out_of_memory(i);
    } else {
      return fail(kInvalidArgument,
                  "%s: %s cannot be allocated on cuda: the caller has set no allocator, expected %s as argument %d",
                  name(), slots_[i]->name.c_str(), slots_[i]->name.c_str(), n_in() + n_attrs() + output_of_[i] + 1);
    }
    owned_[n_owned_++] = made;
    if (!scratch) results_[n_results_++] = made;
    const DLTensor &t = *cell<DLTensor>(made);
    return a_.params[i] = static_cast<char *>(t.data) + t.byte_offset, kOk;
  }

  Status out_of_memory(int i) const {
    return fail(kOutOfMemory, "%s: %s of shape %s cannot be allocated", name(), slots_[i]->name.c_str(),
                ShapeText(a_.shapes[i], a_.ndims[i]).text);
  }

  // ----------------------------------------------------------------------------------------------------------- launch

  Status launch() {
    const EntryFunctions &f = op_.functions[device_];
    if (device_ == kCpu) return f.adopt(f.entry(a_.n, a_.params, a_.ndims, a_.shapes, a_.dtypes, nullptr, extra_));
    DeviceGuard guard;
    AOT_TRY(guard.enter(exported_, device_id_));
    void *stream = tvm_.get_stream(kDLCuda, device_id_);
    return f.adopt(f.entry(a_.n, a_.params, a_.ndims, a_.shapes, a_.dtypes, stream, extra_));
  }

  // The result has a reference of its own.
  Status give(Any *result) {
    *result = Any::none();
    if (!n_results_) return kOk;
    if (n_results_ > 1) return give_array(result);
    *result = Any::object(kTensor, results_[0]);
    n_owned_ = static_cast<int>(std::remove(owned_, owned_ + n_owned_, results_[0]) - owned_);
    return kOk;
  }

  Status give_array(Any *result) {
    Any items[kMaxTensors];
    for (int i = 0; i < n_results_; ++i) items[i] = Any::object(kTensor, results_[i]);
    if (tvm_.make_array(items, n_results_, result)) return has_raised_ = true, kConventionMisused;
    return kOk;
  }

  const Exported &exported_;
  Operator &op_;
  const Api &tvm_;
  const Any *args_;
  const int32_t n_args_;
  EntryArguments<kMaxTensors> a_;
  const Argument *slots_[kMaxTensors];  // of a_
  int output_of_[kMaxTensors];          // by place in a_
  int64_t bytes_[kMaxTensors];
  int n_given_inputs_ = 0;
  uint64_t given_ = 0;        // bit i: slot i, inputs first
  uint64_t to_allocate_ = 0;  // bit i: place i in a_
  bool destination_passing_ = false, has_raised_ = false;
  Device device_ = kCpu;
  int device_id_ = 0;
  uint64_t key_[kMostKey];
  int n_key_ = 0;
  void *extra_ = nullptr;
  std::unique_ptr<Binding> temporary_;
  std::unique_ptr<int64_t[]> out_shapes_;
  void *owned_[kMaxTensors], *results_[kMaxTensors], *scratch_[kMaxTensors];
  int n_owned_ = 0, n_results_ = 0, n_scratch_ = 0;
};

const char *kind_of(Status status) {
  switch (status) {
    case kInvalidArgument:
      return "ValueError";
    case kUnsupportedDtype:
      return "TypeError";
    case kNotImplemented:
      return "NotImplementedError";
    case kOutOfMemory:
      return "MemoryError";
    default:
      return "RuntimeError";
  }
}

// Made at the first call; of two threads' the second is dropped.
Status operator_of(Exported &exported, Operator **op) {
  *op = __atomic_load_n(&exported.made, __ATOMIC_ACQUIRE);
  if (*op) return kOk;
  auto made = std::make_unique<Operator>();
  AOT_TRY(made->read(exported));
  Operator *expected = nullptr;
  const bool first =
      __atomic_compare_exchange_n(&exported.made, &expected, made.get(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return *op = first ? made.release() : expected, kOk;
}

}  // namespace

int call(Exported &exported, const Any *args, int32_t n_args, Any *result) noexcept {
  const Api *tvm = api();
  if (!tvm) {
    fail(kConventionMisused, "%s: no libtvm_ffi.so of version 0.1 or later is loaded", exported.name);
    return -1;
  }
  Status status;
  bool has_raised = false;
  try {
    Operator *op;
    status = operator_of(exported, &op);
    if (!status) {
      Invocation invocation(exported, *op, *tvm, args, n_args);
      status = invocation.run(result), has_raised = invocation.has_raised();
    }
  } catch (const std::exception &e) {
    status = fail(kOutOfMemory, "%s: %s", exported.name, e.what());
  }
  if (!status) return 0;
  if (!has_raised) tvm->set_error(kind_of(status), last_error());
  return -1;
}

}  // namespace aot::tvm_ffi
