// The class of text_extra.h, for the std::string of the file that includes this one.
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "custom_aot_extra.h"
#include "text_extra.h"

namespace {

class TextExtra final : public AotExtra {
 public:
  // `typed`: items `name:value`, each followed by ";", as typed_extra_new_strings takes them; else lines `name=value`,
  // as extra_new does, of which each getter takes what is a value of its type.
  TextExtra(const std::string &attrs, bool typed) {
    for (const std::string &item : aot::parts(typed ? attrs : attrs + "\n", typed ? ';' : '\n')) {
      const size_t end = item.find(typed ? ':' : '=');
      if (!typed && end == std::string::npos) continue;
      const char kind = typed ? item.at(end + 1) : '\0';
      const std::string text = item.substr(end + 1 + typed);
      values_[typed ? aot::unquoted(item.substr(0, end)) : item.substr(0, end)] = {
          kind, kind == 's' ? aot::unquoted(text) : text};
    }
  }
  ~TextExtra() override { delete kernel_data; }

  bool HasAttr(std::string name) override { return values_.count(name) != 0; }
  bool GetAttrBool(std::string name) override {
    const int64_t value = Number<int64_t>(Text(name, 'b'));
    if (value != 0 && value != 1) throw std::invalid_argument(name + " is not a bool");
    return value != 0;
  }
  int64_t GetAttrInt(std::string name) override { return Number<int64_t>(Text(name, 'i')); }
  float GetAttrFloat(std::string name) override { return Number<float>(Text(name, 'f')); }
  std::string GetAttrStr(std::string name) override { return Text(name, 's'); }
  std::vector<int64_t> GetAttrIntVec(std::string name) override { return List<int64_t>(Text(name, 'I')); }
  std::vector<float> GetAttrFloatVec(std::string name) override { return List<float>(Text(name, 'F')); }
  std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) override {
    return Lists<int64_t>(Text(name, 'J'));
  }
  std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) override { return Lists<float>(Text(name, 'G')); }

 private:
  struct Value {
    char kind;  // '\0': not told. No attribute of an entry that is not hosted is a list of lists
    std::string text;
  };

  // As MindSpore's own: an attribute is read as exactly the type that it has.
  const std::string &Text(const std::string &name, char kind) const {
    const auto found = values_.find(name);
    if (found == values_.end()) {
      std::string names;
      for (const auto &value : values_) names += (names.empty() ? "" : ", ") + value.first;
      throw std::out_of_range("there is no attribute " + name + "; there are " + (names.empty() ? "none" : names));
    }
    const Value &value = found->second;
    if (value.kind == kind || (!value.kind && kind != 'J' && kind != 'G')) return value.text;
    throw std::invalid_argument("attribute " + name + " is " + Type(value.kind) + ", the entry reads it as " +
                                Type(kind));
  }
  static std::string Type(char kind) {
    constexpr char kinds[] = "bifsIFJG";
    constexpr const char *names[] = {"bool", "int", "float", "str", "int[]", "float[]", "int[][]", "float[][]", "text"};
    return names[std::strcspn(kinds, std::string(1, kind).c_str())];
  }

  // Strict, and in the C locale, whatever the process's: floats are Python's repr.
  template <typename T>
  static T Number(const std::string &text) {
    if constexpr (std::is_same_v<T, float>) {
      const double value = aot::decimal(text.c_str());
      if (!std::isnan(value) || text == "nan" || text == "-nan") return static_cast<float>(value);
    } else {
      T value;
      const char *end = text.data() + text.size();
      const auto read = std::from_chars(text.data(), end, value);
      if (read.ec == std::errc{} && read.ptr == end) return value;
    }
    throw std::invalid_argument("'" + text + "' is not a number");
  }
  template <typename T>
  static std::vector<T> List(const std::string &text) {
    std::vector<T> values;
    if (!text.empty())
      for (const std::string &part : aot::parts(text + ",", ',')) values.push_back(Number<T>(part));
    return values;
  }
  template <typename T>
  static std::vector<std::vector<T>> Lists(const std::string &text) {
    std::vector<std::vector<T>> values;
    for (const std::string &part : aot::parts(text, '|')) values.push_back(List<T>(part));
    return values;
  }
  std::map<std::string, Value> values_;
};

AotExtra *new_extra(const char *attrs, bool typed) noexcept {
  try {
    return new TextExtra(attrs, typed);
  } catch (...) {
    return nullptr;
  }
}

}  // namespace
