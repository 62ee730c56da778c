#include "libraries.h"

using namespace aot;

static GrowingList<SharedLibrary> libraries;

const SharedLibrary *aot::find_library(std::string_view name) {
  static const SharedLibrary self = [] {
    Dl_info info;
    const bool found = dladdr(reinterpret_cast<void *>(&find_library), &info);
    return SharedLibrary{"aotops", found ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr, false};
  }();
  if (name.empty()) return &self;
  return libraries.find([&](const SharedLibrary &library) { return library.name == name; });
}

// Names a library, by its handle of dlopen. The name of another one is refused.
AOT_API int aot_library(const char *name, void *handle, int new_strings) {
  const SharedLibrary *known = find_library(name);
  if (known)
    return known->handle == handle ? kOk : fail(kInvalidArgument, "the library %s is registered already", name);
  return libraries.add(std::make_unique<SharedLibrary>(SharedLibrary{name, handle, new_strings != 0})), kOk;
}
