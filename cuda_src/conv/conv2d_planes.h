// The backward of conv2d in NCHW on sm_90, without copies of x and dx in another layout. Tensors are aligned to 16
// bytes.
#pragma once
#include "conv2d_gemm.h"

namespace aot {
inline namespace AOT_ISA {

// dx in TF32 with a stride of two columns, from dy in NHWC and a weight as conv2d_sm90() takes it
// (conv2d_planes_dx.cuh). planes_takes_dx: whether the kernel takes a dx that conv2d_sm90() takes in NHWC.
bool planes_takes_dx(const Conv2dGemm &p);
Status planes_dx(LaunchSequence &launch, const Conv2dGemm &p);

// dweight in TF32 from dy and x in NCHW (conv2d_planes_dweight.cuh), of the sizes for which a plan has planes_slices:
// p->slices of partial sums at most, and sets these. It reads nothing that a kernel of the call wrote.
bool planes_takes_dweight(const char *op, const Conv2dGemm &p);
Status planes_dweight(LaunchSequence &launch, Conv2dGemm *p);

}  // namespace AOT_ISA
}  // namespace aot
