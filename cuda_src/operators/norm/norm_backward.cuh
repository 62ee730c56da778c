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

constexpr int kStages = 2;

// Whether dh is loaded to registers instead, where a pipeline with it leaves too little shared memory.
template <class Shape, class N>
constexpr bool kDirectDh = N::kAdd && sizeof(typename N::R) > 2 && Shape::kVectors == 4;

// Whether a thread reads its part of a row from shared memory once, and holds it and its part of the weight in
// registers: float32 rows of more than 4096 columns. Otherwise they are read for each of two passes.
template <class Shape, class N>
constexpr bool kHeld = std::is_same_v<typename N::T, float> && Shape::kVectors == 4 && !(N::kAdd && N::kBias);

// Rows of 16 bits are not kept in clusters, where it gained nothing.
template <class Shape, class N, bool kKept = sizeof(typename N::R) != 2 || Shape::kSpan != Span::cluster,
          int kKeptBytes = kHeld<Shape, N> ? 0 : NormParameters<N>::kKeptBytes>
using BackwardPipeline =
    std::conditional_t<N::kAdd && !kDirectDh<Shape, N>,
                       SmemPipeline<Shape, kStages, kKeptBytes, kKept, typename N::R, typename N::T, typename N::R>,
                       SmemPipeline<Shape, kStages, kKeptBytes, kKept, typename N::R, typename N::T>>;

template <int kSize, typename A>
__device__ inline void store_sums(A *to, const A (&sums)[kSize]) {
#pragma unroll
  for (int k = 0; k < kSize; k += kVectorSize<A>)
    *reinterpret_cast<uint4 *>(to + k) = reinterpret_cast<const uint4 &>(sums[k]);
}

// Adds up the sums of a block's rows of each line, always in the same order, and writes them to the block's lines of
// partial sums. The rows of a thread are all of one line.
template <class Shape, class N, int kSums, typename A>
__device__ inline void write_partials(A (&sums)[kSums][Shape::kVectors][Shape::kSize], const RowPart<Shape> &part,
                                      int row_warps, const NormBackwardTensors<N> &a) {
  const int64_t cols = a.cols;
  int64_t lines = N::kPlain ? 1 : a.parameters.lines;
  int teams = blockDim.x / (32 * row_warps), rows = teams * Shape::kRowsPerWarp;
  int64_t group = Shape::kSpan == Span::cluster ? blockIdx.x / cluster_size() : blockIdx.x;
  lines = lines_of_block(rows, lines);
  A *partials = a.partials + kSums * group * lines * cols;
  bool whole_warp = lines == 1;  // its rows are of one line
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
          store_sums(to + s * cols + part.column() + part.offset(i), sums[s][i]);
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

template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_backward_kernel(NormBackwardTensors<N> a, int row_warps) {
  using T = typename N::T;
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kStats = N::kStats, kSums = N::kSums;
  constexpr bool kDirect = kDirectDh<Shape, N>, kHold = kHeld<Shape, N>;
  static_assert(!kHold || !N::kAdd || kDirect, "the next row's copies would overwrite dh before it is read");
  RowPart<Shape> part(a.cols, row_warps);
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
  p.advance(p.line(part.first_row()) * a.cols + part.column());
  weight.load(p, p.weight, has_weight, 1, part);
#pragma unroll
  for (int s = 0; s < kStages; ++s) load_row(s, part.first_row() + s * part.step());
  if constexpr (!kHold) weight.keep(pipeline, 0, p.wide, p.offset);
  else
    for (auto &v : weight.vector) v = v.kept(p.wide, p.offset);
  auto stat = [&](int64_t row, int which) { return row < a.rows ? a.stats[kStats * row + which] : A(0); };
  A next_mean = N::kCentred ? stat(part.first_row(), 0) : A(0), next_rstd = stat(part.first_row(), kStats - 1);
  RowExchange<Shape, Sums<kStats, A>> exchange(row_warps);

  A columns[kSums][Shape::kVectors][Shape::kSize] = {};  // each column's sums of dy * xhat and of dy
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  int stage = 0;
  for (int64_t base = part.base(); base < a.rows; base += part.step()) {
    int64_t row = base + part.own();
    A mean = next_mean, rstd = next_rstd;
    if constexpr (N::kCentred) next_mean = stat(row + part.step(), 0);
    next_rstd = stat(row + part.step(), kStats - 1);
    [[maybe_unused]] Vector<R> held[2][Shape::kVectors];  // x and dy
    // f(k, x - mean, dy, g) for each element k of this thread's vector i of the row
    auto each = [&](int i, auto f) {
      Widened<R> x, d, w;
      if constexpr (kHold) x = widen(held[0][i]), d = widen(held[1][i]), w = weight.vector[i].widened_kept();
      else
        x = widen(pipeline.read(kX, stage, i)), d = widen(pipeline.read(kDy, stage, i)),
        w = kept_parameter<N>(pipeline, 0, i);
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) f(k, N::kCentred ? x[k] - mean : x[k], d[k], d[k] * w[k]);
    };

    Vector<R> direct[kDirect ? Shape::kVectors : 1];
    if constexpr (kDirect)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        direct[i] = load_kept(a.dh + row * a.cols + part.offset(i), has_dh && row < a.rows && part.holds(i));
    wait_copies<kStages - 1>();
    if constexpr (kHold)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        held[0][i] = pipeline.read(kX, stage, i), held[1][i] = pipeline.read(kDy, stage, i);
    Sums<kStats, A> sums = {};  // the row's, of g * xhat and of g
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i)
      if (part.holds(i))
        each(i, [&](int k, A x, A d, A g) {
          A xhat = x * rstd;
          sums.value[0] += g * xhat, columns[0][i][k] += d * xhat;
          if constexpr (N::kCentred) sums.value[1] += g;
          if constexpr (N::kBias) columns[1][i][k] += d;
        });
    auto load_next = [&] { load_row(stage, row + kStages * part.step()); };
    if constexpr (kHold) load_next();  // this row's reads ended with its sums
    if constexpr (Shape::kSpan == Span::warp) sums = sum_lanes<Shape::kLanes>(sums);
    else sums = sum_row(sums, exchange);

    // dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) = rstd * g + c1 * (x - mean) + c0
    A c1 = -rstd * rstd * one_over_cols * sums.value[0], c0 = 0;
    if constexpr (N::kCentred) c0 = -rstd * one_over_cols * sums.value[1];
    if ((has_dx || (N::kAdd && N::kMixed && has_dresidual)) && row < a.rows)
#pragma unroll
      for (int i = 0; i < Shape::kVectors; ++i)
        if (part.holds(i)) {
          Widened<R> dx;
          each(i, [&](int k, A x, A, A g) { dx[k] = g * rstd + (x * c1 + c0); });
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
    if constexpr (!kHold) load_next();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  launch_next();
  wait_copies<0>();
  if (a.partials) write_partials(columns, part, row_warps, a);
}

// Adds up the partial sums, (sums, kSums, cols), in a fixed order: dweight if blockIdx.y is 0, dbias if it is 1. Sum s
// is of line s % lines. Without any, results are 0. This kernel overlaps the end of the one before (overlap.cuh).
constexpr int kSumCols = 16, kSumRows = 32;

template <typename T, typename A>
__global__ void __launch_bounds__(kSumCols *kSumRows)
    sum_partials_kernel(const A *partials, ParameterGradients<T> to, int64_t rows, int64_t lines, int64_t cols) {
  __shared__ A sums[kSumRows][kSumCols];
  void *out = blockIdx.y == 0 ? to.dweight : to.dbias;
  wait_for_kernel_before();
  if (!out) return;
  // `rows` of lines * gridDim.y * cols numbers
  for (int64_t first = int64_t{blockIdx.x} * kSumCols; first < lines * cols; first += int64_t{gridDim.x} * kSumCols) {
    int64_t at = first + threadIdx.x, line = lines == 1 ? 0 : at / cols;
    const A *column = partials + line * (gridDim.y - 1) * cols + blockIdx.y * cols + at;
    A sum = 0;
    if (at < lines * cols)
#pragma unroll 8
      for (int64_t row = threadIdx.y; row < rows; row += kSumRows) sum += column[row * gridDim.y * lines * cols];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && at < lines * cols) {
      for (int r = 1; r < kSumRows; ++r) sum += sums[r][threadIdx.x];
      to.store(out, at, sum);
    }
    __syncthreads();
  }
}

template <class N>
__global__ void __launch_bounds__(kAnyThreads) norm_backward_any_kernel(NormBackwardTensors<N> a) {
  using A = typename N::A;
  constexpr int kStats = N::kStats;
  Exchange<Span::block, Sums<2, A>> exchange;
  A cols = static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    int64_t at = row * a.cols, line = row % a.parameters.lines * a.cols;
    A mean = N::kCentred ? a.stats[kStats * row] : A(0), rstd = a.stats[kStats * row + kStats - 1];
    auto xhat = [&](int64_t c) { return (widen(a.x[at + c]) - mean) * rstd; };
    auto g = [&](int64_t c) { return widen(a.dy[at + c]) * a.parameters.weight_at(line + c); };
    Sums<2, A> sums = {};
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) sums.value[0] += g(c), sums.value[1] += g(c) * xhat(c);
    sums = sum_row(sums, exchange);
    A c0 = N::kCentred ? sums.value[0] / cols : A(0), c1 = sums.value[1] / cols;
    for (int64_t c = threadIdx.x; c < a.cols; c += blockDim.x) {
      A dx = rstd * (g(c) - c0 - xhat(c) * c1);
      if constexpr (N::kAdd)
        if (a.dh) dx += widen(a.dh[at + c]);
      if constexpr (N::kAdd && N::kMixed)
        if (a.dresidual) a.dresidual[at + c] = narrow<typename N::R>(dx);
      if (a.dx) a.dx[at + c] = narrow<typename N::X>(dx);
    }
  }
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

template <class N>
Status norm_backward_any(const char *op, const NormBackwardTensors<N> &a, int64_t sums, void *stream) {
  unsigned block = any_row_block(a.cols, kAnyThreads);
  if (a.dx || a.dresidual)
    AOT_TRY(launch_kernel(op, norm_backward_any_kernel<N>, {grid_size(a.rows), block}, stream, a));
  if (!a.partials) return kOk;
  constexpr int64_t kMostInY = 65535;
  dim3 grid(grid_size(ceil_div(a.cols, block)), static_cast<unsigned>(std::min(sums, kMostInY)));
  return launch_kernel(op, norm_partials_any_kernel<N>, {grid, block}, stream, a, sums);
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
  if (grid.blocks == 0) return norm_backward_any(op, a, *sums, stream);
  constexpr int kAloneCols = 4096;  // of 8192 it takes longer than two kernels
  a.alone = grid.sums == 1 && p.lines == 1 && plan.cluster == 1 && a.cols <= kAloneCols;
  *sums = a.alone ? -1 : grid.sums;
  return launch_kernel(op, kernel, grid.launch(plan), stream, a, plan.warps);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). About 64 KB in flight for each multiprocessor
// are best: less does not hide the latency of the memory, more makes it slower. Spilled registers cost more than all
// else.
template <class N>
Status norm_backward_rows(const char *op, const NormBackwardTensors<N> &a, const DeviceLimits &device, int64_t *sums,
                          void *stream) {
  using R = typename N::R;
  using LongShape = RowShape<R, 32, 4, Span::cluster>;
  constexpr bool kCrowded = N::kCentred && sizeof(R) == 2;
  constexpr int kOneVectorWarps = kCrowded ? 2 : 8;
  const NormParameters<N> &p = a.parameters;
  constexpr int kBytes = BackwardPipeline<LongShape, N>::kBytesPerVector;
  constexpr int kShortBytes = BackwardPipeline<RowShape<R, 32, 2, Span::block>, N>::kBytesPerVector;
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
    if (!N::kRare && plan.lanes == 0) plan = first_that_holds(vectors, {{32, 4, 16}}, kBytes, device);
    if (plan.lanes == 0 && sizeof(R) == 2)
      plan =
          first_that_holds(vectors, {{32, 4, 16, 2}, {32, 4, 16, 4}, {32, 4, 16, 8}, {32, 4, 16, 16}}, kBytes, device);
    if (plan.lanes == 0)
      plan = first_that_holds(
          vectors, {{32, 4, 8, 2}, {32, 4, 8, 4}, {32, 4, 8, 8}, {32, 4, 16, 8}, {32, 4, 8, 16}, {32, 4, 16, 16}},
          kBytes, device);
  }
  if (plan.lanes == 0) return norm_backward_any(op, a, *sums, stream);
  auto run = [&](auto shape, auto threads) {
    return norm_backward_shape<decltype(shape), decltype(threads)>(op, a, plan, device, sums, stream);
  };
  if (plan.cluster > 1) return run(LongShape(), Threads<512, 512>());
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
    return run(RowShape<R, 32, 4, Span::block>(), Threads<512, 512>());
  }
}

// dweight and dbias of `sums` lines of partial sums.
template <class N>
Status sum_partials(const char *op, const NormBackwardTensors<N> &a, int64_t sums, void *stream) {
  using T = typename N::T;
  const int64_t lines = a.parameters.lines;
  LaunchShape shape;
  shape.grid = {grid_size(ceil_div(lines * a.cols, kSumCols)), N::kSums}, shape.block = {kSumCols, kSumRows};
  shape.overlap = sums > 0;  // else no kernel of this call is before it
  return launch_kernel(op, sum_partials_kernel<T, typename N::A>, shape, stream, a.partials, a.gradients, sums / lines,
                       lines, a.cols);
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
