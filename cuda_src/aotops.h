/* libaotops.so for programs in C and C++: link it, or open it with dlopen. Include this, not aot.h, which is for
   authors of operators.

   An operator has an entry for each device, such as aot_gelu_cpu and aot_gelu_cuda. AOTOPS_DECLARE(aot_gelu_cpu)
   declares one with its companions. What an operator's inputs, outputs and attributes are, and in which order, is in
   the documentation of its Python function; outputs are followed by residuals and workspaces. */
#ifndef AOTOPS_H
#define AOTOPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The status that every function of type int returns; aot_last_error() says more. */
enum {
  AOTOPS_OK = 0,
  AOTOPS_INVALID_ARGUMENT = 1, /* a shape or an attribute */
  AOTOPS_UNSUPPORTED_DTYPE = 2,
  AOTOPS_NOT_IMPLEMENTED = 3,
  AOTOPS_DEVICE_ERROR = 4, /* of CUDA */
  AOTOPS_CONVENTION_MISUSED = 5 /* such as a wrong number of tensors */,
  AOTOPS_OUT_OF_MEMORY = 6 /* host memory */
};

/* Runs an operator. The arrays describe nparam tensors, inputs first, then outputs: address, number of axes, shape and
   dtype ("float32") of each. Tensors are dense and row-major. stream: a cudaStream_t; NULL on the CPU. extra: the
   attributes, after Init; NULL: all have their defaults. */
typedef int aotops_entry(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
                         void *extra);

/* Reads the attributes in extra once, before the first call. The other arguments may be NULL. */
typedef int aotops_init(int *ndims, int64_t **shapes, const char **dtypes, void *extra);

/* The shape and dtype of every output, residual and workspace, from the inputs. out_shapes has AOTOPS_MAX_NDIM elements
   for each of them. */
#define AOTOPS_MAX_NDIM 32
typedef int aotops_infer(int nparam, const int *ndims, int64_t *const *shapes, const char *const *dtypes, void *extra,
                         int *out_ndims, int64_t *out_shapes, const char **out_dtypes);

#define AOTOPS_DECLARE(entry) \
  aotops_entry entry;         \
  aotops_init entry##Init;    \
  aotops_infer entry##Infer

/* Attributes as text, one a line: "normalized_shape=8\neps=1e-05". The attributes "inputs" and "outputs" have bit i set
   if input or output i is given; without them every input is, and nparam determines the outputs. NULL: no memory. */
void *aot_extra_new(const char *attrs);
void aot_extra_delete(void *extra);

/* The message of the calling thread's last failed call, which it clears. */
const char *aot_last_error(void);
const char *aot_version(void);

/* Registers every operator, and the backward of each, with the LibTorch that is loaded in this process, as
   aotops::<name> with kernels for the CPU and CUDA. It needs LibTorch 2.10. A second call, or a call after Python's
   aotops.frontends.torch is imported, does nothing. Gradients are Python's: without it a backward pass takes that of an
   operator for zero, and LibTorch warns of it. */
int aot_torch_register(void);

/* Registers those of an author's library in the same way, as <name>::<operator>. path: of the shared library, which
   stays open. schemas: the text that `aotops schemas <name>` prints, of this version of aotops. Only operators whose
   entries are made with aot.h are in it. */
int aot_torch_register_library(const char *name, const char *path, const char *schemas);

/* XLA's handlers of custom calls: pass them to XLA_FFI_Handler_Register, for the platforms "Host" and "CUDA". The
   attributes of a custom call are strings: "entry", such as "aot_gelu", to which the device is added, and "attrs", the
   text for aot_extra_new. Results are the outputs, residuals and workspaces. aot_xla_cuda_scratch is for calls with an
   attribute "scratch" that is not empty: the last workspace is then allocated by the handler, and is not a result. */
struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;
struct XLA_FFI_Error *aot_xla_cpu(struct XLA_FFI_CallFrame *frame);
struct XLA_FFI_Error *aot_xla_cuda(struct XLA_FFI_CallFrame *frame);
struct XLA_FFI_Error *aot_xla_cuda_scratch(struct XLA_FFI_CallFrame *frame);

#ifdef __cplusplus
}
#endif

#endif
