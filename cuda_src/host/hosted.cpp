// Hosted operators: functions of MindSpore's convention, and of tvm-ffi's, in libraries that know nothing of this one,
// as entries of ours.
//
// aot_hosted_cpu and aot_hosted_cuda have the companions of any entry. Which function is meant is told by the attribute
// "hosted" (aotops/extra.py writes it): items that each end with ";", "library/operator", the function's name on the
// CPU and on CUDA, the numbers of inputs and outputs, 1 where there is a scratch slot, for each output the input of the
// same spec or -1, the dtypes of inputs and outputs where MindSpore needs them, the order of arguments where the
// function is one of tvm-ffi (tvm_ffi_function.h), then the function's own attributes (text_extra.h). Of a function for
// the CPU with two inputs, a scratch slot and an attribute:
//
//   scale/axpy;axpy_cpu;;2;1;1;0,;float32,float32,float32,;;alpha:f0.5;
//
// A function without an Init is called as it is. With one, MindSpore makes a kernel for each set of shapes and dtypes,
// on which Init runs once, and so does this file. Kernels are used by one call at a time.
#include <pthread.h>

#include <cxxabi.h>

#include <algorithm>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "bound_entry.h"
#include "device.h"
#include "entry_arguments.h"
#include "libraries.h"
#include "text_extra.h"
#include "tvm_ffi_function.h"

using namespace aot;

namespace {

constexpr int kMaxTensors = 64;
constexpr int64_t kAlignment = 256;  // of the parts of the scratch slot
constexpr size_t kMostKernels = 64;  // that wait for calls on their shapes, of one operator

// The companions, as MindSpore calls them. InferShape gives a list for each output where there are several.
using InferShapeOfOne = std::vector<int64_t>(int *ndims, int64_t **shapes, void *extra);
using InferShapeOfMany = std::vector<std::vector<int64_t>>(int *ndims, int64_t **shapes, void *extra);
using InferTypeOfOne = int(std::vector<int> types, void *extra);
using InferTypeOfMany = std::vector<int>(std::vector<int> types, void *extra);

// Calls f(name, number) for each dtype.
template <class F>
void for_each_dtype(F f) {
  for (const auto &known : kTypeIds) f(dtype_name(known.dtype), static_cast<int>(known.id));
}

// The extra of a foreign function: its attributes, workspace and kernel data.
struct ForeignExtra {
  void *extra = nullptr;

  ForeignExtra() = default;
  ForeignExtra(const ForeignExtra &) = delete;
  ~ForeignExtra() {
    if (extra) extra_delete(extra);
  }
  const size_t *workspace() const { return static_cast<size_t *>(extra_view(extra)->workspace[0]); }
  size_t n_workspaces() const { return static_cast<size_t *>(extra_view(extra)->workspace[1]) - workspace(); }
  // The bytes of all parts, each aligned. Negative: more than any memory holds.
  int64_t bytes() const {
    int64_t total = 0;
    for (size_t i = 0; i < n_workspaces(); ++i) {
      if (workspace()[i] > static_cast<size_t>(kMostElements)) return -1;
      total += (static_cast<int64_t>(workspace()[i]) + kAlignment - 1) / kAlignment * kAlignment;
      if (total > kMostElements) return -1;
    }
    return total;
  }
};

// The call that Init ran on.
struct Kernel {
  std::vector<int> ndims;
  std::vector<int64_t> dims;
  std::vector<std::string> dtypes;
  int device;               // that was current when Init ran, where its data may be
  bool has_stream = false;  // it ran, on `stream`; its data may still be in use there
  void *stream = nullptr;
  ForeignExtra foreign;

  bool fits(const int *n, int64_t *const *shapes, const char *const *types, int here, void *on) const {
    if (here != device || (has_stream && on != stream)) return false;
    const int64_t *at = dims.data();
    for (size_t i = 0; i < ndims.size(); at += ndims[i++])
      if (n[i] != ndims[i] || dtypes[i] != types[i] || !std::equal(at, at + ndims[i], shapes[i])) return false;
    return true;
  }
};
using Kernels = std::list<std::unique_ptr<Kernel>>;

// Copies of a call's arrays. A function may write to what it is given, as the convention's arrays are not const; the
// originals may be a framework's own.
struct Copies : EntryArguments<kMaxTensors> {
  int64_t few[2 * kMaxTensors];
  std::unique_ptr<int64_t[]> many;

  Copies(int count, const int *from_ndims, int64_t *const *from_shapes, const char *const *from_dtypes) {
    int64_t total = 0;
    for (int i = 0; i < count; ++i) total += from_ndims[i];
    if (total > static_cast<int64_t>(std::size(few))) many.reset(new int64_t[total]);
    int64_t *at = many ? many.get() : few;
    for (int i = 0; i < count; ++i) {
      const int ndim = from_ndims[i];
      push(nullptr, ndim, ndim ? at : nullptr, from_dtypes ? from_dtypes[i] : nullptr);  // as MindSpore does
      for (int k = 0; k < ndim; ++k) {
        *at++ = from_shapes[i][k];
        asm("");  // vectorized, the loop takes longer to begin than to end
      }
    }
  }
};

// The lock of the kernels of all operators. A fork takes it, so that no thread that the child lacks holds it there.
std::mutex lock;
[[maybe_unused]] const int registered =
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });

// Calls a foreign function: an exception is an error with its text. One that ends the thread goes on.
template <class F>
Status guarded(const std::string &name, F f) {
  try {
    return f();
  } catch (const std::exception &e) {
    return fail(kConventionMisused, "%s: %s", name.c_str(), e.what());
  } catch (const abi::__forced_unwind &) {
    throw;
  } catch (...) {
    return fail(kConventionMisused, "%s threw something that is no std::exception", name.c_str());
  }
}

struct Hosted final : Marked {
  static constexpr uint64_t kMark = mark_of("hosted operator");
  std::string op, symbol, attrs, file;
  int n_in = 0, n_out = 0;
  bool has_scratch = false, new_strings = false, is_cuda = false;
  std::vector<int> like;            // by output
  std::vector<std::string> dtypes;  // of inputs and outputs; empty: not known
  EntryFunctions functions;
  void *infer_shape = nullptr, *infer_type = nullptr;
  ForeignExtra foreign;                         // of a function without an Init
  std::string order;                            // of tvm-ffi's arguments; empty: of MindSpore's convention
  std::unique_ptr<tvm_ffi::Function> function;  // with an order
  Kernels idle;                                 // the last used first

  Hosted() : Marked(kMark) {}

  int n() const { return n_in + n_out; }

  // ------------------------------------------------------------------------------------------------------- set-up

  Status read(Device device, const std::string &text) {
    const std::vector<std::string> item = parts(text, ';');
    constexpr size_t kAttrs = 9;
    if (item.size() < kAttrs) return fail(kConventionMisused, "the attribute hosted is not what aotops writes");
    const std::string owner = item[0].substr(0, item[0].find('/'));
    symbol = item[1 + device], is_cuda = device == kCuda;
    op = owner.size() < item[0].size() ? item[0].substr(owner.size() + 1) : symbol;
    n_in = std::stoi(item[3]), n_out = std::stoi(item[4]), has_scratch = item[5] == "1";
    for (const std::string &index : parts(item[6], ',')) like.push_back(std::stoi(index));
    dtypes = parts(item[7], ','), order = item[8];
    if (n_in < 0 || n_out < 0 || n() >= kMaxTensors || like.size() != static_cast<size_t>(n_out))
      return fail(kConventionMisused, "%s: the attribute hosted is not what aotops writes", symbol.c_str());
    for (size_t i = kAttrs; i < item.size(); ++i) attrs += item[i] + ";";
    const SharedLibrary *library = find_library(owner);
    if (!library)
      return fail(kNotImplemented, "%s: the library %s is not loaded: call aotops.load first", symbol.c_str(),
                  owner.c_str());
    return resolve(device, *library);
  }

  Status resolve(Device device, const SharedLibrary &library) {
    new_strings = library.new_strings;
    if (symbol.empty())
      return fail(kNotImplemented, "the operator has no function for %s", device == kCuda ? "CUDA" : "the CPU");
    if (!order.empty()) return resolve_tvm_ffi(library);
    if (!functions.read(library.handle, symbol))
      return fail(kNotImplemented, "the library %s has no %s", library.name.c_str(), symbol.c_str());
    find(library.handle, (symbol + "InferShape").c_str(), &infer_shape);
    find(library.handle, (symbol + "InferType").c_str(), &infer_type);
    Dl_info info;
    file = dladdr(reinterpret_cast<void *>(functions.entry), &info) && info.dli_fname ? info.dli_fname : library.name;
    return new_extra(&foreign);
  }

  // The function is one of the library, or an object that Python keeps.
  Status resolve_tvm_ffi(const SharedLibrary &library) {
    void *object = find_function_object(library.name, symbol);
    tvm_ffi::SafeCall *call = object ? tvm_ffi::cell<tvm_ffi::FunctionCell>(object)->safe_call : nullptr;
    if (!object && !find(library.handle, symbol.c_str(), &call))
      return fail(kNotImplemented, "the library %s has no %s", library.name.c_str(), symbol.c_str());
    function = std::make_unique<tvm_ffi::Function>(op, call, object, n(), is_cuda);
    return function->read(order, attrs);
  }

  Status new_extra(ForeignExtra *made) const {
    made->extra = (new_strings ? typed_extra_new_strings : typed_extra_old_strings)(attrs.c_str());
    return made->extra ? kOk : fail(kOutOfMemory, "%s: out of memory", symbol.c_str());
  }

  // -------------------------------------------------------------------------------------------------------- kernels

  // A kernel for these tensors, of nobody else; Init makes it where none is idle.
  Status take(int *ndims, int64_t **shapes, const char **dtypes, void *stream, std::unique_ptr<Kernel> *kernel) {
    const int here = is_cuda ? current_device() : -1;
    {
      std::lock_guard<std::mutex> hold(lock);
      for (auto it = idle.begin(); it != idle.end(); ++it)
        if ((*it)->fits(ndims, shapes, dtypes, here, stream)) {
          *kernel = std::move(*it);
          idle.erase(it);
          return kOk;
        }
    }
    auto made = std::make_unique<Kernel>();
    made->device = here;
    made->ndims.assign(ndims, ndims + n());
    made->dtypes.assign(dtypes, dtypes + n());
    for (int i = 0; i < n(); ++i) made->dims.insert(made->dims.end(), shapes[i], shapes[i] + ndims[i]);
    AOT_TRY(new_extra(&made->foreign));
    AOT_TRY(guarded(symbol + "Init", [&] {
      Copies copies(n(), ndims, shapes, dtypes);
      const int status = functions.init(copies.ndims, copies.shapes, copies.dtypes, made->foreign.extra);
      return status ? failed("Init", status, ndims, shapes, dtypes) : kOk;
    }));
    return *kernel = std::move(made), kOk;
  }

  void give_back(std::unique_ptr<Kernel> kernel) {
    std::unique_ptr<Kernel> oldest;  // is destroyed after the lock is free
    std::lock_guard<std::mutex> hold(lock);
    idle.push_front(std::move(kernel));
    if (idle.size() > kMostKernels) oldest = std::move(idle.back()), idle.pop_back();
  }

  // The error of a status other than 0, which has the class that the convention gives it.
  [[gnu::cold]] Status failed(const char *companion, int status, const int *ndims, int64_t *const *shapes,
                              const char *const *dtypes) const {
    const bool has_class = status > 0 && status <= kOutOfMemory;
    if (functions.last_error) return functions.adopt(has_class ? status : kConventionMisused);
    std::string given;
    for (int i = 0; i < n(); ++i)
      given +=
          (i ? i + 1 < n() ? ", " : " and " : " ") + std::string(dtypes[i]) + " " + ShapeText(shapes[i], ndims[i]).text;
    return fail(has_class ? static_cast<Status>(status) : kConventionMisused,
                "%s: %s%s of %s returned %d, expected 0, for%s", op.c_str(), symbol.c_str(), companion, file.c_str(),
                status, given.c_str());
  }

  // ----------------------------------------------------------------------------------------------------------- calls

  // `params` may be written to.
  Status call(int nparam, void **params, const int *ndims, int64_t *const *shapes, const char *const *dtypes,
              void *stream, void *extra) const {
    return guarded(symbol, [&] {
      Copies copies(n(), ndims, shapes, dtypes);
      const int status = functions.entry(nparam, params, copies.ndims, copies.shapes, copies.dtypes, stream, extra);
      return status ? failed("", status, ndims, shapes, dtypes) : kOk;
    });
  }

  Status run(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream) {
    if (nparam != n() + has_scratch)
      return fail(kConventionMisused, "%s: %d tensors given, expected %d", symbol.c_str(), nparam, n() + has_scratch);
    if (function) return function->run(params, ndims, shapes, dtypes, stream);
    if (!functions.init) {
      void *own[kMaxTensors];
      for (int i = 0; i < n(); ++i) own[i] = params[i];
      return call(n(), own, ndims, shapes, dtypes, stream, foreign.extra);
    }
    std::unique_ptr<Kernel> kernel;
    AOT_TRY(take(ndims, shapes, dtypes, stream, &kernel));
    kernel->has_stream = true, kernel->stream = stream;
    const Status status = run_kernel(*kernel, params, ndims, shapes, dtypes, stream);
    give_back(std::move(kernel));
    return status;
  }

  // With the parts of the scratch slot as further params.
  Status run_kernel(const Kernel &kernel, void *const *params, int *ndims, int64_t **shapes, const char **dtypes,
                    void *stream) const {
    const ForeignExtra &foreign = kernel.foreign;
    std::vector<void *> all(params, params + n());
    if (!foreign.n_workspaces()) return call(n(), all.data(), ndims, shapes, dtypes, stream, foreign.extra);
    const int64_t given = has_scratch ? shapes[n()][0] * 4 : 0, needed = foreign.bytes();
    if (!has_scratch)
      return fail(kConventionMisused, "%s: Init asks for a workspace: define the operator with workspace=True",
                  symbol.c_str());
    if (needed < 0 || needed > given)
      return fail(kConventionMisused, "%s: %lld bytes of workspace given, Init asks for %lld", symbol.c_str(),
                  static_cast<long long>(given), static_cast<long long>(needed));
    char *at = static_cast<char *>(params[n()]);
    for (size_t i = 0; i < foreign.n_workspaces(); ++i) {
      all.push_back(at);
      at += (static_cast<int64_t>(foreign.workspace()[i]) + kAlignment - 1) / kAlignment * kAlignment;
    }
    return call(static_cast<int>(all.size()), all.data(), ndims, shapes, dtypes, stream, foreign.extra);
  }

  // ------------------------------------------------------------------------------------------------------- inference

  // The outputs' shapes, of inputs whose dimensions may be unknown.
  Status infer_shapes(int *ndims, int64_t **shapes, std::vector<std::vector<int64_t>> *found) const {
    found->assign(n_out, {});
    for (int i = 0; i < n_out; ++i)
      if (like[i] >= 0) (*found)[i].assign(shapes[like[i]], shapes[like[i]] + ndims[like[i]]);
    if (std::all_of(like.begin(), like.end(), [](int i) { return i >= 0; })) return kOk;
    if (!infer_shape)
      return fail(kNotImplemented, "%s: the library has no %sInferShape", symbol.c_str(), symbol.c_str());
    ForeignExtra fresh;
    AOT_TRY(new_extra(&fresh));
    AOT_TRY(guarded(symbol + "InferShape", [&] {
      Copies in(n_in, ndims, shapes, nullptr);
      if (n_out == 1) (*found)[0] = reinterpret_cast<InferShapeOfOne *>(infer_shape)(in.ndims, in.shapes, fresh.extra);
      else *found = reinterpret_cast<InferShapeOfMany *>(infer_shape)(in.ndims, in.shapes, fresh.extra);
      return kOk;
    }));
    if (found->size() != static_cast<size_t>(n_out))
      return fail(kInvalidArgument, "%s: %sInferShape gives %d shapes, expected %d", op.c_str(), symbol.c_str(),
                  static_cast<int>(found->size()), n_out);
    bool known = true;
    for (int i = 0; i < n_in; ++i)
      known = known && std::all_of(shapes[i], shapes[i] + ndims[i], [](int64_t d) { return d >= 0; });
    for (const auto &shape : *found)
      if (shape.size() > kMaxNdim ||
          std::any_of(shape.begin(), shape.end(), [&](int64_t d) { return d < (known ? 0 : kUnknownRank); }))
        return fail(kInvalidArgument, "%s: %sInferShape gives the shape %s, expected at most %d dimensions%s",
                    op.c_str(), symbol.c_str(), ShapeText(shape.data(), static_cast<int>(shape.size())).text, kMaxNdim,
                    known ? ", none of them below 0, for the inputs are known" : "");
    return kOk;
  }

  // Null for a dtype that the library does not tell.
  Status infer_types(const char *const *inputs, const char **found) const {
    for (int i = 0; i < n_out; ++i) found[i] = like[i] >= 0 ? inputs[like[i]] : nullptr;
    if (!infer_type || std::all_of(found, found + n_out, [](const char *name) { return name; })) return kOk;
    std::vector<int> types, given;
    for (int i = 0; i < n_in; ++i)
      for_each_dtype([&](const char *name, int id) {
        if (!std::strcmp(name, inputs[i])) given.push_back(id);
      });
    if (given.size() != static_cast<size_t>(n_in))
      return fail(kUnsupportedDtype, "%s: a dtype has no number in MindSpore", symbol.c_str());
    ForeignExtra fresh;
    AOT_TRY(new_extra(&fresh));
    AOT_TRY(guarded(symbol + "InferType", [&] {
      if (n_out == 1) types = {reinterpret_cast<InferTypeOfOne *>(infer_type)(given, fresh.extra)};
      else types = reinterpret_cast<InferTypeOfMany *>(infer_type)(given, fresh.extra);
      return kOk;
    }));
    if (types.size() != static_cast<size_t>(n_out))
      return fail(kInvalidArgument, "%sInferType gives %d dtypes, expected %d", symbol.c_str(),
                  static_cast<int>(types.size()), n_out);
    for (int i = 0; i < n_out; ++i) {
      found[i] = nullptr;
      for_each_dtype([&](const char *name, int id) {
        if (id == types[i]) found[i] = name;
      });
      if (!found[i])
        return fail(kInvalidArgument, "%sInferType gives %d, expected a number of MindSpore's TypeId", symbol.c_str(),
                    types[i]);
    }
    return kOk;
  }

  // The length of the scratch slot, in float32, from the specs of inputs and outputs; -1 with unknown dimensions.
  Status infer_scratch(int *ndims, int64_t **shapes, const char **dtypes, int64_t *length) {
    *length = 0;
    if (!functions.init) return kOk;
    for (int i = 0; i < n(); ++i)
      for (int k = 0; k < ndims[i]; ++k)
        if (shapes[i][k] < 0) return *length = kUnknownDim, kOk;
    std::unique_ptr<Kernel> kernel;
    // of any stream: the call's
    AOT_TRY(take(ndims, shapes, dtypes, nullptr, &kernel));
    const int64_t bytes = kernel->foreign.bytes();
    give_back(std::move(kernel));
    if (bytes < 0) return fail(kInvalidArgument, "%s: Init asks for more workspace than there is", symbol.c_str());
    return *length = bytes / 4, kOk;
  }

  // nparam: of the inputs alone, or of inputs and outputs, whose specs are then known.
  Status infer(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, int *out_ndims,
               int64_t *out_shapes, const char **out_dtypes) {
    if (nparam != n_in && nparam != n())
      return fail(kConventionMisused, "%s: %d tensors given, expected %d", symbol.c_str(), nparam, n_in);
    EntryArguments<kMaxTensors> all;
    for (int i = 0; i < nparam; ++i) all.push(nullptr, ndims[i], ndims[i] ? shapes[i] : nullptr, dtypes[i]);
    std::vector<std::vector<int64_t>> found;
    if (nparam == n_in) {
      AOT_TRY(infer_shapes(all.ndims, all.shapes, &found));
      const char *types[kMaxTensors];
      AOT_TRY(infer_types(all.dtypes, types));
      for (int i = 0; i < n_out; ++i)
        all.push(nullptr, found[i].size(), found[i].empty() ? nullptr : found[i].data(), types[i]);
    }
    for (int i = 0; i < n_out; ++i) {
      out_ndims[i] = all.ndims[n_in + i], out_dtypes[i] = all.dtypes[n_in + i];
      if (out_ndims[i] > kMaxNdim) return fail(kInvalidArgument, "%s: too many dimensions", symbol.c_str());
      std::copy_n(all.shapes[n_in + i], out_ndims[i], out_shapes + i * kMaxNdim);
    }
    if (!has_scratch) return kOk;
    out_ndims[n_out] = 1, out_dtypes[n_out] = "float32";
    if (std::any_of(out_dtypes, out_dtypes + n_out, [](const char *name) { return !name; }))
      return out_shapes[n_out * kMaxNdim] = kUnknownDim, kOk;
    return infer_scratch(all.ndims, all.shapes, all.dtypes, out_shapes + n_out * kMaxNdim);
  }
};

Status read_hosted(Device device, void *extra, Hosted *hosted) {
  std::string text;
  const auto take = [](void *to, const char *found) { *static_cast<std::string *>(to) = found; };
  if (!extra || extra_take_string(extra, "hosted", take, &text) != 1)
    return fail(kConventionMisused, "hosted: the attribute hosted is missing");
  return guarded("hosted", [&] { return hosted->read(device, text); });
}

int init_hosted(Device device, void *extra) {
  auto hosted = std::make_unique<Hosted>();
  AOT_TRY(read_hosted(device, extra, hosted.get()));
  delete extra_view(extra)->kernel_data;
  extra_view(extra)->kernel_data = hosted.release();
  return kOk;
}

Hosted *hosted_of(void *extra) {
  auto *data = extra ? static_cast<Marked *>(extra_view(extra)->kernel_data) : nullptr;
  return data && data->mark == Hosted::kMark ? static_cast<Hosted *>(data) : nullptr;
}

// MindSpore shows the text of an exception, and of a status only its number.
int reported(int status, void *extra) {
  if (status && extra && !extra_is_own(extra)) throw std::runtime_error(aot_last_error());
  return status;
}

int run_hosted(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
               void *extra) {
  Hosted *hosted = hosted_of(extra);
  if (!hosted) return fail(kConventionMisused, "hosted: Init was not called");
  return guarded(hosted->symbol, [&] { return hosted->run(nparam, params, ndims, shapes, dtypes, stream); });
}

int infer_hosted(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *extra,
                 int *out_ndims, int64_t *out_shapes, const char **out_dtypes) {
  if (Hosted *hosted = hosted_of(extra))
    return guarded(hosted->symbol,
                   [&] { return hosted->infer(nparam, ndims, shapes, dtypes, out_ndims, out_shapes, out_dtypes); });
  return fail(kConventionMisused, "hosted: Init was not called");
}

// The result of InferShape: MindSpore takes a list for each output slot where there are several slots, else the only
// one. Both types are returned in memory.
union Shapes {
  std::vector<int64_t> one;
  std::vector<std::vector<int64_t>> many;

  Shapes(Device device, int *ndims, int64_t **shapes, void *extra) {
    Hosted hosted;
    std::vector<std::vector<int64_t>> found;
    if (read_hosted(device, extra, &hosted) || hosted.infer_shapes(ndims, shapes, &found))
      found.assign(std::max(hosted.n_out, 1), {kUnknownRank});  // MindSpore takes no error; the call's is as good
    else if (hosted.has_scratch) found.push_back({scratch(hosted, ndims, shapes, &found)});
    if (hosted.n_out + hosted.has_scratch == 1) new (&one) std::vector<int64_t>(std::move(found[0]));
    else new (&many) std::vector<std::vector<int64_t>>(std::move(found));
  }
  Shapes(const Shapes &) = delete;
  ~Shapes() {}  // the caller destroys the vector

  static int64_t scratch(Hosted &hosted, int *ndims, int64_t **shapes, std::vector<std::vector<int64_t>> *found) {
    EntryArguments<kMaxTensors> all;
    int64_t length;
    if (hosted.dtypes.size() != static_cast<size_t>(hosted.n())) return kUnknownDim;
    for (int i = 0; i < hosted.n(); ++i) {
      auto *output = i < hosted.n_in ? nullptr : &(*found)[i - hosted.n_in];
      all.push(nullptr, output ? output->size() : ndims[i], output ? output->data() : shapes[i],
               hosted.dtypes[i].c_str());
    }
    return hosted.infer_scratch(all.ndims, all.shapes, all.dtypes, &length) ? kUnknownDim : length;
  }
};

}  // namespace

#define AOT_HOSTED(device, suffix)                                                                                    \
  AOT_API int aot_hosted_##suffix(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes,       \
                                  void *stream, void *extra) {                                                        \
    return reported(run_hosted(nparam, params, ndims, shapes, dtypes, stream, extra), extra);                         \
  }                                                                                                                   \
  AOT_API int aot_hosted_##suffix##Init(int *, int64_t **, const char **, void *extra) {                              \
    return reported(init_hosted(device, extra), extra);                                                               \
  }                                                                                                                   \
  AOT_API int aot_hosted_##suffix##Infer(int nparam, const int *ndims, int64_t *const *shapes,                        \
                                         const char *const *dtypes, void *extra, int *out_ndims, int64_t *out_shapes, \
                                         const char **out_dtypes) {                                                   \
    return infer_hosted(nparam, ndims, shapes, dtypes, extra, out_ndims, out_shapes, out_dtypes);                     \
  }                                                                                                                   \
  AOT_API Shapes aot_hosted_##suffix##InferShape(int *ndims, int64_t **shapes, void *extra) {                         \
    return {device, ndims, shapes, extra};                                                                            \
  }

AOT_HOSTED(kCpu, cpu)
AOT_HOSTED(kCuda, cuda)
