// The numbers of heads in a packed projection, which qkv_rope and qkv_attention have as attributes.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

struct HeadCounts {
  static constexpr int64_t kHeads = INT64_MIN, kMostHeads = (int64_t{1} << 30) - 1;  // kHeads: as many as heads

  static Status check_count(const char *op, const char *name, int64_t n) {
    if (n >= 1 && n <= kMostHeads) return kOk;
    return fail(kInvalidArgument, "%s: %s is %lld, expected 1 to %lld", op, name, static_cast<long long>(n),
                static_cast<long long>(kMostHeads));
  }
};

}  // namespace AOT_ISA
}  // namespace aot
