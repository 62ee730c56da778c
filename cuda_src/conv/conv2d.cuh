// Shared by the kernels of conv2d: a call's sizes, its tensors' strides, and overlapping launches.
#pragma once
#include <utility>

#include "conv2d_shape.h"
#include "cuda/launch.cuh"

namespace aot {
inline namespace AOT_ISA {

// Strides of a tensor of images, in elements. For a weight, `image` is from one output channel to the next, and `tap`
// from one kernel element (row-major) to the next.
struct Strides {
  int64_t image, channel, row, column, tap;

  __host__ __device__ int64_t at(int64_t i, int64_t c, int64_t h, int64_t w) const {
    return i * image + c * channel + h * row + w * column;
  }
};

inline Strides strides(bool nhwc, int64_t channels, int64_t height, int64_t width) {
  return nhwc ? Strides{channels * height * width, 1, width * channels, channels, channels}
              : Strides{channels * height * width, height * width, width, 1, 1};
}

// A call as kernels take it. Sizes are the tensors'; a weight has channels / groups channels.
struct Conv2dCall {
  Conv2dShape s;
  int64_t pixels, groups, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  bool nhwc;
  Strides x, weight, y;

  Conv2dCall(const Conv2dParams &params, const Conv2dShape &s)
      : s(s),
        pixels(s.pixels()),
        groups(params.groups),
        stride_h(params.stride.value[0]),
        stride_w(params.stride.value[1]),
        padding_h(params.padding.value[0]),
        padding_w(params.padding.value[1]),
        dilation_h(params.dilation.value[0]),
        dilation_w(params.dilation.value[1]),
        nhwc(params.nhwc()),
        x(strides(nhwc, s.channels, s.height, s.width)),
        weight(strides(nhwc, s.channels / groups, s.kernel_h, s.kernel_w)),
        y(strides(nhwc, s.out_channels, s.out_h, s.out_w)) {}
};

// i / n for i < 2^16.
struct Divisor {
  unsigned n = 1, magic = 0;

  Divisor() = default;
  explicit Divisor(int64_t by) : n(static_cast<unsigned>(by)), magic(n > 1 ? 0xffffffffu / n + 1 : 0) {}
  __device__ int divide(int i) const { return magic ? static_cast<int>(__umulhi(i, magic)) : i; }
};

// Launches the kernels of a call. Each may start while the one before it ends, and waits itself where it must
// (overlap.cuh); the first does not overlap the work that the stream already had.
class LaunchSequence {
 public:
  LaunchSequence(const char *op, void *stream) : op_(op), stream_(static_cast<cudaStream_t>(stream)) {}

  // cluster: blocks along z.
  template <typename... Parameters, typename... Arguments>
  Status operator()(void (*kernel)(Parameters...), dim3 grid, int block, int shared, int cluster,
                    const Arguments &...arguments) {
    const dim3 clusters(1, 1, cluster), threads(block);
    const bool overlap = std::exchange(overlap_, true);
    return launch_kernel(op_, kernel, {grid, threads, shared, clusters, overlap}, stream_, arguments...);
  }
  // The next kernel starts when all before it have ended.
  void wait_for_all() { overlap_ = false; }
  // The next kernel may overlap the one before it, which need not be of this sequence: it waits for that.
  void overlap() { overlap_ = true; }
  const char *op() const { return op_; }
  cudaStream_t stream() const { return stream_; }

 private:
  const char *op_;
  cudaStream_t stream_;
  bool overlap_ = false;
};

// conv2d of few channels (conv2d_few_channels.cuh, conv2d_few_dx.cuh), from compute capability 8.0, for the calls that
// Conv2dParams assigns to it: T is a 16-bit type, or float, which is multiplied as TF32, in y and dx also as float32.
// bias may be null. partial: dweight's sums, for each of params.few_slices() (out_channels, kernel, channels in quads).
// operands: memory for the weight as dx's kernel reads it, aligned to 16 bytes.
template <typename T>
Status few_forward(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype, const T *x,
                   const T *weight, const T *bias, T *y);
template <typename T>
Status few_dweight(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype, const T *dy,
                   const T *x, float *partial);
template <typename T>
Status few_dx(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype, const T *dy,
              const T *weight, float *operands, T *dx);

// Depthwise convolutions. *taken: whether the kernels take the call, with tensors aligned as these are. y, or with `dx`
// dx, from x or dy; bias may be null. partial: `*slices` partial sums of params.depthwise_slice() elements each.
template <typename T>
Status depthwise_forward(const char *op, const Conv2dParams &params, const Conv2dCall &c, DType dtype, bool dx,
                         const T *x, const T *weight, const T *bias, T *y, cudaStream_t stream, bool *taken);
template <typename T>
Status depthwise_dweight(LaunchSequence &launch, const Conv2dParams &params, const Conv2dCall &c, DType dtype,
                         const T *dy, const T *x, float *partial, int *slices, bool *taken);

// Convolutions with groups of several channels in 16 bits and float32, from compute capability 8.0
// (conv2d_grouped.cuh), of NHWC with pixels of whole vectors of 16 bytes. y, or with `dx` dx; bias may be null.
// operands: the weight as the kernels read it. partial: dweight's sums, g.slices of g.slice() elements.
template <typename T>
Status grouped_forward(LaunchSequence &launch, const Grouped &g, const Conv2dCall &c, bool dx, const T *source,
                       const T *weight, const T *bias, float *operands, T *result);
template <typename T>
Status grouped_dweight(LaunchSequence &launch, const Grouped &g, const T *dy, const T *x, float *partial);

}  // namespace AOT_ISA
}  // namespace aot
