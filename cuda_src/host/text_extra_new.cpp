// For libraries compiled with the compiler's own std::string. In MindSpore such a library crashes when it reads an
// attribute.
#undef _GLIBCXX_USE_CXX11_ABI
#define _GLIBCXX_USE_CXX11_ABI 1
#define FOREIGN_EXTRA foreign_extra_new_strings
#include "text_extra_abi.h"
