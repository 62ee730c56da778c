// OpenMP after fork(). A child process has only the thread that forked. OpenMP still associates a thread pool with it,
// whose threads do not exist, and a parallel region would deadlock. A new thread of the child gets a pool of its own.
#pragma once

namespace aot {

// Whether the calling thread is the one that forked, in the child.
bool in_forked_thread() noexcept;

// Runs f(data) on a thread started after the fork, and waits for it. False if no thread can be started.
bool run_on_new_thread(void (*f)(void *), void *data) noexcept;

}  // namespace aot
