// The text of a failed call's error, and the library's version.
#include <pthread.h>

#include <algorithm>
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

// The length of the UTF-8 character at `text`; 0: it is none (RFC 3629). It reads no byte after a NUL.
size_t utf8_length(const unsigned char *text) {
  const unsigned char c = *text;
  if (c < 0x80) return 1;
  const size_t n = c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
  for (size_t i = 1; i < n; ++i)
    if ((text[i] & 0xc0) != 0x80) return 0;
  const bool overlong = (c == 0xe0 && text[1] < 0xa0) || (c == 0xf0 && text[1] < 0x90);
  const bool no_character = (c == 0xed && text[1] >= 0xa0) || (c == 0xf4 && text[1] >= 0x90);
  return overlong || no_character ? 0 : n;
}

// Every host takes the text for UTF-8, and Python raises for another one: bytes that are none, of a path or of an
// exception's text, become \xff.
void copy_as_utf8(const char *from, char *to) {
  const char *end = to + kCapacity - 5;
  while (*from && to < end) {
    const auto *at = reinterpret_cast<const unsigned char *>(from);
    const size_t n = utf8_length(at);
    if (n) std::memcpy(to, from, n), to += n, from += n;
    else to += std::snprintf(to, 5, "\\x%02x", *at), ++from;
  }
  *to = 0;
}

}  // namespace

aot::Status aot::fail(Status status, const char *format, ...) noexcept {
  char text[kCapacity];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, kCapacity, format, args);
  va_end(args);
  copy_as_utf8(text, own);
  std::lock_guard<std::mutex> hold(latest_lock);
  std::memcpy(latest, own, kCapacity);
  return status;
}

void aot::SignatureText::add(const char *name, char mark) noexcept {
  const size_t room = sizeof text - length;
  const int n = std::snprintf(text + length, room, "%s%c ", name, mark);
  length += std::min(room - 1, static_cast<size_t>(n));
}

void aot::SignatureText::end(char mark) noexcept {
  if (length + 1 < sizeof text) text[length++] = mark, text[length] = 0;
}

const char aot::kFloat16[] = "float16", aot::kBFloat16[] = "bfloat16", aot::kFloat32[] = "float32",
           aot::kFloat64[] = "float64";

// Returns and clears the calling thread's last error. If it has none, the latest error of any thread.
const char *aot::last_error() noexcept {
  std::lock_guard<std::mutex> hold(latest_lock);
  std::memcpy(answer, *own ? own : latest, kCapacity);
  *own = 0;
  return answer;
}

AOT_API const char *aot_last_error() { return aot::last_error(); }

// The runtime of other libraries (aotops/lib/libaot.a) is compiled without a version.
#ifdef AOT_VERSION
AOT_API const char *aot_version() { return AOT_VERSION; }
#endif
