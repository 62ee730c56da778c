// Compiled with -D_GLIBCXX_USE_CXX11_ABI=0: the strings in this vtable are the old ones, as in MindSpore's own build.
#include "extra.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
#error "compile this file with -D_GLIBCXX_USE_CXX11_ABI=0"
#endif

// The interface, slot by slot as in MindSpore's custom_aot_extra.h: the order of the virtual functions is the contract.
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

static_assert(sizeof(AotExtra) == sizeof(aot::ExtraView), "AotExtra is laid out as MindSpore lays it out");

namespace {

// Attributes kept as text; each getter reads what it is asked for, strictly.
class TextExtra final : public AotExtra {
 public:
  explicit TextExtra(const char *attrs) {
    for (const char *line = attrs; *line;) {
      const char *end = line + std::strcspn(line, "\n");
      const char *equals = static_cast<const char *>(std::memchr(line, '=', end - line));
      if (equals) values_[std::string(line, equals)] = std::string(equals + 1, end);
      line = *end ? end + 1 : end;
    }
  }
  ~TextExtra() override { delete kernel_data; }

  bool HasAttr(std::string name) override { return values_.count(name) != 0; }
  bool GetAttrBool(std::string name) override { return GetAttrInt(name) != 0; }
  int64_t GetAttrInt(std::string name) override {
    auto list = GetAttrIntVec(name);
    if (list.size() != 1) throw std::invalid_argument(name + " is not an integer");
    return list[0];
  }
  float GetAttrFloat(std::string name) override {
    auto list = GetAttrFloatVec(name);
    if (list.size() != 1) throw std::invalid_argument(name + " is not a number");
    return list[0];
  }
  std::string GetAttrStr(std::string name) override {
    auto found = values_.find(name);
    if (found == values_.end()) throw std::out_of_range("there is no attribute " + name);
    return found->second;
  }
  std::vector<int64_t> GetAttrIntVec(std::string name) override {
    return List<int64_t>(name, [](const char *s, char **end) { return std::strtoll(s, end, 10); });
  }
  std::vector<float> GetAttrFloatVec(std::string name) override { return List<float>(name, std::strtof); }
  std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) override { return {GetAttrIntVec(name)}; }
  std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) override { return {GetAttrFloatVec(name)}; }

 private:
  template <typename T, class Parse>
  std::vector<T> List(const std::string &name, Parse parse) {
    std::string text = GetAttrStr(name);
    std::vector<T> list;
    for (const char *s = text.c_str(); *s;) {
      char *end;
      list.push_back(static_cast<T>(parse(s, &end)));
      if (end == s || (*end && *end != ',')) throw std::invalid_argument(name + " is not a list of numbers");
      s = *end ? end + 1 : end;
    }
    return list;
  }
  std::map<std::string, std::string> values_;
};

// Runs `read` where the attribute is given. An exception of the host (a missing attribute, another type) ends here.
template <class Read>
int get(void *extra, const char *name, Read read) noexcept {
  try {
    auto *e = static_cast<AotExtra *>(extra);
    if (!e || !e->HasAttr(name)) return 0;
    return read(*e) ? 1 : -1;
  } catch (...) {
    return -1;
  }
}

}  // namespace

namespace aot {

int extra_get_bool(void *extra, const char *name, bool *value) noexcept {
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrBool(name), true; });
}

int extra_get_int(void *extra, const char *name, int64_t *value) noexcept {
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrInt(name), true; });
}

int extra_get_float(void *extra, const char *name, double *value) noexcept {
  int found = get(extra, name, [&](AotExtra &e) {
    std::string text = e.GetAttrStr(name);
    char *end;
    double number = std::strtod(text.c_str(), &end);
    if (text.empty() || *end) return false;
    *value = number;
    return true;
  });
  if (found >= 0) return found;
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrFloat(name), true; });
}

int extra_get_string(void *extra, const char *name, char *value, size_t capacity) noexcept {
  return get(extra, name, [&](AotExtra &e) {
    std::string text = e.GetAttrStr(name);
    if (text.size() >= capacity) return false;
    std::memcpy(value, text.c_str(), text.size() + 1);
    return true;
  });
}

int extra_get_ints(void *extra, const char *name, int64_t *value, int capacity, int *n) noexcept {
  return get(extra, name, [&](AotExtra &e) {
    std::vector<int64_t> list = e.GetAttrIntVec(name);
    if (list.size() > static_cast<size_t>(capacity)) return false;
    std::memcpy(value, list.data(), list.size() * sizeof(int64_t));
    *n = static_cast<int>(list.size());
    return true;
  });
}

void *extra_new(const char *attrs) noexcept {
  try {
    return static_cast<AotExtra *>(new TextExtra(attrs));
  } catch (...) {
    return nullptr;
  }
}

void extra_delete(void *extra) noexcept { delete static_cast<AotExtra *>(extra); }

}  // namespace aot
