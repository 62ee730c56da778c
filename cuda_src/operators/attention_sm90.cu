#include <cstdlib>
#include "attention_wgmma_backward.cuh"
#include "old_pass.cuh"
#include "watch_pass.cuh"

namespace aot {
inline namespace AOT_ISA {

template <typename T>
Status attention_sm90_takes(const char *op, const AttentionInputs<T> &x, bool forward, bool *takes) {
  AOT_TRY(bind_device(op));  // for the driver, which encodes tensor maps
  return *takes = wgmma_takes(x, forward), kOk;
}

template <typename T>
Status attention_sm90(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  AttentionWgmma<T> c = {};
  c.x = x, c.y = y, c.lse = lse;
  return dispatch_wgmma(x.z, [&](auto shapes) -> Status {
    using Shapes = decltype(shapes);
    if (x.extra.offsets || x.z.softcap != 0)
      return launch_attention_wgmma<T, typename Shapes::YExtra, WgmmaResult::y>(op, c, stream);
    return launch_attention_wgmma<T, typename Shapes::Y, WgmmaResult::y>(op, c, stream);
  });
}

template <typename T>
Status attention_backward_sm90(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk,
                               T *dv, float *space, void *stream) {
  AttentionWgmma<T> c = {};
  c.x = x, c.dq = dq, c.dk = dk, c.dv = dv, c.of_delta = y, c.delta = delta;
  const int variant = std::getenv("AOT_BWD") ? std::atoi(std::getenv("AOT_BWD")) : 1;
  if (dq && dk && dv && variant >= 0) {
    const auto pass = [&](auto shape) -> Status {
      AOT_TRY((launch_one_pass<T, decltype(shape)>(op, c, space, stream)));
      return kOk;
    };
    const auto watch = [&](auto shape) -> Status {
      AOT_TRY((Watchlaunch_one_pass<T, decltype(shape)>(op, c, space, stream)));
      aot_print_hangs<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>();
      return kOk;
    };
    const bool narrow = std::max(x.z.dim, x.z.v_dim) <= 64;
    if (variant == 0 && narrow) return Oldlaunch_one_pass<T, OldOnePassShape<64, 128, 3, 1>>(op, c, space, stream);
    if (variant == 0) return Oldlaunch_one_pass<T, OldOnePassShape<128, 64, 2, 2>>(op, c, space, stream);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (narrow) {
        if (variant == 11) return watch(WatchOnePassShape<64, 128, 2, 1, 2>());
        if (variant == 13) return watch(WatchOnePassShape<64, 128, 2, 1, 2, true, false>());
        if (variant == 5) return pass(OnePassShape<64, 128, 2, 1, 2, false, true, false>());
        if (variant == 2) return pass(OnePassShape<64, 128, 2, 2, 1>());
        if (variant == 3) return pass(OnePassShape<64, 128, 2, 1, 2, true, false>());
        if (variant == 4) return pass(OnePassShape<64, 128, 2, 2, 1, true, false>());
      }
      if (!narrow && variant > 10) return watch(WatchOnePassShape<128, 64, 2, 1, 2>());
      if (!narrow && variant == 5) return pass(OnePassShape<128, 64, 2, 1, 2, false, false, false>());
      if (!narrow && variant == 2) return pass(OnePassShape<128, 64, 3, 1, 1>());
    }
    if (narrow) return pass(OnePassShape<64, 128, 2, 1, 2>());
    return pass(OnePassShape<128, 64, 2, 1, 2>());
  }
  return dispatch_wgmma(x.z, [&](auto shapes) -> Status {
    using Shapes = decltype(shapes);
    if (dq) AOT_TRY((launch_attention_wgmma<T, typename Shapes::Dq, WgmmaResult::dq>(op, c, stream)));
    if (!dk && !dv) return kOk;
    return launch_attention_wgmma<T, typename Shapes::Dkv, WgmmaResult::dkv>(op, c, stream);
  });
}

#define AOT_ATTENTION(T)                                                                                               \
  template Status attention_sm90_takes(const char *, const AttentionInputs<T> &, bool, bool *);                        \
  template Status attention_sm90(const char *, const AttentionInputs<T> &, T *, float *, void *);                      \
  template Status attention_backward_sm90(const char *, const AttentionInputs<T> &, const T *, float *, T *, T *, T *, \
                                          float *, void *);
AOT_ATTENTION(__half)
AOT_ATTENTION(__nv_bfloat16)
#undef AOT_ATTENTION

}  // namespace AOT_ISA
}  // namespace aot
