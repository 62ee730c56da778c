#include "conv2d_planes.h"

#include "conv2d_planes_dweight.cuh"
#include "conv2d_planes_dx.cuh"

namespace aot {
inline namespace AOT_ISA {

bool planes_takes_dx(const Conv2dGemm &c) {
  Conv2dPlanesDx p;
  return aligned(c.to) && planes_params(c, &p);
}

Status planes_dx(LaunchSequence &launch, const Conv2dGemm &c) {
  AOT_TRY(bind_device(launch.op()));
  Conv2dPlanesDx p;
  planes_params(c, &p);
  // Large tiles, but where these leave multiprocessors or half of their channels without work.
  using Large = PlanesTile<2, 3, 4, 1>;
  using Small = PlanesTile<1, 2, 3, 2>;
  int tiles = 0;
  for (int i = 0; i < p.phases; ++i) tiles += count_tiles<Large>(p.phase[i], p.channels);
  if (tiles < kMultiprocessors || (p.channels - 1) % 128 < 64) return run_planes_dx<Small>(launch, c, p);
  return run_planes_dx<Large>(launch, c, p);
}

bool planes_takes_dweight(const char *op, const Conv2dGemm &p) {
  DeviceLimits limits;
  return p.slices > 0 && aligned(p.a, p.b) && device_limits(op, &limits) == kOk && limits.major == 9 &&
         TensorMaps::get().tiled;
}

Status planes_dweight(LaunchSequence &launch, Conv2dGemm *p) {
  AOT_TRY(bind_device(launch.op()));
  if (p->stride_w == 1 && p->out_w == 28) return run_planes_dweight<PlanesDweightTile<1, 28, 3>>(launch, p);
  if (p->stride_w == 1) return run_planes_dweight<PlanesDweightTile<1, 56, 3>>(launch, p);
  if (p->out_w == 28) return run_planes_dweight<PlanesDweightTile<2, 28, 2>>(launch, p);
  return run_planes_dweight<PlanesDweightTile<2, 56, 2>>(launch, p);
}

}  // namespace AOT_ISA
}  // namespace aot
