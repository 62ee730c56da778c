// The threads of CPU kernels, and scratch memory for each of them. The threads are those of an OpenMP runtime, or of a
// pool of our own where there is none.
//
// The library does not link OpenMP. A wheel would have to contain a copy, and a process with torch would have two
// runtimes, each with a thread for every core. The runtime is looked up when threads are needed first: torch's; any
// that the process has loaded; the system's libgomp.so.1. So OMP_NUM_THREADS and, in a process with torch,
// torch.set_num_threads apply. AOTOPS_THREADS=own selects the pool; aotops/library.py refuses other values.
#pragma once
#include <cstddef>

namespace aot {

// The number of threads that a region gets: 1 within a parallel region.
int max_threads() noexcept;

// Calls f(data, thread, threads) on each of `threads` threads, numbered from 0, and waits for all of them. 0 threads:
// as many as max_threads(). There may be fewer than asked for.
void run_on_threads(void (*f)(void *data, int thread, int threads), void *data, int threads = 0) noexcept;

// Memory of at least so many bytes, aligned to a cache line, that belongs to the calling thread until its next call or
// its end. Null if out of memory.
void *thread_scratch(size_t bytes) noexcept;

}  // namespace aot
