// For libraries compiled with the compiler's own std::string. In MindSpore such a library crashes when it reads an
// attribute.
#undef _GLIBCXX_USE_CXX11_ABI
#define _GLIBCXX_USE_CXX11_ABI 1
#include "text_extra_abi.h"

void *aot::typed_extra_new_strings(const char *attrs) noexcept { return new_extra(attrs, true); }
