// For entries of this convention, and libraries compiled with -D_GLIBCXX_USE_CXX11_ABI=0, as MindSpore compiles them.
#undef _GLIBCXX_USE_CXX11_ABI
#define _GLIBCXX_USE_CXX11_ABI 0
#include "text_extra_abi.h"

void *aot::typed_extra_old_strings(const char *attrs) noexcept { return new_extra(attrs, true); }

void *aot::extra_new(const char *attrs) noexcept { return new_extra(attrs ? attrs : "", false); }

bool aot::extra_is_own(void *extra) noexcept {
  static TextExtra own("", false);
  return extra_view(extra)->vtable == extra_view(static_cast<AotExtra *>(&own))->vtable;
}

void aot::extra_delete(void *extra) noexcept { delete static_cast<AotExtra *>(extra); }
