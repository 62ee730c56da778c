#include "selections.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <numeric>

namespace aot {
inline namespace AOT_ISA {

// Calls f with a number of the tensor's dtype.
template <class F>
Status with_dtype(const Tensor &t, F f) {
  return t.dtype == DType::float32 ? f(float()) : f(double());
}

inline Status flipped(const Flipped &, const Tensor *in, const Tensor *out, void *) {
  const int64_t size = itemsize(in[0].dtype), n = in[0].size();
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(out[0].as<char>() + i * size, in[0].as<char>() + (n - 1 - i) * size, size);
  return kOk;
}

// NaN is larger than any number.
template <class T>
bool is_larger(T a, T b) {
  return a > b || (a != a && b == b);
}

inline Status argmax(const Argmax &, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    for (int64_t r = 0; r < in[0].shape[0]; ++r) {
      const T *row = in[0].as<const T>() + r * in[0].shape[1];
      int64_t place = 0;
      for (int64_t i = 1; i < in[0].shape[1]; ++i)
        if (is_larger(row[i], row[place])) place = i;
      out[0].as<int64_t>()[r] = place;
    }
    return kOk;
  });
}

// Each of the k largest is found by itself, so that there is no scratch.
inline Status topk(const Topk &op, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = in[0].shape[1];
    for (int64_t r = 0; r < in[0].shape[0]; ++r) {
      const T *row = in[0].as<const T>() + r * n;
      T *values = out[0].as<T>() + r * op.k;
      int64_t *places = out[1].as<int64_t>() + r * op.k;
      for (int64_t j = 0; j < op.k; ++j) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; ++i)
          if ((best < 0 || is_larger(row[i], row[best])) && std::find(places, places + j, i) == places + j) best = i;
        places[j] = best, values[j] = row[best];
      }
    }
    return kOk;
  });
}

inline Status topk_backward(const TopkBackward &op, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = out[0].shape[1];
    std::fill_n(out[0].as<T>(), out[0].size(), T{});
    for (int64_t i = 0; i < in[0].size(); ++i)
      if (const int64_t place = in[1].as<int64_t>()[i]; place >= 0 && place < n)
        out[0].as<T>()[i / op.k * n + place] = in[0].as<const T>()[i];
    return kOk;
  });
}

inline Status histogram(const Histogram &op, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    auto *counts = out[0].as<int64_t>();
    std::fill_n(counts, op.bins, 0);
    for (int64_t i = 0, n = in[0].size(); i < n; ++i)
      if (const T x = in[0].as<const T>()[i]; x >= 0 && x < op.bins) ++counts[static_cast<int64_t>(x)];
    return kOk;
  });
}

inline int64_t index_at(const Tensor &index, int64_t i) {
  return index.dtype == DType::int64 ? index.as<const int64_t>()[i] : index.as<const int32_t>()[i];
}

inline Status check_index(const char *op, const Tensor &table, const Tensor &index) {
  for (int64_t i = 0; i < index.shape[0]; ++i)
    if (const int64_t row = index_at(index, i); row < 0 || row >= table.shape[0])
      return fail(kInvalidArgument, "%s: index has %lld, expected 0 to %lld", op, static_cast<long long>(row),
                  static_cast<long long>(table.shape[0] - 1));
  return kOk;
}

inline Status take(const Take &, const Tensor *in, const Tensor *out, void *) {
  AOT_TRY(check_index(Take::name, in[0], in[1]));
  const int64_t bytes = in[0].shape[1] * itemsize(in[0].dtype);
  for (int64_t i = 0; i < in[1].shape[0]; ++i)
    std::memcpy(out[0].as<char>() + i * bytes, in[0].as<char>() + index_at(in[1], i) * bytes, bytes);
  return kOk;
}

inline Status take_backward(const TakeBackward &, const Tensor *in, const Tensor *out, void *) {
  AOT_TRY(check_index(TakeBackward::name, in[1], in[2]));
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = in[1].shape[1];
    std::fill_n(out[0].as<T>(), out[0].size(), T{});
    for (int64_t i = 0; i < in[2].shape[0]; ++i)
      for (int64_t j = 0; j < n; ++j) out[0].as<T>()[index_at(in[2], i) * n + j] += in[0].as<const T>()[i * n + j];
    return kOk;
  });
}

// 64 bits for the element i of a call: SplitMix64 of the seed and a counter.
inline uint64_t random_bits(const int32_t *seed, int64_t i) {
  uint64_t z = static_cast<uint32_t>(seed[0]) | uint64_t{static_cast<uint32_t>(seed[1])} << 32;
  z += (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

inline Status drop(double p, const Tensor *in, const Tensor *out) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0, n = in[0].size(); i < n; ++i) {
      const bool kept = static_cast<double>(random_bits(in[1].as<const int32_t>(), i) >> 11) * 0x1p-53 >= p;
      out[0].as<T>()[i] = kept ? static_cast<T>(in[0].as<const T>()[i] / (1 - p)) : T{};
    }
    return kOk;
  });
}
inline Status drop_forward(const Drop &op, const Tensor *in, const Tensor *out, void *) { return drop(op.p, in, out); }
inline Status drop_backward(const DropBackward &op, const Tensor *in, const Tensor *out, void *) {
  return drop(op.p, in, out);
}

inline Status centered(const Centered &op, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = in[0].shape[0], n = in[0].shape[1];
    for (int64_t j = 0; j < n; ++j) {
      T &mean = in[1].as<T>()[j], sum{};
      for (int64_t i = 0; i < rows; ++i) {
        sum += in[0].as<const T>()[i * n + j];
        out[0].as<T>()[i * n + j] = in[0].as<const T>()[i * n + j] - mean;
      }
      mean += static_cast<T>(op.momentum) * (sum / rows - mean);
    }
    return kOk;
  });
}

inline Status squares(const Squares &, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0, n = in[0].size(); i < n; ++i)
      out[0].as<T>()[i] = std::accumulate(
          in, in + kTwenty, T{}, [i](T sum, const Tensor &x) { return sum + x.as<const T>()[i] * x.as<const T>()[i]; });
    return kOk;
  });
}

inline Status squares_backward(const SquaresBackward &, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    for (int k = 0; k < kTwenty; ++k)
      for (int64_t i = 0, n = in[0].size(); i < n; ++i)
        out[k].as<T>()[i] = 2 * in[k + 1].as<const T>()[i] * in[0].as<const T>()[i];
    return kOk;
  });
}

inline Status polar(const Polar &, const Tensor *in, const Tensor *out, void *) {
  return with_dtype(in[0], [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0, n = in[0].size(); i < n; ++i) {
      const T r = in[0].as<const T>()[i], phi = in[1].as<const T>()[i];
      out[0].as<std::complex<T>>()[i] = {r * std::cos(phi), r * std::sin(phi)};
    }
    return kOk;
  });
}

}  // namespace AOT_ISA

AOT_ENTRY(Flipped, aot_flipped_cpu, flipped)
AOT_ENTRY(Argmax, aot_argmax_cpu, argmax)
AOT_ENTRY(Topk, aot_topk_cpu, topk)
AOT_ENTRY(TopkBackward, aot_topk_backward_cpu, topk_backward)
AOT_ENTRY(Histogram, aot_histogram_cpu, histogram)
AOT_ENTRY(Take, aot_take_cpu, take)
AOT_ENTRY(TakeBackward, aot_take_backward_cpu, take_backward)
AOT_ENTRY(Drop, aot_drop_cpu, drop_forward)
AOT_ENTRY(DropBackward, aot_drop_backward_cpu, drop_backward)
AOT_ENTRY(Centered, aot_centered_cpu, centered)
AOT_ENTRY(Squares, aot_squares_cpu, squares)
AOT_ENTRY(SquaresBackward, aot_squares_backward_cpu, squares_backward)
AOT_ENTRY(Polar, aot_polar_cpu, polar)

}  // namespace aot
