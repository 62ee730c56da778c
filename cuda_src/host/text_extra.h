// The AotExtra that a hosted entry reads its attributes through. Its interface has std::string, whose layout depends on
// the ABI that a library was compiled for: foreign_extra_old.cpp and foreign_extra_new.cpp compile the class for each.
#pragma once
#include "extra.h"

namespace aot {

// `attrs`: items `name:value`, each followed by ";". A value is a letter for its type (b, i, f, s: bool, int, float,
// str; I, F: a list of these; J, G: a list of lists) and its text: lists separate by ",", lists of lists end each list
// with "|". What has another meaning is %XX. Null: out of memory, or another text.
void *foreign_extra_new_strings(const char *attrs) noexcept;
void *foreign_extra_old_strings(const char *attrs) noexcept;

// Whether an extra was made by extra_new (extra.cpp, which defines this), and so not by MindSpore.
bool extra_is_own(void *extra) noexcept;

}  // namespace aot
