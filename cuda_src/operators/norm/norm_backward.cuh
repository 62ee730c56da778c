// The backward of the norms on CUDA (norm.cuh).
#pragma once
#include "cuda/overlap.cuh"
#include "norm.cuh"
#include "norm_backward_few.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

// dweight and dbias, (lines, cols), each of T, or of float if `wide`; may be null.
template <typename T>
struct ParameterGradients {
  void *dweight, *dbias;
  bool wide;

  template <typename A>
  __device__ void store(void *to, int64_t at, A sum) const {
    if (sizeof(T) == 2 && wide) static_cast<A *>(to)[at] = sum;
    else static_cast<T *>(to)[at] = narrow<T>(sum);
  }
};

template <class N>
struct NormBackwardTensors {
  const typename N::T *dy;
  const typename N::R *dh, *x;  // dh may be null
  NormParameters<N> parameters;
  const typename N::A *stats;
  typename N::X *dx;         // may be null
  typename N::R *dresidual;  // if kMixed; may be null
  typename N::A *partials;   // (sums, kSums, cols), of which sum s is of line s % lines; may be null
  int64_t rows, cols;
  ParameterGradients<typename N::T> gradients;
  bool alone = false;  // whether a single block has all rows, of one line, and writes the gradients instead of partials
};

// Rows of clusters: the sums of the next row are published before this row is finished.
template <class Shape>
constexpr bool kAhead = Shape::kSpan == Span::cluster;

// Whether dh is loaded to registers instead, where a pipeline with it leaves too little shared memory.
template <class Shape>
constexpr bool kDirectDh = kAhead<Shape> || (sizeof(typename Shape::T) > 2 && Shape::kVectors == 4);

// Whether a thread reads its part of a row from shared memory once and holds it in registers: float32 rows of more than
// 4096 columns. Otherwise it is read for each of two passes.
template <class Shape, class N>
constexpr bool kHeld =
    std::is_same_v<typename N::T, float> && Shape::kVectors == 4 && !kAhead<Shape> && !kShifted<Shape>;

// Whether a thread has its part of the weight in registers, not in shared memory.
template <class Shape, class N>
constexpr bool kHeldWeight = kHeld<Shape, N> || kAhead<Shape>;

// A row that is held leaves its place to the next one as soon as it has been read.
template <class Shape, class N>
constexpr int kStages = kAhead<Shape>     ? kLongStages
                        : kHeld<Shape, N> ? 1
                                          : 2;

// Rows of 16 bits are not kept in clusters, where it gained nothing.
template <class Shape, class N, bool kKept = sizeof(typename N::R) != 2 || Shape::kSpan != Span::cluster,
          int kKeptBytes = kHeldWeight<Shape, N> ? 0 : NormParameters<N>::kKeptBytes>
using BackwardPipeline = std::conditional_t<
    N::kAdd && !kDirectDh<Shape>,
    SmemPipeline<Shape, kStages<Shape, N>, kKeptBytes, kKept, typename N::R, typename N::T, typename N::R>,
    SmemPipeline<Shape, kStages<Shape, N>, kKeptBytes, kKept, typename N::R, typename N::T>>;

template <bool kAligned, int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
  if constexpr (kAligned) {
#pragma unroll
    for (int k = 0; k < kSize; k += kVectorSize<A>)
      *reinterpret_cast<uint4 *>(to + k) = reinterpret_cast<const uint4 &>(sums[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kSize; ++k) to[k] = sums[k];
  }
}

// A thread's element of the ends of rows that are Shifted: of a row and the next one, and its column's sums.
template <class N>
struct RowEnd {
  using A = typename N::A;
  A weight = 0, x, dy, dh, columns[N::kSums] = {};
  typename N::R next_x = {}, next_dh = {};
  typename N::T next_dy = {};

  __device__ void advance() { x = widen(next_x), dy = widen(next_dy), dh = widen(next_dh); }
};

// Adds up the sums of a block's rows of each line, always in the same order, and writes them to the block's lines of
// partial sums. The rows of a thread are all of one line.
template <class Shape, class N, int kSums, typename A>
__device__ inline void write_partials(A (&sums)[kSums][Shape::kVectors][Shape::kSize], const RowEnd<N> &end,
                                      const RowPart<Shape> &part, int row_warps, const NormBackwardTensors<N> &a) {
  const int64_t cols = a.cols;
  int64_t lines = N::kPlain ? 1 : a.parameters.lines;
  int teams = blockDim.x / (32 * row_warps), rows = teams * Shape::kRowsPerWarp;
  int64_t group = Shape::kSpan == Span::cluster ? blockIdx.x / cluster_size() : blockIdx.x;
  lines = lines_of_block(rows, lines);
  A *partials = a.partials + kSums * group * lines * cols;
  bool whole_warp = lines == 1 && !kShifted<Shape>;  // its rows are of one line, and begin with a vector
  if (whole_warp)
#pragma unroll
    for (int other = Shape::kLanes; other < 32; other *= 2)
#pragma unroll
      for (int s = 0; s < kSums; ++s)
#pragma unroll
        for (int i = 0; i < Shape::kVectors; ++i)
#pragma unroll
          for (int k = 0; k < Shape::kSize; ++k) sums[s][i][k] += __shfl_xor_sync(~0u, sums[s][i][k], other);
  int slots = whole_warp ? teams : rows, slot = whole_warp ? part.team() : part.own();
  auto store_all = [&](A *to) {
    to += slot * kSums * cols;
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if ((part.row_of_warp() == 0 || !whole_warp) && part.holds(i))
          store_sums<!kShifted<Shape>>(to + s * cols + part.column() + part.offset(i), sums[s][i]);
    if (part.has_end())
#pragma unroll
      for (int s = 0; s < kSums; ++s) to[s * cols + part.end()] = end.columns[s];
  };
  if (slots == lines && !a.alone) return store_all(partials);
  extern __shared__ uint4 memory[];  // the pipeline's, which has no copy in flight any more
  A *shared = reinterpret_cast<A *>(memory);
  __syncthreads();
  store_all(shared);
  __syncthreads();
  int numbers = static_cast<int>(lines * kSums * cols), all = static_cast<int>(slots * kSums * cols);
  for (int c = threadIdx.x; c < numbers; c += blockDim.x) {
    A sum = 0;
    for (int at = c; at < all; at += numbers) sum += shared[at];
    void *to = c < cols ? a.gradients.dweight : a.gradients.dbias;
    if (!a.alone) partials[c] = sum;
    else if (to) a.gradients.store(to, c < cols ? c : c - cols, sum);
  }
}

// If kAhead, the exchange of a row's sums, and the wait for the slowest block, overlap with the stores of the row
// before: shared memory has this row, the next one and one in flight.
template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_backward_kernel(NormBackwardTensors<N> a, int row_warps) {
  using T = typename N::T;
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kStats = N::kStats, kSums = N::kSums, kVectors = Shape::kVectors;
  constexpr int kStages = aot::kStages<Shape, N>;
  constexpr bool kAhead = aot::kAhead<Shape>, kDirect = kDirectDh<Shape>;
  constexpr bool kHold = kHeld<Shape, N>, kHoldWeight = kHeldWeight<Shape, N>;
  static_assert(!kHold || !N::kAdd || kDirect, "the next row's copies would overwrite dh before it is read");
  RowPart<Shape> part(a.cols, row_warps, kAhead);
  NormParameters<N> &p = a.parameters;
  bool has_weight = p.weight != nullptr, has_dx = a.dx != nullptr, has_dresidual = a.dresidual != nullptr;
  const bool has_dh = a.dh != nullptr;
  a.x += part.column(), a.dy += part.column(), a.dx += part.column();
  if constexpr (N::kAdd) a.dh = has_dh ? a.dh + part.column() : a.x, a.dresidual += part.column();
  BackwardPipeline<Shape, N> pipeline;
  constexpr Index<0> kX;
  constexpr Index<1> kDy;
  constexpr Index<2> kDh;
  auto load_row = [&](int stage, int64_t row) {
    pipeline.load(kX, stage, a.x + row * a.cols, part, row < a.rows);
    pipeline.load(kDy, stage, a.dy + row * a.cols, part, row < a.rows);
    if constexpr (N::kAdd && !kDirect) pipeline.load(kDh, stage, a.dh + row * a.cols, part, has_dh && row < a.rows);
    commit_copies();
  };
  KeptParameter<N, Shape> weight;
  RowEnd<N> end;
  if (part.has_end()) end.weight = p.weight_at(part.end());
  auto load_end = [&](int64_t row) {
    if (!part.has_end()) return;
    const bool present = row < a.rows;
    const int64_t at = present ? row * a.cols + part.end() - part.column() : 0;
    end.next_x = present ? a.x[at] : R{}, end.next_dy = present ? a.dy[at] : T{};
    if constexpr (N::kAdd) end.next_dh = present && has_dh ? a.dh[at] : R{};
  };
  load_end(part.first_row());
  p.advance(p.line(part.first_row()) * a.cols + part.column());
  weight.load(p, p.weight, has_weight, 1, part);
#pragma unroll
  for (int s = 0; s < kStages; ++s) load_row(s, part.first_row() + s * part.step());
  if constexpr (!kHoldWeight) weight.keep(pipeline, 0, p.wide, p.offset);
  else
#pragma unroll
    for (auto &v : weight.vector) v = v.kept(p.wide, p.offset);

  struct Statistics {
    A mean, rstd;
  };
  auto load_statistics = [&](int64_t row) -> Statistics {
    const bool present = row < a.rows;
    return {N::kCentred && present ? a.stats[kStats * row] : A(0), present ? a.stats[kStats * row + kStats - 1] : A(0)};
  };
  Statistics next = load_statistics(part.first_row());
  std::conditional_t<kAhead, Exchange<Span::cluster, Sums<kStats, A>, 4>, RowExchange<Shape, Sums<kStats, A>>> exchange(
      row_warps);

  A columns[kSums][kVectors][Shape::kSize] = {};  // each column's sums of dy * xhat and of dy
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  [[maybe_unused]] Vector<R> held[2][kHold ? kVectors : 1];  // x and dy
  // f(k, x - mean, dy, g) for each element k of this thread's vector i of the row in a stage
  auto each = [&](int stage, int i, A mean, auto f) {
    Widened<R> x, d, w;
    if constexpr (kHold) x = widen(held[0][i]), d = widen(held[1][i]);
    else x = widen(pipeline.read(kX, stage, i)), d = widen(pipeline.read(kDy, stage, i));
    if constexpr (kHoldWeight) w = weight.vector[i].widened_kept();
    else w = kept_parameter<N>(pipeline, 0, i);
#pragma unroll
    for (int k = 0; k < Shape::kSize; ++k) f(k, N::kCentred ? x[k] - mean : x[k], d[k], d[k] * w[k]);
  };
  // This thread's sums over the row in a stage, of g * xhat and of g
  auto sum_stage = [&](int stage, const Statistics &of) {
    Sums<kStats, A> sums = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (part.holds(i))
        each(stage, i, of.mean, [&](int k, A x, A d, A g) {
          A xhat = x * of.rstd;
          sums.value[0] += g * xhat, columns[0][i][k] += d * xhat;
          if constexpr (N::kCentred) sums.value[1] += g;
          if constexpr (N::kBias) columns[1][i][k] += d;
        });
    if (part.has_end()) {
      const A xhat = (end.x - of.mean) * of.rstd, g = end.dy * end.weight;
      sums.value[0] += g * xhat, end.columns[0] += end.dy * xhat;
      if constexpr (N::kCentred) sums.value[1] += g;
      if constexpr (N::kBias) end.columns[1] += end.dy;
    }
    return sums;
  };
  Vector<R> direct[N::kAdd && kDirect ? kVectors : 1];  // dh
  auto load_dh = [&](int64_t row) {
    if constexpr (N::kAdd && kDirect)
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        direct[i] = load_kept(a.dh + row * a.cols + part.offset(i), has_dh && row < a.rows && part.holds(i));
  };
  // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) = rstd * g + c1 * (x - mean) + c0
  auto write = [&](int stage, int64_t row, const Statistics &of, const Sums<kStats, A> &sums) {
    A c1 = -of.rstd * of.rstd * one_over_cols * sums.value[0], c0 = 0;
    if constexpr (N::kCentred) c0 = -of.rstd * one_over_cols * sums.value[1];
    if ((has_dx || (N::kAdd && N::kMixed && has_dresidual)) && row < a.rows)
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        if (part.holds(i)) {
          Widened<R> dx;
          each(stage, i, of.mean, [&](int k, A x, A, A g) { dx[k] = g * of.rstd + (x * c1 + c0); });
          if constexpr (N::kAdd) {
            Widened<R> dh;
            if constexpr (kDirect) dh = widen(direct[i]);
            else dh = widen(pipeline.read(kDh, stage, i));
#pragma unroll
            for (int k = 0; k < Shape::kSize; ++k) dx[k] += dh[k];
          }
          int64_t at = row * a.cols + part.offset(i);
          if constexpr (N::kAdd && N::kMixed) {
            if (has_dresidual) store(a.dresidual + at, narrow(dx));
            if (has_dx) store(a.dx + at, narrow_to<T>(dx));
          } else {
            store(a.dx + at, narrow(dx));
          }
        }
    if (part.has_end() && row < a.rows) {
      const A dx = end.dy * end.weight * of.rstd + ((end.x - of.mean) * c1 + c0) + end.dh;
      const int64_t at = row * a.cols + part.end() - part.column();
      if (N::kAdd && N::kMixed && has_dresidual) a.dresidual[at] = narrow<R>(dx);
      if (has_dx) a.dx[at] = narrow<typename N::X>(dx);
    }
  };

  int stage = 0;
  if constexpr (kAhead) {
    // Statistics of this row, the next, and the one after it.
    Statistics now = next, after;
    next = load_statistics(part.base() + part.step());
    wait_copies<kStages - 1>();
    exchange.publish(sum_lanes<32>(sum_stage(0, now)));
#pragma unroll 1
    for (int64_t row = part.base(); row < a.rows; row += part.step()) {
      const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
      after = load_statistics(row + 2 * part.step());
      load_dh(row);
      wait_copies<kStages - 2>();
      if (row + part.step() < a.rows) exchange.publish(sum_lanes<32>(sum_stage(next_stage, next)));
      write(stage, row, now, combine_sums(exchange.collect(), exchange.warps()));
      load_row(stage, row + kStages * part.step());
      now = next, next = after, stage = next_stage;
    }
  } else {
    for (int64_t base = part.base(); base < a.rows; base += part.step()) {
      const int64_t row = base + part.own();
      const Statistics now = next;
      next = load_statistics(row + part.step());
      if constexpr (kShifted<Shape>) end.advance(), load_end(row + part.step());
      load_dh(row);
      wait_copies<kStages - 1>();
      if constexpr (kHold)
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
          held[0][i] = pipeline.read(kX, stage, i), held[1][i] = pipeline.read(kDy, stage, i);
      Sums<kStats, A> sums = sum_stage(stage, now);
      auto load_next = [&] { load_row(stage, row + kStages * part.step()); };
      if constexpr (kHold) load_next();  // this row's reads ended with its sums
      if constexpr (Shape::kSpan == Span::warp) sums = sum_lanes<Shape::kLanes>(sums);
      else sums = sum_row(sums, exchange);
      write(stage, row, now, sums);
      if constexpr (!kHold) load_next();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }
  launch_next();
  wait_copies<0>();
  if (a.partials) write_partials(columns, end, part, row_warps, a);
}

// Adds up the partial sums, (sums, kSums, cols), in a fixed order: dweight if blockIdx.y is 0, dbias if it is 1. Sum s
// is of line s % lines. Without any, results are 0. A thread has kWidth neighbouring columns, a block kSumLanes times
// as many and kSumRows rows at once. This kernel overlaps the end of the one before (overlap.cuh).
constexpr int kSumLanes = 8, kSumRows = 32;

template <typename T, typename A, int kWidth>
__global__ void __launch_bounds__(kSumLanes *kSumRows)
    sum_partials_kernel(const A *partials, ParameterGradients<T> to, int64_t rows, int64_t lines, int64_t cols) {
  struct alignas(kWidth * sizeof(A)) Columns {
    A value[kWidth];
  };
  constexpr int kCols = kSumLanes * kWidth, kWarps = kSumLanes * kSumRows / 32;
  __shared__ Columns sums[kWarps][kSumLanes];
  void *out = blockIdx.y == 0 ? to.dweight : to.dbias;
  const int lane = threadIdx.x % kSumLanes;
  wait_for_kernel_before();
  if (!out) return;
  // `rows` of lines * gridDim.y * cols numbers
  for (int64_t first = int64_t{blockIdx.x} * kCols; first < lines * cols; first += int64_t{gridDim.x} * kCols) {
    int64_t at = first + lane * kWidth, line = lines == 1 ? 0 : at / cols;
    const A *column = partials + line * (gridDim.y - 1) * cols + blockIdx.y * cols + at;
    Columns sum = {};
    if (at < lines * cols)
#pragma unroll 8
      for (int64_t row = threadIdx.x / kSumLanes; row < rows; row += kSumRows) {
        const Columns term = *reinterpret_cast<const Columns *>(column + row * gridDim.y * lines * cols);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum.value[k] += term.value[k];
      }
#pragma unroll
    for (int offset = kSumLanes; offset < 32; offset *= 2)
#pragma unroll
      for (A &value : sum.value) value += __shfl_xor_sync(~0u, value, offset);
    if (lane_index() < kSumLanes) sums[warp_index()][lane] = sum;
    __syncthreads();
    if (threadIdx.x < kCols && first + threadIdx.x < lines * cols) {
      A all = 0;
#pragma unroll
      for (auto &of_warp : sums) all += of_warp[threadIdx.x / kWidth].value[threadIdx.x % kWidth];
      to.store(out, first + threadIdx.x, all);
    }
    __syncthreads();
  }
}

// Persistent blocks, which add up dweight and dbias. After the rows of x, dy and dh, shared memory has their
// statistics; in the end it has the sums of the lanes of each row at once.
template <class N, class Row>
__global__ void __launch_bounds__(kStagedThreads)
    norm_backward_staged_kernel(NormBackwardTensors<N> a, int64_t rows, int cols, int share) {
  using T = typename N::T;
  using A = typename N::A;
  constexpr int kStats = N::kStats;
  extern __shared__ uint4 memory[];
  const int size = share * cols;
  T *staged_x = reinterpret_cast<T *>(memory), *staged_dy = staged_x + size;
  T *staged_dh = N::kAdd ? staged_dy + size : staged_dy;
  A *stats = reinterpret_cast<A *>(staged_dh + size);
  const NormParameters<N> &p = a.parameters;
  const A one_over_cols = A(1) / static_cast<A>(cols);
  const bool has_dh = N::kAdd && a.dh;
  A columns[N::kSums][Row::kEach] = {}, weight[Row::kEach] = {};  // each column's sums of dy * xhat and of dy
  StagedRows<Row>(staged_x, rows, cols, share).each_column([&](int k, int c) {
    if (c < cols) weight[k] = p.weight_at(c);
  });
  for (int64_t part = blockIdx.x; part * share < rows; part += gridDim.x) {
    const StagedRows<Row> of_x(staged_x, rows, cols, share, part), of_dy(staged_dy, rows, cols, share, part);
    __syncthreads();  // the rows before have been stored
    of_x.load(a.x), of_dy.load(a.dy);
    if (has_dh) StagedRows<Row>(staged_dh, rows, cols, share, part).load(a.dh);
    for (int i = threadIdx.x; i < kStats * of_x.rows(); i += kStagedThreads)
      stats[i] = a.stats[kStats * of_x.first() + i];
    of_x.arrive();
    of_x.each([&](int i, bool present) {
      T *row = staged_x + i * cols;
      const T *row_of_dy = staged_dy + i * cols, *row_of_dh = staged_dh + i * cols;
      const A mean = N::kCentred && present ? stats[kStats * i] : A(0);
      const A rstd = present ? stats[kStats * i + kStats - 1] : A(0);
      A xhat[Row::kEach], g[Row::kEach];
      Sums<2, A> sums = {};
      of_x.each_column([&](int k, int c) {
        const bool has = present && c < cols;
        xhat[k] = has ? (widen(row[c]) - mean) * rstd : A(0), g[k] = element(row_of_dy, c, has);
        columns[0][k] += g[k] * xhat[k];
        if constexpr (N::kBias) columns[1][k] += g[k];
        g[k] *= weight[k];
        sums.value[0] += g[k], sums.value[1] += g[k] * xhat[k];
      });
      sums = sum_lanes<Row::kLanes>(sums);
      const A c0 = N::kCentred ? sums.value[0] * one_over_cols : A(0), c1 = sums.value[1] * one_over_cols;
      of_x.each_column([&](int k, int c) {
        if (!present || c >= cols) return;
        A dx = rstd * (g[k] - c0 - xhat[k] * c1);
        if (has_dh) dx += widen(row_of_dh[c]);
        row[c] = narrow<T>(dx);
      });
    });
    if (a.dx) of_x.store(a.dx);
  }
  launch_next();
  if (!a.partials) return;
  __syncthreads();
  A *all = reinterpret_cast<A *>(memory), *mine = all + threadIdx.x / Row::kLanes * N::kSums * cols;
  StagedRows<Row>(staged_x, rows, cols, share).each_column([&](int k, int c) {
    if (c < cols)
#pragma unroll
      for (int s = 0; s < N::kSums; ++s) mine[s * cols + c] = columns[s][k];
  });
  __syncthreads();
  A *to = a.partials + int64_t{blockIdx.x} * N::kSums * cols;
  for (int at = threadIdx.x; at < N::kSums * cols; at += kStagedThreads) {
    A sum = 0;
    for (int r = 0; r < Row::kAtOnce; ++r) sum += all[r * N::kSums * cols + at];
    to[at] = sum;
  }
}

// Sums over the rows of a block, (kSums, cols), which its teams add up in their order.
template <class N, typename A>
__device__ inline void write_any_partials(const A (&columns)[N::kSums][kAnyHeld], const AnyRows &part,
                                          const NormBackwardTensors<N> &a) {
  extern __shared__ uint4 memory[];
  A *shared = reinterpret_cast<A *>(memory), *to = a.partials + int64_t{blockIdx.x} * N::kSums * a.cols;
  const int numbers = static_cast<int>(N::kSums * a.cols);
  A *mine = part.teams() == 1 ? to : shared + part.team() * numbers;
#pragma unroll
  for (int s = 0; s < N::kSums; ++s) part.each_held([&](int k, int64_t c) { mine[s * a.cols + c] = columns[s][k]; });
  if (part.teams() == 1) return;
  __syncthreads();
  for (int i = threadIdx.x; i < numbers; i += blockDim.x) {
    A sum = 0;
    for (int team = 0; team < part.teams(); ++team) sum += shared[team * numbers + i];
    to[i] = sum;
  }
}

// The next row is loaded during each. with_sums: also the partial sums, of rows that are held and have one line, a sum
// for each block.
template <class N>
__global__ void __launch_bounds__(kAnyThreads)
    norm_backward_any_kernel(NormBackwardTensors<N> a, int row_warps, bool with_sums) {
  using T = typename N::T;
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kStats = N::kStats;
  Exchange<Span::block, Sums<2, A>> exchange(row_warps);
  const AnyRows part(row_warps, a.cols);
  const NormParameters<N> &p = a.parameters;
  const A cols = static_cast<A>(a.cols);
  A columns[N::kSums][kAnyHeld] = {}, weight[kAnyHeld];  // each column's sums of dy * xhat and of dy
  part.each_held([&](int k, int64_t c) { weight[k] = p.weight_at(c); });
  R next_x[kAnyHeld];
  T next_dy[kAnyHeld];
  auto load = [&](int64_t row) {
    if (row < a.rows) part.load(a.x + row * a.cols, next_x), part.load(a.dy + row * a.cols, next_dy);
  };
  load(part.first());
  for (int64_t row = part.first(); row < a.rows; row += part.step()) {
    const int64_t at = row * a.cols, line = (p.lines == 1 ? 0 : row % p.lines) * a.cols;
    A xhat[kAnyHeld], g[kAnyHeld];
    part.widen(next_x, xhat), part.widen(next_dy, g);
    load(row + part.step());
    [[maybe_unused]] R dh[kAnyHeld];
    if constexpr (N::kAdd)
      if (a.dh) part.load(a.dh + at, dh);
    const A mean = N::kCentred ? a.stats[kStats * row] : A(0), rstd = a.stats[kStats * row + kStats - 1];
    if (p.lines > 1) part.each_held([&](int k, int64_t c) { weight[k] = p.weight_at(line + c); });
    Sums<2, A> sums = {};
    auto add = [&](A g, A xhat) { sums.value[0] += g, sums.value[1] += g * xhat; };
    part.each_held([&](int k, int64_t) {
      xhat[k] = (xhat[k] - mean) * rstd, columns[0][k] += g[k] * xhat[k];
      if constexpr (N::kBias) columns[1][k] += g[k];
      g[k] *= weight[k], add(g[k], xhat[k]);
    });
    auto xhat_at = [&](int64_t c) { return (widen(a.x[at + c]) - mean) * rstd; };
    auto g_at = [&](int64_t c) { return widen(a.dy[at + c]) * p.weight_at(line + c); };
    part.each_other([&](int64_t c) { add(g_at(c), xhat_at(c)); });
    sums = part.sum(sums, exchange);
    const A c0 = N::kCentred ? sums.value[0] / cols : A(0), c1 = sums.value[1] / cols;
    auto dx = [&](A g, A xhat) { return rstd * (g - c0 - xhat * c1); };
    part.each_held([&](int k, int64_t) { g[k] = dx(g[k], xhat[k]); });
    if constexpr (N::kAdd)
      if (a.dh) {
        part.widen(dh, xhat);
        part.each_held([&](int k, int64_t) { g[k] += xhat[k]; });
      }
    if (a.dx) part.store(a.dx + at, g);
    if (N::kMixed && a.dresidual) part.store(a.dresidual + at, g);
    part.each_other([&](int64_t c) {
      A of_c = dx(g_at(c), xhat_at(c));
      if (N::kAdd && a.dh) of_c += widen(a.dh[at + c]);
      if (a.dx) a.dx[at + c] = narrow<typename N::X>(of_c);
      if (N::kMixed && a.dresidual) a.dresidual[at + c] = narrow<R>(of_c);
    });
  }
  launch_next();
  if (with_sums) write_any_partials<N>(columns, part, a);
}

// A thread for each column. Each line of partial sums has a part of the rows: a multiple of `lines` of them, so that
// these rows have one line of the weight.
template <class N>
__global__ void __launch_bounds__(kAnyThreads) norm_partials_any_kernel(NormBackwardTensors<N> a, int64_t all_sums) {
  using A = typename N::A;
  constexpr int kStats = N::kStats, kSums = N::kSums;
  for (int64_t sum = blockIdx.y; sum < all_sums; sum += gridDim.y)
    for (int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; c < a.cols; c += int64_t{gridDim.x} * blockDim.x) {
      A dweight = 0, dbias = 0;
#pragma unroll 4
      for (int64_t row = sum; row < a.rows; row += all_sums) {
        A d = widen(a.dy[row * a.cols + c]), mean = N::kCentred ? a.stats[kStats * row] : A(0);
        dweight += d * ((widen(a.x[row * a.cols + c]) - mean) * a.stats[kStats * row + kStats - 1]);
        dbias += d;
      }
      A *to = a.partials + kSums * sum * a.cols + c;
      to[0] = dweight;
      if constexpr (N::kBias) to[a.cols] = dbias;
    }
}

// ------------------------------------------------------------------------------------------------------- launchers

// *sums: on entry the most lines of partial sums, on return those written.
template <class N>
Status norm_backward_any_rows(const char *op, const NormBackwardTensors<N> &a, const DeviceLimits &device,
                              int64_t *sums, void *stream) {
  using A = typename N::A;
  const AnyRowsPlan plan(a.cols, 256);
  const bool with_sums = a.partials && a.parameters.lines == 1 && a.cols <= kAnyThreads * kAnyHeld;
  if (a.dx || a.dresidual || with_sums) {
    int64_t blocks = plan.blocks(a.rows, device);
    if (with_sums) *sums = blocks = std::min(blocks, *sums);
    LaunchShape shape = {grid_size(blocks), static_cast<unsigned>(plan.threads)};
    if (with_sums && plan.teams() > 1) shape.shared = static_cast<int>(plan.teams() * N::kSums * a.cols * sizeof(A));
    AOT_TRY(launch_kernel(op, norm_backward_any_kernel<N>, shape, stream, a, plan.row_warps, with_sums));
  }
  if (!a.partials || with_sums) return kOk;
  constexpr int64_t kMostInY = 65535;
  const unsigned block = any_row_block(a.cols, kAnyThreads);
  dim3 grid(grid_size(ceil_div(a.cols, block)), static_cast<unsigned>(std::min(*sums, kMostInY)));
  return launch_kernel(op, norm_partials_any_kernel<N>, {grid, block}, stream, a, *sums);
}

// As norm_backward_any_rows().
template <class N, class Row>
Status norm_backward_staged(const char *op, const NormBackwardTensors<N> &a, Row, const DeviceLimits &device,
                            int64_t *sums, void *stream) {
  using T = typename N::T;
  using A = typename N::A;
  constexpr int kMatrices = N::kAdd ? 3 : 2, kBlocks = 4, kBytes = 16 << 10;  // of a multiprocessor, of a block
  const int share = staged_share<Row>(a.cols, kMatrices, kBytes);
  const int64_t rows = share * (kMatrices * a.cols * sizeof(T) + N::kStats * sizeof(A));
  const int64_t columns = Row::kAtOnce * N::kSums * a.cols * sizeof(A);
  int64_t blocks = std::min(ceil_div(a.rows, share), int64_t{kBlocks} * device.multiprocessors);
  if (a.partials) *sums = blocks = std::min(blocks, *sums);
  const LaunchShape shape = {grid_size(blocks), kStagedThreads, static_cast<int>(std::max(rows, columns))};
  return launch_kernel(op, norm_backward_staged_kernel<N, Row>, shape, stream, a, a.rows, static_cast<int>(a.cols),
                       share);
}

// dx and the partial sums. *sums: on entry the most lines of partial sums, on return those written, or -1 if dweight
// and dbias are.
template <class Shape, class Threads, class N>
Status norm_backward_shape(const char *op, NormBackwardTensors<N> a, const RowPlan &plan, const DeviceLimits &device,
                           int64_t *sums, void *stream) {
  constexpr auto kernel = norm_backward_kernel<Shape, Threads, N>;
  const NormParameters<N> &p = a.parameters;
  RowGrid grid;
  AOT_TRY((row_grid<kernel, Shape, Threads>(op, plan, device, a.rows, p.lines, *sums,
                                            BackwardPipeline<Shape, N>::kBytesPerWarp, &grid)));
  if (grid.blocks == 0) {
    if constexpr (kShifted<Shape>) return norm_backward_any_rows(op, a, device, sums, stream);
    else return norm_backward_any(op, a, device, sums, stream);
  }
  constexpr int kAloneCols = 4096;  // of 8192 it takes longer than two kernels
  a.alone = grid.sums == 1 && p.lines == 1 && plan.cluster == 1 && a.cols <= kAloneCols;
  *sums = a.alone ? -1 : grid.sums;
  return launch_kernel(op, kernel, grid.launch(plan), stream, a, plan.warps);
}

template <class N>
Status norm_backward_any(const char *op, const NormBackwardTensors<N> &a, const DeviceLimits &device, int64_t *sums,
                         void *stream) {
  if constexpr (kMayStage<N>) {
    using T = typename N::T;
    using Rows = StagedRowShapes<StagedRow<T, 8, 8>, StagedRow<T, 16, 8>>;
    auto staged = [&](auto row) { return norm_backward_staged(op, a, row, device, sums, stream); };
    if (a.parameters.lines == 1 && holds_row(Rows(), a.cols)) return dispatch_staged_rows(Rows(), a.cols, staged);
  }
  if constexpr (kMayShift<N>) {
    constexpr int kBytes = BackwardPipeline<ShiftedShape<N, 32, 4, Span::block>, N>::kBytesPerVector;
    const RowPlan plan =
        shifted_plan<N>(a.cols, a.parameters.lines, kBytes, device, a.x, a.dy, a.dh, a.dx, a.dresidual);
    auto shifted = [&](auto shape) {
      return norm_backward_shape<decltype(shape), Threads<512, 512>>(op, a, plan, device, sums, stream);
    };
    if (plan.lanes > 0) return dispatch_shifted<N>(plan, shifted);
  }
  return norm_backward_any_rows(op, a, device, sums, stream);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). About 64 KB in flight for each multiprocessor
// are best: less does not hide the latency of the memory, more makes it slower. Spilled registers cost more than all
// else: if kCrowded, a thread of a cluster has eight vectors and 255 registers or, with dh, two.
template <class N>
Status norm_backward_rows(const char *op, const NormBackwardTensors<N> &a, const DeviceLimits &device, int64_t *sums,
                          void *stream) {
  using R = typename N::R;
  constexpr bool kCrowded = N::kCentred && sizeof(R) == 2;
  using BlockShape = RowShape<R, 32, 4, Span::block>;
  constexpr int kLongVectors = !kCrowded ? 4 : N::kAdd ? 2 : 8;
  constexpr int kLongThreads = kLongVectors == 8 ? 256 : 512, kLongWarps = kLongThreads / 32;
  using LongShape = RowShape<R, 32, kLongVectors, Span::cluster>;
  constexpr int kOneVectorWarps = kCrowded ? 2 : 8;
  const NormParameters<N> &p = a.parameters;
  constexpr int kShortBytes = BackwardPipeline<RowShape<R, 32, 2, Span::block>, N>::kBytesPerVector;
  constexpr int kBlockBytes = BackwardPipeline<BlockShape, N>::kBytesPerVector;
  constexpr int kLongBytes = BackwardPipeline<LongShape, N>::kBytesPerVector;
  int64_t vectors = a.cols / kVectorSize<R>;
  RowPlan plan;
  if (a.cols % kVectorSize<R> == 0 && p.can_divide(a.rows, p.lines) &&
      aligned(a.dy, a.dh, a.x, static_cast<const char *>(p.weight), a.dx, a.dresidual, a.partials)) {
    if constexpr (N::kRare) plan = first_that_holds(vectors, {{32, 2, 16}}, kShortBytes, device);
    else plan = first_that_holds(vectors, {{8, 1}, {16, 1}, {32, 1}}, 0, device);
    if (!N::kRare && plan.lanes == 0)
      plan = kCrowded && vectors > 64 && vectors <= 96
                 ? RowPlan{32, 3}  // no idle lanes
                 : first_that_holds(vectors, {{32, 1, kOneVectorWarps}, {32, 2, 16}}, kShortBytes, device);
    if (!N::kRare && plan.lanes == 0) plan = first_that_holds(vectors, {{32, 4, 16}}, kBlockBytes, device);
    if (plan.lanes == 0 && sizeof(R) > 2)  // blocks of half as many threads, two on a multiprocessor
      plan = first_that_holds(vectors, {{32, kLongVectors, 8, 2}, {32, kLongVectors, 8, 4}, {32, kLongVectors, 8, 8}},
                              kLongBytes, device);
    if (plan.lanes == 0)
      plan = first_that_holds(vectors,
                              {{32, kLongVectors, kLongWarps, 2},
                               {32, kLongVectors, kLongWarps, 4},
                               {32, kLongVectors, kLongWarps, 8},
                               {32, kLongVectors, kLongWarps, 16}},
                              kLongBytes, device);
  }
  if (plan.lanes == 0) return norm_backward_any(op, a, device, sums, stream);
  auto run = [&](auto shape, auto threads) {
    return norm_backward_shape<decltype(shape), decltype(threads)>(op, a, plan, device, sums, stream);
  };
  if (plan.cluster > 1) return run(LongShape(), Threads<kLongThreads, kLongThreads>());
  if constexpr (N::kRare) {
    return run(RowShape<R, 32, 2, Span::block>(), Threads<512, 512>());
  } else {
    if constexpr (kCrowded)
      if (plan.vectors == 3) return run(RowShape<R, 32, 3, Span::warp>(), Threads<256, 512>());
    if (plan.warps == 1)
      return dispatch_shape<RowShape<R, 8, 1, Span::warp>, RowShape<R, 16, 1, Span::warp>,
                            RowShape<R, 32, 1, Span::warp>>(
          plan, [&](auto shape) { return run(shape, Threads<256, 1024>()); });
    if (plan.vectors == 1) return run(RowShape<R, 32, 1, Span::block>(), Threads<512, 1024>());
    if (plan.vectors == 2) return run(RowShape<R, 32, 2, Span::block>(), Threads<512, 512>());
    return run(BlockShape(), Threads<512, 512>());
  }
}

// dweight and dbias of `sums` lines of partial sums.
template <class N>
Status sum_partials(const char *op, const NormBackwardTensors<N> &a, int64_t sums, void *stream) {
  using T = typename N::T;
  using A = typename N::A;
  const int64_t lines = a.parameters.lines;
  auto run = [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    LaunchShape shape;
    shape.grid = {grid_size(ceil_div(lines * a.cols, kSumLanes * kWidth)), N::kSums};
    shape.block = kSumLanes * kSumRows;
    shape.overlap = sums > 0;  // else no kernel of this call is before it
    return launch_kernel(op, sum_partials_kernel<T, A, kWidth>, shape, stream, a.partials, a.gradients, sums / lines,
                         lines, a.cols);
  };
  constexpr int kMost = kVectorSize<A>;
  if (a.cols % kMost == 0 && aligned(a.partials)) return run(std::integral_constant<int, kMost>());
  return run(std::integral_constant<int, 1>());
}

// The kernel of few rows runs a call that fits it. *done: whether it did.
template <class Op>
Status norm_backward_of_few(const Op &op, const Tensor *in, const Tensor *out, void *stream, bool *done) {
  const Tensor &x = in[Op::kX], &dy = in[Op::kDy], &weight = in[Op::kWeight];
  const Tensor &dx = out[Op::kDx], &dresidual = slot<Op::kDresidual>(out);
  const int64_t rows = op.rows(x), cols = op.cols();
  *done = rows > 0 && rows <= kFewNormRows && cols > 0 && cols <= kFewNormCols && dy.dtype == x.dtype &&
          (!weight || weight.dtype == x.dtype) && op.weight_rows(weight) == 1;
  if (!*done) return kOk;
  FewNormRows few = {dy.data, slot<Op::kDh>(in).data, x.data, weight.data, in[Op::kStatsIn].template as<float>()};
  few.dx = dx.data, few.dresidual = dresidual.data, few.dweight = out[Op::kDweight].data;
  few.dbias = out[Op::kDbias].data, few.rows = static_cast<int>(rows), few.cols = static_cast<int>(cols);
  few.offset = static_cast<float>(op.weight_offset(weight)), few.eps = static_cast<float>(op.eps(x.dtype));
  few.one_over_cols = 1 / static_cast<float>(cols), few.centred = Op::kCentred;
  return norm_backward_few(Op::name, x.dtype, few, stream, done);
}

template <class Op>
Status norm_backward_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  bool done = false;
  AOT_TRY(norm_backward_of_few(op, in, out, stream, &done));
  if (done) return kOk;
  DeviceLimits device;
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX], &dy = in[Op::kDy], &weight = in[Op::kWeight], &work = out[Op::kWork];
  const Tensor &dweight = out[Op::kDweight], &dbias = out[Op::kDbias], &dresidual = slot<Op::kDresidual>(out);
  return dispatch_norm(op, dy.dtype, x.dtype, weight, dbias, [&](auto types) {
    using N = typename decltype(types)::type;
    using R = typename N::R;
    using A = typename N::A;
    const bool wants_sums = dweight || dbias;
    int64_t rows = op.rows(x), cols = op.cols(), lines = std::max<int64_t>(1, op.weight_rows(weight));
    int64_t sums = lines * partial_rows(op.rows_per_line(x, weight), lines * cols);
    A *stats = in[Op::kStatsIn].template as<A>();
    if ((wants_sums || !stats) && !work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
    if (!stats && rows > 0 && cols > 0) {  // in the workspace, after the partial sums
      stats = work.as<A>() + 2 * sums * cols;
      AOT_TRY(norm_stats<N::kCentred>(Op::name, x, stats, rows, cols, op.eps(x.dtype), stream));
    }
    // dx and dresidual are equal if they have one dtype.
    const Tensor &dx = out[Op::kDx] || N::kMixed ? out[Op::kDx] : dresidual;
    NormBackwardTensors<N> a{dy.as<const typename N::T>(),
                             slot<Op::kDh>(in).template as<const R>(),
                             x.as<const R>(),
                             norm_parameters<N>(op, weight, {}),
                             stats,
                             dx.as<typename N::X>(),
                             N::kMixed ? dresidual.as<R>() : nullptr,
                             wants_sums ? work.as<A>() : nullptr,
                             rows,
                             cols,
                             {dweight.data, dbias.data, (dweight ? dweight : dbias).dtype == DType::float32}};
    if (x.size() == 0) sums = 0;
    else AOT_TRY(norm_backward_rows(Op::name, a, device, &sums, stream));
    if (wants_sums && sums >= 0) AOT_TRY(sum_partials(Op::name, a, sums, stream));
    if (N::kMixed || !dresidual || dx.data == dresidual.data) return kOk;
    return check_cuda(Op::name, cudaMemcpyAsync(dresidual.data, dx.data, x.size() * sizeof(R), cudaMemcpyDeviceToDevice,
                                                static_cast<cudaStream_t>(stream)));
  });
}

}  // namespace AOT_ISA
}  // namespace aot
