/* Calls an entry of libaotops.so from plain C: LayerNorm of two rows of four numbers.

       gcc layer_norm.c -I$(python -m aotops include-dir) -L$LIB -laotops -Wl,-rpath,$LIB -o layer_norm */
#include <stdint.h>
#include <stdio.h>

#include "aotops.h"

AOTOPS_DECLARE(aot_layer_norm_cpu);

int main(void) {
  float x[] = {1, 2, 3, 4, 10, 10, 10, 14}, y[8];
  int64_t shape[] = {2, 4}, *shapes[] = {shape, shape};
  void *tensors[] = {x, y};
  int ndims[] = {2, 2}, status;
  const char *dtypes[] = {"float32", "float32"};

  /* Only the first of the inputs x, weight and bias is given: bit 0. */
  void *attributes = aot_extra_new("normalized_shape=4\neps=1e-05\ninputs=1");
  status = aot_layer_norm_cpuInit(NULL, NULL, NULL, attributes);
  if (!status) status = aot_layer_norm_cpu(2, tensors, ndims, shapes, dtypes, NULL, attributes);
  if (!status)
    for (int row = 0; row < 2; ++row)
      printf("%7.4f %7.4f %7.4f %7.4f\n", y[4 * row], y[4 * row + 1], y[4 * row + 2], y[4 * row + 3]);

  /* An error: nothing was computed. */
  if (!status) {
    dtypes[0] = dtypes[1] = "int32";
    if (aot_layer_norm_cpu(2, tensors, ndims, shapes, dtypes, NULL, attributes)) printf("%s\n", aot_last_error());
  } else {
    printf("%s\n", aot_last_error());
  }
  aot_extra_delete(attributes);
  return status;
}
