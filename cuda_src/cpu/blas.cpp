#include "blas.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "aot.h"

namespace {

// The file of PyPI's scipy-openblas32, found by aotops/library.py.
std::string &wheel() {
  static std::string path;
  return path;
}

// Looks up a function of OpenBLAS; the wheel's names have a prefix.
template <class F>
bool find(void *library, const char *prefix, const char *name, F **function) {
  *function = reinterpret_cast<F *>(dlsym(library, (std::string(prefix) + name).c_str()));
  return *function;
}

bool read(void *library, const char *prefix, aot::Blas *blas, bool private_copy) {
  constexpr int kOwnThreads = 1;  // openblas_get_parallel: 0 sequential, 1 a pool of threads, 2 OpenMP
  int (*get_parallel)();
  void (*set_num_threads)(int);
  if (!library || !find(library, prefix, "openblas_get_parallel", &get_parallel) ||
      !find(library, prefix, "openblas_set_num_threads", &set_num_threads) ||
      !find(library, prefix, "cblas_sgemm", &blas->sgemm) || !find(library, prefix, "cblas_dgemm", &blas->dgemm))
    return false;
  // Products are already divided among OpenMP's threads (parallel.h), so OpenBLAS must not start its own.
  if (get_parallel() == kOwnThreads) {
    if (!private_copy) return false;
    set_num_threads(1);
  }
  return true;
}

// The file that $AOTOPS_OPENBLAS names. If it is not set, the wheel's, which is a copy of our own; else the system's,
// which NumPy may share, and which is used only if its number of threads need not be changed.
const aot::Blas *find_blas(const char *named) {
  static aot::Blas blas;
  if (named && !std::strcmp(named, "none")) return nullptr;
  const std::string file = named ? named : wheel();
  void *own = file.empty() ? nullptr : dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (read(own, "scipy_", &blas, true) || read(own, "", &blas, true)) return &blas;
  if (!named && read(dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL), "", &blas, false)) return &blas;
  return nullptr;
}

struct Scratch {
  void *data = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

const aot::Blas *aot::blas(bool own_is_good) noexcept {
  static const char *const named = std::getenv("AOTOPS_OPENBLAS");
  if (own_is_good && !named) return nullptr;
  static const Blas *const found = find_blas(named);
  return found;
}

void *aot::thread_scratch(size_t bytes) noexcept {
  static thread_local Scratch scratch;
  if (bytes > scratch.bytes) {
    std::free(scratch.data);
    scratch.data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    scratch.bytes = scratch.data ? bytes : 0;
  }
  return scratch.data;
}

// Sets the path of the wheel's library; called before the first product.
AOT_API void aot_set_openblas(const char *path) { wheel() = path; }
