// conv2d as an implicit GEMM. Tensors are NHWC, weights OHWI, with channels padded to whole vectors of 16 bytes; they
// are aligned to 16 bytes and, without groups, smaller than 2^31 bytes.
#pragma once
#include "conv2d.cuh"

namespace aot {
inline namespace AOT_ISA {

// A tensor (images, channels, plane). plane: of x and y the pixels of an image, of a weight the kernel elements.
struct Planes {
  int64_t images, channels, plane;
};

struct Conv2dGemm {
  enum Pass { y, dx, dweight };
  Pass pass;
  DType dtype;
  bool tf32;
  int batch, height, width, channels, out_channels, kernel_h, kernel_w, out_h, out_w;
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  const void *a, *b;  // y: x and weight; dx: dy and weight; dweight: dy and x
  const void *bias;   // of y, or null
  void *to;           // the result; for dweight with slices, (slices, ...) partial sums in float32
  int slices;         // split-K; 0: the sum is not split
  int groups = 1;     // more on sm_90 only: `channels` and `out_channels` are of all
  int narrow = 0;  // channels and outputs of a group, if a box of 128 bytes has whole groups (dweight: of 64 channels)

  // for sm_90 only
  Strides to_strides;    // of y or dx, in any layout
  int to_channels;       // channels to write, without padding
  bool whole_vectors;    // whether `to` has whole vectors of channels, aligned
  int64_t b_tap, b_row;  // weight: elements from one kernel element, and from one row, to the next
  bool independent;      // reads nothing that the kernel launched before it writes
  bool three;            // float32 in three parts (conv2d_parts.cuh): a pixel, or a kernel element, has all channels of
                         // one part after the other
  bool hwcn;             // dweight in TF32: a and b are in that layout (conv2d_hwcn.cuh)

  int parts() const { return three ? 3 : 1; }
  DType factors() const { return three ? DType::bfloat16 : dtype; }

  int pixels() const { return batch * out_h * out_w; }
  int kernel() const { return kernel_h * kernel_w; }
};

// CUTLASS, compute capability 8.0 or later. dweight needs slices; y and dx take none.
Status conv2d_cutlass_16(const char *op, const Conv2dGemm &p, void *stream);
Status conv2d_cutlass_32(const char *op, const Conv2dGemm &p, void *stream);

// wgmma, compute capability 9.0: 16-bit dtypes, also with groups of multiples of 64 channels and outputs, float32 in
// three parts, and TF32. dx of TF32 takes the weight transposed, with output channels contiguous, and dweight HWCN.
// conv2d_sm90_takes: whether the GEMM is supported; if so, it sets p->slices, to at most max_slices. unsplit: whether
// the kernel may write the result itself if one slice suffices; else dweight's single slice is partial sums as well.
bool conv2d_sm90_takes(const char *op, Conv2dGemm *p, int max_slices, bool unsplit);
Status conv2d_sm90(LaunchSequence &launch, const Conv2dGemm &p);
// Packs float32 from either layout in NHWC, in three parts: channels are whole vectors of eight, aligned to 16 bytes.
Status split_images(LaunchSequence &launch, bool nhwc, const float *from, Planes planes, void *to);
// Copies float32 from either layout to HWCN (conv2d_hwcn.cuh).
Status copy_to_hwcn(LaunchSequence &launch, bool nhwc, const float *from, Planes planes, float *to);

}  // namespace AOT_ISA
}  // namespace aot
