// Sizes and parameters of a convolution, the choice of its CUDA kernels, and the workspace that these need.
#pragma once
#include <algorithm>

#include "aot.h"
#include "conv2d_depthwise.h"
#include "conv2d_grouped.h"
#include "gemm/matrix.h"

namespace aot {
inline namespace AOT_ISA {

// Sizes of a call, whatever its layout. batch: the product of x's leading axes.
struct Conv2dShape {
  int64_t batch, channels, height, width, out_channels, kernel_h, kernel_w, out_h, out_w;

  int64_t pixels() const { return batch * out_h * out_w; }
  int64_t kernel() const { return kernel_h * kernel_w; }
};

struct Conv2dParams {
#ifdef AOT_HAVE_SM90
  static constexpr bool kHasSm90 = true;
#else
  static constexpr bool kHasSm90 = false;
#endif
  static constexpr const char *kLayouts[] = {"NCHW", "NHWC"};
  Ints stride{2, {1, 1}}, padding{2, {0, 0}}, dilation{2, {1, 1}};
  int64_t groups = 1;
  int layout = 0;  // of kLayouts
  bool allow_tf32 = false;

  bool nhwc() const { return layout == 1; }
  // Images of one pixel, of a kernel of one element, are the same memory in both layouts: CUDA takes them for NHWC's,
  // which is not packed, as those of squeeze-and-excitation. Wider elements without whole vectors have products of
  // NCHW.
  Conv2dParams as_read(const Conv2dShape &s, DType dtype) const {
    Conv2dParams p = *this;
    const bool vectors = (s.channels | s.out_channels) % (16 / itemsize(dtype)) == 0;
    if (s.height * s.width == 1 && s.out_h * s.out_w == 1 && s.kernel() == 1 && (vectors || itemsize(dtype) == 2))
      p.layout = 1;
    return p;
  }

  // Sums over pixels are split in slices, whose partial sums a second kernel adds in their order. dbias: kSlices
  // slices. dweight: at most as many as give kFullGrid blocks, two for each multiprocessor of an H200; of kMinSlice
  // pixels at least.
  static constexpr int64_t kSlices = 128, kFullGrid = 264, kMinSlice = 256;

  // The kernels that a result is for. Sizes alone decide, as they decide the workspace; the launchers may find that the
  // device lacks a kernel, or that a tensor is missing, and then use the direct kernels, which need none.
  //   patches        stride and kernel are the same: x is rearranged into a matrix of patches, and the rest is a
  //                  product. With 32 channels or more, the implicit GEMM reads x as it is; a 1 x 1 kernel on NHWC
  //                  is a product of x
  //   few_channels   up to 8 channels on tensor cores (conv2d_few_channels.cuh, conv2d_few_dx.cuh)
  //   implicit_gemm  other calls without groups
  //   depthwise      a group for each channel (conv2d_depthwise.h)
  //   grouped        groups of several channels in 16 bits and float32 (conv2d_grouped.h), and up to 31 channels
  //                  without groups; in 16 bits and TF32, on compute capability 9.0, the implicit GEMM for groups of
  //                  16, of 32 and of multiples of 64 channels
  //   direct         any call
  enum Kernels { direct, patches, few_channels, implicit_gemm, depthwise, grouped };
  // Each 64 output channels of the kernel of few channels read x again, where a product of patches reads it once. In
  // TF32 that kernel has twice as many steps for as many bytes.
  // *g: how groups of several channels are divided, if the call has such.
  Kernels y_kernels(const Conv2dShape &s, DType dtype, Grouped *g = nullptr) const {
    return choose(s, dtype, Depthwise::y, few_forward(s, dtype).rows > 0, s.out_channels <= 128 && itemsize(dtype) == 2,
                  g);
  }
  Kernels dx_kernels(const Conv2dShape &s, DType dtype, Grouped *g = nullptr) const {
    return choose(s, dtype, Depthwise::dx, few_dx(s, dtype).rows > 0, false, g);
  }
  // The implicit GEMM is faster where it reads 16-bit tensors as they are, if they are within its limits.
  Kernels dweight_kernels(const Conv2dShape &s, DType dtype, Grouped *g = nullptr) const {
    constexpr int64_t kMost = 1 << 28;
    const bool as_they_are = nhwc() && itemsize(dtype) == 2 && s.channels % 8 == 0 && s.out_channels % 8 == 0 &&
                             s.kernel_h <= 32 && s.kernel_w <= 32 &&
                             s.batch * s.height * s.width * s.channels < kMost && s.pixels() * s.out_channels < kMost &&
                             s.out_channels * s.kernel() * s.channels < kMost;
    return choose(s, dtype, Depthwise::dweight, !as_they_are && few_dweight(s, dtype).rows > 0, s.out_channels <= 128,
                  g);
  }

  // Tiles of conv2d_few_channels.cuh's kernels: `rows` x kFewColumns pixels of the result, and the window of x that
  // they meet, whose pixels are padded to quads of four channels. Sizes are in shared memory.
  static constexpr int kFewColumns = 16, kFewOutputs = 64, kFewQuads = 64;
  static constexpr int64_t kMaxFewChannels = 8;
  struct FewTiles {
    int rows = 0;  // 0: the kernel does not take the call
    int quads = 0, height = 0, width = 0, pitch = 0;
    int window = 0, shared = 0;  // bytes

    int tiles_h(const Conv2dShape &s) const { return static_cast<int>(divide_up(s.out_h, rows)); }
    int tiles_w(const Conv2dShape &s) const { return static_cast<int>(divide_up(s.out_w, kFewColumns)); }
  };
  // Units of 8 bytes of a pixel, and the steps of the forward's sum: four units each, of the flattened kernel.
  static int few_units(int quads, int64_t itemsize) { return static_cast<int>(quads * itemsize / 2); }
  static int few_steps(const Conv2dShape &s, int units) { return static_cast<int>(divide_up(s.kernel() * units, 4)); }
  // Blocks that a multiprocessor of an H200 holds, by registers and by shared memory.
  static constexpr int kFewBlocks = 3, kFewShared = 74 << 10;

  // A warp has kFewRows rows of pixels; of float32 without TF32, whose sums are two, half as many.
  static constexpr int kFewRows = 4;
  bool few_three(DType dtype) const { return dtype == DType::float32 && !allow_tf32; }
  FewTiles few_forward(const Conv2dShape &s, DType dtype) const {
    if (dtype == DType::float64) return {};
    return few_tiles(s, dtype, few_three(dtype) ? 8 : 16, [&](const FewTiles &f) {
      const int64_t size = itemsize(dtype);
      // the weight of 64 output channels, and two words for each unit
      return int64_t{few_steps(s, few_units(f.quads, size))} * 4 * (kFewOutputs * 8 + 8);
    });
  }
  FewTiles few_dweight(const Conv2dShape &s, DType dtype) const {
    if (dtype == DType::float64 || few_three(dtype)) return {};
    return few_tiles(s, dtype, 16, [&](const FewTiles &f) {
      // dy's tile, padded in either layout
      const int64_t pixels = int64_t{f.rows} * kFewColumns, size = itemsize(dtype);
      constexpr int64_t kExchange = 32 << 10;  // of warps that add their sums
      return std::max(
          {pixels * (kFewOutputs * size + (size == 4 ? 32 : 0)), kFewOutputs * (pixels * size + 16), kExchange});
    });
  }
  // Blocks along the tiles: a wave of them, with those along the output channels and the kernel.
  struct FewSlices {
    int outputs, kernel;  // blocks along these
    int64_t slices;
  };
  FewSlices few_slices(const Conv2dShape &s, const FewTiles &f) const {
    const int64_t outputs = divide_up(s.out_channels, kFewOutputs), kernel = divide_up(s.kernel() * f.quads, kFewQuads);
    const int64_t tiles = s.batch * f.tiles_h(s) * f.tiles_w(s);
    const int64_t wave = std::max<int64_t>(kFullGrid / 2 * kFewBlocks / (outputs * kernel), 1);
    return {static_cast<int>(outputs), static_cast<int>(kernel), std::min(tiles, wave)};
  }

  // Blocks of conv2d_few_dx.cuh. A position is the place of `pixels` pixels of dx along an axis, the phases of the
  // stride, or two neighbours. Position u has the pixels u * pixels - shift + [0, pixels), and meets dy at
  // u * apart + first + i * step, i < count.
  struct DxAxis {
    int pixels = 1, shift = 0, apart = 1, first = 0, step = 1, count = 0;  // count 0: not supported

    int positions(int64_t size) const { return static_cast<int>(divide_up(size + shift, pixels)); }
  };
  struct FewDx {
    int rows = 0;        // of positions in a tile of kFewColumns columns; 0: the kernel does not take the call
    bool three = false;  // float32 as three products of TF32, for which there is a kernel of two 8s of columns
    DxAxis h, w;
    int per_tile = 0, tiles = 0, groups = 0;         // pixels in 8 columns; 8s of columns in a block; blocks of them
    int chunks = 0, outputs = 0;                     // of kDxChunk bytes of output channels; how many these are
    int height = 0, width = 0, part = 0, pitch = 0;  // dy's window; columns u * apart + k for each k make a part
    int window = 0;                                  // bytes
    int64_t weights = 0;                             // words of the weight as operands
  };
  static constexpr int kDxChunk = 64, kDxPixel = kDxChunk + 16;  // a window's pixel has 16 bytes more, for the banks
  static constexpr int kDxWarps = 4, kDxBlocks = 4;              // of a block; of a multiprocessor
  template <int kTiles>
  static constexpr int kDxRows = kTiles == 8 ? 2 : 4;  // of positions of a warp, for so many 8s of columns
  FewDx few_dx(const Conv2dShape &s, DType dtype) const {
    const int64_t across = stride.value[0] * stride.value[1];  // parameters are below 2^15
    if (!few_fits(s) || dtype == DType::float64 || across > 1024) return {};
    FewDx f;
    f.three = few_three(dtype);
    const int64_t dilations[] = {s.kernel_h > 1 ? dilation.value[0] : 1, s.kernel_w > 1 ? dilation.value[1] : 1};
    f.h = dx_axis(s.kernel_h, stride.value[0], padding.value[0], dilations[0], 1);
    f.w = dx_axis(s.kernel_w, stride.value[1], padding.value[1], dilations[1], across == 1 && s.channels <= 4 ? 2 : 1);
    if (!f.h.count || !f.w.count) return {};
    f.per_tile = s.channels > 4 ? 1 : static_cast<int>(8 / s.channels);
    const int tiles = static_cast<int>(divide_up(f.h.pixels * f.w.pixels, f.per_tile));
    f.tiles = f.three ? 2 : tiles > 4 ? 8 : tiles > 2 ? 4 : tiles;
    f.groups = static_cast<int>(divide_up(tiles, f.tiles));
    f.outputs = static_cast<int>(kDxChunk / itemsize(dtype));
    f.chunks = static_cast<int>(divide_up(s.out_channels, f.outputs));
    const int rows = kDxWarps * (f.tiles == 8 ? kDxRows<8> : kDxRows<1>);
    const int64_t height = rows + int64_t{f.h.count - 1} * f.h.step;
    const int64_t width = (kFewColumns - 1) * f.w.apart + int64_t{f.w.count - 1} * f.w.step + 1;
    const int64_t pitch = round_up(width, f.w.apart), window = height * pitch * kDxPixel;
    if (height > 4096 || pitch > 4096 || window > kConvShared) return {};
    f.height = static_cast<int>(height), f.width = static_cast<int>(width);
    f.pitch = static_cast<int>(pitch), f.part = f.pitch / f.w.apart, f.window = static_cast<int>(window);
    f.weights = int64_t{f.groups} * f.chunks * f.h.count * f.w.count * f.tiles * 32 * 4;
    const int64_t all =
        s.batch * divide_up(f.h.positions(s.height), rows) * divide_up(f.w.positions(s.width), kFewColumns);
    if (f.weights >= 1 << 26 || all >= 0x7fffffff) return {};
    return f.rows = rows, f;
  }
  // How a depthwise call's pass is divided. false: the kernels do not take it. *steps: of DepthwiseAxis, those of both
  // axes.
  bool depthwise_call(const Conv2dShape &s, DType dtype, Depthwise::Pass pass, Depthwise *d,
                      int *steps = nullptr) const {
    constexpr int64_t kMost = 0x7fffffff, kMaxParam = 1 << 15;
    const int64_t kernel = s.kernel_h, word = 4 / itemsize(dtype);
    const bool dx = pass == Depthwise::dx;
    bool fits = groups > 1 && groups == s.channels && s.channels == s.out_channels && kernel == s.kernel_w &&
                (kernel == 3 || kernel == 5 || kernel == 7) && dtype != DType::float64 && s.pixels() > 0 &&
                s.channels * s.height * s.width < kMost && s.channels * s.out_h * s.out_w < kMost &&
                s.batch * s.channels < kMost && s.channels * s.kernel() < kMost / 8 &&
                (!nhwc() || s.channels % word == 0);
    for (int i = 0; i < 2; ++i)
      fits = fits && stride.value[i] < kMaxParam && padding.value[i] < kMaxParam && dilation.value[i] < kMaxParam;
    if (!fits) return false;
    const int64_t in[] = {s.height, s.width}, out[] = {s.out_h, s.out_w};
    DepthwiseAxis *axes[] = {&d->h, &d->w};
    int found[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t st = stride.value[i], pad = padding.value[i], dil = dilation.value[i];
      *axes[i] = dx ? depthwise_dx_axis(out[i], in[i], kernel, st, pad, dil, &found[i])
                    : depthwise_axis(in[i], out[i], st, pad, dil, &found[i]);
    }
    if (found[0] != found[1] || found[0] == 0) return false;
    if (steps) *steps = found[0];
    d->channels = static_cast<int>(s.channels), d->batch = static_cast<int>(s.batch);
    d->reversed = dx && found[0] == 1;
    const int of_in = dx ? 1 : found[0], of_out = dx ? found[0] : 1;
    if (!nhwc()) return divide_planes(d, static_cast<int>(kernel), of_in, of_out, pass == Depthwise::dweight);
    divide_depthwise(d, static_cast<int>(kernel), depthwise_columns(of_in, of_out), static_cast<int>(word));
    return d->items < kMost / d->chunks;
  }
  // Blocks along dweight's sums: one or two waves of them, with those along the channels.
  int64_t depthwise_slices(const Conv2dShape &s, const Depthwise &d) const {
    const int64_t blocks = depthwise_dweight_blocks(static_cast<int>(s.kernel_h), nhwc());
    const int64_t across = nhwc() ? d.chunks : divide_up(d.channels, d.planes);
    const int64_t parts =
        nhwc() ? divide_up(d.items, kDepthwiseThreads / d.lanes) : divide_up(d.batch, d.images) * d.row_blocks;
    const int64_t waves = nhwc() ? 1 : 2;  // planes are loaded before they are used: blocks hide each other's loads
    return std::clamp<int64_t>(waves * kFullGrid / 2 * blocks / across, 1, std::min<int64_t>(parts, 65535));
  }
  static int64_t depthwise_slice(const Conv2dShape &s) { return round_up(s.channels * s.kernel(), 4); }

  // How a pass of groups of several channels is divided. false: the kernels do not take it.
  bool grouped_call(const Conv2dShape &s, DType dtype, bool dx, Grouped *g) const {
    auto axis = [&](int i, int64_t in, int64_t out, int64_t kernel) {
      const int64_t st = stride.value[i], pad = padding.value[i], dil = dilation.value[i];
      return dx ? grouped_dx_axis(out, in, kernel, st, pad, dil) : grouped_axis(in, out, kernel, st, pad, dil);
    };
    g->h = axis(0, s.height, s.out_h, s.kernel_h), g->w = axis(1, s.width, s.out_w, s.kernel_w);
    set_grouped(s, dtype, g);
    if (dx) std::swap(g->source_pitch, g->result_pitch), std::swap(g->in, g->out);
    return plan_grouped_pass(g, false);
  }
  bool grouped_dweight_call(const Conv2dShape &s, DType dtype, Grouped *g) const {
    g->h = grouped_axis(s.height, s.out_h, s.kernel_h, stride.value[0], padding.value[0], dilation.value[0]);
    g->w = grouped_axis(s.width, s.out_w, s.kernel_w, stride.value[1], padding.value[1], dilation.value[1]);
    set_grouped(s, dtype, g);
    if (!plan_grouped_pass(g, true)) return false;
    const int64_t blocks = int64_t{g->blocks()} * g->chunks * g->splits;  // with the slices, a wave of them
    return g->slices = static_cast<int>(std::clamp<int64_t>(kFullGrid / blocks, 1, g->tiles())), true;
  }

  // Whether groups in 16 bits and TF32 are of whole boxes of the implicit GEMM's channels and outputs
  // (conv2d_wgmma.cuh). Compute capability 9.0 alone has the kernels, as those of a plan's `three`; elsewhere
  // conv2d_grouped.h's take the call, if they do, or the direct ones.
  static constexpr int64_t kGroupBox = 64;
  bool takes_boxes(const Conv2dShape &s, DType dtype) const {
    constexpr int64_t kMost = 1 << 30;  // with a tile's overhang
    return kHasSm90 && (itemsize(dtype) == 2 || (dtype == DType::float32 && allow_tf32)) &&
           (s.channels / groups | s.out_channels / groups) % kGroupBox == 0 &&
           s.batch * std::max(s.height * s.width, s.out_h * s.out_w) < kMost;
  }
  // Whether a box has several groups, of as many outputs as channels: likewise.
  bool are_narrow(const Conv2dShape &s, DType dtype) const {
    const int64_t together = kGroupBox / (s.channels / groups);
    if (together < 2 || groups % together || s.channels != s.out_channels) return false;
    Conv2dParams merged = *this;
    merged.groups = groups / together;
    return merged.takes_boxes(s, dtype);
  }
  // y and dx: groups of 16 and 32 channels in 16 bits, and of 32 in TF32. Each group has products of its own, of 32
  // bytes of its channels. Kernels by columns read an image once, not for each element of the kernel
  // (docs/lab_notes.md).
  bool takes_narrow(const Conv2dShape &s, DType dtype, bool by_columns) const {
    constexpr int64_t kMostPixels = 40 * 40;  // 28 x 28 is faster, 56 x 56 slower
    const int64_t channels = s.channels / groups;
    if (!are_narrow(s, dtype)) return false;
    if (channels == 32) return true;
    return itemsize(dtype) == 2 && channels == 16 && (!by_columns || s.height * s.width <= kMostPixels);
  }
  // dweight likewise, of any number of channels in NHWC; NCHW is packed for y's kernels as well.
  bool takes_diagonal(const Conv2dShape &s, DType dtype, bool by_columns) const {
    constexpr int64_t kMostPixels = 20 * 20;  // 14 x 14 is faster, 28 x 28 slower
    const int64_t channels = s.channels / groups;
    if (!are_narrow(s, dtype)) return false;
    if (itemsize(dtype) == 4) return channels == 32 && takes_hwcn(s, dtype);
    return by_columns ? channels >= 16 && s.height * s.width <= kMostPixels
                      : channels >= 16 || (nhwc() && channels % 4 == 0);
  }
  // Slices of dweight, at most: an H200's multiprocessors have two blocks each of three boxes, or as few.
  int64_t boxes_slices(const Conv2dShape &s) const {
    const int64_t boxes = s.out_channels / kGroupBox * s.kernel() * divide_up(s.channels / groups, kGroupBox);
    const int64_t steps = divide_up(s.pixels(), kGroupBox);
    return std::clamp<int64_t>(3 * kFullGrid / boxes, 1, divide_up(steps, 4));
  }

  // Whether a 1 x 1 kernel on NCHW is a product for each image, without packing. In 16 bits the implicit GEMM is
  // faster, even though those tensors must be packed.
  bool pointwise(const Conv2dShape &s, DType dtype) const {
    auto are = [](const Ints &pair, int64_t value) { return pair.value[0] == value && pair.value[1] == value; };
    return (dtype == DType::float32 || dtype == DType::float64) && groups == 1 && !nhwc() && s.kernel() == 1 &&
           are(stride, 1) && are(padding, 0) && s.channels > 0 && s.out_channels > 0 && s.pixels() > 0;
  }

  // Whether dweight in TF32 takes x and dy in NCHW as they are, on compute capability 9.0 (conv2d_planes_dweight.cuh):
  // of kPlanesPixels pixels of dy, one row or two, is a step of its sum. Its blocks have kPlanesSide channels and
  // outputs.
  static constexpr int64_t kPlanesPixels = 56, kPlanesSide = 128, kLeastPlanesPixels = 6272;
  bool takes_planes(const Conv2dShape &s, DType dtype) const {
    auto are = [](const Ints &pair, int64_t value) { return pair.value[0] == value && pair.value[1] == value; };
    const int64_t step = stride.value[0];
    return dtype == DType::float32 && allow_tf32 && groups == 1 && !nhwc() && s.kernel_h == 3 && s.kernel_w == 3 &&
           (are(stride, 1) || are(stride, 2)) && are(padding, 1) && are(dilation, 1) &&
           (s.out_w == kPlanesPixels || s.out_w == kPlanesPixels / 2) && s.width == step * s.out_w &&
           s.height == step * s.out_h && s.out_h * s.out_w % kPlanesPixels == 0 && s.channels > kPlanesSide / 2 &&
           s.channels % 4 == 0 && s.out_channels > kPlanesSide / 2 && s.out_channels % 4 == 0 &&
           s.pixels() >= kLeastPlanesPixels;
  }
  // Blocks fill an H200 once: one for each row of the kernel.
  int64_t planes_slices(const Conv2dShape &s) const {
    const int64_t blocks = s.kernel_h * divide_up(s.channels, kPlanesSide) * divide_up(s.out_channels, kPlanesSide);
    return std::clamp<int64_t>(kFullGrid / 2 / blocks, 1, s.pixels() / kPlanesPixels);
  }

  // Whether dweight in TF32 takes copies of x and dy in HWCN, on compute capability 9.0 (conv2d_hwcn.cuh), whose
  // products are of 32 images at a time, at least half of them there. With a stride and without groups the copy of a
  // large x takes as long as the products gain, unless NCHW is copied anyway.
  bool takes_hwcn(const Conv2dShape &s, DType dtype) const {
    return dtype == DType::float32 && allow_tf32 && !pointwise(s, dtype) && s.channels >= 32 && s.channels % 4 == 0 &&
           s.out_channels % 4 == 0 && 2 * s.batch >= round_up(s.batch, 32) &&
           (!nhwc() || groups > 1 || (stride.value[0] == 1 && stride.value[1] == 1)) &&
           std::max(s.channels * s.height * s.width, s.out_channels * s.out_h * s.out_w) < int64_t{1} << 30;
  }
  static int64_t hwcn_pitch(int64_t images) { return round_up(images, 4); }  // of vectors of 16 bytes

  // How the workspace is used. The implicit GEMM kernels take NHWC with channels in whole vectors of 16 bytes; other
  // tensors are packed into the workspace first, and their channels padded with zeros. Patches have
  // rows of `channels` elements, a patch padded to whole vectors, and y packed as (pixels, outputs) if it is NCHW.
  // Sizes are in elements of the workspace's dtype.
  struct Plan {
    Kernels of_y = direct, of_dx = direct, of_dweight = direct;
    bool packed = false;  // the weight, and x and y if they are packed_x and packed_y
    bool packed_x = false, packed_y = false;
    int64_t channels = 0, out_channels = 0;      // padded to whole vectors
    int64_t x = 0, weight = 0, y = 0, bias = 0;  // packed tensors
    int64_t slices = 0, slice = 0;               // of dweight: how many, and the size of one; of groups, of boxes
    int64_t few_dweight = 0, few_dx = 0;         // of few channels: the same in all; the weight
    int64_t depthwise_dweight = 0;               // the same, depthwise
    Grouped grouped_images, grouped_dweight;     // y's pass or dx's, and dweight's
    bool boxes = false, boxes_dweight = false;   // whether the implicit GEMM takes the groups, on 9.0
    int narrow = 0;                              // channels of a group if a box has several
    // float32 in three parts (conv2d_parts.cuh): packed tensors, and dweight's slices. Compute capability 9.0 alone has
    // the kernels, but shape inference, which a trace may run elsewhere, knows the library and not the device.
    bool three = false;
    int64_t three_x = 0, three_weight = 0, three_y = 0, three_slices = 0;
    int64_t hwcn_x = 0, hwcn_y = 0;  // copies of dweight in TF32, of 9.0 alone likewise
    int64_t planes_slices = 0;       // of dweight in TF32 without these: how many
    int64_t library = 0;             // cuBLASLt's
    int64_t dbias = 0;

    bool any(Kernels k) const { return of_y == k || of_dx == k || of_dweight == k; }
    int64_t forward() const {
      if (of_y == few_channels || of_y == depthwise || of_y == direct) return 0;
      if (of_y == Kernels::grouped) return x + y + std::max(grouped_images.words(), weight);
      return std::max(packed ? weight + y + x : 0, three_weight + three_x) + bias + library;
    }
    // packed x takes the place of packed dx; what kernels of few channels use is free before and after
    int64_t backward() const {
      return std::max(
                 {weight + (packed ? y + x : 0) + hwcn_x + hwcn_y + std::max(slices, planes_slices) * slice + library,
                  three_weight + three_y + three_x + three_slices * slice, few_dweight, few_dx, depthwise_dweight,
                  x + y +
                      std::max({grouped_images.words(), grouped_dweight.sums(),
                                weight + hwcn_x + hwcn_y + slices * slice})}) +
             dbias;
    }
  };
  Plan forward_plan(const Conv2dShape &s, DType dtype) const {
    Plan p;
    p.of_y = y_kernels(s, dtype, &p.grouped_images);
    return plan(s, dtype, p);
  }
  Plan backward_plan(const Conv2dShape &s, DType dtype) const {
    Plan p;
    p.of_dx = dx_kernels(s, dtype, &p.grouped_images);
    p.of_dweight = dweight_kernels(s, dtype, &p.grouped_dweight);
    if (p.of_dx == few_channels) p.few_dx = few_dx(s, dtype).weights;
    if (p.of_dweight == few_channels) {
      const FewTiles few = few_dweight(s, dtype);
      p.few_dweight = few_slices(s, few).slices * s.out_channels * s.kernel() * few.quads * 4;
    }
    p.dbias = kSlices * s.out_channels;
    Depthwise d;
    if (p.of_dweight == depthwise && depthwise_call(s, dtype, Depthwise::dweight, &d))
      p.depthwise_dweight = depthwise_slices(s, d) * depthwise_slice(s);
    return plan(s, dtype, p);
  }
  // Elements of the workspaces. Without a dtype, for shape inference that does not know it: as many as any dtype needs.
  int64_t forward_workspace(const Conv2dShape &s, DType dtype) const {
    return largest(dtype, [&](DType each) { return as_read(s, each).forward_plan(s, each).forward(); });
  }
  int64_t backward_workspace(const Conv2dShape &s, DType dtype) const {
    return largest(dtype, [&](DType each) { return as_read(s, each).backward_plan(s, each).backward(); });
  }

 private:
  // few: whether the kernel of few channels takes the call; before_patches: and is faster than a product of patches.
  Kernels choose(const Conv2dShape &s, DType dtype, Depthwise::Pass pass, bool few, bool before_patches,
                 Grouped *g) const {
    Depthwise d;
    if (depthwise_call(s, dtype, pass, &d)) return depthwise;
    if (groups > 1 && grouped_fits(s, dtype) && (grouped_takes(s, dtype, pass, g) || takes_boxes(s, dtype)))
      return grouped;
    if (groups != 1 || s.channels < 1 || s.out_channels < 1 || s.pixels() < 1) return direct;
    if (x_is_patches(s, dtype)) return patches;
    if (are_patches(s, dtype)) return few && before_patches ? few_channels : patches;
    if (few) return few_channels;
    if (dtype == DType::float64) return direct;
    const bool one = is_one_group(s, dtype, pass) && grouped_fits(s, dtype) && grouped_takes(s, dtype, pass, g);
    return one ? grouped : implicit_gemm;
  }

  // Whether a pass without groups is one of a single group: of fewer channels than the implicit GEMM's boxes have
  // (docs/lab_notes.md). With a stride dx is slower of large kernels, and dweight of any; more outputs are slower in 32
  // bits, and were not measured in 16.
  bool is_one_group(const Conv2dShape &s, DType dtype, Depthwise::Pass pass) const {
    constexpr int64_t kBox = 32, kMostKernel = 3;
    const bool narrow = itemsize(dtype) == 2, strided = stride.value[0] > 1 || stride.value[1] > 1;
    if (groups != 1 || s.channels <= kMaxFewChannels || s.channels >= kBox) return false;
    if (s.out_channels > (narrow ? 192 : 32)) return false;
    if (pass == Depthwise::dweight) return !strided && (narrow || nhwc());
    return pass == Depthwise::y || !strided || (std::max(s.kernel_h, s.kernel_w) <= kMostKernel && s.channels % 8 == 0);
  }

  // Pairs of channels are together in a word, or read and written together, images have 31 bits of elements, and a
  // tensor that is packed from NHWC has 32 (copy_padded).
  bool grouped_fits(const Conv2dShape &s, DType dtype) const {
    constexpr int64_t kMost = 0x7fffffff, kMaxParam = 1 << 15, kMostStride = kGroupedPhases, kMostKernel = 32;
    auto packs = [&](int64_t pixels, int64_t channels) {
      return !nhwc() || channels % 8 == 0 || s.batch * pixels * round_up(channels, 8) < int64_t{1} << 32;
    };
    const int64_t wide = kGroupedWide / itemsize(dtype);
    bool fits = itemsize(dtype) < 8 && s.channels > 0 && s.out_channels > 0 && s.pixels() > 0 &&
                s.height * s.width > 0 && packs(s.height * s.width, s.channels) &&
                packs(s.out_h * s.out_w, s.out_channels) && s.kernel_h <= kMostKernel && s.kernel_w <= kMostKernel &&
                s.batch * std::max(s.height * s.width, s.out_h * s.out_w) < kMost &&
                round_up(s.channels, 8) * s.height * s.width < kMost &&
                round_up(s.out_channels, 8) * s.out_h * s.out_w < kMost &&
                s.out_channels * s.kernel() * (s.channels / groups) < kMost / 8;
    for (int i = 0; i < 2; ++i)
      fits = fits && stride.value[i] <= kMostStride && padding.value[i] < kMaxParam && dilation.value[i] < kMaxParam;
    const int64_t in = s.channels / groups, out = s.out_channels / groups;
    fits = fits && groups * divide_up(in, wide) * divide_up(out, wide / 2) < 1 << 16;  // blocks
    return fits && (std::max(in, out) <= wide ? (in | out) % 2 == 0 : (in | out) % 8 == 0 && (in | out) < 1 << 12);
  }
  bool grouped_takes(const Conv2dShape &s, DType dtype, Depthwise::Pass pass, Grouped *plan) const {
    Grouped g;
    const bool dx = pass == Depthwise::dx;
    if (!(pass == Depthwise::dweight ? grouped_dweight_call(s, dtype, &g) : grouped_call(s, dtype, dx, &g)))
      return false;
    if (plan) *plan = g;
    return true;
  }
  // Sets what all passes have alike.
  void set_grouped(const Conv2dShape &s, DType dtype, Grouped *g) const {
    g->vector = static_cast<int>(16 / itemsize(dtype)), g->three = few_three(dtype);
    g->batch = static_cast<int>(s.batch), g->groups = static_cast<int>(groups);
    g->in = static_cast<int>(s.channels / groups), g->out = static_cast<int>(s.out_channels / groups);
    g->source_pitch = static_cast<int>(round_up(s.channels, g->vector));
    g->result_pitch = static_cast<int>(round_up(s.out_channels, g->vector));
  }

  // Adds the sizes of packed tensors, patches and partial sums to a plan whose kernels are chosen.
  Plan plan(const Conv2dShape &s, DType dtype, Plan p) const {
    // elements in a vector of 16 bytes; a workspace of float64 has as many elements as its tensors
    const int64_t vector = 16 / itemsize(dtype), size = std::min<int64_t>(itemsize(dtype), 4);
    if (p.any(patches) && x_is_patches(s, dtype)) {
      constexpr int64_t kMost = 1 << 21;  // 8 MiB, as cuDNN (in float64 16): a model's peak may be here
      p.channels = s.channels;
      p.library = std::min(kMost, library_workspace(s.pixels() * s.out_channels, s.channels));
      return p;
    }
    if (p.any(patches)) {
      p.packed = true, p.channels = round_up(s.channels * s.kernel(), vector);
      p.x = words(s.pixels() * p.channels, size);
      p.weight = p.channels == s.channels * s.kernel() ? 0 : words(s.out_channels * p.channels, size);
      p.y = nhwc() ? 0 : words(s.pixels() * s.out_channels, size);
      p.library = library_workspace(s.pixels() * s.out_channels, p.channels);
      return p;
    }
    // float64's direct kernels need none, but dweight of a 1 x 1 kernel may be products of each image in as much
    const bool products = groups == 1 && dtype == DType::float64 && s.kernel() == 1 && !nhwc();
    if (p.any(grouped) && groups > 1) {
      p.channels = round_up(s.channels, vector), p.out_channels = round_up(s.out_channels, vector);
      p.packed_x = !nhwc() || p.channels != s.channels, p.packed_y = !nhwc() || p.out_channels != s.out_channels;
      p.x = p.packed_x ? words(s.batch * s.height * s.width * p.channels, size) : 0;
      p.y = p.packed_y ? words(s.pixels() * p.out_channels, size) : 0;
      const bool wide = takes_boxes(s, dtype);
      p.boxes = wide || takes_narrow(s, dtype, p.grouped_images.columns && !p.grouped_images.planes());
      p.boxes_dweight =
          wide ? size == 2 || takes_hwcn(s, dtype) : takes_diagonal(s, dtype, p.grouped_dweight.columns > 0);
      if (!p.boxes && !p.boxes_dweight) return p;
      p.narrow = wide ? 0 : static_cast<int>(s.channels / groups);
      p.slice = s.out_channels * s.kernel() * (s.channels / groups);
      p.weight = p.boxes ? words(p.slice, size) : 0, p.slices = p.boxes_dweight ? boxes_slices(s) : 0;
      if (p.boxes_dweight && size == 4) set_hwcn(s, &p);
      return p;
    }
    if (!p.any(implicit_gemm) && !p.any(grouped) && !products) return p;
    p.channels = round_up(s.channels, vector), p.out_channels = round_up(s.out_channels, vector);
    p.packed_x = !nhwc() || p.channels != s.channels, p.packed_y = !nhwc() || p.out_channels != s.out_channels;
    p.packed = p.packed_x || p.packed_y;
    p.bias = words(s.out_channels + 7, 4);
    p.x = p.packed_x ? words(s.batch * s.height * s.width * p.channels, size) : 0;
    // only dx of TF32 has another order of the weight than NHWC
    p.weight = p.packed || size > 2 ? words(p.out_channels * s.kernel() * p.channels, size) : 0;
    p.y = p.packed_y ? words(s.pixels() * p.out_channels, size) : 0;
    if (p.of_dweight == few_channels || p.of_dweight == grouped) return p;
    if (dtype == DType::float32) {
      p.slices = slices_of_float32(p, s);
    } else {
      constexpr int64_t kWidest = 8;  // elements in a vector of the narrowest dtype
      const int64_t rows = round_up(s.out_channels, kWidest), cols = s.kernel() * round_up(s.channels, kWidest);
      const int64_t tiles = divide_up(rows, s.out_channels <= 64 ? 64 : 128) * divide_up(cols, 128);
      p.slices = std::max<int64_t>(kFullGrid / std::max<int64_t>(tiles, 1), 1);
    }
    p.slice = p.out_channels * s.kernel() * p.channels;
    if (kHasSm90 && p.of_dweight == implicit_gemm && takes_planes(s, dtype)) {
      p.planes_slices = planes_slices(s);
    } else if (kHasSm90 && p.of_dweight == implicit_gemm && takes_hwcn(s, dtype)) {
      set_hwcn(s, &p);
    }
    p.three = kHasSm90 && dtype == DType::float32 && !allow_tf32 && s.channels % 64 == 0 && s.out_channels % 64 == 0;
    if (!p.three) return p;
    constexpr int64_t kBytes = 6;  // of three parts
    p.three_x = words(s.batch * s.height * s.width * s.channels, kBytes);
    p.three_weight = words(p.slice, kBytes), p.three_y = words(s.pixels() * s.out_channels, kBytes);
    const int64_t tiles = divide_up(s.out_channels, 128) * divide_up(s.kernel() * s.channels, 128);
    p.three_slices = std::clamp<int64_t>(kFullGrid / 2 / tiles, 1, divide_up(s.pixels(), kMinSlice));
    return p;
  }

  static void set_hwcn(const Conv2dShape &s, Plan *p) {
    p->hwcn_x = s.height * s.width * s.channels * hwcn_pitch(s.batch);
    p->hwcn_y = s.out_h * s.out_w * s.out_channels * hwcn_pitch(s.batch);
  }

  // The slices with which dweight's blocks, all but filling the GPU once or several times, take the least time: adding
  // a slice takes as long as its product of some 128 pixels. A multiprocessor has two blocks of 128 x 128, or three of
  // 64 x 64.
  int64_t slices_of_float32(const Plan &p, const Conv2dShape &s) const {
    const bool large = allow_tf32 && p.out_channels > 64;
    const int64_t side = large ? 128 : 64, places = kFullGrid / 2 * (large ? 2 : 3), pixels = s.pixels();
    const int64_t tiles = divide_up(p.out_channels, side) * divide_up(s.kernel() * p.channels, side);
    int64_t best = 1;
    double least = 0;
    for (int64_t times = 1; times <= 4; ++times) {
      const int64_t n = std::max<int64_t>(std::min(times * places / tiles, pixels / kMinSlice), 1);
      const double products = static_cast<double>(divide_up(tiles * n, places)) / static_cast<double>(n);
      const double time = products * static_cast<double>(places) / static_cast<double>(tiles) +
                          128 * static_cast<double>(n) / static_cast<double>(pixels);
      if (times == 1 || time < least) best = n, least = time;
    }
    return best;
  }

  // Along an axis, with the shift for which a position meets the fewest elements of dy. A dilation with a stride is not
  // supported.
  static DxAxis dx_axis(int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, int64_t neighbours) {
    DxAxis axis;
    if (dilation > 1) {
      if (stride > 1) return axis;
      axis.first = static_cast<int>(padding - (kernel - 1) * dilation);
      axis.step = static_cast<int>(dilation), axis.count = static_cast<int>(kernel);
      return axis;
    }
    auto floor = [&](int64_t a) { return a >= 0 ? a / stride : -divide_up(-a, stride); };
    axis.pixels = static_cast<int>(stride * neighbours), axis.apart = static_cast<int>(neighbours);
    for (int64_t shift = 0; shift < stride; ++shift) {
      const int64_t least = padding - kernel + 1 - shift, most = axis.pixels - 1 + padding - shift;
      const int64_t first = -floor(-least), count = floor(most) - first + 1;
      if (axis.count && count >= axis.count) continue;
      axis.shift = static_cast<int>(shift), axis.first = static_cast<int>(first), axis.count = static_cast<int>(count);
    }
    return axis;
  }

  static int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
  template <class F>
  static int64_t largest(DType dtype, F f) {
    if (dtype != DType::unknown) return f(dtype);
    return std::max({f(DType::float16), f(DType::float32), f(DType::float64)});
  }

  // A 1 x 1 kernel on NHWC whose lines are whole vectors: x is the matrix.
  bool x_is_patches(const Conv2dShape &s, DType dtype) const {
    const int64_t vector = 16 / itemsize(dtype);
    return nhwc() && s.kernel() == 1 && stride.value[0] == 1 && stride.value[1] == 1 && !padding.value[0] &&
           !padding.value[1] && s.channels % vector == 0 && s.out_channels % vector == 0;
  }
  bool are_patches(const Conv2dShape &s, DType dtype) const {
    const int64_t sizes[] = {s.kernel_h, s.kernel_w};
    for (int i = 0; i < 2; ++i)
      if (stride.value[i] != sizes[i] || padding.value[i] || (sizes[i] > 1 && dilation.value[i] != 1)) return false;
    constexpr int64_t kMost = 1 << 30;  // indices within a row of patches, in a weight, and of blocks have 31 bits
    const int64_t depth = round_up(s.channels * s.kernel(), 8);
    return s.kernel() > 1 && (s.channels < 32 || dtype == DType::float64) &&
           depth * (s.out_w + 1) + s.channels * s.kernel_h * s.width < kMost && s.batch * (s.out_h + 1) < kMost &&
           s.out_channels * depth < kMost && s.out_channels * s.out_h * s.out_w < kMost << 8;
  }

  // Whether the kernels of few channels take a call of such sizes, if their windows fit in shared memory.
  bool few_fits(const Conv2dShape &s) const {
    constexpr int64_t kMost = 0x7fffffff, kMaxParam = 1 << 15;
    const int64_t h = s.kernel_h > 1 ? dilation.value[0] : 1, w = s.kernel_w > 1 ? dilation.value[1] : 1;
    for (int64_t param : {stride.value[0], stride.value[1], padding.value[0], padding.value[1], h, w})
      if (param >= kMaxParam) return false;
    return groups == 1 && 0 < s.channels && s.channels <= kMaxFewChannels && s.kernel_h <= 256 && s.kernel_w <= 256 &&
           s.channels * s.height * s.width < kMost && s.out_channels * s.out_h * s.out_w < kMost && s.batch < kMost &&
           s.out_channels <= kMost / 8 && divide_up(s.out_channels, kFewOutputs) <= 65535;
  }

  // The largest tiles, of `most` rows at most, for which kFewBlocks fit; else the smallest. other(tiles): bytes beside
  // the window.
  template <class F>
  FewTiles few_tiles(const Conv2dShape &s, DType dtype, int most, F other) const {
    constexpr int64_t kMost = 0x7fffffff;
    if (!few_fits(s)) return {};
    const int64_t h = s.kernel_h > 1 ? dilation.value[0] : 1, w = s.kernel_w > 1 ? dilation.value[1] : 1;
    for (int rows : {16, 8}) {
      if (rows > most) continue;
      FewTiles f;
      f.rows = rows, f.quads = static_cast<int>(divide_up(s.channels, 4));
      const int64_t height = (rows - 1) * stride.value[0] + (s.kernel_h - 1) * h + 1;
      const int64_t width = (kFewColumns - 1) * stride.value[1] + (s.kernel_w - 1) * w + 1;
      const int64_t units = few_units(f.quads, itemsize(dtype));
      int64_t pitch = width;  // without bank conflicts where a step of the sum goes on in the kernel's next row
      while (pitch < width + 16 && (pitch * h - s.kernel_w * w) * units % 16 != 0) ++pitch;
      if (pitch == width + 16) pitch = width;
      if (height > 4096 || pitch > 4096) continue;
      f.height = static_cast<int>(height), f.width = static_cast<int>(width), f.pitch = static_cast<int>(pitch);
      const int64_t window = round_up(height * pitch * units * 8, 16), shared = window + 16 + other(f);
      if (shared > (rows > 8 ? kFewShared : kConvShared)) continue;
      if (s.batch * f.tiles_h(s) * int64_t{f.tiles_w(s)} >= kMost) continue;
      f.window = static_cast<int>(window), f.shared = static_cast<int>(shared);
      return f;
    }
    return {};
  }
  // float32 words for n elements, in whole vectors of 16 bytes.
  static int64_t words(int64_t n, int64_t itemsize) { return divide_up(n * itemsize, 16) * 4; }
};

}  // namespace AOT_ISA
}  // namespace aot
