#include "conv2d.h"

#include "cuda/conv2d.cuh"
#include "cuda/conv2d_pack.cuh"
#include "cuda/conv2d_product.h"
#include "cuda/gemm.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace aot {
inline namespace AOT_ISA {

// ------------------------------------------------------------------------------------------------------ direct kernels
// For every call there is: any layout, stride, dilation, groups, channels and dtype. A thread has one element of the
// result, in the order in which they lie; a warp one element of dweight.

constexpr int kDirectBlock = 256;

// Which element of a tensor of (images, channels, height, width) the i-th in memory is.
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
  const Position to(i, c.nhwc, c.s.outputs, c.s.out_h, c.s.out_w);
  const int64_t channels = c.s.channels / c.groups, first = to.channel / (c.s.outputs / c.groups) * channels;
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
  const int64_t channels = c.s.channels / c.groups, outputs = c.s.outputs / c.groups;
  const int64_t first = to.channel / channels * outputs, channel = to.channel % channels;
  Accumulate<T> sum = 0;
  for (int64_t r = 0; r < c.s.kernel_h; ++r) {
    const int64_t h = to.row + c.padding_h - r * c.dilation_h, p = h / c.stride_h;
    if (h < 0 || h % c.stride_h != 0 || p >= c.s.out_h) continue;
    for (int64_t s = 0; s < c.s.kernel_w; ++s) {
      const int64_t w = to.column + c.padding_w - s * c.dilation_w, q = w / c.stride_w;
      if (w < 0 || w % c.stride_w != 0 || q >= c.s.out_w) continue;
      const T *from = dy + c.y.at(to.image, first, p, q), *by = weight + c.weight.at(first, channel, r, s);
      for (int64_t k = 0; k < outputs; ++k, from += c.y.channel, by += c.weight.image) sum += widen(*from) * widen(*by);
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
  const Position to(i, c.nhwc, channels, c.s.kernel_h, c.s.kernel_w);  // its image is the output
  const int64_t channel = to.image / (c.s.outputs / c.groups) * channels + to.channel;
  Accumulate<T> sum = 0;
  for (int64_t k = lane_index(); k < c.pixels; k += 32) {
    const int64_t q = k % c.s.out_w, p = k / c.s.out_w % c.s.out_h, image = k / c.s.out_w / c.s.out_h;
    const int64_t h = p * c.stride_h + to.row * c.dilation_h - c.padding_h;
    const int64_t w = q * c.stride_w + to.column * c.dilation_w - c.padding_w;
    if (0 <= h && h < c.s.height && 0 <= w && w < c.s.width)
      sum += widen(dy[c.y.at(image, to.image, p, q)]) * widen(x[c.x.at(image, channel, h, w)]);
  }
  sum = sum_lanes<32>(sum);
  if (lane_index() == 0) dweight[i] = narrow<T>(sum);
}

// Blocks for n threads. More than a grid holds would be elements of 10^12 bytes.
inline unsigned direct_grid(int64_t n) { return grid_size(ceil_div(n, kDirectBlock)); }

// ----------------------------------------------------------------------------------------------------------------
// dbias

// partial[slice][output]: a block sums one slice of the pixels, for 32 outputs (NHWC) or for one (NCHW).
template <typename T>
__global__ void __launch_bounds__(256) conv2d_dbias_kernel(Conv2dCall c, const T *dy, Accumulate<T> *partial) {
  using A = Accumulate<T>;
  __shared__ A sums[8][33];
  const int64_t pixels = c.pixels, length = (pixels + gridDim.y - 1) / gridDim.y;
  const int64_t begin = blockIdx.y * length, end = begin + length < pixels ? begin + length : pixels;
  const int lane = lane_index(), warp = warp_index();
  const int64_t output = c.nhwc ? int64_t{blockIdx.x} * 32 + lane : blockIdx.x;
  A sum = 0;
  if (c.nhwc) {
    if (output < c.s.outputs)
      for (int64_t k = begin + warp; k < end; k += 8) sum += widen(dy[k * c.s.outputs + output]);
  } else {
    const int64_t plane = c.s.out_h * c.s.out_w;
    for (int64_t k = begin + threadIdx.x; k < end; k += 256)
      sum += widen(dy[(k / plane * c.s.outputs + output) * plane + k % plane]);
    sum = sum_lanes<32>(sum);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || output >= c.s.outputs) return;
  for (int w = 1; w < 8; ++w) sum += sums[w][lane];
  if (c.nhwc || lane == 0) partial[blockIdx.y * c.s.outputs + output] = sum;
}

// to[i] = the sum of `slices` numbers, n apart.
template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    sum_slices_kernel(const Accumulate<T> *partial, int slices, T *to, int64_t n) {
  const int64_t i = first_index();
  if (i >= n) return;
  Accumulate<T> sum = 0;
  for (int k = 0; k < slices; ++k) sum += partial[k * n + i];
  to[i] = narrow<T>(sum);
}

// The same of slices (outputs, kernel, channels), with more outputs and channels than dweight has, to its own layout. A
// thread has four neighbouring channels; kWarps warps share the slices.
template <typename T, int kWarps>
__global__ void __launch_bounds__(kDirectBlock)
    sum_dweight_kernel(Conv2dCall c, const float *partial, int slices, int64_t slice, unsigned channels, T *dweight) {
  constexpr int kGroups = kDirectBlock / 32 / kWarps;
  __shared__ float4 sums[kDirectBlock / 32][32];
  const int lane = lane_index(), warp = warp_index(), first = warp % kWarps;
  const unsigned i = ((blockIdx.x * kGroups + warp / kWarps) * 32 + lane) * 4;
  const unsigned kernel = static_cast<unsigned>(c.s.kernel_h * c.s.kernel_w);
  const unsigned channel = i % channels, k = i / channels % kernel, output = i / channels / kernel;
  auto add = [](float4 &a, const float4 &b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; };
  float4 sum = {};
  if (output < c.s.outputs)
#pragma unroll 4
    for (int s = first; s < slices; s += kWarps) add(sum, *reinterpret_cast<const float4 *>(partial + s * slice + i));
  if constexpr (kWarps > 1) {
    sums[warp][lane] = sum;
    __syncthreads();
    for (int w = 1; first == 0 && w < kWarps; ++w) add(sum, sums[warp + w][lane]);
  }
  if (first != 0 || output >= c.s.outputs) return;
  T *to = dweight + output * c.weight.image + k * c.weight.tap;
  const float each[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (channel + e < c.s.channels) to[(channel + e) * c.weight.channel] = narrow<T>(each[e]);
}

template <typename T>
void sum_dweight(const Conv2dCall &c, const float *partial, int slices, int64_t slice, int64_t channels, T *dweight,
                 cudaStream_t stream) {
  const int64_t fours = c.s.outputs * c.s.kernel() * channels / 4;
  auto launch = [&](auto *kernel, int each) {
    kernel<<<grid_size(ceil_div(fours, each)), kDirectBlock, 0, stream>>>(c, partial, slices, slice,
                                                                          static_cast<unsigned>(channels), dweight);
  };
  slices > 4 ? launch(sum_dweight_kernel<T, 8>, 32) : launch(sum_dweight_kernel<T, 1>, kDirectBlock);
}

// y[row][col] = the sum of slices (rows, cols), and bias[col]; cols are whole vectors of y's.
template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    sum_y_kernel(const float *partial, int slices, const T *bias, T *y, int64_t n, int cols) {
  const int64_t i = first_index() * 4;
  if (i >= n) return;
  float4 sum = {};
#pragma unroll 4
  for (int s = 0; s < slices; ++s) {
    const float4 v = *reinterpret_cast<const float4 *>(partial + s * n + i);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  if (bias) {
    const T *b = bias + i % cols;
    sum.x += widen(b[0]), sum.y += widen(b[1]), sum.z += widen(b[2]), sum.w += widen(b[3]);
  }
  const uint2 word = {narrow_word(sum.x, sum.y, T()), narrow_word(sum.z, sum.w, T())};
  *reinterpret_cast<uint2 *>(y + i) = word;
}

template <typename T>
__global__ void __launch_bounds__(kDirectBlock)
    add_bias_kernel(const T *bias, T *y, int64_t n, int64_t channels, int64_t plane) {
  const int64_t i = first_index();
  if (i < n) y[i] += bias[i / plane % channels];
}

// ------------------------------------------------------------------------------------------------------------
// launchers

// A call as a matrix product on tensor cores, by way of the workspace where its tensors are not as those want them.
template <typename T>
class ProductCall {
 public:
  ProductCall(const char *op, const Conv2dAttrs &attrs, const Conv2dShape &s, DType dtype, const Tensor &workspace,
              cudaStream_t stream)
      : op_(op), call_(attrs, s), plan_(attrs.plan(s, dtype)), stream_(stream) {
    float *next = workspace.as<float>();
    auto take = [&](int64_t words) {
      auto *p = reinterpret_cast<T *>(next);
      return next += words, p;
    };
    x_ = take(plan_.x), weight_ = take(plan_.weight), y_ = take(plan_.y), rest_ = next;
    takes_ = workspace && aligned(workspace.data) && plan_.product && within_limits(attrs);
    p_ = {};
    p_.dtype = dtype, p_.tf32 = attrs.allow_tf32;
    p_.batch = s.batch, p_.height = s.height, p_.width = s.width;
    p_.channels = plan_.channels, p_.outputs = plan_.outputs;
    p_.kernel_h = s.kernel_h, p_.kernel_w = s.kernel_w, p_.out_h = s.out_h, p_.out_w = s.out_w;
    p_.stride_h = attrs.stride.value[0], p_.stride_w = attrs.stride.value[1];
    p_.padding_h = attrs.padding.value[0], p_.padding_w = attrs.padding.value[1];
    p_.dilation_h = s.kernel_h > 1 ? attrs.dilation.value[0] : 1;
    p_.dilation_w = s.kernel_w > 1 ? attrs.dilation.value[1] : 1;
  }

  // Whether these tensors can be multiplied so.
  template <typename... Pointers>
  bool takes(const Pointers *...tensors) const {
    return takes_ && (plan_.packed || aligned(tensors...));
  }
  bool takes_dx() const { return (p_.stride_h == 1 && p_.stride_w == 1) || (p_.dilation_h == 1 && p_.dilation_w == 1); }

  Status y(const T *x, const T *weight, const T *bias, T *y) {
    const Conv2dShape &s = call_.s;
    if (bias && (plan_.packed || !aligned(bias))) {
      T *whole = reinterpret_cast<T *>(rest_);
      fit<T>({bias, whole, 1, s.outputs, s.outputs, 1, plan_.outputs}, stream_);
      bias = whole;
    }
    rest_ += plan_.bias;
    p_.pass = Conv2dProduct::y, p_.a = packed_x(x), p_.b = packed_weight(weight), p_.bias = bias;
    AOT_TRY(run(plan_.packed ? y_ : y, call_.pixels, plan_.outputs, plan_.y_slices));
    if (plan_.packed) unpack(call_.nhwc, y_, plan_.outputs, {s.batch, s.outputs, s.out_h * s.out_w}, y, stream_);
    return check_launch(op_);
  }

  Status dx(const T *dy, const T *weight, T *dx) {
    const Conv2dShape &s = call_.s;
    p_.pass = Conv2dProduct::dx, p_.a = packed_dy(dy), p_.b = packed_weight(weight), p_.bias = nullptr;
    AOT_TRY(run(plan_.packed ? x_ : dx, s.batch * s.height * s.width, plan_.channels, plan_.dx_slices));
    if (plan_.packed) unpack(call_.nhwc, x_, plan_.channels, {s.batch, s.channels, s.height * s.width}, dx, stream_);
    return check_launch(op_);
  }

  Status dweight(const T *dy, const T *x, T *dweight) {
    constexpr int64_t kLeast = 256;  // pixels of a slice
    p_.pass = Conv2dProduct::dweight, p_.a = packed_dy(dy), p_.b = packed_x(x), p_.bias = nullptr, p_.to = rest_;
    const int most = static_cast<int>(plan_.slices);
    if (sizeof(T) == 2 && conv2d_sm90_takes(op_, &p_, most, !plan_.packed)) {
      if (!p_.slices) return p_.to = dweight, conv2d_sm90(op_, p_, stream_);
      AOT_TRY(conv2d_sm90(op_, p_, stream_));
    } else {
      p_.slices = static_cast<int>(std::min<int64_t>(most, ceil_div(call_.pixels, kLeast)));
      AOT_TRY(cutlass());
    }
    sum_dweight(call_, rest_, p_.slices, plan_.slice, plan_.channels, dweight, stream_);
    return check_launch(op_);
  }

 private:
  // The kernels count bytes in 31 bits, and have a bit for each row and column of the kernel.
  bool within_limits(const Conv2dAttrs &attrs) const {
    const Conv2dShape &s = call_.s;
    constexpr int64_t kMost = 0x7fffffff, kFew = 1 << 15;
    const int64_t in = s.batch * s.height * s.width, out = s.pixels(), weights = s.kernel();
    bool few = in > 0 && out > 0 && s.channels > 0 && s.outputs > 0 && s.kernel_h <= 32 && s.kernel_w <= 32;
    for (int i = 0; i < 2; ++i)
      few = few && attrs.stride.value[i] < kFew && attrs.padding.value[i] < kFew &&
            ((i ? s.kernel_w : s.kernel_h) == 1 || attrs.dilation.value[i] < kFew);
    const int64_t c = plan_.channels, o = plan_.outputs, size = sizeof(float);
    return few && in * c * size < kMost && out * o * size < kMost && o * weights * c * size < kMost;
  }

  T *packed(const T *from, Planes planes, T *to, int64_t images, int64_t channels) {
    if (!plan_.packed) return const_cast<T *>(from);
    pack(call_.nhwc, from, planes, to, images, channels, stream_);
    return to;
  }
  T *packed_x(const T *x) {
    const Conv2dShape &s = call_.s;
    return packed(x, {s.batch, s.channels, s.height * s.width}, x_, s.batch, plan_.channels);
  }
  T *packed_weight(const T *weight) {
    const Conv2dShape &s = call_.s;
    return packed(weight, {s.outputs, s.channels, s.kernel()}, weight_, plan_.outputs, plan_.channels);
  }
  T *packed_dy(const T *dy) {  // dx and dweight take the same
    const Conv2dShape &s = call_.s;
    if (!dy_) dy_ = packed(dy, {s.batch, s.outputs, s.out_h * s.out_w}, y_, s.batch, plan_.outputs);
    return dy_;
  }

  // y or dx, as a matrix, with room for so many words of slices.
  Status run(T *to, int64_t rows, int64_t cols, int64_t words) {
    p_.to = to, p_.slices = 0;
    if constexpr (sizeof(T) == 2) {
      if (conv2d_sm90_takes(op_, &p_, static_cast<int>(words / (rows * cols)), true)) {
        if (!p_.slices) return conv2d_sm90(op_, p_, stream_);
        p_.to = rest_;
        AOT_TRY(conv2d_sm90(op_, p_, stream_));
        sum_y_kernel<<<direct_grid(ceil_div(rows * cols, 4)), kDirectBlock, 0, stream_>>>(
            rest_, p_.slices, static_cast<const T *>(p_.bias), to, rows * cols, static_cast<int>(cols));
        return check_launch(op_);
      }
    }
    return cutlass();
  }
  Status cutlass() { return (sizeof(T) == 2 ? conv2d_cutlass_16 : conv2d_cutlass_32)(op_, p_, stream_); }

  const char *op_;
  const Conv2dCall call_;
  const Conv2dAttrs::Plan plan_;
  const cudaStream_t stream_;
  T *x_, *weight_, *y_, *dy_ = nullptr;
  float *rest_;
  bool takes_;
  Conv2dProduct p_;
};

// A kernel of 1 x 1 on NCHW as a product for each image, of the tensors as they lie. float32 and float64 alone: packing
// costs 16-bit tensors less, and their kernels give more.
class PointwiseCall {
 public:
  PointwiseCall(const char *op, const Conv2dAttrs &attrs, const Conv2dShape &s, DType dtype, cudaStream_t stream)
      : op_(op), s_(s), plane_(s.height * s.width), stream_(stream) {
    auto is = [](const Ints &pair, int64_t value) { return pair.value[0] == value && pair.value[1] == value; };
    takes_ = attrs.groups == 1 && !attrs.nhwc() && s.kernel() == 1 && is(attrs.stride, 1) && is(attrs.padding, 0) &&
             (dtype == DType::float32 || dtype == DType::float64) && s.channels > 0 && s.outputs > 0 &&
             s.batch * plane_ > 0;
    g_.dtype = g_.c_dtype = dtype, g_.count = s.batch, g_.allow_tf32 = attrs.allow_tf32;
  }
  bool takes() const { return takes_; }
  bool takes_dweight(int64_t words) const { return takes_ && s_.batch * s_.outputs * s_.channels <= words; }

  template <typename T>
  Status y(const T *x, const T *weight, const T *bias, T *y) {
    AOT_TRY(multiply(s_.outputs, plane_, s_.channels, {data(weight), s_.channels}, 0, {data(x), plane_},
                     s_.channels * plane_, {y, plane_}));
    if (!bias) return kOk;
    const int64_t n = s_.batch * s_.outputs * plane_;
    add_bias_kernel<<<direct_grid(n), kDirectBlock, 0, stream_>>>(bias, y, n, s_.outputs, plane_);
    return check_launch(op_);
  }
  template <typename T>
  Status dx(const T *dy, const T *weight, T *dx) {
    return multiply(s_.channels, plane_, s_.outputs, {data(weight), s_.channels, true}, 0, {data(dy), plane_},
                    s_.outputs * plane_, {dx, plane_});
  }
  template <typename T>
  Status dweight(const T *dy, const T *x, T *images, T *dweight) {
    AOT_TRY(multiply(s_.outputs, s_.channels, plane_, {data(dy), plane_}, s_.outputs * plane_, {data(x), plane_, true},
                     s_.channels * plane_, {images, s_.channels}));
    const int64_t n = s_.outputs * s_.channels;
    sum_slices_kernel<<<direct_grid(n), kDirectBlock, 0, stream_>>>(images, static_cast<int>(s_.batch), dweight, n);
    return check_launch(op_);
  }

 private:
  static void *data(const void *p) { return const_cast<void *>(p); }
  Status multiply(int64_t m, int64_t n, int64_t k, Operand a, int64_t a_step, Operand b, int64_t b_step, Operand c) {
    g_.m = m, g_.n = n, g_.k = k, g_.a = a, g_.b = b, g_.c = c;
    g_.a_step = a_step, g_.b_step = b_step, g_.c_step = m * n;
    return gemm(op_, g_, stream_);
  }
  const char *op_;
  const Conv2dShape s_;
  const int64_t plane_;
  const cudaStream_t stream_;
  bool takes_;
  Gemm g_ = {};
};

template <typename T>
Status direct_dx(const Conv2dCall &c, const T *dy, const T *weight, T *dx, cudaStream_t stream) {
  const int64_t n = c.s.batch * c.s.channels * c.s.height * c.s.width;
  conv2d_dx_kernel<<<direct_grid(n), kDirectBlock, 0, stream>>>(c, dy, weight, dx, n);
  return check_launch(Conv2dBackward::name);
}

template <typename T>
Status direct_dweight(const Conv2dCall &c, const T *dy, const T *x, T *dweight, cudaStream_t stream) {
  const int64_t n = c.s.outputs * c.weight.image;
  conv2d_dweight_kernel<<<direct_grid(n * 32), kDirectBlock, 0, stream>>>(c, dy, x, dweight, n);
  return check_launch(Conv2dBackward::name);
}

template <typename T>
Status direct_dbias(const Conv2dCall &c, const T *dy, Accumulate<T> *partial, T *dbias, cudaStream_t stream) {
  constexpr auto slices = static_cast<unsigned>(Conv2dAttrs::kSlices);
  const dim3 grid(static_cast<unsigned>(c.nhwc ? ceil_div(c.s.outputs, 32) : c.s.outputs), slices);
  conv2d_dbias_kernel<<<grid, 256, 0, stream>>>(c, dy, partial);
  sum_slices_kernel<<<direct_grid(c.s.outputs), kDirectBlock, 0, stream>>>(partial, slices, dbias, c.s.outputs);
  return check_launch(Conv2dBackward::name);
}

// Whether the device runs the kernels that multiply; CUTLASS's are for 8.0 and later.
static Status multiplies(const char *op, bool *yes) {
  DeviceLimits limits;
  AOT_TRY(device_limits(op, &limits));
  return *yes = limits.major >= 8, kOk;
}

Status conv2d_cuda(const Conv2d &op, const Tensor *in, const Tensor *out, void *stream_) {
  const Conv2dShape s = op.shape(in[0], in[1], out[0]);
  const int64_t n = out[0].size();
  if (n == 0) return kOk;
  const auto stream = static_cast<cudaStream_t>(stream_);
  bool product;
  AOT_TRY(multiplies(op.name, &product));
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *x = in[0].as<const T>(), *weight = in[1].as<const T>(), *bias = in[2].as<const T>();
    T *y = out[0].as<T>();
    if constexpr (sizeof(T) > 2) {
      PointwiseCall call(op.name, op, s, in[0].dtype, stream);
      if (call.takes()) return call.y(x, weight, bias, y);
    }
    if constexpr (sizeof(T) < 8) {
      ProductCall<T> call(op.name, op, s, in[0].dtype, out[1], stream);
      if (product && call.takes(x, weight, y)) return call.y(x, weight, bias, y);
    }
    conv2d_kernel<<<direct_grid(n), kDirectBlock, 0, stream>>>(Conv2dCall(op, s), x, weight, bias, y, n);
    return check_launch(op.name);
  });
}

Status conv2d_backward_cuda(const Conv2dBackward &op, const Tensor *in, const Tensor *out, void *stream_) {
  const Conv2dShape s = op.shape(in[1], in[2], in[0]);
  const Conv2dCall c(op, s);
  const bool wants_dx = out[0] && out[0].size(), wants_dweight = out[1] && out[1].size(),
             wants_dbias = out[2] && out[2].size();
  if (wants_dbias && !out[3]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  const auto stream = static_cast<cudaStream_t>(stream_);
  bool product;
  AOT_TRY(multiplies(op.name, &product));
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const T *dy = in[0].as<const T>(), *x = in[1].as<const T>(), *weight = in[2].as<const T>();
    T *dx = out[0].as<T>(), *dweight = out[1].as<T>();
    bool dx_left = wants_dx, dweight_left = wants_dweight;
    if constexpr (sizeof(T) > 2) {
      PointwiseCall call(op.name, op, s, in[0].dtype, stream);
      if (dx_left && call.takes()) {
        AOT_TRY(call.dx(dy, weight, dx));
        dx_left = false;
      }
      if (dweight_left && out[3] && call.takes_dweight(out[3].size() - op.kSlices * s.outputs)) {
        AOT_TRY(call.dweight(dy, x, out[3].as<T>(), dweight));
        dweight_left = false;
      }
    }
    if constexpr (sizeof(T) < 8) {
      ProductCall<T> call(op.name, op, s, in[0].dtype, out[3], stream);
      if (product && dx_left && call.takes(dy, weight, dx) && call.takes_dx()) {
        AOT_TRY(call.dx(dy, weight, dx));
        dx_left = false;
      }
      if (product && dweight_left && call.takes(dy, x, dweight)) {
        AOT_TRY(call.dweight(dy, x, dweight));
        dweight_left = false;
      }
    }
    if (dx_left) AOT_TRY(direct_dx(c, dy, weight, dx, stream));
    if (dweight_left) AOT_TRY(direct_dweight(c, dy, x, dweight, stream));
    if (wants_dbias) {
      A *partial = out[3].as<A>() + out[3].size() - op.kSlices * s.outputs;
      AOT_TRY(direct_dbias(c, dy, partial, out[2].as<T>(), stream));
    }
    return kOk;
  });
}

#ifndef AOT_HAVE_SM90  // what cuda/conv2d_sm90.cu has
bool conv2d_sm90_takes(const char *, Conv2dProduct *, int, bool) { return false; }
Status conv2d_sm90(const char *, const Conv2dProduct &, void *) { return kOk; }
#endif

// --------------------------------------------------------------------------------------------------------------
// entries

AOT_ENTRY(Conv2d, aot_conv2d_cuda, conv2d_cuda)
AOT_ENTRY(Conv2dBackward, aot_conv2d_backward_cuda, conv2d_backward_cuda)

}  // namespace AOT_ISA
}  // namespace aot
