// The library's own threads and those of a forked child (cuda_src/cpu/threads.cpp, fork.cpp) without the rest of the
// library, for ThreadSanitizer: `make tsan`. Callers race for the pool while regions grow and shrink and nest.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/fork.h"
#include "cpu/threads.h"

extern "C" const char *aot_thread_runtime();

namespace {

constexpr int kCallers = 4, kRounds = 2000, kMost = 6, kElements = 997;

// A region writes its part of the numbers; the caller reads them after the region, without a lock.
struct Work {
  std::vector<long> numbers = std::vector<long>(kElements);
  long factor = 0;
  bool nested = false;
};

void fill(void *data, int thread, int threads) {
  auto &work = *static_cast<Work *>(data);
  for (int i = thread; i < kElements; i += threads) work.numbers[i] = i * work.factor;
  if (!work.nested || thread) return;
  if (aot::max_threads() != 1) std::abort();
  Work inner;
  inner.factor = 3;
  aot::run_on_threads(fill, &inner, kMost);
  if (inner.numbers[kElements - 1] != (kElements - 1) * 3) std::abort();
}

// The number of wrong elements.
long rounds(long first) {
  Work work;
  long wrong = 0;
  for (int round = 0; round < kRounds; ++round) {
    work.factor = first + round, work.nested = round % 7 == 0;
    aot::run_on_threads(fill, &work, round % kMost);  // 0: as many as there are
    for (long i = 0; i < kElements; ++i) wrong += work.numbers[i] != i * work.factor;
  }
  return wrong;
}

long race() {
  pthread_t callers[kCallers];
  long wrong = 0;
  for (long i = 0; i < kCallers; ++i)
    if (pthread_create(
            &callers[i], nullptr, [](void *first) -> void * { return (void *)rounds((long)first * 100); }, (void *)i))
      std::abort();
  for (pthread_t caller : callers) {
    void *found;
    pthread_join(caller, &found);
    wrong += reinterpret_cast<long>(found);
  }
  return wrong;
}

// In a child: the forked thread computes on another thread, which has the pool of the child.
long in_child() {
  long wrong = -1;
  if (!aot::in_forked_thread()) return 1;
  for (int i = 0; i < 3; ++i)
    if (!aot::run_on_new_thread([](void *wrong) { *static_cast<long *>(wrong) = rounds(5); }, &wrong)) return 1;
  return wrong;
}

}  // namespace

int main() {
  setenv("AOTOPS_THREADS", "own", 1), setenv("OMP_NUM_THREADS", "3", 1);
  long wrong = race();
  const pid_t child = fork();
  if (!child) _exit(in_child() ? 1 : 0);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  wrong += race();
  std::printf("%s: %ld wrong, the child's status is %d\n", aot_thread_runtime(), wrong, status);
  return wrong || status;
}
