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

// ----------------------------------------------------------------------------------------------------- launchers

inline Status add_cpu(const Add &, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    add_loop(in[0].as<T>(), in[1].as<T>(), out[0].as<T>(), out[0].size());
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// ------------------------------------------------------------------------------------------------------- entries

AOT_CPU_ENTRY(aot::Add, aot_add_cpu, aot::add_cpu)
