#include "add.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

// --------------------------------------------------------------------------------------------------------- loops

template <typename T>
void add_loop(const T *a, const T *b, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) { return load(a + i, part) + load(b + i, part); });
}

template <typename T>
void add_scaled_loop(const T *a, const T *b, Accumulate<T> alpha, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) { return load(a + i, part) + alpha * load(b + i, part); });
}

template <typename T>
void add_number_loop(const T *a, Accumulate<T> number, T *y, int64_t n) {
  map(y, n, [=](int64_t i, auto part) { return load(a + i, part) + number; });
}

// ----------------------------------------------------------------------------------------------------- launchers

inline Status add_cpu(const Add &op, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *a = in[0].as<T>(), *b = in[1] ? in[1].as<T>() : nullptr;
    T *y = out[0].as<T>();
    const int64_t n = out[0].size();
    if (!b) add_number_loop<T>(a, op.addend(), y, n);
    else if (op.alpha == 1) add_loop(a, b, y, n);
    else add_scaled_loop<T>(a, b, op.alpha, y, n);
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Add, aot_add_cpu, aot::add_cpu)
