#include "threads.h"

#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "aot.h"
#include "host/dynamic.h"

namespace {

using aot::find;
using Body = void (*)(void *data, int thread, int threads);

// ---------------------------------------------------------------------------------------------------------- OpenMP

// The exports of GCC's, LLVM's and Intel's runtimes.
struct OpenMP {
  void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags) = nullptr;
  int (*max_threads)(), (*level)(), (*thread)(), (*threads)();
};

// A library's symbols include those of the libraries that it needs.
bool find_openmp(void *library, OpenMP *openmp) {
  return find(library, "omp_get_max_threads", &openmp->max_threads) && find(library, "omp_get_level", &openmp->level) &&
         find(library, "omp_get_thread_num", &openmp->thread) &&
         find(library, "omp_get_num_threads", &openmp->threads) && find(library, "GOMP_parallel", &openmp->parallel);
}

// The first OpenMP runtime among the loaded libraries. Python packages contain copies with names of their own
// (libgomp-a34b3233.so.1.0.0).
void *loaded_runtime() {
  char path[4096] = "";
  dl_iterate_phdr(
      [](dl_phdr_info *library, size_t, void *path) {
        const char *slash = std::strrchr(library->dlpi_name, '/'), *name = slash ? slash + 1 : library->dlpi_name;
        for (const char *prefix : {"libgomp", "libomp.", "libomp-", "libiomp5"})
          if (!std::strncmp(name, prefix, std::strlen(prefix)) && std::strlen(library->dlpi_name) < 4096)
            return std::strcpy(static_cast<char *>(path), library->dlpi_name), 1;
        return 0;
      },
      path);
  return *path ? aot::loaded(path) : nullptr;
}

const OpenMP &openmp() {
  static const OpenMP found = [] {
    OpenMP openmp;
    const char *named = std::getenv("AOTOPS_THREADS");
    if (named && !std::strcmp(named, "own")) return openmp;
    if (find_openmp(aot::loaded("libtorch_cpu.so"), &openmp) || find_openmp(loaded_runtime(), &openmp) ||
        find_openmp(dlopen("libgomp.so.1", RTLD_NOW), &openmp))
      return openmp;
    return OpenMP();
  }();
  return found;
}

void run_in_openmp(Body f, void *data, int threads) {
  struct Region {
    Body f;
    void *data;
  } region{f, data};
  auto call = [](void *region) {
    const auto &[f, data] = *static_cast<Region *>(region);
    f(data, openmp().thread(), openmp().threads());
  };
  openmp().parallel(call, &region, threads, 0);
}

// -------------------------------------------------------------------------------------------------------- own pool

thread_local bool in_region = false;

void run_in_region(Body f, void *data, int thread, int threads) {
  const bool outer = in_region;
  in_region = true;
  f(data, thread, threads);
  in_region = outer;
}

// Threads that sleep until a region begins, and live until the process ends. There is one region at a time. pthread's
// functions, because std::condition_variable needs a libstdc++ newer than the wheel may ask for.
struct Pool {
  pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t begin = PTHREAD_COND_INITIALIZER, end = PTHREAD_COND_INITIALIZER;
  int workers = 0;
  // the current region
  unsigned long region = 0;
  Body f;
  void *data;
  int threads, running;

  struct Worker {
    Pool *pool;
    int thread;
    unsigned long seen;  // region
  };

  static void *serve(void *argument) {
    auto &[pool, thread, seen] = *static_cast<Worker *>(argument);
    pthread_mutex_lock(&pool->lock);
    for (;;) {
      while (pool->region == seen) pthread_cond_wait(&pool->begin, &pool->lock);
      seen = pool->region;
      if (thread >= pool->threads) continue;
      pthread_mutex_unlock(&pool->lock);
      run_in_region(pool->f, pool->data, thread, pool->threads);
      pthread_mutex_lock(&pool->lock);
      if (--pool->running == 0) pthread_cond_signal(&pool->end);
    }
  }

  void grow(int wanted) {
    for (; workers < wanted; ++workers) {
      auto *worker = new (std::nothrow) Worker{this, workers + 1, region};
      pthread_t thread;
      if (!worker || pthread_create(&thread, nullptr, serve, worker)) return delete worker;
      pthread_detach(thread);
    }
  }

  void run(Body f, void *data, int wanted) {
    grow(wanted - 1);
    pthread_mutex_lock(&lock);
    this->f = f, this->data = data, ++region;
    threads = wanted < workers + 1 ? wanted : workers + 1, running = threads - 1;
    pthread_cond_broadcast(&begin);
    pthread_mutex_unlock(&lock);
    run_in_region(f, data, 0, threads);
    pthread_mutex_lock(&lock);
    while (running) pthread_cond_wait(&end, &lock);
    pthread_mutex_unlock(&lock);
  }
};

std::atomic<Pool *> the_pool{nullptr};
// A child process has none of the pool's threads: it starts a new pool, and the parent's is not freed.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool = nullptr; });

Pool *pool() {
  Pool *pool = the_pool;
  if (pool) return pool;
  auto *created = new (std::nothrow) Pool;
  if (the_pool.compare_exchange_strong(pool, created)) return created;
  delete created;
  return pool;
}

// Where another thread has the pool, the calling thread runs alone.
void run_in_own_pool(Body f, void *data, int threads) {
  Pool *threads_of = threads > 1 && !in_region ? pool() : nullptr;
  if (!threads_of || pthread_mutex_trylock(&threads_of->busy)) return run_in_region(f, data, 0, 1);
  threads_of->run(f, data, threads);
  pthread_mutex_unlock(&threads_of->busy);
}

// As OpenMP counts them: OMP_NUM_THREADS, or the cores that the process may use.
int own_threads() {
  static const int count = [] {
    const char *asked = std::getenv("OMP_NUM_THREADS");
    if (const long n = asked ? std::strtol(asked, nullptr, 10) : 0; n > 0) return static_cast<int>(n < 1024 ? n : 1024);
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
  }();
  return count;
}

struct Scratch {
  void *data = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

int aot::max_threads() noexcept {
  const OpenMP &runtime = openmp();
  if (!runtime.parallel) return in_region ? 1 : own_threads();
  return runtime.level() > 0 ? 1 : runtime.max_threads();
}

void aot::run_on_threads(Body f, void *data, int threads) noexcept {
  if (openmp().parallel) return run_in_openmp(f, data, threads);
  run_in_own_pool(f, data, threads ? threads : own_threads());
}

void *aot::thread_scratch(size_t bytes) noexcept {
  static thread_local Scratch scratch;
  if (bytes > scratch.bytes) {
    std::free(scratch.data);
    scratch.data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    scratch.bytes = scratch.data ? bytes : 0;
  }
  return scratch.data;
}

// The path of the OpenMP runtime, or "own".
AOT_API const char *aot_thread_runtime() {
  Dl_info library;
  if (!openmp().parallel) return "own";
  return dladdr(reinterpret_cast<void *>(openmp().parallel), &library) ? library.dli_fname : "";
}
