// One XLA FFI handler for every operator, on the CPU and on CUDA. Its attributes are strings: `entry`, such as
// aot_layer_norm, to which the device is added here, and `attrs`, as extra.h reads them. An entry of another library is
// scale/aot_scale, of the library that libraries.h knows as scale. Workspaces are results,
// which XLA places; where `scratch` is given, they are not: the handler allocates them, since their sizes follow from
// dimensions that were symbolic when the program was made.
#include "xla.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "bound_entry.h"
#include "libraries.h"

namespace {

using namespace aot;

struct Device {
  const char *suffix;
  bool has_stream;
  uint32_t traits;
};

// An entry launches the same kernels each time, so XLA may record it in a command buffer; but not with scratch that is
// free again when the call returns.
constexpr Device kCpu = {"_cpu", false, xla::kNoTraits}, kCuda = {"_cuda", true, xla::kCommandBufferCompatible},
                 kCudaScratch = {"_cuda", true, xla::kNoTraits};

// ------------------------------------------------------------------------------------------------------- bound entries

struct BoundEntry {
  std::string name, attrs;  // the name is without the device's suffix
  const Device *device;
  Entry *entry;
  Infer *infer;
  bool told;  // Infer takes the outputs' specs too: a hosted operator, whose rule for them may be Python's
  LastError *last_error;
  void *extra;
  BoundEntry *next;
};

// Kept for good, as compiled programs are: each bucket is a list that only grows, so that a look-up takes no lock.
constexpr size_t kBuckets = 256;
std::atomic<BoundEntry *> buckets[kBuckets];

Status bind_entry(BoundEntry *bound) {
  if (bound->name.find('\0') != std::string::npos || bound->attrs.find('\0') != std::string::npos)
    return fail(kInvalidArgument, "%s: the attributes have a NUL", bound->name.c_str());
  const size_t slash = bound->name.find('/');
  const std::string library = slash == std::string::npos ? "" : bound->name.substr(0, slash);
  const std::string symbol = bound->name.substr(library.empty() ? 0 : slash + 1) + bound->device->suffix;
  const SharedLibrary *found = find_library(library);
  if (!found)
    return fail(kNotImplemented, "%s: the library %s is not registered: call aotops.frontends.jax.register(library)",
                bound->name.c_str(), library.c_str());
  void *handle = found->handle;
  bound->entry = reinterpret_cast<Entry *>(dlsym(handle, symbol.c_str()));
  if (!bound->entry)
    return fail(kNotImplemented, "the library %s has no %s; CUDA entries are built where nvcc is",
                library.empty() ? "aotops" : library.c_str(), symbol.c_str());
  bound->told = symbol.rfind("aot_hosted_", 0) == 0;
  bound->infer = reinterpret_cast<Infer *>(dlsym(handle, (symbol + "Infer").c_str()));
  bound->last_error = reinterpret_cast<LastError *>(dlsym(handle, "aot_last_error"));
  auto *init = reinterpret_cast<Init *>(dlsym(handle, (symbol + "Init").c_str()));
  return bind(init, bound->attrs.c_str(), bound->last_error, &bound->extra);
}

Status find(std::string_view name, const Device &device, std::string_view attrs, const BoundEntry **found) {
  std::hash<std::string_view> hash;
  auto &bucket = buckets[(hash(name) ^ hash(attrs)) % kBuckets];
  for (BoundEntry *b = bucket.load(std::memory_order_acquire); b; b = b->next)
    if (b->device == &device && b->attrs == attrs && b->name == name) return *found = b, kOk;
  auto bound = std::make_unique<BoundEntry>();
  bound->name = name, bound->attrs = attrs, bound->device = &device;
  AOT_TRY(bind_entry(bound.get()));
  // Two threads may both come here; the second entry is as good as the first.
  bound->next = bucket.load(std::memory_order_relaxed);
  while (
      !bucket.compare_exchange_weak(bound->next, bound.get(), std::memory_order_release, std::memory_order_relaxed)) {
  }
  return *found = bound.release(), kOk;
}

// --------------------------------------------------------------------------------------------------------- the handler

const char *dtype_text(xla::DataType dtype) {
  switch (dtype) {
    case xla::DataType::pred:
      return "bool";
    case xla::DataType::s8:
      return "int8";
    case xla::DataType::s16:
      return "int16";
    case xla::DataType::s32:
      return "int32";
    case xla::DataType::s64:
      return "int64";
    case xla::DataType::u8:
      return "uint8";
    case xla::DataType::u16:
      return "uint16";
    case xla::DataType::u32:
      return "uint32";
    case xla::DataType::u64:
      return "uint64";
    case xla::DataType::f16:
      return "float16";
    case xla::DataType::bf16:
      return "bfloat16";
    case xla::DataType::f32:
      return "float32";
    case xla::DataType::f64:
      return "float64";
    case xla::DataType::c64:
      return "complex64";
    case xla::DataType::c128:
      return "complex128";
    default:
      return "of another kind";
  }
}

std::string_view attribute(const xla::Attrs &attrs, std::string_view name) {
  for (int64_t i = 0; i < attrs.n; ++i) {
    const xla::ByteSpan &s = *attrs.names[i];
    if (attrs.types[i] != xla::AttrType::string || std::string_view(s.data, s.size) != name) continue;
    auto *value = static_cast<const xla::ByteSpan *>(attrs.values[i]);
    return {value->data, value->size};
  }
  return {};
}

// A workspace that is freed when the call returns. On CUDA it is XLA's memory, ordered by the stream; on the CPU XLA
// has no allocator for handlers.
class Scratch {
 public:
  Scratch(const xla::CallFrame &frame, const Device &device) : frame_(frame), device_(device) {}
  Scratch(const Scratch &) = delete;
  ~Scratch() {
    if (!device_.has_stream) std::free(data_);
    if (!device_.has_stream || !data_) return;
    xla::FreeArgs args{};
    args.size = sizeof args, args.context = frame_.context, args.bytes = bytes_, args.data = data_;
    drop(frame_.api->free(&args));
  }

  Status allocate(const char *op, int64_t bytes) {
    constexpr size_t kAlignment = 256;
    bytes_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (!bytes_) return kOk;
    if (device_.has_stream) {
      xla::AllocateArgs args{};
      args.size = sizeof args, args.context = frame_.context, args.bytes = bytes_, args.alignment = kAlignment;
      drop(frame_.api->allocate(&args));
      data_ = args.data;
    } else {
      data_ = std::aligned_alloc(kAlignment, bytes_);
    }
    return data_
               ? kOk
               : fail(kOutOfMemory, "%s: %lld bytes of scratch cannot be allocated", op, static_cast<long long>(bytes));
  }
  void *data() const { return data_; }

 private:
  void drop(xla::Error *error) const {
    if (!error) return;
    xla::ErrorDestroyArgs args{};
    args.size = sizeof args, args.error = error;
    frame_.api->error_destroy(&args);
  }
  const xla::CallFrame &frame_;
  const Device &device_;
  size_t bytes_ = 0;
  void *data_ = nullptr;
};

Status call(const xla::CallFrame &frame, const Device &device, void *stream) {
  const BoundEntry *bound;
  AOT_TRY(find(attribute(frame.attrs, "entry"), device, attribute(frame.attrs, "attrs"), &bound));
  constexpr int kMaxTensors = 64;
  void *params[kMaxTensors];
  int ndims[kMaxTensors];
  int64_t *shapes[kMaxTensors];
  const char *dtypes[kMaxTensors];
  if (frame.args.n >= kMaxTensors || frame.rets.n >= kMaxTensors - frame.args.n)
    return fail(kConventionMisused, "%s: more than %d tensors", bound->name.c_str(), kMaxTensors - 1);
  int n = 0;
  // the last results are the memory of inputs that a hosted function writes to
  const std::string_view count = attribute(frame.attrs, "aliased");
  const int64_t aliased = count.empty() ? 0 : std::strtoll(std::string(count).c_str(), nullptr, 10);
  for (const xla::Buffers *side : {&frame.args, &frame.rets})
    for (int64_t i = 0; i < side->n - (side == &frame.rets ? aliased : 0); ++i, ++n) {
      const xla::Buffer &b = *side->buffers[i];
      params[n] = b.data, dtypes[n] = dtype_text(b.dtype);
      ndims[n] = static_cast<int>(b.rank), shapes[n] = b.rank ? b.dims : nullptr;
    }
  Scratch scratch(frame, device);
  int64_t elements;
  if (!attribute(frame.attrs, "scratch").empty()) {  // the last output, a vector
    constexpr int kMaxOutputs = 16;
    int n_told = bound->told ? n : static_cast<int>(frame.args.n), out_ndims[kMaxOutputs] = {};
    int64_t out_shapes[kMaxOutputs * kMaxNdim];
    const char *out_dtypes[kMaxOutputs];
    AOT_TRY(adopt(bound->infer(n_told, ndims, shapes, dtypes, bound->extra, out_ndims, out_shapes, out_dtypes),
                  bound->last_error));
    int last = kMaxOutputs - 1;
    while (last && !out_ndims[last]) --last;
    elements = out_shapes[last * kMaxNdim];
    ndims[n] = 1, shapes[n] = &elements, dtypes[n] = out_dtypes[last];
    AOT_TRY(scratch.allocate(bound->name.c_str(), elements * itemsize(parse_dtype(dtypes[n]))));
    params[n++] = scratch.data();
  }
  return adopt(bound->entry(n, params, ndims, shapes, dtypes, stream, bound->extra), bound->last_error);
}

xla::Error *error(const xla::Api *api, Status status) {
  xla::ErrorCreateArgs args{};
  args.size = sizeof args;
  args.message = aot_last_error();
  args.code = status == kInvalidArgument || status == kUnsupportedDtype ? xla::ErrorCode::invalid_argument
              : status == kNotImplemented                               ? xla::ErrorCode::unimplemented
                                                                        : xla::ErrorCode::internal;
  return api->error_create(&args);
}

// XLA asks a handler for its version, and refuses one that is newer than itself or too old. What is used here has been
// there since 0.1, so the answer is XLA's own version. Before 0.2 it passes no api with the question.
void describe(const xla::CallFrame &frame, uint32_t traits) {
  xla::Metadata *metadata = static_cast<xla::MetadataExtension *>(frame.extension)->metadata;
  metadata->version.major = frame.api ? frame.api->version.major : 0;
  metadata->version.minor = frame.api ? frame.api->version.minor : 1;
  metadata->traits = traits;
}

xla::Error *handle(const xla::CallFrame *frame, const Device &device) noexcept {
  if (frame->extension && frame->extension->type == xla::ExtensionType::metadata)
    return describe(*frame, device.traits), nullptr;
  if (frame->stage != xla::Stage::execute) return nullptr;
  xla::StreamGetArgs get{};
  get.size = sizeof get;
  get.context = frame->context;
  if (device.has_stream)
    if (xla::Error *failed = frame->api->stream_get(&get)) return failed;
  Status status;
  try {
    status = call(*frame, device, get.stream);
  } catch (const std::exception &e) {
    status = fail(kConventionMisused, "%s", e.what());
  }
  return status ? error(frame->api, status) : nullptr;
}

}  // namespace

AOT_API xla::Error *aot_xla_cpu(xla::CallFrame *frame) { return handle(frame, kCpu); }
AOT_API xla::Error *aot_xla_cuda(xla::CallFrame *frame) { return handle(frame, kCuda); }
AOT_API xla::Error *aot_xla_cuda_scratch(xla::CallFrame *frame) { return handle(frame, kCudaScratch); }
