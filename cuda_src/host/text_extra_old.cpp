// For libraries compiled with -D_GLIBCXX_USE_CXX11_ABI=0, as MindSpore compiles them.
#undef _GLIBCXX_USE_CXX11_ABI
#define _GLIBCXX_USE_CXX11_ABI 0
#define FOREIGN_EXTRA foreign_extra_old_strings
#include "text_extra_abi.h"
