// An entry bound to its attributes: what every caller but MindSpore keeps between calls.
#pragma once
#include "aot.h"

namespace aot {

using Entry = int(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
                  void *extra);
using Infer = int(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *extra,
                  int *out_ndims, int64_t *out_shapes, const char **out_dtypes);
using Init = int(int *ndims, int64_t **shapes, const char **dtypes, void *extra);

// Makes an `extra` of the attributes and lets Init read it. On failure *extra is null and aot_last_error() says why.
inline Status bind(Init *init, const char *attrs, void **extra) {
  *extra = extra_new(attrs);
  if (!*extra) return fail(kOutOfMemory, "out of memory");
  Status status = static_cast<Status>(init ? init(nullptr, nullptr, nullptr, *extra) : 0);
  if (status) extra_delete(*extra), *extra = nullptr;
  return status;
}

}  // namespace aot
