// One XLA FFI handler for every operator, on the CPU and on CUDA. Its attributes are strings: `entry`, such as
// aot_layer_norm, to which the device is added here, and `attrs`, as extra.h reads them. An entry of another library is
// scale/aot_scale, of the library that libraries.h knows as scale. Workspaces are results,
// which XLA places; where `scratch` is given, they are not: the handler allocates them, since their sizes follow from
// dimensions that were symbolic when the program was made.
#include "xla.h"

#include <cfenv>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string_view>

#include "bound_entry.h"
#include "entry_arguments.h"
#include "libraries.h"

namespace {

using namespace aot;

// A handler that XLA is told of.
struct Handler {
  Device device;
  uint32_t traits;
};

// An entry launches the same kernels each time, so XLA may record it in a command buffer; but not with scratch that is
// free again when the call returns.
constexpr Handler kOnCpu = {kCpu, xla::kNoTraits}, kOnCuda = {kCuda, xla::kCommandBufferCompatible},
                  kOnCudaWithScratch = {kCuda, xla::kNoTraits};

// ------------------------------------------------------------------------------------------------------- bound entries

struct BoundEntry {
  std::string name, attrs;  // the name is without the device's suffix
  Device device;
  EntryFunctions functions;
  bool told;  // Infer takes the outputs' specs too: a hosted operator, whose rule for them may be Python's
  void *extra;
  BoundEntry *next;
};

// Kept for good, as compiled programs are.
constexpr size_t kBuckets = 256;
GrowingList<BoundEntry> buckets[kBuckets];

Status bind_entry(BoundEntry *bound) {
  if (bound->name.find('\0') != std::string::npos || bound->attrs.find('\0') != std::string::npos)
    return fail(kInvalidArgument, "%s: the attributes have a NUL", bound->name.c_str());
  const size_t slash = bound->name.find('/');
  const std::string library = slash == std::string::npos ? "" : bound->name.substr(0, slash);
  const std::string symbol = symbol_of(bound->name.substr(library.empty() ? 0 : slash + 1), bound->device);
  const SharedLibrary *found = find_library(library);
  if (!found)
    return fail(kNotImplemented, "%s: the library %s is not registered: call aotops.frontends.jax.register(library)",
                bound->name.c_str(), library.c_str());
  if (!bound->functions.read(found->handle, symbol))
    return fail(kNotImplemented, "the library %s has no %s; CUDA entries are built where nvcc is",
                library.empty() ? "aotops" : library.c_str(), symbol.c_str());
  bound->told = symbol.rfind("aot_hosted_", 0) == 0;
  return bound->functions.bind(bound->attrs.c_str(), &bound->extra);
}

Status find_bound(std::string_view name, Device device, std::string_view attrs, const BoundEntry **found) {
  std::hash<std::string_view> hash;
  auto &bucket = buckets[(hash(name) ^ hash(attrs)) % kBuckets];
  *found = bucket.find([&](const BoundEntry &b) { return b.device == device && b.attrs == attrs && b.name == name; });
  if (*found) return kOk;
  auto bound = std::make_unique<BoundEntry>();
  bound->name = name, bound->attrs = attrs, bound->device = device;
  AOT_TRY(bind_entry(bound.get()));
  return *found = bucket.add(std::move(bound)), kOk;
}

// --------------------------------------------------------------------------------------------------------- the handler

const char *dtype_text(int dtype) {
  const bool known = dtype >= 0 && dtype < static_cast<int>(std::size(xla::kDataTypes)) && xla::kDataTypes[dtype];
  return known ? xla::kDataTypes[dtype] : kUnnamedDtype;
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
  Scratch(const xla::CallFrame &frame, Device device) : frame_(frame), device_(device) {}
  Scratch(const Scratch &) = delete;
  ~Scratch() {
    if (device_ == kCpu) std::free(data_);
    if (device_ == kCpu || !data_) return;
    xla::FreeArgs args{};
    args.size = sizeof args, args.context = frame_.context, args.bytes = bytes_, args.data = data_;
    drop(frame_.api->free(&args));
  }

  Status allocate(const char *op, int64_t bytes) {
    constexpr size_t kAlignment = 256;
    bytes_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (!bytes_) return kOk;
    if (device_ == kCuda) {
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
  Device device_;
  size_t bytes_ = 0;
  void *data_ = nullptr;
};

Status call(const xla::CallFrame &frame, Device device, void *stream) {
  const BoundEntry *bound;
  AOT_TRY(find_bound(attribute(frame.attrs, "entry"), device, attribute(frame.attrs, "attrs"), &bound));
  constexpr int kMaxTensors = 64;
  EntryArguments<kMaxTensors> a;
  if (frame.args.n >= kMaxTensors || frame.rets.n >= kMaxTensors - frame.args.n)
    return fail(kConventionMisused, "%s: more than %d tensors", bound->name.c_str(), kMaxTensors - 1);
  // the last results are the memory of inputs that a hosted function writes to
  const std::string_view count = attribute(frame.attrs, "aliased");
  const int64_t aliased = count.empty() ? 0 : std::strtoll(std::string(count).c_str(), nullptr, 10);
  for (const xla::Buffers *side : {&frame.args, &frame.rets})
    for (int64_t i = 0; i < side->n - (side == &frame.rets ? aliased : 0); ++i) {
      const xla::Buffer &b = *side->buffers[i];
      a.push(b.data, b.rank, b.rank ? b.dims : nullptr, dtype_text(b.dtype));
    }
  const EntryFunctions &f = bound->functions;
  Scratch scratch(frame, device);
  int64_t elements;
  if (!attribute(frame.attrs, "scratch").empty()) {  // the last output, a vector
    constexpr int kMaxOutputs = 16;
    int n_told = bound->told ? a.n : static_cast<int>(frame.args.n), out_ndims[kMaxOutputs] = {};
    int64_t out_shapes[kMaxOutputs * kMaxNdim];
    const char *out_dtypes[kMaxOutputs];
    AOT_TRY(f.adopt(f.infer(n_told, a.ndims, a.shapes, a.dtypes, bound->extra, out_ndims, out_shapes, out_dtypes)));
    int last = kMaxOutputs - 1;
    while (last && !out_ndims[last]) --last;
    elements = out_shapes[last * kMaxNdim];
    AOT_TRY(scratch.allocate(bound->name.c_str(), elements * element_bytes(out_dtypes[last])));
    a.push(scratch.data(), 1, &elements, out_dtypes[last]);
  }
  return f.adopt(f.entry(a.n, a.params, a.ndims, a.shapes, a.dtypes, stream, bound->extra));
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

xla::Error *handle(const xla::CallFrame *frame, const Handler &handler) noexcept {
  if (frame->extension && frame->extension->type == xla::ExtensionType::metadata)
    return describe(*frame, handler.traits), nullptr;
  if (frame->stage != xla::Stage::execute) return nullptr;
  xla::StreamGetArgs get{};
  get.size = sizeof get;
  get.context = frame->context;
  if (handler.device == kCuda)
    if (xla::Error *failed = frame->api->stream_get(&get)) return failed;
  Status status;
  try {
    status = call(*frame, handler.device, get.stream);
  } catch (const std::exception &e) {
    status = fail(kConventionMisused, "%s", e.what());
  }
  return status ? error(frame->api, status) : nullptr;
}

// XLA flushes subnormal numbers to zero in the threads that run a program on the CPU. Entries compute with them, as in
// every other framework. Threads inherit the setting when they are started: OpenMP's would keep it for torch and NumPy.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&of_xla_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&of_xla_); }
  DefaultFloats(const DefaultFloats &) = delete;

 private:
  std::fenv_t of_xla_;
};

}  // namespace

AOT_API xla::Error *aot_xla_cpu(xla::CallFrame *frame) {
  const DefaultFloats floats;
  return handle(frame, kOnCpu);
}
AOT_API xla::Error *aot_xla_cuda(xla::CallFrame *frame) { return handle(frame, kOnCuda); }
AOT_API xla::Error *aot_xla_cuda_scratch(xla::CallFrame *frame) { return handle(frame, kOnCudaWithScratch); }
