// batch_norm and batch_norm_relu on the CPU (batch_norm.h). Sums of a slice are taken in Accumulate<T>, slices are
// added up in double.
#pragma once
#include <algorithm>
#include <cmath>

#include "batch_norm.h"
#include "cpu/entry.h"
#include "cpu/math.h"
#include "cpu/rows.h"

namespace aot {
inline namespace AOT_ISA {

// ----------------------------------------------------------------------------------------------------------- sums

// sums[k * channels + c] = the sum over channel c of what term(i, c, part, terms) puts into terms[k] for the elements
// from i on: numbers of one channel, or of neighbouring ones where they are the last axis. `partial`: (kSums, slices,
// channels).
template <int kSums, typename T, class F>
void channel_sums(const ChannelShape &s, Accumulate<T> *partial, Accumulate<T> *sums, F term) {
  using A = Accumulate<T>;
  constexpr int64_t kPiece = 512;  // elements of a channel that are added up in A
  const int64_t slices = channel_slices(s), channels = s.channels, plane = slices * channels;
  if (s.inner == 1) {
    const int64_t of_slice = kSliceRows * channels;
    parallel_pieces(slices, of_slice < kGrain ? kGrain / (of_slice + 1) : 1, [=](int64_t begin, int64_t end) {
      for (int64_t slice = begin; slice < end; ++slice) {
        A *const to = partial + slice * channels;
        for (int i = 0; i < kSums; ++i) std::fill_n(to + i * plane, channels, A(0));
        const int64_t last = slice * kSliceRows + kSliceRows < s.outer ? slice * kSliceRows + kSliceRows : s.outer;
        for (int64_t row = slice * kSliceRows; row < last; ++row)
          sweep<A>(channels, [=](int64_t c, auto part) {
            Vec<T> of_row[kSums];
            term(row * channels + c, c, part, of_row);
            for (int i = 0; i < kSums; ++i) store(to + i * plane + c, load(to + i * plane + c, part) + of_row[i], part);
          });
      }
    });
  } else {
    each_row(plane, s.inner, [=](int64_t line) {
      double total[kSums] = {};
      for (int64_t begin = 0; begin < s.inner; begin += kPiece) {
        const int64_t size = s.inner - begin < kPiece ? s.inner - begin : kPiece;
        Vec<T> piece[kSums][4] = {};
        sweep_sums<T>(size, [&](int64_t j, auto part, int k) {
          Vec<T> v[kSums];
          term(line * s.inner + begin + j, line % channels, part, v);
          for (int i = 0; i < kSums; ++i) piece[i][k] += keep<T>(v[i], part);
        });
        for (int i = 0; i < kSums; ++i) total[i] += sum_of_4<T>(piece[i]);
      }
      for (int i = 0; i < kSums; ++i) partial[i * plane + line] = static_cast<A>(total[i]);
    });
  }
  for (int i = 0; i < kSums; ++i) sum_columns(partial + i * plane, slices, channels, sums + i * channels);
}

// f(i, c, part) for all elements, as term above.
template <typename T, class F>
void each_element(const ChannelShape &s, F f) {
  const int64_t channels = s.channels;
  if (s.inner == 1)
    each_row(s.outer, channels,
             [=](int64_t row) { sweep<T>(channels, [=](int64_t c, auto part) { f(row * channels + c, c, part); }); });
  else
    each_row(s.outer * channels, s.inner, [=](int64_t line) {
      sweep<T>(s.inner, [=](int64_t j, auto part) { f(line * s.inner + j, line % channels, part); });
    });
}

// The number of a channel for each lane: that of lanes' own channels where they are the last axis.
template <typename T>
struct PerChannel {
  const Accumulate<T> *of;
  bool last;

  template <class Part>
  Vec<T> at(int64_t c, Part part) const {
    return last ? load(of + c, part) : Vec<T>{} + of[c];
  }
};

template <typename W>
Accumulate<W> parameter(const W *of, int64_t c, double absent) {
  return of ? load_one(of + c) : static_cast<Accumulate<W>>(absent);
}

// ----------------------------------------------------------------------------------------------------- activations

template <typename T>
AOT_INLINE Vec<T> activated(Vec<T> z, NormActivation activation) {
  using A = Accumulate<T>;
  switch (activation) {
    case kNormRelu:
      return z < 0 ? Vec<T>{} : z;  // NaN stays NaN
    case kNormSilu:
      return Logistic<T>(z).times(z);
    case kNormHardswish: {
      const Vec<T> most = Vec<T>{} + A(6), raised = z + A(3), cut = raised < 0 ? Vec<T>{} : raised;
      return z * (cut > most ? most : cut) * A(1.0 / 6);
    }
    default:
      return z;
  }
}

// dy f'(z)
template <typename T>
AOT_INLINE Vec<T> activation_gradient(Vec<T> dy, Vec<T> z, NormActivation activation) {
  using A = Accumulate<T>;
  switch (activation) {
    case kNormRelu:
      return z <= 0 ? Vec<T>{} : dy;
    case kNormSilu:
      return Logistic<T>(z).silu_gradient(dy, z);
    case kNormHardswish: {
      const Vec<T> most = Vec<T>{} + A(3), inner = dy * (z * A(1.0 / 3) + A(0.5)), upper = z >= most ? dy : inner;
      return z <= -most ? Vec<T>{} : upper;
    }
    default:
      return dy;
  }
}

// --------------------------------------------------------------------------------------------------------- forward

template <typename T, typename W>
void batch_norm_loop(const ChannelShape &s, double eps, NormActivation activation, const T *x, const W *weight,
                     const W *bias, const T *residual, T *y, Accumulate<T> *mean, Accumulate<T> *var,
                     Accumulate<T> *work) {
  using A = Accumulate<T>;
  A *const sums = work + 2 * channel_slices(s) * s.channels;
  const auto terms = static_cast<double>(s.terms());
  const bool last = s.inner == 1;
  channel_sums<1, T>(s, work, sums,
                     [=](int64_t i, int64_t, auto part, Vec<T>(&of_x)[1]) { of_x[0] = load(x + i, part); });
  for (int64_t c = 0; c < s.channels; ++c) mean[c] = static_cast<A>(sums[c] / terms);
  const PerChannel<T> means{mean, last};
  channel_sums<1, T>(s, work, sums, [=](int64_t i, int64_t c, auto part, Vec<T>(&square)[1]) {
    const Vec<T> centred = load(x + i, part) - means.at(c, part);
    square[0] = centred * centred;
  });
  A *const scale = sums, *const shift = sums + s.channels;
  for (int64_t c = 0; c < s.channels; ++c) {
    const double variance = sums[c] / terms;
    var[c] = static_cast<A>(variance);
    scale[c] = static_cast<A>(parameter(weight, c, 1) / std::sqrt(variance + eps));
    shift[c] = parameter(bias, c, 0);
  }
  const PerChannel<T> scales{scale, last}, shifts{shift, last};
  each_element<T>(s, [=](int64_t i, int64_t c, auto part) {
    Vec<T> v = (load(x + i, part) - means.at(c, part)) * scales.at(c, part) + shifts.at(c, part);
    if (residual) v += load(residual + i, part);
    store(y + i, activated<T>(v, activation), part);
  });
}

// -------------------------------------------------------------------------------------------------------- backward

template <typename T, typename W>
struct BatchNormGradients {
  using A = Accumulate<T>;
  const T *dy;
  const A *dmean, *dvar;
  const T *x;
  const W *weight, *bias;
  const A *mean, *var;
  const T *y;  // of batch_norm_relu, else null
  T *dx;
  W *dweight, *dbias;
  T *dresidual;
};

template <typename T, typename W>
void batch_norm_backward_loop(const ChannelShape &s, double eps, NormActivation activation,
                              const BatchNormGradients<T, W> &b, Accumulate<T> *work) {
  using A = Accumulate<T>;
  const bool last = s.inner == 1, again = !b.y && activation != kNormPlain;
  A *const of_dy = work + 2 * channel_slices(s) * s.channels, *const of_x = of_dy + s.channels;
  A *const rest = of_x + s.channels, *const scale_of_z = rest + s.channels, *const shift_of_z = scale_of_z + s.channels;
  for (int64_t c = 0; c < s.channels && again; ++c) {
    scale_of_z[c] = static_cast<A>(parameter(b.weight, c, 1) / std::sqrt(b.var[c] + eps));
    shift_of_z[c] = parameter(b.bias, c, 0);
  }
  const PerChannel<T> means{b.mean, last}, z_scales{scale_of_z, last}, z_shifts{shift_of_z, last};
  const auto gradient = [=](int64_t i, int64_t c, auto part) {
    const Vec<T> dy = load(b.dy + i, part);
    if (b.y) return load(b.y + i, part) <= 0 ? Vec<T>{} : dy;
    if (!again) return dy;
    const Vec<T> z = (load(b.x + i, part) - means.at(c, part)) * z_scales.at(c, part) + z_shifts.at(c, part);
    return activation_gradient<T>(dy, z, activation);
  };
  if (b.dx || b.dweight || b.dbias)
    channel_sums<2, T>(s, work, of_dy, [=](int64_t i, int64_t c, auto part, Vec<T>(&pair)[2]) {
      pair[0] = gradient(i, c, part), pair[1] = pair[0] * (load(b.x + i, part) - means.at(c, part));
    });
  const auto terms = static_cast<double>(s.terms());
  for (int64_t c = 0; c < s.channels && (b.dx || b.dweight || b.dbias); ++c) {
    const double rstd = 1 / std::sqrt(b.var[c] + eps), sum = of_dy[c], moment = of_x[c];
    if (b.dweight) store_one(b.dweight + c, moment * rstd);
    if (b.dbias) store_one(b.dbias + c, sum);
    const double scale = parameter(b.weight, c, 1) * rstd;
    of_dy[c] = static_cast<A>(scale);
    of_x[c] = static_cast<A>((2 * (b.dvar ? b.dvar[c] : 0) - scale * rstd * rstd * moment) / terms);
    rest[c] = static_cast<A>(((b.dmean ? b.dmean[c] : 0) - scale * sum) / terms);
  }
  const PerChannel<T> scales{of_dy, last}, slopes{of_x, last}, rests{rest, last};
  if (!b.dx && !b.dresidual) return;
  each_element<T>(s, [=](int64_t i, int64_t c, auto part) {
    const Vec<T> g = gradient(i, c, part);
    if (b.dresidual) store(b.dresidual + i, g, part);
    if (b.dx)
      store(b.dx + i,
            g * scales.at(c, part) + (load(b.x + i, part) - means.at(c, part)) * slopes.at(c, part) + rests.at(c, part),
            part);
  });
}

// ------------------------------------------------------------------------------------------------------- launchers

// f(zeros of x's and the parameters' dtypes), which is x's or float beside 16 bits.
template <class F>
Status dispatch_batch_norm(const Tensor &x, const Tensor &parameter, F f) {
  return dispatch_floating(x.dtype, [&](auto of_x) {
    return dispatch_wider<decltype(of_x)>(parameter.dtype, [&](auto of_parameter) { return f(of_x, of_parameter); });
  });
}

template <class Op>
Status batch_norm_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[Op::kX], &weight = in[Op::kWeight], &work = out[Op::kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
  return dispatch_batch_norm(x, weight, [&](auto of_x, auto of_weight) {
    using T = decltype(of_x);
    using W = decltype(of_weight);
    using A = Accumulate<T>;
    const T *residual = nullptr;
    if constexpr (Op::kRelu) residual = in[Op::kResidual].template as<T>();
    batch_norm_loop(op.shape(x), op.eps, op.activation(), x.as<const T>(), weight.as<const W>(),
                    in[Op::kBias].template as<const W>(), residual, out[Op::kY].template as<T>(),
                    out[Op::kMean].template as<A>(), out[Op::kVar].template as<A>(), work.as<A>());
    return kOk;
  });
}

template <class Op>
Status batch_norm_backward_cpu(const Op &op, const Tensor *in, const Tensor *out, void *) {
  const Tensor &x = in[Op::kX], &weight = in[Op::kWeight], &work = out[Op::kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", Op::name);
  return dispatch_batch_norm(x, weight, [&](auto of_x, auto of_weight) {
    using T = decltype(of_x);
    using W = decltype(of_weight);
    using A = Accumulate<T>;
    BatchNormGradients<T, W> b{in[Op::kDy].template as<T>(),
                               in[Op::kDmean].template as<A>(),
                               in[Op::kDvar].template as<A>(),
                               x.as<T>(),
                               weight.as<W>(),
                               nullptr,
                               in[Op::kMean].template as<A>(),
                               in[Op::kVar].template as<A>(),
                               nullptr,
                               out[Op::kDx].template as<T>(),
                               out[Op::kDweight].template as<W>(),
                               out[Op::kDbias].template as<W>(),
                               nullptr};
    if constexpr (Op::kRelu) b.y = in[Op::kY].template as<T>(), b.dresidual = out[Op::kDresidual].template as<T>();
    else b.bias = in[Op::kBias].template as<W>();
    const ChannelShape shape = op.shape(x);
    batch_norm_backward_loop(shape, op.gradient_eps(shape), op.activation(), b, work.as<A>());
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot
