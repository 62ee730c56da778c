// What the kernels of conv2d have in common: a call's sizes, and where each tensor's elements are.
#pragma once
#include "cuda/launch.cuh"
#include "operators/conv2d.h"

namespace aot {
inline namespace AOT_ISA {

// Elements from one image (output, of a weight), channel, row and column to the next; a tap is a row or column of a
// kernel, counted through.
struct Steps {
  int64_t image, channel, row, column, tap;

  __host__ __device__ int64_t at(int64_t i, int64_t c, int64_t h, int64_t w) const {
    return i * image + c * channel + h * row + w * column;
  }
};

inline Steps steps(bool nhwc, int64_t channels, int64_t height, int64_t width) {
  return nhwc ? Steps{channels * height * width, 1, width * channels, channels, channels}
              : Steps{channels * height * width, height * width, width, 1, 1};
}

// A call as kernels see it. Lengths are of the tensors; a weight has channels / groups channels.
struct Conv2dCall {
  Conv2dShape s;
  int64_t pixels, groups, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  bool nhwc;
  Steps x, weight, y;

  Conv2dCall(const Conv2dAttrs &op, const Conv2dShape &s)
      : s(s),
        pixels(s.pixels()),
        groups(op.groups),
        stride_h(op.stride.value[0]),
        stride_w(op.stride.value[1]),
        padding_h(op.padding.value[0]),
        padding_w(op.padding.value[1]),
        dilation_h(op.dilation.value[0]),
        dilation_w(op.dilation.value[1]),
        nhwc(op.nhwc()),
        x(steps(nhwc, s.channels, s.height, s.width)),
        weight(steps(nhwc, s.channels / groups, s.kernel_h, s.kernel_w)),
        y(steps(nhwc, s.outputs, s.out_h, s.out_w)) {}
};

// Launches a call's kernels, each of which may begin while the one before it ends, and says itself where it waits for
// that (overlap.cuh). The first waits for whatever was before it.
class Launches {
 public:
  Launches(const char *op, void *stream) : op_(op), stream_(static_cast<cudaStream_t>(stream)) {}

  // `cluster`: along z.
  template <typename... Parameters, typename... Arguments>
  Status operator()(void (*kernel)(Parameters...), dim3 grid, int block, int shared, int cluster,
                    const Arguments &...arguments) {
    DeviceLimits limits;
    AOT_TRY(device_limits(op_, &limits));
    AOT_TRY(allow(op_, kernel, cluster, shared));
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {grid, dim3(block), static_cast<size_t>(shared), stream_, attributes, 0};
    if (overlap_ && limits.clusters) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {1, 1, static_cast<unsigned>(cluster)};
    }
    overlap_ = true;
    return check_cuda(op_, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }
  // The next one waits for all.
  void restart() { overlap_ = false; }
  const char *op() const { return op_; }
  cudaStream_t stream() const { return stream_; }

 private:
  const char *op_;
  cudaStream_t stream_;
  bool overlap_ = false;
};

}  // namespace AOT_ISA
}  // namespace aot
