#include "conv2d.h"

#include <algorithm>
#include <utility>

#include "conv/conv2d.cuh"
#include "conv/conv2d_gemm.h"
#include "conv/conv2d_pack.cuh"
#include "conv/conv2d_patches.cuh"
#include "conv/conv2d_planes.h"
#include "cuda/reduce.cuh"
#include "cuda/sum_slices.cuh"
#include "gemm/gemm.h"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------ direct kernels
// They support every call: any layout, stride, dilation, groups, channels and dtype. A thread computes one element of y
// or dx, neighbouring threads neighbouring elements; a warp computes one element of dweight.

constexpr int kDirectBlock = 256;

// The index of the i-th element in memory of a tensor of images.
struct Position {
  int64_t image, channel, row, column;

  __device__ Position(int64_t i, bool nhwc, int64_t channels, int64_t height, int64_t width) {
    if (nhwc) channel = i % channels, i /= channels;
    column = i % width, i /= width;
    row = i % height, i /= height;
    if (!nhwc) channel = i % channels, i /= channels;
    image = i;
  }
};

__device__ inline int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    conv2d_kernel(Conv2dCall c, const T *x, const T *weight, const T *bias, T *y, int64_t n) {
  const int64_t i = first_index();
  if (i >= n) return;
  const Position to(i, c.nhwc, c.s.out_channels, c.s.out_h, c.s.out_w);
  const int64_t channels = c.s.channels / c.groups, first = to.channel / (c.s.out_channels / c.groups) * channels;
  Accumulate<T> sum = 0;
  for (int64_t r = 0; r < c.s.kernel_h; ++r) {
    const int64_t h = to.row * c.stride_h + r * c.dilation_h - c.padding_h;
    if (h < 0 || h >= c.s.height) continue;
    for (int64_t s = 0; s < c.s.kernel_w; ++s) {
      const int64_t w = to.column * c.stride_w + s * c.dilation_w - c.padding_w;
      if (w < 0 || w >= c.s.width) continue;
      const T *from = x + c.x.at(to.image, first, h, w), *by = weight + c.weight.at(to.channel, 0, r, s);
      for (int64_t k = 0; k < channels; ++k, from += c.x.channel, by += c.weight.channel)
        sum += widen(*from) * widen(*by);
    }
  }
  y[i] = narrow<T>(bias ? sum + widen(bias[to.channel]) : sum);
}

template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    conv2d_dx_kernel(Conv2dCall c, const T *dy, const T *weight, T *dx, int64_t n) {
  const int64_t i = first_index();
  if (i >= n) return;
  const Position to(i, c.nhwc, c.s.channels, c.s.height, c.s.width);
  const int64_t channels = c.s.channels / c.groups, out_channels = c.s.out_channels / c.groups;
  const int64_t first = to.channel / channels * out_channels, channel = to.channel % channels;
  Accumulate<T> sum = 0;
  for (int64_t r = 0; r < c.s.kernel_h; ++r) {
    const int64_t h = to.row + c.padding_h - r * c.dilation_h, p = h / c.stride_h;
    if (h < 0 || h % c.stride_h != 0 || p >= c.s.out_h) continue;
    for (int64_t s = 0; s < c.s.kernel_w; ++s) {
      const int64_t w = to.column + c.padding_w - s * c.dilation_w, q = w / c.stride_w;
      if (w < 0 || w % c.stride_w != 0 || q >= c.s.out_w) continue;
      const T *from = dy + c.y.at(to.image, first, p, q), *by = weight + c.weight.at(first, channel, r, s);
      for (int64_t k = 0; k < out_channels; ++k, from += c.y.channel, by += c.weight.image)
        sum += widen(*from) * widen(*by);
    }
  }
  dx[i] = narrow<T>(sum);
}

template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    conv2d_dweight_kernel(Conv2dCall c, const T *dy, const T *x, T *dweight, int64_t n) {
  const int64_t i = first_index() / 32;
  if (i >= n) return;
  const int64_t channels = c.s.channels / c.groups;
  const Position to(i, c.nhwc, channels, c.s.kernel_h, c.s.kernel_w);  // `image` is the output channel
  const int64_t channel = to.image / (c.s.out_channels / c.groups) * channels + to.channel;
  Accumulate<T> of_lane[1];
  LongSums<Accumulate<T>, 1> terms(of_lane);
  terms.each(lane_index(), c.pixels, 32, [&](int64_t k) {
    const int64_t q = k % c.s.out_w, p = k / c.s.out_w % c.s.out_h, image = k / c.s.out_w / c.s.out_h;
    const int64_t h = p * c.stride_h + to.row * c.dilation_h - c.padding_h;
    const int64_t w = q * c.stride_w + to.column * c.dilation_w - c.padding_w;
    if (0 <= h && h < c.s.height && 0 <= w && w < c.s.width)
      terms.run[0] += widen(dy[c.y.at(image, to.image, p, q)]) * widen(x[c.x.at(image, channel, h, w)]);
  });
  const Accumulate<T> sum = sum_lanes<32>(of_lane[0]);
  if (lane_index() == 0) dweight[i] = narrow<T>(sum);
}

// Blocks for n threads. More blocks than a grid holds would be a tensor of 2^39 elements.
inline unsigned direct_grid(int64_t n) { return grid_size(ceil_div(n, kDirectBlock)); }

// --------------------------------------------------------------------------------------------------------------- dbias

// partial[slice][out_channel]: a block sums one slice of the pixels for 32 output channels (NHWC) or one (NCHW). A
// single slice is dbias.
template <typename T>
__global__ void __launch_bounds__(256)
    conv2d_dbias_kernel(Conv2dCall c, const T *dy, Accumulate<T> *partial, T *dbias) {
  using A = Accumulate<T>;
  __shared__ A sums[8][33];
  const int64_t pixels = c.pixels, length = (pixels + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * length, end = begin + length < pixels ? begin + length : pixels;
  const int lane = lane_index(), warp = warp_index();
  const int64_t output = c.nhwc ? int64_t{blockIdx.x} * 32 + lane : blockIdx.x;
  A of_thread[1];
  LongSums<A, 1> terms(of_thread);
  if (c.nhwc) {
    terms.each(begin + warp, output < c.s.out_channels ? end : 0, 8,
               [&](int64_t k) { terms.run[0] += widen(dy[k * c.s.out_channels + output]); });
  } else {
    // 32-bit divisions where they suffice: two of 64 bits would take longer than to read the element
    const int64_t plane = c.s.out_h * c.s.out_w;
    const auto plane32 = static_cast<unsigned>(plane);
    terms.each(begin + threadIdx.x, end, 256, [&](int64_t k) {
      const int64_t image = pixels <= UINT32_MAX ? static_cast<unsigned>(k) / plane32 : k / plane;
      terms.run[0] += widen(dy[(image * c.s.out_channels + output - image) * plane + k]);
    });
  }
  A sum = c.nhwc ? of_thread[0] : sum_lanes<32>(of_thread[0]);
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || output >= c.s.out_channels) return;
  for (int w = 1; w < 8; ++w) sum += sums[w][lane];
  if (!c.nhwc && lane != 0) return;
  if (gridDim.y == 1) dbias[output] = narrow<T>(sum);
  else partial[blockIdx.y * c.s.out_channels + output] = sum;
}

// Adds the slices of dweight, (slices, out_channels, kernel, channels) with padded channels, and writes them in its own
// layout. A thread has four neighbouring channels; the warps of a block share the slices.
template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    sum_dweight_kernel(Conv2dCall c, const float *partial, int slices, int64_t slice, unsigned channels, T *dweight) {
  constexpr int kWarps = kDirectBlock / 32;
  __shared__ float4 sums[kWarps][32];
  const int lane = lane_index(), warp = warp_index();
  const unsigned i = (blockIdx.x * 32 + lane) * 4, kernel = static_cast<unsigned>(c.s.kernel_h * c.s.kernel_w);
  const unsigned channel = i % channels, k = i / channels % kernel, output = i / channels / kernel;
  auto add = [](float4 &a, const float4 &b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; };
  float4 sum = {};
  wait_for_kernel_before();
  if (output < c.s.out_channels)
#pragma unroll 8
    for (int s = warp; s < slices; s += kWarps) add(sum, *reinterpret_cast<const float4 *>(partial + s * slice + i));
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || output >= c.s.out_channels) return;
  for (int w = 1; w < kWarps; ++w) add(sum, sums[w][lane]);
  T *to = dweight + output * c.weight.image + k * c.weight.tap;
  const float each[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (channel + e < c.s.channels) to[(channel + e) * c.weight.channel] = narrow<T>(each[e]);
}

// The sum of few slices, which large weights have, in another layout. A warp has 32 channels of an output channel for
// kSumTaps kernel elements, and transposes them in shared memory, so that its stores are contiguous in either layout.
constexpr int kSumTaps = 16;

template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    sum_dweight_transposed_kernel(Conv2dCall c, const float *partial, int slices, int64_t slice, unsigned channels,
                                  T *dweight) {
  __shared__ float sums[kDirectBlock / 32][kSumTaps][33];
  const int lane = lane_index(), warp = warp_index(), kernel = static_cast<int>(c.s.kernel_h * c.s.kernel_w);
  const unsigned pieces = (kernel + kSumTaps - 1) / kSumTaps, parts = (channels + 31) / 32;
  const unsigned item = blockIdx.x * (kDirectBlock / 32) + warp;
  const int k0 = item % pieces * kSumTaps, c0 = item / pieces % parts * 32, output = item / pieces / parts;
  const int taps = kernel - k0 < kSumTaps ? kernel - k0 : kSumTaps;
  const bool there = output < c.s.out_channels && c0 + lane < c.s.channels;
  const float *from = partial + (int64_t{output} * kernel + k0) * channels + c0 + lane;
  float sum[kSumTaps] = {};
  wait_for_kernel_before();
  for (int s = 0; there && s < slices; ++s)
#pragma unroll
    for (int k = 0; k < kSumTaps; ++k)
      if (k < taps) sum[k] += from[s * slice + k * channels];
#pragma unroll
  for (int k = 0; k < kSumTaps; ++k) sums[warp][k][lane] = sum[k];
  __syncwarp();
  if (output >= c.s.out_channels) return;
  T *to = dweight + output * c.weight.image + c0 * c.weight.channel + k0 * c.weight.tap;
  for (int i = lane; i < taps * 32; i += 32) {
    const int k = c.nhwc ? i / 32 : i % taps, channel = c.nhwc ? i % 32 : i / taps;
    if (c0 + channel < c.s.channels)
      to[channel * c.weight.channel + k * c.weight.tap] = narrow<T>(sums[warp][k][channel]);
  }
}

// The sum of few slices that have the weight's layout. A thread has a vector of it.
template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    sum_dweight_flat_kernel(const float *partial, int slices, int64_t slice, T *dweight) {
  const int64_t i = (int64_t{blockIdx.x} * kDirectBlock + threadIdx.x) * kVectorSize<T>;
  static_assert(kVectorSize<T> % 4 == 0, "loads of float4");
  Widened<T> sum = {};
  wait_for_kernel_before();
  if (i >= slice) return;
#pragma unroll 4
  for (int s = 0; s < slices; ++s)
#pragma unroll
    for (int j = 0; j < kVectorSize<T>; j += 4) {
      const float4 v = *reinterpret_cast<const float4 *>(partial + s * slice + i + j);
      sum[j] += v.x, sum[j + 1] += v.y, sum[j + 2] += v.z, sum[j + 3] += v.w;
    }
  store(dweight + i, narrow(sum));
}

template <typename T>
Status sum_dweight(const Conv2dCall &c, const float *partial, int slices, int64_t slice, int64_t channels, T *dweight,
                   LaunchSequence &launch) {
  const int64_t fours = c.s.out_channels * c.s.kernel() * channels / 4;
  const int64_t items = c.s.out_channels * ceil_div(channels, 32) * ceil_div(c.s.kernel(), kSumTaps);
  auto with = [&](auto *kernel, int64_t blocks) {
    return launch(kernel, grid_size(blocks), kDirectBlock, 0, 1, c, partial, slices, slice,
                  static_cast<unsigned>(channels), dweight);
  };
  if (slices > 4) return with(sum_dweight_kernel<T>, ceil_div(fours, 32));
  const int64_t kernel = c.s.kernel();
  const bool flat = c.weight.channel == 1 && (kernel == 1 || c.weight.tap == channels) && c.s.channels == channels &&
                    c.weight.image == kernel * channels && slice == c.s.out_channels * kernel * channels;
  if (flat && slice % kVectorSize<T> == 0 && aligned(partial, dweight)) {
    const unsigned blocks = grid_size(ceil_div(slice / kVectorSize<T>, kDirectBlock));
    return launch(sum_dweight_flat_kernel<T>, blocks, kDirectBlock, 0, 1, partial, slices, slice, dweight);
  }
  return with(sum_dweight_transposed_kernel<T>, ceil_div(items, kDirectBlock / 32));
}

template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    add_bias_kernel(const T *bias, T *y, int64_t n, int64_t channels, int64_t plane) {
  const int64_t i = first_index();
  if (i < n) y[i] += bias[i / plane % channels];
}

// ----------------------------------------------------------------------------------------------------------- launchers

Planes x_planes(const Conv2dShape &s) { return {s.batch, s.channels, s.height * s.width}; }
Planes y_planes(const Conv2dShape &s) { return {s.batch, s.out_channels, s.out_h * s.out_w}; }

// Packs *tensor to `to`, and sets it to `to`, if it is to be packed.
template <typename T>
Status pack_if(bool packed, bool nhwc, const T **tensor, T *to, Planes planes, int64_t images, int64_t channels,
               LaunchSequence &launch) {
  if (!packed) return kOk;
  AOT_TRY(pack(nhwc, *tensor, planes, to, images, channels, launch));
  return *tensor = to, kOk;
}

// As dweight in TF32 takes them.
template <typename T>
Status copy_both_to_hwcn(const Conv2dCall &c, const T *dy, const T *x, T *dy_at, T *x_at, Conv2dGemm *dweight,
                         LaunchSequence &launch) {
  if constexpr (sizeof(T) == 4) {
    dweight->a = dy_at, dweight->b = x_at;
    AOT_TRY(copy_to_hwcn(launch, c.nhwc, dy, y_planes(c.s), dy_at));
    return copy_to_hwcn(launch, c.nhwc, x, x_planes(c.s), x_at);
  }
  return kOk;
}

// The weight (groups, outputs, channels, kernel), in either layout, to the same with a group's outputs, padded,
// innermost, as dx in TF32 takes it.
template <typename T>
Status transpose_weight(const Conv2dCall &c, int64_t padded, const T **weight, T *to, Conv2dGemm *dx,
                        LaunchSequence &launch) {
  const int64_t channels = c.s.channels / c.groups, outputs = c.s.out_channels / c.groups, kernel = c.s.kernel();
  const int64_t n = channels * kernel;
  AOT_TRY(transpose<T>({*weight, to, c.groups, outputs, n, n, padded, padded, c.groups}, launch));
  dx->b_tap = c.nhwc ? channels * padded : padded, dx->b_row = c.nhwc ? padded : kernel * padded;
  return *weight = to, kOk;
}

// An implicit GEMM of a call, of so many channels and outputs of a pixel; without tensors.
Conv2dGemm gemm_of(const Conv2dParams &params, const Conv2dShape &s, DType dtype, int64_t channels,
                   int64_t out_channels) {
  Conv2dGemm p = {};
  p.dtype = dtype, p.tf32 = params.allow_tf32;
  p.batch = s.batch, p.height = s.height, p.width = s.width;
  p.channels = channels, p.out_channels = out_channels, p.groups = params.groups;
  p.kernel_h = s.kernel_h, p.kernel_w = s.kernel_w, p.out_h = s.out_h, p.out_w = s.out_w;
  p.stride_h = params.stride.value[0], p.stride_w = params.stride.value[1];
  p.padding_h = params.padding.value[0], p.padding_w = params.padding.value[1];
  p.dilation_h = s.kernel_h > 1 ? params.dilation.value[0] : 1;
  p.dilation_w = s.kernel_w > 1 ? params.dilation.value[1] : 1;
  p.b_tap = channels / params.groups, p.b_row = s.kernel() * p.b_tap;
  return p;
}

// A call as an implicit GEMM, of tensors that are packed into the workspace first if the kernels cannot take them.
template <typename T>
class ImplicitGemmCall {
 public:
  ImplicitGemmCall(const char *op, const Conv2dParams &params, const Conv2dShape &s, const Conv2dParams::Plan &plan,
                   DType dtype, const Tensor &workspace, cudaStream_t stream)
      : call_(params, s), plan_(plan), launch_(op, stream), next_(workspace.as<float>()) {
    supported_ = workspace && aligned(workspace.data) && plan_.any(params.implicit_gemm) && within_limits(params);
    if (supported_) p_ = gemm_of(params, s, dtype, plan_.channels, plan_.out_channels);
  }

  // Whether the call is supported with y or dy, x or dx, and weight or dweight.
  bool supports(const T *y, const T *x, const T *weight) const {
    return supported_ && (plan_.packed_y || aligned(y)) && (plan_.packed_x || aligned(x)) &&
           (plan_.packed || aligned(weight));
  }
  bool supports_dx() const {
    return (p_.stride_h == 1 && p_.stride_w == 1) || (p_.dilation_h == 1 && p_.dilation_w == 1);
  }

  Status y(const T *x, const T *weight, const T *bias, T *y) {
    const Conv2dShape &s = call_.s;
    if constexpr (sizeof(T) == 4) {
      bool taken;
      AOT_TRY(y_of_three(x, weight, bias, y, &taken));
      if (taken) return kOk;
    }
    T *weight_at = take(plan_.packed ? plan_.weight : 0), *y_at = take(plan_.y), *x_at = take(plan_.x);
    if (bias && (plan_.packed || !aligned(bias))) {
      T *bias_at = take(plan_.bias);
      AOT_TRY(copy_padded<T>({bias, bias_at, 1, s.out_channels, s.out_channels, 1, plan_.out_channels}, launch_));
      bias = bias_at;
    }
    AOT_TRY(pack_weight(&weight, weight_at));
    AOT_TRY(pack_images(plan_.packed_x, &x, x_at, x_planes(call_.s), plan_.channels));
    p_.whole_vectors = !plan_.packed_y;
    p_.pass = Conv2dGemm::y, p_.a = x, p_.b = weight, p_.bias = bias;
    p_.to = y, p_.to_strides = call_.y, p_.to_channels = s.out_channels;
    if (conv2d_sm90_takes(op(), &p_, kMaxCluster, true)) return conv2d_sm90(launch_, p_);
    return cutlass(p_, plan_.packed_y, y_at, y_planes(call_.s), plan_.out_channels);
  }

  // dx or dweight may be null.
  Status backward(const T *dy, const T *x, const T *weight, T *dx, T *dweight) {
    const Conv2dShape &s = call_.s;
    if constexpr (sizeof(T) == 4) {
      bool taken;
      AOT_TRY(backward_of_three(dy, x, weight, dx, dweight, &taken));
      if (taken) return kOk;
    }
    T *weight_at = take(plan_.weight), *dy_at = take(plan_.y), *x_at = take(plan_.x);
    float *slices = next_;
    Conv2dGemm of_dx = p_, of_dweight = p_;
    of_dx.pass = Conv2dGemm::dx, of_dx.to = dx, of_dx.to_strides = call_.x, of_dx.to_channels = s.channels;
    of_dx.whole_vectors = !plan_.packed_x;
    of_dweight.pass = Conv2dGemm::dweight, of_dweight.to_strides.channel = 1, of_dweight.whole_vectors = true;
    // A phase of a strided dx would write single elements of every other pixel of NCHW: dx is packed first, but where
    // one kernel has the phases of neighbouring pixels.
    bool apart = dx && plan_.packed_x && !call_.nhwc && s.channels == plan_.channels && p_.stride_w > 1;
    Conv2dGemm of_planes = of_dx;
    if (apart)
      of_dx.to = x_at, of_dx.to_strides = strides(true, s.channels, s.height, s.width), of_dx.whole_vectors = true;
    const bool dx_sm90 = dx && conv2d_sm90_takes(op(), &of_dx, kMaxCluster, true);
    const bool dx_planes = apart && dx_sm90 && planes_takes_dx(of_planes);
    if (dx_planes) of_dx = of_planes;
    if (dx_planes || !dx_sm90) apart = false, of_dx.to = dx;
    const bool whole = sizeof(T) == 2 && !plan_.packed;
    of_dweight.a = dy, of_dweight.b = x, of_dweight.slices = static_cast<int>(plan_.planes_slices);
    const bool dweight_planes = dweight && planes_takes_dweight(op(), of_dweight);
    of_dweight.hwcn = plan_.hwcn_x > 0;
    const bool dweight_sm90 =
        dweight && !dweight_planes && conv2d_sm90_takes(op(), &of_dweight, static_cast<int>(plan_.slices), whole);
    const bool hwcn = dweight_sm90 && of_dweight.hwcn, packs_x = dweight && !hwcn && !dweight_planes;
    if (hwcn) {
      T *dy_copy = reinterpret_cast<T *>(std::exchange(slices, slices + plan_.hwcn_y));
      T *x_copy = reinterpret_cast<T *>(std::exchange(slices, slices + plan_.hwcn_x));
      AOT_TRY(copy_both_to_hwcn(call_, dy, x, dy_copy, x_copy, &of_dweight, launch_));
    }

    if (dx || packs_x) AOT_TRY(pack_images(plan_.packed_y, &dy, dy_at, y_planes(call_.s), plan_.out_channels));
    auto pack_x = [&] { return pack_images(plan_.packed_x, &x, x_at, x_planes(call_.s), plan_.channels); };
    // x is packed before dx is computed, so that dweight's kernel may overlap dx's; except that packed dx takes the
    // place of packed x
    const bool x_first = !dx || (dx_sm90 && !apart);
    if (packs_x && x_first) AOT_TRY(pack_x());
    if (dx) {
      const bool transposed = dx_sm90 && sizeof(T) == 4;
      AOT_TRY(transposed ? transpose_weight(call_, plan_.out_channels, &weight, weight_at, &of_dx, launch_)
                         : pack_weight(&weight, weight_at));
      of_dx.a = dy, of_dx.b = weight;
      if (dx_planes) AOT_TRY(planes_dx(launch_, of_dx));
      else if (dx_sm90) AOT_TRY(conv2d_sm90(launch_, of_dx));
      else AOT_TRY(cutlass(of_dx, plan_.packed_x, x_at, x_planes(call_.s), plan_.channels));
      if (apart) AOT_TRY(unpack(false, x_at, plan_.channels, x_planes(call_.s), dx, launch_));
    }
    if (!dweight) return kOk;
    if (packs_x) {
      if (!x_first) AOT_TRY(pack_x());
      of_dweight.a = dy, of_dweight.b = x;
    }
    if (dweight_planes) {
      of_dweight.to = slices;
      AOT_TRY(planes_dweight(launch_, &of_dweight));
    } else if (dweight_sm90) {
      of_dweight.to = of_dweight.slices ? static_cast<void *>(slices) : dweight;
      of_dweight.independent = dx_sm90 && x_first;
      AOT_TRY(conv2d_sm90(launch_, of_dweight));
      if (!of_dweight.slices) return kOk;
    } else {
      of_dweight.to = slices;
      of_dweight.slices = static_cast<int>(std::min(plan_.slices, ceil_div(call_.pixels, Conv2dParams::kMinSlice)));
      AOT_TRY(run_cutlass(of_dweight));
    }
    return sum_dweight(call_, slices, of_dweight.slices, plan_.slice, plan_.channels, dweight, launch_);
  }

 private:
  // float32 in three parts: whether the kernels take a pass.
  bool takes_three(Conv2dGemm *p, int max_slices) const {
    p->three = plan_.three;
    p->b_tap = p->parts() * plan_.channels, p->b_row = call_.s.kernel() * p->b_tap;
    return p->three && conv2d_sm90_takes(op(), p, max_slices, false);
  }
  Status split(bool wanted, const float *from, Planes planes, const void **to, int64_t words) {
    float *parts = take(words);
    *to = parts;
    return wanted ? split_images(launch_, call_.nhwc, from, planes, parts) : kOk;
  }

  Planes weight_planes() const { return {call_.s.out_channels, call_.s.channels, call_.s.kernel()}; }

  Status y_of_three(const float *x, const float *weight, const float *bias, float *y, bool *taken) {
    Conv2dGemm p = p_;
    p.pass = Conv2dGemm::y, p.whole_vectors = !plan_.packed_y, p.bias = bias;
    p.to = y, p.to_strides = call_.y, p.to_channels = call_.s.out_channels;
    if (!(*taken = takes_three(&p, 1))) return kOk;
    AOT_TRY(split(true, weight, weight_planes(), &p.b, plan_.three_weight));
    AOT_TRY(split(true, x, x_planes(call_.s), &p.a, plan_.three_x));
    return conv2d_sm90(launch_, p);
  }
  Status backward_of_three(const float *dy, const float *x, const float *weight, float *dx, float *dweight,
                           bool *taken) {
    const Conv2dShape &s = call_.s;
    Conv2dGemm of_dx = p_, of_dweight = p_;
    of_dx.pass = Conv2dGemm::dx, of_dx.to = dx, of_dx.to_strides = call_.x, of_dx.to_channels = s.channels;
    of_dx.whole_vectors = !plan_.packed_x;
    of_dweight.pass = Conv2dGemm::dweight, of_dweight.to_strides.channel = 1, of_dweight.whole_vectors = true;
    const bool takes_dx = !dx || takes_three(&of_dx, 1);
    *taken = takes_dx && (!dweight || takes_three(&of_dweight, static_cast<int>(plan_.three_slices)));
    if (!*taken) return kOk;

    float *x_at = next_;
    AOT_TRY(split(dweight, x, x_planes(call_.s), &of_dweight.b, plan_.three_x));
    AOT_TRY(split(dx, weight, weight_planes(), &of_dx.b, plan_.three_weight));
    AOT_TRY(split(true, dy, y_planes(call_.s), &of_dx.a, plan_.three_y));
    of_dweight.a = of_dx.a, of_dweight.to = next_;
    // A phase of a strided dx would write single elements of every other pixel of NCHW: dx takes the place of x first.
    const bool apart = plan_.packed_x && p_.stride_w > 1;
    if (apart) {
      of_dx.to = x_at, of_dx.to_strides = strides(true, s.channels, s.height, s.width), of_dx.whole_vectors = true;
    } else if (dx) {
      AOT_TRY(conv2d_sm90(launch_, of_dx));
      of_dweight.independent = true;
    }
    if (dweight) {
      AOT_TRY(conv2d_sm90(launch_, of_dweight));
      AOT_TRY(sum_dweight(call_, next_, of_dweight.slices, plan_.slice, plan_.channels, dweight, launch_));
    }
    if (!apart || !dx) return kOk;
    AOT_TRY(conv2d_sm90(launch_, of_dx));
    return unpack(false, x_at, s.channels, x_planes(call_.s), dx, launch_);
  }

  // The GEMM kernels count bytes in 31 bits, and have a bit mask for the rows and columns of the kernel.
  bool within_limits(const Conv2dParams &params) const {
    const Conv2dShape &s = call_.s;
    constexpr int64_t kMaxBytes = 0x7fffffff, kMaxParam = 1 << 15;
    const int64_t in = s.batch * s.height * s.width, out = s.pixels(), weights = s.kernel();
    bool fits = in > 0 && out > 0 && s.channels > 0 && s.out_channels > 0 && s.kernel_h <= 32 && s.kernel_w <= 32;
    for (int i = 0; i < 2; ++i)
      fits = fits && params.stride.value[i] < kMaxParam && params.padding.value[i] < kMaxParam &&
             ((i ? s.kernel_w : s.kernel_h) == 1 || params.dilation.value[i] < kMaxParam);
    const int64_t c = plan_.channels, o = plan_.out_channels, size = sizeof(float);
    return fits && in * c * size < kMaxBytes && out * o * size < kMaxBytes && o * weights * c * size < kMaxBytes;
  }

  const char *op() const { return launch_.op(); }
  T *take(int64_t words) { return reinterpret_cast<T *>(std::exchange(next_, next_ + words)); }

  Status pack_images(bool packed, const T **tensor, T *to, Planes planes, int64_t channels) {
    return pack_if(packed, call_.nhwc, tensor, to, planes, planes.images, channels, launch_);
  }
  Status pack_weight(const T **weight, T *to) {
    return pack_if(plan_.packed, call_.nhwc, weight, to, {call_.s.out_channels, call_.s.channels, call_.s.kernel()},
                   plan_.out_channels, plan_.channels, launch_);
  }
  Status run_cutlass(const Conv2dGemm &p) {
    return (sizeof(T) == 2 ? conv2d_cutlass_16 : conv2d_cutlass_32)(op(), p, launch_.stream());
  }
  // y or dx; `at`: its tensor if it is packed.
  Status cutlass(Conv2dGemm p, bool packed, T *at, Planes planes, int64_t channels) {
    T *to = static_cast<T *>(p.to);
    if (packed) p.to = at;
    AOT_TRY(run_cutlass(p));
    return packed ? unpack(call_.nhwc, at, channels, planes, to, launch_) : kOk;
  }

  const Conv2dCall call_;
  const Conv2dParams::Plan &plan_;
  LaunchSequence launch_;
  float *next_;  // unused workspace
  bool supported_;
  Conv2dGemm p_ = {};
};

// A 1 x 1 kernel on NCHW: one GEMM per image (Conv2dParams::pointwise).
class PointwiseCall {
 public:
  PointwiseCall(const char *op, const Conv2dParams &params, const Conv2dShape &s, DType dtype, cudaStream_t stream)
      : op_(op), s_(s), plane_(s.height * s.width), stream_(stream), supported_(params.pointwise(s, dtype)) {
    g_.dtype = g_.c_dtype = dtype, g_.count = s.batch, g_.allow_tf32 = params.allow_tf32;
  }
  bool supports() const { return supported_; }
  bool supports_dweight(int64_t words) const { return supported_ && s_.batch * s_.out_channels * s_.channels <= words; }

  template <typename T>
  Status y(const T *x, const T *weight, const T *bias, T *y) {
    AOT_TRY(run_gemm(s_.out_channels, plane_, s_.channels, {data(weight), s_.channels}, 0, {data(x), plane_},
                     s_.channels * plane_, {y, plane_}));
    if (!bias) return kOk;
    const int64_t n = s_.batch * s_.out_channels * plane_;
    add_bias_kernel<<<direct_grid(n), kDirectBlock, 0, stream_>>>(bias, y, n, s_.out_channels, plane_);
    return check_launch(op_);
  }
  template <typename T>
  Status dx(const T *dy, const T *weight, T *dx) {
    return run_gemm(s_.channels, plane_, s_.out_channels, {data(weight), s_.channels, true}, 0, {data(dy), plane_},
                    s_.out_channels * plane_, {dx, plane_});
  }
  template <typename T>
  Status dweight(const T *dy, const T *x, T *images, T *dweight) {
    AOT_TRY(run_gemm(s_.out_channels, s_.channels, plane_, {data(dy), plane_}, s_.out_channels * plane_,
                     {data(x), plane_, true}, s_.channels * plane_, {images, s_.channels}));
    return sum_slices<double>(op_, images, s_.batch, dweight, s_.out_channels * s_.channels, stream_);
  }

 private:
  static void *data(const void *p) { return const_cast<void *>(p); }
  Status run_gemm(int64_t m, int64_t n, int64_t k, Operand a, int64_t a_step, Operand b, int64_t b_step, Operand c) {
    g_.m = m, g_.n = n, g_.k = k, g_.a = a, g_.b = b, g_.c = c;
    g_.a_step = a_step, g_.b_step = b_step, g_.c_step = m * n;
    return gemm(op_, g_, stream_);
  }
  const char *op_;
  const Conv2dShape s_;
  const int64_t plane_;
  const cudaStream_t stream_;
  bool supported_;
  GemmParams g_ = {};
};

// Patches (conv2d_patches.cuh) and products of them. The workspace has cuBLASLt's scratch, the patches, a weight whose
// rows are padded as theirs, and y as (pixels, outputs) if it is NCHW.
template <typename T>
class PatchesCall {
 public:
  PatchesCall(const char *op, const Conv2dParams &params, const Conv2dShape &s, const Conv2dParams::Plan &plan,
              DType dtype, const Tensor &workspace, cudaStream_t stream)
      : op_(op), call_(params, s), plan_(plan), launch_(op, stream), stream_(stream) {
    const bool has_workspace = workspace && aligned(workspace.data);
    supported_ = plan_.any(params.patches) && (has_workspace || !(plan_.library || plan_.x));
    if (!supported_) return;
    auto *next = has_workspace ? workspace.as<Accumulate<T>>() : nullptr;
    auto take = [&](int64_t words) { return std::exchange(next, next + words); };
    g_.dtype = g_.c_dtype = dtype, g_.allow_tf32 = params.allow_tf32;
    if (plan_.library) g_.workspace = take(plan_.library), g_.workspace_bytes = plan_.library * sizeof(*next);
    patches_ = reinterpret_cast<T *>(take(plan_.x)), weight_ = reinterpret_cast<T *>(take(plan_.weight));
    y_ = reinterpret_cast<T *>(take(plan_.y));
  }
  bool supports() const { return supported_; }

  Status y(const T *x, const T *weight, const T *bias, T *y) {
    const T *patches;
    AOT_TRY(patches_of(x, &patches));
    AOT_TRY(pad_weight(&weight));
    g_.bias = bias;
    AOT_TRY(run_gemm(call_.pixels, outputs(), depth(), {data(patches), depth()}, {data(weight), depth(), true},
                     {call_.nhwc ? y : y_, outputs()}));
    return call_.nhwc ? kOk : unpack(false, y_, outputs(), y_planes(call_.s), y, launch_);
  }
  // dx or dweight may be null.
  Status backward(const T *dy, const T *x, const T *weight, T *dx, T *dweight) {
    if (!call_.nhwc) {
      AOT_TRY(pack(false, dy, y_planes(call_.s), y_, call_.s.batch, outputs(), launch_));
      dy = y_;
    }
    if (dweight) {
      const T *patches;
      AOT_TRY(patches_of(x, &patches));
      T *to = plan_.weight ? weight_ : dweight;
      AOT_TRY(run_gemm(outputs(), depth(), call_.pixels, {data(dy), outputs(), true}, {data(patches), depth()},
                       {to, depth()}));
      if (plan_.weight) {
        launch_.wait_for_all();
        AOT_TRY(copy_padded<T>({to, dweight, outputs(), terms(), depth(), outputs(), terms()}, launch_));
        launch_.wait_for_all();
      }
    }
    if (!dx) return kOk;
    AOT_TRY(pad_weight(&weight));
    T *patches = plan_.x ? patches_ : dx;
    AOT_TRY(
        run_gemm(call_.pixels, depth(), outputs(), {data(dy), outputs()}, {data(weight), depth()}, {patches, depth()}));
    return patches == dx ? kOk : from_patches(op_, call_, patches_, depth(), dx, stream_);
  }

 private:
  static void *data(const void *p) { return const_cast<void *>(p); }
  int64_t outputs() const { return call_.s.out_channels; }
  int64_t terms() const { return call_.s.channels * call_.s.kernel(); }
  int64_t depth() const { return plan_.channels; }  // terms, padded
  // The patches of x, which x itself may be.
  Status patches_of(const T *x, const T **patches) {
    *patches = plan_.x ? patches_ : x;
    return plan_.x ? to_patches(op_, call_, x, depth(), patches_, stream_) : kOk;
  }
  Status pad_weight(const T **weight) {
    if (!plan_.weight) return kOk;
    launch_.wait_for_all();
    AOT_TRY(copy_padded<T>({*weight, weight_, outputs(), terms(), terms(), outputs(), depth()}, launch_));
    launch_.wait_for_all();
    return *weight = weight_, kOk;
  }
  Status run_gemm(int64_t m, int64_t n, int64_t k, Operand a, Operand b, Operand c) {
    g_.m = m, g_.n = n, g_.k = k, g_.a = a, g_.b = b, g_.c = c;
    return gemm(op_, g_, stream_);
  }

  const char *op_;
  const Conv2dCall call_;
  const Conv2dParams::Plan &plan_;
  LaunchSequence launch_;
  const cudaStream_t stream_;
  bool supported_;
  T *patches_ = nullptr, *weight_ = nullptr, *y_ = nullptr;
  GemmParams g_ = {};
};

template <typename T>
Status few_channels_dweight(const Conv2dBackward &op, const Conv2dCall &c, DType dtype, const T *dy, const T *x,
                            float *partial, T *dweight, cudaStream_t stream) {
  const Conv2dParams::FewTiles tiles = op.few_dweight(c.s, dtype);
  const int64_t channels = 4 * tiles.quads, slice = c.s.out_channels * c.s.kernel() * channels;
  const auto slices = static_cast<int>(op.few_slices(c.s, tiles).slices);
  LaunchSequence launch(op.name, stream);
  AOT_TRY(few_dweight<T>(launch, op, c, dtype, dy, x, partial));
  return sum_dweight(c, partial, slices, slice, channels, dweight, launch);
}

template <typename T>
Status depthwise_dweight(const Conv2dBackward &op, const Conv2dCall &c, DType dtype, const T *dy, const T *x,
                         float *partial, T *dweight, cudaStream_t stream, bool *taken) {
  int slices;
  LaunchSequence launch(op.name, stream);
  AOT_TRY(depthwise_dweight(launch, op, c, dtype, dy, x, partial, &slices, taken));
  if (!*taken) return kOk;
  // the whole weight as the channels of one output
  Conv2dCall whole = c;
  whole.s.channels = c.s.channels * c.s.kernel(), whole.s.out_channels = 1;
  whole.s.kernel_h = whole.s.kernel_w = 1, whole.weight.channel = 1;
  const int64_t slice = op.depthwise_slice(c.s);
  return sum_dweight(whole, partial, slices, slice, slice, dweight, launch);
}

// A call with groups of several channels, of tensors that are packed into the workspace first if the kernels cannot
// take them.
template <typename T>
class GroupedImages {
 public:
  GroupedImages(const char *op, const Conv2dParams &params, const Conv2dShape &s, const Conv2dParams::Plan &plan,
                const Tensor &workspace, cudaStream_t stream)
      : call_(params, s), plan_(plan), launch_(op, stream), next_(workspace.as<float>()) {
    supported_ = plan.any(params.grouped) && workspace && aligned(workspace.data);
  }

  // Whether the call is supported with these images, which other kernels than those of packing read or write.
  bool supports(const T *x, const T *y) const {
    return supported_ && (plan_.packed_x || aligned(x)) && (plan_.packed_y || aligned(y));
  }

  Status y(const T *x, const T *weight, const T *bias, T *y) {
    T *x_at = take(plan_.x), *y_at = plan_.packed_y ? take(plan_.y) : y;
    AOT_TRY(pack_images(plan_.packed_x, &x, x_planes(call_.s), x_at, plan_.channels));
    AOT_TRY(grouped_forward(launch_, plan_.grouped_images, call_, false, x, weight, bias, next_, y_at));
    return plan_.packed_y ? unpack(call_.nhwc, y_at, plan_.out_channels, y_planes(call_.s), y, launch_) : kOk;
  }

  // dx or dweight may be null. Packed dx takes the place of packed x.
  Status backward(const T *dy, const T *x, const T *weight, T *dx, T *dweight) {
    T *x_at = take(plan_.x), *dy_at = take(plan_.y);
    AOT_TRY(pack_images(plan_.packed_y, &dy, y_planes(call_.s), dy_at, plan_.out_channels));
    if (dweight) {
      const Grouped &g = plan_.grouped_dweight;
      AOT_TRY(pack_images(plan_.packed_x, &x, x_planes(call_.s), x_at, plan_.channels));
      AOT_TRY(grouped_dweight(launch_, g, dy, x, next_));
      Conv2dCall of_group = call_;
      of_group.s.channels = g.in;
      AOT_TRY(sum_dweight(of_group, next_, g.slices, g.slice(), g.slice_channels(), dweight, launch_));
    }
    if (!dx) return kOk;
    launch_.wait_for_all();  // the weight's operands take the place of dweight's sums, and dx that of x
    T *dx_at = plan_.packed_x ? x_at : dx;
    AOT_TRY(grouped_forward(launch_, plan_.grouped_images, call_, true, dy, weight, static_cast<const T *>(nullptr),
                            next_, dx_at));
    return plan_.packed_x ? unpack(call_.nhwc, dx_at, plan_.channels, x_planes(call_.s), dx, launch_) : kOk;
  }

 private:
  T *take(int64_t words) { return reinterpret_cast<T *>(std::exchange(next_, next_ + words)); }
  Status pack_images(bool packed, const T **tensor, Planes planes, T *to, int64_t channels) {
    return pack_if(packed, call_.nhwc, tensor, to, planes, planes.images, channels, launch_);
  }

  const Conv2dCall call_;
  const Conv2dParams::Plan &plan_;
  LaunchSequence launch_;
  float *next_;
  bool supported_;
};

// Groups whose channels and outputs are multiples of 64, or divide 64, as an implicit GEMM, on compute capability 9.0:
// NHWC is read as it is, NCHW packed into the workspace first.
template <typename T>
class GroupedGemmCall {
 public:
  GroupedGemmCall(const char *op, const Conv2dParams &params, const Conv2dShape &s, const Conv2dParams::Plan &plan,
                  DType dtype, const Tensor &workspace, cudaStream_t stream)
      : call_(params, s), plan_(plan), launch_(op, stream), next_(workspace.as<float>()) {
    supported_ = plan.any(params.grouped) && workspace && aligned(workspace.data);
    if (supported_) p_ = gemm_of(params, s, dtype, s.channels, s.out_channels), p_.narrow = plan.narrow;
  }

  // *taken: whether kernels take the call, with these tensors.
  Status y(const T *x, const T *weight, const T *bias, T *y, bool *taken) {
    Conv2dGemm p = p_;
    p.pass = Conv2dGemm::y, p.whole_vectors = !plan_.packed_y, p.bias = bias;
    p.to = y, p.to_strides = call_.y, p.to_channels = call_.s.out_channels;
    if (!(*taken = plan_.boxes && reads(x, y) && conv2d_sm90_takes(launch_.op(), &p, 1, true))) return kOk;
    T *x_at = take(plan_.x), *weight_at = take(plan_.weight);
    AOT_TRY(pack_weight(&weight, weight_at));
    AOT_TRY(pack_images(plan_.packed_x, &x, x_planes(call_.s), x_at));
    p.a = x, p.b = weight;
    return conv2d_sm90(launch_, p);
  }

  // Computes those of dx and dweight that are wanted and that kernels take, and sets *dx_left and *dweight_left,
  // whether they are wanted, to false.
  Status backward(const T *dy, const T *x, const T *weight, T *dx, T *dweight, bool *dx_left, bool *dweight_left) {
    const Conv2dShape &s = call_.s;
    T *x_at = take(plan_.x), *dy_at = take(plan_.y), *weight_at = take(plan_.weight);
    // A phase of a strided dx would write single elements of every other pixel of NCHW: dx takes the place of x first.
    const bool apart = plan_.packed_x && p_.stride_w > 1;
    Conv2dGemm of_dx = p_, of_dweight = p_;
    of_dx.pass = Conv2dGemm::dx, of_dx.to_channels = s.channels, of_dx.whole_vectors = apart || !plan_.packed_x;
    of_dx.to = apart ? x_at : dx, of_dx.to_strides = apart ? strides(true, s.channels, s.height, s.width) : call_.x;
    of_dweight.pass = Conv2dGemm::dweight, of_dweight.to_strides.channel = 1, of_dweight.whole_vectors = true;
    const bool takes_dx = *dx_left && plan_.boxes && reads(dy, dx) && conv2d_sm90_takes(launch_.op(), &of_dx, 1, true);
    of_dweight.hwcn = plan_.hwcn_x > 0;
    const bool takes_dweight =
        *dweight_left && plan_.boxes_dweight && reads(dy, x) &&
        conv2d_sm90_takes(launch_.op(), &of_dweight, static_cast<int>(plan_.slices), call_.nhwc && aligned(dweight));
    if (!takes_dx && !takes_dweight) return kOk;

    // Packing comes first, so that dweight's kernel may overlap dx's.
    if (takes_dweight && of_dweight.hwcn) {
      T *dy_copy = take(plan_.hwcn_y), *x_copy = take(plan_.hwcn_x);
      AOT_TRY(copy_both_to_hwcn(call_, dy, x, dy_copy, x_copy, &of_dweight, launch_));
      if (takes_dx) AOT_TRY(pack_images(plan_.packed_y, &dy, y_planes(call_.s), dy_at));
    } else {
      AOT_TRY(pack_images(plan_.packed_y, &dy, y_planes(call_.s), dy_at));
      if (takes_dweight) AOT_TRY(pack_images(plan_.packed_x, &x, x_planes(call_.s), x_at));
      of_dweight.a = dy, of_dweight.b = x;
    }
    if (takes_dx)
      AOT_TRY(sizeof(T) == 4
                  ? transpose_weight(call_, call_.s.out_channels / call_.groups, &weight, weight_at, &of_dx, launch_)
                  : pack_weight(&weight, weight_at));
    of_dx.a = dy, of_dx.b = weight;
    if (takes_dx && !apart) AOT_TRY(conv2d_sm90(launch_, of_dx));
    if (takes_dweight) {
      of_dweight.to = of_dweight.slices ? static_cast<void *>(next_) : dweight;
      of_dweight.independent = takes_dx && !apart;
      AOT_TRY(conv2d_sm90(launch_, of_dweight));
      Conv2dCall of_group = call_;
      of_group.s.channels = s.channels / call_.groups;
      if (of_dweight.slices)
        AOT_TRY(sum_dweight(of_group, next_, of_dweight.slices, plan_.slice, of_group.s.channels, dweight, launch_));
    }
    if (takes_dx && apart) {
      AOT_TRY(conv2d_sm90(launch_, of_dx));
      AOT_TRY(unpack(false, x_at, s.channels, x_planes(call_.s), dx, launch_));
    }
    *dx_left = *dx_left && !takes_dx, *dweight_left = *dweight_left && !takes_dweight;
    return kOk;
  }

 private:
  // Whether TMA takes two images, which are packed or as they are.
  bool reads(const T *a, const T *b) const { return supported_ && (!call_.nhwc || aligned(a, b)); }
  T *take(int64_t words) { return reinterpret_cast<T *>(std::exchange(next_, next_ + words)); }
  Status pack_images(bool packed, const T **images, Planes planes, T *to) {
    return pack_if(packed, call_.nhwc, images, to, planes, planes.images, planes.channels, launch_);
  }
  Status pack_weight(const T **weight, T *to) {
    const Planes planes = {call_.s.out_channels, call_.s.channels / call_.groups, call_.s.kernel()};
    const bool packed = !call_.nhwc || !aligned(*weight);
    return pack_if(packed, call_.nhwc, weight, to, planes, planes.images, planes.channels, launch_);
  }

  const Conv2dCall call_;
  const Conv2dParams::Plan &plan_;
  LaunchSequence launch_;
  float *next_;  // unused workspace
  bool supported_;
  Conv2dGemm p_ = {};
};

template <typename T>
Status direct_dx(const Conv2dCall &c, const T *dy, const T *weight, T *dx, cudaStream_t stream) {
  const int64_t n = c.s.batch * c.s.channels * c.s.height * c.s.width;
  conv2d_dx_kernel<<<direct_grid(n), kDirectBlock, 0, stream>>>(c, dy, weight, dx, n);
  return check_launch(Conv2dBackward::name);
}

template <typename T>
Status direct_dweight(const Conv2dCall &c, const T *dy, const T *x, T *dweight, cudaStream_t stream) {
  const int64_t n = c.s.out_channels * c.weight.image;
  conv2d_dweight_kernel<<<direct_grid(n * 32), kDirectBlock, 0, stream>>>(c, dy, x, dweight, n);
  return check_launch(Conv2dBackward::name);
}

template <typename T>
Status direct_dbias(const Conv2dCall &c, const T *dy, Accumulate<T> *partial, T *dbias, cudaStream_t stream) {
  // eight pixels for each warp (NHWC) or thread (NCHW), in at most kSlices slices
  const int64_t wanted = ceil_div(c.pixels, c.nhwc ? 64 : 2048);
  const auto slices = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, Conv2dAttrs::kSlices));
  const dim3 grid(static_cast<unsigned>(c.nhwc ? ceil_div(c.s.out_channels, 32) : c.s.out_channels), slices);
  conv2d_dbias_kernel<<<grid, 256, 0, stream>>>(c, dy, partial, dbias);
  AOT_TRY(check_launch(Conv2dBackward::name));
  if (slices == 1) return kOk;
  return sum_slices<double>(Conv2dBackward::name, partial, slices, dbias, c.s.out_channels, stream);
}

// Whether the device supports the implicit GEMM kernels: CUTLASS's, and those of few channels, need compute capability
// 8.0.
Status supports_implicit_gemm(const char *op, bool *yes) {
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  return *yes = limits.major >= 8, kOk;
}

// The operator with the layout in which its tensors are read.
template <class Op>
Op read_as(Op op, const Conv2dShape &s, DType dtype) {
  static_cast<Conv2dParams &>(op) = op.as_read(s, dtype);
  return op;
}

Status conv2d_cuda(const Conv2d &given, const Tensor *in, const Tensor *out, void *stream_) {
  const Conv2dShape s = given.shape(in[0], in[1], out[0]);
  const Conv2d op = read_as(given, s, in[0].dtype);
  const int64_t n = out[0].size();
  if (n == 0) return kOk;
  const auto stream = static_cast<cudaStream_t>(stream_);
  bool implicit_gemm;
  AOT_TRY(supports_implicit_gemm(op.name, &implicit_gemm));
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *x = in[0].as<const T>(), *weight = in[1].as<const T>(), *bias = in[2].as<const T>();
    T *y = out[0].as<T>();
    if constexpr (sizeof(T) > 2) {
      PointwiseCall call(op.name, op, s, in[0].dtype, stream);
      if (call.supports()) return call.y(x, weight, bias, y);
    }
    const auto plan = op.forward_plan(s, in[0].dtype);
    PatchesCall<T> patches(op.name, op, s, plan, in[0].dtype, out[1], stream);
    if (patches.supports()) return patches.y(x, weight, bias, y);
    if constexpr (sizeof(T) < 8) {
      bool depthwise = false;
      AOT_TRY(depthwise_forward(op.name, op, Conv2dCall(op, s), in[0].dtype, false, x, weight, bias, y, stream,
                                &depthwise));
      if (depthwise) return kOk;
      if (implicit_gemm && plan.of_y == op.few_channels) {
        LaunchSequence launch(op.name, stream);
        return few_forward<T>(launch, op, Conv2dCall(op, s), in[0].dtype, x, weight, bias, y);
      }
      ImplicitGemmCall<T> call(op.name, op, s, plan, in[0].dtype, out[1], stream);
      if (implicit_gemm && plan.of_y == op.implicit_gemm && call.supports(y, x, weight))
        return call.y(x, weight, bias, y);
      bool taken;
      GroupedGemmCall<T> gemm(op.name, op, s, plan, in[0].dtype, out[1], stream);
      AOT_TRY(gemm.y(x, weight, bias, y, &taken));
      if (taken) return kOk;
      GroupedImages<T> grouped(op.name, op, s, plan, out[1], stream);
      if (implicit_gemm && plan.of_y == op.grouped && plan.grouped_images.groups && grouped.supports(x, y))
        return grouped.y(x, weight, bias, y);
    }
    conv2d_kernel<<<direct_grid(n), kDirectBlock, 0, stream>>>(Conv2dCall(op, s), x, weight, bias, y, n);
    return check_launch(op.name);
  });
}

Status conv2d_backward_cuda(const Conv2dBackward &given, const Tensor *in, const Tensor *out, void *stream_) {
  const Conv2dShape s = given.shape(in[1], in[2], in[0]);
  const Conv2dBackward op = read_as(given, s, in[0].dtype);
  const Conv2dCall c(op, s);
  const bool wants_dx = out[0] && out[0].size(), wants_dweight = out[1] && out[1].size(),
             wants_dbias = out[2] && out[2].size();
  if (wants_dbias && !out[3]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  const auto stream = static_cast<cudaStream_t>(stream_);
  bool implicit_gemm;
  AOT_TRY(supports_implicit_gemm(op.name, &implicit_gemm));
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const T *dy = in[0].as<const T>(), *x = in[1].as<const T>(), *weight = in[2].as<const T>();
    T *dx = out[0].as<T>(), *dweight = out[1].as<T>();
    bool dx_left = wants_dx, dweight_left = wants_dweight;
    if constexpr (sizeof(T) > 2) {
      PointwiseCall call(op.name, op, s, in[0].dtype, stream);
      if (dx_left && call.supports()) {
        AOT_TRY(call.dx(dy, weight, dx));
        dx_left = false;
      }
      if (dweight_left && out[3] && call.supports_dweight(out[3].size() - op.kSlices * s.out_channels)) {
        AOT_TRY(call.dweight(dy, x, out[3].as<T>(), dweight));
        dweight_left = false;
      }
    }
    const auto plan = op.backward_plan(s, in[0].dtype);
    PatchesCall<T> patches(op.name, op, s, plan, in[0].dtype, out[3], stream);
    if (patches.supports()) {
      const bool of_dx = dx_left && plan.of_dx == op.patches,
                 of_dweight = dweight_left && plan.of_dweight == op.patches;
      if (of_dx || of_dweight)
        AOT_TRY(patches.backward(dy, x, weight, of_dx ? dx : nullptr, of_dweight ? dweight : nullptr));
      dx_left = dx_left && !of_dx, dweight_left = dweight_left && !of_dweight;
    }
    if constexpr (sizeof(T) < 8) {
      bool depthwise = false;
      if (dx_left)
        AOT_TRY(depthwise_forward<T>(op.name, op, c, in[0].dtype, true, dy, weight, nullptr, dx, stream, &depthwise));
      dx_left = dx_left && !depthwise, depthwise = false;
      if (dweight_left && plan.of_dweight == op.depthwise && out[3] && aligned(out[3].data))
        AOT_TRY(depthwise_dweight(op, c, in[0].dtype, dy, x, out[3].as<float>(), dweight, stream, &depthwise));
      dweight_left = dweight_left && !depthwise;
      if (implicit_gemm && out[3] && aligned(out[3].data)) {
        if (dweight_left && plan.of_dweight == op.few_channels) {
          AOT_TRY(few_channels_dweight(op, c, in[0].dtype, dy, x, out[3].as<float>(), dweight, stream));
          dweight_left = false;
        }
        if (dx_left && plan.of_dx == op.few_channels) {
          LaunchSequence launch(op.name, stream);
          AOT_TRY(few_dx<T>(launch, op, c, in[0].dtype, dy, weight, out[3].as<float>(), dx));
          dx_left = false;
        }
      }
      ImplicitGemmCall<T> call(op.name, op, s, plan, in[0].dtype, out[3], stream);
      const bool of_dx = implicit_gemm && dx_left && plan.of_dx == op.implicit_gemm && call.supports(dy, dx, weight) &&
                         call.supports_dx();
      const bool of_dweight =
          implicit_gemm && dweight_left && plan.of_dweight == op.implicit_gemm && call.supports(dy, x, dweight);
      if (of_dx || of_dweight)
        AOT_TRY(call.backward(dy, x, weight, of_dx ? dx : nullptr, of_dweight ? dweight : nullptr));
      dx_left = dx_left && !of_dx, dweight_left = dweight_left && !of_dweight;
      GroupedGemmCall<T> gemm(op.name, op, s, plan, in[0].dtype, out[3], stream);
      AOT_TRY(gemm.backward(dy, x, weight, dx, dweight, &dx_left, &dweight_left));
      GroupedImages<T> grouped(op.name, op, s, plan, out[3], stream);
      const bool dx_grouped = implicit_gemm && dx_left && plan.of_dx == op.grouped && plan.grouped_images.groups &&
                              grouped.supports(dx, dy);
      const bool dweight_grouped = implicit_gemm && dweight_left && plan.of_dweight == op.grouped &&
                                   plan.grouped_dweight.groups && grouped.supports(x, dy);
      if (dx_grouped || dweight_grouped)
        AOT_TRY(grouped.backward(dy, x, weight, dx_grouped ? dx : nullptr, dweight_grouped ? dweight : nullptr));
      dx_left = dx_left && !dx_grouped, dweight_left = dweight_left && !dweight_grouped;
    }
    if (dx_left) AOT_TRY(direct_dx(c, dy, weight, dx, stream));
    if (dweight_left) AOT_TRY(direct_dweight(c, dy, x, dweight, stream));
    if (wants_dbias) {
      A *partial = out[3].as<A>() + out[3].size() - op.kSlices * s.out_channels;
      AOT_TRY(direct_dbias(c, dy, partial, out[2].as<T>(), stream));
    }
    return kOk;
  });
}

}  // namespace

#ifndef AOT_HAVE_SM90  // conv/conv2d_sm90.cu and conv/conv2d_planes_sm90.cu are not compiled
bool conv2d_sm90_takes(const char *, Conv2dGemm *, int, bool) { return false; }
Status conv2d_sm90(LaunchSequence &, const Conv2dGemm &) { return kOk; }
Status split_images(LaunchSequence &, bool, const float *, Planes, void *) { return kOk; }
Status copy_to_hwcn(LaunchSequence &, bool, const float *, Planes, float *) { return kOk; }
bool planes_takes_dx(const Conv2dGemm &) { return false; }
Status planes_dx(LaunchSequence &, const Conv2dGemm &) { return kOk; }
bool planes_takes_dweight(const char *, const Conv2dGemm &) { return false; }
Status planes_dweight(LaunchSequence &, Conv2dGemm *) { return kOk; }
#endif

// ------------------------------------------------------------------------------------------------------------- entries

AOT_ENTRY(Conv2d, aot_conv2d_cuda, conv2d_cuda)
AOT_ENTRY(Conv2dBackward, aot_conv2d_backward_cuda, conv2d_backward_cuda)

}  // namespace AOT_ISA
}  // namespace aot
