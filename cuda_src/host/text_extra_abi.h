// The class of foreign_extra.h, for the std::string of the file that includes this one. FOREIGN_EXTRA names the
// function.
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "custom_aot_extra.h"
#include "text_extra.h"

namespace {

std::string unquoted(const std::string &text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '%' && i + 2 < text.size())
      plain += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16)), i += 2;
    else plain += text[i];
  return plain;
}

// The parts before each `end`.
std::vector<std::string> parts(const std::string &text, char end) {
  std::vector<std::string> found;
  for (size_t at = 0, stop; (stop = text.find(end, at)) != std::string::npos; at = stop + 1)
    found.push_back(text.substr(at, stop - at));
  return found;
}

void read(const std::string &text, int64_t *value) { *value = std::stoll(text); }
// Python's repr(float), which has no decimal comma; the locale of the process may have one.
void read(const std::string &text, float *value) { *value = static_cast<float>(aot::decimal(text.c_str())); }

template <typename T>
std::vector<T> list(const std::string &text) {
  std::vector<T> values;
  if (!text.empty())
    for (const std::string &part : parts(text + ",", ',')) read(part, &values.emplace_back());
  return values;
}

template <typename T>
std::vector<std::vector<T>> lists(const std::string &text) {
  std::vector<std::vector<T>> values;
  for (const std::string &part : parts(text, '|')) values.push_back(list<T>(part));
  return values;
}

class ForeignExtra final : public AotExtra {
 public:
  explicit ForeignExtra(const std::string &attrs) {
    for (const std::string &item : parts(attrs, ';')) {
      const size_t colon = item.find(':');
      values_[unquoted(item.substr(0, colon))] = item.substr(colon + 1);
    }
  }
  ~ForeignExtra() override { delete kernel_data; }

  bool HasAttr(std::string name) override { return values_.count(name) != 0; }
  bool GetAttrBool(std::string name) override { return Value(name, 'b') == "1"; }
  int64_t GetAttrInt(std::string name) override { return std::stoll(Value(name, 'i')); }
  float GetAttrFloat(std::string name) override {
    float value;
    return read(Value(name, 'f'), &value), value;
  }
  std::string GetAttrStr(std::string name) override { return unquoted(Value(name, 's')); }
  std::vector<int64_t> GetAttrIntVec(std::string name) override { return list<int64_t>(Value(name, 'I')); }
  std::vector<float> GetAttrFloatVec(std::string name) override { return list<float>(Value(name, 'F')); }
  std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) override {
    return lists<int64_t>(Value(name, 'J'));
  }
  std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) override {
    return lists<float>(Value(name, 'G'));
  }

 private:
  // As MindSpore's own: an attribute is read as exactly the type that it has.
  std::string Value(const std::string &name, char kind) const {
    const auto found = values_.find(name);
    if (found == values_.end()) {
      std::string names;
      for (const auto &value : values_) names += (names.empty() ? "" : ", ") + value.first;
      throw std::out_of_range("there is no attribute " + name + "; there are " + (names.empty() ? "none" : names));
    }
    if (found->second[0] == kind) return found->second.substr(1);
    throw std::invalid_argument("attribute " + name + " is " + Type(found->second[0]) + ", the entry reads it as " +
                                Type(kind));
  }
  static std::string Type(char kind) {
    switch (kind) {
      case 'b':
        return "bool";
      case 'i':
        return "int";
      case 'f':
        return "float";
      case 's':
        return "str";
      case 'I':
        return "int[]";
      case 'F':
        return "float[]";
      case 'J':
        return "int[][]";
      default:
        return "float[][]";
    }
  }
  std::map<std::string, std::string> values_;
};

}  // namespace

void *aot::FOREIGN_EXTRA(const char *attrs) noexcept {
  try {
    return static_cast<AotExtra *>(new ForeignExtra(attrs));
  } catch (...) {
    return nullptr;
  }
}
