// The class behind `extra`, with the std::string of the file that includes this. Its namespace is that of the string's
// ABI, which is not part of a class's name. It is not an unnamed one: the compiler would take the classes of a file for
// all that there are, and call theirs for a host's object.
#pragma once
#include <string>
#include <vector>

#include "extra.h"

#if _GLIBCXX_USE_CXX11_ABI
inline namespace new_strings {
#else
inline namespace old_strings {
#endif

// The interface of MindSpore's custom_aot_extra.h. The order of the virtual functions, its vtable, must be the same.
class AotExtra {
 public:
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;

  std::vector<size_t> workspace;
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
}
