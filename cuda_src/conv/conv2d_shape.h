// Sizes and parameters of a convolution, and the CUDA workspace that its kernels need.
#pragma once
#include "aot.h"

namespace aot {
inline namespace AOT_ISA {

// Sizes of a call, whatever its layout. batch: the product of x's leading axes.
struct Conv2dShape {
  int64_t batch, channels, height, width, out_channels, kernel_h, kernel_w, out_h, out_w;

  int64_t pixels() const { return batch * out_h * out_w; }
  int64_t kernel() const { return kernel_h * kernel_w; }
};

struct Conv2dParams {
  static constexpr const char *kLayouts[] = {"NCHW", "NHWC"};
  Ints stride{2, {1, 1}}, padding{2, {0, 0}}, dilation{2, {1, 1}};
  int64_t groups = 1;
  int layout = 0;  // of kLayouts
  bool allow_tf32 = false;

  bool nhwc() const { return layout == 1; }

  // Sums over pixels are split in slices, whose partial sums a second kernel adds in their order. dbias: kSlices
  // slices. dweight: as many as give kFullGrid blocks, two for each multiprocessor of an H200.
  static constexpr int64_t kSlices = 128, kFullGrid = 264;

  // How the workspace is used. The implicit GEMM kernels take NHWC with channels in whole vectors of 16 bytes; other
  // tensors are packed into the workspace first, and their channels padded with zeros. Sizes are in elements of the
  // workspace's dtype.
  struct Plan {
    bool implicit_gemm = false, packed = false;
    int64_t channels = 0, out_channels = 0;      // padded to whole vectors
    int64_t x = 0, weight = 0, y = 0, bias = 0;  // packed tensors
    int64_t slices = 0, slice = 0;               // of dweight: how many, and the size of one
    int64_t dbias = 0;

    int64_t forward() const { return (packed ? weight + y + x : 0) + bias; }
    // packed x takes the place of packed dx
    int64_t backward() const { return weight + (packed ? y + x : 0) + slices * slice + dbias; }
  };
  // Without a dtype: an upper bound over all dtypes, for shape inference that does not know it.
  Plan plan(const Conv2dShape &s, DType dtype = DType::unknown) const {
    Plan p;
    p.bias = words(s.out_channels + 7, 4), p.dbias = kSlices * s.out_channels;
    p.implicit_gemm = groups == 1 && dtype != DType::float64;
    if (!p.implicit_gemm) return p;
    constexpr int64_t kWidest = 8;  // elements in a vector of the narrowest dtype
    const int64_t size = dtype == DType::unknown ? 4 : itemsize(dtype), vector = dtype == DType::float32 ? 4 : kWidest;
    p.channels = round_up(s.channels, vector), p.out_channels = round_up(s.out_channels, vector);
    p.packed = !nhwc() || p.channels != s.channels || p.out_channels != s.out_channels;
    p.x = words(s.batch * s.height * s.width * p.channels, size);
    p.weight = words(p.out_channels * s.kernel() * p.channels, size);
    p.y = words(s.pixels() * p.out_channels, size);
    const int64_t rows = round_up(s.out_channels, kWidest), cols = s.kernel() * round_up(s.channels, kWidest);
    const int64_t tiles = divide_up(rows, s.out_channels <= 64 ? 64 : 128) * divide_up(cols, 128);
    p.slices = tiles > 0 ? divide_up(kFullGrid, tiles) : 1;
    p.slice = p.out_channels * s.kernel() * p.channels;
    return p;
  }

 private:
  static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
  // float32 words for n elements, in whole vectors of 16 bytes.
  static int64_t words(int64_t n, int64_t itemsize) { return divide_up(n * itemsize, 16) * 4; }
};

}  // namespace AOT_ISA
}  // namespace aot
