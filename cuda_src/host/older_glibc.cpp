// Symbols that the headers of glibc 2.32 and of GCC 11 and later refer to, and older systems lack: the wheel loads
// there (make wheel). The symbols are hidden, so nothing outside this library uses them.
#include <new>

extern "C" {
// False: the process may have other threads. std::shared_ptr reads it to save an atomic operation.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
