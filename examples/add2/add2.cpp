#include "add2.h"

#include "cpu/entry.h"
#include "cpu/parallel.h"

namespace aot {
inline namespace AOT_ISA {

inline Status add2_cpu(const Add2 &, const Tensor *in, const Tensor *out, void *) {
  return dispatch_floating(in[0].dtype, [&](auto zero) {
    using T = decltype(zero);
    const T *a = in[0].as<const T>(), *b = in[1].as<const T>();
    map(out[0].as<T>(), out[0].size(), [=](int64_t i, auto part) { return load(a + i, part) + load(b + i, part); });
    return kOk;
  });
}

}  // namespace AOT_ISA
}  // namespace aot

AOT_CPU_ENTRY(aot::Add2, aot_add2_cpu, aot::add2_cpu)
