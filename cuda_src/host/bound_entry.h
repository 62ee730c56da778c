// An entry bound to its attributes: what every caller but MindSpore keeps between calls.
#pragma once
#include "aot.h"

extern "C" const char *aot_last_error();

namespace aot {

using Entry = int(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
                  void *extra);
using Infer = int(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *extra,
                  int *out_ndims, int64_t *out_shapes, const char **out_dtypes);
using Init = int(int *ndims, int64_t **shapes, const char **dtypes, void *extra);
using LastError = const char *();

// The status of a function of an operator's library. Another library than this one has messages of its own; that of a
// failure is copied to this one.
inline Status adopt(int status, LastError *last_error) {
  const Status s = static_cast<Status>(status);
  if (!status || last_error == aot_last_error) return s;
  return last_error ? fail(s, "%s", last_error()) : fail(s, "the entry returned %d", status);
}

// Makes an `extra` of the attributes and lets Init read it. On failure *extra is null and aot_last_error() says why.
inline Status bind(Init *init, const char *attrs, LastError *last_error, void **extra) {
  *extra = extra_new(attrs);
  if (!*extra) return fail(kOutOfMemory, "out of memory");
  Status status = adopt(init ? init(nullptr, nullptr, nullptr, *extra) : 0, last_error);
  if (status) extra_delete(*extra), *extra = nullptr;
  return status;
}

}  // namespace aot
