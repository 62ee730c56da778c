// The kernels of cross_entropy.cu, of which linear_cross_entropy.cu compiles those of padded rows for itself.
#pragma once
#include "cross_entropy_rows.cuh"
#include "cuda/overlap.cuh"
#include "cuda/rows.cuh"
#include "cuda/softmax.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// --------------------------------------------------------------------------------------------------------- formula

template <typename A>
struct Smoothing {
  A total;      // label_smoothing
  A per_class;  // label_smoothing / cols
  A one_over_cols;
};

template <typename A>
__device__ inline A nan() {
  return static_cast<A>(__int_as_float(0x7fffffff));
}

template <typename A>
__device__ inline A row_loss(const Exponentials<A> &row, A at_target, const Class &c, const Smoothing<A> &smoothing) {
  if (c.ignored) return A(-0.);  // which marks it for cross_entropy_loss_kernel
  if (!c.in_range) return nan<A>();
  A log_sum = logarithm(row.sum), loss = log_sum - (at_target - row.max);
  if (smoothing.total == 0) return loss;
  return (1 - smoothing.total) * loss + smoothing.total * (log_sum - row.shifted_sum * smoothing.one_over_cols);
}

// ---------------------------------------------------------------------------------------------------------- extras

// exp() for numbers that have more than 16 bits, as capped logits do, for results of T.
template <typename T>
using CappedAs = std::conditional_t<sizeof(T) == 2, __half, T>;

// softcap * tanh(x / softcap), or x for a softcap of 0. In 16 bits it errs by 2e-7 softcap: an exponential of it, by as
// much of itself.
template <typename T, typename A>
class Softcap {
 public:
  __device__ explicit Softcap(A cap) : cap_(cap), inverse_(cap == 0 ? A(0) : 1 / cap) {}
  __device__ bool caps() const { return cap_ != 0; }
  __device__ A operator()(A x) const { return caps() ? cap_ * hyperbolic_tangent(x * inverse_) : x; }
  // The derivative, from the value.
  __device__ A slope(A capped) const {
    if (!caps()) return 1;
    const A t = capped * inverse_;
    return (1 - t) * (1 + t);
  }

 private:
  __device__ static A hyperbolic_tangent(A x) {
    if constexpr (sizeof(T) == 2) return 1 - 2 * fast_reciprocal(1 + fast_exp2(x * static_cast<float>(2 * kLog2E)));
    else if constexpr (sizeof(T) == 4) return tanhf(x);
    else return tanh(x);
  }
  A cap_, inverse_;
};

// The greatest of some numbers, or a NaN, and the first column that has it.
template <typename A>
struct Best {
  static constexpr int kNone = 0x7fffffff;
  A value = kMinusInfinity;
  int column = kNone;

  __device__ void add(const Best &other) {
    const bool is_nan = value != value, other_is_nan = other.value != other.value;
    const bool same = value == other.value || (is_nan && other_is_nan);
    const bool greater = other_is_nan ? !is_nan : other.value > value;
    if (greater || (same && other.column < column)) *this = other;
  }
  template <int kLanes>
  __device__ void add_lanes() {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      add({__shfl_xor_sync(~0u, value, offset), __shfl_xor_sync(~0u, column, offset)});
  }
  // The best of those that the warps of a row have published.
  __device__ static Best of_warps(const Best *all, int warps) {
    Best best;
#pragma unroll 1
    for (int w = lane_index(); w < warps; w += 32) best.add(all[w]);
    best.template add_lanes<32>();
    return best;
  }
};

// The first column, among the row's in v and the lanes of a warp, whose element is() holds for; Best::kNone if there is
// none. x: where v is from.
template <class Row, typename T, int kVectors, class F, typename A = Accumulate<T>>
__device__ inline int first_column(const Vector<T> (&v)[kVectors], const Row &part, const T *x, int64_t cols, F is) {
  using Shape = typename Row::Shape;
  static_assert(Row::kEnds, "columns count from the first vector");
  constexpr int kNone = Best<A>::kNone;
  int found = kNone;
#pragma unroll
  for (int i = Shape::kVectors - 1; i >= 0; --i) {
    auto a = widen(v[i]);
#pragma unroll
    for (int k = Shape::kSize - 1; k >= 0; --k)
      if (is(a[k])) found = i * Shape::kLanes * Shape::kSize + k;
  }
  const int head = static_cast<int>(min(misaligned_elements(x + part.row() * cols, sizeof(T)), cols));
  if (found != kNone) found += head + part.column(0);
  if (part.has_end() && is(part.end())) {
    const int first = part.column(0) / Shape::kSize, tail = static_cast<int>(cols - head) % Shape::kSize;
    found = min(found, first < head ? first : static_cast<int>(cols) - tail + first - Shape::kSize);
  }
#pragma unroll
  for (int offset = Shape::kLanes / 2; offset > 0; offset /= 2) found = min(found, __shfl_xor_sync(~0u, found, offset));
  return found;
}

// Adds one element to a thread's sums, of which shifted_sum and count are weighted.
template <typename E, typename A>
__device__ inline void add_weighted(Exponentials<A> &s, A x, A weight) {
  if (x > s.max) {
    s.sum *= ShiftedExp<E, A>(x).rescale(s.max);
    if (s.max != A(kMinusInfinity)) s.shifted_sum += s.count * (s.max - x);
    s.max = x;
  }
  s.sum += ShiftedExp<E, A>(s.base())(x);
  s.shifted_sum += weight * (x - s.base());
  s.count += weight;
}

// Caps the elements that have more than 16 bits. Those of 16 bits, which that would round, are capped in each pass.
template <class Row, typename T, int kVectors, typename A>
__device__ inline void cap_wide(Vector<T> (&v)[kVectors], const Row &part, const Softcap<T, A> &cap) {
  if constexpr (sizeof(T) > 2) {
    if (!cap.caps()) return;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!part.holds(i)) continue;  // stays -inf
      auto a = widen(v[i]);
#pragma unroll
      for (int k = 0; k < Row::Shape::kSize; ++k) a[k] = cap(a[k]);
      v[i] = narrow(a);
    }
  }
}

// The sums of the capped elements in the lanes of a warp, which leave v as it is. most: the largest, before the cap;
// end: part's, capped; shifts: whether shifted_sum is wanted.
template <class Row, typename T, int kVectors, typename A>
__device__ inline Exponentials<A> capped_exponentials(Vector<T> (&v)[kVectors], const Row &part,
                                                      const Softcap<T, A> &cap, A most, A end, bool shifts) {
  using Shape = typename Row::Shape;
  Exponentials<A> mine = Exponentials<A>::none();
  mine.max = cap(most);
  const A base = mine.base();
  ShiftedExp<CappedAs<T>, A> exponential(base);
  auto add = [&](auto kind) {
    constexpr bool kGeneral = decltype(kind)::value;
#pragma unroll
    for (int i = 0; i < Shape::kVectors; ++i) {
      auto x = widen(v[i]);
      A sum = 0, shifted_sum = 0;
#pragma unroll
      for (int k = 0; k < Shape::kSize; ++k) {
        const A capped = kGeneral && sizeof(T) == 2 ? cap(x[k]) : x[k];
        sum += exponential(capped);
        if (kGeneral) shifted_sum += capped - base;
      }
      if (!kGeneral) mine.sum += sum;  // past the row's end it is that of -inf, 0
      else if (part.holds(i)) mine.sum += sum, mine.shifted_sum += shifted_sum;
      if constexpr (sizeof(T) == 2) keep_packed(v[i], part.opaque_zero());
    }
  };
  // Few calls have a cap or smoothing. In 16 bits others have fewer instructions.
  if (sizeof(T) > 2 || shifts || cap.caps()) add(std::true_type());
  else add(std::false_type());
  if (part.has_end()) mine.sum += exponential(end), mine.shifted_sum += end - base;
  mine.sum = sum_lanes<Shape::kLanes>(mine.sum);
  if (shifts) mine.shifted_sum = sum_lanes<Shape::kLanes>(mine.shifted_sum);
  return mine;
}

// The loss of a row and the coefficients of its derivative: of_p * p - off_target * w - on_target * onehot.
template <typename A>
struct RowWithExtras {
  A lse, loss, of_p, off_target, on_target;
  bool zero;  // the derivative, also where p is NaN

  // row: with the sum of w * (x - max), and in `count` that of w. factor: of the derivative. dlse: 0 if there is none.
  __device__ RowWithExtras(const Exponentials<A> &row, A at_target, const Class &c, const Smoothing<A> &smoothing,
                           A weight, A z_loss, A factor, bool has_dlse, A dlse) {
    const A log_sum = logarithm(row.sum), on = (1 - smoothing.total) * weight;
    lse = row.max + log_sum;
    loss = A(-0.);  // as row_loss()
    of_p = dlse, off_target = 0, on_target = 0;
    zero = c.ignored && !has_dlse;
    if (c.ignored) return;
    loss = on * (log_sum - (at_target - row.max));
    // No term of the sum of -w log(p) is negative: an infinite weight makes it infinite. Its differences are NaN then.
    const A terms = row.count - row.count == 0 ? row.count * log_sum - row.shifted_sum : row.count;
    if (smoothing.total != 0) loss += smoothing.per_class * terms;
    if (z_loss != 0) loss += z_loss * lse * lse;
    if (!c.in_range) loss = factor = nan<A>();
    of_p += factor * (on + smoothing.per_class * row.count + 2 * z_loss * lse);
    off_target = factor * smoothing.per_class, on_target = factor * on;
  }
};

// --------------------------------------------------------------------------------------------------------- kernels

// Whether a row's loads are under way before its class is awaited, not after it. Which is faster was measured for rows
// of float32 and bfloat16.
template <class Shape, bool kSlope>
constexpr bool kRowFirst =
    Shape::kSpan == Span::block     ? sizeof(typename Shape::T) <= (kSlope ? 4 : 2)
    : Shape::kSpan == Span::cluster ? sizeof(typename Shape::T) > 2 || Shape::kCluster < kMaxCluster
                                    : true;

// Whether a row's loads are kept by the second-level cache: where as much is written. Padded rows are a product's, and
// are in that cache. In 16 bits blocks of a cluster took 0.6 % more.
template <class Shape, bool kSlope, bool kPadded>
constexpr bool kKeepsRow = kSlope && !kPadded && (Shape::kSpan != Span::cluster || sizeof(typename Shape::T) > 2);

// Row: a RegisterRow or an UnalignedRow. kSmoothing: with label smoothing; kSlope: results.slope may be given. It
// overlaps the end of the kernel that counts, if there is one.
template <class Row, bool kSmoothing, bool kSlope, bool kPadded, class Shape = typename Row::Shape,
          typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    cross_entropy_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale, int64_t rows,
                         int64_t cols, Smoothing<A> smoothing) {
  launch_next();
  if constexpr (kPadded) results.skip_padding(RegisterRow<Shape>(cols).row(), x);
  Row part = row_of<Row>(x, cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.template load<kKeepsRow<Shape, kSlope, kPadded>>(x, present, kMinusInfinity, v);
  // The compiler moves no load over this.
  if constexpr (kRowFirst<Shape, kSlope>) wait_for_kernel_before();
  Class c(present ? targets[part.row()] : targets.ignore_index, targets.ignore_index, cols);
  bool mine = present && part.has(c.column());  // for one thread of the row
  A at_target = mine ? widen(x[part.row() * cols + c.column()]) : A(0);
  if constexpr (!kRowFirst<Shape, kSlope>) wait_for_kernel_before();
  typename Scale<T, A>::Quotient quotient = {1, 1};
  if (kSlope && results.slope) quotient = scale.load(part.row(), present);

  RowExchange<Shape, Exponentials<A>> exchange;
  auto [row, to_row] = row_exponentials<kSmoothing>(v, part, exchange);
  // The terms of a loss with smoothing have no registers later.
  if (kSmoothing && mine) results.write_loss(part.row(), row_loss(row, at_target, c, smoothing));
  if (kSlope && results.slope) {
    if constexpr (kPadded) results.clear_padding(part.row(), present, part.column(0) / Shape::kSize, cols);
    if (c.ignored) {
      if constexpr (Row::kEnds) part.store_end(results.slope, present, 0);
      part.store(results.slope, present, [&](int, int) { return A(0); });
    } else {
      const A factor = c.in_range ? quotient.value() : nan<A>();
      Probability<T, A> p(row, to_row, factor);
      A off_target = smoothing.per_class * factor, on_target = (1 - smoothing.total) * factor;
      part.store(results.slope, present, [&](int i, int k) {
        A slope = p.of_exponential(widen(v[i])[k]);
        return kSmoothing ? slope - off_target : slope;
      });
      if constexpr (Row::kEnds) part.store_end(results.slope, present, p.of(part.end()) - off_target);
      if (mine) results.slope[part.row() * cols + c.column()] = narrow<T>(p.of(at_target) - off_target - on_target);
    }
  }
  if (!kSmoothing && mine) results.write_loss(part.row(), row_loss(row, at_target, c, smoothing));
}

// The loss alone of rows within a warp, of 16 or 32 bits, without smoothing. Such rows are many, and what each needs
// beside its elements takes as long as these: its class and the logit there are awaited behind its sums. ptxas leaves
// the inline loads in this order.
template <class Shape, typename T = typename Shape::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    cross_entropy_loss_alone_kernel(const T *x, Targets targets, Results<T, A> results, int64_t rows, int64_t cols) {
  launch_next();
  const RegisterRow<Shape> part(cols);
  const bool present = part.present(rows);
  const int64_t first = part.row() * cols + part.column(0);
  Vector<T> v[Shape::kVectors];
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    v[i] = filled<T>(kMinusInfinity);
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(v[i].word[0]), "+r"(v[i].word[1]), "+r"(v[i].word[2]), "+r"(v[i].word[3])
                 : "l"(x + first + i * Shape::kLanes * Shape::kSize), "r"(static_cast<int>(present && part.holds(i)))
                 : "memory");
  }
  int64_t target = targets.ignore_index;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %2, 0;\nsetp.ne.b32 q, %3, 0;\n@p ld.global.s64 %0, [%1];\n"
      "@q ld.global.s32 %0, [%1];\n}"
      : "+l"(target)
      : "l"(static_cast<const char *>(targets.data) + part.row() * (targets.wide ? 8 : 4)),
        "r"(static_cast<int>(present && targets.wide)), "r"(static_cast<int>(present && !targets.wide))
      : "memory");

  NoExchange none;
  const Exponentials<A> row = row_exponentials<false>(v, part, none).row;
  const Class c(target, targets.ignore_index, cols);
  const int at = static_cast<int>(c.column()) - part.column(0);
  if (!present || !part.has(c.column())) return;  // not the row's one thread
  A loss = logarithm(row.sum) - (widen(x[first + at]) - row.max);
  if (!c.in_range) loss = nan<A>();
  if (c.ignored) loss = A(-0.);  // as row_loss(), without its branches
  results.write_loss(part.row(), loss);
}

// cross_entropy_kernel with extras, but not with weights and label smoothing. Row: an UnalignedRow, which may have
// padding.
template <class Row, class Shape = typename Row::Shape, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    cross_entropy_extra_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale,
                               Extras<T, A> extras, int64_t rows, int64_t cols, Smoothing<A> smoothing) {
  launch_next();
  results.skip_padding(RegisterRow<Shape>(cols).row(), x);
  Row part = row_of<Row>(x, cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.load(x, present, kMinusInfinity, v);
  wait_for_kernel_before();  // the row's loads are under way: the compiler moves none over this
  Class c(present ? targets[part.row()] : targets.ignore_index, targets.ignore_index, cols);
  const bool has_dlse = extras.dlse;
  const A dlse = has_dlse && present ? extras.dlse[part.row()] : A(0);
  typename Scale<T, A>::Quotient quotient = {1, 1};
  if (results.slope) quotient = scale.load(part.row(), present);
  bool mine = present && part.has(c.column());
  A at_target = mine ? widen(x[part.row() * cols + c.column()]) : A(0);
  const A weight = extras.weight_of(c);

  const Softcap<T, A> cap(extras.softcap);
  const A most = max_lanes<Shape::kLanes>(max(max_element(v), part.end()));
  Best<A> best;
  if (extras.predictions.data) best = {most, first_column(v, part, x, cols, [=](A a) { return a == most; })};
  if constexpr (sizeof(T) == 2)
#pragma unroll
    for (auto &vector : v) keep_packed(vector, part.opaque_zero());
  cap_wide(v, part, cap);
  const A end = part.has_end() ? cap(part.end()) : A(0);
  Exponentials<A> row = capped_exponentials(v, part, cap, most, end, smoothing.total != 0);
  if (extras.predictions.data) {
    if (__any_sync(~0u, row.sum != row.sum)) {  // a NaN may be among them
      const int column = first_column(v, part, x, cols, [](A a) { return a != a; });
      if (column != Best<A>::kNone) best = {nan<A>(), column};
    }
    if constexpr (Shape::kSpan != Span::warp) {
      RowExchange<Shape, Best<A>> exchange;
      best = Best<A>::of_warps(exchange.all(best), exchange.warps());
    }
    if (mine) extras.predictions.write(part.row(), best.column == Best<A>::kNone ? 0 : best.column);
  }
  if constexpr (Shape::kSpan != Span::warp) {
    RowExchange<Shape, Exponentials<A>> exchange;
    row.count = part.share(exchange.warp());
    row = combine_warps<CappedAs<T>, true>(exchange.all(row), exchange.warps());
  }
  row.count = cols;
  at_target = cap(at_target);
  const RowWithExtras<A> with(row, at_target, c, smoothing, weight, extras.z_loss, quotient.value(), has_dlse, dlse);
  if (mine) {
    results.write_loss(part.row(), with.loss);
    if (extras.lse) extras.lse[part.row()] = with.lse;
  }
  if (!results.slope) return;
  results.clear_padding(part.row(), present, part.column(0) / Shape::kSize, cols);

  if (with.zero) {
    part.store_end(results.slope, present, 0);
    return part.store(results.slope, present, [&](int, int) { return A(0); });
  }
  Probability<CappedAs<T>, A> p(row, 1, with.of_p);
  auto slope = [&](A capped, A on_target) { return (p.of(capped) - with.off_target - on_target) * cap.slope(capped); };
  auto store = [&](auto capped) {
    part.store(results.slope, present, [&](int i, int k) { return slope(capped(widen(v[i])[k]), 0); });
  };
  if (sizeof(T) == 2 && cap.caps()) store(cap);
  else store([](A x) { return x; });
  part.store_end(results.slope, present, slope(end, 0));
  if (mine) results.slope[part.row() * cols + c.column()] = narrow<T>(slope(at_target, with.on_target));
}

// The loss alone of long rows: a block for each.
constexpr int kStreamThreads = 256, kStreamBlocks = 5;  // per multiprocessor

template <typename T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    cross_entropy_stream_kernel(const T *x, Targets targets, Results<T, A> results, int64_t rows, int64_t cols,
                                Smoothing<A> smoothing) {
  launch_next();
  Exchange<Span::block, Exponentials<A>> exchange;
  int64_t row = blockIdx.x;
  auto s = streamed_exponentials<false>(x + row * cols, cols, exchange);
  if (threadIdx.x != 0) return;
  Class c(targets[row], targets.ignore_index, cols);
  results.write_loss(row, row_loss(s, widen(x[row * cols + c.column()]), c, smoothing));
}

// Whether that of slope * scale may overlap the end of the one before: small blocks would start more slowly
// (overlap.cuh).
template <class Shape>
constexpr bool kScaleOverlaps = Shape::kSpan != Span::warp || Shape::kVectors > 1;

template <class Row, class Shape = typename Row::Shape, typename T = typename Row::T, typename A = Accumulate<T>>
__global__ void __launch_bounds__(Shape::kThreads)
    cross_entropy_scale_kernel(const T *slope, T *dx, Targets targets, Scale<T, A> scale, int64_t rows, int64_t cols) {
  if constexpr (kScaleOverlaps<Shape>) wait_for_kernel_before(), launch_next();
  Row part = row_of<Row>(slope, cols);
  bool present = part.present(rows);
  Vector<T> v[Shape::kVectors];
  part.load(slope, present, 0, v);
  A factor = scale.of(part.row(), present);
  // 0 also if dy is not finite or the count is 0
  const bool ignored = present && targets[part.row()] == targets.ignore_index;
  part.store(dx, present, [&](int i, int k) { return ignored ? A(0) : widen(v[i])[k] * factor; });
  if constexpr (Row::kEnds) part.store_end(dx, present, ignored ? A(0) : part.end() * factor);
}

// dx = slope * factor over slope itself. Vectors pass the ends of rows, so all are aligned, however long a row is. The
// blocks are few and each has many vectors: with a factor of 1, where nothing is left to do, they are over in
// microseconds.
constexpr int kInPlaceThreads = 256, kInPlaceBlocks = 4, kInPlaceVectors = 8;
constexpr int64_t kInPlaceWaves = 4;

template <typename T>
constexpr int64_t kInPlacePiece = int64_t{kInPlaceThreads} * kInPlaceVectors * kVectorSize<T>;

template <typename T, typename A>
__global__ void __launch_bounds__(kInPlaceThreads, kInPlaceBlocks)
    cross_entropy_scale_in_place_kernel(T *dx, Targets targets, Scale<T, A> scale, int64_t size, int64_t cols) {
  constexpr int kSize = kVectorSize<T>;
  if (!scale.each_row && scale.of(0, true) == A(1)) return;
  auto factor_of = [&](int64_t row) {
    // an ignored row is 0 as it is, and stays so also if dy is not finite
    return targets[row] == targets.ignore_index ? A(1) : scale.of(row, true);
  };
  auto scale_element = [&](int64_t i) { dx[i] = narrow<T>(widen(dx[i]) * factor_of(i / cols)); };

  const int64_t head = min(misaligned_elements(dx, sizeof(T)), size), end = size - (size - head) % kSize;
  const int64_t thread = int64_t{blockIdx.x} * kInPlacePiece<T> + threadIdx.x * kSize;
  for (int64_t first = head + thread; first < end; first += gridDim.x * kInPlacePiece<T>) {
    Vector<T> v[kInPlaceVectors];
#pragma unroll
    for (int j = 0; j < kInPlaceVectors; ++j) {
      const int64_t i = first + j * kInPlaceThreads * kSize;
      if (i < end) v[j] = load_once(dx + i);
    }
    int64_t row_end = 0;
    A factor = 1;
#pragma unroll
    for (int j = 0; j < kInPlaceVectors; ++j) {
      const int64_t i = first + j * kInPlaceThreads * kSize;
      if (i >= end) continue;
      if (i >= row_end) {
        const int64_t row = i / cols;
        row_end = (row + 1) * cols, factor = factor_of(row);
      }
      if (i + kSize > row_end) {
#pragma unroll 1
        for (int k = 0; k < kSize; ++k) scale_element(i + k);
        continue;
      }
      auto x = widen(v[j]);
#pragma unroll
      for (int k = 0; k < kSize; ++k) x[k] *= factor;
      store(dx + i, narrow(x));
    }
  }
  if (blockIdx.x > 0) return;
  if (threadIdx.x < head) scale_element(threadIdx.x);
  if (end + threadIdx.x < size) scale_element(end + threadIdx.x);
}

// Rows of any size and alignment: a block for each.
template <typename T, typename A, bool kPadded>
__global__ void __launch_bounds__(kAnyRowThreads)
    cross_entropy_any_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale, int64_t rows,
                             int64_t cols, Smoothing<A> smoothing) {
  Exchange<Span::block, Exponentials<A>> exchange;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t begin = row * (kPadded ? cols + results.padding : cols);
    const T *from = x + begin;
    Class c(targets[row], targets.ignore_index, cols);
    A at_target = threadIdx.x == 0 && cols > 0 ? widen(from[c.column()]) : A(0);  // slope may be x: it is read first
    Exponentials<A> s = any_row_exponentials(from, cols, exchange);
    if (threadIdx.x == 0) results.write_loss(row, row_loss(s, at_target, c, smoothing));
    if (!results.slope) continue;
    if (kPadded && threadIdx.x < results.padding) results.slope[begin + cols + threadIdx.x] = narrow<T>(0);
    Probability<T, A> probability(s);
    A factor = scale.of(row, true);
    if (!c.in_range) factor = nan<A>();
    map_row(from, results.slope + begin, cols, [&](int64_t col, A x) {
      A p = probability.of(x) - smoothing.per_class - (col == c.target ? 1 - smoothing.total : A(0));
      return c.ignored ? A(0) : p * factor;
    });
  }
}

// cross_entropy_any_kernel with extras.
template <typename T, typename A>
__global__ void __launch_bounds__(kAnyRowThreads)
    cross_entropy_any_extra_kernel(const T *x, Targets targets, Results<T, A> results, Scale<T, A> scale,
                                   Extras<T, A> extras, int64_t rows, int64_t cols, Smoothing<A> smoothing) {
  using E = CappedAs<T>;
  Exchange<Span::block, Exponentials<A>> exchange;
  Exchange<Span::block, Best<A>> best_exchange;
  const Softcap<T, A> cap(extras.softcap);
  const bool weighs_all = extras.weight.data && smoothing.total != 0, has_dlse = extras.dlse;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t begin = row * (cols + results.padding);
    const T *from = x + begin;
    Class c(targets[row], targets.ignore_index, cols);
    A at_target = threadIdx.x == 0 && cols > 0 ? cap(widen(from[c.column()])) : A(0);
    Exponentials<A> s = Exponentials<A>::none();
    Best<A> best;
    for_each_in_row(from, cols, [&](int64_t col, A x) {
      if (extras.predictions.data) best.add({x, static_cast<int>(col)});
      add_weighted<E>(s, cap(x), weighs_all ? extras.weight.read(col) : A(1));
    });
    s = combine_warps<E, true>(exchange.all(combine_lanes<E, true>(s)), exchange.warps());
    if (extras.predictions.data) {
      best.template add_lanes<32>();
      best = Best<A>::of_warps(best_exchange.all(best), best_exchange.warps());
    }
    const A factor = results.slope ? scale.of(row, true) : A(1);
    const RowWithExtras<A> with(s, at_target, c, smoothing, extras.weight_of(c), extras.z_loss, factor, has_dlse,
                                has_dlse ? extras.dlse[row] : A(0));
    if (threadIdx.x == 0) {
      results.write_loss(row, with.loss);
      if (extras.lse) extras.lse[row] = with.lse;
      if (extras.predictions.data) extras.predictions.write(row, best.column == Best<A>::kNone ? 0 : best.column);
    }
    if (!results.slope) continue;
    if (threadIdx.x < results.padding) results.slope[begin + cols + threadIdx.x] = narrow<T>(0);
    Probability<E, A> probability(s, 1, with.of_p);
    map_row(from, results.slope + begin, cols, [&](int64_t col, A x) {
      const A capped = cap(x), off = with.off_target * (weighs_all ? extras.weight.read(col) : A(1));
      const A slope = probability.of(capped) - off - (col == c.target ? with.on_target : A(0));
      return with.zero ? A(0) : slope * cap.slope(capped);
    });
  }
}

template <typename T, typename A>
__global__ void __launch_bounds__(kAnyRowThreads)
    cross_entropy_scale_any_kernel(const T *slope, T *dx, Targets targets, Scale<T, A> scale, int64_t rows,
                                   int64_t cols) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    A factor = scale.of(row, true);
    if (targets[row] == targets.ignore_index) factor = 0;
    map_row(slope + row * cols, dx + row * cols, cols, [&](int64_t, A slope) { return slope * factor; });
  }
}

// ------------------------------------------------------------------------------------------------- sums over the rows

// By one block, or by one cluster of kSumClusterThreads, however many blocks it has: the order of the additions depends
// on the number of rows alone.
constexpr int kSumThreads = 1024, kSumClusterThreads = kMaxCluster * kSumThreads, kSumUnroll = 8;

// In a cluster that counts, threads have twice as many vectors in flight, which the registers of larger blocks do not
// hold. Counts are exact in any order.
constexpr int kCountClusterThreads = kSumThreads / 2;

// Counts the rows that are not ignored.
template <Span kSpan, typename A>
__global__ void __launch_bounds__(kSpan == Span::cluster ? kCountClusterThreads : kSumThreads)
    cross_entropy_count_kernel(Targets targets, A *count, int64_t rows) {
  constexpr int kUnroll = kSpan == Span::cluster ? 2 * kSumUnroll : kSumUnroll;
  wait_for_kernel_before();  // before launch_next(): the next kernel reads, before it waits, what older ones wrote
  launch_next();
  int64_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  Exchange<kSpan, Sums<1, int64_t>> exchange;
  Sums<1, int64_t> all = {};
  auto add = [&](int64_t target) { all.value[0] += target == targets.ignore_index ? 0 : 1; };
  // Sixteen bytes at a time: the kernel of rows waits, and few multiprocessors bring as much as is in flight.
  const int64_t each = targets.wide ? 2 : 4;
  const int64_t vectors = reinterpret_cast<uintptr_t>(targets.data) % 16 == 0 ? rows / each : 0;
  for (int64_t i = first; i < vectors; i += kUnroll * step) {
    Vector<float> v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j)
      if (i + j * step < vectors) v[j] = load_once(static_cast<const float *>(targets.data) + (i + j * step) * 4);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * step >= vectors) continue;
      const uint32_t (&w)[4] = v[j].word;
      if (targets.wide) {
        add(static_cast<int64_t>(uint64_t{w[1]} << 32 | w[0])), add(static_cast<int64_t>(uint64_t{w[3]} << 32 | w[2]));
      } else {
#pragma unroll
        for (uint32_t word : w) add(static_cast<int32_t>(word));
      }
    }
  }
  for (int64_t row = vectors * each + first; row < rows; row += step) add(targets[row]);
  all = sum_row(all, exchange);
  if (first == 0) *count = static_cast<A>(all.value[0]);
}

// Adds up the weights of the classes of the rows that are not ignored.
template <Span kSpan, typename T, typename A>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_weight_kernel(Targets targets, Loss<T, A> weight, A *sum, int64_t rows, int64_t cols) {
  wait_for_kernel_before();  // before launch_next(): the next kernel reads, before it waits, what older ones wrote
  launch_next();
  int64_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  Exchange<kSpan, Sums<1, A>> exchange;
  Sums<1, A> all = {};
  for (int64_t row = first; row < rows; row += step) {
    const Class c(targets[row], targets.ignore_index, cols);
    if (c.in_range && !c.ignored) all.value[0] += weight.read(c.target);
  }
  all = sum_row(all, exchange);
  if (first == 0) *sum = all.value[0];
}

// The sum of the rows' losses, or their mean: divided by *weights, or, if that is null, by the number of those that are
// not ignored. The loss of an ignored row is -0; without weights that of no other is.
__device__ inline bool is_ignored(float loss) { return __float_as_uint(loss) == 0x80000000u; }
__device__ inline bool is_ignored(double loss) { return __double_as_longlong(loss) == (1ll << 63); }

template <Span kSpan, typename T, typename A>
__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_loss_kernel(const A *losses, Loss<T> loss, int64_t rows, bool mean, const A *weights) {
  int64_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  Exchange<kSpan, Sums<2, A>> exchange;
  wait_for_kernel_before();
  launch_next();
  Sums<2, A> all = {};
  auto add = [&](A loss) {
    all.value[0] += loss;
    all.value[1] += is_ignored(loss) ? 0 : 1;
  };
  int64_t vectors = misaligned_elements(losses, sizeof(A)) ? 0 : rows / kVectorSize<A>;
  for (int64_t i = first; i < vectors; i += kSumUnroll * step) {
    Vector<A> v[kSumUnroll];
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j)
      if (i + j * step < vectors) v[j] = load_once(losses + (i + j * step) * kVectorSize<A>);
#pragma unroll
    for (int j = 0; j < kSumUnroll; ++j) {
      if (i + j * step >= vectors) continue;
      auto l = widen(v[j]);
#pragma unroll
      for (int k = 0; k < kVectorSize<A>; ++k) add(l[k]);
    }
  }
  for (int64_t row = vectors * kVectorSize<A> + first; row < rows; row += step) add(losses[row]);
  all = sum_row(all, exchange);
  if (first == 0) loss.write(0, mean ? all.value[0] / (weights ? *weights : all.value[1]) : all.value[0]);
}

// ------------------------------------------------------------------------------------------------------- launchers

// An UnalignedRow.
template <typename T>
constexpr auto unaligned_shapes() {
  if constexpr (sizeof(T) == 2)
    return RegisterRowShapes<WarpRow<T, 16, 2>, WarpRow<T, 32, 4>, BlockRow<T, 8>, ClusterRow<T, 13, 256, 768, 2>,
                             ClusterRow<T, 8, 256>, ClusterRow<T, 8>>();
  else if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<WarpRow<T, 8, 4>, WarpRow<T, 32, 4>, BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256>,
                             ClusterRow<T, 16, 256, 512>>();
  else return RegisterRowShapes<WarpRow<T, 32, 4>, BlockRow<T, 8, 512, 512>>();
}

// An UnalignedRow with extras.
template <typename T>
constexpr auto extra_shapes() {
  if constexpr (sizeof(T) == 4)
    return RegisterRowShapes<WarpRow<T, 8, 4>, WarpRow<T, 16, 4>, WarpRow<T, 32, 4>, WarpRow<T, 32, 8, 896>,
                             BlockRow<T, 8, 1024>, ClusterRow<T, 8, 256>, ClusterRow<T, 16, 256, 512>>();
  else return unaligned_shapes<T>();
}

template <typename T, typename A = Accumulate<T>>
Smoothing<A> smoothing_of(const CrossEntropyAttrs &attrs, int64_t cols) {
  return {A(attrs.label_smoothing), A(attrs.label_smoothing / cols), A(1. / cols)};
}

// cross_entropy_rows() of any alignment, without extras. kPadded: whether there is padding between rows.
template <bool kPadded, typename T, typename A = Accumulate<T>>
Status unaligned_rows(const char *op, const CrossEntropyAttrs &attrs, const Tensor &x, const Targets &targets,
                      const Results<T> &results, const Scale<T> &scale, void *stream, bool after_count) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  int64_t rows = attrs.rows(x), cols = attrs.cols(x);
  if (rows == 0) return kOk;
  const T *from = x.as<const T>();
  const Smoothing<A> smoothing = smoothing_of<T>(attrs, cols);
  auto any = [&] {
    return launch_rows(op, cross_entropy_any_kernel<T, A, kPadded>, rows, cols, stream, from, targets, results, scale,
                       rows, cols, smoothing);
  };
  auto launch = [&](auto smooth) {
    return [=](auto shape, RegisterRowPlan plan) {
      using Row = UnalignedRow<decltype(shape)>;
      plan.overlap = after_count && scale.count;  // the kernel that counts is the one before
      return launch_register_rows<decltype(shape)>(op, plan, rows, cross_entropy_kernel<Row, smooth, true, kPadded>,
                                                   stream, from, targets, results, scale, rows, cols, smoothing);
    };
  };
  const int64_t vectors = unaligned_row_vectors<T>(cols, from, results.slope ? results.slope : from);
  if (attrs.label_smoothing == 0)
    return dispatch_register_rows(unaligned_shapes<T>(), vectors, device, launch(std::false_type()), any);
  return dispatch_register_rows(unaligned_shapes<T>(), vectors, device, launch(std::true_type()), any);
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot
