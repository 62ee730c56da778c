// The strides of an elementwise operator's results: those that torch's own operators give.
#pragma once
#include <algorithm>
#include <cstdint>

#include "aot.h"

namespace aot {

// A tensor of LibTorch, as it was read.
struct TensorView {
  void *handle;  // null: absent
  int64_t ndim, *shape, *strides;
  int32_t dtype, device_type, device_index;
  void *data;

  int64_t size() const {
    int64_t n = 1;
    for (int64_t k = 0; k < ndim; ++k) n *= shape[k];
    return n;
  }
  bool has_strides(const int64_t *expected) const {
    for (int64_t k = 0; k < ndim; ++k)
      if (strides[k] != expected[k]) return false;
    return true;
  }
  // Whether the elements lie densely if `order` lists the axes from the innermost one.
  bool dense(const int *order) const {
    int64_t expected = 1;
    for (int64_t i = 0; i < ndim; ++i) {
      const int k = order[i];
      if (shape[k] != 1 && strides[k] != expected) return false;
      expected *= shape[k];
    }
    return true;
  }
  bool contiguous() const {
    int order[kMaxNdim];
    for (int64_t i = 0; i < ndim; ++i) order[i] = static_cast<int>(ndim - 1 - i);
    return dense(order) || size() == 0;
  }
};

// The order of two axes, from the innermost one, that torch gives the result of an elementwise operator: below 0, a
// lies inside b; 0: no input tells. torch._prims_common.compute_elementwise_output_logical_to_physical_perm.
inline int compare_axes(const TensorView *inputs, int n, int a, int b) {
  const auto at_least = [](int64_t x, int64_t y) { return y == 0 || (x != 0 && (x >= y || x % y == 0)); };
  for (int i = 0; i < n; ++i) {
    if (!inputs[i].handle) continue;
    const int64_t *shape = inputs[i].shape, stride_a = inputs[i].strides[a], stride_b = inputs[i].strides[b];
    if (stride_a == 0 || stride_b == 0) continue;
    if (stride_a == stride_b) {
      if (at_least(shape[b], shape[a])) continue;
      return 1;
    }
    if (at_least(stride_b, stride_a)) return -1;
    if (at_least(stride_a, stride_b)) return 1;
  }
  return 0;
}

// The strides that torch gives the result of an elementwise operator on inputs of one shape, not all contiguous.
inline void elementwise_strides(const TensorView *inputs, int n, int64_t *strides) {
  const TensorView &model = inputs[0];
  const int ndim = static_cast<int>(model.ndim);
  int order[kMaxNdim];  // from the innermost axis
  for (int i = 0; i < ndim; ++i) order[i] = ndim - 1 - i;
  constexpr int kChannelsLast[] = {1, 3, 2, 0};
  bool channels_last = ndim == 4;
  for (int i = 0; i < n && channels_last; ++i) channels_last = !inputs[i].handle || inputs[i].dense(kChannelsLast);
  if (channels_last) {
    std::copy_n(kChannelsLast, 4, order);
  } else {  // an insertion sort, because not every pair of axes has an order
    for (int i = 1; i < ndim; ++i)
      for (int at = i, before = i - 1; before >= 0; --before) {
        const int comparison = compare_axes(inputs, n, order[before], order[at]);
        if (comparison < 0) break;
        if (comparison > 0) std::swap(order[before], order[at]), at = before;
      }
  }
  int64_t stride = 1;
  for (int i = 0; i < ndim; ++i) strides[order[i]] = stride, stride *= std::max<int64_t>(model.shape[order[i]], 1);
}

}  // namespace aot
