// The forward of the norms on CUDA (norm.cuh).
#pragma once
#include "cuda/overlap.cuh"
#include "norm.cuh"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- kernels

template <class N>
struct NormForward {
  const typename N::X *x;
  const typename N::R *residual;
  NormParameters<N> parameters;
  typename N::T *y;  // null if only the statistics are wanted
  typename N::R *h;
  typename N::A *stats;
  int64_t rows, cols;
  typename N::A eps;
};

// Weight and bias are loaded before the row arrives if a thread has at most kEarlyVectors vectors. Otherwise they are
// loaded after it, for kParameterVectors vectors at once: registers limit both. Where they may be float, which takes
// twice as many, half as many are loaded at once, and one in rows of whole shares, so that 1536 threads are resident.
constexpr int kEarlyVectors = 2;
template <int kVectors, bool kBias, bool kMayBeWide>
constexpr int kParameterVectors = std::max(1, (!kBias          ? 4
                                               : kVectors <= 4 ? 2
                                                               : 1) /
                                                  (kMayBeWide ? 2 : 1));

// The sum, rounded to residual's dtype.
template <typename V, typename R>
__device__ inline Vector<R> add_vectors(const V &a, const Vector<R> &b) {
  auto x = widen(a);
  auto y = widen(b);
#pragma unroll
  for (int k = 0; k < kVectorSize<R>; ++k) y[k] += x[k];
  return narrow(y);
}

template <class N, typename R = typename N::R, typename A = typename N::A>
__device__ inline VectorBeside<typename N::T, R> scaled(const Vector<R> &v, A mean, A rstd, const Widened<R> &weight,
                                                        const Widened<R> &bias) {
  auto y = widen(v);
#pragma unroll
  for (int k = 0; k < kVectorSize<R>; ++k)
    if constexpr (N::kCentred) y[k] = (y[k] - mean) * rstd * weight[k] + bias[k];
    else if constexpr (N::kBias) y[k] = y[k] * rstd * weight[k] + bias[k];
    else y[k] = y[k] * rstd * weight[k];
  return narrow_to<typename N::T>(y);
}

template <class N, typename A = typename N::A>
__device__ inline void write_stats(const NormForward<N> &a, int64_t row, A mean, A rstd) {
  if constexpr (N::kCentred) a.stats[2 * row] = mean, a.stats[2 * row + 1] = rstd;
  else a.stats[row] = rstd;
}

// One-shot blocks, each with one row or several short ones, which are loaded directly into registers. Many small blocks
// keep the memory busy, because some load while others compute.
template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock) norm_kernel(NormForward<N> a) {
  using R = typename N::R;
  using A = typename N::A;
  using Parameter = ParameterVector<N>;
  constexpr int kVectors = Shape::kVectors;
  constexpr bool kEarly = kVectors <= kEarlyVectors;
  constexpr int kTogether = kEarly          ? kVectors
                            : Shape::kWhole ? 1
                                            : kParameterVectors<kVectors, N::kBias, Parameter::kMayBeWide>;
  wait_for_kernel_before();  // before launch_next(): the next kernel may read, before it waits, what older ones wrote
  launch_next();
  constexpr bool kWithinWarp = Shape::kSpan == Span::warp;
  RowPart<Shape> part(a.cols, kWithinWarp ? 1 : blockDim.x / 32, !kWithinWarp);
  int64_t row = part.first_row();
  bool present = Shape::kWhole || row < a.rows;
  NormParameters<N> &p = a.parameters;
  bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr;
  int64_t at = row * a.cols + part.column();

  Vector<R> v[kVectors];
  VectorBeside<typename N::X, R> x[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[i] = load_beside<R>(a.x + at + part.offset(i), present && part.holds(i));
    if constexpr (N::kAdd) v[i] = load_kept(a.residual + at + part.offset(i), present && part.holds(i));
    else v[i] = x[i];
  }
  RowExchange<Shape, Share<N::kCentred, A>> exchange(blockDim.x / 32, 0);
  A one_over_cols = A(1) / static_cast<A>(a.cols), one_over_share = one_over_cols;
  if constexpr (Shape::kSpan != Span::warp) one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  Parameter weight[kVectors], bias[kVectors];
  auto load_parameters = [&](bool wide, int first, int count) {
#pragma unroll
    for (int i = first; i < first + count && i < kVectors; ++i) {
      weight[i] = Parameter::load(p.address(p.weight, part.offset(i)), wide, has_weight && part.holds(i), 1);
      if constexpr (N::kBias)
        bias[i] = Parameter::load(p.address(p.bias, part.offset(i)), wide, has_bias && part.holds(i), 0);
    }
  };
  auto find_parameters = [&] { p.advance(p.line(row) * a.cols + part.column()); };
  if constexpr (kEarly) {
    find_parameters();
    load_parameters(p.wide, 0, kVectors);
  }
  if constexpr (N::kAdd) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = add_vectors(x[i], v[i]);
      if (present && part.holds(i)) store(a.h + at + part.offset(i), v[i]);
    }
  }

  auto share = share_moments<N::kCentred>(v, part, one_over_share);
  Moments<A> moments;
  if constexpr (Shape::kSpan == Span::warp) moments = only_share(share);
  else moments = combine_shares(exchange.all(share), exchange.warps(), part, one_over_cols);
  A mean = moments.mean, rstd = reciprocal_deviation<N::kCentred>(moments.squares * one_over_cols + a.eps);
  if (!present) return;
  if (a.stats && part.leads()) write_stats(a, row, mean, rstd);
  if (!a.y) return;
  if constexpr (!kEarly) find_parameters();
  auto write = [&](auto is_wide) {
    constexpr bool kWide = decltype(is_wide)::value;
#pragma unroll
    for (int first = 0; first < kVectors; first += kTogether) {
      if constexpr (!kEarly) load_parameters(kWide, first, kTogether);
#pragma unroll
      for (int i = first; i < first + kTogether && i < kVectors; ++i) {
        keep_packed(v[i]);
        if (!part.holds(i)) continue;
        auto scale = weight[i].widened(kWide);
        if constexpr (!N::kPlain)
#pragma unroll
          for (int k = 0; k < Shape::kSize; ++k) scale[k] += p.offset;
        Widened<R> shift;
        if constexpr (N::kBias) shift = bias[i].widened(kWide);
        store(a.y + at + part.offset(i), scaled<N>(v[i], mean, rstd, scale, shift));
      }
    }
  };
  if constexpr (Parameter::kMayBeWide)
    if (p.wide) return write(std::true_type());
  write(std::false_type());
}

// Persistent clusters: weight and bias, each as long as a row, stay in shared memory. The moments of the next row are
// published before this row is written, so that the exchange between the blocks overlaps with the stores. With kAdd the
// pipeline has rows of x and residual, which leave no room for weight and bias.
template <class Shape, class N>
using LongPipeline = std::conditional_t<
    N::kAdd, SmemPipeline<Shape, kLongStages, 0, false, typename N::X, typename N::R>,
    SmemPipeline<Shape, kLongStages, (N::kBias ? 2 : 1) * NormParameters<N>::kKeptBytes, false, typename N::X>>;

template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_long_kernel(NormForward<N> a) {
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kVectors = Shape::kVectors;
  RowPart<Shape> part(a.cols, blockDim.x / 32);
  NormParameters<N> &p = a.parameters;
  bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr, has_y = a.y != nullptr;
  a.x += part.column(), a.y += part.column(), p.advance(part.column());
  if constexpr (N::kAdd) a.residual += part.column(), a.h += part.column();

  constexpr Index<0> kX;
  constexpr Index<1> kResidual;
  constexpr int kWeight = 0, kBias = ParameterVector<N>::kPlanes;  // their first planes
  LongPipeline<Shape, N> pipeline;
  auto load_row = [&](int stage, int64_t row) {
    pipeline.load(kX, stage, a.x + row * a.cols, part, row < a.rows);
    if constexpr (N::kAdd) pipeline.load(kResidual, stage, a.residual + row * a.cols, part, row < a.rows);
    commit_copies();
  };
  KeptParameter<N, Shape> weight, bias;
  if constexpr (!N::kAdd) weight.load(p, p.weight, has_weight, 1, part);
  if constexpr (!N::kAdd && N::kBias) bias.load(p, p.bias, has_bias, 0, part);
#pragma unroll
  for (int s = 0; s < kLongStages; ++s) load_row(s, part.base() + s * part.step());
  if constexpr (!N::kAdd) weight.keep(pipeline, kWeight, p.wide, p.offset);
  if constexpr (!N::kAdd && N::kBias) bias.keep(pipeline, kBias, p.wide, A(0));
  auto row_vector = [&](int stage, int i) {
    if constexpr (N::kAdd) return add_vectors(pipeline.read(kX, stage, i), pipeline.read(kResidual, stage, i));
    else return pipeline.read(kX, stage, i);
  };
  auto parameter = [&](int plane, const void *from, bool given, float fallback, A offset, int i) {
    if constexpr (!N::kAdd) return kept_parameter<N>(pipeline, plane, i);
    auto v = ParameterVector<N>::load(p.address(from, part.offset(i)), p.wide, given && part.holds(i), fallback);
    return v.kept(p.wide, offset).widened_kept();
  };

  Exchange<Span::cluster, Share<N::kCentred, A>, 4> exchange;
  A one_over_cols = A(1) / static_cast<A>(a.cols);
  A one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  auto publish = [&](int stage, int64_t row) {
    Vector<R> v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = row_vector(stage, i);
      if constexpr (N::kAdd)
        if (part.holds(i)) store(a.h + row * a.cols + part.offset(i), v[i]);
    }
    exchange.publish(share_moments<N::kCentred>(v, part, one_over_share));
  };

  wait_copies<kLongStages - 1>();
  if (part.base() < a.rows) publish(0, part.base());
  int stage = 0;
  for (int64_t row = part.base(); row < a.rows; row += part.step()) {
    int next = stage + 1 == kLongStages ? 0 : stage + 1;
    wait_copies<kLongStages - 2>();
    if (row + part.step() < a.rows) publish(next, row + part.step());
    Moments<A> moments = combine_shares(exchange.collect(), exchange.warps(), part, one_over_cols);
    A mean = moments.mean, rstd = reciprocal_deviation<N::kCentred>(moments.squares * one_over_cols + a.eps);
    if (a.stats && part.leads()) write_stats(a, row, mean, rstd);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (has_y && part.holds(i))
        store(a.y + row * a.cols + part.offset(i),
              scaled<N>(row_vector(stage, i), mean, rstd, parameter(kWeight, p.weight, has_weight, 1, p.offset, i),
                        N::kBias ? parameter(kBias, p.bias, has_bias, 0, A(0), i) : Widened<R>{}));
    load_row(stage, row + kLongStages * part.step());
    stage = next;
  }
  wait_copies<0>();
}

template <class N, class Row>
__global__ void __launch_bounds__(kStagedThreads)
    norm_staged_kernel(NormForward<N> a, int64_t rows, int cols, int share) {
  using T = typename N::T;
  using A = typename N::A;
  extern __shared__ uint4 memory[];
  T *staged_x = reinterpret_cast<T *>(memory), *staged_h = N::kAdd ? staged_x + share * cols : staged_x;
  const StagedRows<Row> of_x(staged_x, rows, cols, share), of_h(staged_h, rows, cols, share);
  of_x.load(a.x);
  if constexpr (N::kAdd) of_h.load(a.residual);
  const NormParameters<N> &p = a.parameters;
  A weight[Row::kEach] = {}, bias[Row::kEach] = {};
  of_x.each_column([&](int k, int c) {
    if (c < cols) weight[k] = p.weight_at(c), bias[k] = p.bias_at(c);
  });
  of_x.arrive();
  const A one_over_cols = A(1) / static_cast<A>(cols);
  of_x.each([&](int i, bool present) {
    T *row = staged_x + i * cols, *row_of_h = staged_h + i * cols;
    A v[Row::kEach], sum = 0, squares = 0;
    of_x.each_column([&](int k, int c) {
      const bool has = present && c < cols;
      v[k] = element(row, c, has);
      if constexpr (N::kAdd) {
        const T h = narrow<T>(v[k] + element(row_of_h, c, has));
        if (has) row_of_h[c] = h;
        v[k] = widen(h);
      }
      sum += v[k];
    });
    const A mean = N::kCentred ? sum_lanes<Row::kLanes>(sum) * one_over_cols : A(0);
    of_x.each_column([&](int k, int c) {
      v[k] -= mean;
      if (c < cols) squares += v[k] * v[k];
    });
    const A rstd = reciprocal_deviation<N::kCentred>(sum_lanes<Row::kLanes>(squares) * one_over_cols + a.eps);
    if (a.stats && present && threadIdx.x % Row::kLanes == 0) write_stats(a, of_x.first() + i, mean, rstd);
    of_x.each_column([&](int k, int c) {
      if (present && c < cols) row[c] = narrow<T>(v[k] * rstd * weight[k] + bias[k]);
    });
  });
  if (a.y) of_x.store(a.y);
  if constexpr (N::kAdd) of_h.store(a.h);
}

// Rows that are Shifted. Weight and bias are in shared memory, beside this row and the next one.
constexpr int kShiftedStages = 2;

template <class Shape, class N, int kParameters = (N::kBias ? 2 : 1) * NormParameters<N>::kKeptBytes>
using ShiftedPipeline =
    std::conditional_t<N::kAdd, SmemPipeline<Shape, kShiftedStages, kParameters, true, typename N::X, typename N::R>,
                       SmemPipeline<Shape, kShiftedStages, kParameters, true, typename N::X>>;

template <class Shape, class Threads, class N>
__global__ void __launch_bounds__(Threads::kBlock, Threads::kResident / Threads::kBlock)
    norm_shifted_kernel(NormForward<N> a, int row_warps) {
  using X = typename N::X;
  using R = typename N::R;
  using A = typename N::A;
  constexpr int kVectors = Shape::kVectors, kStages = kShiftedStages;
  constexpr bool kWithinWarp = Shape::kSpan == Span::warp;
  const RowPart<Shape> part(a.cols, row_warps);
  NormParameters<N> p = a.parameters;
  const bool has_weight = p.weight != nullptr, has_bias = p.bias != nullptr, has_y = a.y != nullptr;
  const A end_weight = part.has_end() ? p.weight_at(part.end()) : A(0);
  const A end_bias = part.has_end() ? p.bias_at(part.end()) : A(0);
  p.advance(part.column());

  constexpr Index<0> kX;
  constexpr Index<1> kResidual;
  constexpr int kWeight = 0, kBias = ParameterVector<N>::kPlanes;  // their first planes
  ShiftedPipeline<Shape, N> pipeline;
  auto load_row = [&](int stage, int64_t row) {
    const int64_t at = row * a.cols + part.column();
    pipeline.load(kX, stage, a.x + at, part, row < a.rows);
    if constexpr (N::kAdd) pipeline.load(kResidual, stage, a.residual + at, part, row < a.rows);
    commit_copies();
  };
  X next_x = {};
  [[maybe_unused]] R next_residual = {};
  auto load_end = [&](int64_t row) {
    if (!part.has_end() || row >= a.rows) return;
    next_x = a.x[row * a.cols + part.end()];
    if constexpr (N::kAdd) next_residual = a.residual[row * a.cols + part.end()];
  };
  KeptParameter<N, Shape> weight, bias;
  weight.load(p, p.weight, has_weight, 1, part);
  if constexpr (N::kBias) bias.load(p, p.bias, has_bias, 0, part);
#pragma unroll
  for (int s = 0; s < kStages; ++s) load_row(s, part.first_row() + s * part.step());
  load_end(part.first_row());
  weight.keep(pipeline, kWeight, p.wide, p.offset);
  if constexpr (N::kBias) bias.keep(pipeline, kBias, p.wide, A(0));

  RowExchange<Shape, Share<N::kCentred, A>> exchange(row_warps);
  const A one_over_cols = A(1) / static_cast<A>(a.cols);
  A one_over_share = one_over_cols;
  if constexpr (!kWithinWarp) one_over_share = A(1) / static_cast<A>(max(1, part.share(exchange.warp())));
  int stage = 0;
  for (int64_t base = part.base(); base < a.rows; base += part.step()) {
    const int64_t row = base + part.own(), at = row * a.cols;
    const bool present = row < a.rows;
    wait_copies<kStages - 1>();
    Vector<R> v[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = pipeline.read(Index<N::kAdd ? 1 : 0>(), stage, i);
      if constexpr (N::kAdd) {
        v[i] = add_vectors(pipeline.read(kX, stage, i), v[i]);
        if (present && part.holds(i)) store(a.h + at + part.column() + part.offset(i), v[i]);
      }
    }
    A end = part.has_end() ? static_cast<A>(widen(next_x)) : A(0);
    if constexpr (N::kAdd)
      if (part.has_end()) {
        const R h = narrow<R>(end + widen(next_residual));
        if (present) a.h[at + part.end()] = h;
        end = widen(h);
      }
    load_end(row + part.step());
    const Share<N::kCentred, A> share = share_moments<N::kCentred>(v, part, one_over_share, end);
    load_row(stage, row + kStages * part.step());
    stage = stage + 1 == kStages ? 0 : stage + 1;
    Moments<A> moments;
    if constexpr (kWithinWarp) moments = only_share(share);
    else moments = combine_shares(exchange.all(share), exchange.warps(), part, one_over_cols);
    const A mean = moments.mean, rstd = reciprocal_deviation<N::kCentred>(moments.squares * one_over_cols + a.eps);
    if (!present) continue;
    if (a.stats && part.leads()) write_stats(a, row, mean, rstd);
    if (!has_y) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (part.holds(i))
        store(a.y + at + part.column() + part.offset(i),
              scaled<N>(v[i], mean, rstd, kept_parameter<N>(pipeline, kWeight, i),
                        N::kBias ? kept_parameter<N>(pipeline, kBias, i) : Widened<R>{}));
    if (part.has_end()) a.y[at + part.end()] = narrow<typename N::T>((end - mean) * rstd * end_weight + end_bias);
  }
  wait_copies<0>();
}

// The next row is loaded while one is normalized.
template <class N>
__global__ void __launch_bounds__(kAnyThreads) norm_any_kernel(NormForward<N> a, int row_warps) {
  using X = typename N::X;
  using R = typename N::R;
  using A = typename N::A;
  Exchange<Span::block, Sums<1, A>> exchange(row_warps);
  const AnyRows part(row_warps, a.cols);
  const NormParameters<N> &p = a.parameters;
  const A cols = static_cast<A>(a.cols);
  A weight[kAnyHeld], bias[kAnyHeld];
  part.each_held([&](int k, int64_t c) { weight[k] = p.weight_at(c), bias[k] = p.bias_at(c); });
  X next[kAnyHeld];
  [[maybe_unused]] R next_residual[kAnyHeld];
  auto load = [&](int64_t row) {
    if (row >= a.rows) return;
    part.load(a.x + row * a.cols, next);
    if constexpr (N::kAdd) part.load(a.residual + row * a.cols, next_residual);
  };
  load(part.first());
  for (int64_t row = part.first(); row < a.rows; row += part.step()) {
    const int64_t at = row * a.cols, line = (p.lines == 1 ? 0 : row % p.lines) * a.cols;
    A v[kAnyHeld];
    [[maybe_unused]] A residual[kAnyHeld];
    part.widen(next, v);
    if constexpr (N::kAdd) part.widen(next_residual, residual);
    load(row + part.step());
    if constexpr (N::kAdd) {
      part.each_held([&](int k, int64_t) { v[k] = widen(narrow<R>(v[k] + residual[k])); });
      part.store(a.h + at, v);
      part.each_other([&](int64_t c) { a.h[at + c] = narrow<R>(widen(a.x[at + c]) + widen(a.residual[at + c])); });
    }
    const R *from;  // a thread reads only the elements of h that it has written
    if constexpr (N::kAdd) from = a.h + at;
    else from = a.x + at;
    A mean = 0;
    if constexpr (N::kCentred) {
      Sums<1, A> sum = {};
      part.each_held([&](int k, int64_t) { sum.value[0] += v[k]; });
      part.each_other([&](int64_t c) { sum.value[0] += widen(from[c]); });
      mean = part.sum(sum, exchange).value[0] / cols;
    }
    Sums<1, A> squares = {};
    auto add_square = [&](A x) { squares.value[0] += (x - mean) * (x - mean); };
    part.each_held([&](int k, int64_t) { add_square(v[k]); });
    part.each_other([&](int64_t c) { add_square(widen(from[c])); });
    const A rstd = reciprocal_deviation<N::kCentred>(part.sum(squares, exchange).value[0] / cols + a.eps);
    if (a.stats && part.leads()) write_stats(a, row, mean, rstd);
    if (!a.y) continue;
    if (p.lines > 1)
      part.each_held([&](int k, int64_t c) { weight[k] = p.weight_at(line + c), bias[k] = p.bias_at(line + c); });
    part.each_held([&](int k, int64_t) { v[k] = (v[k] - mean) * rstd * weight[k] + bias[k]; });
    part.store(a.y + at, v);
    part.each_other([&](int64_t c) {
      const A xhat = (widen(from[c]) - mean) * rstd;
      a.y[at + c] = narrow<typename N::T>(xhat * p.weight_at(line + c) + p.bias_at(line + c));
    });
  }
}

// ------------------------------------------------------------------------------------------------------- launchers

// A block of rows within warps has 4 KiB of them where a thread has two vectors or more: blocks of kernels that overlap
// start more slowly (overlap.cuh), and small ones would take longer than their rows.
template <class Shape, class N>
Status norm_short(const char *op, const NormForward<N> &a, const RowPlan &plan, void *stream) {
  constexpr bool kWithinWarp = Shape::kSpan == Span::warp;
  using Threads = Threads<kWithinWarp ? (Shape::kVectors > 2 ? 64 : 128) : 512, Shape::kWhole ? 1536 : 1024>;
  int teams = kWithinWarp ? Threads::kBlock / 32 : 1;
  unsigned blocks = grid_size(ceil_div(a.rows, int64_t{teams} * Shape::kRowsPerWarp) * plan.cluster);
  const LaunchShape shape{blocks, 32u * teams * plan.warps, 0, dim3(plan.cluster), true};
  return launch_kernel(op, norm_kernel<Shape, Threads, N>, shape, stream, a);
}

template <class N>
Status norm_any_rows(const char *op, const NormForward<N> &a, const DeviceLimits &device, void *stream) {
  const AnyRowsPlan plan(a.cols, 128);
  const LaunchShape shape = {grid_size(plan.blocks(a.rows, device)), static_cast<unsigned>(plan.threads)};
  return launch_kernel(op, norm_any_kernel<N>, shape, stream, a, plan.row_warps);
}

// Eight times as many blocks as the device holds at once have less to wait for each other: 5 % less time, but more
// where a thread has few rows for a weight and a bias of 16 bits, which it reads element by element.
template <class Shape, class N>
Status norm_shifted(const char *op, const NormForward<N> &a, const RowPlan &plan, const DeviceLimits &device,
                    void *stream) {
  constexpr int kResident = Shape::kVectors == 2 ? 1024 : Shape::kVectors == 3 ? 768 : 512;
  constexpr int kMost = N::kBias && sizeof(typename N::R) == 2 ? 1 : 8;
  using Threads = Threads<Shape::kSpan == Span::warp ? 256 : 512, kResident>;
  constexpr auto kernel = norm_shifted_kernel<Shape, Threads, N>;
  RowGrid grid;
  AOT_TRY((row_grid<kernel, Shape, Threads>(op, plan, device, a.rows, 1, a.rows,
                                            ShiftedPipeline<Shape, N>::kBytesPerWarp, &grid)));
  if (grid.blocks == 0) return norm_any_rows(op, a, device, stream);
  const int64_t rows_at_once = int64_t{grid.blocks} * (grid.threads / 32 / plan.warps) * Shape::kRowsPerWarp;
  for (int times = kMost; times > 1; times /= 2)
    if (2 * times * rows_at_once <= a.rows) {
      grid.blocks *= times;
      break;
    }
  return launch_kernel(op, kernel, grid.launch(plan), stream, a, plan.warps);
}

template <class N>
Status norm_any(const char *op, const NormForward<N> &a, const DeviceLimits &device, void *stream) {
  if constexpr (kMayStage<N>) {
    using T = typename N::T;
    constexpr int kMatrices = N::kAdd ? 2 : 1;
    using OfFloat = StagedRowShapes<StagedRow<T, 8, 8>, StagedRow<T, 16, 8>, StagedRow<T, 32, 8>>;
    using Rows = std::conditional_t<sizeof(T) == 2, StagedRowShapes<StagedRow<T, 8, 8>, StagedRow<T, 16, 8>>, OfFloat>;
    auto staged = [&](auto row) {
      return launch_staged_rows(op, norm_staged_kernel<N, decltype(row)>, row, kMatrices, a.rows, a.cols, stream, a);
    };
    if (a.parameters.lines == 1 && a.rows > 0 && holds_row(Rows(), a.cols))
      return dispatch_staged_rows(Rows(), a.cols, staged);
  }
  if constexpr (kMayShift<N>) {
    constexpr int kBytes = ShiftedPipeline<RowShape<typename N::R, 32, 4, Span::block>, N>::kBytesPerVector;
    const RowPlan plan = shifted_plan<N>(a.cols, a.parameters.lines, kBytes, device, a.x, a.residual, a.y, a.h);
    auto shifted = [&](auto shape) { return norm_shifted<decltype(shape)>(op, a, plan, device, stream); };
    if (plan.lanes > 0) return dispatch_shifted<N>(plan, shifted);
  }
  return norm_any_rows(op, a, device, stream);
}

template <class Shape, class N>
Status norm_long(const char *op, const NormForward<N> &a, const RowPlan &plan, const DeviceLimits &device,
                 void *stream) {
  using Threads = Threads<512, 512>;
  constexpr auto kernel = norm_long_kernel<Shape, Threads, N>;
  RowGrid grid;
  AOT_TRY((row_grid<kernel, Shape, Threads>(op, plan, device, a.rows, 1, a.rows, LongPipeline<Shape, N>::kBytesPerWarp,
                                            &grid)));
  if (grid.blocks == 0) return norm_any(op, a, device, stream);
  return launch_kernel(op, kernel, grid.launch(plan), stream, a);
}

// The plans are those measured fastest on an H200 (docs/lab_notes.md). Eight vectors for each thread need too many
// registers if kCrowded. Rows in registers of a cluster are faster than persistent clusters only if kSplit, two vectors
// for each thread than four if kPairs, and eight than four in rows of more than eight warps if kLongShares. If kWhole,
// rows of whole shares of four have kernels of their own, whose threads need fewer registers.
template <class N>
Status norm_rows(const char *op, const NormForward<N> &a, const DeviceLimits &device, void *stream) {
  using R = typename N::R;
  constexpr bool kCrowded = N::kAdd || N::kRare || (N::kCentred && sizeof(R) == 2);
  constexpr int kVectors = 4, kMost = kCrowded ? 4 : 8;
  constexpr bool kFloat = std::is_same_v<typename N::T, float> && !N::kRare;
  constexpr bool kSplit = N::kCentred ? N::kAdd && N::kPlain : N::kPlain || kFloat;
  constexpr bool kPairs = !N::kCentred && (kFloat || (N::kPlain && !N::kAdd));
  constexpr bool kLongShares = N::kCentred && !N::kAdd && kFloat;
  constexpr bool kWhole = kFloat && !N::kAdd;
  constexpr int kMostSplit = N::kCentred ? 2 : N::kAdd ? 4 : 8;
  using LongShape = RowShape<R, 32, kMost, Span::cluster>;
  const NormParameters<N> &p = a.parameters;
  constexpr int kBytes = LongPipeline<LongShape, N>::kBytesPerVector;
  int64_t vectors = a.cols / kVectorSize<R>;
  RowPlan plan;
  if (a.cols > 0 && a.cols % kVectorSize<R> == 0 && p.can_divide(a.rows, p.lines) &&
      aligned(a.x, a.residual, static_cast<const char *>(p.weight), static_cast<const char *>(p.bias), a.y, a.h)) {
    if constexpr (!N::kRare)
      plan = first_that_holds(vectors, {{8, 1}, {8, 2}, {16, 2}, {32, 2}, {32, 3}, {32, 4}}, 0, device);
    if (kPairs && plan.lanes == 0) plan = first_that_holds(vectors, {{32, 2, N::kAdd ? 16 : 8}}, 0, device);
    if constexpr (kWhole)
      if (plan.lanes == 0 && vectors % (32 * kVectors) == 0) {
        plan = first_that_holds(vectors, {{32, kVectors, 16}}, 0, device);
        if (plan.lanes > 0) return norm_short<RowShape<R, 32, kVectors, Span::block, true>>(op, a, plan, stream);
      }
    if (plan.lanes == 0)
      plan = first_that_holds(vectors, {{32, kVectors, kLongShares ? 8 : 16}, {32, kMost, 16}}, 0, device);
    if constexpr (kSplit)
      if (plan.lanes == 0) {
        plan = first_that_holds(
            vectors, {{32, kMost, 16, 2}, {32, kMost, 16, std::min(4, kMostSplit)}, {32, kMost, 16, kMostSplit}}, 0,
            device);
        if (plan.lanes > 0) return norm_short<RowShape<R, 32, kMost, Span::cluster>>(op, a, plan, stream);
      }
    if (plan.lanes == 0 && p.lines == 1)
      plan = first_that_holds(vectors,
                              {{32, kMost, 8, 2},
                               {32, kMost, 8, 4},
                               {32, kMost, 8, 8},
                               {32, kMost, 16, 8},
                               {32, kMost, 8, 16},
                               {32, kMost, 16, 16}},
                              kBytes, device);
  }
  if (plan.lanes == 0) return norm_any(op, a, device, stream);
  if (plan.cluster > 1) return norm_long<LongShape>(op, a, plan, device, stream);
  auto run = [&](auto shape) { return norm_short<decltype(shape)>(op, a, plan, stream); };
  if constexpr (!N::kRare)
    if (plan.warps == 1)
      return dispatch_shape<RowShape<R, 8, 1, Span::warp>, RowShape<R, 8, 2, Span::warp>,
                            RowShape<R, 16, 2, Span::warp>, RowShape<R, 32, 2, Span::warp>,
                            RowShape<R, 32, 3, Span::warp>, RowShape<R, 32, 4, Span::warp>>(plan, run);
  if constexpr (kPairs)
    if (plan.vectors == 2) return run(RowShape<R, 32, 2, Span::block>());
  if (plan.vectors == kVectors) return run(RowShape<R, 32, kVectors, Span::block>());
  return run(RowShape<R, 32, kMost, Span::block>());
}

template <bool kCentred>
Status norm_stats(const char *op, const Tensor &x, void *stats, int64_t rows, int64_t cols, double eps, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return dispatch(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using N = NormTypes<kCentred, false, T, T, sizeof(T) == 2>;
    using A = typename N::A;
    NormForward<N> a{x.as<const T>(),    {}, {{}, {}, A(0), 1, false}, {}, {}, static_cast<A *>(stats), rows, cols,
                     static_cast<A>(eps)};
    return norm_rows(op, a, device, stream);
  });
}

template <class Op>
Status norm_cuda(const Op &op, const Tensor *in, const Tensor *out, void *stream) {
  DeviceLimits device;
  AOT_TRY(device_limits(Op::name, &device));
  const Tensor &x = in[Op::kX], &residual = slot<Op::kResidual>(in);
  return dispatch_norm(op, x.dtype, residual.dtype, in[Op::kWeight], in[Op::kBias], [&](auto types) {
    using N = typename decltype(types)::type;
    NormForward<N> a{x.as<const typename N::X>(),
                     residual.as<const typename N::R>(),
                     norm_parameters<N>(op, in[Op::kWeight], in[Op::kBias]),
                     out[Op::kY].template as<typename N::T>(),
                     slot<Op::kH>(out).template as<typename N::R>(),
                     out[Op::kStatsOut].template as<typename N::A>(),
                     op.rows(x),
                     op.cols(),
                     static_cast<typename N::A>(op.eps(x.dtype))};
    return norm_rows(Op::name, a, device, stream);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
