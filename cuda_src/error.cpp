// The text of a failed call's error, and the library's version.
#include <pthread.h>

#include <cstdarg>
#include <mutex>

#include "aot.h"

namespace {

// A frontend reads the error on the thread that made the call. MindSpore makes calls on threads of its own, so the
// latest error of any thread is kept too, for threads without one.
constexpr size_t kCapacity = 1024;
thread_local char own[kCapacity], answer[kCapacity];
char latest[kCapacity];
std::mutex latest_lock;
// fork() takes the lock, so that no thread that the child lacks holds it there.
[[maybe_unused]] const int registered =
    pthread_atfork([] { latest_lock.lock(); }, [] { latest_lock.unlock(); }, [] { latest_lock.unlock(); });

}  // namespace

aot::Status aot::fail(Status status, const char *format, ...) noexcept {
  va_list args;
  va_start(args, format);
  std::vsnprintf(own, kCapacity, format, args);
  va_end(args);
  std::lock_guard<std::mutex> hold(latest_lock);
  std::memcpy(latest, own, kCapacity);
  return status;
}

const char aot::kFloat16[] = "float16", aot::kBFloat16[] = "bfloat16", aot::kFloat32[] = "float32",
           aot::kFloat64[] = "float64";

// Returns and clears the calling thread's last error. If it has none, the latest error of any thread.
AOT_API const char *aot_last_error() {
  std::lock_guard<std::mutex> hold(latest_lock);
  std::memcpy(answer, *own ? own : latest, kCapacity);
  *own = 0;
  return answer;
}

// The runtime of other libraries (aotops/lib/libaot.a) is compiled without a version.
#ifdef AOT_VERSION
AOT_API const char *aot_version() { return AOT_VERSION; }
#endif
