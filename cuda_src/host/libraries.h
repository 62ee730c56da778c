// Shared libraries by name: those whose entries the hosted operators (hosted.cpp) and XLA's handler (xla.cpp) call.
#pragma once
#include <string>
#include <string_view>

#include "bound_entry.h"

namespace aot {

struct SharedLibrary {
  std::string name;
  void *handle;      // of dlopen; never closed. Null: its functions are objects of tvm-ffi
  bool new_strings;  // its C++ code has the std::string of the new ABI (_GLIBCXX_USE_CXX11_ABI=1)
  SharedLibrary *next = nullptr;
};

// The library of this name; this one, without a name. Null: no library of this name is registered.
const SharedLibrary *find_library(std::string_view name);

// Names a library. The name of another one is refused.
Status add_library(const char *name, void *handle, bool new_strings);

// A function object of tvm-ffi, by its name in a library. Null: there is none.
void *find_function_object(std::string_view library, std::string_view name);

}  // namespace aot
