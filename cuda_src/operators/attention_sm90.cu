#include "attention_wgmma_backward.cuh"

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
  if constexpr (kWgmmaAdds<T>)
    if (x.extra.mask || x.extra.bias)
      return dispatch_wgmma(x.z, [&](auto shapes) -> Status {
        using Shapes = decltype(shapes);
        if (x.extra.mask) return launch_attention_wgmma<T, typename Shapes::YMask, WgmmaResult::y>(op, c, stream);
        return launch_attention_wgmma<T, typename Shapes::YBias, WgmmaResult::y>(op, c, stream);
      });
  if constexpr (kWgmmaAdds<T>)
    if (x.extra.dropout)
      return dispatch_wgmma(x.z, [&](auto shapes) -> Status {
        return launch_attention_wgmma<T, typename decltype(shapes)::YDropped, WgmmaResult::y>(op, c, stream);
      });
  if (!x.plain() || x.z.softcap != 0)
    return dispatch_wgmma(x.z, [&](auto shapes) -> Status {
      return launch_attention_wgmma<T, typename decltype(shapes)::YExtra, WgmmaResult::y>(op, c, stream);
    });
  return dispatch_wgmma_y(x.z, [&](auto shape) -> Status {
    return launch_attention_wgmma<T, decltype(shape), WgmmaResult::y>(op, c, stream);
  });
}

template <class Shapes, WgmmaAdded kAdded, typename T>
Status run_added_backward(const char *op, const AttentionWgmma<T> &c, void *stream) {
  using Dq = typename Shapes::template DqAdded<kAdded>;
  using Dkv = typename Shapes::template DkvAdded<kAdded>;
  if (c.dq) AOT_TRY((launch_attention_wgmma<T, Dq, WgmmaResult::dq>(op, c, stream)));
  return c.dk || c.dv ? launch_attention_wgmma<T, Dkv, WgmmaResult::dkv>(op, c, stream) : kOk;
}

template <typename T>
Status attention_backward_sm90(const char *op, const AttentionInputs<T> &x, const T *y, float *delta, T *dq, T *dk,
                               T *dv, float *space, void *stream) {
  AttentionWgmma<T> c = {};
  c.x = x, c.dq = dq, c.dk = dk, c.dv = dv, c.of_delta = y, c.delta = delta;
  if constexpr (kWgmmaAdds<T>)
    if (x.extra.mask || x.extra.bias)
      return dispatch_wgmma(x.z, [&](auto shapes) -> Status {
        using Shapes = decltype(shapes);
        if (x.extra.mask) return run_added_backward<Shapes, WgmmaAdded::mask>(op, c, stream);
        return run_added_backward<Shapes, WgmmaAdded::bias>(op, c, stream);
      });
  if (std::max(x.z.dim, x.z.v_dim) > 128) return attention_backward_wide_sm90<T>(op, x, y, delta, dq, dk, dv, stream);
  if (dq && dk && dv) {
    if (std::max(x.z.dim, x.z.v_dim) <= 64)
      return launch_one_pass<T, OnePassShape<64, 128, 2, 2, 1, true>>(op, c, space, stream);
    return launch_one_pass<T, OnePassShape<128, 64, 2, 1, 2, false>>(op, c, space, stream);
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
