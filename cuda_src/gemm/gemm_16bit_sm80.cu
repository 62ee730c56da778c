#include "gemm_sm80.cuh"

template aot::Status aot::gemm_sm80<__half>(const char *, const GemmParams &, bool, cudaStream_t, bool *);
template aot::Status aot::gemm_sm80<__nv_bfloat16>(const char *, const GemmParams &, bool, cudaStream_t, bool *);
