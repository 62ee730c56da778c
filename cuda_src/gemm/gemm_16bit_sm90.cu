#include "gemm_sm90.cuh"

template aot::Status aot::gemm_sm90<__half>(const char *, const GemmParams &, int, int, cudaStream_t, bool *);
template aot::Status aot::gemm_sm90<__nv_bfloat16>(const char *, const GemmParams &, int, int, cudaStream_t, bool *);
