#include "add.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// The line four vectors further on is prefetched: AMD's prefetchers follow lines that are touched once less well.
template <typename T, class P>
Vec<T> load_ahead(const T *p, P part) {
  __builtin_prefetch(p + 4 * kLanes<T>);
  return load(p, part);
}

inline Status add_cpu(const Add &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *a = in[0].as<T>(), *b = in[1].as<T>();
    T *y = out[0].as<T>();
    const int64_t n = out[0].size();
    const Accumulate<T> alpha = op.alpha, number = op.addend();
    if (!b) map(y, n, [=](int64_t i, auto part) { return load_ahead(a + i, part) + number; });
    else if (alpha == 1)
      map(y, n, [=](int64_t i, auto part) { return load_ahead(a + i, part) + load_ahead(b + i, part); });
    else map(y, n, [=](int64_t i, auto part) { return load_ahead(a + i, part) + alpha * load_ahead(b + i, part); });
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Add, aot_add_cpu, aot::add_cpu)
