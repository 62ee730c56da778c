// Calls an entry's InferShape and InferType, as MindSpore does, and writes their C++ vectors down as plain integers.
// A function of one output gives a vector (a number, for types), one of several a vector of them: `many`.
#include <cstdint>
#include <exception>
#include <vector>

using Shape = std::vector<int64_t>;
using Types = std::vector<int>;

// out: the number of outputs, then for each its ndim and its dimensions; -1 alone where the function threw.
extern "C" void infer_shape(void *function, int many, int *ndims, int64_t **shapes, void *extra, int64_t *out) try {
  std::vector<Shape> results;
  if (many)
    results = reinterpret_cast<std::vector<Shape> (*)(int *, int64_t **, void *)>(function)(ndims, shapes, extra);
  else
    results = {reinterpret_cast<Shape (*)(int *, int64_t **, void *)>(function)(ndims, shapes, extra)};
  *out++ = results.size();
  for (const Shape &shape : results) {
    *out++ = shape.size();
    for (int64_t dim : shape) *out++ = dim;
  }
} catch (const std::exception &) {
  *out = -1;
}

extern "C" void infer_type(void *function, int many, const int *types, int n, void *extra, int64_t *out) try {
  Types given(types, types + n), results;
  if (many)
    results = reinterpret_cast<Types (*)(Types, void *)>(function)(given, extra);
  else
    results = {reinterpret_cast<int (*)(Types, void *)>(function)(given, extra)};
  *out++ = results.size();
  for (int type : results) *out++ = type;
} catch (const std::exception &) {
  *out = -1;
}
