// Compiled with -D_GLIBCXX_USE_CXX11_ABI=0: the strings in AotExtra's interface have the old ABI, as in MindSpore's
// build.
#include "custom_aot_extra.h"

#include <locale.h>

#include <algorithm>
#include <charconv>
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

namespace {

// Numbers are parsed in the C locale, whatever the process's locale. Each function returns whether the whole text is a
// number.

bool parse(const std::string &text, int64_t *value) {
  const char *end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, *value);
  return read.ec == std::errc{} && read.ptr == end;
}

// The format of Python's repr(float): digits, or inf or nan with an optional sign. Spaces and hexadecimal digits, which
// strtod accepts, are refused, and so are numbers beyond the largest double, which it reads as infinity.
bool parse(const std::string &text, double *value) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", locale_t{});
  const size_t sign = text[0] == '-';
  const bool word = !text.compare(sign, std::string::npos, "inf") || !text.compare(sign, std::string::npos, "nan");
  if (!c || text.empty() || (!word && text.find_first_not_of("0123456789+-.eE") != std::string::npos)) return false;
  char *end;
  const double number = strtod_l(text.c_str(), &end, c);
  if (end != text.c_str() + text.size() || (std::isinf(number) && !word)) return false;
  return *value = number, true;
}

// Attributes as text, which each getter parses strictly as its type.
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
  bool GetAttrBool(std::string name) override {
    const int64_t value = GetAttrInt(name);
    if (value != 0 && value != 1) throw std::invalid_argument(name + " is not a bool");
    return value != 0;
  }
  int64_t GetAttrInt(std::string name) override { return Parse<int64_t>(name, GetAttrStr(name)); }
  float GetAttrFloat(std::string name) override { return static_cast<float>(Parse<double>(name, GetAttrStr(name))); }
  std::string GetAttrStr(std::string name) override {
    auto found = values_.find(name);
    if (found == values_.end()) throw std::out_of_range("there is no attribute " + name);
    return found->second;
  }
  std::vector<int64_t> GetAttrIntVec(std::string name) override { return List<int64_t, int64_t>(name); }
  std::vector<float> GetAttrFloatVec(std::string name) override { return List<float, double>(name); }
  // No attribute of an operator of this convention is a list of lists.
  std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) override { return {GetAttrIntVec(name)}; }
  std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) override { return {GetAttrFloatVec(name)}; }

 private:
  template <typename T>
  static T Parse(const std::string &name, const std::string &text) {
    T value;
    if (!parse(text, &value)) throw std::invalid_argument(name + " is not a number");
    return value;
  }
  template <typename T, typename Parsed>
  std::vector<T> List(const std::string &name) {
    const std::string text = GetAttrStr(name);
    std::vector<T> list;
    for (size_t at = 0, comma; !text.empty() && at != std::string::npos; at = comma + (comma != std::string::npos)) {
      comma = text.find(',', at);
      list.push_back(static_cast<T>(Parse<Parsed>(name, text.substr(at, comma - at))));
    }
    return list;
  }
  std::map<std::string, std::string> values_;
};

// Calls `read` if the attribute is given. Catches the host's exceptions, such as for a missing attribute or another
// type.
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
  const int found = get(extra, name, [&](AotExtra &e) { return parse(e.GetAttrStr(name), value); });
  if (found >= 0) return found;
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrFloat(name), true; });
}

int extra_get_string(void *extra, const char *name, char *value, size_t capacity) noexcept {
  return get(extra, name, [&](AotExtra &e) {
    std::string text = e.GetAttrStr(name);
    if (text.size() >= capacity || text.find('\0') != std::string::npos) return false;
    std::memcpy(value, text.c_str(), text.size() + 1);
    return true;
  });
}

int extra_take_string(void *extra, const char *name, void (*take)(void *context, const char *text),
                      void *context) noexcept {
  return get(extra, name, [&](AotExtra &e) { return take(context, e.GetAttrStr(name).c_str()), true; });
}

double decimal(const char *text) noexcept {
  double value;
  return parse(std::string(text), &value) ? value : std::nan("");
}

int extra_get_ints(void *extra, const char *name, int64_t *value, int capacity, int *n) noexcept {
  return get(extra, name, [&](AotExtra &e) {
    std::vector<int64_t> list = e.GetAttrIntVec(name);
    if (list.size() > static_cast<size_t>(capacity)) return false;
    std::copy(list.begin(), list.end(), value);
    *n = static_cast<int>(list.size());
    return true;
  });
}

void *extra_new(const char *attrs) noexcept {
  try {
    return static_cast<AotExtra *>(new TextExtra(attrs ? attrs : ""));
  } catch (...) {
    return nullptr;
  }
}

bool extra_is_own(void *extra) noexcept;  // host/text_extra.h

bool extra_is_own(void *extra) noexcept {
  static TextExtra own("");
  return extra_view(extra)->vtable == extra_view(static_cast<AotExtra *>(&own))->vtable;
}

void extra_delete(void *extra) noexcept { delete static_cast<AotExtra *>(extra); }

}  // namespace aot
