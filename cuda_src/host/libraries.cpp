#include "libraries.h"

#include "tvm_ffi_abi.h"

using namespace aot;

namespace {

struct FunctionObject {
  std::string library, name;
  void *object;
  FunctionObject *next = nullptr;
};

GrowingList<SharedLibrary> libraries;
GrowingList<FunctionObject> function_objects;

}  // namespace

const SharedLibrary *aot::find_library(std::string_view name) {
  static const SharedLibrary self = [] {
    Dl_info info;
    const bool found = dladdr(reinterpret_cast<void *>(&find_library), &info);
    return SharedLibrary{"aotops", found ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr, false};
  }();
  if (name.empty()) return &self;
  return libraries.find([&](const SharedLibrary &library) { return library.name == name; });
}

void *aot::find_function_object(std::string_view library, std::string_view name) {
  const auto *found =
      function_objects.find([&](const FunctionObject &one) { return one.library == library && one.name == name; });
  return found ? found->object : nullptr;
}

// Names a function object of tvm-ffi, which the caller keeps for good, in a library.
AOT_API int aot_function_object(const char *library, const char *name, void *object) {
  if (find_function_object(library, name) == object) return kOk;
  const int type = static_cast<tvm_ffi::Object *>(object)->type;
  if (type != tvm_ffi::kFunction)
    return fail(kUnsupportedDtype, "%s is an object of tvm-ffi of type %d, expected a tvm_ffi.Function", name, type);
  function_objects.add(std::make_unique<FunctionObject>(FunctionObject{library, name, object}));
  return kOk;
}

Status aot::add_library(const char *name, void *handle, bool new_strings) {
  const SharedLibrary *known = find_library(name);
  if (known)
    return known->handle == handle ? kOk : fail(kInvalidArgument, "the library %s is registered already", name);
  return libraries.add(std::make_unique<SharedLibrary>(SharedLibrary{name, handle, new_strings})), kOk;
}

// new_strings: libraries.h tells of it.
AOT_API int aot_library(const char *name, void *handle, int new_strings) {
  return add_library(name, handle, new_strings != 0);
}
