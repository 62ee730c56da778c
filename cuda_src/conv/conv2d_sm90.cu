#include "conv2d_hwcn.cuh"
#include "conv2d_parts.cuh"
#include "conv2d_rows.cuh"

#include <climits>

namespace aot {
inline namespace AOT_ISA {
namespace {

// RowBoxes, ColBoxes, RowGroups, ColGroups, Stages, Blocks, OutBoxes, Swapped: the fastest on an H200
// (docs/lab_notes.md). y and dx:
using OneColumnTile = WgmmaTile<2, 1, 2, 1, 3, 3>;
using LongTile = WgmmaTile<1, 2, 1, 1, 3, 3>;
using SquareTile = WgmmaTile<2, 2, 2, 1, 3, 2>;  // phases
using WideTile = WgmmaTile<3, 2, 3, 1, 5, 1>;
using DeepTile = WgmmaTile<4, 1, 1, 1, 5, 1, 2, true>;
using LinesTile = WgmmaTile<4, 2, 1, 2, 3, 1, 4, true>;
using SmallTile = WgmmaTile<1, 1, 1, 1, 3, 4>;  // of narrow groups
// dweight, whose columns are kernel elements x channels:
using DweightPair = WgmmaTile<1, 2, 1, 1, 4, 2>;
using DweightSmall = WgmmaTile<1, 1, 1, 1, 6, 1>;   // few boxes
using DweightTriple = WgmmaTile<1, 3, 1, 1, 6, 1>;  // up to 64 output channels
using DweightTripleRows = WgmmaTile<1, 3, 1, 1, 3, 2>;
using DweightSix = WgmmaTile<2, 3, 2, 1, 5, 1>;
using DweightQuad = WgmmaTile<2, 4, 2, 1, 4, 1>;
using DweightNine = WgmmaTile<3, 3, 3, 1, 4, 1>;

// float32 in three parts: y and dx, and dweight
using ThreeColumn = WgmmaTile<2, 1, 2, 1, 3, 1, 0, false, 3>;
using ThreeRow = WgmmaTile<1, 2, 1, 1, 3, 1, 0, false, 3>;

template <class Tile>
int64_t count_tiles(Conv2dGemm::Pass pass, const Conv2dWgmma &p) {
  return ceil_div(ceil_div(p.rows, kBox), Tile::kRowBoxes) * ceil_div(col_boxes(pass, p), Tile::kColBoxes);
}

// Slices of the sum: at most `most`.
template <class Tile, Conv2dGemm::Pass kPass>
int count_slices(const Conv2dWgmma &p, int most) {
  constexpr bool kDweight = kPass == Conv2dGemm::dweight;
  const int64_t tiles = count_tiles<Tile>(kPass, p);
  const int64_t wanted = kDweight || Tile::kClusterSplitK ? kMultiprocessors * Tile::kBlocks / tiles : 0;
  const auto slices = static_cast<int>(std::min<int64_t>({most, wanted, ceil_div(p.steps, 4)}));
  if (kDweight) return slices;
  constexpr int kTriplesAtOnce = 36;  // of 40 clusters of three, some wait for others
  constexpr int kQuadsAtOnce = 32;
  if (slices == 3 && tiles > kTriplesAtOnce) return 2;
  if (slices == 4 && tiles > kQuadsAtOnce) return 3;
  return slices < 4 ? slices : slices / 4 * 4;  // clusters of five to seven fit the device worse
}

// Nanoseconds on an H200 whose multiprocessors all work: of a block's step where each multiprocessor has all blocks of
// which it is capable, divided by their number; of the rest of a tile; of a step of a block that has a multiprocessor
// to itself. Fits of measured times of y and dx, and of 41 of dweight, of 64 to 1280 channels and 8 to 128 images
// (docs/lab_notes.md).
struct TileTimes {
  int step, tile, alone;
};
template <class Tile, bool kDweight>
constexpr TileTimes kTimes = {};
template <>
constexpr TileTimes kTimes<OneColumnTile, false> = {290, 1000, 540};
template <>
constexpr TileTimes kTimes<LongTile, false> = {250, 830, 500};
template <>
constexpr TileTimes kTimes<SquareTile, false> = {410, 2000, 600};
template <>
constexpr TileTimes kTimes<WideTile, false> = {467, 2800, 467};
template <>
constexpr TileTimes kTimes<DeepTile, false> = {320, 2500, 320};
template <>
constexpr TileTimes kTimes<LinesTile, false> = {610, 3000, 610};
template <>
constexpr TileTimes kTimes<DweightPair, true> = {221, 1595, 441};
template <>
constexpr TileTimes kTimes<DweightTriple, true> = {330, 2000, 330};  // of groups
template <>
constexpr TileTimes kTimes<DweightTripleRows, true> = {329, 920, 670};
template <>
constexpr TileTimes kTimes<DweightSix, true> = {505, 4500, 505};
template <>
constexpr TileTimes kTimes<DweightNine, true> = {770, 4610, 770};
template <>
constexpr TileTimes kTimes<DweightQuad, true> = {650, 5900, 650};

// An estimate of a kernel's time in nanoseconds, but for what it has with any tile, and of the sum of its slices.
template <class Tile, Conv2dGemm::Pass kPass>
int64_t estimate(const Conv2dWgmma &p) {
  constexpr bool kDweight = kPass == Conv2dGemm::dweight;
  constexpr TileTimes kTime = kTimes<Tile, kDweight>;
  static_assert(kTime.step > 0, "no times of this tile");
  if (Tile::kSwapped && !p.by_boxes) return INT64_MAX;
  const int most = kDweight ? INT_MAX : kMaxCluster;
  const int64_t slices = std::max(count_slices<Tile, kPass>(p, most), 1);
  const int64_t blocks = count_tiles<Tile>(kPass, p) * slices;
  // Each multiprocessor computes kBlocks tiles at once, and at last `rest`.
  const int64_t full = blocks / (kMultiprocessors * Tile::kBlocks) * Tile::kBlocks;
  const int64_t rest = ceil_div(blocks, kMultiprocessors) - full;
  const int64_t step = full * kTime.step + (rest > 0 ? std::max<int64_t>(kTime.alone, rest * kTime.step) : 0);
  const int64_t all = step * ceil_div(p.steps, slices) + (full + rest) * kTime.tile;
  if (slices == 1) return all;
  const int64_t elements = int64_t{p.rows} * p.kernel * p.columns;  // of a dweight
  return all + (kDweight ? 3450 + slices * elements * 16 / 10000 : 3000);
}

// f(Type<Tile>()) for the tile of the least estimate.
template <Conv2dGemm::Pass kPass, class F, class First, class... Rest>
auto with_fastest(const Conv2dWgmma &p, F f, Type<First> first, Type<Rest>... rest) {
  const int64_t least = estimate<First, kPass>(p);
  if constexpr (sizeof...(Rest) == 0) {
    return f(first);
  } else {
    if (least <= std::min({estimate<Rest, kPass>(p)...})) return f(first);
    return with_fastest<kPass>(p, f, rest...);
  }
}

// f(Type<Tile>()) for the tile to use.
template <Conv2dGemm::Pass kPass, class F>
auto with_tile(const Conv2dWgmma &p, F f) {
  if constexpr (kPass == Conv2dGemm::dweight) {
    const int64_t rows = ceil_div(p.rows, kBox), cols = col_boxes(kPass, p);
    if (cols % 3 != 0 && cols * rows <= 8) return f(Type<DweightSmall>());
    if (rows == 1 && cols % 3 == 0) return f(Type<DweightTriple>());
    return with_fastest<kPass>(p, f, Type<DweightTripleRows>(), Type<DweightPair>(), Type<DweightQuad>(),
                               Type<DweightNine>(), Type<DweightSix>());
  } else {
    return with_fastest<kPass>(p, f, Type<LongTile>(), Type<OneColumnTile>(), Type<WideTile>(), Type<DeepTile>(),
                               Type<LinesTile>());
  }
}

// Calls with groups have kernels of their own, and so few tiles, which are of one group along the columns (dweight: the
// rows). NCHW has OneColumnTile, and groups of 64 take DeepTile else; TF32 has no tiles with the channels first.
template <Conv2dGemm::Pass kPass, typename T, class F>
auto with_tile_of_group(const Conv2dWgmma &p, F f) {
  const bool pairs = p.group_boxes % 2 == 0;
  if constexpr (kPass == Conv2dGemm::dweight) {
    auto with = [&](auto... more) {
      return with_fastest<kPass>(p, f, Type<DweightTriple>(), Type<DweightTripleRows>(), more...);
    };
    return pairs ? with(Type<DweightSix>()) : with();
  } else if constexpr (sizeof(T) == 4) {
    return pairs ? with_fastest<kPass>(p, f, Type<OneColumnTile>(), Type<SquareTile>()) : f(Type<OneColumnTile>());
  } else {
    auto with = [&](auto... more) {
      return with_fastest<kPass>(p, f, Type<OneColumnTile>(), Type<DeepTile>(), more...);
    };
    return pairs ? with(Type<LinesTile>()) : with();
  }
}

// Narrow groups. y and dx:
template <class Tile, typename T, class F>
auto with_narrow(const Conv2dGemm &c, F f) {
  const int64_t bytes = c.narrow * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) == 2) {
    if (bytes == 32) return f(Type<TileOfNarrow<Tile, 32, 2>>());
    return f(Type<TileOfNarrow<Tile, 64, 2>>());
  } else {
    return f(Type<TileOfNarrow<Tile, 128, 4>>());
  }
}
template <typename T, class F>
auto with_tile_of_narrow(const Conv2dGemm &c, const Conv2dWgmma &p, F f) {
  constexpr int kFew = 8;  // boxes of a multiprocessor
  if constexpr (sizeof(T) == 2)
    if (count_tiles<SmallTile>(c.pass, p) <= kFew * kMultiprocessors) return with_narrow<SmallTile, T>(c, f);
  return with_narrow<OneColumnTile, T>(c, f);
}

int slices_of_diagonal(const Conv2dWgmma &p, int most) {
  return std::max(count_slices<DweightTriple, Conv2dGemm::dweight>(p, most), 1);
}

// Slices of the sum, at most `most`, with the tile to use.
template <Conv2dGemm::Pass kPass>
int count_slices(const Conv2dWgmma &p, int most) {
  return with_tile<kPass>(p, [&](auto type) { return count_slices<typename decltype(type)::type, kPass>(p, most); });
}

int slices_of_groups(const Conv2dWgmma &p, int most) {
  return with_tile_of_group<Conv2dGemm::dweight, __nv_bfloat16>(
      p, [&](auto type) { return count_slices<typename decltype(type)::type, Conv2dGemm::dweight>(p, most); });
}

// The least estimate for y, or dx, which is the same.
int64_t least_estimate(const Conv2dWgmma &p) {
  auto of_tile = [&](auto type) { return estimate<typename decltype(type)::type, Conv2dGemm::y>(p); };
  return with_tile<Conv2dGemm::y>(p, of_tile);
}

// f(an integral_constant of the pass).
template <class F>
auto with_pass(Conv2dGemm::Pass pass, F f) {
  if (pass == Conv2dGemm::y) return f(std::integral_constant<Conv2dGemm::Pass, Conv2dGemm::y>());
  if (pass == Conv2dGemm::dx) return f(std::integral_constant<Conv2dGemm::Pass, Conv2dGemm::dx>());
  return f(std::integral_constant<Conv2dGemm::Pass, Conv2dGemm::dweight>());
}

// Whether the first phase of a strided dx alone meets kernel elements: its kernel then writes the zeros of the others.
bool clears(const Conv2dGemm &c) {
  return c.kernel() == 1 && c.padding_h % c.stride_h == 0 && c.padding_w % c.stride_w == 0 && c.whole_vectors;
}

// estimate() for phases that one kernel computes.
template <class Tile>
int64_t estimate_phases(const Conv2dPhases &p) {
  constexpr TileTimes kTime = kTimes<Tile, false>;
  if (Tile::kSwapped && !p.phase[0].by_boxes) return INT64_MAX;
  int64_t tiles = 0, steps = 0, of_first = 0;  // of the first block, if blocks go on to other tiles
  for (int i = 0; i < p.count; ++i) {
    const int64_t n = count_tiles<Tile>(Conv2dGemm::dx, p.phase[i]), before = tiles;
    tiles += n, steps += n * p.phase[i].steps;
    of_first += (ceil_div(tiles, kMultiprocessors) - ceil_div(before, kMultiprocessors)) * p.phase[i].steps;
  }
  const int64_t each = Tile::kOutBoxes > 0 ? of_first : ceil_div(steps, kMultiprocessors);
  return std::max(each * kTime.step, int64_t{p.phase[0].steps} * kTime.alone) +
         ceil_div(tiles, kMultiprocessors) * kTime.tile;
}
template <class F>
auto with_fastest_of_phases(const Conv2dPhases &p, F f) {
  const int64_t of_long = estimate_phases<LongTile>(p), of_column = estimate_phases<OneColumnTile>(p),
                of_square = estimate_phases<SquareTile>(p), of_lines = estimate_phases<LinesTile>(p);
  if (of_lines < std::min({of_long, of_column, of_square})) return f(Type<LinesTile>());
  if (of_long <= std::min(of_column, of_square)) return f(Type<LongTile>());
  if (of_column <= of_square) return f(Type<OneColumnTile>());
  return f(Type<SquareTile>());
}

// In HWCN. The rows of a tile are of one group.
template <class F>
auto with_tile_of_hwcn(const Conv2dGemm &c, F f) {
  const int boxes = static_cast<int>(ceil_div(c.out_channels / c.groups, kBox));
  return boxes == 1 || (c.groups > 1 && boxes % 2) ? f(Type<DweightTriple>()) : f(Type<DweightSix>());
}

int slices_of_hwcn(const Conv2dGemm &c, const Conv2dWgmma &p, int most) {
  return with_tile_of_hwcn(c, [&](auto type) {
    return std::max(count_slices<typename decltype(type)::type, Conv2dGemm::dweight>(p, most), 1);
  });
}

int slices_of_three(const Conv2dWgmma &p, int most) {
  const int64_t tiles = count_tiles<ThreeRow>(Conv2dGemm::dweight, p);
  return static_cast<int>(
      std::max<int64_t>(std::min<int64_t>({most, kMultiprocessors / tiles, ceil_div(p.steps, 4)}), 1));
}

}  // namespace

bool conv2d_sm90_takes(const char *op, Conv2dGemm *p, int max_slices, bool unsplit) {
  DeviceLimits limits;
  if (device_limits(op, &limits) != kOk || limits.major != 9) return false;
  if (!TensorMaps::get().tiled || !TensorMaps::get().im2col) return false;
  const bool dx = p->pass == Conv2dGemm::dx, dweight = p->pass == Conv2dGemm::dweight;
  if (p->dtype == DType::float32 && !p->three && (!p->tf32 || (dweight && !p->hwcn))) return false;
  // A strided dx is one GEMM per stride phase.
  auto one_is_1 = [](int stride, int dilation) { return stride == 1 || dilation == 1; };
  if (dx && (!one_is_1(p->stride_h, p->dilation_h) || !one_is_1(p->stride_w, p->dilation_w))) return false;
  const int phases = dx && (p->three || !clears(*p)) ? p->stride_h * p->stride_w : 1;
  if (phases > Conv2dPhases::kMost) return false;
  // limits of TMA's im2col mode: 8-bit corners and offsets, strides of up to 8
  const int reach_h = p->dilation_h * (p->kernel_h - 1), reach_w = p->dilation_w * (p->kernel_w - 1);
  const bool fits = std::max(reach_h, p->padding_h) < 120 && std::max(reach_w, p->padding_w) < 120;
  if (!fits || p->stride_h > 8 || p->stride_w > 8) return false;
  // TMA loads short rows slowly
  if ((dx ? p->out_channels : p->channels) < 32) return false;
  // A box of a group's channels has no others: zeros in the place of these would make NaN of infinities.
  const bool whole = !p->three && (p->channels / p->groups | p->out_channels / p->groups) % kBox == 0;
  if (p->groups > 1 && !p->narrow && !whole) return false;
  // Not worth it for tiny tensors, for which some drivers encode wrong maps.
  const int64_t image = int64_t{p->height} * p->width * p->channels,
                out = int64_t{p->out_h} * p->out_w * p->out_channels;
  if (p->batch * std::min(image, out) < 1 << 16) return false;
  if (p->three) return p->slices = dweight ? slices_of_three(wgmma_params(*p), max_slices) : 0, true;
  if (p->narrow) return p->slices = dweight ? slices_of_diagonal(wgmma_params(*p), max_slices) : 0, true;
  if (p->hwcn) return p->slices = slices_of_hwcn(*p, wgmma_params(*p), max_slices), true;
  // y and dx: in each launch, because the phases of a strided dx have sums of different lengths
  const auto count = p->groups > 1 ? slices_of_groups : count_slices<Conv2dGemm::dweight>;
  p->slices = dweight ? count(wgmma_params(*p), max_slices) : 0;
  if (p->slices <= 1) p->slices = unsplit ? 0 : 1;
  return true;
}

namespace {

Status refused(const char *op) { return fail(kDeviceError, "%s: the driver refuses a tensor map", op); }

template <Conv2dGemm::Pass kPass, typename T>
Status run_one(LaunchSequence &launch, Conv2dWgmma p) {
  if constexpr (kPass != Conv2dGemm::dweight) {
    const int slices = count_slices<kPass>(p, kMaxCluster);
    p.slices = slices > 1 ? slices : 0;
  }
  return with_tile<kPass>(p, [&](auto type) {
    using Tile = typename decltype(type)::type;
    if constexpr (sizeof(T) == 4 && (kPass == Conv2dGemm::dweight || Tile::kSwapped)) return kOk;  // not supported
    else return launch_wgmma<T, kPass, Tile>(launch, p);
  });
}

template <Conv2dGemm::Pass kPass, typename T>
Status run_groups(LaunchSequence &launch, const Conv2dWgmma &p) {
  return with_tile_of_group<kPass, T>(p, [&](auto type) {
    using Tile = typename decltype(type)::type;
    if constexpr (sizeof(T) == 4 && (kPass == Conv2dGemm::dweight || Tile::kSwapped)) return kOk;  // not supported
    else return launch_wgmma<T, kPass, TileOfGroup<Tile>>(launch, p);
  });
}

template <Conv2dGemm::Pass kPass, typename T>
Status run_narrow(LaunchSequence &launch, const Conv2dGemm &c, const Conv2dWgmma &p) {
  if constexpr (kPass == Conv2dGemm::dweight) return launch_wgmma<T, kPass, TileOfDiagonal<DweightTriple>>(launch, p);
  else
    return with_tile_of_narrow<T>(
        c, p, [&](auto type) { return launch_wgmma<T, kPass, typename decltype(type)::type>(launch, p); });
}

// All phases in one kernel. Their blocks start in the order of their sums' lengths, so that the short ones fill what
// the long ones leave.
Status phases_of(const char *op, const Conv2dGemm &c, Conv2dPhases *to) {
  Conv2dPhases &all = *to = {};
  for (int h = 0; h < std::min(c.stride_h, c.height); ++h)
    for (int w = 0; w < std::min(c.stride_w, c.width); ++w) all.phase[all.count++] = wgmma_params(c, h, w);
  std::stable_sort(all.phase, all.phase + all.count,
                   [](const Conv2dWgmma &a, const Conv2dWgmma &b) { return a.steps > b.steps; });
  for (int i = 0; i < all.count; ++i)
    if (!map_operands(c, &all.phase[i])) return refused(op);
  const bool by_boxes = std::all_of(all.phase, all.phase + all.count, [](const Conv2dWgmma &p) { return p.by_boxes; });
  for (Conv2dWgmma &phase : all.phase) phase.by_boxes = by_boxes;
  return kOk;
}
template <typename T>
Status run_phases(LaunchSequence &launch, const Conv2dGemm &c) {
  Conv2dPhases all;
  AOT_TRY(phases_of(launch.op(), c, &all));
  if (c.narrow)
    return with_narrow<OneColumnTile, T>(
        c, [&](auto type) { return launch_phases<T, typename decltype(type)::type>(launch, all); });
  if (c.groups > 1) return launch_phases<T, TileOfGroup<OneColumnTile>>(launch, all);
  return with_fastest_of_phases(all, [&](auto type) {
    using Tile = typename decltype(type)::type;
    if constexpr (sizeof(T) == 4 && Tile::kSwapped) return kOk;  // not supported
    else return launch_phases<T, Tile>(launch, all);
  });
}

template <typename T>
Status run(LaunchSequence &launch, const Conv2dGemm &c) {
  AOT_TRY(bind_device(launch.op()));
  Conv2dWgmma p = wgmma_params(c);
  const bool strided = c.pass == Conv2dGemm::dx && (c.stride_h > 1 || c.stride_w > 1);
  if (strided && !clears(c)) return run_phases<T>(launch, c);
  if (strided) p.clear_h = c.stride_h, p.clear_w = c.stride_w;
  if constexpr (sizeof(T) == 2)
    if (c.groups == 1 && takes_rows(c)) {
      const RowsChoice choice = choose_rows(c);
      p.by_boxes = true;
      // 3 % for what was not measured; a launch that overlaps spares a microsecond
      if (choice.time * 33 / 32 < least_estimate(p) + 1000) return run_rows<T>(launch, c, choice);
    }
  if (!map_operands(c, &p)) return refused(launch.op());
  if (c.narrow) return with_pass(c.pass, [&](auto pass) { return run_narrow<pass.value, T>(launch, c, p); });
  if constexpr (sizeof(T) == 4)
    if (c.pass == Conv2dGemm::dweight)
      return with_tile_of_hwcn(c, [&](auto type) {
        using Tile = typename decltype(type)::type;
        return c.groups > 1 ? launch_wgmma<float, Conv2dGemm::dweight, TileOfGroup<Tile>>(launch, p)
                            : launch_wgmma<float, Conv2dGemm::dweight, Tile>(launch, p);
      });
  return with_pass(c.pass, [&](auto pass) {
    if (c.groups > 1) return run_groups<pass.value, T>(launch, p);
    return run_one<pass.value, T>(launch, p);
  });
}

Status run_three(LaunchSequence &launch, const Conv2dGemm &c) {
  AOT_TRY(bind_device(launch.op()));
  if (c.pass == Conv2dGemm::dx && (c.stride_h > 1 || c.stride_w > 1)) {
    Conv2dPhases all;
    AOT_TRY(phases_of(launch.op(), c, &all));
    return launch_phases<float, ThreeColumn>(launch, all);
  }
  Conv2dWgmma p = wgmma_params(c);
  if (!map_operands(c, &p)) return refused(launch.op());
  if (c.pass == Conv2dGemm::dweight) return launch_wgmma<float, Conv2dGemm::dweight, ThreeRow>(launch, p);
  return with_pass(c.pass, [&](auto pass) {
    const int slices = count_slices<ThreeColumn, pass.value>(p, kMaxCluster);
    p.slices = slices > 1 ? slices : 0;
    if constexpr (pass.value == Conv2dGemm::dweight) return kOk;  // above
    else return launch_wgmma<float, pass.value, ThreeColumn>(launch, p);
  });
}

}  // namespace

Status split_images(LaunchSequence &launch, bool nhwc, const float *from, Planes p, void *to) {
  const auto channels = static_cast<unsigned>(p.channels), plane = static_cast<unsigned>(p.plane);
  auto *parts = static_cast<__nv_bfloat16 *>(to);
  if (nhwc || (plane == 1 && aligned(from))) {
    const int64_t pixels = p.images * p.plane, vectors = p.channels / kPartVector;
    return launch(split_kernel, grid_size(ceil_div(pixels * vectors, kPackBlock)), kPackBlock, 0, 1, from, parts,
                  pixels, static_cast<unsigned>(vectors));
  }
  auto with_tile = [&](auto *kernel, int of_channels, int of_pixels) {
    const int64_t blocks = p.images * ceil_div(p.channels, of_channels) * ceil_div(p.plane, of_pixels);
    return launch(kernel, grid_size(blocks), kPackBlock, 0, 1, from, parts, channels, plane);
  };
  return plane > 16 ? with_tile(split_planes_kernel<64, 32>, 64, 32) : with_tile(split_planes_kernel<128, 16>, 128, 16);
}

Status copy_to_hwcn(LaunchSequence &launch, bool nhwc, const float *from, Planes p, float *to) {
  HwcnCopy f = {from, to, static_cast<unsigned>(p.images), static_cast<unsigned>(p.channels * p.plane)};
  f.pitch = static_cast<unsigned>(Conv2dParams::hwcn_pitch(p.images));
  f.channels = static_cast<unsigned>(p.channels), f.plane = nhwc ? 0 : static_cast<unsigned>(p.plane);
  const int64_t blocks = ceil_div(p.images, kHwcnImages) * ceil_div(p.channels * p.plane, kHwcnTile);
  return launch(copy_to_hwcn_kernel, grid_size(blocks), kHwcnBlock, 0, 1, f);
}

Status conv2d_sm90(LaunchSequence &launch, const Conv2dGemm &p) {
  if (p.three) return run_three(launch, p);
  if (p.dtype == DType::float32) return run<float>(launch, p);
  return p.dtype == DType::float16 ? run<__half>(launch, p) : run<__nv_bfloat16>(launch, p);
}

}  // namespace AOT_ISA
}  // namespace aot
