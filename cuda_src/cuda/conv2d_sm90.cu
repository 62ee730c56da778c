#include "conv2d_wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// RowBoxes, ColBoxes, RowGroups, ColGroups, Stages, Blocks: by what an H200 measured (docs/performance.md).
using Narrow = WgmmaTile<2, 1, 2, 1, 3, 3>;  // y and dx of up to 64 columns,
using Short = WgmmaTile<1, 2, 1, 1, 2, 4>;   // of more, with sums of a box or two,
using Wide = WgmmaTile<1, 2, 1, 1, 3, 3>;    // with longer ones,
using Pair = WgmmaTile<1, 2, 1, 1, 4, 2>;    // and where they are cut; dweight in twos of kernel elements and channels,
using Single = WgmmaTile<1, 1, 1, 1, 6, 2>;  // of little,
using Three = WgmmaTile<1, 3, 1, 1, 6, 1>;   // in threes,
using Broad = WgmmaTile<2, 3, 2, 1, 5, 1>;   // and with more than 64 outputs

enum Choice { kNarrow, kShort, kWide, kPair, kSingle, kThree, kBroad };

// Multiprocessors of an H200; a number of the device would make results depend on it.
constexpr int kMultiprocessors = 132;

// The result's rows, its columns in boxes, and the boxes along the sum.
struct Extent {
  int64_t rows, col_boxes, steps;

  explicit Extent(const Conv2dProduct &p) {
    const int64_t channels = ceil_div(p.channels, kBox), outputs = ceil_div(p.outputs, kBox), pixels = p.pixels();
    if (p.pass == Conv2dProduct::y) rows = pixels, col_boxes = outputs, steps = p.kernel() * channels;
    else if (p.pass == Conv2dProduct::dweight)
      rows = p.outputs, col_boxes = p.kernel() * channels, steps = ceil_div(pixels, kBox);
    else rows = int64_t{p.batch} * p.height * p.width, col_boxes = channels, steps = p.kernel() * outputs;
  }
  // Few tiles of many steps: the sum is cut in slices.
  bool cut() const { return ceil_div(rows, kBox) * ceil_div(col_boxes, 2) < kMultiprocessors && steps >= 16; }
};

static Choice choose(const Conv2dProduct &p) {
  const Extent e(p);
  if (p.pass != Conv2dProduct::dweight)
    return e.cut() ? kPair : e.col_boxes == 1 ? kNarrow : e.steps <= 2 ? kShort : kWide;
  if (e.col_boxes % 3 != 0 && e.col_boxes * ceil_div(e.rows, kBox) <= 8) return kSingle;
  if (e.col_boxes % 3 != 0 && e.col_boxes % 2 == 0) return kPair;
  return p.outputs <= 64 ? kThree : kBroad;
}

// f(a tile) for the tile chosen.
template <class F>
static auto with_tile(Choice choice, F f) {
  switch (choice) {
    case kNarrow:
      return f(Type<Narrow>());
    case kShort:
      return f(Type<Short>());
    case kWide:
      return f(Type<Wide>());
    case kPair:
      return f(Type<Pair>());
    case kSingle:
      return f(Type<Single>());
    case kThree:
      return f(Type<Three>());
    default:
      return f(Type<Broad>());
  }
}

bool conv2d_sm90_takes(const char *op, Conv2dProduct *p, int most, bool whole) {
  DeviceLimits limits;
  if (device_limits(op, &limits) != kOk || limits.major != 9) return false;
  if (!TensorMaps::get().tiled || !TensorMaps::get().im2col) return false;
  const bool dx = p->pass == Conv2dProduct::dx, dweight = p->pass == Conv2dProduct::dweight;
  if (dx && (p->stride_h != 1 || p->stride_w != 1)) return false;
  // what TMA's im2col mode takes: corners of 8 bits, offsets of 8, strides of up to 8
  const int reach_h = p->dilation_h * (p->kernel_h - 1), reach_w = p->dilation_w * (p->kernel_w - 1);
  const bool fits = std::max(reach_h, p->padding_h) < 120 && std::max(reach_w, p->padding_w) < 120;
  if (!fits || p->stride_h > 8 || p->stride_w > 8) return false;
  // few channels are short rows, which TMA brings slowly
  if ((dx ? p->outputs : p->channels) < 32) return false;
  // tiny tensors are no work for it, and some drivers encode their maps wrong
  const int64_t image = int64_t{p->height} * p->width * p->channels, out = int64_t{p->out_h} * p->out_w * p->outputs;
  if (p->batch * std::min(image, out) < 1 << 16) return false;
  const Extent e(*p);
  const int64_t tiles = with_tile(choose(*p), [&](auto type) {
    using Tile = typename decltype(type)::type;
    return ceil_div(e.rows, Tile::kRowBoxes * kBox) * ceil_div(e.col_boxes, Tile::kColBoxes);
  });
  const int64_t wanted = dweight ? kMultiprocessors / tiles : e.cut() ? 2 * kMultiprocessors / tiles : 0;
  p->slices = static_cast<int>(std::min<int64_t>({most, wanted, ceil_div(e.steps, dweight ? 4 : 8)}));
  if (p->slices <= 1) p->slices = whole ? 0 : 1;
  return true;
}

template <typename T>
static Status run(const char *op, const Conv2dProduct &p, void *stream) {
  Conv2dWgmma arguments;
  AOT_TRY(bind_device(op));
  if (!wgmma_arguments(p, &arguments)) return fail(kDeviceError, "%s: the driver refuses a tensor map", op);
  return with_tile(choose(p), [&](auto type) {
    using Tile = typename decltype(type)::type;
    constexpr bool kPair = std::is_same_v<Tile, Pair>;
    constexpr bool kNotDweight =
        std::is_same_v<Tile, Narrow> || std::is_same_v<Tile, Short> || std::is_same_v<Tile, Wide>;
    if constexpr (kNotDweight || kPair) {
      if (p.pass == Conv2dProduct::y) return launch_wgmma<T, Conv2dProduct::y, Tile>(op, arguments, stream);
      if (p.pass == Conv2dProduct::dx) return launch_wgmma<T, Conv2dProduct::dx, Tile>(op, arguments, stream);
    }
    if constexpr (kNotDweight) return kOk;
    else return launch_wgmma<T, Conv2dProduct::dweight, Tile>(op, arguments, stream);
  });
}

Status conv2d_sm90(const char *op, const Conv2dProduct &p, void *stream) {
  return p.dtype == DType::float16 ? run<__half>(op, p, stream) : run<__nv_bfloat16>(op, p, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
