// Symbols of shared libraries, looked up at run time.
#pragma once
#include <dlfcn.h>

namespace aot {

// The library if the process has loaded one of this name, else null.
inline void *loaded(const char *name) { return dlopen(name, RTLD_NOW | RTLD_NOLOAD); }

// Looks up a function or a variable. False, and null: there is none, or no library.
template <class T>
bool find(void *library, const char *name, T **symbol) {
  *symbol = library ? reinterpret_cast<T *>(dlsym(library, name)) : nullptr;
  return *symbol;
}

}  // namespace aot
