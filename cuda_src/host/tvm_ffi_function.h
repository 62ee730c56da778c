// A hosted function of tvm-ffi: its arguments are the tensors and attributes of a hosted operator's call, in an order
// of its own. It writes to the outputs that it is given, and returns nothing else.
#pragma once
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "text_extra.h"
#include "tvm_ffi_abi.h"

namespace aot::tvm_ffi {

// A tensor as an object, whose memory is the caller's and valid in the call only.
class BorrowedTensor {
 public:
  BorrowedTensor() = default;
  BorrowedTensor(const BorrowedTensor &) = delete;
  ~BorrowedTensor() {
    if (object_) tvm_->release(object_);
  }

  Status make(const Api &tvm, const DLTensor &like, Any *any) {
    auto *managed = static_cast<ManagedTensor *>(std::malloc(sizeof(ManagedTensor) + 2 * like.ndim * sizeof(int64_t)));
    if (!managed) return kOutOfMemory;
    auto *shape = reinterpret_cast<int64_t *>(managed + 1);
    for (int k = 0; k < like.ndim; ++k) shape[k] = like.shape[k], shape[like.ndim + k] = like.strides[k];
    managed->tensor = like, managed->tensor.shape = shape, managed->tensor.strides = shape + like.ndim;
    managed->context = nullptr, managed->deleter = [](ManagedTensor *self) { std::free(self); };
    if (tvm.tensor_of(managed, 0, 0, &object_)) return std::free(managed), kOutOfMemory;
    tvm_ = &tvm, *any = Any::object(kTensor, object_);
    return kOk;
  }

  bool is_kept() const { return static_cast<uint32_t>(static_cast<Object *>(object_)->references) > 1; }

 private:
  const Api *tvm_ = nullptr;
  void *object_ = nullptr;
};

class Function {
 public:
  static constexpr int kMost = 64;  // tensors, and arguments

  // `self`: the function's object; null: it is a library's.
  Function(std::string op, SafeCall *call, void *self, int n_tensors, bool is_cuda)
      : op_(std::move(op)), call_(call), self_(self), n_tensors_(n_tensors), is_cuda_(is_cuda) {}
  Function(const Function &) = delete;
  ~Function() {
    for (void *object : owned_) tvm_->release(object);
  }

  // `order`: of each argument its name and, after ":", the number of the tensor, inputs first, or beyond these of the
  // attribute, each followed by ","; -1 is None. `attrs`: as typed_extra_old_strings takes them (text_extra.h).
  Status read(const std::string &order, const std::string &attrs) {
    std::vector<Any> values;
    for (const std::string &item : parts(attrs, ';')) {
      const std::string value = item.substr(item.find(':') + 1);
      values.push_back(Any::none());
      AOT_TRY(read_value(value[0], value.substr(1), &values.back()));
    }
    for (const std::string &item : parts(order, ',')) {
      const size_t end = item.find(':');
      const int place = std::stoi(item.substr(end + 1)), attribute = place - n_tensors_;
      if (place < -1 || attribute >= static_cast<int>(values.size()))
        return fail(kConventionMisused, "%s: the order of arguments is not what aotops writes", op_.c_str());
      const bool is_constant = place < 0 || attribute >= 0;
      arguments_.push_back(
          {item.substr(0, end), is_constant ? -1 : place, attribute >= 0 ? values[attribute] : kNone_});
    }
    if (arguments_.size() > kMost)
      return fail(kNotImplemented, "%s: its function has more than %d arguments", op_.c_str(), kMost);
    // Python makes objects of its arguments, of which that of a DLTensor * is not one: its export ends the process
    wants_objects_ = self_ && !cell<FunctionCell>(self_)->cpp_call;
    if (wants_objects_) AOT_TRY(need_tvm());
    // a stream that the function cannot ask for would be another one than the caller's
    return is_cuda_ ? need_tvm() : kOk;
  }

  Status run(void *const *params, const int *ndims, int64_t *const *shapes, const char *const *dtypes,
             void *stream) const {
    const int device = is_cuda_ ? current_device() : 0;
    DLTensor tensors[kMost];
    int64_t few[4 * kMost];
    std::unique_ptr<int64_t[]> many;
    int64_t total = 0;
    for (int i = 0; i < n_tensors_; ++i) total += ndims[i];
    if (total > static_cast<int64_t>(std::size(few))) many.reset(new int64_t[total]);
    int64_t *strides = many ? many.get() : few;
    for (int i = 0; i < n_tensors_; strides += ndims[i++]) {
      DLTensor &t = tensors[i];
      t.data = params[i], t.device_type = is_cuda_ ? kDLCuda : kDLCpu, t.device_id = device, t.ndim = ndims[i];
      t.shape = shapes[i], t.strides = strides, t.byte_offset = 0;
      if (!set_dtype(dtypes[i], &t))
        return fail(kUnsupportedDtype, "%s: a tensor has dtype %s, which DLPack does not have", op_.c_str(), dtypes[i]);
      int64_t stride = 1;
      for (int k = ndims[i] - 1; k >= 0; --k) strides[k] = stride, stride *= shapes[i][k];
    }
    Any args[kMost];
    int n = 0;
    for (const Argument &one : arguments_)
      args[n++] = one.tensor < 0 ? one.constant : Any::object(kDLTensor, &tensors[one.tensor]);
    return wants_objects_ ? run_on_objects(args, device, stream) : run_on(args, device, stream);
  }

 private:
  struct Argument {
    std::string name;
    int tensor;  // -1: a constant
    Any constant;
  };
  static constexpr Any kNone_ = {kNone, 0, {0}};

  Status run_on_objects(Any *args, int device, void *stream) const {
    BorrowedTensor tensors[kMost];
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (args[i].type == kDLTensor && tensors[i].make(*tvm_, *static_cast<DLTensor *>(args[i].pointer), &args[i]))
        return fail(kOutOfMemory, "%s: out of memory", op_.c_str());
    AOT_TRY(run_on(args, device, stream));
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (args[i].type == kTensor && tensors[i].is_kept())
        return fail(kNotImplemented, "%s: the function keeps %s, whose memory is valid in the call only: copy it",
                    op_.c_str(), arguments_[i].name.c_str());
    return kOk;
  }

  Status run_on(const Any *args, int device, void *stream) const {
    return is_cuda_ ? call_on_stream(args, device, stream) : call(args);
  }

  Status call(const Any *args) const {
    Any result = Any::none();
    const int failed = call_(self_, args, static_cast<int32_t>(arguments_.size()), &result);
    if (failed) return raised(args);
    return result.type == kNone ? kOk : check_result(result, args);
  }

  Status call_on_stream(const Any *args, int device, void *stream) const {
    void *before = nullptr;
    if (tvm_->set_stream(kDLCuda, device, stream, &before)) return raised(args);
    const Status status = call(args);
    const int failed = tvm_->set_stream(kDLCuda, device, before, nullptr);
    return failed && !status ? raised(args) : status;
  }

  // A function may return one of its outputs.
  [[gnu::cold]] Status check_result(const Any &result, const Any *args) const {
    const std::string type = type_text(result);
    bool is_known = false;
    if (result.type == kTensor) {
      const auto &t = *cell<DLTensor>(result.pointer);
      for (size_t i = 0; i < arguments_.size(); ++i)
        is_known |= is_tensor(args[i]) && tensor(args[i]).data == static_cast<char *>(t.data) + t.byte_offset;
    }
    const Api *tvm = api();
    if (result.type >= kObject && tvm) tvm->release(result.pointer);
    if (is_known) return kOk;
    return fail(kNotImplemented,
                "%s: the function returned %s, expected None: a hosted function writes to the outputs that it is "
                "given, and one that allocates and returns its results is not hosted",
                op_.c_str(), type.c_str());
  }

  // ----------------------------------------------------------------------------------------------------------- errors

  // The error that a function of tvm-ffi has set.
  [[gnu::cold]] Status raised(const Any *args) const {
    const Api *tvm = api();
    void *error = nullptr;
    if (tvm) tvm->move_error(&error);
    if (!error)
      return fail(kConventionMisused, "%s: the function failed, without an error%s", op_.c_str(),
                  tvm ? "" : ", as no libtvm_ffi.so is loaded, which keeps it: install apache-tvm-ffi");
    const auto &e = *cell<ErrorCell>(error);
    const std::string kind(e.kind.data, e.kind.size);
    const Status status = kind == "ValueError"            ? kInvalidArgument
                          : kind == "TypeError"           ? kUnsupportedDtype
                          : kind == "NotImplementedError" ? kNotImplemented
                          : kind == "MemoryError"         ? kOutOfMemory
                                                          : kConventionMisused;
    std::string text = op_ + ": ";
    if (status == kConventionMisused && kind != "RuntimeError") text += kind + ": ";
    text.append(e.message.data, e.message.size);
    if (status == kUnsupportedDtype && args) text += "; called with " + described(args);
    tvm->release(error);
    return fail(status, "%s", text.c_str());
  }

  // The arguments as tvm-ffi's texts count them.
  std::string described(const Any *args) const {
    std::string text;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      text +=
          (i ? ", #" : "#") + std::to_string(i) + " " + arguments_[i].name + (arguments_[i].name.empty() ? "" : ":");
      if (!is_tensor(args[i])) text += std::string(" ") + type_text(args[i]);
      else {
        const DLTensor &t = tensor(args[i]);
        text += std::string(" ") + dlpack_dtype(t) + " " + ShapeText(t.shape, t.ndim).text;
      }
    }
    return text;
  }

  Status need_tvm() {
    tvm_ = api();
    if (tvm_) return kOk;
    return fail(kNotImplemented, "%s: no libtvm_ffi.so of version 0.1 or later is loaded: install apache-tvm-ffi",
                op_.c_str());
  }

  // ------------------------------------------------------------------------------------------------------- attributes

  Status read_value(char kind, const std::string &text, Any *any) {
    switch (kind) {
      case 'b':
        return any->type = kBool, any->integer = text == "1", kOk;
      case 'i':
        return any->type = kInt, any->integer = std::stoll(text), kOk;
      case 'f':
        return any->type = kFloat, any->number = decimal(text.c_str()), kOk;
      case 's':
        strings_.push_back(std::make_unique<std::string>(unquoted(text)));
        return any->type = kRawString, any->string = strings_.back()->c_str(), kOk;
      case 'I':
      case 'F':
        return read_list(kind == 'I' ? 'i' : 'f', text.empty() ? text : text + ",", ',', any);
      default:
        return read_list(kind == 'J' ? 'I' : 'F', text, '|', any);
    }
  }

  Status read_list(char kind, const std::string &text, char end, Any *any) {
    AOT_TRY(need_tvm());
    std::vector<Any> items;
    for (const std::string &part : parts(text, end)) {
      items.push_back(Any::none());
      AOT_TRY(read_value(kind, part, &items.back()));
    }
    if (tvm_->make_array(items.data(), static_cast<int32_t>(items.size()), any)) return raised(nullptr);
    return owned_.push_back(any->pointer), kOk;
  }

  const Api *tvm_ = nullptr;  // null: of the CPU, and without lists
  std::string op_;
  SafeCall *call_;
  void *self_;
  int n_tensors_;
  bool is_cuda_, wants_objects_ = false;
  std::vector<Argument> arguments_;
  std::vector<std::unique_ptr<std::string>> strings_;
  std::vector<void *> owned_;
};

}  // namespace aot::tvm_ffi
