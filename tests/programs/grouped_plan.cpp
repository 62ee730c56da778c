// Plans of convolutions with groups of several channels, of shapes at random, beside the definition: which element of
// the kernel meets which pixel, that tiles have each position once, that blocks have each group's results once, and
// that what a pass reads and the memory it takes are within what the plan states. Prints how many passes were planned.
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "conv/conv2d_shape.h"

using namespace aot;

namespace {

struct Shapes {
  std::mt19937 random{7};
  Conv2dParams params;
  Conv2dShape s;

  int64_t draw(int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % (high - low + 1)); }
  // false: y would have no pixel.
  bool next() {
    const int64_t step = draw(0, 3) ? 2 : 8, most = step == 2 ? 32 : 20;
    int64_t in = step * draw(1, most), out = draw(0, 1) ? in : step * draw(1, most);
    if (draw(0, 19) == 0) in = 8 * draw(20, 510), out = 8;  // many chunks
    const bool one = draw(0, 7) == 0;  // a call without groups, of so few channels that it is one of them
    if (one) in = draw(9, 31);
    params = {}, params.groups = one ? 1 : draw(2, 2000 / (in + out) + 2), params.layout = static_cast<int>(draw(0, 1));
    int64_t size[2], kernel[2], result[2];
    for (int i = 0; i < 2; ++i) {
      kernel[i] = draw(1, draw(0, 3) ? 5 : 12), size[i] = draw(1, 30);
      params.stride.value[i] = draw(1, 4), params.padding.value[i] = draw(0, 5), params.dilation.value[i] = draw(1, 3);
      const int64_t room = size[i] + 2 * params.padding.value[i] - params.dilation.value[i] * (kernel[i] - 1) - 1;
      if (room < 0) return false;
      result[i] = room / params.stride.value[i] + 1;
    }
    s = {draw(0, 3) ? draw(1, 3) : draw(16, 40),
         in * params.groups,
         size[0],
         size[1],
         out * params.groups,
         kernel[0],
         kernel[1],
         result[0],
         result[1]};
    return true;
  }
};

int failed(const char *what, const Shapes &c) {
  std::fprintf(stderr, "%s: %ld images %ld x %ld, %ld to %ld channels, %ld groups, kernel %ld x %ld, stride %ld %ld\n",
               what, long(c.s.batch), long(c.s.height), long(c.s.width), long(c.s.channels), long(c.s.out_channels),
               long(c.params.groups), long(c.s.kernel_h), long(c.s.kernel_w), long(c.params.stride.value[0]),
               long(c.params.stride.value[1]));
  return 1;
}

// Whether each pixel of the result meets the elements of the kernel at the pixels of the source that it should.
bool meets(const Shapes &c, const GroupedAxis &a, int axis, bool dx) {
  const int64_t stride = c.params.stride.value[axis], padding = c.params.padding.value[axis];
  const int64_t dilation = c.params.dilation.value[axis], kernel = axis ? c.s.kernel_w : c.s.kernel_h;
  for (int64_t pixel = 0; pixel < a.result; ++pixel) {
    const int position = static_cast<int>(pixel / a.phases);
    const GroupedPhase &phase = a.phase[pixel % a.phases];
    std::set<std::pair<int64_t, int64_t>> found, expected;
    for (int t = 0; t < phase.taps; ++t) {
      const int offset = phase.first + t * a.unit, at = position * a.step + offset;
      if (offset < a.lowest || offset >= a.lowest + a.span) return false;
      if (0 <= at && at < a.source) found.insert({phase.kernel_first + t * a.kernel_step, at});
    }
    for (int64_t k = 0; k < kernel; ++k) {
      const int64_t at = dx ? pixel + padding - k * dilation : pixel * stride + k * dilation - padding;
      const int64_t from = dx ? at / stride : at;
      if (at >= 0 && (!dx || at % stride == 0) && from < a.source) expected.insert({k, from});
    }
    if (position >= a.count || found != expected) return false;
  }
  return true;
}

// Whether tiles have the positions that a block's warps take, and windows what these meet.
bool tiles(const Grouped &g, bool dweight) {
  int rows = g.rows, cols = g.cols;
  if (g.columns) {
    if (!dweight) rows = g.units / g.columns * 4, cols = g.columns * 8;
    if (g.units % g.columns || std::max({g.window_h, g.window_w, g.rows, g.cols}) > kMostBox ||
        g.pixel > kMostBoxPixel || (dweight && g.result_pixel > kMostBoxPixel))
      return false;
  } else if (rows * cols > g.units * kGroupedUnit) {
    return false;
  }
  if (g.rows > rows || g.cols > cols) return false;
  if (!g.planes()) return g.window_h == g.h.window(rows) && g.window_w == g.w.window(cols);
  // windows of the tile's own positions, which others of its units read behind
  const int last_row = g.h.window(rows) - 1, last_column = (g.w.window(cols) - 1) / 2;
  return g.window_h == g.h.window(g.rows) && g.window_w == grouped_up(g.w.window(g.cols), 2) &&
         3 * g.plane() + (last_row * g.window_w / 2 + last_column + 1) * g.pixel <= g.shared;
}

// Whether neighbouring pixels are in other banks.
bool apart(const Grouped &g, bool dweight, int pixel) {
  return dweight && g.vector == 4 ? pixel % 64 == 32 : pixel % 32 == 16;
}

bool divides(const Grouped &g, bool dweight) {
  const int most_eights = !g.three ? 4 : g.columns && g.chunks == 1 ? 3 : 2;
  return tiles(g, dweight) && (g.tiles_h - 1) * g.rows < g.h.count && g.h.count <= g.tiles_h * g.rows &&
         (g.tiles_w - 1) * g.cols < g.w.count && g.w.count <= g.tiles_w * g.cols &&
         g.shared <= (g.columns ? kColumnsShared : kConvShared) && apart(g, dweight, g.pixel) &&
         apart(g, dweight, g.result_pixel) && g.eights <= most_eights && g.blocks() * g.chunks < 1 << 16 &&
         g.chunks * g.chunk >= g.in && g.parts * g.part >= g.out;
}

// Whether dweight's warps have all products: the elements of a column of the kernel, or three, and 16s of results.
bool shares(const Grouped &g) {
  const int sixteens = std::max(g.columns, 1) * 16, warps = g.columns > 1 ? kGroupedTwoWarps : kGroupedDweightWarps;
  const int elements = g.columns ? g.w.phase[0].taps : (g.taps() + kGroupedTaps - 1) / kGroupedTaps;
  const int results = g.part < 16 ? g.result_channels : (g.part % 8 ? g.part + 7 : g.part) * g.block_groups;
  if (g.pieces * g.eights * 8 >= g.channels + 8 * (g.pieces + 1)) return false;  // columns that there are not
  return g.warps <= warps && g.splits * g.warps >= g.sixteens * g.pieces * elements && g.sixteens * sixteens >= results;
}

// Whether blocks of several groups begin at vectors of channels and of results, and all of theirs are loaded and kept.
bool begins(const Grouped &g, bool dweight) {
  for (int group = 0; group < g.groups; group += g.block_groups) {
    const int groups = std::min(g.block_groups, g.groups - group), channels = g.chunks > 1 ? g.chunk : groups * g.in;
    if (group * g.in % g.vector + channels > g.channels) return false;
    if (dweight ? group * g.out % g.vector + groups * std::min(g.part, g.out) > g.result_channels
                : group * g.out % g.vector || (g.chunks == 1 && groups * g.part > g.result_channels))
      return false;
  }
  return true;
}

// Plans of the implicit GEMM: of narrow groups, with copies of images, and of dweight beside dx's of one group.
int narrow = 0, copied = 0, beside = 0;

int check(const Shapes &c, DType dtype, long *planned) {
  const Conv2dParams &params = c.params;
  int64_t words = 0, dweight_words = 0;
  for (bool dx : {false, true}) {
    Grouped g;
    if ((dx ? params.dx_kernels(c.s, dtype, &g) : params.y_kernels(c.s, dtype, &g)) != Conv2dParams::grouped) continue;
    if (!g.groups) continue;  // the implicit GEMM's alone
    ++*planned, words = g.words();
    if (!meets(c, g.h, 0, dx) || !meets(c, g.w, 1, dx)) return failed("elements of the kernel", c);
    if (!divides(g, false) || g.warps > kGroupedWarps || g.warps % g.units) return failed("tiles", c);
    if (!begins(g, false) || g.pieces * g.eights * 8 < g.part) return failed("blocks", c);
    if (!dx && params.forward_plan(c.s, dtype).forward() < words) return failed("the forward's workspace", c);
  }
  Grouped g;
  if (params.dweight_kernels(c.s, dtype, &g) == Conv2dParams::grouped && g.groups) {
    ++*planned, dweight_words = g.sums();
    if (!divides(g, true) || !begins(g, true)) return failed("dweight", c);
    if (!shares(g)) return failed("dweight's tasks", c);
    if (g.slice() < c.s.out_channels * c.s.kernel() * g.in || g.slices > g.tiles()) return failed("dweight's sums", c);
  }
  const auto plan = params.backward_plan(c.s, dtype);
  const int64_t of_dx = plan.of_dx == Conv2dParams::grouped ? words : 0;
  const int64_t of_dweight = plan.of_dweight == Conv2dParams::grouped ? dweight_words : 0;
  const int64_t elements = c.s.out_channels * c.s.kernel() * (c.s.channels / params.groups);
  if (plan.boxes && plan.weight * 4 < elements * itemsize(dtype)) return failed("the implicit GEMM's weight", c);
  if ((params.groups > 1 && plan.boxes_dweight != (plan.slices > 0)) || (plan.slices && plan.slice < elements))
    return failed("the implicit GEMM's sums", c);
  if (plan.narrow && 64 % plan.narrow) return failed("narrow groups", c);
  const int64_t copies =
      dtype == DType::float32 && plan.boxes_dweight
          ? c.s.batch * (c.s.height * c.s.width * c.s.channels + c.s.pixels() / c.s.batch * c.s.out_channels)
          : 0;
  if (plan.hwcn_x + plan.hwcn_y < copies) return failed("the implicit GEMM's copies", c);
  const int64_t boxes = plan.weight + plan.hwcn_x + plan.hwcn_y + plan.slices * plan.slice;
  narrow += plan.narrow > 0, copied += copies > 0;
  beside += plan.of_dx == Conv2dParams::grouped && plan.of_dweight == Conv2dParams::implicit_gemm;
  return plan.backward() < plan.x + plan.y + std::max({of_dx, of_dweight, boxes})
             ? failed("the backward's workspace", c)
             : 0;
}

}  // namespace

int main() {
  Shapes shapes;
  long planned = 0;
  for (int i = 0; i < 4000; ++i)
    if (shapes.next()) {
      if (check(shapes, DType::bfloat16, &planned) || check(shapes, DType::float32, &planned)) return 1;
      shapes.params.allow_tf32 = true;
      if (check(shapes, DType::float32, &planned)) return 1;
    }
  if (beside < 10 || (Conv2dParams::kHasSm90 && (narrow < 10 || copied < 10))) {
    std::fprintf(stderr, "%d plans of narrow groups, %d with copies, %d beside one\n", narrow, copied, beside);
    return 1;
  }
  std::printf("%ld\n", planned);
  return 0;
}
