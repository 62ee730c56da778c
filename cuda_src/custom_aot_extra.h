// The class behind `extra`, with the interface of MindSpore's file of this name, for kernels of its convention that
// read attributes, ask for workspaces or keep data:
//
//   extra->Attr<float>("scale")    extra->SetWorkSpace({bytes})    extra->SetKernelData(data)
//
// Such a file is compiled with -D_GLIBCXX_USE_CXX11_ABI=0, as MindSpore's own build is: the std::string here is that of
// the file that includes this. The namespace is that of the string's ABI, which is not part of a class's name. It is
// not an unnamed one: the compiler would take the classes of a file for all that there are, and call theirs for a
// host's object.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "extra.h"

#if _GLIBCXX_USE_CXX11_ABI
inline namespace new_strings {
#else
inline namespace old_strings {
#endif

// The order of the virtual functions, its vtable, and of the members must be those of MindSpore's.
class AotExtra {
 public:
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;

  // An attribute that is missing, or of another type than T, is an exception.
  template <typename T>
  T Attr(std::string name) const;

  void SetWorkSpace(const std::vector<size_t> &sizes) { workspace = sizes; }
  const std::vector<size_t> &WorkSpace() const { return workspace; }
  // Is deleted with this object.
  void SetKernelData(AotKernelData *data) { kernel_data = data; }
  AotKernelData *KernelData() const { return kernel_data; }

  std::vector<size_t> workspace;  // in bytes
  AotKernelData *kernel_data = nullptr;

  virtual bool GetAttrBool(std::string name) = 0;
  virtual int64_t GetAttrInt(std::string name) = 0;
  virtual float GetAttrFloat(std::string name) = 0;
  virtual std::string GetAttrStr(std::string name) = 0;
  virtual std::vector<int64_t> GetAttrIntVec(std::string name) = 0;
  virtual std::vector<float> GetAttrFloatVec(std::string name) = 0;
  virtual std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) = 0;
  virtual std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) = 0;
};

static_assert(sizeof(AotExtra) == sizeof(aot::ExtraView), "AotExtra has the layout of MindSpore's build");

#define AOT_ATTR(T, Get)                            \
  template <>                                       \
  inline T AotExtra::Attr(std::string name) const { \
    return const_cast<AotExtra *>(this)->Get(name); \
  }
AOT_ATTR(bool, GetAttrBool)
AOT_ATTR(int64_t, GetAttrInt)
AOT_ATTR(float, GetAttrFloat)
AOT_ATTR(std::string, GetAttrStr)
AOT_ATTR(std::vector<int64_t>, GetAttrIntVec)
AOT_ATTR(std::vector<float>, GetAttrFloatVec)
AOT_ATTR(std::vector<std::vector<int64_t>>, GetAttrInt2DVec)
AOT_ATTR(std::vector<std::vector<float>>, GetAttrFloat2DVec)
#undef AOT_ATTR
}
