// conv2d as a matrix product on tensor cores. Tensors are NHWC, weights OHWI, channels and outputs in whole vectors of
// 16 bytes, everything aligned to those, and below 2^31 bytes.
#pragma once
#include "conv2d.cuh"

namespace aot {
inline namespace AOT_ISA {

struct Conv2dProduct {
  enum Pass { y, dx, dweight };
  Pass pass;
  DType dtype;
  bool tf32;
  int batch, height, width, channels, outputs, kernel_h, kernel_w, out_h, out_w;
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  const void *a, *b;  // y: x and the weight; dx: dy and the weight; dweight: dy and x
  const void *bias;   // of y, or null
  void *to;           // of the dtype; where dweight has slices, (slices, ...) of float32, which are yet to be added
  int slices;         // of the sum; 0: there are none

  // sm_90 alone
  Steps to_steps;        // y or dx, which may be of any layout
  int to_channels;       // of which so many are wanted
  bool whole_vectors;    // whether they lie so
  int64_t b_tap, b_row;  // elements of the weight from one kernel element, and from one row, to the next
  bool independent;      // of the kernel launched last, which read all that this one reads

  int pixels() const { return batch * out_h * out_w; }
  int kernel() const { return kernel_h * kernel_w; }
};

// By CUTLASS, on every device of compute capability 8.0 or later. dweight is of slices; y and dx are not.
Status conv2d_cutlass_16(const char *op, const Conv2dProduct &p, void *stream);
Status conv2d_cutlass_32(const char *op, const Conv2dProduct &p, void *stream);

// By wgmma, for 16 bits and, but for dweight, TF32 on devices of compute capability 9.0. dx of float32 has the weight
// with the outputs of a row side by side. The first tells whether it takes the product, and sets its slices, of which
// there may be `most`; dweight's may be none where `whole`.
bool conv2d_sm90_takes(const char *op, Conv2dProduct *p, int most, bool whole);
Status conv2d_sm90(Launches &launch, const Conv2dProduct &p);

}  // namespace AOT_ISA
}  // namespace aot
