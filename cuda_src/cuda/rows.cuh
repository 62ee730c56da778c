// The rows of a matrix, each by one block, which reads its row from memory for each pass: what is enough for most
// functions of a row. register_row.cuh is for kernels that read a row once.
#pragma once
#include "register_row.cuh"

namespace aot {
inline namespace AOT_ISA {

// In a kernel started by launch_rows(): f(i) for each row of this block. All threads of the block call it.
template <class F>
__device__ inline void each_row(int64_t rows, F f) {
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) f(i);
}

// kSums sums over a row, at once.
template <int kSums, typename A>
class RowSums {
 public:
  // Calls term(j, x, sum) for the elements x of a row, with their columns j; term adds to the elements of `sum`. All
  // threads of the block call it, and all get the same bits.
  template <typename T, class F>
  __device__ Sums<kSums, A> of(const T *row, int64_t cols, F term) {
    Sums<kSums, A> mine = {};
    for_each_in_row(row, cols, [&](int64_t j, A x) { term(j, x, mine.value); });
    return sum_row(mine, exchange_);
  }

 private:
  Exchange<Span::block, Sums<kSums, A>> exchange_;
};

// Starts a kernel with a block for each row.
template <typename... Parameters, typename... Arguments>
Status launch_rows(const char *op, void (*kernel)(Parameters...), int64_t rows, int64_t cols, void *stream,
                   const Arguments &...arguments) {
  return launch_kernel(op, kernel, {grid_size(rows), any_row_block(cols)}, stream, arguments...);
}

}  // namespace AOT_ISA
}  // namespace aot
