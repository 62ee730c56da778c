#include "libraries.h"

#include <dlfcn.h>
#include <pthread.h>

#include <deque>
#include <mutex>

using namespace aot;

namespace {

std::mutex lock;
std::deque<SharedLibrary> libraries;  // kept for good
// fork() takes the lock, so that no thread that the child lacks holds it there.
[[maybe_unused]] const int registered =
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { lock.unlock(); });

}  // namespace

const SharedLibrary *aot::find_library(std::string_view name) {
  static const SharedLibrary self = [] {
    Dl_info info;
    const bool found = dladdr(reinterpret_cast<void *>(&find_library), &info);
    return SharedLibrary{"aotops", found ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr, false};
  }();
  if (name.empty()) return &self;
  std::lock_guard<std::mutex> hold(lock);
  for (const SharedLibrary &library : libraries)
    if (library.name == name) return &library;
  return nullptr;
}

// Names a library, by its handle of dlopen. The name of another one is refused.
AOT_API int aot_library(const char *name, void *handle, int new_strings) {
  const SharedLibrary *known = find_library(name);
  if (known)
    return known->handle == handle ? kOk : fail(kInvalidArgument, "the library %s is registered already", name);
  std::lock_guard<std::mutex> hold(lock);
  libraries.push_back({name, handle, new_strings != 0});
  return kOk;
}
