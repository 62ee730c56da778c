// Parallel loops. Sums are split by shape alone, never by the number of threads: the same input gives the same bits.
#pragma once
#include "fork.h"
#include "threads.h"
#include "vector.h"

namespace aot {
inline namespace AOT_ISA {

constexpr int64_t kGrain = 32768;  // elements per task, so that waking a thread pays

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The threads that a loop gets: within a parallel region only the calling one.
inline int64_t threads() { return max_threads(); }

// f(chunk) for each chunk on the threads of the runtime, or on as many as asked for.
template <class F>
void run_in_pool(int64_t chunks, const F &f, int threads = 0) {
  struct Loop {
    int64_t chunks, next;
    const F &f;
  } loop{chunks, 0, f};
  run_on_threads(
      [](void *data, int thread, int threads) {
        auto &[chunks, next, f] = *static_cast<Loop *>(data);
        if (chunks <= threads) {  // the next call gives a chunk to the same core, whose cache may have its data
          if (thread < chunks) f(thread);
          return;
        }
        for (int64_t chunk; (chunk = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < chunks;) f(chunk);
      },
      &loop, threads);
}

// Runs f for the forked thread (fork.h): on a new thread, with as many threads.
template <class F>
bool run_in_pool_after_fork(int64_t chunks, const F &f) {
  struct Work {
    int64_t chunks, threads;
    const F &f;
  } work{chunks, threads(), f};
  return run_on_new_thread(
      [](void *data) {
        const auto &[chunks, threads, f] = *static_cast<Work *>(data);
        run_in_pool(chunks, f, static_cast<int>(threads));
      },
      &work);
}

// f(chunk) for each chunk. Scheduling is dynamic, since cores are rarely equally fast. A single chunk runs on the
// calling thread.
template <class F>
void parallel(int64_t chunks, F f) {
  const bool alone = chunks <= 1 || threads() == 1;  // a region of one thread takes half a microsecond
  if (!alone && !in_forked_thread()) return run_in_pool(chunks, f);
  if (!alone && run_in_pool_after_fork(chunks, f)) return;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) f(chunk);
}

// Runs an f that returns a Status: an error if there was any.
template <class F>
Status try_parallel(int64_t chunks, F f) {
  Status status = kOk;
  parallel(chunks, [&](int64_t chunk) {
    if (const Status failed = f(chunk)) __atomic_store_n(&status, failed, __ATOMIC_RELAXED);
  });
  return status;
}

// f(begin, end) for ranges of [0, n) of `piece` elements.
template <class F>
void parallel_pieces(int64_t n, int64_t piece, F f) {
  parallel(ceil_div(n, piece), [&](int64_t i) { f(i * piece, i * piece + piece < n ? i * piece + piece : n); });
}

// The size of the pieces of n independent elements, at most `most`. Where these would be fewer than the threads, all of
// which wake for the second piece, each has a share. An eighth of `most` may be as costly as waking.
inline int64_t shared_piece(int64_t n, int64_t most) {
  const int64_t share = ceil_div(n, threads()), least = ceil_div(most, 8);
  return n <= most || share > most ? most : share < least ? least : share;
}

// The rows of n elements that make a task.
inline int64_t rows_per_task(int64_t rows, int64_t n) {
  return shared_piece(rows, n < kGrain ? kGrain / (n > 0 ? n : 1) : 1);
}

// Not inlined, so that each loop gets all registers.
template <bool stream, typename T, class F>
[[gnu::noinline]] void each_piece(const T *y, int64_t begin, int64_t end, F f) {
  auto step = [=](int64_t i, auto part) AOT_INLINED { f(begin + i, part); };
  if constexpr (stream) {
    sweep_stream(y + begin, end - begin, step);
    end_stream();
  } else {
    sweep<T>(end - begin, step);
  }
}

// f(i, part) for every vector of n elements. If `stream`, f's stores may bypass the caches; they must have y's
// alignment.
template <typename T, class F>
void each(const T *y, int64_t n, bool stream, F f) {
  stream = stream && worth_streaming(n * sizeof(T));
  constexpr int64_t kUnit = 64;  // whole lines
  parallel_pieces(n, shared_piece(ceil_div(n, kUnit), kGrain / kUnit) * kUnit, [=](int64_t begin, int64_t end) {
    stream ? each_piece<true>(y, begin, end, f) : each_piece<false>(y, begin, end, f);
  });
}

// y[i] = f(i, part), elementwise; f returns a Vec<T>.
template <typename T, class F>
void map(T *y, int64_t n, F f) {
  each(y, n, true, [=](int64_t i, auto part) AOT_INLINED { store(y + i, f(i, part), part); });
}

// sum[j] = the sum of column j of x (rows, n): partial sums of kPiece terms, added up in double.
template <typename T>
void sum_columns(const T *x, int64_t rows, int64_t n, T *sum) {
  constexpr int64_t kPiece = 256, kNarrow = 4 * kLanes<T>;
  const int64_t columns = ceil_div(kGrain, (rows + 1) * kNarrow) * kNarrow;
  parallel_pieces(n, columns, [=](int64_t begin, int64_t end) {
    sweep<T>(end - begin, [=](int64_t j, auto part) {
      typename VectorOf<double, kLanes<T>>::type all{};
      for (int64_t i = 0; i < rows; i += kPiece) {
        Vec<T> piece{};
        for (int64_t k = i; k < rows && k < i + kPiece; ++k) piece += load(x + k * n + begin + j, part);
        all += __builtin_convertvector(piece, decltype(all));
      }
      store(sum + begin + j, __builtin_convertvector(all, Vec<T>), part);
    });
  });
}

}  // namespace AOT_ISA
}  // namespace aot
