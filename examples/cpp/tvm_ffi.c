/* Calls an operator through tvm-ffi's C ABI: LayerNorm of two rows of four numbers.

       gcc tvm_ffi.c $(tvm-ffi-config --cflags --ldflags --libs) -L$LIB -laotops -Wl,-rpath,... -o tvm_ffi */
#include <stdint.h>
#include <stdio.h>
#include <tvm/ffi/c_api.h>

int __tvm_ffi_layer_norm(void *self, const TVMFFIAny *args, int32_t n_args, TVMFFIAny *result);

static TVMFFIAny tensor(DLTensor *t) {
  TVMFFIAny any = {.type_index = kTVMFFIDLTensorPtr, .v_ptr = t};
  return any;
}

int main(void) {
  float x[] = {1, 2, 3, 4, 10, 10, 10, 14}, y[8];
  int64_t shape[] = {2, 4};
  DLTensor x_tensor = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0}, y_tensor = x_tensor;
  y_tensor.data = y;

  /* Inputs, attributes and outputs. None is an absent weight or bias; the attributes eps and weight_offset have their
     defaults. */
  TVMFFIAny none = {.type_index = kTVMFFINone}, result = none;
  TVMFFIAny normalized_shape = {.type_index = kTVMFFIInt, .v_int64 = 4};
  TVMFFIAny args[] = {tensor(&x_tensor), none, none, normalized_shape, none, none, tensor(&y_tensor)};
  if (__tvm_ffi_layer_norm(NULL, args, 7, &result)) return 1;
  for (int row = 0; row < 2; ++row)
    printf("%7.4f %7.4f %7.4f %7.4f\n", y[4 * row], y[4 * row + 1], y[4 * row + 2], y[4 * row + 3]);

  /* An error: nothing was computed. */
  x_tensor.dtype.code = kDLInt;
  if (__tvm_ffi_layer_norm(NULL, args, 7, &result)) {
    TVMFFIObjectHandle error;
    TVMFFIErrorMoveFromRaised(&error);
    TVMFFIErrorCell *cell = (TVMFFIErrorCell *)((char *)error + sizeof(TVMFFIObject));
    printf("%s: %s\n", cell->kind.data, cell->message.data);
    TVMFFIObjectDecRef(error);
  }
  return 0;
}
