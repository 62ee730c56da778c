// The loops that a textbook would write, float32, for ../loops.py, which builds this file alone.
#include <cstdint>

extern "C" void add(const float *a, const float *b, float *c, int64_t n) {
  for (int64_t i = 0; i < n; ++i) c[i] = a[i] + b[i];
}

extern "C" void matmul(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float total = 0;
      for (int64_t p = 0; p < k; ++p) total += a[i * k + p] * b[p * n + j];
      c[i * n + j] = total;
    }
}

// x: batch, channels, height, width. w: filters, channels, side, side. No padding, stride 1.
extern "C" void conv2d(const float *x, const float *w, float *y, int64_t batch, int64_t channels, int64_t height,
                       int64_t width, int64_t filters, int64_t side) {
  int64_t rows = height - side + 1, cols = width - side + 1;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t f = 0; f < filters; ++f)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; ++j) {
          float total = 0;
          for (int64_t c = 0; c < channels; ++c)
            for (int64_t di = 0; di < side; ++di)
              for (int64_t dj = 0; dj < side; ++dj)
                total += x[((b * channels + c) * height + i + di) * width + j + dj] *
                         w[((f * channels + c) * side + di) * side + dj];
          y[((b * filters + f) * rows + i) * cols + j] = total;
        }
}
