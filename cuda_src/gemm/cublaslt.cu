// cuBLASLt, if the process has loaded it or can: found by name, never linked. The part of its interface that is used is
// declared here, after NVIDIA's documentation of cuBLAS 12 and 13; its numbers have not changed since version 11.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "cuda/launch.cuh"
#include "gemm.h"
#include "host/dynamic.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- interface

using Object = void *;  // a handle, a descriptor, a layout, a preference

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

enum Attribute {
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kBatchCount = 5,   // of a layout
  kBatchOffset = 6,  // of a layout
  kMaxWorkspace = 1,
  kReductions = 3,
  kAlignment = 5,  // of a, and the next three of b, c, d
};
enum Epilogue { kDefault = 1, kRelu = 2, kBias = 4 };
enum DataType { kFloat32Type = 0, kFloat64Type = 1, kFloat16Type = 2, kBFloat16Type = 14 };
enum ComputeType { kCompute32 = 68, kCompute64 = 70, kComputeTf32 = 77 };
enum Reductions : uint32_t { kReduceInPlace = 1, kReduceInComputeType = 2 };
enum AlgorithmAttribute { kTile = 1, kSplits = 2 };
constexpr int32_t kStreamK = -1;  // kSplits of an algorithm whose blocks have equal shares of all terms
enum Tile {
  kTile64x64 = 15,
  kTile64x128 = 17,
  kTile128x64 = 18,
  kTile128x128 = 20,
  kTile128x256 = 23,
  kTile256x128 = 24,
};

struct Library {
  int (*create)(Object *handle);
  int (*desc_create)(Object *desc, int compute, int scale);
  int (*desc_set)(Object desc, int attribute, const void *value, size_t size);
  int (*desc_destroy)(Object desc);
  int (*layout_create)(Object *layout, int type, uint64_t rows, uint64_t cols, int64_t stride);
  int (*layout_set)(Object layout, int attribute, const void *value, size_t size);
  int (*layout_destroy)(Object layout);
  int (*preference_create)(Object *preference);
  int (*preference_set)(Object preference, int attribute, const void *value, size_t size);
  int (*preference_destroy)(Object preference);
  int (*heuristic)(Object handle, Object desc, Object a, Object b, Object c, Object d, Object preference, int wanted,
                   Heuristic *results, int *found);
  int (*algorithm_get)(const Algorithm *algorithm, int attribute, void *value, size_t size, size_t *written);
  int (*matmul)(Object handle, Object desc, const void *alpha, const void *a, Object a_layout, const void *b,
                Object b_layout, const void *beta, const void *c, Object c_layout, void *d, Object d_layout,
                const Algorithm *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream);

  bool read(void *library) {
    return find(library, "cublasLtCreate", &create) && find(library, "cublasLtMatmulDescCreate", &desc_create) &&
           find(library, "cublasLtMatmulDescSetAttribute", &desc_set) &&
           find(library, "cublasLtMatmulDescDestroy", &desc_destroy) &&
           find(library, "cublasLtMatrixLayoutCreate", &layout_create) &&
           find(library, "cublasLtMatrixLayoutSetAttribute", &layout_set) &&
           find(library, "cublasLtMatrixLayoutDestroy", &layout_destroy) &&
           find(library, "cublasLtMatmulPreferenceCreate", &preference_create) &&
           find(library, "cublasLtMatmulPreferenceSetAttribute", &preference_set) &&
           find(library, "cublasLtMatmulPreferenceDestroy", &preference_destroy) &&
           find(library, "cublasLtMatmulAlgoGetHeuristic", &heuristic) &&
           find(library, "cublasLtMatmulAlgoConfigGetAttribute", &algorithm_get) &&
           find(library, "cublasLtMatmul", &matmul);
  }
};

// The library, looked for once. error: why the one that the user named cannot be used; else empty. reason: why this
// one, or none, is used.
struct Found {
  Library library = {};
  bool usable = false;
  char error[512] = "", reason[128] = "";

  Found() {
    const char *named = std::getenv("AOTOPS_CUBLASLT");
    if (named && *named) load(named);
    else search();
  }

 private:
  void load(const char *file) {
    const bool none = !std::strcmp(file, "none");
    std::snprintf(reason, sizeof reason, "AOTOPS_CUBLASLT is %s", none ? "none" : "its path");
    if (none) return;
    usable = library.read(dlopen(file, RTLD_NOW | RTLD_LOCAL));
    if (usable) return;
    const char *reason = dlerror();
    std::snprintf(error, sizeof error, "AOTOPS_CUBLASLT is '%s', expected the path of libcublasLt.so, or 'none': %s",
                  file, reason ? reason : "unknown error");
  }
  // A library that the process has loaded comes first. A driver of CUDA 12 does not run that of CUDA 13, whose
  // functions fail there.
  void search() {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    for (int loaded : {RTLD_NOLOAD, 0})
      for (int major : {13, 12})
        if (!usable && driver >= 1000 * major) open(major, loaded);
    if (usable) return;
    if (!driver) std::snprintf(reason, sizeof reason, "there is no NVIDIA driver");
    else
      std::snprintf(reason, sizeof reason, "the dynamic loader does not find libcublasLt.so.12%s",
                    driver >= 13000 ? " or .13" : ", and the driver runs no later one");
  }
  void open(int major, int loaded) {
    char name[32];
    std::snprintf(name, sizeof name, "libcublasLt.so.%d", major);
    usable = library.read(dlopen(name, RTLD_NOW | RTLD_LOCAL | loaded));
    std::snprintf(reason, sizeof reason, "%s", loaded ? "the process has loaded it" : "the dynamic loader finds it");
  }
};

const Found &found() {
  static const Found once;
  return once;
}

// The values of $AOTOPS_GEMM (docs/building.md).
enum class GemmMode { automatic, cublaslt, own, unknown };

GemmMode gemm_mode() {
  static const GemmMode mode = [] {
    const char *names[] = {"auto", "cublaslt", "own"}, *text = std::getenv("AOTOPS_GEMM");
    if (!text || !*text) return GemmMode::automatic;
    for (int i = 0; i < 3; ++i)
      if (!std::strcmp(text, names[i])) return static_cast<GemmMode>(i);
    return GemmMode::unknown;
  }();
  return mode;
}

bool has_cublaslt() { return found().usable && gemm_mode() != GemmMode::own; }

// The handle of a device, kept for all threads and streams.
Object handle_of(int device) {
  constexpr int kDevices = 64;
  static Object handles[kDevices];
  static std::mutex creating;
  if (device < 0 || device >= kDevices) return nullptr;
  std::lock_guard<std::mutex> hold(creating);
  if (!handles[device] && found().library.create(&handles[device])) handles[device] = nullptr;
  return handles[device];
}

// --------------------------------------------------------------------------------------------------------- product

class OwnedObject {
 public:
  OwnedObject(int (*destroy)(Object)) : destroy_(destroy) {}
  OwnedObject(const OwnedObject &) = delete;
  ~OwnedObject() {
    if (object) destroy_(object);
  }
  Object object = nullptr;

 private:
  int (*destroy_)(Object);
};

int data_type(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return kFloat16Type;
    case DType::bfloat16:
      return kBFloat16Type;
    case DType::float32:
      return kFloat32Type;
    default:
      return kFloat64Type;
  }
}

uint32_t alignment(const void *data) {
  uint32_t bytes = 256;
  while (reinterpret_cast<uintptr_t>(data) % bytes) bytes /= 2;
  return bytes;
}

using Key = std::array<int64_t, 15>;  // all that the choice of an algorithm depends on

// The algorithm for a product, if there is one. Kept because a query costs some ten microseconds.
struct CachedAlgorithm {
  Algorithm algorithm;
  bool found;
};
constexpr size_t kMaxCached = 4096;
std::mutex cache_mutex;
std::map<Key, CachedAlgorithm> &cache() {
  static auto *map = new std::map<Key, CachedAlgorithm>;  // never destroyed: threads may use it at exit
  return *map;
}

// cuBLASLt is column-major, and row-major c = a b is column-major c^T = b^T a^T: its A is b.
struct CublasLtCall {
  const Library &lib;
  const GemmParams &gemm;
  OwnedObject desc{lib.desc_destroy}, a{lib.layout_destroy}, b{lib.layout_destroy}, c{lib.layout_destroy};

  bool describe(int epilogue) {
    const bool wide = gemm.dtype == DType::float64;
    const int compute = wide ? kCompute64 : gemm.dtype == DType::float32 && gemm.allow_tf32 ? kComputeTf32 : kCompute32;
    const int32_t flip_b = gemm.b.transposed, flip_a = gemm.a.transposed;
    if (lib.desc_create(&desc.object, compute, wide ? kFloat64Type : kFloat32Type)) return false;
    if (set(kTransposeA, flip_b) || set(kTransposeB, flip_a) || !set_epilogue(epilogue)) return false;
    if (gemm.bias && set(kBiasPointer, gemm.bias)) return false;
    return create_layout(&a, gemm.dtype, gemm.n, gemm.k, gemm.b, gemm.b_step) &&
           create_layout(&b, gemm.dtype, gemm.k, gemm.m, gemm.a, gemm.a_step) &&
           create_layout(&c, gemm.c_dtype, gemm.n, gemm.m, gemm.c, gemm.c_step);
  }

  bool set_epilogue(int epilogue) { return !set(kEpilogue, uint32_t(epilogue)); }

  // The best algorithm by cuBLASLt's estimate, except in float32 (docs/lab_notes.md):
  // - In TF32 on 9.0, of a product with b transposed, the best one with 8 MiB of workspace, where the best one is none
  //   that shares the terms evenly (stream-K): it took 0.84 to 1.00 of its time on an H200, and elsewhere 0.99 to 1.04.
  // - In a product of 33 to 128 rows tiles of 64 x 64 that fill the device once, if there are such among its first
  //   eight, took 0.91 of the time of its first on an H200, and never more than 1.01.
  // - In a product of more rows on 9.0, b transposed, whose first has whole sums and one or two blocks of 64 x 128 for
  //   each multiprocessor: tiles of 128 x 128 with as many splits as give it nearly two, if there are such among its
  //   first five. They took 0.81 to 0.97 of the time on an H200, later ones 1.05.
  // - Elsewhere parts of the sums may be added in place, unless the best one that does without has large tiles: such
  //   took 0.96 to 1.02 of the time of those that add in place, with smaller ones 1.04 to 1.16. Counters keep the order
  //   of the additions, so that a call has the same bits each time.
  CachedAlgorithm find_algorithm(Object handle, const DeviceLimits &limits) {
    const bool wide = gemm.dtype == DType::float32 && gemm.c_dtype == DType::float32 && !gemm.allow_tf32;
    const bool chooses = wide && gemm.count == 1 && gemm.m > 32 && !gemm.a.transposed && gemm.b.transposed;
    const bool few = chooses && gemm.m <= 128, many = chooses && !few && limits.major == 9;
    Heuristic all[8] = {};
    const int found = ask(handle, kReduceInComputeType, few || many ? 8 : 1, all);
    const bool tf32 = gemm.dtype == DType::float32 && gemm.allow_tf32 && gemm.count == 1 && limits.major == 9;
    if (tf32 && !gemm.a.transposed && gemm.b.transposed && found && of(all[0].algorithm, kSplits) != kStreamK) {
      Heuristic less = {};
      if (ask(handle, kReduceInComputeType, 1, &less, 8 << 20)) return {less.algorithm, true};
    }
    const int64_t once = limits.multiprocessors;
    for (int i = 0; few && i < found; ++i)
      if (fills(all[i].algorithm, kTile64x64, 0.85, once)) return {all[i].algorithm, true};
    if (many && found && is_narrow(all[0].algorithm, 2 * once))
      for (int i = 1; i < std::min(found, 5); ++i)
        if (fills(all[i].algorithm, kTile128x128, 0.75, 2 * once)) return {all[i].algorithm, true};
    if (wide && !(found && has_large_tiles(all[0].algorithm))) {
      Heuristic in_place = {};
      if (ask(handle, kReduceInComputeType | kReduceInPlace, 1, &in_place)) return {in_place.algorithm, true};
    }
    return {all[0].algorithm, found > 0};
  }

  int run(Object handle, const Algorithm &algorithm, cudaStream_t stream) {
    const float one = 1, zero = 0;
    const double one64 = 1, zero64 = 0;
    const bool wide = gemm.dtype == DType::float64;
    const void *alpha = wide ? static_cast<const void *>(&one64) : &one;
    const void *beta = gemm.adds ? alpha : wide ? static_cast<const void *>(&zero64) : &zero;
    return lib.matmul(handle, desc.object, alpha, gemm.b.data, a.object, gemm.a.data, b.object, beta, gemm.c.data,
                      c.object, gemm.c.data, c.object, &algorithm, gemm.workspace, gemm.workspace_bytes, stream);
  }

 private:
  // Asks for the first `wanted` algorithms; how many there are. Those that sum in the type of the result are excluded
  // where it is narrower than what the product is computed in.
  int ask(Object handle, uint32_t reductions, int wanted, Heuristic *results, int64_t most_workspace = INT64_MAX) {
    OwnedObject preference(lib.preference_destroy);
    if (lib.preference_create(&preference.object)) return 0;
    auto prefer = [&](int attribute, auto value) {
      return lib.preference_set(preference.object, attribute, &value, sizeof value);
    };
    // A workspace beyond library_workspace is for the copies of a call in TF32 (transposed.h), for which MindSpore has
    // room in any dtype.
    most_workspace = std::min(most_workspace, kLibraryElements * itemsize(accumulate_dtype(gemm.dtype)));
    prefer(kMaxWorkspace, uint64_t(std::min(gemm.workspace_bytes, most_workspace))), prefer(kReductions, reductions);
    prefer(kAlignment, alignment(gemm.b.data)), prefer(kAlignment + 1, alignment(gemm.a.data));
    prefer(kAlignment + 2, alignment(gemm.c.data)), prefer(kAlignment + 3, alignment(gemm.c.data));
    int found = 0, usable = 0;
    if (lib.heuristic(handle, desc.object, a.object, b.object, c.object, c.object, preference.object, wanted, results,
                      &found))
      return 0;
    while (usable < found && !results[usable].state) ++usable;
    return usable;
  }

  int32_t of(const Algorithm &algorithm, AlgorithmAttribute attribute) const {
    int32_t value = 0;
    size_t written = 0;
    return lib.algorithm_get(&algorithm, attribute, &value, sizeof value, &written) ? 0 : value;
  }
  bool has_large_tiles(const Algorithm &algorithm) const {
    const int32_t tile = of(algorithm, kTile);
    return tile == kTile128x256 || tile == kTile256x128;
  }
  // Blocks of tiles of rows x columns, of which those of a column-major matrix are gemm.n x gemm.m.
  int64_t blocks(const Algorithm &algorithm, int rows, int columns) const {
    return ceil_div(gemm.n, rows) * ceil_div(gemm.m, columns) * of(algorithm, kSplits);
  }
  // Whether the blocks of square tiles are at least this share of `most`, and no more than that.
  bool fills(const Algorithm &algorithm, Tile tile, double share, int64_t most) const {
    const int size = tile == kTile64x64 ? 64 : 128;
    const int64_t n = blocks(algorithm, size, size);
    return of(algorithm, kTile) == tile && n <= most && n >= share * most;
  }
  // Whether all sums are whole, in at most so many blocks of 64 x 128.
  bool is_narrow(const Algorithm &algorithm, int64_t most) const {
    const int32_t tile = of(algorithm, kTile);
    if (of(algorithm, kSplits) != 1) return false;
    return (tile == kTile64x128 && blocks(algorithm, 64, 128) <= most) ||
           (tile == kTile128x64 && blocks(algorithm, 128, 64) <= most);
  }

  template <typename T>
  int set(int attribute, T value) {
    return lib.desc_set(desc.object, attribute, &value, sizeof value);
  }
  bool create_layout(OwnedObject *layout, DType dtype, int64_t rows, int64_t cols, const Operand &x, int64_t step) {
    const int64_t r = x.transposed ? cols : rows, c = x.transposed ? rows : cols;
    if (lib.layout_create(&layout->object, data_type(dtype), r, c, x.stride)) return false;
    if (gemm.count == 1) return true;
    const int32_t count = static_cast<int32_t>(gemm.count);
    return !lib.layout_set(layout->object, kBatchCount, &count, sizeof count) &&
           !lib.layout_set(layout->object, kBatchOffset, &step, sizeof step);
  }
};

}  // namespace

// ----------------------------------------------------------------------------------------------------------- entry

Status check_cublaslt(const char *op) {
  if (gemm_mode() == GemmMode::unknown)
    return fail(kDeviceError, "%s: AOTOPS_GEMM is '%s', expected 'auto', 'cublaslt' or 'own'", op,
                std::getenv("AOTOPS_GEMM"));
  return *found().error ? fail(kDeviceError, "%s: %s", op, found().error) : kOk;
}

// It does by default, except with an activation in 16 bits, which its epilogue does not have, so that it takes a second
// kernel. On an H200 the steps of a model were slower with the library's own kernel for all products, although single
// products were faster at a given clock (docs/lab_notes.md). The choice does not depend on whether pre_activation is
// wanted, and so the bits of c do not either.
bool prefers_cublaslt(const GemmParams &g) {
  return has_cublaslt() &&
         (gemm_mode() == GemmMode::cublaslt || itemsize(g.dtype) > 2 || g.activation == kActivationNone);
}

Status gemm_cublaslt(const char *op, const GemmParams &gemm, cudaStream_t stream, bool *done) {
  *done = false;
  const int64_t limit = 0x7fffffff;
  const bool fits = gemm.m <= limit && gemm.n <= limit && gemm.k <= limit && gemm.count <= limit;
  if (gemm.k == 0 || !fits) return kOk;
  // Its GELU is the tanh approximation, which has ten correct digits in float64, and is not used. Its ReLU is used only
  // for the dtypes whose GEMM with pre_activation runs here as well (gemm_and_activation in gemm.cu). That one has no
  // activation, so the algorithm is always chosen without one: both have the same bits.
  const bool relu = gemm.activation == kActivationRelu && itemsize(gemm.dtype) > 2;
  if ((gemm.activation && !relu) || gemm.pre_activation) return kOk;
  const int epilogue = gemm.bias ? kBias : kDefault;
  AOT_TRY(check_cublaslt(op));
  if (!has_cublaslt()) return kOk;
  int device = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  Object handle = handle_of(device);
  CublasLtCall call{found().library, gemm};
  if (!handle || !call.describe(epilogue)) return kOk;

  const Key key = {device | gemm.a.transposed << 8 | gemm.b.transposed << 9 | gemm.allow_tf32 << 10 | epilogue << 16,
                   int64_t(gemm.dtype) << 8 | int64_t(gemm.c_dtype),
                   gemm.m,
                   gemm.n,
                   gemm.k,
                   gemm.a.stride,
                   gemm.b.stride,
                   gemm.c.stride,
                   gemm.count,
                   gemm.a_step,
                   gemm.b_step,
                   gemm.c_step,
                   gemm.workspace_bytes,
                   alignment(gemm.a.data) << 20 | alignment(gemm.b.data) << 10 | alignment(gemm.c.data),
                   gemm.bias ? alignment(gemm.bias) : 0};
  CachedAlgorithm cached{};
  {
    std::lock_guard<std::mutex> hold(cache_mutex);
    auto known = cache().find(key);
    if (known != cache().end()) {
      cached = known->second;
    } else {
      DeviceLimits limits;
      AOT_TRY(device_limits(op, &limits));
      cached = call.find_algorithm(handle, limits);
      if (cache().size() >= kMaxCached) cache().clear();
      cache().emplace(key, cached);
    }
  }
  if (!cached.found) return kOk;
  if (relu) {  // if it is not supported, another kernel runs
    const int with_relu = gemm.bias ? kBias | kRelu : kRelu;
    return *done = call.set_epilogue(with_relu) && !call.run(handle, cached.algorithm, stream), kOk;
  }
  if (int status = call.run(handle, cached.algorithm, stream))
    return fail(kDeviceError, "%s: cublasLtMatmul returned status %d", op, status);
  return *done = true, kOk;
}

}  // namespace AOT_ISA
}  // namespace aot

// For aotops info: the path of cuBLASLt, empty if it is not used, and why it is, or not. The texts stay valid.
AOT_API void aot_cublaslt(const char **path, const char **reason) {
  using namespace aot;
  Dl_info where = {};
  const bool is_used = has_cublaslt() && dladdr(reinterpret_cast<void *>(found().library.create), &where);
  *path = is_used ? where.dli_fname : "";
  *reason = *found().error ? found().error : gemm_mode() == GemmMode::own ? "AOTOPS_GEMM is own" : found().reason;
}
