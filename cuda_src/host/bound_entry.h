// An entry with its companions, as a library exports them, and what Init makes of its attributes.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "aot.h"
#include "dynamic.h"

extern "C" const char *aot_last_error();

namespace aot {

enum Device { kCpu, kCuda };

using Entry = int(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
                  void *extra);
using Infer = int(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *extra,
                  int *out_ndims, int64_t *out_shapes, const char **out_dtypes);
using Init = int(int *ndims, int64_t **shapes, const char **dtypes, void *extra);
using LastError = const char *();

// call.py mirrors this struct.
struct EntryFunctions {
  Entry *entry = nullptr;  // null: the library has none
  Init *init = nullptr;
  Infer *infer = nullptr;
  LastError *last_error = nullptr;  // of its library; null: it has none

  // `symbol`: such as aot_gelu_cpu. False: there is no entry.
  bool read(void *library, const std::string &symbol) {
    find(library, (symbol + "Init").c_str(), &init);
    find(library, (symbol + "Infer").c_str(), &infer);
    find(library, "aot_last_error", &last_error);
    return find(library, symbol.c_str(), &entry);
  }

  // The status of one of the functions. Another library than this one has messages of its own; that of a failure is
  // copied to this one.
  Status adopt(int status) const {
    const Status s = static_cast<Status>(status);
    if (!status || last_error == aot_last_error) return s;
    return last_error ? fail(s, "%s", last_error()) : fail(s, "the entry returned %d", status);
  }

  // Makes an `extra` of the attributes and lets Init read it. On failure *extra is null and aot_last_error() says why.
  Status bind(const char *attrs, void **extra) const {
    *extra = extra_new(attrs);
    if (!*extra) return fail(kOutOfMemory, "out of memory");
    const Status status = adopt(init ? init(nullptr, nullptr, nullptr, *extra) : 0);
    if (status) extra_delete(*extra), *extra = nullptr;
    return status;
  }
};

inline std::string symbol_of(const std::string &entry, Device device) {
  return entry + (device == kCpu ? "_cpu" : "_cuda");
}

// Values that are kept for good: a list that only grows, so that a look-up takes no lock. Two threads may add what is
// equal; the second is as good as the first.
template <class T>  // has a member `T *next`
class GrowingList {
 public:
  template <class F>
  T *find(F is_wanted) const {
    for (T *one = first_.load(std::memory_order_acquire); one; one = one->next)
      if (is_wanted(*one)) return one;
    return nullptr;
  }
  T *add(std::unique_ptr<T> one) {
    one->next = first_.load(std::memory_order_relaxed);
    while (!first_.compare_exchange_weak(one->next, one.get(), std::memory_order_release, std::memory_order_relaxed)) {
    }
    return one.release();
  }

 private:
  std::atomic<T *> first_{nullptr};
};

}  // namespace aot
