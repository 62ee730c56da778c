#include "blas.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "aot.h"

namespace {

// Where aotops/library.py found the file of PyPI's scipy-openblas32.
std::string &wheel() {
  static std::string path;
  return path;
}

// A function of OpenBLAS; the wheel prefixes their names.
template <class F>
bool find(void *library, const char *prefix, const char *name, F **function) {
  *function = reinterpret_cast<F *>(dlsym(library, (std::string(prefix) + name).c_str()));
  return *function;
}

bool read(void *library, const char *prefix, aot::Blas *blas, bool ours) {
  constexpr int kOwnThreads = 1;  // openblas_get_parallel: 0 sequential, 1 a pool of threads, 2 OpenMP
  int (*get_parallel)();
  void (*set_num_threads)(int);
  if (!library || !find(library, prefix, "openblas_get_parallel", &get_parallel) ||
      !find(library, prefix, "openblas_set_num_threads", &set_num_threads) ||
      !find(library, prefix, "cblas_sgemm", &blas->sgemm) || !find(library, prefix, "cblas_dgemm", &blas->dgemm))
    return false;
  // The threads are OpenMP's (../cpu/parallel.h): within them OpenBLAS must have none of its own.
  if (get_parallel() == kOwnThreads) {
    if (!ours) return false;
    set_num_threads(1);
  }
  return true;
}

// $AOTOPS_OPENBLAS, where it is set, names the file, or is "none". Else the wheel's, a copy that nobody else calls, or
// the system's, which may be NumPy's too: that one only if its number of threads need not be touched.
const aot::Blas *find_blas(const char *asked) {
  static aot::Blas blas;
  if (asked && !std::strcmp(asked, "none")) return nullptr;
  const std::string file = asked ? asked : wheel();
  void *own = file.empty() ? nullptr : dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (read(own, "scipy_", &blas, true) || read(own, "", &blas, true)) return &blas;
  if (!asked && read(dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL), "", &blas, false)) return &blas;
  return nullptr;
}

struct Scratch {
  void *data = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

const aot::Blas *aot::blas(bool own_is_good) noexcept {
  static const char *const asked = std::getenv("AOTOPS_OPENBLAS");
  if (own_is_good && !asked) return nullptr;
  static const Blas *const found = find_blas(asked);
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

// Before the first product: where the wheel's library is.
AOT_API void aot_set_openblas(const char *path) { wheel() = path; }
