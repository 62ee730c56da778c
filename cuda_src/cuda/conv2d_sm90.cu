#include "conv2d_wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// RowBoxes, ColBoxes, RowGroups, ColGroups, Stages, Blocks: by what an H200 measured (docs/performance.md).
using Narrow = WgmmaTile<2, 1, 2, 1, 3, 3>;  // y and dx of up to 64 columns
using Wide = WgmmaTile<1, 2, 1, 1, 3, 3>;    // of more
using Single = WgmmaTile<1, 1, 1, 1, 6, 2>;  // dweight of little,
using Pair = WgmmaTile<1, 2, 1, 1, 4, 2>;    // of kernel elements and channels that come in twos,
using Three = WgmmaTile<1, 3, 1, 1, 6, 1>;   // in threes,
using Broad = WgmmaTile<2, 3, 2, 1, 5, 1>;   // and with more than 64 outputs

enum Choice { kNarrow, kWide, kSingle, kPair, kThree, kBroad };

static Choice choose(const Conv2dProduct &p) {
  if (p.pass == Conv2dProduct::y) return p.outputs <= 64 ? kNarrow : kWide;
  if (p.pass == Conv2dProduct::dx) return p.channels <= 64 ? kNarrow : kWide;
  const int64_t boxes = p.kernel() * ceil_div(p.channels, kBox), rows = ceil_div(p.outputs, kBox);
  if (boxes % 3 != 0 && boxes * rows <= 8) return kSingle;
  if (boxes % 3 != 0 && boxes % 2 == 0) return kPair;
  return p.outputs <= 64 ? kThree : kBroad;
}

// f(a tile) for the tile chosen.
template <class F>
static auto with_tile(Choice choice, F f) {
  switch (choice) {
    case kNarrow:
      return f(Type<Narrow>());
    case kWide:
      return f(Type<Wide>());
    case kSingle:
      return f(Type<Single>());
    case kPair:
      return f(Type<Pair>());
    case kThree:
      return f(Type<Three>());
    default:
      return f(Type<Broad>());
  }
}

// Multiprocessors of an H200; a number of the device would make results depend on it.
constexpr int kMultiprocessors = 132;

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
  // tiny tensors are no work for it, and some drivers encode their maps wrong
  const int64_t image = int64_t{p->height} * p->width * p->channels, out = int64_t{p->out_h} * p->out_w * p->outputs;
  if (p->batch * std::min(image, out) < 1 << 16) return false;
  const int64_t rows = dweight ? p->outputs : int64_t{p->batch} * (dx ? p->height * p->width : p->out_h * p->out_w);
  const int64_t col_boxes =
      dweight ? p->kernel() * ceil_div(p->channels, kBox) : ceil_div(dx ? p->channels : p->outputs, kBox);
  const int64_t tiles = with_tile(choose(*p), [&](auto type) {
    using Tile = typename decltype(type)::type;
    return ceil_div(rows, Tile::kRowBoxes * kBox) * ceil_div(col_boxes, Tile::kColBoxes);
  });
  const int64_t steps = dweight ? ceil_div(int64_t{p->batch} * p->out_h * p->out_w, kBox)
                                : p->kernel() * ceil_div(dx ? p->outputs : p->channels, kBox);
  // y and dx are cut only where they are few tiles of many steps; each slice has some steps
  const int64_t wanted = dweight                                   ? kMultiprocessors / tiles
                         : tiles < kMultiprocessors && steps >= 16 ? 2 * kMultiprocessors / tiles
                                                                   : 0;
  p->slices = static_cast<int>(std::min<int64_t>({most, wanted, ceil_div(steps, dweight ? 4 : 8)}));
  if (p->slices <= 1) p->slices = whole ? 0 : 1;
  return true;
}

template <typename T>
static Status run(const char *op, const Conv2dProduct &p, void *stream) {
  Conv2dWgmma arguments;
  if (!wgmma_arguments(p, &arguments)) return fail(kDeviceError, "%s: the driver refuses a tensor map", op);
  return with_tile(choose(p), [&](auto type) {
    using Tile = typename decltype(type)::type;
    constexpr bool kForward = std::is_same_v<Tile, Narrow> || std::is_same_v<Tile, Wide>;
    if constexpr (!kForward) return launch_wgmma<T, Conv2dProduct::dweight, Tile>(op, arguments, stream);
    else
      return p.pass == Conv2dProduct::y ? launch_wgmma<T, Conv2dProduct::y, Tile>(op, arguments, stream)
                                        : launch_wgmma<T, Conv2dProduct::dx, Tile>(op, arguments, stream);
  });
}

Status conv2d_sm90(const char *op, const Conv2dProduct &p, void *stream) {
  return p.dtype == DType::float16 ? run<__half>(op, p, stream) : run<__nv_bfloat16>(op, p, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
