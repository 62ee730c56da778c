// A child of fork() has the thread that forked and no other. The pool that OpenMP remembers for that thread is not
// there, and a parallel region that waits for it waits for ever; a thread that is started since gets a pool of its own.
#pragma once

namespace aot {

// Whether the calling thread is the one that came through a fork.
bool came_through_fork() noexcept;

// f(data) on a thread that was started since, for which this one waits. False where no thread can be started.
bool run_on_new_thread(void (*f)(void *), void *data) noexcept;

}  // namespace aot
