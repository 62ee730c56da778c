// The AotExtra that an entry reads its attributes through where the host is not MindSpore. Its interface has
// std::string, whose layout depends on the ABI that a library was compiled for: text_extra_old.cpp and
// text_extra_new.cpp compile the class for each. extra_new (extra.h) makes one of attributes without types, for entries
// of this convention.
#pragma once
#include <string>
#include <vector>

#include "extra.h"

namespace aot {

// For hosted functions. `attrs`: items `name:value`, each followed by ";". A value is a letter for its type (b, i, f,
// s: bool, int, float, str; I, F: a list of these; J, G: a list of lists) and its text: lists separate by ",", lists of
// lists end each list with "|". What has another meaning is %XX. Null: out of memory, or another text.
void *typed_extra_new_strings(const char *attrs) noexcept;
void *typed_extra_old_strings(const char *attrs) noexcept;

// Whether an extra was made by extra_new, and so not by MindSpore.
bool extra_is_own(void *extra) noexcept;

// The parts of a text before each `end`. Of each std::string there is one.
inline std::vector<std::string> parts(const std::string &text, char end) {
  std::vector<std::string> found;
  for (size_t at = 0, stop; (stop = text.find(end, at)) != std::string::npos; at = stop + 1)
    found.push_back(text.substr(at, stop - at));
  return found;
}

// A text without its %XX.
inline std::string unquoted(const std::string &text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '%' && i + 2 < text.size())
      plain += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16)), i += 2;
    else plain += text[i];
  return plain;
}

}  // namespace aot
