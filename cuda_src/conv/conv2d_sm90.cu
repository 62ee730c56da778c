#include "conv2d_wgmma.cuh"

namespace aot {
inline namespace AOT_ISA {

// RowBoxes, ColBoxes, RowGroups, ColGroups, Stages, Blocks: by what an H200 measured (docs/lab_notes.md).
using Narrow = WgmmaTile<2, 1, 2, 1, 3, 3>;  // y and dx of up to 64 columns,
using Short = WgmmaTile<1, 2, 1, 1, 2, 4>;   // of more, with sums of a box or two,
using Wide = WgmmaTile<1, 2, 1, 1, 3, 3>;    // with longer ones,
using Large = WgmmaTile<2, 4, 2, 1, 4, 1>;   // and where they are cut;
using Pair = WgmmaTile<1, 2, 1, 1, 4, 2>;    // dweight in twos of kernel elements and channels,
using Single = WgmmaTile<1, 1, 1, 1, 6, 1>;  // of little,
using Three = WgmmaTile<1, 3, 1, 1, 6, 1>;   // in threes,
using Threes = WgmmaTile<1, 3, 1, 1, 3, 2>;  // and with more than 64 outputs

// f(a tile) for the tile chosen.
template <Conv2dProduct::Pass kPass, class F>
static auto with_tile(const Conv2dWgmma &p, F f) {
  const int64_t rows = ceil_div(p.rows, kBox), cols = col_boxes(kPass, p);
  if constexpr (kPass == Conv2dProduct::dweight) {
    if (cols % 3 != 0 && cols * rows <= 8) return f(Type<Single>());
    if (cols % 3 != 0 && cols % 2 == 0) return f(Type<Pair>());
    return rows == 1 ? f(Type<Three>()) : f(Type<Threes>());
  } else {
    if (rows * ceil_div(cols, 2) < kMultiprocessors && p.steps >= 16) return f(Type<Large>());
    if (cols == 1) return f(Type<Narrow>());
    return p.steps <= 2 ? f(Type<Short>()) : f(Type<Wide>());
  }
}

// f(a pass) for the one that it is.
template <class F>
static auto with_pass(Conv2dProduct::Pass pass, F f) {
  if (pass == Conv2dProduct::y) return f(std::integral_constant<Conv2dProduct::Pass, Conv2dProduct::y>());
  if (pass == Conv2dProduct::dx) return f(std::integral_constant<Conv2dProduct::Pass, Conv2dProduct::dx>());
  return f(std::integral_constant<Conv2dProduct::Pass, Conv2dProduct::dweight>());
}

bool conv2d_sm90_takes(const char *op, Conv2dProduct *p, int most, bool whole) {
  DeviceLimits limits;
  if (device_limits(op, &limits) != kOk || limits.major != 9) return false;
  if (!TensorMaps::get().tiled || !TensorMaps::get().im2col) return false;
  const bool dx = p->pass == Conv2dProduct::dx, dweight = p->pass == Conv2dProduct::dweight;
  if (p->dtype == DType::float32 && (!p->tf32 || dweight)) return false;
  // a dx with strides is one for each phase; of float32 CUTLASS's, which is one for all, is faster
  auto whole_steps = [](int stride, int dilation) { return stride == 1 || dilation == 1; };
  if (dx && (!whole_steps(p->stride_h, p->dilation_h) || !whole_steps(p->stride_w, p->dilation_w))) return false;
  const int phases = p->stride_h * p->stride_w;
  if (dx && phases > (p->dtype == DType::float32 ? 1 : 4)) return false;
  // what TMA's im2col mode takes: corners of 8 bits, offsets of 8, strides of up to 8
  const int reach_h = p->dilation_h * (p->kernel_h - 1), reach_w = p->dilation_w * (p->kernel_w - 1);
  const bool fits = std::max(reach_h, p->padding_h) < 120 && std::max(reach_w, p->padding_w) < 120;
  if (!fits || p->stride_h > 8 || p->stride_w > 8) return false;
  // few channels are short rows, which TMA brings slowly
  if ((dx ? p->outputs : p->channels) < 32) return false;
  // tiny tensors are no work for it, and some drivers encode their maps wrong
  const int64_t image = int64_t{p->height} * p->width * p->channels, out = int64_t{p->out_h} * p->out_w * p->outputs;
  if (p->batch * std::min(image, out) < 1 << 16) return false;
  p->slices = with_pass(p->pass, [&](auto pass) {
    const Conv2dWgmma sizes = wgmma_sizes(*p);
    return with_tile<pass.value>(sizes, [&](auto type) {
      using Tile = typename decltype(type)::type;
      const int64_t rows = ceil_div(ceil_div(sizes.rows, kBox), Tile::kRowBoxes);
      const int64_t tiles = rows * ceil_div(col_boxes(pass.value, sizes), Tile::kColBoxes);
      const int64_t wanted = dweight || Tile::kShows ? kMultiprocessors * Tile::kBlocks / tiles : 0;
      const auto slices = static_cast<int>(std::min<int64_t>({most, wanted, ceil_div(sizes.steps, 4)}));
      return dweight || slices < 4 ? slices : slices / 4 * 4;  // a cluster of five fits worse
    });
  });
  if (p->slices <= 1) p->slices = whole ? 0 : 1;
  return true;
}

template <typename T>
static Status run(Launches &launch, const Conv2dProduct &c) {
  const bool dx = c.pass == Conv2dProduct::dx;
  bool independent = c.independent;
  AOT_TRY(bind_device(launch.op()));
  for (int h = 0; h < (dx ? std::min(c.stride_h, c.height) : 1); ++h)
    for (int w = 0; w < (dx ? std::min(c.stride_w, c.width) : 1); ++w) {
      Conv2dWgmma p = wgmma_sizes(c, h, w);
      p.independent = independent, independent = true;
      if (!map_operands(c, &p)) return fail(kDeviceError, "%s: the driver refuses a tensor map", launch.op());
      AOT_TRY(with_pass(c.pass, [&](auto pass) -> Status {
        if constexpr (sizeof(T) == 4 && pass.value == Conv2dProduct::dweight) return kOk;  // not taken
        else
          return with_tile<pass.value>(
              p, [&](auto type) { return launch_wgmma<T, pass.value, typename decltype(type)::type>(launch, p); });
      }));
    }
  return kOk;
}

Status conv2d_sm90(Launches &launch, const Conv2dProduct &p) {
  if (p.dtype == DType::float32) return run<float>(launch, p);
  return p.dtype == DType::float16 ? run<__half>(launch, p) : run<__nv_bfloat16>(launch, p);
}

}  // namespace AOT_ISA
}  // namespace aot
