// One call of an operator by LibTorch's dispatcher: arguments are read from its stack, results allocated, the entry
// run. What a call returns, strides too, is what the fake kernel of frontends/torch/dispatcher.py says.
#pragma once

#include <algorithm>
#include <functional>

#include "elementwise_strides.h"
#include "number_text.h"
#include "torch_abi.h"
#include "torch_operator.h"

namespace aot {

// Bindings that are kept of each operator. A program has few, unless an attribute changes with each call.
constexpr int kMostBound = 256;

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
  // Whether the status is one of an allocation that failed.
  bool out_of_memory() const { return out_of_memory_; }

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
      inputs_[i].handle = nullptr;
      if (!given) continue;
      inputs_[i].handle = owned_[n_owned_++] = reinterpret_cast<TensorHandle>(value);
      given_ |= uint64_t{1} << i;
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
    bool given = true;
    void *list = reinterpret_cast<void *>(op_.may_want_none ? take_optional(*argument, &given) : *argument);
    if (!given) {
      wanted_ &= ~op_.maskable, n_wanted_ = __builtin_popcountll(op_.maskable);
      return;
    }
    stable.torch_list_size(list, &n_wanted_);
    size_t k = 0;
    for (int i = 0; i < op_.n_results; ++i) {
      if (!(op_.maskable >> i & 1) || k == n_wanted_) continue;
      Value flag = 0;
      stable.torch_list_get_item(list, k++, &flag);
      if (!(flag & 0xff)) wanted_ &= ~(uint64_t{1} << i);
    }
    stable.torch_delete_list(list);
  }

  uint64_t all_results() const { return (uint64_t{1} << op_.n_results) - 1; }

  // After all arguments were taken, so that what they own is freed.
  Status check_arguments() const {
    if (refused_)
      return fail(kInvalidArgument, "%s: %s is '%.80s', expected a string of printable ASCII characters", name(),
                  refused_->name.c_str(), refused_text_.c_str());
    return n_wanted_ == static_cast<size_t>(__builtin_popcountll(op_.maskable)) ? kOk : wrong_wanted();
  }

  Status wrong_wanted() const {
    std::string names;
    for (int i = 0; i < op_.n_results; ++i)
      if (op_.maskable >> i & 1) names += (names.empty() ? "" : ", ") + op_.written[i];
    return fail(kInvalidArgument, "%s: wanted has %zu values, expected %d, for %s", name(), n_wanted_,
                __builtin_popcountll(op_.maskable), names.c_str());
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
  uint64_t slots(uint64_t results) const {
    const uint64_t workspaces = ((uint64_t{1} << op_.n_workspaces) - 1) << op_.n_results;
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
    const auto is_contiguous = [](const TensorView &t) { return !t.handle || t.contiguous(); };
    if (std::all_of(inputs_, inputs_ + op_.n_inputs, is_contiguous)) return kOk;
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

  const DispatchedOperator &op_;
  TensorHandle owned_[3 * kMaxSlots];  // inputs, their copies, workspaces and results
  int n_owned_ = 0;
  TensorView inputs_[kMaxSlots];
  uint64_t given_ = 0;  // bit i: input i
  uint64_t wanted_;     // bit i: result i
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

}  // namespace aot
