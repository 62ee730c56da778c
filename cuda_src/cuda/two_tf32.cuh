// A number of float32 as the sum of two of TF32, of which tensor cores make float32's products. TF32 has 11 bits: the
// larger part is the number rounded, and the smaller the rest, of which a tensor core drops at most the last bit.
//
// An infinity has no smaller part, which is NaN. Numbers from 2^128 (1 - 2^-12) on are rounded to infinity. Of a NaN at
// least one part is NaN: of 0x7fffffff, which a GPU's arithmetic makes, the smaller one.
#pragma once
#include <cstdint>

#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// The two parts. The lower 13 bits of the smaller one are ignored.
__device__ inline void split(float x, uint32_t &big, uint32_t &small) {
  big = (__float_as_uint(x) + 0x1000) & 0xffffe000;
  small = __float_as_uint(x - __uint_as_float(big));
}

}  // namespace AOT_ISA
}  // namespace aot
