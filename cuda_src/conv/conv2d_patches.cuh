// Patches: a convolution whose stride is its kernel, without padding, meets each element of x at most once. x is
// rearranged into a matrix with a row for each pixel of the result, and the convolution is a product (cuda_src/gemm).
// Rows and columns of x beyond the last patch belong to none.
//
// A patch is in the weight's order: (channels, kh, kw) in NCHW, (kh, kw, channels) in NHWC. In both, it is made of runs
// that are contiguous in x: kw elements, or kw x channels.
//
// Predicted for a vision transformer's, 64 images of 3 x 224 x 224 to 1024, 16 x 16, bfloat16, on an H200, in
// microseconds: x read and written, 2 x 19 MB, 10; the product of 12544 x 768 x 1024, 30; in NCHW y transposed, 2 x 26
// MB, 13. dweight: the same, where a product with 48 tiles needs a split of its sum, for which cuBLASLt has a
// workspace.
#pragma once
#include "conv2d.cuh"

namespace aot {
inline namespace AOT_ISA {

constexpr int kPatchBlock = 256;

// x (planes of all images) and its patches (images, down, across, depth), in words of 2 to 16 bytes.
struct Patches {
  int64_t image;           // of x, from one to the next
  int64_t plane, row;      // of x; plane: the next channel in NCHW
  int height, kernel_h;    // rows of x, and of a patch
  int down, across;        // patches
  int run, pieces, depth;  // a patch has `pieces` runs, then zeros up to `depth`
  int64_t images;
};

// A block makes a row of patches. Consecutive threads write consecutive words.
template <typename Word>
__global__ void __launch_bounds__(kPatchBlock) to_patches_kernel(Patches f, const Word *x, Word *patches) {
  const int64_t image = blockIdx.x / f.down, strip = blockIdx.x % f.down;
  const int words = f.across * f.depth;
  x += image * f.image + strip * f.kernel_h * f.row, patches += int64_t{blockIdx.x} * words;
#pragma unroll 4
  for (int i = threadIdx.x; i < words; i += kPatchBlock) {
    const int patch = i / f.depth, at = i % f.depth, piece = at / f.run;
    const int64_t from = piece / f.kernel_h * f.plane + piece % f.kernel_h * f.row + patch * f.run + at % f.run;
    patches[i] = piece < f.pieces ? x[from] : Word{};
  }
}

// A block writes the rows of x that a row of patches meets, or those beyond the last one, which are zeros.
template <typename Word>
__global__ void __launch_bounds__(kPatchBlock) from_patches_kernel(Patches f, const Word *patches, Word *x) {
  const int strips = (f.height + f.kernel_h - 1) / f.kernel_h;
  const int64_t image = blockIdx.x / strips;
  const int strip = blockIdx.x % strips, row_words = static_cast<int>(f.row);
  const int rows = min(f.kernel_h, f.height - strip * f.kernel_h), of_plane = rows * row_words;
  const int words = f.pieces / f.kernel_h * of_plane;
  x += image * f.image + int64_t{strip} * f.kernel_h * f.row;
  patches += (image * f.down + strip) * f.across * f.depth;
#pragma unroll 4
  for (int i = threadIdx.x; i < words; i += kPatchBlock) {
    const int channel = i / of_plane, r = i % of_plane / row_words, at = i % row_words, patch = at / f.run;
    const int from = patch * f.depth + (channel * f.kernel_h + r) * f.run + at % f.run;
    x[channel * f.plane + r * f.row + at] = strip < f.down && patch < f.across ? patches[from] : Word{};
  }
}

// ----------------------------------------------------------------------------------------------------------- launchers

// f(a word, the patches in words) for the widest words that all runs and rows are made of.
template <class F>
Status with_patch_words(const Conv2dCall &c, int64_t itemsize, int64_t depth, const void *x, const void *patches, F f) {
  const Conv2dShape &s = c.s;
  const int64_t inner = c.nhwc ? s.channels : 1, run = s.kernel_w * inner * itemsize, row = s.width * inner * itemsize;
  auto with = [&](auto word) {
    constexpr int64_t kBytes = sizeof(word);
    Patches p;
    p.image = s.channels * s.height * s.width * itemsize / kBytes;
    p.plane = s.height * row / kBytes, p.row = row / kBytes;
    p.height = static_cast<int>(s.height), p.kernel_h = static_cast<int>(s.kernel_h);
    p.down = static_cast<int>(s.out_h), p.across = static_cast<int>(s.out_w);
    p.run = static_cast<int>(run / kBytes), p.pieces = static_cast<int>(s.kernel_h * (c.nhwc ? 1 : s.channels));
    p.depth = static_cast<int>(depth * itemsize / kBytes), p.images = s.batch;
    return f(word, p);
  };
  const auto bytes = static_cast<uint64_t>(run) | static_cast<uint64_t>(row) | reinterpret_cast<uintptr_t>(x) |
                     reinterpret_cast<uintptr_t>(patches);
  return bytes % 16 == 0  ? with(uint4())
         : bytes % 8 == 0 ? with(uint2())
         : bytes % 4 == 0 ? with(uint32_t())
                          : with(uint16_t());
}

template <typename T>
Status to_patches(const char *op, const Conv2dCall &c, const T *x, int64_t depth, T *patches, cudaStream_t stream) {
  return with_patch_words(c, sizeof(T), depth, x, patches, [&](auto word, const Patches &p) {
    using Word = decltype(word);
    to_patches_kernel<<<grid_size(p.images * p.down), kPatchBlock, 0, stream>>>(p, reinterpret_cast<const Word *>(x),
                                                                                reinterpret_cast<Word *>(patches));
    return check_launch(op);
  });
}

template <typename T>
Status from_patches(const char *op, const Conv2dCall &c, const T *patches, int64_t depth, T *x, cudaStream_t stream) {
  return with_patch_words(c, sizeof(T), depth, x, patches, [&](auto word, const Patches &p) {
    using Word = decltype(word);
    const int64_t strips = ceil_div(p.height, p.kernel_h);
    from_patches_kernel<<<grid_size(p.images * strips), kPatchBlock, 0, stream>>>(
        p, reinterpret_cast<const Word *>(patches), reinterpret_cast<Word *>(x));
    return check_launch(op);
  });
}

}  // namespace AOT_ISA
}  // namespace aot
